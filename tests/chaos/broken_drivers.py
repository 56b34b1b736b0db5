"""The protocol with one rule left out on the side of disk, launcher and release: what the core decides stays as it is.

Every variant is the smallest change that drops its rule; the names are those of the table of broken simplifications.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from peerload.core.coordination.runs import RunningTasks
from peerload.core.handoff import home
from peerload.model import actions, events, messages
from peerload.model.task import ExecutionState, Exit
from tests.chaos.cluster import Cluster
from tests.chaos.launcher import Launcher, Process
from tests.chaos.machine import Machine
from tests.chaos.release import Release


def goes_out_early(patch: pytest.MonkeyPatch, *kinds: type) -> None:
    """These actions and messages do not wait for the rows before them."""

    def must_wait(self: Release, action: actions.Action) -> bool:
        seen = action.message if isinstance(action, actions.Send) else action
        return not isinstance(seen, kinds)

    patch.setattr(Release, "must_wait", must_wait)


def ack_submit_early(patch: pytest.MonkeyPatch) -> None:
    """D1: the client has its id before the task is on disk."""
    goes_out_early(patch, actions.Answer)


def commit_early(patch: pytest.MonkeyPatch) -> None:
    """D2: COMMIT is said before the lease is on disk."""
    goes_out_early(patch, messages.Commit)


def exec_before_start(patch: pytest.MonkeyPatch) -> None:
    """D3: the process is forked before START is on disk; and nobody looks for processes without one."""
    goes_out_early(patch, actions.SpawnTask)
    reconcile = RunningTasks.reconcile

    def looks_at_known(self: RunningTasks, listed: events.Running, ended: dict[str, Exit], frozen: Any = ()) -> None:
        reconcile(self, tuple(row for row in listed if self.holds(row[0])), ended, frozen)

    patch.setattr(RunningTasks, "reconcile", looks_at_known)


def ack_result_early(patch: pytest.MonkeyPatch) -> None:
    """D5: RESULT is acknowledged before it is recorded."""
    goes_out_early(patch, messages.ResultAck)


def _start_unsynced(patch: pytest.MonkeyPatch) -> None:
    """START is written, not synced: the next commit makes it durable, a power loss before that takes it away."""
    keep, make_durable, crash_machine = Release.keep, Release.make_durable, Machine.crash_machine
    unsynced: dict[Machine, list[Any]] = {}

    def is_start(persist: actions.Persist) -> bool:
        return any(
            isinstance(row, actions.PutExecution) and row.record.state is ExecutionState.START for row in persist.rows
        )

    def keep_unsynced(self: Release, persist: actions.Persist) -> None:
        if not is_start(persist) or self.is_waiting:
            keep(self, persist)
            return
        machine = self._machine
        unsynced.setdefault(machine, []).append((dict(machine.disk.executions), dict(machine.disk.floors)))
        for row in persist.rows:
            machine.disk.apply(row)
        for armed in machine.cluster.armed:
            if armed.point == "D3" and armed.after:
                machine.cluster.armed.remove(armed)
                crash = partial(machine.cluster.driver.crash, machine, armed.down_s, machine_too=True)
                machine.cluster.after(0.0005, crash)
                break

    def synced(self: Release, persist: actions.Persist) -> None:
        unsynced.pop(self._machine, None)
        make_durable(self, persist)

    def lost(self: Machine, *, loses_disk: bool = False) -> None:
        for executions, floors in unsynced.pop(self, [])[:1]:
            self.disk.executions, self.disk.floors = executions, floors
        crash_machine(self, loses_disk=loses_disk)

    patch.setattr(Release, "keep", keep_unsynced)
    patch.setattr(Release, "make_durable", synced)
    patch.setattr(Machine, "crash_machine", lost)


def amo_start_unsynced(patch: pytest.MonkeyPatch) -> None:
    """D3, at most once: START is not synced before the process is forked."""
    _start_unsynced(patch)


def alo_start_unsynced(patch: pytest.MonkeyPatch) -> None:
    """D3, at least once: the same."""
    _start_unsynced(patch)


def no_self_fence(patch: pytest.MonkeyPatch) -> None:
    """R5: nobody stops a task whose lease has run out."""
    patch.setattr(Launcher, "_enforce", lambda self, process: None)
    patch.setattr(Launcher, "wake_up", lambda self: [self._go_on(process) for process in self.running.values()])


def agent_timer(patch: pytest.MonkeyPatch) -> None:
    """R5: the lease is kept by the agent, so nobody stops a task whose agent is down."""
    enforce = Launcher._enforce

    def enforce_while_the_agent_is_up(self: Launcher, process: Process) -> None:
        if self._machine.node is not None and not self._machine.is_asleep:
            enforce(self, process)

    patch.setattr(Launcher, "_enforce", enforce_while_the_agent_is_up)


def no_adopt(patch: pytest.MonkeyPatch) -> None:
    """R8: what an earlier agent started is taken for dead by the next one."""
    listing = Launcher.listing

    def ends_only(self: Launcher) -> events.LauncherReady:
        return events.LauncherReady(ended=listing(self).ended)

    patch.setattr(Launcher, "listing", ends_only)


def launcher_unbound(patch: pytest.MonkeyPatch) -> None:
    """Tasks outlive their launcher, and nobody looks for them."""

    def left_alone(self: Launcher) -> None:
        for process in list(self.running.values()):
            del self.running[process.key]
            process.deadline_s = 0.0
            self._watch(process)

    def end(self: Launcher, process: Process, *given: Any) -> None:
        if process.key in self.running:
            ends(self, process, *given)
        else:
            self._rest(process)

    ends = Launcher._end
    power_lost = Launcher.power_lost

    def all_end(self: Launcher) -> None:
        for process in list(self.running.values()):
            self._rest(process)
        self.running.clear()
        power_lost(self)

    patch.setattr(Launcher, "end_left_overs", left_alone)
    patch.setattr(Launcher, "_end", end)
    patch.setattr(Launcher, "power_lost", all_end)


def died_then_fork(patch: pytest.MonkeyPatch) -> None:
    """A process asked for before its launcher died is forked by the next one, though it was reported to have died."""
    waiting: dict[Machine, list[actions.SpawnTask]] = {}
    hear, back = Launcher._hear, Machine._launcher_is_back

    def hear_or_keep(self: Launcher, generation: int, do: str, given: tuple[Any, ...]) -> None:
        if do == "spawn" and (generation != self.generation or not self.is_up):
            waiting.setdefault(self._machine, []).append(given[0])
        hear(self, generation, do, given)

    def back_and_fork(self: Machine, generation: int) -> None:
        back(self, generation)
        for action in waiting.pop(self, []):
            self.launcher.request("spawn", action)

    patch.setattr(Launcher, "_hear", hear_or_keep)
    patch.setattr(Machine, "_launcher_is_back", back_and_fork)


def exit_torn(patch: pytest.MonkeyPatch) -> None:
    """D4: an exit record without a checksum is believed after a power loss, however much of it was written."""

    def believe(self: Launcher, key: str, exit_: Exit) -> Exit:
        del key, exit_
        return Exit(0)

    patch.setattr(Launcher, "read", believe)


def clock_slow(patch: pytest.MonkeyPatch) -> None:
    """R2: no grace for clocks that drift and launchers that wake up late."""
    init = Cluster.__init__

    def without_grace(self: Cluster, plan: Any, *given: Any, **named: Any) -> None:
        init(self, plan.without_grace(), *given, **named)

    patch.setattr(Cluster, "__init__", without_grace)
    patch.setattr(home, "DRIFT_MAX", 0.0)


def floor_volatile(patch: pytest.MonkeyPatch) -> None:
    """D3, D6: the floors are gone after a restart of the agent."""
    from tests.chaos.disk import Disk

    started = Disk.started

    def forgetful(self: Disk, running: events.Running, ended: dict[str, Exit]) -> events.AgentStarted:
        self.floors.clear()
        return started(self, running, ended)

    patch.setattr(Disk, "started", forgetful)
