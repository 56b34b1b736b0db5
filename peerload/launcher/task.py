"""One task as the launcher knows it. Used by the launcher alone."""

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
"""Captured output is held against its limit this often, while tasks run that are older than this."""
FROZEN_S_MAX = 86_400.0
"""A task that has been frozen for so long is killed, unless its request says otherwise."""
DATE_SET_S = 1.0
"""Date and boot clock that differ by more than this over the life of a task: the date was set."""
CLOSE_S_MIN, CLOSE_S_MAX = 0.001, 0.05
"""What is left of an ended task is looked at after so long, then after twice as long …"""


def boot_s() -> float:
    """This moment, in seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LaunchedTask:
    """One running process, the leader of its own session, with all that it started.

    deadline_s: CLOCK_BOOTTIME at which it is frozen, 0 = never. ts: of the newest message whose lease was applied, for the
    agent that asks. frozen_at_s: CLOCK_BOOTTIME, 0 while it is not. ended_at: Unix s at which its leader ended, 0 while it
    lives; started_boot_s: CLOCK_BOOTTIME at its start; ran_s: by that clock, how long its leader ran. lost_because: why it has no exit although it ends: nobody may take this end for a result. memory_bytes_max: its
    limit, 0 = none; node: what people call the machine; memory_use: known when its leader has ended.
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

    def wait_longer(self) -> None:
        """Something of it is left; look again later, and later still."""
        self.close_due_s = time.monotonic() + self.close_wait_s
        self.close_wait_s = min(self.close_wait_s * 2, CLOSE_S_MAX)

    def _began_at(self) -> float:
        """When it started, by the date at its end: the time between both is that of the boot clock, whatever date was set
        meanwhile."""
        began_at = self.ended_at - self.ran_s
        return began_at if abs(began_at - self.started_at) > DATE_SET_S else self.started_at

    def reap(self, holes: HolePuncher) -> ExitRecord:
        """Its leader has ended, and nothing is left of it: the exit record."""
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        record = ExitRecord(
            exit_code=code if code >= 0 else 128 - code,
            started_at=self._began_at(),
            ended_at=max(self.ended_at, self._began_at()),
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
