"""Units: what holds all processes of one task, so that they can be frozen, thawed and ended together, wherever they went.

A plug-in per way of doing it, chosen by trying: ``cgroup2`` (cgroups.py) lets the kernel keep the set, so that nothing gets out
by a session of its own, by the background or by forking fast; ``bare`` (proc_scan.py) needs nothing and finds processes by
looking. Each has the methods of `Units`, the same conformance suite runs over all,
and each says in ``unenforced`` what it cannot promise.

Which unit a process is of, ``PEERLOAD_UNIT`` in its environment tells: ``<launcher run>/peerload-<key>``. Used by the
launcher alone; the imports are few.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Units(Protocol):
        """What a plug-in does. ``key`` names the attempt."""

        name: str
        unenforced: tuple[str, ...]
        is_bare: bool
        root: str
        """Where units are, for those that have a place."""

        def orphans(self) -> set[int]:
            """The children of the launcher, where orphans come to it."""

        def enter(self, key: str, *, is_fresh: bool = False, inside: str = "") -> None:
            """What the launcher starts from here on is in the unit of this key, from its first instruction on. Raises
            OSError if there can be no such unit, or there is one already. ``is_fresh``: nothing was ever in what holds it,
            nor will be; ``inside``: it is a part of that unit, where units can have parts."""

        def leave(self) -> None:
            """Until here."""

        def born(self, key: str, pid: int, start: int) -> None:
            """The leader of its session, and when that started (clock ticks since boot; 0 if the unit is no `is_bare`)."""

        def freeze(self, key: str) -> None:
            """Nothing of it executes any more, until thawed; what it forks meanwhile neither."""

        def freeze_again(self, keys: list[str]) -> None:
            """That is still so of these; for units whose processes can be thawed by others."""

        def thaw(self, key: str) -> None:
            """It goes on as if nothing had been."""

        def kill(self, key: str) -> None:
            """SIGKILL to all of it, frozen or not. Repeat until `close` says that it is gone."""

        def processes(self, key: str) -> list[int]:
            """The pids of what is alive of it."""

        def processes_of(self, keys: list[str]) -> dict[str, list[int]]:
            """The same of several, as cheaply as can be: what has hidden itself may be missing, what has ended be among them."""

        def cpu_s(self, key: str) -> float:
            """The processor seconds of all that was ever in it, -1 where nobody counts them together."""

        def close(self, key: str) -> bool:
            """The leader has ended and is not reaped yet. → whether nothing else is left, and so no unit; otherwise what is
            left is being killed: ask again."""

        def remove(self) -> None:
            """No unit is left: neither is the root."""


PREFIX = "peerload-"
REPORT_S = 10.0
"""What does not end is written about this often."""
READ_BYTES = 1 << 16


def kill_one(pid: int, number: int = signal.SIGKILL) -> None:
    """A signal to a process that may be gone by now."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def write(path: str, raw: bytes) -> None:
    """Write to a file of the kernel's."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, raw)
    finally:
        os.close(fd)


def read(path: str) -> bytes:
    """All of a file of the kernel's; nothing if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts: list[bytes] = []
    try:
        while part := os.read(fd, READ_BYTES):
            parts.append(part)
    except OSError:  # it went while it was read
        return b"".join(parts)
    finally:
        os.close(fd)
    return b"".join(parts)
