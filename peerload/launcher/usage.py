"""Current usage of running tasks: processor time, memory, processes. Read only when the agent asks.

Used by the launcher alone; the imports are few.
"""

from __future__ import annotations

import os
import time

from peerload.launcher.protocol import TaskUsage, UsageEvent
from peerload.launcher.record_log import process_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.launcher.containment import Units
    from peerload.launcher.powercap import Reading
    from peerload.launcher.protocol import UsageRequest
    from peerload.launcher.task import LaunchedTask

PROCESSES_MAX = 1000
"""Processes read for one request, about 10 ms: of a task with more than are left, only their number is reported."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage_of(
    tasks: Mapping[str, LaunchedTask], units: Units, request: UsageRequest, counters: list[Reading]
) -> UsageEvent:
    """Usage of each of the requested tasks that runs. Memory that its processes share is counted for each of them."""
    running = [key for key in request.keys if key in tasks and not tasks[key].ended_at]
    found: dict[str, TaskUsage] = {}
    left = PROCESSES_MAX
    if request.brief:
        counted = {key: units.cpu_s(key) for key in running}
        found = {key: TaskUsage(cpu_s, -1, -1) for key, cpu_s in counted.items() if cpu_s >= 0}
        running = [key for key in running if key not in found]
    for key, pids in units.processes_of(running).items():
        counted_s = units.cpu_s(key)
        if len(pids) > left:
            found[key] = TaskUsage(counted_s, -1, len(pids))
            continue
        left -= len(pids)
        cpu_s, memory_bytes, processes = _sum(pids)
        found[key] = TaskUsage(max(cpu_s, counted_s), memory_bytes, processes)
    return UsageEvent(request.id, time.clock_gettime(time.CLOCK_BOOTTIME), found, counters)


def _sum(pids: list[int]) -> tuple[float, int, int]:
    """Sum over live processes: processor seconds (with those of ended children), bytes in memory, number."""
    ticks = pages = count = 0
    for pid in pids:
        fields = process_fields(pid)
        if not fields:
            continue
        ticks += sum(map(int, fields[11:15]))
        if fields[0] not in b"ZX":
            pages += int(fields[21])
            count += 1
    return ticks / _TICKS, pages * _PAGE_BYTES, count
