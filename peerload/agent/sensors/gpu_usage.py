"""GPU usage by owner: from what the driver reports to a `DeviceReading`.

The driver lists processes and the memory in use. It may omit processes (of containers), and how much each has. What no
process of ours explains is foreign, and foreign use always counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.sensors.process_owner import MPS
from peerload.model.resources import RUNS_SEEN_MAX, Device, DeviceReading

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from peerload.agent.sensors.nvml import CardReading, GpuProcess

AVERAGE_S = 5.0
"""Time constant of the exponential average of utilization."""
FOREIGN_BYTES = 50 << 20
FOREIGN_SHARE = 0.001
"""Memory in use, absolute or as a share, that does not indicate a foreign process."""
CONTEXT_BYTES = 32 << 20
"""Memory that the driver takes for each process, beyond what it reports."""
FOREIGN_PEAK_S = 300.0
"""Period of the peaks of foreign processes: each is expected to need its peak of the last one to two periods."""
FOREIGN_BUSY = 0.1
FOREIGN_READINGS = 3
"""An unused card that is busier than this in so many readings in a row has a foreign user."""


class GpuUsage(msgspec.Struct, frozen=True):
    """ours: memory by execution key. foreign_bytes: memory of all others. others: number of other processes that
    compute. drawn_bytes: foreign memory of processes that only draw (a desktop). strangers: memory of each foreign
    process, by pid."""

    ours: dict[str, int] = {}
    foreign_bytes: int = 0
    others: int = 0
    drawn_bytes: int = 0
    strangers: dict[int, int] = {}


def memory_by_owner(
    used_bytes: int | None,
    processes: Iterable[GpuProcess] | None,
    owners: Mapping[int, str | None],
    held: Iterable[str],
    *,
    is_contained: bool,
) -> GpuUsage:
    """The memory of a card by owner. owners: pid → key, as `ProcessOwners.key_of` says. held: attempts that hold the
    card. is_contained: pids may be of another namespace, so that unknown ones may be ours."""
    ours: dict[str, int] = {}
    unreported: list[str] = []
    strange: list[GpuProcess] = []
    for process in processes or ():
        key = owners.get(process.pid)
        if key and key.startswith(MPS):  # its server's memory is neither of a task nor foreign
            used_bytes = max((used_bytes or 0) - (process.used_bytes or 0) - CONTEXT_BYTES, 0)
            continue
        if not key:
            strange.append(process)
            continue
        ours[key] = ours.get(key, 0) + (process.used_bytes or 0)
        if process.used_bytes is None:
            unreported.append(key)
    unseen = [key for key in held if key not in ours]
    if processes is None or (is_contained and any(owners.get(process.pid) is None for process in strange)):
        # The list does not tell whose they are: attempts that hold the card and are not seen on it are there.
        strange = [process for process in strange if not unseen or owners.get(process.pid) is not None]
        unreported += unseen
        ours.update(dict.fromkeys(unseen, 0))
    foreign = sum(process.used_bytes or 0 for process in strange)
    rest = max((used_bytes or 0) - sum(ours.values()) - foreign, 0)
    if unreported:  # the rest belongs to those whose memory is not reported
        for number, key in enumerate(unreported):
            ours[key] += rest // len(unreported) + (number < rest % len(unreported))
        rest = 0
    rest = max(rest - CONTEXT_BYTES * len(ours), 0)
    return GpuUsage(
        ours,
        foreign + rest,
        sum(not process.is_graphics for process in strange),
        sum(process.used_bytes or 0 for process in strange if process.is_graphics),
        {process.pid: process.used_bytes or 0 for process in strange},
    )


class GpuAverages:
    """Averages of one device over its readings. gap_s: time since the last one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._busy: float | None = None
        self._unexplained = 0
        self._peaks: dict[int, tuple[int, int]] = {}
        self._peaks_age_s = 0.0

    def reading(self, card: CardReading, tenants: GpuUsage, held: Iterable[str], gap_s: float) -> DeviceReading:
        """The reading to report. A desktop on a card does not make it foreign: its memory is not free, but tasks may
        have the rest exclusively, unless the card is kept busy."""
        busy = self._average(card.busy, gap_s)
        is_idle_for_us = not tenants.ours and not any(True for _ in held)
        if is_idle_for_us and (card.busy or 0.0) > FOREIGN_BUSY:
            self._unexplained += 1
        else:
            self._unexplained = 0
        limit = max(FOREIGN_BYTES, int(FOREIGN_SHARE * self._device.mem_bytes))
        is_there = tenants.foreign_bytes - tenants.drawn_bytes > limit or self._unexplained >= FOREIGN_READINGS
        return DeviceReading(
            card.id,
            card.health,
            card.why,
            busy,
            card.mem_used_bytes or 0,
            tenants.foreign_bytes,
            max(tenants.others, 1) if is_there else 0,
            tuple(sorted(tenants.ours.items())[:RUNS_SEEN_MAX]),
            card.temperature_c or 0,
            card.is_throttled,
            power_w=card.power_w,
            energy_j=card.energy_j,
            mem_foreign_peak_bytes=self._foreign_peak(tenants, gap_s),
        )

    def _foreign_peak(self, tenants: GpuUsage, gap_s: float) -> int:
        """Sum of the recent peaks of the foreign processes that are there. For each process the peaks of this period
        and of the last are kept."""
        self._peaks_age_s += gap_s
        is_next = self._peaks_age_s >= FOREIGN_PEAK_S
        if is_next:
            self._peaks_age_s = 0.0
        before, self._peaks = self._peaks, {}
        for pid, used_bytes in tenants.strangers.items():
            last, this = before.get(pid, (0, 0))
            self._peaks[pid] = (this, used_bytes) if is_next else (last, max(this, used_bytes))
        unexplained_bytes = tenants.foreign_bytes - sum(tenants.strangers.values())
        return unexplained_bytes + sum(max(peaks) for peaks in self._peaks.values())

    def _average(self, now: float | None, gap_s: float) -> float:
        if now is None:
            return 0.0
        if self._busy is None:
            self._busy = now
        self._busy += (1.0 - math.exp(-gap_s / AVERAGE_S)) * (now - self._busy)
        return min(max(self._busy, 0.0), 1.0)
