"""Devices that the configuration names."""

from __future__ import annotations

import pytest

from peerload.config.loader import configured_devices
from peerload.model.config import DeviceConfig
from peerload.model.errors import ConfigError
from tests.each import each


def test_devices_of_the_config() -> None:
    config = (DeviceConfig(kind="fpga", ids=("a", "b")), DeviceConfig(kind="licence", ids=("1",)))
    assert [device.id for device in configured_devices(config)] == ["fpga:a", "fpga:b", "licence:1"]


@each("bad", [(DeviceConfig(kind="gpu", ids=("0",)),), (DeviceConfig(kind="fpga", ids=("a", "a")),)])
def test_a_gpu_is_found_by_itself_and_nothing_is_there_twice(bad: tuple[DeviceConfig, ...]) -> None:
    with pytest.raises(ConfigError):
        configured_devices(bad)
