"""Samples of the last hours, for charts: what this node knows of the cluster, twice a minute, in a ring on disk.

The agent takes them, since they must be there when nobody looks. They are kept in memory and written lazily: at the stop and every
ten minutes, without a sync. A crash costs the minutes since; a file that cannot be read is begun anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from typing import TYPE_CHECKING

from peerload.agent.runtime import next_tick, now
from peerload.core.membership.membership import PeerState
from peerload.model.devices import GPU

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.core.node import Node
    from peerload.model.load import LoadReport
    from peerload.model.resources import Profile

log = logging.getLogger("peerload.agent")

EVERY_S = 30.0
SAMPLES_MAX = 1440
"""Twelve hours."""
WRITTEN_EVERY = 20
"""Samples between two writes."""
NAME = "samples"
KEYS = ("nodes", "cpus", "cpus_busy", "cpus_foreign", "running", "waiting", "gpus", "gpus_busy", "gpu_mem_share")
"""Sums over the live nodes, at their last reports; gpus_busy: utilization in whole GPUs; gpu_mem_share: of all their memory."""
_HEAD = b"peerload samples 1\n"
_SAMPLE = struct.Struct(f"<d{len(KEYS)}f")


class Samples:
    """The ring of one agent."""

    def __init__(self, node: Node, state: Path) -> None:
        self._node = node
        self._path = state / NAME
        self._ring: list[tuple[float, ...]] = []
        self._unwritten = 0

    async def run(self) -> None:
        """Take samples until cancelled."""
        self._ring = await asyncio.to_thread(self._read)
        while True:
            await next_tick(EVERY_S)
            self.take(now().wall_s)
            if self._unwritten >= WRITTEN_EVERY:
                await asyncio.to_thread(self.write)

    def take(self, at: float) -> None:
        """Add a sample. Those that are not older than it were taken while the machine's date was ahead, and go."""
        while self._ring and self._ring[-1][0] >= at:
            self._ring.pop()
        self._ring.append((at, *self._sums()))
        del self._ring[:-SAMPLES_MAX]
        self._unwritten += 1

    def _sums(self) -> list[float]:
        node = self._node
        known: list[tuple[Profile, LoadReport | None]] = [(node.state.profile, node.sharing.shown())]
        for peer in node.membership:
            if peer.state is PeerState.ALIVE:
                heard = node.membership.last_report(peer.identity.node)
                known.append((peer.profile, None if heard is None else heard.report))
        sums = dict.fromkeys(KEYS, 0.0)
        memory = used = 0
        for profile, report in known:
            gpus = [device for device in profile.devices if device.kind == GPU]
            sums["nodes"] += 1
            sums["cpus"] += profile.cpus
            sums["gpus"] += len(gpus)
            if report is not None:
                sums["cpus_busy"] += report.cpus_busy
                sums["cpus_foreign"] += report.cpus_foreign
                sums["running"] += report.running
                sums["waiting"] += report.waiting
                marks = {device.mark for device in gpus}
                loads = [load for load in report.devices if load.mark in marks]
                sums["gpus_busy"] += sum(load.busy_percent for load in loads) / 100
                memory += sum(device.mem_bytes for device in gpus) >> 20
                used += sum(load.used_mib for load in loads)
        sums["gpu_mem_share"] = used / memory if memory else 0.0
        return list(sums.values())

    def told(self, since: float) -> dict[str, object]:
        """Answer to `samples`: those after that time."""
        found = [[round(value, 3) for value in sample] for sample in self._ring if sample[0] > since]
        return {"every_s": EVERY_S, "keys": ["at", *KEYS], "samples": found}

    def _read(self) -> list[tuple[float, ...]]:
        try:
            with self._path.open("rb") as file:
                raw = file.read(len(_HEAD) + SAMPLES_MAX * _SAMPLE.size)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("cannot read samples: path=%s error=%s", self._path, error)
            return []
        body = raw.removeprefix(_HEAD)
        if len(body) == len(raw) or len(body) % _SAMPLE.size:
            log.warning("samples are damaged, and begun anew: path=%s", self._path)
            return []
        return [sample for sample in _SAMPLE.iter_unpack(body) if 0.0 < sample[0] < now().wall_s]

    def write(self) -> None:
        """Write all. A disk that is full costs the file, not the agent."""
        if not self._unwritten:
            return
        self._unwritten = 0
        aside = self._path.with_suffix(".new")
        try:
            aside.write_bytes(_HEAD + b"".join(_SAMPLE.pack(*sample) for sample in self._ring))
            os.replace(aside, self._path)  # noqa: PTH105 -- no pathlib in between
        except OSError as error:
            log.warning("cannot write samples: path=%s error=%s", self._path, error)
