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
    from collections.abc import Callable, Mapping

    from peerload.agent.sensors.device_locks import DeviceLocks
    from peerload.agent.store.event_log import EventLog
    from peerload.core.resources.admission import Ledger
    from peerload.model.config import AgentConfig
    from peerload.model.devices import Device
    from peerload.model.events import Event

FAULTS_FILE = "gpus"
"""The file of STATE in which it is kept what GPUs have reported."""


class NodeGpuHost:
    """The `GpuHost` of an agent."""

    def __init__(self, ledger: Ledger, journal: EventLog) -> None:
        self._ledger = ledger
        self._journal = journal

    def holding(self) -> Mapping[str, tuple[str, ...]]:
        """See `GpuHost`."""
        return self._ledger.devices.holding

    def wants_gpus(self) -> bool:
        """See `GpuHost`."""
        return bool(self.holding()) or self._ledger.waits_for_devices

    def gpu_changed(self, state: str, words: str) -> None:
        """See `GpuHost`. It goes into the event log."""
        self._journal.happened("gpu", state, reason=words)


def node_gpus(
    config: AgentConfig,
    put: Callable[[Event], None],
    claims: DeviceLocks,
    library: Any = None,  # noqa: ANN401 -- a module without types
) -> Gpus:
    """The GPU sensors as configured. library: what speaks like `pynvml` and plays cards that are this agent's alone; None: this
    machine's driver is looked for."""
    excluded = tuple(map(str, config.gpu.exclude))

    def usable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Without those that the config excludes, and those that another agent of this machine has."""
        left = tuple(device for device in devices if not any(is_meant(device, name) for name in excluded))
        return claims.claim(left) if library is None else left

    faults = GpuFaults(machine_boot_id(), Path(config.state) / FAULTS_FILE)
    return Gpus(put, library, listed(config.device), usable, faults)
