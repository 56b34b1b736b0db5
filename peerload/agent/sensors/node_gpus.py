"""The GPU sensors of one agent, and what they are to know of its tasks and its config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.agent.sensors.gpu_health import GpuFaults
from peerload.agent.sensors.gpus import Gpus
from peerload.config.configured_devices import listed
from peerload.core.resources.placement import is_meant
from peerload.security.private_files import machine_boot_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.agent.parts import Parts
    from peerload.model.devices import Device

ILLNESSES = "gpus"
"""The file of STATE in which it is kept what GPUs have reported."""


def node_gpus(parts: Parts, library: Any = None) -> Gpus:  # noqa: ANN401 -- a module without types
    """``library``: what speaks like `pynvml` and plays cards that are this agent's alone; None: this machine's driver is
    looked for."""

    def usable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Without those that the config excludes, and those that another agent of this machine has."""
        excluded = tuple(map(str, parts.config.gpu.exclude))
        left = tuple(device for device in devices if not any(is_meant(device, name) for name in excluded))
        return parts.claims.claim(left) if library is None else left

    def held() -> Mapping[str, tuple[str, ...]]:
        return parts.node.ledger.devices.holding

    def is_wanted() -> bool:
        return bool(held()) or parts.node.ledger.waits_for_devices

    return Gpus(
        parts.inbox.put,
        library,
        listed(parts.config.device),
        usable,
        held=held,
        is_wanted=is_wanted,
        happened=lambda state, words: parts.journal.happened("gpu", state, reason=words),
        illnesses=GpuFaults(machine_boot_id(), Path(parts.config.state) / ILLNESSES),
    )
