"""Cleanup after a launcher that was killed: its watchdog kills its tasks immediately, and the next launcher does so before
it answers.

The watchdog is a shell that sleeps on a pipe until the launcher is gone, so no living agent is needed. The kernel does
not bind it to the launcher: if both are killed at the same moment, tasks live until the next launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from peerload.launcher.containment import kill_and_remove, removed_all
from peerload.launcher.record_log import RecordLog, log_line, machine_boot, whole_records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.containment import Units

UNITS_NAME = "units"
"""File with the place of a launcher's units, for the next launcher: kind, machine boot, root, and root of its memory
cgroups ("" for none)."""
EMPTY_LOOKS_MAX, EMPTY_LOOK_S = 100, 0.01
"""Number of tries to remove a memory cgroup whose processes have just ended, and the pause between them."""
SPAWNS_NAME = "spawns.log"
"""Log of spawned processes; written only by the process scan. A row: key, pid, start, machine boot, output files,
launcher run."""
WATCHDOG_NAME = "peerload-guard"
_WATCHDOG_SCRIPT = """
trap '' TERM INT HUP
read -r _
[ -w "$1" ] && echo 1 > "$1"
[ -z "$5" ] || [ -d "$5" ] || exit
exec "$2" -I -S -c "$3" "$4" "$5" "$6" "$7"
"""
"""A shell waits because it takes a tenth of the memory of a Python that waits. Nothing is written to its stdin, which
ends with the launcher."""


def note_units(directory: str, kind: str, root: str, memory_root: str) -> None:
    """Store the place of the units in ``directory`` (a root of "": none). Call it before the first unit is made."""
    path = f"{directory}/{UNITS_NAME}"
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{kind}\n{machine_boot()}\n{root}\n{memory_root}\n".encode("utf-8", "surrogateescape"))
    finally:
        os.close(fd)
    os.replace(path + ".new", path)


def kill_leftovers(directory: str, ended: set[str]) -> None:
    """Kill the remaining processes of an earlier launcher's tasks. Returns when they are gone, however long that takes: a
    task that is reported as dead while it runs would run twice. ended: keys that have an exit record."""
    boot = machine_boot()
    try:
        with open(f"{directory}/{UNITS_NAME}", encoding="utf-8", errors="surrogateescape") as file:
            _, made_in, root, memory_root, *_ = file.read(1 << 16).split("\n")
    except (OSError, ValueError):
        made_in, root, memory_root = "", "", ""
    if root and made_in == boot:
        kill_and_remove(root)
    log = RecordLog(f"{directory}/{SPAWNS_NAME}")
    rows = {row[0]: row for row in log.read() if row[3] == boot and row[0] not in ended}  # the last row of a key counts
    if rows:
        kill_spawned(list(rows.values()))
    if made_in == boot:
        _remove_memory_cgroups(memory_root)
    log.rewrite([])
    log.close()


def _remove_memory_cgroups(root: str) -> None:
    """Remove the memory cgroups of tasks that have been killed."""
    if not root:
        return
    for _ in range(EMPTY_LOOKS_MAX):
        if removed_all(root):
            return
        time.sleep(EMPTY_LOOK_S)
    log_line(f"cannot remove leftover cgroup: path={root}")


def kill_spawned(rows: list[Any]) -> None:
    """Kill the processes of these rows of the spawn log. A row with pid 0 was written before its process was made: the
    process is found by its mark, or as the leader of a session that writes to the output files of the row."""
    from peerload.launcher import proc_scan as bare  # noqa: PLC0415 -- most launchers have no use for it

    leaders = {row[1]: row[2] for row in rows if row[1]}
    marks = {bare.unit_mark(row[5].encode(), row[0]) for row in rows}
    outputs = {path for row in rows if not row[1] for path in row[4]}
    if outputs:
        for pid, (_, group, session, start, _) in bare.process_table().items():
            if session == group == pid and _writes_to(pid, outputs):
                leaders[pid] = start
    bare.kill_marked(leaders, marks)


def _writes_to(pid: int, paths: set[str]) -> bool:
    """True if stdout or stderr of a process is one of these files."""
    for number in (1, 2):
        try:
            if os.readlink(f"/proc/{pid}/fd/{number}").removesuffix(" (deleted)") in paths:
                return True
        except OSError:
            continue
    return False


class Watchdog:
    """Process that kills the tasks of this launcher run when the launcher is gone. Raises OSError if it cannot be
    started (no /bin/sh)."""

    def __init__(self, directory: str, units: Units, memory_root: str, run: str) -> None:
        kill_file = units.root + "/cgroup.kill" if units.root else ""
        arguments = [directory, units.root, run, memory_root]
        code = f"import sys; sys.path[:0] = {sys.path!r}; from peerload.launcher.orphan_cleanup import watchdog_main; watchdog_main()"
        theirs, mine = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", _WATCHDOG_SCRIPT, WATCHDOG_NAME, kill_file, sys.executable, code, *arguments],
                os.environ,
                file_actions=((os.POSIX_SPAWN_DUP2, theirs, 0),),
                setsid=True,
                setsigdef=(signal.SIGTERM,),
            )
        except OSError:
            os.close(mine)
            raise
        finally:
            os.close(theirs)
        self._pipe = mine
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)  # before its pipe ends
            os.waitpid(self.pid, 0)
            os.close(mine)
            raise

    def close(self) -> None:
        """Release the descriptors of a watchdog that has ended."""
        os.close(self._pipe)
        os.close(self.pidfd)
        os.waitpid(self.pid, 0)


def watchdog_main() -> None:
    """Kill the remaining tasks of the dead launcher; the arguments are those of `Watchdog`."""
    directory, root, run, memory_root = sys.argv[1:]
    began_s = time.monotonic()
    if root:
        if not os.path.isdir(root):
            return
        kill_and_remove(root)
    else:
        rows = {row[0]: row for row in whole_records(f"{directory}/{SPAWNS_NAME}")[0] if row[5:] == [run]}
        if not rows:
            return
        kill_spawned(list(rows.values()))
    _remove_memory_cgroups(memory_root)
    log_line(f"launcher is gone, watchdog killed its tasks: seconds={time.monotonic() - began_s:.3f}")
