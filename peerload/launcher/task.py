"""A task as the launcher knows it. Used by the launcher alone."""

from __future__ import annotations

import os
import time

from peerload.launcher.oom_detection import with_shortage
from peerload.launcher.protocol import ExitRecord, ResourceUsage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.memory_limits import MemoryUse
    from peerload.launcher.process import Capture, HolePuncher

LIMIT_EVERY_S = 0.5
"""Interval at which captured output is limited, for tasks older than this."""
FROZEN_S_MAX = 86_400.0
"""Default of how long a task may be frozen before it is killed."""
DATE_SET_S = 1.0
"""A larger difference between date and boot clock over the life of a task means that the date was set."""
CLOSE_S_MIN, CLOSE_S_MAX = 0.001, 0.05
"""First and longest pause between two looks at what is left of an ended task; it doubles in between."""


def boot_s() -> float:
    """Now, in seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LaunchedTask:
    """One running process, the leader of its own session, with its descendants.

    deadline_s: CLOCK_BOOTTIME at which it is frozen, 0 = never. ts: of the newest message whose lease was applied.
    frozen_at_s: CLOCK_BOOTTIME, 0 while it is not. ended_at: Unix seconds at which its leader ended, 0 while it lives.
    started_boot_s: CLOCK_BOOTTIME at its start. ran_s: run time of its leader by that clock. lost_because: why its end
    is no exit, and no result. memory_bytes_max: its limit, 0 = none. node: display name of the machine. memory_use:
    known when its leader has ended.
    """

    __slots__ = (
        "captures",
        "close_due_s",
        "close_wait_s",
        "deadline_s",
        "ended_at",
        "ended_s",
        "frozen_at_s",
        "frozen_s_max",
        "is_synced",
        "key",
        "limit_due_s",
        "lost_because",
        "memory_bytes_max",
        "memory_use",
        "node",
        "pid",
        "pidfd",
        "ran_s",
        "started_at",
        "started_boot_s",
        "ts",
    )

    def __init__(self, key: str, pid: int, started_at: float, captures: tuple[Capture, Capture]) -> None:
        self.key = key
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.started_at = started_at
        self.started_boot_s = boot_s()
        self.captures = captures
        self.deadline_s = 0.0
        self.ts = 0.0
        self.frozen_at_s = 0.0
        self.frozen_s_max = FROZEN_S_MAX
        self.is_synced = False
        self.lost_because = ""
        self.memory_bytes_max = 0
        self.memory_use: MemoryUse | None = None
        self.node = ""
        self.ended_at = 0.0
        self.ended_s = 0.0
        self.ran_s = 0.0
        self.close_due_s = 0.0
        self.close_wait_s = CLOSE_S_MIN
        self.limit_due_s = time.monotonic() + LIMIT_EVERY_S

    def back_off(self) -> None:
        """Look again later, since something of it is left; each pause is longer."""
        self.close_due_s = time.monotonic() + self.close_wait_s
        self.close_wait_s = min(self.close_wait_s * 2, CLOSE_S_MAX)

    def _start_date(self) -> float:
        """Its start, by the date at its end: the boot clock gives the time between, whatever date was set meanwhile."""
        began_at = self.ended_at - self.ran_s
        return began_at if abs(began_at - self.started_at) > DATE_SET_S else self.started_at

    def reap(self, holes: HolePuncher) -> ExitRecord:
        """Reap the leader of a task of which nothing else is left → the exit record."""
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        record = ExitRecord(
            exit_code=code if code >= 0 else 128 - code,
            started_at=self._start_date(),
            ended_at=max(self.ended_at, self._start_date()),
            stdout_bytes=self.captures[0].close(holes),
            stderr_bytes=self.captures[1].close(holes),
            usage=ResourceUsage(usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024),
            signal=max(-code, 0),
        )
        if self.memory_use is None:
            return record
        with self.captures[1].access:
            return with_shortage(record, self.memory_use, self.node, self.captures[1].path)


def failed(started_at: float, exit_code: int, reason: str) -> ExitRecord:
    """The exit record of a task that could not be started."""
    return ExitRecord(exit_code, started_at, started_at, reason=reason)
