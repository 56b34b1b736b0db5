"""The leases that a home has granted: how long they last, their renewal, their end, nodes that come back, and parking.

A task leaves the node it was leased to only on that node's word (NOT_STARTED, RETURN, DIED, a RESULT), when its machine
was booted anew, or past ``deadline_s``, which is moved before every COMMIT and RENEW_OK so that it always lies behind
the executor's own (R2).

A home that goes away politely parks its tasks: they run on elsewhere without a deadline until it is back (R12). PARKED(n, p)
is durable before PARK(n, ts=p) is sent; p is the newest that the home has heard of the executor's clock. From then on the
attempt is taken back on proof alone. Coming back takes a confirmation: RENEWs of p or older are not answered; newer ones are,
with a deadline; and only a RENEW that states a deadline given for more than p ends PARKED. So it does not matter which of
these messages are late, lost or repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.work import GrantedLease, HomePhase, story
from peerload.model import metrics, timers
from peerload.model.actions import TaskChanged
from peerload.model.errors import InvariantBroken
from peerload.model.messages import RENEWALS_MAX, LeaseExtension, Park, Query, Renew, RenewOk, Revoke
from peerload.model.messages import Parking as Parked
from peerload.model.task import Guarantee, TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.retries import LostAttempts
    from peerload.core.work import HomeTask
    from peerload.model.messages import Identity, Renewal
    from peerload.model.task import TaskSpec

SIGKILL = 9
DRIFT_MAX = 1 / 12
"""Clocks of two machines are taken to differ in speed by less than this; a lease's grace is this part of it at least."""
COMMITS_LOST = "the database has lost its last commits, and whether it was started since cannot be known"
AUTO_PART = 10.0
"""A lease that grows with the work at stake is this part of the time that its task has run."""


