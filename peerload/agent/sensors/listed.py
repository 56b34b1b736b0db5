"""Devices that the configuration names, of any kind: they are counted, and given to one task at a time; and what a task is
told of the devices that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.devices import DEVICES_MAX, GPU, Device
from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from peerload.model.config import DeviceConfig

PLACEHOLDER = "{ids}"


def listed(config: Sequence[DeviceConfig]) -> tuple[Device, ...]:
    """The devices of the config. Raises ConfigError if one is named twice, or there are too many."""
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


def variables(devices: Iterable[str], config: Sequence[DeviceConfig]) -> dict[str, str]:
    """The environment variables by which a task knows its devices (ids). A task without a GPU sees none."""
    by_maker: dict[str, list[str]] = {}
    for device in devices:
        maker, _, name = device.partition(":")
        by_maker.setdefault(maker, []).append(name)
    gpus = by_maker.pop("nvidia", [])
    told = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for kind, names in by_maker.items():
        told[f"PEERLOAD_{kind.upper().replace('-', '_')}"] = ",".join(names)
        for one in config:
            if one.kind == kind:
                told |= {name: value.replace(PLACEHOLDER, ",".join(names)) for name, value in one.env.items()}
    return told
