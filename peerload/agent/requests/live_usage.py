"""Live resource usage of tasks that run on this node, for `show` and `top`.

The launcher reads it on request, at most twice a second for one task, however many clients ask.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.agent.control.task_ids import REF
from peerload.agent.runtime import now
from peerload.agent.views import remote_task
from peerload.core.work import HomePhase, RemotePhase
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.launcher.mps import MpsDaemons
    from peerload.agent.sensors.energy import EnergySensors
    from peerload.core.node import Node
    from peerload.core.resources.devices import DeviceGrant, DeviceState

FRESH_S = 0.5
"""Age up to which a reading is reused."""
RATE_S_MAX = 30.0
"""Maximum distance of two readings from which the busy cores are computed."""
KEPT_MAX = 1024
"""Tasks whose last reading is kept."""


class UsageReading(NamedTuple):
    """One reading of one task. at_s: CLOCK_BOOTTIME; cpu_s: -1 = unknown; cpus_busy: since the reading before, None if
    there is none, or it is too old; memory_bytes: -1 = unknown."""

    at_s: float
    cpu_s: float
    memory_bytes: int
    processes: int
    cpus_busy: float | None = None


class LiveUsage:
    """Readings of one agent, with the last of each task."""

    def __init__(
        self, node: Node, launcher: LauncherLink, task_ids: TaskIds, energy: EnergySensors, mps: MpsDaemons
    ) -> None:
        self._node = node
        self._launcher = launcher
        self._task_ids = task_ids
        self._energy = energy
        self._mps = mps
        self._lock = asyncio.Lock()
        self._last: dict[str, UsageReading] = {}

    async def readings(self, refs: Sequence[str]) -> list[dict[str, object]]:
        """Read the usage of those of these tasks that run here: id node cpu_s cpus_busy memory_bytes processes joules gpus, null for
        unknown. Raises NoSuchTask or BadRequest for an unknown task of this home."""
        keys = {key: task for ref in refs for key, task in [running_here(self._node, self._task_ids, ref)] if key}
        async with self._lock:  # concurrent requests share one reading
            await self._read([key for key in keys if not self._is_fresh(key)])
        return [self._object(task, key, self._last[key]) for key, task in keys.items() if self._is_fresh(key)]

    def _is_fresh(self, key: str) -> bool:
        last = self._last.get(key)
        return last is not None and now().boot_s - last.at_s < FRESH_S

    async def _read(self, keys: list[str]) -> None:
        """Have the launcher read these attempts."""
        if not keys:
            return
        told = await self._launcher.usage(keys)
        if told is None:
            return
        for key, used in told.of.items():
            before = self._last.pop(key, None)
            reading = UsageReading(told.at_s, *used)
            self._last[key] = reading._replace(cpus_busy=_busy(before, reading))
        while len(self._last) > KEPT_MAX:
            del self._last[next(iter(self._last))]

    def _object(self, task: str, key: str, reading: UsageReading) -> dict[str, Any]:
        return {
            "id": task,
            "node": self._node.state.node,
            "cpu_s": reading.cpu_s if reading.cpu_s >= 0 else None,
            "cpus_busy": reading.cpus_busy,
            "memory_bytes": reading.memory_bytes if reading.memory_bytes >= 0 else None,
            "processes": reading.processes,
            "joules": self._energy.so_far(key),
            "gpus": [
                _gpu(state, state.grants[key]) | {"mps": self._mps.is_client(key)}
                for state in self._node.ledger.devices.of_grant(key)
            ],
        }


def running_here(node: Node, task_ids: TaskIds, ref: str) -> tuple[str, str]:
    """The key of the attempt of this task that runs here, "" if none does, and the whole id. Raises NoSuchTask or
    BadRequest for an unknown task of this home."""
    guest = remote_task.find(node, ref)
    if guest is not None:
        return (guest.key if guest.phase is RemotePhase.HERE else ""), guest.task
    parsed = REF.fullmatch(ref)
    if parsed is not None and parsed["home"] not in (None, node.state.node):
        return "", ref
    record = task_ids.single(ref)
    task = node.home.tasks.get(record.uid)
    is_here = task is not None and task.phase is HomePhase.HERE and task.running_at
    return (execution_key(record.uid, record.attempt) if is_here else ""), record.task


def _gpu(state: DeviceState, grant: DeviceGrant) -> dict[str, Any]:
    """One GPU of a task. ``util`` is of the whole device, the memory of the task alone."""
    return {
        "id": state.device.name,
        "index": state.device.index,
        "model": state.device.model,
        "util": state.reading.busy,
        "mem_bytes": grant.now_bytes,
        "mem_peak_bytes": grant.peak_bytes,
        "mem_promised_bytes": grant.promised_bytes,
        "tasks": len(state.grants),
        "mode": grant.mode.name.lower(),
        "health": state.reading.health.name.lower(),
    }


def _busy(before: UsageReading | None, now: UsageReading) -> float | None:
    """Busy cores between two readings. None if unknown: the time of a process that ended may be missing in the second."""
    if before is None or min(before.cpu_s, now.cpu_s) < 0 or not 0 < now.at_s - before.at_s <= RATE_S_MAX:
        return None
    passed = (now.cpu_s - before.cpu_s) / (now.at_s - before.at_s)
    return passed if passed >= 0 else None
