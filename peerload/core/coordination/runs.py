"""Running attempts of this node, for this and other homes: started when they fit, followed until their process is gone.

An attempt in `RunningTasks` holds resources. It leaves when the launcher reports how it ended, or when it is known to
have died: the launcher (or a new one) returned and neither runs it nor has its exit record.

Short tasks are given to the launcher ahead (prefetching): a *lane* of attempts waits there behind a running one. Each
is started durably like any other, and its process starts the moment the one before it ends. It takes over that
attempt's resources, and holds none before. So a slot is not idle during a round trip with a commit, and ends are
reported and recorded in batches. The expected time of a lane is bounded; the launcher returns attempts that waited too
long or have no lease.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from peerload.core.estimates import RUNS_KNOWN_MIN
from peerload.core.resources.devices import with_gpu_use
from peerload.core.work import HomePhase, HomeTask, RemoteTask
from peerload.model import metrics, timers
from peerload.model.actions import AttemptGone, EvictTask, ForgetTask, LookAtDevices, SignalTask
from peerload.model.bounded import BoundedDict
from peerload.model.messages import Died, Need, NotStarted, Query, Result, Return
from peerload.model.resources import ResourceRequest
from peerload.model.task import TIME_LIMIT_EXIT_CODE, Guarantee, attempt_of, execution_key, task_home

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peerload.core.coordination.evacuation import TaskEvacuation
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.handoff.home import HomeHandoff
    from peerload.core.membership.membership import Membership, OwnProfile
    from peerload.core.resources.admission import Ledger
    from peerload.core.sharing.information import Information
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work
    from peerload.model.events import EndAsked, Running
    from peerload.model.messages import Offer
    from peerload.model.task import Exit


SIGTERM = 15
SIGKILL = 9
TIME_LIMIT = "time limit"
DATE_SLACK_S = 0.1
"""Tolerance for a change of the machine's date during a run, before a run at its time limit looks shorter."""
SILENT = "it does not answer: tasks may be stopped, and leases are not enforced"
PEER_SLOTS_KEPT_S = 0.05
"""Time in s for which the count of peer slots is cached: hundreds of short tasks a second may end, and there may be a
thousand peers to count."""
RUNS_ON = "it runs on; the agent has restarted"


