"""Containment by scanning /proc, where there are no cgroups: a scan finds the processes of a task, and SIGSTOP freezes
them.

The processes of a task are the session and process group of its leader, their descendants, and all processes with the
task's mark in their initial environment. The launcher becomes the subreaper (PR_SET_CHILD_SUBREAPER), so that orphans
of a leader are reparented to it.

Used by the launcher alone, and imported only where there are no cgroups.
"""

from __future__ import annotations

import os
import select
import signal
import time

from peerload.launcher.containment import PREFIX, REPORT_S, Units, kill_one, read
from peerload.launcher.record_log import log_line, process_fields, process_start

MARK = b"PEERLOAD_UNIT"
"""The variable that marks the processes of a unit: <launcher run>/peerload-<key>."""
LOOKS_MAX = 50
"""Bound on scans while processes are being stopped, since they may fork meanwhile."""
QUIET_LOOKS = 2
"""Number of successive scans that have to find nothing new: during exec, a process shows no mark for a moment."""
QUIET_S = 0.001
UNMARKED_LOOKS_MAX = 6
"""Number of scans of an orphan without a mark (in exec, or with a cleared environment) until it counts as another task's.
"""
_PR_SET_CHILD_SUBREAPER = 36
_ENVIRONMENT_BYTES_MAX = 4 << 20
_TASK_MARK = b"PEERLOAD_TASK_ID="

Table = dict[int, tuple[int, int, int, int, bool]]
"""pid → parent, process group, session, start (clock ticks since boot) and whether it is not stopped, of all live
processes."""


class ProcScan(Units):
    """`Units` by scanning /proc. run: the name of this run of the launcher, for the marks. own_children: pids of the
    launcher's children that are not tasks; the code that starts such a child adds it."""

    name = "bare"
    is_proc_scan = True
    unenforced = (
        "a process that leaves its session, is left by its parent and clears its environment is ended with the last task only",
        "a frozen process can be thawed by its user (SIGCONT), for up to half a second",
        "a task sees that it was stopped and continued, and what it had stopped itself is continued too",
    )

    def __init__(self, run: str, own_children: set[int]) -> None:
        self._run = run.encode()
        self._own_children = own_children
        self._children = f"/proc/self/task/{os.getpid()}/children"
        self._leaders: dict[str, tuple[int, int]] = {}
        self._unmarked_looks: dict[str, int] = {}
        _become_subreaper()

    def mark(self, key: str) -> bytes:
        return unit_mark(self._run, key)

    def leader_started(self, key: str, pid: int, start: int) -> None:
        """See `Units`. The start time distinguishes processes that have reused a pid."""
        self._leaders[key] = (pid, start)

    def freeze(self, key: str) -> None:
        stop_all(dict([self._leaders[key]]), {self.mark(key)})

    def refreeze(self, keys: list[str]) -> None:
        """See `Units`. One scan for all tasks: sessions, and orphans, which are children of the launcher."""
        marks = {self.mark(key) for key in keys}
        leaders = dict(self._leaders[key] for key in keys)
        for pid in self._task_orphans():
            if _has_mark(pid, {MARK + b"=" + mark for mark in marks}):
                leaders[pid] = process_start(pid)
        table = process_table()
        for pid in members(table, leaders, set()):
            if table[pid][4]:
                kill_one(pid, signal.SIGSTOP)

    def thaw(self, key: str) -> None:
        for member in self.processes(key):
            kill_one(member, signal.SIGCONT)

    def kill(self, key: str) -> None:
        for member in stop_all(dict([self._leaders[key]]), {self.mark(key)}):
            kill_one(member)

    def processes(self, key: str) -> list[int]:
        return sorted(members(process_table(), dict([self._leaders[key]]), {self.mark(key)}))

    def processes_of(self, keys: list[str]) -> dict[str, list[int]]:
        """See `Units`. One scan for all tasks, as in `refreeze`: sessions, their descendants, and orphans."""
        if not keys:
            return {}
        table = process_table()
        orphans = {pid: read(f"/proc/{pid}/environ") for pid in self._task_orphans()}
        found = {}
        for key in keys:
            leaders = dict([self._leaders[key]])
            mark = MARK + b"=" + self.mark(key) + b"\0"
            leaders |= {pid: process_start(pid) for pid, environment in orphans.items() if mark in environment + b"\0"}
            found[key] = sorted(members(table, leaders, set()))
        return found

    def orphans(self) -> set[int]:
        """See `Units`. The leaders of tasks are among them."""
        return {int(child) for child in read(self._children).split()}

    def close(self, key: str) -> bool:
        """See `Units`. The processes that the leader has left are children of the launcher by now, or descendants of one:
        children are killed first, and their children follow."""
        if key not in self._leaders:
            return True
        if not self.orphans():  # this kernel has no list of children
            if self.processes(key):
                self.kill(key)
                return False
        elif not self._is_without_orphans(key):
            return False
        self._forget(key)
        return True

    def _task_orphans(self) -> set[int]:
        """Children of the launcher that are neither leaders nor its own."""
        return self.orphans() - {pid for pid, _ in self._leaders.values()} - self._own_children

    def _is_without_orphans(self, key: str) -> bool:
        """True if certainly no child of the launcher belongs to this unit; a scan may miss processes that fork fast."""
        orphans = self._task_orphans()
        if not orphans:
            return True
        environments = {pid: read(f"/proc/{pid}/environ") for pid in orphans if _is_alive(pid)}
        mine = [pid for pid, environment in environments.items() if self.mark(key) in environment]
        unmarked = [pid for pid, environment in environments.items() if MARK not in environment]
        if len(self._leaders) == 1:  # no other task runs: the orphans are of this one
            mine += unmarked
            unmarked = []
        for pid in mine:
            kill_one(pid)
        if mine:
            self.kill(key)
            return False
        if self._task_orphans() != orphans:
            return False
        self._unmarked_looks[key] = self._unmarked_looks.get(key, 0) + 1
        return not unmarked or self._unmarked_looks[key] >= UNMARKED_LOOKS_MAX

    def _forget(self, key: str) -> None:
        del self._leaders[key]
        self._unmarked_looks.pop(key, None)


