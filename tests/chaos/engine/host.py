"""One simulated machine: disk, launcher and, while its agent is up, the same `Node` that the real agent drives.

Actions are performed in order; outward ones behind a `Persist` wait until the simulated disk has it. A crash of the
agent in between loses what was not durable, with everything that waited for it.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from peerload.core.node import Node
from peerload.model import actions, events, timers
from peerload.model.events import Instant
from peerload.model.messages import Commit, Identity, NotStarted, Offer, Result, Return
from peerload.model.task import Exit, execution_key
from tests.chaos.engine.launcher import SimLauncher, SimProcess
from tests.chaos.engine.store import SimStore

if TYPE_CHECKING:
    from peerload.model.resources import Profile
    from tests.chaos.engine.engine import Simulation

EPOCH_S = 1_700_000_000.0
"""Unix time at the start of every run."""
SIGTERM = 15


class Host:
    """A machine. ``clock_offset_s``: its CLOCK_BOOTTIME at the start of the run; no two machines need agree."""

    def __init__(self, simulation: Simulation, profile: Profile, clock_offset_s: float) -> None:
        self._simulation = simulation
        self.profile = profile
        self.name = profile.node
        self.clock_offset_s = clock_offset_s
        self.store = SimStore()
        self.launcher = SimLauncher()
        self.node: Node | None = None
        self.starts = 0
        self.machine_starts = 1
        self._timers: dict[timers.Timer, float] = {}
        self._held: deque[actions.Action] = deque()
        self._committing = 0

    @property
    def identity(self) -> Identity:
        """The identity of this start."""
        return Identity(
            self.name,
            f"{self.name}-boot-{self.starts}",
            f"{self.name}-machine-{self.machine_starts}",
            f"{self.name}-store",
            self.starts,
            f"{self.name}:1",
        )

    def instant(self) -> Instant:
        """Now, on this machine's clocks."""
        at_s = self._simulation.now_s
        return Instant(at_s + self.clock_offset_s, EPOCH_S + at_s)

    # -- start and crash -----------------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        """A fresh core from what is durable and from what the launcher knows."""
        if self.node is not None:
            return
        self.starts += 1
        simulation = self._simulation
        rng = random.Random(f"{simulation.seed} {self.name} {self.starts}")
        own = copy.deepcopy(simulation.policies)  # as in a process of its own
        self.node = Node(simulation.config, own, self.identity, self.profile, rng)
        running = tuple(
            (key, EPOCH_S + process.started_s, process.ts) for key, process in self.launcher.running.items()
        )
        frozen = tuple(key for key, process in self.launcher.running.items() if process.since_s is None)
        started = self.store.started(running, dict(self.launcher.ended))
        self.handle(msgspec.structs.replace(started, frozen=frozen))

    def crash_agent(self) -> None:
        """The agent is gone at once; the launcher and its tasks stay."""
        self.node = None
        self._timers.clear()
        self._held.clear()
        self._committing = 0

    def crash_machine(self) -> None:
        """Power loss: agent, launcher and tasks are gone, the disk stays."""
        self.crash_agent()
        for process in list(self.launcher.running.values()):
            self._simulation.checker.rests(self.name, process)
        self.launcher = SimLauncher()
        self.machine_starts += 1

    # -- events in, actions out ----------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        """One event for the core, and what it wants done."""
        if self.node is None:
            return
        simulation = self._simulation
        simulation.traced(self.name, event)
        for action in self.node.handle(self.instant(), event):
            simulation.traced(self.name, action)
            if isinstance(action, actions.OUTWARD) and not self._held:
                self._perform(action)
            elif isinstance(action, (actions.Persist, *actions.OUTWARD)):
                self._held.append(action)
            else:
                self._perform_inward(action)
        self._commit()

    def _commit(self) -> None:
        """Let the disk begin with all that waits, if it is free."""
        if self._committing or not self._held:
            return
        self._committing = sum(isinstance(action, actions.Persist) for action in self._held)
        starts = self.starts
        self._simulation.after(self._simulation.world.disk_s, lambda: self._committed(starts))

    def _committed(self, starts: int) -> None:
        if starts != self.starts or self.node is None:
            return
        rows = [action for action in self._held if isinstance(action, actions.Persist)][: self._committing]
        for persist in rows:
            for row in persist.rows:
                self.store.apply(row)
                self._simulation.checker.durable(self._simulation.now_s, row)
                if isinstance(row, actions.PutSubmission):
                    self._simulation.submitted(self.name, row.submission)
        while self._held:
            action = self._held[0]
            if isinstance(action, actions.Persist):
                if not self._committing:
                    break
                self._committing -= 1
            self._held.popleft()
            if not isinstance(action, actions.Persist):
                self._perform(action)
        self._commit()

    def _perform_inward(self, action: actions.Action) -> None:
        match action:
            case actions.SetTimer():
                self._timers[action.timer] = action.at_s
                starts = self.starts
                at_s = action.at_s - self.clock_offset_s
                self._simulation.at(at_s, lambda: self._expire(action, starts))
            case actions.ClearTimer():
                self._timers.pop(action.timer, None)
            case actions.SendGossip():
                self._simulation.gossip(self, action)
            case _:
                pass  # a record of a decision: it is in the trace

    def _expire(self, timer: actions.SetTimer, starts: int) -> None:
        if starts == self.starts and self._timers.get(timer.timer) == timer.at_s:
            del self._timers[timer.timer]
            self.handle(events.TimerExpired(timer.timer))

    def _perform(self, action: actions.Action) -> None:  # noqa: C901 PLR0912 -- one line an action
        simulation = self._simulation
        match action:
            case actions.Send():
                if isinstance(action.message, NotStarted | Return):
                    key = execution_key(action.message.uid, action.message.attempt)
                    simulation.checker.promised(simulation.now_s, self.name, key)
                if not simulation.send(self, action.dst, action.message) and isinstance(action.message, Offer | Commit):
                    self._later(events.SendFailed(action.dst, action.message))
            case actions.SendResult():
                inline = not simulation.network.outputs_are_fetched
                result = Result(action.task, action.uid, action.attempt, action.exit, inline)
                simulation.send(self, action.dst, result)
            case actions.Announce():
                for other in simulation.hosts.values():
                    if other is not self:
                        simulation.send(self, other.name, action.message)
            case actions.SpawnTask():
                self._spawn(action)
            case actions.SignalTask():
                self._signal(action.key, action.signal)
            case actions.SetLease():
                self._lease(action)
            case actions.EvictTask():
                self._evict(action)
            case actions.ForgetTask():
                self.launcher.ended.pop(action.key, None)
            case actions.KeepOutput():
                self._later(events.OutputArrived(action.uid, action.attempt))
            case actions.FetchOutput():
                is_broken = simulation.network.breaks_output(simulation.now_s, action.node, self.name)
                self._later(events.OutputArrived(action.uid, action.attempt, "it broke off" if is_broken else ""))
            case actions.Answer():
                simulation.answered(self, action)
            case actions.TaskChanged():
                simulation.changed(self, action)
            case actions.MembersCancelled():
                for change in action.changes():
                    simulation.changed(self, change)
            case _:
                pass  # Dial: whoever is up is introduced by the simulation

    def _later(self, event: events.Event, after_s: float = 0.0) -> None:
        starts = self.starts
        self._simulation.after(after_s, lambda: self.handle(event) if starts == self.starts else None)

    # -- the launcher --------------------------------------------------------------------------------------------------

    def _spawn(self, action: actions.SpawnTask) -> None:
        simulation = self._simulation
        process = SimProcess(action, simulation.services[action.task], simulation.now_s)
        if process.deadline_s:
            process.deadline_s -= self.clock_offset_s
        self.launcher.running[action.key] = process
        simulation.checker.spawned(simulation.now_s, self.name, process)
        self._later(events.TaskStarted(action.key, EPOCH_S + simulation.now_s))
        self._watch(process)

    def _watch(self, process: SimProcess) -> None:
        process.round += 1
        number = process.round
        at_s = self.launcher.next_change_s(process)
        if at_s != float("inf"):
            self._simulation.at(at_s, lambda: self._changed(process) if process.round == number else None)

    def _changed(self, process: SimProcess) -> None:
        """End or freeze a process."""
        if self.launcher.running.get(process.key) is not process:
            return
        if self.launcher.advance(process, self._simulation.now_s):
            self._end(process, 0)
        elif process.since_s is None:
            self._simulation.checker.rests(self.name, process)
            self._later(events.TaskFrozen(process.key, frozen=True))
        else:
            self._watch(process)

    def _evict(self, action: actions.EvictTask) -> None:
        process = self.launcher.running.get(action.key)
        if process is not None and process.since_s is None:
            del self.launcher.running[action.key]
            self._later(events.TaskLost(action.key, action.reason, never_started=False))

    def _lease(self, action: actions.SetLease) -> None:
        process = self.launcher.running.get(action.key)
        if process is None or self.launcher.advance(process, self._simulation.now_s):
            return
        deadline_s = action.deadline_s - self.clock_offset_s if action.deadline_s else 0.0
        process.ts = action.ts
        was_frozen = process.since_s is None
        self.launcher.lease(process, deadline_s, self._simulation.now_s)
        if was_frozen and process.since_s is not None:
            self._later(events.TaskFrozen(process.key, frozen=False))
        if process.since_s is not None:
            self._simulation.checker.runs(self._simulation.now_s, self.name, process)
        self._watch(process)

    def _signal(self, key: str, signal: int) -> None:
        process = self.launcher.running.get(key)
        if process is not None:
            self._end(process, signal)

    def _end(self, process: SimProcess, signal: int) -> None:
        simulation = self._simulation
        code = 128 + signal if signal else 0
        exit_ = Exit(code, signal, started_at=EPOCH_S + process.started_s, ended_at=EPOCH_S + simulation.now_s)
        process.round += 1
        self.launcher.end(process, exit_)
        simulation.checker.rests(self.name, process)
        self._later(events.TaskEnded(process.key, exit_), simulation.world.notice_s)