class RunningTasks:
    """The attempts that are to run here, by execution key; its timers are ``limit``, ``kill`` and ``devices``."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        home: Home,
        handoff: HomeHandoff,
        executor: ExecutorHandoff,
        shortage: ResourceShortage,
    ) -> None:
        self.frozen = Frozen(state, queue, queue.ledger, executor)
        self.terminations = TerminationTracker(state, home, self)
        self._state = state
        self._queue = queue
        self._ledger = queue.ledger
        self._membership = membership
        self._home = home
        self._handoff = handoff
        self._executor = executor
        self._shortage = shortage
        self._works: dict[str, HomeTask | RemoteTask] = {}
        self._lanes: dict[str, deque[HomeTask | RemoteTask]] = {}
        """The lane behind each running attempt, by its key."""
        self._ahead: dict[str, deque[HomeTask | RemoteTask]] = {}
        """The lane of each attempt that was given ahead, by its key."""
        self._peer_slots = -math.inf, Need(), 0
        """Cached slots of the peers that share such tasks: (valid until (s), need, number)."""
        self._launcher_away = False
        self.has_freed = False
        """True if an attempt has ended in this event, so that other tasks may start here or be requested."""
        self._strangers: set[str] = set()
        self._devices_due_s = math.inf

    def holds(self, key: str) -> bool:
        """True if this attempt is to run here. A new launcher must not start a process that was decided upon before the
        old one died: the attempt was reported as died meanwhile."""
        return key in self._works or key in self._ahead

    def is_ending(self, key: str) -> bool:
        """True if the launcher still runs this attempt although this node does not know it."""
        return key in self._strangers

    @property
    def has_launcher(self) -> bool:
        return not self._launcher_away

    def works(self) -> Iterable[HomeTask | RemoteTask]:
        """All attempts that hold resources."""
        return self._works.values()

    def restore(self, work: HomeTask | RemoteTask) -> None:
        """Add an attempt that was to run here when the agent stopped; `reconcile` finds its present state."""
        self._works[work.key] = work

    # -- starting ------------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Start waiting work that fits, in order; nothing new while this node is drained or lacks a resource."""
        queue, ledger, devices = self._queue, self._ledger, self._ledger.devices
        if queue.settled_at == (ledger.version, devices.version) and not devices.states:  # after most events
            return
        if not self._may_fill:
            return
        while self._shortage.may_start and (work := queue.next_startable()) is not None:
            queue.remove(work)
            work.started_s = self._state.now.boot_s
            if isinstance(work, HomeTask):
                self._home.start_here(work)
            elif not isinstance(work, RemoteTask) or not self._executor.start(work):
                continue
            key = work.key
            self._hold_room(key, work)
            self._works[key] = work
            self._shortage.starting(key)
            self._give_ahead(work)
        if devices.states or devices.was_left or queue.due_s != self._devices_due_s:
            self._wait_for_devices()

    @property
    def _may_fill(self) -> bool:
        return not self._launcher_away and not self._state.profile.drained

    def _give_ahead(self, first: HomeTask | RemoteTask) -> None:
        """Give the launcher short tasks to start one after the other when ``first`` has ended: the next in line with
        the same resource request. No lane gets more than its share of the waiting tasks, so that all slots end at about
        the same time: a task in a lane cannot move to a peer whose slot becomes free."""
        config, queue = self._state.config, self._queue
        if not config.ahead_s or not len(queue) or self._shortage.reason or not (each_s := self._short_s(first)):
            return
        lane = self._lanes.get(first.key)
        if lane is None:
            lane = self._lanes[first.key] = deque()
        waiting = len(queue) + len(self._ahead)
        at_most = min(config.ahead_max, waiting // self._slots_for(first))
        expected_s = each_s * len(lane)
        while len(lane) < at_most and isinstance(work := queue.head(), HomeTask | RemoteTask):
            if work.spec is not first.spec:  # members of an array share it
                each_s = self._short_s(work)
            expected_s += each_s
            if not each_s or expected_s > config.ahead_s or work.spec.request != first.spec.request:
                break
            queue.remove(work)
            after = (lane[-1] if lane else first).key
            if isinstance(work, HomeTask):
                self._home.start_here(work, after=after)
            elif self._executor.start(work, after=after):
                self._ledger.expect(work.uid, work.spec.request)
            else:
                continue
            self._ahead[work.key] = lane
            lane.append(work)

    def _slots_for(self, work: Work) -> int:
        """Slots that share the waiting tasks, if all are like ``work``: this node's and, for tasks of this home, those
        of peers that could run it and have no task to give. The peers' part is cached for PEER_SLOTS_KEPT_S."""
        own, spec, names = self._state.profile.slots, work.spec, self._state.policies.names
        if not work.is_local or all(name == "none" for kind, name in names.items() if kind.startswith("location.")):
            return own
        need, now_s = Need(spec.request, spec.placement), self._state.now.boot_s
        until_s, known, slots = self._peer_slots
        if known != need or now_s >= until_s:
            peers = self._membership.eligible(need, self._state.node)
            giving = set(self._membership.reporting(peers, "gives"))
            others = (self._membership.get(node) for node in peers if node not in giving)
            slots = sum(peer.profile.slots for peer in others if peer is not None)
            self._peer_slots = now_s + PEER_SLOTS_KEPT_S, need, slots
        return own + slots

    def _short_s(self, work: Work) -> float:
        """Expected run time here, in seconds, of a task that may be in a lane or have one behind it: the launcher can
        start it alone, and it is known to be short. 0 for any other."""
        spec, history = work.spec, self._state.history
        if (isinstance(work, HomeTask) and work.phase is HomePhase.OVER) or spec.guarantee is Guarantee.ONCE:
            return 0.0
        if spec.takes_input or spec.followed or spec.terminal or spec.is_staged or spec.request.takes_devices:
            return 0.0
        runs = history.past(history.keys_of(work))
        expected_s = (
            runs.mean_s / self._state.profile.speed if runs is not None and len(runs) >= RUNS_KNOWN_MIN else 0.0
        )
        return expected_s if expected_s <= self._state.config.ahead_s else 0.0

    def _occupy(self, key: str) -> None:
        """Give resources to an attempt that was given ahead; it leaves its lane."""
        lane = self._ahead.pop(key)
        work = next(work for work in lane if work.key == key)  # usually the first
        lane.remove(work)
        if not work.is_local:
            self._ledger.expect_no_more(work.uid)
        work.started_s = self._state.now.boot_s
        self._hold_room(key, work)
        self._works[key] = work

    def _hold_room(self, key: str, work: HomeTask | RemoteTask) -> None:
        """Reserve resources for an attempt that runs here, with its granted devices."""
        state, ledger, devices = self._state, self._ledger, _devices_of(work)
        if not devices:
            ledger.start(key, work.spec.request, is_local=work.is_local)
            return
        models = ledger.devices.models
        ledger.start(
            key,
            work.spec.request,
            is_local=work.is_local,
            devices=devices,
            run_s=state.run_s_max(work, models),
            learned=state.learned_gpu_bytes(work, models),
            owner=ledger.devices.mps_owner(work.spec, work.home if isinstance(work, RemoteTask) else ""),
        )

    def _leave(self, key: str) -> None:
        """Handle the end of an attempt that held resources: the next of its lane takes them over."""
        del self._works[key]
        self._ledger.end(key)
        if lane := self._lanes.pop(key, None):
            following = lane[0]
            self._occupy(following.key)
            self._lanes[following.key] = lane
            if self._may_fill:
                self._give_ahead(following)

    def _wait_for_devices(self) -> None:
        """Set the timer for the next time at which a device may become free without an event, and request a reading of
        devices that a task has just freed."""
        devices = self._ledger.devices
        if devices.was_left:
            devices.was_left = False
            self._state.actions.append(LookAtDevices())
        now_s = self._state.now.boot_s
        due_s = min(devices.due_s(now_s), self._queue.due_s) if devices.states else self._queue.due_s
        if due_s != self._devices_due_s:
            self._devices_due_s = due_s
            if due_s < math.inf:
                self._state.set_timer_in(max(due_s - now_s, 0.0), timers.Devices())
            else:
                self._state.clear_timer(timers.Devices())

    def strayed(self, key: str, device: str) -> None:
        """Report a running attempt that uses a device it was not granted. It counts as foreign load there."""
        work = self._works.get(key)
        if work is None:
            return
        self._state.count(metrics.ATTEMPTS_ON_WRONG_DEVICES)
        given = ", ".join(self._ledger.devices.holding.get(key, ())) or "none"
        reason = f"it uses {device}, but was granted {given}"
        if isinstance(work, HomeTask):
            self._state.note("task", "strayed", task=work.task, attempt=work.record.attempt, reason=reason)
        else:
            self._state.note_remote(work, "strayed", reason)

    def devices_due(self) -> None:
        """Let a waiting task take other devices from now on."""
        self._devices_due_s = math.inf
        self._ledger.devices.expire(self._state.now.boot_s)

    def started(self, key: str, started_at: float, *, is_over: bool = False) -> None:
        """Record that the process of an attempt runs; is_over: that it has run, and its end is reported next."""
        self._shortage.started(key)
        work = self._works.get(key) or next((task for task in self._ahead.get(key, ()) if task.key == key), None)
        if isinstance(work, HomeTask):
            self._home.started_here(work, started_at)
        elif work is not None:
            self._executor.started(work, started_at, is_over=is_over, is_short=self._short_s(work) > 0)

    # -- ending --------------------------------------------------------------------------------------------------------

    def ended(self, key: str, exit_: Exit) -> None:
        """Record the end of a process."""
        if key in self._ahead:  # the end of the attempt before it is not known yet
            self._occupy(key)
        work = self._works.get(key)
        if work is None:
            self._strangers.discard(key)
            self._forget_exit(key, exit_)
            return
        if self._shortage.reason:
            self._shortage.gone(key)
            self._shortage.try_again()
        devices, exit_ = _devices_of(work), _limited(exit_, work)
        exit_ = with_gpu_use(self._ledger.devices, key, devices, work.spec.request, exit_)
        if devices:
            self._ledger.devices.mps_ended(key, work.spec.argv, exit_)
        self._leave(key)
        work.output_waits_because = ""
        speed = self._state.profile.speed
        if exit_.speed != speed:
            exit_ = msgspec.structs.replace(exit_, speed=speed)
        if isinstance(work, HomeTask):
            self._ended_here(work, exit_)
        else:
            self._executor.results.ended(work, exit_)
        if devices:  # its learned memory use may let others share a GPU
            self._ledger.devices.version += 1
        self.has_freed = True

    def _ended_here(self, task: HomeTask, exit_: Exit) -> None:
        """Record the end of a process of this home; its output is already in this home's spool."""
        key, why, is_over = task.key, "", self._is_over(task, exit_)
        if not is_over and (why := self._handoff.run_again(task, exit_)):
            self._home.finish(task, exit_, why=why)
        self._state.actions.append(ForgetTask(key, output=not why and not is_over))

    def _is_over(self, task: HomeTask, exit_: Exit | None = None) -> bool:
        """True if a task was cancelled: its process is gone, and it is forgotten. exit_: its end, if known."""
        if task.phase is not HomePhase.OVER:
            return False
        if exit_ is not None:
            self._home.used(task.task, task.uid, task.record.attempt, self._state.node, exit_.usage)
        self._home.forget(task)
        self.terminations.gone(task.key)
        return True

    def lost(self, key: str, reason: str, *, never_started: bool, shortage: str = "") -> None:
        """End an attempt that has no process and will have none; ``never_started``: it never had one; ``shortage``: the
        resource whose lack prevented its start."""
        if shortage:
            self._shortage.began(shortage)
        self._shortage.gone(key)
        is_early = key in self._ahead
        if is_early:
            self._occupy(key)
        work = self._works.get(key)
        if work is None:
            if key in self._strangers:  # its home can be answered from now on
                self._strangers.discard(key)
                self._forget_exit(key)
            return
        if is_early and never_started and not shortage:
            self._leave(key)
            if isinstance(work, RemoteTask):
                self._executor.results.never_started(work, reason, is_returned=True)
            elif not self._is_over(work):
                self._home.requeue(work, reason)
            self._state.actions.append(ForgetTask(key, output=True))
        elif never_started:
            self._never_started(key, work, reason, is_short=bool(shortage))
        else:
            self._died(key, work, reason)
        self.fill()

    def output_waits(self, key: str, why: str) -> None:
        """Record that the output files of an ended process wait for room here."""
        work = self._works.get(key)
        if isinstance(work, HomeTask):
            self._state.note("files", "waiting", task=work.task, attempt=work.record.attempt, reason=why)
        elif work is not None:
            self._state.note_remote(work, "output waits", why)
        if work is None:
            return
        work.output_waits_because = why
        if isinstance(work, RemoteTask):
            self._executor.leases.renew_one(work)
        elif work.phase is HomePhase.OVER:  # cancelled during the collection: its signals had no effect
            self._state.actions.append(SignalTask(key, SIGKILL))

    def froze(self, key: str, *, frozen: bool) -> None:
        """Record that an attempt was frozen because its lease expired, or thawed."""
        work = self._works.get(key)
        if isinstance(work, RemoteTask):
            reason = f"{work.home} did not renew its lease in time" if frozen else f"{work.home} has returned"
            state = "frozen" if frozen else "thawed"
            if frozen:
                self._state.count(metrics.LEASES_FROZEN)
            (self.frozen.froze if frozen else self.frozen.thawed)(key)
            self._state.note_remote(work, state, reason)

    def stop(self, key: str) -> None:
        """Send SIGTERM, later SIGKILL, to a task past its time limit."""
        work = self._works.get(key)
        if work is not None and not work.output_waits_because:
            work.killed_because = TIME_LIMIT
            self._state.actions.append(SignalTask(key, SIGTERM))
            self._state.set_timer_in(self._state.config.kill_after_s, timers.Kill(key))

    def kill(self, key: str) -> None:
        """Send SIGKILL to an attempt that the first signal has not ended."""
        work = self._works.get(key)
        if work is None:
            return
        is_over = isinstance(work, HomeTask) and work.phase is HomePhase.OVER
        if work.killed_because == TIME_LIMIT and work.output_waits_because and not is_over:
            return  # a time limit does not abandon output files
        self._state.actions.append(SignalTask(key, SIGKILL))

    def _died(self, key: str, work: HomeTask | RemoteTask, reason: str) -> None:
        self._shortage.gone(key)
        self._leave(key)
        if not isinstance(work, HomeTask):
            self._executor.results.died(work, reason)
        elif not self._is_over(work):
            self._handoff.lost_attempts.died(work, reason)
        self._state.actions.append(ForgetTask(key, output=True))  # the output of a lost attempt is not needed

    def _never_started(self, key: str, work: HomeTask | RemoteTask, reason: str, *, is_short: bool) -> None:
        self._leave(key)
        if not isinstance(work, HomeTask):
            self._executor.results.never_started(work, reason)
        elif not self._is_over(work):
            self._handoff.lost_attempts.never_started(work, reason, is_short)
        self._state.actions.append(ForgetTask(key, output=True))

    def _forget_exit(self, key: str, exit_: Exit | None = None) -> None:
        """Drop the exit record of an attempt that this node does not know: of another home, or of a task cancelled
        before this agent's start."""
        with contextlib.suppress(ValueError):
            uid, attempt = attempt_of(key)
            if exit_ is not None and not self._executor.fences.home(uid):
                self._home.used("", uid, attempt, self._state.node, exit_.usage)
        self._state.actions.append(ForgetTask(key, output=False))

    # -- the launcher --------------------------------------------------------------------------------------------------

    def launcher_lost(self, reason: str) -> None:
        """Stop starting attempts until a launcher is ready."""
        self._launcher_away = True
        self._state.note("launcher", "lost", reason=reason)

    def launcher_silent(self, *, is_silent: bool) -> None:
        self._launcher_away = is_silent
        self._state.note("launcher", "silent" if is_silent else "answers", reason=SILENT if is_silent else "")

    def launcher_ready(self, running: Running, ended: dict[str, Exit], frozen: Iterable[str] = ()) -> None:
        """Start attempts again: a launcher, perhaps a new one, is ready."""
        self._launcher_away = False
        self._state.note("launcher", "ready")
        self.reconcile(running, ended, frozen)

    def reconcile(self, listed: Running, ended: dict[str, Exit], frozen: Iterable[str] = ()) -> None:
        """Compare with the launcher's list: every attempt here runs (or is frozen), has an exit record, or has died."""
        for key in list(self._ahead):
            self._occupy(key)  # the launcher says which runs, waits, has ended or is gone
        self._lanes.clear()
        running = {key: (started_at, ts) for key, started_at, ts in listed}
        strangers = [key for key in ended if key not in self._works]
        # Running attempts take their resources first, because the end of another may start a task immediately.
        for key, work in sorted(self._works.items(), key=lambda one: one[0] in ended or one[0] not in running):
            if key in ended:
                self.ended(key, ended[key])
            elif key in running:
                started_at, ts = running[key]
                work.started_s = self._state.now.boot_s - max(self._state.now.wall_s - started_at, 0.0)
                self._hold_room(key, work)
                if isinstance(work, HomeTask):
                    self._home.started_here(work, started_at, RUNS_ON)
                else:
                    self._executor.adopted_running(work, started_at, ts)
            else:
                self._died(key, work, "its processes were gone when the agent or the launcher came back")
        self._strangers = {key for key in running if key not in self._works}
        for key in running:
            if key in self._strangers:  # its home no longer wants it
                self._executor.fences.found_running(key)
                self._state.actions.append(SignalTask(key, SIGKILL))
        for key in strangers:
            self._executor.fences.found_running(key)
            self._forget_exit(key, ended[key])
        self.frozen.restore(frozen)


def _devices_of(work: HomeTask | RemoteTask) -> tuple[str, ...]:
    return work.record.devices if isinstance(work, HomeTask) else work.devices


def _limited(exit_: Exit, work: HomeTask | RemoteTask) -> Exit:
    """Exit of a task that was ended at its time limit, with this as the reason whatever signal ended it, also after a
    restart of the agent. The exit of a task that a user ended names the user, unless it succeeded. A task that ended by
    itself in time keeps its exit, however late the report arrives."""
    if work.killed_because and work.killed_because != TIME_LIMIT and exit_.exit_code and not exit_.reason:
        exit_ = msgspec.structs.replace(exit_, reason=work.killed_because)
    limit_s = work.spec.time_limit_s
    was_killed = exit_.signal in (SIGTERM, SIGKILL)
    is_over = limit_s > 0 and exit_.ended_at - exit_.started_at >= limit_s - DATE_SLACK_S
    if not (was_killed and is_over) and not (work.killed_because == TIME_LIMIT and (was_killed or is_over)):
        return exit_
    return msgspec.structs.replace(exit_, exit_code=TIME_LIMIT_EXIT_CODE, reason=TIME_LIMIT)


LOOKED_AT_MAX = 64
"""Waiting tasks of this home that are checked for one that could use the room of a frozen attempt."""
ONE_CORE = ResourceRequest()


class Frozen:
    """Frozen attempts, whose lease has expired: their home is silent, and may return (R11) or not (R5). Its timer is
    ``frozen``.

    They keep their resources for `frozen_kept_s` at least, and as long as no task of this home needs them, and no offer
    of a task that can run nowhere else. Then the attempt frozen longest is ended without a result; those that may run
    only once come last. While all attempts here are frozen, this node takes no remote tasks that would have to wait,
    and gives waiting ones back, because the duration is unknown. An offer that is declined for this reason may have
    resources freed for its next try."""

    def __init__(self, state: CoreState, queue: WaitingQueue, ledger: Ledger, executor: ExecutorHandoff) -> None:
        self._state = state
        self._queue = queue
        self._ledger = ledger
        self._executor = executor
        self._since_s: dict[str, float] = {}
        self._evicted = ""
        self.is_needed = False
        """True while an attempt is frozen, and until the effects of that are undone."""

    def __iter__(self) -> Iterator[str]:
        """Frozen attempts, the longest frozen first."""
        return iter(sorted(self._since_s, key=lambda key: self._since_s[key]))

    def restore(self, keys: Iterable[str]) -> None:
        """Add the attempts that the launcher lists as frozen, for an unknown time."""
        self._since_s.clear()
        self.is_needed = True
        for key in keys:
            self.froze(key)

    def froze(self, key: str) -> None:
        if key in self._executor.remote_tasks:
            self.is_needed = True
            self._since_s[key] = self._state.now.boot_s
            self._state.set_timer_in(self._state.config.frozen_kept_s, timers.FrozenTimeout(key))

    def thawed(self, key: str) -> None:
        if self._since_s.pop(key, None) is not None:
            self._state.clear_timer(timers.FrozenTimeout(key))

    def settle(self) -> None:
        """End frozen attempts whose resources are needed; called after every event while there are any."""
        state, ledger = self._state, self._ledger
        if not self._since_s:
            state.runs_frozen_only = state.is_stuck = self.is_needed = False
            state.turned_away = None
            return
        for key in [key for key in self._since_s if key not in ledger.running]:
            self.thawed(key)
        state.runs_frozen_only = 0 < len(self._since_s) == len(ledger.running)
        state.is_stuck = state.runs_frozen_only and not ledger.has_cores(ONE_CORE)
        if state.runs_frozen_only and len(self._queue):
            self._executor.give_waiting_back()
        if self._since_s and not state.profile.drained and not state.profile.trouble:
            self._make_room()
        state.turned_away = None

    def _make_room(self) -> None:
        """End a frozen attempt for the first waiting task of this home that would then fit, or for the offer that was
        just declined."""
        if self._evicted in self._since_s:
            return  # it is being ended
        kept_since_s = self._state.now.boot_s - self._state.config.frozen_kept_s
        due = [key for key, since_s in self._since_s.items() if since_s <= kept_since_s]
        task = self._whom_it_helps(due) if due else None
        if task is None:
            return
        remote = min((self._executor.remote_tasks[key] for key in due), key=self._order)
        self._evicted = remote.key
        self._state.count(metrics.FROZEN_TASKS_EVICTED)
        self._state.note(
            "attempt",
            "evicted",
            task=remote.task,
            attempt=remote.attempt,
            node=remote.home,
            reason=f"{task} needs its room",
        )
        reason = f"{remote.home} was silent, and a task of {task_home(task)} needed its room"
        self._state.actions.append(EvictTask(remote.key, reason))

    def _whom_it_helps(self, due: list[str]) -> str | None:
        """First task that does not fit now but would without these attempts; None if there is none."""
        own = (work for work in self._queue.oldest_first() if isinstance(work, HomeTask))
        asking: list[HomeTask | Offer] = list(itertools.islice(own, LOOKED_AT_MAX))
        if self._state.turned_away is not None:
            asking.append(self._state.turned_away)
        seen: set[ResourceRequest] = set()
        for one in asking:
            request = one.spec.request
            if request in seen:
                continue
            seen.add(request)
            if not self._ledger.fits(request) and self._ledger.fits_without(due, request):
                return one.task
        return None

    def _order(self, remote: RemoteTask) -> tuple[bool, float]:
        return remote.spec.guarantee is Guarantee.ONCE, self._since_s[remote.key]


LATELY_MAX = 10_000
"""Bound on remembered ends of attempts whose tasks are over; for an older one its node is queried."""
ENDS_AWAITED_MAX = 100_000
"""Bound on attempts whose end is awaited; beyond it the oldest are dropped, and reported when queried again."""
TerminationMessage = Result | Died | NotStarted | Return
"""Messages that prove that the attempt has no process and will have none."""


class TerminationTracker:
    """Notifies waiting clients when the processes of a cancelled attempt are gone. A cancel is confirmed once it is
    durable, which says nothing about processes. The proof is an exit seen by the launcher here, or a result, DIED or
    NOT_STARTED of the attempt's node. Nothing here is durable: a client that still waits asks again."""

    def __init__(self, state: CoreState, home: Home, runs: RunningTasks) -> None:
        self._state = state
        self._home = home
        self._runs = runs
        self._awaited: BoundedDict[str, str] = BoundedDict(ENDS_AWAITED_MAX)
        self._lately: BoundedDict[str, str] = BoundedDict(LATELY_MAX)

    def asked(self, event: EndAsked) -> None:
        """Report each attempt once it is gone; with ``query``, query the nodes that have them."""
        for attempt in event.attempts:
            key = execution_key(attempt.uid, attempt.attempt)
            is_own = attempt.node == self._state.node
            if self._lately.get(key) == attempt.node or (
                is_own and not (self._runs.holds(key) or self._runs.is_ending(key))
            ):
                self._state.actions.append(AttemptGone(key))
                continue
            self._awaited[key] = attempt.node
            if event.query and attempt.node != self._state.node:
                self._state.send(attempt.node, Query(attempt.task, attempt.uid, attempt.attempt))

    def message_received(self, src: str, message: TerminationMessage) -> None:
        """Record that a node has proven the end of an attempt. Messages about an unfinished task are handled
        elsewhere."""
        if message.uid in self._home.tasks:
            return
        key = execution_key(message.uid, message.attempt)
        self._lately[key] = src
        self.gone(key, src)

    def gone(self, key: str, node: str = "") -> None:
        """Handle that no process of this attempt is left at that node ("": here)."""
        if self._awaited.get(key) == (node or self._state.node):
            del self._awaited[key]
            self._state.actions.append(AttemptGone(key))


TROUBLE = "shortage"


@dataclass(eq=False, repr=False)
class ResourceShortage:
    """Circuit breaker of this node, for a lack of disk space, inodes, descriptors, processes or memory.

    An attempt that could not start for lack of one of these never started, and the next one would fail as well. After
    such a failure the breaker is open: nothing starts here, and peers get the reason. After a pause, or after an end
    here, it is half open: one attempt is tried, a remote one if no own task waits. If that starts, the breaker is
    closed; if not, the next pause is twice as long. ``reason``: the lacking resource, as far as known; "" while the
    breaker is closed."""

    _state: CoreState
    _own_profile: OwnProfile
    _executor: ExecutorHandoff
    _information: Information
    _evacuation: TaskEvacuation
    reason: str = field(default="", init=False)
    _is_open: bool = field(default=False, init=False)
    _is_announced: bool = field(default=False, init=False)
    _trial: str = field(default="", init=False)
    _pause_s: float = field(default=0.0, init=False)
    _closed_s: float = field(default=0.0, init=False)

    @property
    def may_start(self) -> bool:
        return not self._is_open and not self._trial

    @property
    def leaves_because(self) -> str:
        """Reason why own waiting tasks search for another node; "" if they need not."""
        return f"{self._state.node} cannot start it: {self.reason}" if self._is_open else ""

    def began(self, reason: str) -> None:
        """Open the breaker after an attempt that could not be started because of a shortage."""
        if self._is_open:  # it was being started when another failed
            return
        config, now_s = self._state.config, self._state.now.boot_s
        if not self.reason:
            self._state.count(metrics.SHORTAGES)
            self._state.note("launcher", "short", reason=reason)
            if now_s > self._closed_s + 2 * self._pause_s:  # otherwise the same shortage continues
                self._pause_s = 0.0
        self._pause_s = min(max(self._pause_s * 2, config.loss_backoff_s), config.loss_backoff_s_max)
        self.reason = reason
        self._is_open = True
        self._trial = ""
        self._state.set_timer_in(self._pause_s, timers.Shortage())
        self._announce(reason)
        self._executor.give_all_back(f"{self._state.node} cannot start it: {reason}")

    def try_again(self) -> None:
        """Allow starts again: after the pause, or when an ended task may have freed the resource."""
        if self._is_open:
            self._is_open = False
            self._state.clear_timer(timers.Shortage())
            self._evacuation.over()

    def starting(self, key: str) -> None:
        """Record that this attempt is being started. While the circuit breaker is half open it is the trial."""
        if self.reason:
            self._trial = key

    def started(self, key: str) -> None:
        """Close the breaker if this attempt was the trial: its process has started."""
        if key == self._trial:
            self._trial = self.reason = ""
            self._closed_s = self._state.now.boot_s
            self._state.note("launcher", "recovered")
            self._announce("")

    def gone(self, key: str) -> None:
        """Record that an attempt will not run here. If it was the trial, another one may be."""
        if key == self._trial:
            self._trial = ""

    def settle(self) -> None:
        """Let the next remote offer be the trial while the breaker is half open and no own task waits;
        called after every event while there is a ``reason``."""
        if self.reason and self.may_start:
            self._announce("")

    def _announce(self, reason: str) -> None:
        if bool(reason) is self._is_announced:
            return
        self._is_announced = bool(reason)
        self._own_profile.trouble(TROUBLE, f"cannot start tasks: {reason}" if reason else "")
        self._information.announce()