def process_table() -> Table:
    """All live processes, without zombies."""
    table: Table = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            fields = process_fields(int(name))
            if fields and fields[0] not in b"ZX":
                table[int(name)] = (
                    int(fields[1]),
                    int(fields[2]),
                    int(fields[3]),
                    int(fields[19]),
                    fields[0] not in b"Tt",
                )
    return table


def members(table: Table, leaders: dict[int, int], marks: set[bytes]) -> set[int]:
    """Pids of the groups and sessions of these leaders (pid → start), their descendants, and processes with one of these
    marks."""
    me = os.getpid()
    found = set()
    for pid, (_, group, session, start, _) in table.items():
        for leader in {pid, group, session} & leaders.keys():
            begun = leaders[leader]
            at = process_start(leader)
            # The pid of an ended leader remains as the id of its group and session; processes of ours have a mark there.
            if at == begun or (not at and start >= begun and _has_mark(pid, {_TASK_MARK, *marks})):
                found.add(pid)
    if marks:
        for pid in table.keys() - found:
            if _has_mark(pid, {MARK + b"=" + mark for mark in marks}):
                found.add(pid)
    found.discard(me)
    grows = True
    while grows:
        below = {pid for pid, (parent, *_) in table.items() if parent in found} - found - {me}
        found |= below
        grows = bool(below)
    return found


def stop_all(leaders: dict[int, int], marks: set[bytes]) -> set[int]:
    """Stop processes until no more are found, so that none escapes by forking → their pids."""
    stopped: set[int] = set()
    quiet = 0
    for _ in range(LOOKS_MAX):
        new = members(process_table(), leaders, marks) - stopped
        for pid in new:
            kill_one(pid, signal.SIGSTOP)
        stopped |= new
        quiet = 0 if new else quiet + 1
        if quiet == QUIET_LOOKS:
            break
        if quiet:
            time.sleep(QUIET_S)
    return stopped


def unit_mark(run: bytes, key: str) -> bytes:
    return run + b"/" + PREFIX.encode() + key.encode()


def kill_marked(leaders: dict[int, int], marks: set[bytes]) -> None:
    """Kill processes. Returns when they are gone, however long that takes."""
    report_at_s = time.monotonic() + REPORT_S
    while left := members(process_table(), leaders, marks):
        stop_all(leaders, marks)
        for pid in members(process_table(), leaders, marks):
            kill_one(pid)
        for pid in left:
            _await_end(pid)
        if time.monotonic() > report_at_s:
            report_at_s += REPORT_S
            log_line(f"leftover processes do not end: pids={sorted(left)}")


def _is_alive(pid: int) -> bool:
    fields = process_fields(pid)
    return bool(fields) and fields[0] not in b"ZX"


def _await_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    waiting.poll(100)
    os.close(pidfd)


def _has_mark(pid: int, marks: set[bytes]) -> bool:
    """True if a variable of a process's initial environment is one of these marks, or begins with a mark that ends in "="."""
    raw = read(f"/proc/{pid}/environ")
    if not raw or not any(mark in raw for mark in marks):
        return False
    variables = raw[:_ENVIRONMENT_BYTES_MAX].split(b"\0")
    return any(
        variable == mark or (mark[-1:] == b"=" and variable.startswith(mark))
        for variable in variables
        for mark in marks
    )


def _become_subreaper() -> None:
    try:
        import ctypes  # noqa: PLC0415 -- it costs memory, and is needed here alone

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError) as error:
        log_line(f"cannot become subreaper: error={error}")
