"""One simulated machine: clock, disk, launcher and, while its agent is up, the same `Node` that the real agent drives.

Actions are performed in order; outward ones behind a `Persist` wait until the disk has it. Whatever befalls the machine
(`driver.py` decides what and when) is a method here.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from peerload.core.node import Node
from peerload.model import actions, events, timers
from peerload.model.errors import InvariantBroken
from peerload.model.messages import Identity, NotStarted, Return
from peerload.model.resources import Profile
from peerload.model.task import execution_key
from tests.chaos.clock import Clock
from tests.chaos.disk import Disk
from tests.chaos.launcher import Launcher
from tests.chaos.release import Release
from tests.core.invariants import validate

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.model.resources import LoadReport
    from tests.chaos import plan
    from tests.chaos.cluster import Cluster

OUTWARD = frozenset(actions.OUTWARD)
TURN_S = 0.001
"""How long frequent events wait for others, where they are decided about together."""
BACKLOG_MAX = 100_000
"""Events that may wait for an agent that does not run; more means that something is never bounded (promise 11)."""
TIMER_LATE_S = 1e-6
"""A timer is never early, whatever the rounding of the clock."""
WAKE_FIRST = 0.5
"""Share of wake-ups that an agent notices before it reads what has come meanwhile."""
START_AGAIN_S = 1.0
"""Who starts an agent on a machine that sleeps, or before the last one has ended, tries again after this."""
BOOT_BASE_S_MAX = 60.0
"""CLOCK_BOOTTIME when an agent starts after a boot, at most."""


class Machine:
    """``run`` numbers the starts and ends of its agent: what was arranged by another run is void."""

    def __init__(self, cluster: Cluster, facts: plan.Machine) -> None:
        self.cluster = cluster
        self.facts = facts
        self.name = facts.name
        gpus = facts.slots if any(job.gpu_gib for job in cluster.plan.jobs) else 0
        self.profile = Profile(facts.name, facts.slots, float(facts.slots), gpus=gpus, slots_fixed=True)
        self.rng = random.Random(f"{cluster.plan.seed} {facts.name}")
        self.clock = Clock(facts.rate, facts.base_s)
        self.disk = Disk(1)
        self.launcher = Launcher(cluster, self, self.rng)
        self.node: Node | None = None
        self.run = 0
        self.boots = 1
        self.is_gone = False
        self.has_power = True
        self.is_suspended = False
        self.is_paused = False
        self.is_stopping = False
        self.launcher_dies: plan.LauncherCrash | None = None
        self.fsync_fails: plan.FsyncError | None = None
        self.stalled_until_s = 0.0
        self.short_until_s = 0.0
        self.has_room = True
        self.boot = 0
        self.addresses: dict[str, Identity] = {}
        """Addresses at which its peers were last met: a file beside the database."""
        self.identity = self._identity()
        self._backlog: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._inbox: list[events.Event] = []
        """What waits a moment for other events, that they are decided about together, as in an agent that is busy."""
        self._timers: dict[timers.Timer, float] = {}
        self.release = Release(self)
        self._launcher_lost = False

    def _identity(self) -> Identity:
        return Identity(
            self.name,
            f"{self.name}-boot-{self.boot}",
            f"{self.name}-machine-{self.boots}",
            f"{self.name}-store-{self.disk.number}",
            self.disk.starts,
            f"{self.name}:1",
        )

    @property
    def is_asleep(self) -> bool:
        """True if its agent gets no processor."""
        return self.is_paused or self.is_suspended

    # -- start and crash -----------------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        """A fresh core from what is durable and from what the launcher knows."""
        if not self.has_power or self.is_gone or (self.node is not None and not self.is_stopping):
            return
        if self.is_suspended or self.is_stopping:
            self.cluster.after(START_AGAIN_S, self.start_agent)
            return
        self.run += 1
        self.boot += 1
        self._inbox.clear()
        self.disk.starts += 1
        self.identity = self._identity()
        self.launcher.start()
        self._launcher_lost = False
        rng = random.Random(f"{self.cluster.plan.seed} {self.name} {self.boot}")
        own = copy.deepcopy(self.cluster.policies)  # as in a process of its own
        self.node = Node(self.cluster.config, own, self.identity, self.profile, rng)
        self.cluster.checker.recovered(self)
        ready = self.launcher.listing()
        started = self.disk.started(ready.running, dict(ready.ended))
        known = tuple(identity for name, identity in self.addresses.items() if name != self.name)
        seeds = self.cluster.seeds(self.name)
        self.handle(msgspec.structs.replace(started, frozen=ready.frozen, known=known, seeds=seeds))
        if not self.has_room:
            self.handle(events.DiskRoomChanged(has_room=False))
        self.cluster.network.agent_started(self)

    def crash_agent(self) -> None:
        """The agent is gone at once; of what was being written a prefix survives. Launcher and tasks go on."""
        if self.node is None:
            return
        self.run += 1
        self.release.crash()
        self._agent_ends()

    def _agent_ends(self) -> None:
        self.cluster.traced(self.name, "agent ends")
        self.cluster.checker.agent_ended(self)
        if self.node is not None:
            self.cluster.collect(self.node)
        self.node = None
        self.run += 1
        self.is_paused = self.is_stopping = False
        self._backlog.clear()
        self._timers.clear()
        self.release = Release(self)
        self.cluster.network.agent_ended(self)

    def crash_machine(self, *, loses_disk: bool = False) -> None:
        """Power loss: agent, launcher and tasks are gone; the disk stays, unless it is lost."""
        self.crash_agent()
        self.is_suspended = False
        self.has_power = False
        self.launcher.power_lost()
        self.boots += 1
        if loses_disk:
            self.lose_disk()
            self.launcher.ended.clear()

    def power_on(self) -> None:
        """Boot the machine; its agent starts."""
        if not self.has_power and not self.is_gone:
            self.has_power = True
            self.clock.booted(self.cluster.now_s, self.rng.uniform(5.0, BOOT_BASE_S_MAX))
            self.start_agent()

    def lose_disk(self) -> None:
        """An empty database in place of the one there was."""
        self.cluster.checker.disk_lost(self)
        self.disk = Disk(self.disk.number + 1)
        self.addresses.clear()

    def stop_agent(self) -> None:
        """`peerload down`: it says good-bye, what was decided becomes durable and goes out."""
        if self.node is None or self.is_asleep:
            return
        self.is_stopping = True
        self.handle(events.AgentStopping())
        self._when_drained(self._agent_ends)

    def _when_drained(self, then: Callable[[], None]) -> None:
        if self.release.is_waiting:
            self.later(0.01, self._when_drained, then)
        else:
            then()

    def heal(self) -> None:
        """End all faults of this machine, and have it up."""
        self.launcher_dies = self.fsync_fails = None
        self.stalled_until_s = self.short_until_s = 0.0
        self.wake()
        self.unpause()
        self.launcher.resume()
        self.power_on()
        self.start_agent()

    # -- sleep ---------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """SIGSTOP to the agent."""
        if self.node is not None:
            self.is_paused = True

    def unpause(self) -> None:
        """SIGCONT."""
        self.is_paused = False
        self._catch_up()

    def say_sleeping(self) -> None:
        """Tell the agent that the machine is about to sleep; what it decides then becomes durable and goes out."""
        self.handle(events.MachineSleeping())
        self._when_drained(self.suspend)

    def suspend(self) -> None:
        """The whole machine sleeps."""
        if self.has_power and not self.is_suspended:
            self.is_suspended = True
            self.launcher.fall_asleep()

    def wake(self) -> None:
        """Wake the machine up; CLOCK_BOOTTIME has gone on."""
        if self.is_suspended:
            self.is_suspended = False
            self.launcher.wake_up()
            if self.node is not None:
                self._back_from_sleep()
            self._catch_up()

    def _back_from_sleep(self) -> None:
        """Its agent notices: another boot id, and its links are made anew. What had come for the old one may be read before."""
        self.boot += 1
        self.identity = self._identity()
        woke = (self.handle, (events.MachineWoke(),))
        if self.rng.random() < WAKE_FIRST:
            self._backlog.appendleft(woke)
        else:
            self._backlog.append(woke)
        self.cluster.network.agent_woke(self)

    def _catch_up(self) -> None:
        while self._backlog and not self.is_asleep:
            call, given = self._backlog.popleft()
            call(*given)

    # -- events in, actions out ----------------------------------------------------------------------------------------

    def later(self, seconds: float, call: Callable[..., object], *given: object) -> None:
        """Something its agent will do, if that is still the same run then; when it is awake."""
        self.cluster.after(seconds, self._now, self.run, call, given)

    def _now(self, run: int, call: Callable[..., object], given: tuple[object, ...]) -> None:
        if run != self.run:
            return
        if self.is_paused or self.is_suspended:
            if len(self._backlog) >= BACKLOG_MAX:
                raise InvariantBroken(f"I11: {self.name} has {BACKLOG_MAX} events waiting")
            self._backlog.append((call, given))
        else:
            call(*given)

    def deliver(self, event: events.Event) -> None:
        """An event from outside, now or as soon as the agent is awake."""
        if self.node is not None:
            self._now(self.run, self.handle, (event,))

    def handle(self, event: events.Event) -> None:
        """An event for the core, in its turn."""
        self._inbox.append(event)
        if len(self._inbox) == 1 and self.cluster.plan.seed % 3 == 0 and isinstance(event, events.FREQUENT):
            self.later(TURN_S, self._take_turn)
        elif len(self._inbox) == 1 or not isinstance(event, events.FREQUENT):
            self._take_turn()

    def _take_turn(self) -> None:
        batch = self._inbox.copy()
        self._inbox.clear()
        for event in events.together(batch):
            if isinstance(event, events.Together):
                self.cluster.gauges.count("events decided about together", len(event.events))
            self._decide(event)

    def _decide(self, event: events.Event) -> None:
        """One event for the core, and what it wants done."""
        node, cluster = self.node, self.cluster
        if node is None:
            return
        cluster.steps += 1
        if cluster.trace is not None:
            cluster.trace.add(cluster.now_s, self.name, event)
        decided = node.handle(self.clock.instant(cluster.now_s), event)
        validate(node)
        for action in decided:
            if cluster.trace is not None:
                cluster.trace.add(cluster.now_s, self.name, action)
            kind = type(action)
            if isinstance(action, actions.Persist):
                self.release.keep(action)
            elif kind in OUTWARD:
                self.release.when_durable(action)
            else:
                self._perform_inward(action)
        for one in event.events if isinstance(event, events.Together) else (event,):
            if isinstance(one, events.MessageReceived):
                cluster.checker.heard(self, one.message)
        self.release.end_turn()

    def _perform_inward(self, action: actions.Action) -> None:
        match action:
            case actions.SetTimer():
                self._timers[action.timer] = action.at_s
                at_s = self.clock.at_s(action.at_s) + TIMER_LATE_S
                self.cluster.at(at_s, self._now, self.run, self._expire, (action.timer, action.at_s))
            case actions.ClearTimer():
                self._timers.pop(action.timer, None)
            case actions.SendGossip():
                self.cluster.network.gossip(self, action)
            case _:
                pass  # a record of a decision: it is in the trace

    def _expire(self, timer: timers.Timer, at_s: float) -> None:
        if self._timers.get(timer) == at_s:
            del self._timers[timer]
            self.handle(events.TimerExpired(timer))

    def timers(self) -> int:
        """The number of timers that are set."""
        return len(self._timers)

    def perform(self, action: actions.Action) -> None:  # noqa: C901 PLR0912 -- one line an action
        """Carry out an outward action; `Release` says when."""
        cluster = self.cluster
        match action:
            case actions.Send():
                if isinstance(action.message, NotStarted | Return):
                    cluster.checker.promised(self, execution_key(action.message.uid, action.message.attempt))
                said = type(action.message).__name__
                cluster.provoked.about_to_say(self, said, action.message, action.dst)
                cluster.network.send(self, action.dst, action.message)
                cluster.provoked.has_said(self, said, action.message, action.dst)
            case actions.SendResult():
                cluster.provoked.about_to_say(self, "ResultTimeout", action, action.dst)
                cluster.network.send_result(self, action)
                cluster.provoked.has_said(self, "ResultTimeout", action, action.dst)
            case actions.Announce():
                cluster.network.announce(self, action.message)
            case actions.SpawnTask():
                self._spawn(action)
            case actions.SignalTask():
                self._request("signal", action.key, action.signal)
            case actions.SetLease():
                self._request("lease", action.key, action.deadline_s, action.ts)
            case actions.EvictTask():
                self._request("evict", action.key, action.reason)
            case actions.ForgetTask():
                self._request("forget", action.key)
            case actions.KeepOutput():
                self.later(self.facts.disk_s, self.handle, events.OutputArrived(action.uid, action.attempt))
            case actions.FetchOutput():
                cluster.network.fetch_output(self, action)
            case actions.Answer():
                cluster.clients.answered(self, action)
            case actions.TaskChanged():
                cluster.checker.shown(self, action)
            case actions.MembersCancelled():
                for change in action.changes():
                    cluster.checker.shown(self, change)
            case actions.FindTasks():
                found = tuple(self.disk.found(task) for task in action.tasks)
                self.later(self.facts.disk_s, self.handle, events.TasksFound(found))
            case actions.Dial():
                cluster.network.dial(self, action.identity.node)
            case actions.ForgetPeer():
                self.addresses.pop(action.node, None)
            case actions.DialAddress():
                cluster.network.dial(self, action.address.partition(":")[0])
            case _:
                raise InvariantBroken(f"nobody performs {type(action).__name__}")

    def report(self) -> LoadReport | None:
        """Its load, as it is shown to a peer outside of what the core decides."""
        if self.node is None:
            return None
        report = self.node.sharing.shown()
        self.handle(events.LoadPublished(report))
        return report

    # -- the launcher --------------------------------------------------------------------------------------------------

    def _spawn(self, action: actions.SpawnTask) -> None:
        """Tell the launcher, unless the attempt was found to have died meanwhile."""
        if self.node is not None and self.node.holds(action.key):
            self._request("spawn", action)
            self.cluster.provoked.has_said(self, "SpawnTask", action, self.name)
            if self.launcher_dies is not None:
                self.cluster.gauges.count("launcher killed between START and fork")
                self.crash_launcher(self.launcher_dies.down_s)

    def _request(self, do: str, *given: object) -> None:
        if not self._launcher_lost:  # else LauncherReady will tell what is true then
            self.launcher.request(do, *given)

    def from_launcher(self, event: events.Event, generation: int) -> None:
        """A word of the launcher, if it is still that one."""
        if generation == self.launcher.generation:
            self.handle(event)

    def crash_launcher(self, down_s: float) -> None:
        """Kill the launcher with its tasks; the agent, if it is up, starts another."""
        if not self.has_power:
            return
        self.launcher_dies = None
        self.launcher.crash()
        self._launcher_lost = True
        if self.node is not None:
            self.later(0.0, self.handle, events.LauncherLost())
            self.later(down_s, self._launcher_is_back, self.launcher.generation)

    def _launcher_is_back(self, generation: int) -> None:
        if generation == self.launcher.generation:
            self.launcher.start()
            ready = self.launcher.listing()
            self._launcher_lost = False
            self.handle(ready)

    def runs_guests(self) -> bool:
        """True if its launcher has a task of another home."""
        return any(process.task.partition("/")[0] != self.name for process in self.launcher.running.values())

    # -- facts ---------------------------------------------------------------------------------------------------------

    def becomes(self, **changes: object) -> None:
        """Another profile from its next start on."""
        self.profile = msgspec.structs.replace(self.profile, version=self.profile.version + 1, **changes)
