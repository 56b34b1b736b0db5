"""Devices that the configuration names, of any kind: they are counted, and given to one task at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.devices import DEVICES_MAX, GPU, Device
from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.model.config import DeviceConfig


def configured_devices(config: Sequence[DeviceConfig]) -> tuple[Device, ...]:
    """Devices of the configuration. Raises ConfigError if one is named twice, or there are too many."""
    found: dict[str, Device] = {}
    for one in config:
        for number, name in enumerate(one.ids):
            device = Device(f"{one.kind}:{name}", one.kind, number)
            if device.id in found or one.kind == GPU:
                why = "a GPU is found by itself" if one.kind == GPU else "it is named twice"
                raise ConfigError("device", f"{one.kind} {name} cannot be used", why=why)
            found[device.id] = device
    if len(found) > DEVICES_MAX // 2:
        raise ConfigError("device", f"{len(found)} devices are named", why=f"at most {DEVICES_MAX // 2} can be")
    return tuple(found.values())
