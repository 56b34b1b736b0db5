"""Write-ahead of one simulated agent: what can be seen from outside waits for the rows before it, and the agent may die
between a row and what waits for it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from peerload.model import actions
from peerload.model.messages import RenewOk, needs_no_row
from tests.chaos.disk import points

if TYPE_CHECKING:
    from tests.chaos import plan
    from tests.chaos.machine import Machine


class Release:
    """The rows and outward actions of one run of an agent, in order. One commit at a time takes all rows that wait."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._held: deque[actions.Action] = deque()
        self._committing = 0
        self._is_releasing = False

    @property
    def is_waiting(self) -> bool:
        """True if anything waits for the disk."""
        return bool(self._held)

    def keep(self, persist: actions.Persist) -> None:
        """Rows to make durable; what comes after them waits."""
        self._held.append(persist)

    def when_durable(self, action: actions.Action) -> None:
        """Do it now if nothing undurable stands before it, else in its turn."""
        if self._held and self.must_wait(action):
            self._held.append(action)
        else:
            self._machine.perform(action)

    def must_wait(self, action: actions.Action) -> bool:
        """True if what can be seen from outside waits for the rows before it: but for what promises nothing, and renewed leases of
        other tasks, always."""
        if isinstance(action, actions.Send) and needs_no_row(action.message):
            return False
        if not isinstance(action, actions.Send) or not isinstance(action.message, RenewOk):
            return True
        uids = {extension.uid for extension in action.message.extensions}
        return not uids or any(
            type(row) is actions.PutTask and row.record.uid in uids
            for held in self._held
            if isinstance(held, actions.Persist)
            for row in held.rows
        )

    def end_turn(self) -> None:
        """Let the disk begin with all that waits, if it is free."""
        if not self._held or self._committing or self._is_releasing:
            return
        machine = self._machine
        self._committing = sum(type(action) is actions.Persist for action in self._held)
        stall_s = max(machine.stalled_until_s - machine.cluster.now_s, 0.0)
        machine.later(machine.facts.disk_s * machine.rng.uniform(0.5, 1.5) + stall_s, self._committed)

    def _in_flight(self) -> list[actions.Persist]:
        return [action for action in self._held if isinstance(action, actions.Persist)][: self._committing]

    def crash(self) -> None:
        """The agent dies: of what was being written a prefix survives."""
        in_flight = self._in_flight()
        self._held.clear()
        for persist in in_flight[: self._machine.rng.randint(0, len(in_flight))]:
            self.make_durable(persist)

    def _committed(self) -> None:
        machine = self._machine
        group = self._in_flight()
        if machine.fsync_fails is not None:
            down_s, machine.fsync_fails = machine.fsync_fails.down_s, None
            machine.cluster.gauges.count("fault FsyncError")
            machine.cluster.driver.crash(machine, down_s)
            return
        if machine.cluster.armed and any(self._dies_here(armed, group) for armed in machine.cluster.armed):
            return
        for persist in group:
            self.make_durable(persist)
        self._is_releasing = True
        while self._held:
            action = self._held[0]
            if isinstance(action, actions.Persist):
                if not self._committing:
                    break
                self._committing -= 1
            self._held.popleft()
            if not isinstance(action, actions.Persist):
                machine.perform(action)
        self._committing = 0
        self._is_releasing = False
        self.end_turn()

    def _dies_here(self, armed: plan.CrashAtCommit, group: list[actions.Persist]) -> bool:
        """True if this commit holds the point at which the agent is to die; then it does."""
        machine = self._machine
        for index, persist in enumerate(group):
            if armed.point in points(persist.rows, machine.name, machine.disk):
                machine.cluster.armed.remove(armed)
                self._held.clear()
                for before in group[: index + armed.after]:
                    self.make_durable(before)
                machine.cluster.gauges.count(f"{armed.point} crashed {'after' if armed.after else 'before'}")
                machine.cluster.driver.crash_at_point(machine, armed)
                return True
        return False

    def make_durable(self, persist: actions.Persist) -> None:
        """Note that these rows are on disk."""
        machine = self._machine
        for row in persist.rows:
            machine.disk.apply(row)
            machine.cluster.checker.durable(machine, row)