class HomeLeases:
    """One per node; its timers are ``lease`` and ``ask``."""

    def __init__(self, state: CoreState, home: Home, lost_attempts: LostAttempts, parking: TaskParking) -> None:
        self._state = state
        self._home = home
        self._lost_attempts = lost_attempts
        self._parking = parking

    # -- how long ------------------------------------------------------------------------------------------------------

    def first_s(self, spec: TaskSpec) -> float:
        """The lease that a COMMIT grants."""
        return spec.lease_s or self._state.config.lease_s

    def _renewal_s(self, task: HomeTask, renewal: Renewal) -> float:
        """The lease that a renewal grants: no more than is durable with the attempt, since a restarted home has to assume that it
        was granted (R4). For a lease that grows that is doubled when it is reached."""
        longest_s = task.record.lease_s
        if not task.spec.lease_auto:
            return longest_s
        wanted_s = min(renewal.ran_s / AUTO_PART, self._state.config.lease_auto_s_max)
        if wanted_s > longest_s:
            longest_s = min(2 * wanted_s, self._state.config.lease_auto_s_max)
            self._home.become(task, f"it has run for {renewal.ran_s:.0f} s: its lease grows", lease_s=longest_s)
        return min(max(self.first_s(task.spec), wanted_s), longest_s)

    def extend(self, task: HomeTask, lease_s: float) -> None:
        """The deadline moves, before the executor's may (R2); never back, as an earlier grant may have been longer."""
        if task.record.parked_ts:
            return
        grace_s = max(self._state.config.lease_grace_s, lease_s * DRIFT_MAX)
        lease = granted(task)
        lease.deadline_s = max(lease.deadline_s, self._state.now.boot_s + lease_s + grace_s)
        self._state.set_timer_in(lease.deadline_s - self._state.now.boot_s, timers.Lease.of(task.uid))

    # -- asking --------------------------------------------------------------------------------------------------------

    def restored(self, task: HomeTask) -> None:
        """A lease, or one lost sight of, found in the store at start: asks at once."""
        task.lease = GrantedLease(repeat_s=self._state.config.repeat_s)
        if task.phase is HomePhase.AWAY:
            task.lease.commits = 2  # how often COMMIT was said before the restart is not known: never "never"
            self.extend(task, task.record.lease_s)  # it may have been renewed just before (R4)
        self.ask(task)

    def commits_lost(self, queued: Sequence[HomeTask]) -> None:
        """The database of this home has lost its last commits: a task that it knows as queued may have been started since.
        One that may run once only is held. The others, and those that are queued again meanwhile, wait until no lease can
        be left that was granted then."""
        config = self._state.config
        longest_s = config.lease_s
        for task in queued:
            asked_s = config.lease_auto_s_max if task.spec.lease_auto else task.spec.lease_s
            longest_s = max(longest_s, asked_s, task.record.lease_s)
        grace_s = max(config.lease_grace_s, longest_s * DRIFT_MAX)
        self._state.unsure_until_s = self._state.now.boot_s + longest_s + grace_s
        for task in queued:
            if task.spec.guarantee is Guarantee.ONCE:
                self._home.hold(task, COMMITS_LOST)

    def ask(self, task: HomeTask) -> None:
        """Send QUERY to the node of a task that was not heard of. Every executor answers; it is sent less and less often."""
        config = self._state.config
        if task.phase is HomePhase.AWAY:
            longest_s = config.repeat_s_max
        elif task.phase is HomePhase.UNKNOWN and task.record.node:
            longest_s = config.unknown_ask_s_max
        else:
            return
        lease = granted(task)
        lease.repeat_s = min(lease.repeat_s * 2, longest_s) or config.repeat_s
        if not self._parking.is_away:
            self._state.send(task.record.node, Query(task.task, task.uid, task.record.attempt))
        self._state.set_timer_in(lease.repeat_s, timers.QueryDue.of(task.uid))

    def resumed(self, task: HomeTask) -> None:
        """An older attempt's result has not come after all. Whatever was said of the current one meanwhile counted for
        nothing, and its node will not say it twice: ask."""
        if task.phase is HomePhase.AWAY:
            self.extend(task, task.record.lease_s)
        if task.collection is not None and task.collection.attempt != task.record.attempt:  # else its node repeats it
            self._ask_at_once(task)

    def _ask_at_once(self, task: HomeTask) -> None:
        if task.lease is not None:
            task.lease.repeat_s = 0.0
        self.ask(task)

    def _ask_if_silent(self, task: HomeTask, lease_s: float) -> None:
        """Set the timer that asks if two renewals are missed: a lease is renewed every quarter of it, and a RETURN or DIED may be lost."""
        granted(task).repeat_s = self._state.config.repeat_s
        self._state.set_timer_in(lease_s / 2, timers.QueryDue.of(task.uid))

    # -- renewals ------------------------------------------------------------------------------------------------------

    def renew_received(self, src: str, message: Renew) -> None:
        """Leases are renewed in one answer; attempts that are no longer current are revoked."""
        if self._parking.is_away:
            return
        extensions: list[LeaseExtension] = []
        for renewal in message.renewals:
            task = self._home.tasks.get(renewal.uid)
            if task is not None and self._is_current(task, src, renewal.attempt):
                if self._parking.is_answered(task, src, renewal):
                    extensions.append(self._renewed(task, src, renewal))
            elif self._home.may_obey(renewal.uid, renewal.attempt):
                self._state.count(metrics.RENEWALS_OF_CANCELLED)
            elif task is None or task.phase is not HomePhase.COLLECTING:
                self._state.count(metrics.RENEWALS_FROM_NON_EXECUTOR)
                reason = "no longer this attempt's turn"
                self._state.send(src, Revoke(renewal.task, renewal.uid, renewal.attempt, SIGKILL, reason))
        if extensions:
            self._state.send(src, RenewOk(tuple(extensions)))

    def _renewed(self, task: HomeTask, src: str, renewal: Renewal) -> LeaseExtension:
        lease = granted(task)
        lease.heard_ts = max(lease.heard_ts, renewal.ts)
        lease_s = self._renewal_s(task, renewal)
        self.extend(task, lease_s)
        self._ask_if_silent(task, lease_s)
        task.devices = renewal.devices or task.devices
        if renewal.started_at and not task.running_at:
            task.running_at = self._home.by_own_clock(task, renewal.started_at)
            record = msgspec.structs.replace(task.record, started_at=task.running_at)
            self._state.actions.append(TaskChanged(record, running=True, reason=f"started on {src}"))
            self._home.seen_running(task, f"started on {src}")
        priority = None if task.running_at else task.record.priority
        return LeaseExtension(renewal.uid, renewal.attempt, renewal.ts, lease_s, priority)

    def send_priority(self, task: HomeTask) -> bool:
        """Send the priority of a task to the node that has it and has not started it; with each renewal it is sent
        again. → whether there is such a node."""
        if task.phase is not HomePhase.AWAY or task.running_at:
            return False
        record = task.record
        extension = LeaseExtension(task.uid, record.attempt, 0.0, record.lease_s, record.priority)
        self._state.send(record.node, RenewOk((extension,)))
        return True

    def _is_current(self, task: HomeTask, src: str, attempt: int) -> bool:
        """True if src holds the current attempt; one that was given up but not granted anew is taken back (R11)."""
        record = task.record
        if attempt != record.attempt:
            return False
        match task.phase:
            case HomePhase.AWAY:
                return record.node == src
            case HomePhase.COLLECTING:  # an older attempt's result, which may never come
                is_collected = task.collection is not None and task.collection.attempt == attempt
                return record.node == src and record.state is TaskState.LEASED and not is_collected
            case HomePhase.UNKNOWN:
                is_back = src in (record.node, record.last_node)
            case HomePhase.WAITING | HomePhase.OFFERED | HomePhase.RESTING | HomePhase.GATED:
                is_back = record.last_node == src
            case HomePhase.HELD:  # for nodes that went away, which this one did not
                is_back = record.last_node == src
                if is_back and not self._home.mediator.may_regain_lease(task):
                    is_back = False  # from now on nothing is believed of that attempt, which is revoked
                    self._home.become(task, record.reason, last_node="")
            case _:
                is_back = False
        if is_back:
            lease_s = max(self.first_s(task.spec), record.lease_s)
            self._home.take_back(task, src, f"{src} is back and still has it", lease_s)
        return is_back

    # -- the end of leases ---------------------------------------------------------------------------------------------

    def ran_out(self, task: HomeTask) -> None:
        """End a lease: the executor was not heard of for so long that it has frozen the task for sure."""
        if task.phase is not HomePhase.AWAY or task.record.parked_ts:
            return
        left_s = granted(task).deadline_s - self._state.now.boot_s
        if left_s > 0.0:
            self._state.set_timer_in(left_s, timers.Lease.of(task.uid))
        else:
            self._lost_attempts.expired(task)

    def machine_changed(self, identity: Identity) -> None:
        """A node came back with another machine boot id: nothing that ran on it before can be alive (R6)."""
        for task in self._home.at(identity.node):
            boot = task.record.machine_boot
            if task.phase in (HomePhase.AWAY, HomePhase.UNKNOWN) and boot not in ("", identity.machine_boot):
                self._lost_attempts.died(task, f"{identity.node} was rebooted")

    def peer_is_back(self, node: str) -> None:
        """Ask a node that has started again, at once, what became of the tasks that it holds."""
        for task in self._home.at(node):
            self._ask_at_once(task)

    def peer_died(self, node: str) -> None:
        """Handle a node that is called dead: no proof, but enough for tasks that asked for it (--fast)."""
        for task in self._home.at(node):
            self._lost_attempts.called_dead(task)

    def forgotten(self, node: str) -> int:
        """A user asserts that the node is gone for good: proof for what is parked there (R12), and nobody is asked any
        more about what is unknown. → how many tasks waited for it."""
        tasks = [
            task
            for task in self._home.at(node)
            if task.phase is HomePhase.UNKNOWN or (task.phase is HomePhase.AWAY and task.record.parked_ts)
        ]
        for task in tasks:
            self._lost_attempts.died(task, f"{node} was forgotten")
        return len(tasks)

    def ask_all(self) -> None:
        """Ask what became of every task that is elsewhere, since this home is back."""
        for node in list(self._home.elsewhere):
            self.peer_is_back(node)


