"""A simulated launcher: it outlives its agent, freezes a task at its deadline, and keeps exit records."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.model.actions import SpawnTask
    from peerload.model.task import Exit


class SimProcess:
    """One attempt. left_s: service still to be had; since_s: when it last began to run, None while it is frozen."""

    __slots__ = ("deadline_s", "key", "left_s", "round", "since_s", "started_s", "task", "ts", "uid")

    def __init__(self, spawn: SpawnTask, service_s: float, at_s: float) -> None:
        self.key = spawn.key
        self.uid = spawn.key.rpartition("-")[0]
        self.task = spawn.task
        self.deadline_s = spawn.deadline_s
        self.ts = spawn.ts
        self.left_s = service_s
        self.started_s = at_s
        self.since_s: float | None = at_s
        self.round = 0


class SimLauncher:
    """The processes and exit records of one machine. Times are simulated seconds (not the node's own clock)."""

    def __init__(self) -> None:
        self.running: dict[str, SimProcess] = {}
        self.ended: dict[str, Exit] = {}

    def next_change_s(self, process: SimProcess) -> float:
        """The time at which it will end or be frozen, if nothing happens before."""
        if process.since_s is None:
            return float("inf")
        ends_s = process.since_s + process.left_s
        return min(ends_s, process.deadline_s) if process.deadline_s else ends_s

    def advance(self, process: SimProcess, at_s: float) -> bool:
        """Account for the time until now; freeze it at its deadline. True if it has ended."""
        if process.since_s is None:
            return False
        if process.since_s + process.left_s <= at_s:
            return True
        process.left_s -= max(at_s - process.since_s, 0.0)
        process.since_s = None if process.deadline_s and process.deadline_s <= at_s else at_s
        return False

    def lease(self, process: SimProcess, deadline_s: float, at_s: float) -> None:
        """Move its deadline; thaw it if it was frozen and the new one lies ahead."""
        process.deadline_s = deadline_s
        if process.since_s is None and (not deadline_s or deadline_s > at_s):
            process.since_s = at_s

    def end(self, process: SimProcess, exit_: Exit) -> None:
        """End a process; its exit record stays."""
        del self.running[process.key]
        self.ended[process.key] = exit_
