"""Containment: a unit holds all processes of one task, so that they can be frozen, thawed and killed together, wherever
they went.

There is a backend for each way to do it, and the launcher takes the first that works: ``cgroup2`` (cgroups.py), where
the kernel keeps the set, so that nothing leaves it by a session of its own, by the background or by forking fast;
``bare`` (proc_scan.py), which needs nothing and finds processes by scanning /proc. Both implement `Units` and pass one
conformance suite. Each lists in ``unenforced`` what it cannot promise.

The variable ``PEERLOAD_UNIT`` of a process names its unit: ``<launcher run>/peerload-<key>``. Used by the launcher
alone; the imports are few.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Units(Protocol):
        """The interface of a containment backend. ``key`` names the attempt."""

        name: str
        unenforced: tuple[str, ...]
        is_proc_scan: bool
        root: str
        """Directory of the units; "" if there is none."""

        def orphans(self) -> set[int]:
            """Children of the launcher, where orphans are reparented to it."""

        def enter(self, key: str, *, is_fresh: bool = False, inside: str = "", forks: bool = False) -> None:
            """Put what the launcher starts from here on into the unit of this key, from its first instruction on.
            is_fresh: the unit is not reused from, nor for, another task. inside: it is a part of that unit, where units
            can have parts. forks: it is started by `fork`, where there is one. Raises OSError if there can be no such unit, or there is one already."""

        def leave(self) -> None:
            """End what `enter` began."""

        def leader_started(self, key: str, pid: int, start: int) -> None:
            """Note the leader of the session, and its start (clock ticks since boot; 0 unless `is_proc_scan`)."""

        def freeze(self, key: str) -> None:
            """Stop the execution of all its processes, and of those that they fork, until `thaw`."""

        def refreeze(self, keys: list[str]) -> None:
            """Freeze again what a user has thawed of these; for backends where that is possible."""

        def thaw(self, key: str) -> None:
            """Resume all its processes."""

        def kill(self, key: str) -> None:
            """SIGKILL to all of it, frozen or not. To be repeated until `close` returns True."""

        def processes(self, key: str) -> list[int]:
            """Pids of its live processes."""

        def processes_of(self, keys: list[str]) -> dict[str, list[int]]:
            """Pids of several units, cheaply: hidden processes may be missing, and some may have ended."""

        def cpu_s(self, key: str) -> float:
            """Processor seconds of all its processes, ended ones too; -1 if they are not counted together."""

        def close(self, key: str) -> bool:
            """Remove the unit of an ended leader that is not reaped yet. → True if no process was left; else those left
            are being killed, and it has to be called again."""

        def remove(self) -> None:
            """Remove the root; no unit is left."""


PREFIX = "peerload-"
REPORT_S = 10.0
"""Interval of log lines about processes that do not end."""
READ_BYTES = 1 << 16
SHORT_BYTES = 4096


def kill_one(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone by now."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def write(path: str, raw: bytes) -> None:
    """Write to a file of the kernel."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, raw)
    finally:
        os.close(fd)


def read(path: str) -> bytes:
    """Read a file of the kernel; empty if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts: list[bytes] = []
    try:
        while part := os.read(fd, READ_BYTES):
            parts.append(part)
    except OSError:  # it disappeared while it was read
        return b"".join(parts)
    finally:
        os.close(fd)
    return b"".join(parts)


def read_short(path: str) -> bytes:
    """Read a file of the kernel that is shorter than SHORT_BYTES, and so comes with one read; empty if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, SHORT_BYTES)
    except OSError:  # as above
        return b""
    finally:
        os.close(fd)