def granted(task: HomeTask) -> GrantedLease:
    """The lease of a task that another node has, or had. Raises InvariantBroken if there was none."""
    if task.lease is None:
        raise InvariantBroken(f"{task.task} is {task.phase} and was never leased", story=story(task))
    return task.lease


class TaskParking:
    """One per node. ``is_away``: this home has said good-bye and grants nothing until it is back."""

    def __init__(self, state: CoreState, membership: Membership, home: Home) -> None:
        self._state = state
        self._membership = membership
        self._home = home
        self.is_away = False

    def go_away(self, why: str) -> None:
        """Park what other nodes have and was heard of since this home's start. At a node that a user has said to be gone for
        good nobody would hear of it, or come back: there leases run out."""
        self.is_away = True
        parked: dict[str, list[Parked]] = {}
        for node in list(self._home.elsewhere):
            if self._membership.get(node) is None:
                continue
            for task in self._home.at(node):
                record = task.record
                has_lease = task.phase in (HomePhase.AWAY, HomePhase.COLLECTING) and record.node == node
                heard_ts = task.lease.heard_ts if task.lease is not None else 0.0
                if has_lease and heard_ts > record.parked_ts:
                    self._home.become(task, f"parked: {why}", parked_ts=heard_ts)
                    self._state.clear_timer(timers.Lease.of(task.uid))
                    parked.setdefault(node, []).append(Parked(task.task, task.uid, record.attempt, heard_ts))
        for node, parkings in parked.items():
            for first in range(0, len(parkings), RENEWALS_MAX):
                self._state.send(node, Park(tuple(parkings[first : first + RENEWALS_MAX])))

    def resume(self) -> None:
        """Awake again."""
        self.is_away = False

    def is_answered(self, task: HomeTask, src: str, renewal: Renewal) -> bool:
        """True if a renewal of the current attempt is answered; it may be what ends PARKED."""
        parked_ts = task.record.parked_ts
        if not parked_ts:
            return True
        if renewal.ts <= parked_ts:  # said before this home went away
            self._state.count(metrics.RENEWALS_BEFORE_PARKING)
            return False
        if renewal.deadline_ts > parked_ts:
            self._home.become(task, f"{src} has a deadline again", parked_ts=0.0)
        return True
