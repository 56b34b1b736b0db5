"""The home's side of the handoff: offers, commits, results, leases and parking. docs/wire.md names the rules (D1 … R12).

An attempt number is granted once: an accepted offer uses it up with a durable LEASED before COMMIT is sent (D2). Lost
attempts are handled in `tasks/retries.py`; the task's record is in `tasks/home.py`.

A task leaves the node it was leased to only after that node's statement (NOT_STARTED, RETURN, DIED, a RESULT), after a
reboot of its machine, or past ``deadline_s``, which is moved before every COMMIT and RENEW_OK so that it is always
later than the executor's own (R2).

A home that stops in an orderly way parks its tasks: they run on elsewhere without a deadline until it returns (R12).
PARKED(n, p) is durable before PARK(n, ts=p) is sent; p is the newest time of the executor's clock that the home knows.
From then on only proof takes the attempt back. The return needs a confirmation: RENEWs of p or older are not answered;
newer ones are, with a deadline; and only a RENEW that states a deadline granted for more than p ends PARKED. So these
messages may be late, lost or repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.resources.admission import asked_of, claims_room, why_never
from peerload.core.tasks.retries import LostAttempts, Retries
from peerload.core.work import Collection, GrantedLease, HomePhase, Offering, story
from peerload.model import actions, messages, metrics, rules, timers
from peerload.model.bounded import BoundedDict
from peerload.model.errors import InvariantBroken
from peerload.model.task import GRANTS_KEPT_MAX, Grant, Guarantee, TaskState, without_files, without_missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import HomeTask
    from peerload.model.events import OutputArrived, OutputComing
    from peerload.model.task import Exit, Staged, TaskSpec


SIGKILL = 9
UNCOLLECTED_CHARS_MAX = 300
"""Limit on the length of the reason why a result could not be stored."""
PLACEMENTS = {kind: metrics.labelled(metrics.PLACEMENTS, kind=kind) for kind in ("asked", "chosen", "needed")}


class HomeHandoff:
    """The exchange of a home with the nodes that run its tasks; its timer is ``offer``.

    ``declined(task, node, reason)`` is called when an offer has failed.
    """

    def __init__(self, state: CoreState, queue: WaitingQueue, membership: Membership, home: Home) -> None:
        self._state = state
        self._queue = queue
        self._membership = membership
        self._home = home
        self.lost_attempts = LostAttempts(state, membership, home)
        self.retries = Retries(state, membership, home, self.lost_attempts)
        self.parking = TaskParking(state, membership, home)
        self.leases = HomeLeases(state, home, self.lost_attempts, self.parking)
        self.holders = FileHolders(membership)
        self._mediator = home.mediator

    # -- offering ------------------------------------------------------------------------------------------------------

    def offer(
        self,
        task: HomeTask,
        node: str,
        *,
        voluntary: bool,
        only: bool = False,
        search: bool = True,
        load_tasks_max: int = -1,
    ) -> None:
        """Offer the next attempt to a node; the task keeps its place, withheld. ``search``: after a decline the
        sender's search continues (False: for a task that a node asked for)."""
        task.enter(HomePhase.OFFERED, offering=Offering(node, voluntary, search))
        self._queue.withhold(task)
        asked = asked_of(self._state, task, self._membership.profile(node))
        spec = task.spec if asked is task.spec.request else msgspec.structs.replace(task.spec, request=asked)
        self._state.count(metrics.OFFERS_SENT)
        self._state.send(
            node,
            messages.Offer(
                task.task,
                task.uid,
                self._home.next_attempt(task),
                spec,
                self.leases.first_s(task.spec),
                task.record.migrations + voluntary,
                self._home.migrations_max(task),
                only,
                load_tasks_max,
                self.holders.sources(task, node),
            ),
        )
        self._state.set_timer_in(self._state.config.offer_timeout_s, timers.OfferTimeout(task.uid.hex()))

    def accept_received(self, src: str, message: messages.Accept) -> None:
        """Grant the attempt durably, then send COMMIT to the reservation. A repeated ACCEPT has no COMMIT yet."""
        task, offering = self._answered(src, message)
        if task is None or offering is None:
            if task is not None and self._waits_for_commit(task, src, message):
                self._commit(task, message.ts)
            else:
                self._state.count(metrics.OFFERS_ACCEPTED_LATE)  # that reservation times out
            return
        if task.spec.is_staged and not message.files:  # the reservation there times out
            self._declined(task, offering, f"{src} has accepted without the files")
            return
        self._membership.circuit_breaker.accepted(src)
        self.holders.has(src, task)
        self._home.withdraw(task)
        self._queue.remove(task)
        task.enter(HomePhase.AWAY)
        task.lease = GrantedLease(self._state.config.repeat_s, message.ts)
        self._home.become(
            task,
            f"accepted by {src}",
            state=TaskState.LEASED,
            attempt=message.attempt,
            node=src,
            nonce=message.nonce,
            machine_boot=message.machine_boot,
            store=message.store,
            lease_s=self.leases.first_s(task.spec),
            migrations=task.record.migrations + offering.is_voluntary,
            last_node="",
            grants=(*task.record.grants, Grant(message.attempt, src))[-GRANTS_KEPT_MAX:],
        )
        self._state.count(metrics.TRANSFERS)
        kind = "asked" if not offering.searches_on else "chosen" if offering.is_voluntary else "needed"
        self._state.count(PLACEMENTS[kind])
        self._mediator.task_placed(task, src)
        self._commit(task, message.ts)

    def staging_received(self, src: str, message: messages.Staging) -> None:
        """Handle a report on the copying of a task's files: the offer stays pending meanwhile. The node is told to stop
        if the offer was withdrawn."""
        task, offering = self._answered(src, message)
        if task is not None and offering is not None:
            task.offering = offering._replace(staging=message)
            self._state.set_timer_in(self._state.config.offer_timeout_s, timers.OfferTimeout(task.uid.hex()))
            return
        self._state.count(metrics.MESSAGES_FROM_NON_EXECUTOR)
        if task is None or message.attempt > task.record.attempt:
            reason = "its offer was withdrawn"
            self._state.send(src, messages.Revoke(message.task, message.uid, message.attempt, SIGKILL, reason))

    def _answered(
        self, src: str, message: messages.Accept | messages.Staging | messages.Decline
    ) -> tuple[HomeTask | None, Offering | None]:
        """The task of a message, and its pending offer if the message answers that."""
        task = self._home.tasks.get(message.uid)
        is_answer = task is not None and (src, message.attempt) == (task.offered_to, self._home.next_attempt(task))
        return task, task.offering if task is not None and is_answer else None

    def _waits_for_commit(self, task: HomeTask, src: str, message: messages.Accept) -> bool:
        record = task.record
        granted = (record.node, record.attempt, record.nonce)
        return task.phase is HomePhase.AWAY and (src, message.attempt, message.nonce) == granted

    def _commit(self, task: HomeTask, ts: float) -> None:
        """Send COMMIT; the deadline moves first (R2)."""
        lease_s = min(self.leases.first_s(task.spec), task.record.lease_s)
        self.leases.extend(task, lease_s)
        lease = granted(task)
        lease.commits += 1
        record = task.record
        self._state.send(record.node, messages.Commit(task.task, task.uid, record.attempt, record.nonce, ts, lease_s))
        self._state.set_timer_in(lease.repeat_s, timers.QueryDue(task.uid.hex()))

    def decline_received(self, src: str, message: messages.Decline) -> None:
        """Handle DECLINE: the node has no room after all, or can never run the task."""
        task, offering = self._answered(src, message)
        if task is None or offering is None:
            self._state.count(metrics.DECLINES_WITHOUT_OFFER)
            return
        if message.code == "staging":
            self._home.fail(task, f"staging: {message.reason}")
            return
        not_built = f"environment: {message.reason}" if message.code == "environment" else task.not_built
        if not_built and not self._may_be_built(task):
            self._home.fail(task, not_built)
            return
        peer = self._membership.get(src)
        has_room = peer is not None and claims_room(task.spec.request, peer.profile, message.report)
        self._membership.circuit_breaker.declined(src, message.code, accepts=has_room)
        self._declined(task, offering, message.reason)

    def run_again(self, task: HomeTask, exit_: Exit) -> str:
        """Queue a task again whose attempt here ended this way, if allowed: → "". Else the reason why this is its
        result."""
        if exit_.not_built and task.spec.guarantee is not Guarantee.ONCE:
            task.cannot_here = task.not_built = exit_.reason
            if self._may_be_built(task):
                self._home.requeue(task, f"{exit_.reason}; another node may build it")
                return ""
            task.cannot_here = task.not_built = ""
        return self.retries.again(task, exit_)

    def _may_be_built(self, task: HomeTask) -> bool:
        """True if some node may run a task and has not failed to build its environment yet."""
        spec, here = task.spec, self._state.node
        if not task.cannot_here and not why_never(self._state.profile, spec.request, spec.placement, here):
            return True
        nodes = self._membership.could_run(messages.Need(spec.request, spec.placement), here)
        return any(self._membership.declined_code(node, spec) in ("", "stalled") for node in nodes)

    def _declined(self, task: HomeTask, offering: Offering, reason: str) -> None:
        self._home.withdraw(task)
        self._state.count(metrics.OFFERS_DECLINED)
        self._mediator.offer_declined(task, offering, reason)

    def offer_failed(self, node: str, uid: bytes) -> None:
        """Handle an offer that was not answered in time, or never sent, like a decline."""
        task = self._home.tasks.get(uid)
        offering = task.offering if task is not None else None
        if task is not None and offering is not None and offering.node == node:
            if self._membership.is_usable(node):
                self._membership.circuit_breaker.unanswered(node)
            self._declined(task, offering, f"no answer from {node}")

    # -- reports of its node -------------------------------------------------------------------------------------------

    def not_started_received(self, src: str, message: messages.NotStarted | messages.Return) -> str | None:
        """Handle a durable promise that the attempt never started: back to the queue, where the caller decides about
        it. → the node a RETURN suggests ("" for none), None if it was not about a current attempt."""
        task = self._home.tasks.get(message.uid)
        if task is None or not self._may_report(task, src, message):
            return None
        reason = message.reason or f"{src} has not started it"
        rests_s = 0.0 if isinstance(message, messages.Return) else self.lost_attempts.refused(task)
        self._home.requeue(task, reason, arrives=False, rests_s=rests_s, grants=self._other_grants(task))
        return message.to if isinstance(message, messages.Return) else ""

    def died_received(self, src: str, message: messages.Died) -> None:
        """Handle DIED: the attempt started, its processes are gone, and there is no result."""
        task = self._home.tasks.get(message.uid)
        if task is not None and self._may_report(task, src, message):
            reason = f"{src}: {message.reason or 'the attempt died'}"
            self.lost_attempts.died(task, reason)
        elif task is not None and (task.record.attempt, task.record.node) == (message.attempt, src):
            return
        if task is None or task.spec.guarantee is Guarantee.ONCE:
            self._state.send(
                src, messages.ResultAck(message.task, message.uid, message.attempt)
            )  # its report is kept until then

    def _may_report(
        self, task: HomeTask, src: str, message: messages.NotStarted | messages.Return | messages.Died
    ) -> bool:
        """True if src holds this attempt and can report on it. With a new database, src does not know the promises
        of the old one (R6); the attempt then ends only with its lease or a reboot of the machine."""
        record = task.record
        has_it = task.phase in (HomePhase.AWAY, HomePhase.UNKNOWN)
        if not has_it or (src, message.attempt) != (record.node, record.attempt):
            self._state.count(metrics.MESSAGES_FROM_NON_EXECUTOR)
            if message.attempt > record.attempt and not self._home.may_be_lost(
                task, message.attempt
            ):  # otherwise it may be late
                self._state.broken(
                    rules.ROLES_CHECKED, src, f"it names attempt {message.attempt} of {task.task}; there is none"
                )
            return False
        if granted(task).is_forgotten or (message.store and record.store and message.store != record.store):
            self._state.count(metrics.PROMISES_OF_OTHER_STORE)
            self.lost_attempts.disk_lost(task)
            return False
        return True

    def peer_is_older(self, node: str) -> None:
        """Mark the grants of a node that returned with an older copy of its database: its reports that an attempt never
        started or died no longer count."""
        self._state.count(metrics.PEERS_WITH_OLDER_STORE)
        for task in self._home.at(node):
            granted(task).is_forgotten = True

    def commit_never_left(self, task: HomeTask, attempt: int) -> None:
        """Handle the only COMMIT of this attempt that never left this agent: no node can have started it."""
        if task.phase is HomePhase.AWAY and task.record.attempt == attempt and granted(task).commits == 1:
            reason = f"{task.record.node} disconnected before the COMMIT was sent"
            self._home.requeue(task, reason, grants=self._other_grants(task))

    def _other_grants(self, task: HomeTask) -> tuple[Grant, ...]:
        """All grants except the current one; no node has started them or ever will."""
        return tuple(grant for grant in task.record.grants if grant.attempt != task.record.attempt)

    def _was_granted(self, task: HomeTask, src: str, attempt: int) -> bool:
        """True if src may have run this attempt. Records of earlier versions have only the current grant and the
        last."""
        record = task.record
        is_current = attempt == record.attempt and attempt > 0 and src in (record.node, record.last_node)
        return is_current or Grant(attempt, src) in record.grants

    def _may_have(self, task: HomeTask, src: str, attempt: int) -> bool:
        """True if src has this attempt, or may regain it (R11)."""
        record = task.record
        return attempt == record.attempt and src in (record.node, record.last_node)

    # -- results -------------------------------------------------------------------------------------------------------

    def _ended_there(self, task: HomeTask, src: str, message: messages.Result) -> None:
        is_repeated = task.collection is not None and task.collection.attempt == message.attempt
        if not is_repeated:
            self._membership.task_ended(src, task.spec, message.exit)
        self._home.started_elsewhere(task, src, message.exit.started_at)
        task.output_waits_because = ""

    def result_received(self, src: str, message: messages.Result) -> None:
        """Handle RESULT: the first result of any granted attempt counts (R9), from the node of that grant; its output
        is fetched before it is recorded.

        Until then another attempt that holds the lease runs on, with renewals: it is needed if the output never comes,
        and its node is then queried."""
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.OVER or message.attempt > task.record.attempt:
            self._state.count(metrics.RESULTS_UNRECORDED)
            self._home.used(message.task, message.uid, message.attempt, src, message.exit.usage)
            self._state.send(src, messages.ResultAck(message.task, message.uid, message.attempt))
            return
        if not self._was_granted(task, src, message.attempt):
            if self._home.may_be_lost(task, message.attempt):
                self._state.count(metrics.RESULTS_UNRECORDED)
                self._state.send(src, messages.ResultAck(message.task, message.uid, message.attempt))
                return
            self._state.count(metrics.RESULTS_OF_UNGRANTED_ATTEMPTS)
            self._state.broken(
                rules.ROLES_CHECKED, src, f"RESULT of {task.task}: attempt {message.attempt} was never given to it"
            )
            return
        if message.exit.signal and not self._may_have(task, src, message.attempt):
            # It was given up as lost, and revoked: its kill there is no result.
            self._state.send(src, messages.ResultAck(message.task, message.uid, message.attempt))
            return
        if task.phase is HomePhase.AWAY and message.attempt == task.record.attempt:
            self._ended_there(task, src, message)
        why = self._why_over(task, message)
        if why is None:
            self._state.send(src, messages.ResultAck(message.task, message.uid, message.attempt))
            return
        if task.phase is HomePhase.COLLECTING or task.phase is HomePhase.HERE:
            return  # it will be repeated
        if task.phase not in (HomePhase.AWAY, HomePhase.UNKNOWN):
            self._home.take_out(task, src)
        exit_ = message.exit
        self.holders.took(exit_.staged)
        files = exit_.staged.outputs if exit_.staged is not None and task.spec.files is not None else b""
        if message.inline:
            came = len(message.stdout), len(message.stderr)
            short = message.exit.stdout_bytes - came[0], message.exit.stderr_bytes - came[1]
            missing = max(short[0], 0), max(short[1], 0)
            exit_ = without_missing(exit_, missing, f"{src} has not sent its output")
            self._state.actions.append(
                actions.KeepOutput(
                    task.key, task.task, task.uid, message.attempt, message.stdout, message.stderr, src, files
                )
            )
        else:
            self._state.actions.append(
                actions.FetchOutput(
                    task.key,
                    task.task,
                    task.uid,
                    message.attempt,
                    src,
                    message.exit.stdout_bytes,
                    message.exit.stderr_bytes,
                    files,
                )
            )
        failed_because = task.collection.failed_because if task.collection is not None else ""
        collection = Collection(message.attempt, src, exit_, why, failed_because)
        task.enter(HomePhase.COLLECTING, collection=collection)

    def _why_over(self, task: HomeTask, message: messages.Result) -> str | None:
        """Reason why the task is not retried; "" if no retry applied. None: the result does not end the task, because
        the task is (or was meanwhile) queued again: with more GPU memory, or as a retry after a failure. That is
        durable before the result is acknowledged. A result that is repeated later, or of an attempt that was given
        up as lost, is dropped."""
        if not self.retries.concerns(task, message.exit):
            return ""
        if task.phase is HomePhase.AWAY and message.attempt == task.record.attempt:
            return self.retries.again(task, message.exit) or None
        collected = task.collection.attempt if task.collection is not None else 0
        if task.phase is HomePhase.COLLECTING and message.attempt == collected:
            return ""  # this was already accepted as its result
        self._state.count(metrics.RESULTS_UNRECORDED)
        return None

    def output_coming(self, event: OutputComing) -> None:
        """Record how much of the output files has arrived, for status requests."""
        task = self._home.tasks.get(event.uid)
        collection = task.collection if task is not None and task.phase is HomePhase.COLLECTING else None
        if task is not None and collection is not None and collection.attempt == event.attempt:
            task.collection = msgspec.structs.replace(collection, done_bytes=event.done_bytes)

    def output_arrived(self, event: OutputArrived) -> None:
        """Record a result whose output is here and synced (D5), then acknowledge it."""
        uid, attempt, error, missing = event.uid, event.attempt, event.error, event.missing
        task = self._home.tasks.get(uid)
        collection = task.collection if task is not None and task.phase is HomePhase.COLLECTING else None
        if task is None or collection is None or collection.attempt != attempt:
            return
        if error:
            self._state.count(metrics.OUTPUT_FETCHES_FAILED)
            failed_because = error[:UNCOLLECTED_CHARS_MAX]
            task.collection = msgspec.structs.replace(collection, failed_because=failed_because, done_bytes=0)
            self._home.resume(task)  # the result will be repeated, and its output fetched again
            self.leases.resumed(task)
            return
        other = task.record.node
        exit_ = without_missing(collection.exit, missing, f"{collection.node} could not read its output")
        if event.unplaced:
            exit_ = without_files(exit_, event.unplaced)
        if event.conflicts and exit_.staged is not None:
            exit_ = msgspec.structs.replace(
                exit_, staged=msgspec.structs.replace(exit_.staged, conflicts=event.conflicts)
            )
        self._home.finish(task, exit_, why=collection.why, node=collection.node)
        if task.record.attempt != attempt and other:
            reason = "another attempt has ended"
            self._state.send(other, messages.Revoke(task.task, uid, task.record.attempt, SIGKILL, reason))
        self._state.send(collection.node, messages.ResultAck(task.task, uid, attempt))


DRIFT_MAX = 1 / 12
"""Assumed limit on the difference in speed of two machines' clocks; a lease's grace is at least this part of it."""
COMMITS_LOST = "the database has lost its last commits, and it is not known whether the task was started since"
AUTO_PART = 10.0
"""A growing lease (``lease_auto``) is the task's run time divided by this."""


class HomeLeases:
    """Leases that this home has granted, one object per node; its timers are ``lease`` and ``ask``."""

    def __init__(self, state: CoreState, home: Home, lost_attempts: LostAttempts, parking: TaskParking) -> None:
        self._state = state
        self._home = home
        self._lost_attempts = lost_attempts
        self._parking = parking

    # -- durations -----------------------------------------------------------------------------------------------------

    def first_s(self, spec: TaskSpec) -> float:
        return spec.lease_s or self._state.config.lease_s

    def _renewal_s(self, task: HomeTask, renewal: messages.Renewal) -> float:
        """The lease that a renewal grants, at most the durable one, because a restarted home assumes that this was
        granted (R4). A growing lease that reaches the durable one doubles it."""
        longest_s = task.record.lease_s
        if not task.spec.lease_auto:
            return longest_s
        wanted_s = min(renewal.ran_s / AUTO_PART, self._state.config.lease_auto_s_max)
        if wanted_s > longest_s:
            longest_s = min(2 * wanted_s, self._state.config.lease_auto_s_max)
            self._home.become(task, f"it has run for {renewal.ran_s:.0f} s: its lease grows", lease_s=longest_s)
        return min(max(self.first_s(task.spec), wanted_s), longest_s)

    def extend(self, task: HomeTask, lease_s: float) -> None:
        """Move the deadline, before the executor's moves (R2); never back, as an earlier grant may have been longer."""
        if task.record.parked_ts:
            return
        grace_s = max(self._state.config.lease_grace_s, lease_s * DRIFT_MAX)
        lease = granted(task)
        lease.deadline_s = max(lease.deadline_s, self._state.now.boot_s + lease_s + grace_s)
        self._state.set_timer_in(lease.deadline_s - self._state.now.boot_s, timers.Lease(task.uid.hex()))

    # -- queries -------------------------------------------------------------------------------------------------------

    def restored(self, task: HomeTask) -> None:
        """Query the node of a lease, or of an UNKNOWN task, that was in the store at start."""
        task.lease = GrantedLease(repeat_s=self._state.config.repeat_s)
        if task.phase is HomePhase.AWAY:
            task.lease.commits = 2  # the number before the restart is unknown, but not 0
            self.extend(task, task.record.lease_s)  # it may have been renewed just before (R4)
        self.ask(task)

    def commits_lost(self, queued: Sequence[HomeTask]) -> None:
        """Handle the loss of this database's last commits: a task that it has as queued may have been started since.
        One that may run only once is held. Tasks that are queued again meanwhile wait until all leases granted by these
        commits have expired."""
        config = self._state.config
        longest_s = config.lease_s
        for task in self._home.tasks.values():
            asked_s = config.lease_auto_s_max if task.spec.lease_auto else task.spec.lease_s
            longest_s = max(longest_s, asked_s, task.record.lease_s)
        grace_s = max(config.lease_grace_s, longest_s * DRIFT_MAX)
        self._state.unsure_until_s = self._state.now.boot_s + longest_s + grace_s
        for task in queued:
            if task.spec.guarantee is Guarantee.ONCE:
                self._home.hold(task, COMMITS_LOST)

    def ask(self, task: HomeTask) -> None:
        """Send QUERY to the node of a silent task, with increasing pauses. Every executor answers."""
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
            self._state.send(task.record.node, messages.Query(task.task, task.uid, task.record.attempt))
        self._state.set_timer_in(lease.repeat_s, timers.QueryDue(task.uid.hex()))

    def resumed(self, task: HomeTask) -> None:
        """Resume after the output of an older attempt has not come. Reports about the current attempt were ignored
        meanwhile, and its node does not repeat them: query it."""
        if task.phase is HomePhase.AWAY:
            self.extend(task, task.record.lease_s)
        if task.collection is not None and task.collection.attempt != task.record.attempt:  # else its node repeats it
            self._ask_at_once(task)

    def _ask_at_once(self, task: HomeTask) -> None:
        if task.lease is not None:
            task.lease.repeat_s = 0.0
        self.ask(task)

    def _ask_if_silent(self, task: HomeTask, lease_s: float) -> None:
        """Set the timer for a query after two missed renewals (one each quarter): a RETURN or DIED may be lost."""
        granted(task).repeat_s = self._state.config.repeat_s
        self._state.set_timer_in(lease_s / 2, timers.QueryDue(task.uid.hex()))

    # -- renewals ------------------------------------------------------------------------------------------------------

    def renew_received(self, src: str, message: messages.Renew) -> None:
        """Handle RENEW: renew leases in one answer, and revoke attempts that are no longer current."""
        if self._parking.is_away:
            return
        extensions: list[messages.LeaseExtension] = []
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
                self._state.send(src, messages.Revoke(renewal.task, renewal.uid, renewal.attempt, SIGKILL, reason))
        if extensions:
            self._state.send(src, messages.RenewOk(tuple(extensions)))

    def _renewed(self, task: HomeTask, src: str, renewal: messages.Renewal) -> messages.LeaseExtension:
        lease = granted(task)
        lease.heard_ts = max(lease.heard_ts, renewal.ts)
        lease_s = self._renewal_s(task, renewal)
        self.extend(task, lease_s)
        self._ask_if_silent(task, lease_s)
        task.devices = renewal.devices or task.devices
        task.output_waits_because = renewal.output_waits_because
        self._home.started_elsewhere(task, src, renewal.started_at)
        priority = None if task.running_at else task.record.priority
        return messages.LeaseExtension(renewal.uid, renewal.attempt, renewal.ts, lease_s, priority)

    def send_priority(self, task: HomeTask) -> bool:
        """Send the priority of a task to the node that has it and has not started it; each renewal repeats it.
        → whether there is such a node."""
        if task.phase is not HomePhase.AWAY or task.running_at:
            return False
        record = task.record
        extension = messages.LeaseExtension(task.uid, record.attempt, 0.0, record.lease_s, record.priority)
        self._state.send(record.node, messages.RenewOk((extension,)))
        return True

    def _is_current(self, task: HomeTask, src: str, attempt: int) -> bool:
        """True if src holds the current attempt; one given up as lost but not granted again is taken back (R11)."""
        record = task.record
        if attempt != record.attempt:
            return False
        match task.phase:
            case HomePhase.AWAY:
                return record.node == src
            case HomePhase.COLLECTING:  # an older attempt's result, which may never arrive
                is_collected = task.collection is not None and task.collection.attempt == attempt
                return record.node == src and record.state is TaskState.LEASED and not is_collected
            case HomePhase.UNKNOWN:
                is_back = src in (record.node, record.last_node)
            case HomePhase.WAITING | HomePhase.OFFERED | HomePhase.RESTING | HomePhase.GATED:
                is_back = record.last_node == src
            case HomePhase.HELD:  # held because nodes failed, but this node has not
                is_back = record.last_node == src
                if is_back and not self._home.mediator.may_regain_lease(task):
                    is_back = False  # the attempt is revoked, and its reports are ignored
                    self._home.become(task, record.reason, last_node="")
            case _:
                is_back = False
        if is_back:
            lease_s = max(self.first_s(task.spec), record.lease_s)
            self._home.take_back(task, src, f"{src} has returned and still has it", lease_s)
        return is_back

    # -- the end of leases ---------------------------------------------------------------------------------------------

    def ran_out(self, task: HomeTask) -> None:
        """Handle an expired lease: the executor was silent for so long that it has surely frozen the task."""
        if task.phase is not HomePhase.AWAY or task.record.parked_ts:
            return
        left_s = granted(task).deadline_s - self._state.now.boot_s
        if left_s > 0.0:
            self._state.set_timer_in(left_s, timers.Lease(task.uid.hex()))
        else:
            self._lost_attempts.expired(task)

    def machine_changed(self, identity: messages.Identity) -> None:
        """Handle a new machine boot id of a node: nothing that ran there before can be alive (R6)."""
        for task in self._home.at(identity.node):
            boot = task.record.machine_boot
            if task.phase in (HomePhase.AWAY, HomePhase.UNKNOWN) and boot not in ("", identity.machine_boot):
                self._lost_attempts.died(task, f"{identity.node} was rebooted")

    def peer_is_back(self, node: str) -> None:
        """Query a node that has restarted about the tasks that it holds."""
        for task in self._home.at(node):
            self._ask_at_once(task)

    def peer_died(self, node: str) -> None:
        """Handle a node that is declared dead: no proof, but enough for tasks that asked for it (--fast)."""
        for task in self._home.at(node):
            self._lost_attempts.declared_dead(task)

    def forgotten(self, node: str) -> int:
        """Handle a user's statement that the node is gone for good: proof for tasks parked there (R12), and the end of
        queries about UNKNOWN tasks. → the number of tasks that waited for it."""
        tasks = [
            task
            for task in self._home.at(node)
            if task.phase is HomePhase.UNKNOWN or (task.phase is HomePhase.AWAY and task.record.parked_ts)
        ]
        for task in tasks:
            self._lost_attempts.died(task, f"{node} was forgotten")
        return len(tasks)

    def ask_all(self) -> None:
        """Query the executors of all remote tasks after this home's return."""
        for node in list(self._home.elsewhere):
            self.peer_is_back(node)


def granted(task: HomeTask) -> GrantedLease:
    """The lease of a task that another node has or had. Raises InvariantBroken if there was none."""
    if task.lease is None:
        raise InvariantBroken(f"{task.task} is {task.phase} and was never leased", story=story(task))
    return task.lease


class TaskParking:
    """Parking of tasks while their home is away, one object per node. ``is_away``: this home has left and grants
    nothing until it returns."""

    def __init__(self, state: CoreState, membership: Membership, home: Home) -> None:
        self._state = state
        self._membership = membership
        self._home = home
        self.is_away = False

    def go_away(self, why: str) -> None:
        """Park the tasks on other nodes that have reported since this home's start. Leases at nodes that a user
        declared gone simply expire."""
        self.is_away = True
        parked: dict[str, list[messages.Parking]] = {}
        for node in list(self._home.elsewhere):
            if self._membership.get(node) is None:
                continue
            for task in self._home.at(node):
                record = task.record
                has_lease = task.phase in (HomePhase.AWAY, HomePhase.COLLECTING) and record.node == node
                heard_ts = task.lease.heard_ts if task.lease is not None else 0.0
                if has_lease and heard_ts > record.parked_ts:
                    self._home.become(task, f"parked: {why}", parked_ts=heard_ts)
                    self._state.clear_timer(timers.Lease(task.uid.hex()))
                    parked.setdefault(node, []).append(messages.Parking(task.task, task.uid, record.attempt, heard_ts))
        for node, parkings in parked.items():
            for first in range(0, len(parkings), messages.RENEWALS_MAX):
                self._state.send(node, messages.Park(tuple(parkings[first : first + messages.RENEWALS_MAX])))

    def resume(self) -> None:
        self.is_away = False

    def is_answered(self, task: HomeTask, src: str, renewal: messages.Renewal) -> bool:
        """True if a renewal of the current attempt gets an answer; it may end PARKED."""
        parked_ts = task.record.parked_ts
        if not parked_ts:
            return True
        if renewal.ts <= parked_ts:  # sent before this home left
            self._state.count(metrics.RENEWALS_BEFORE_PARKING)
            return False
        if renewal.deadline_ts > parked_ts:
            self._home.become(task, f"{src} has a deadline again", parked_ts=0.0)
        return True


MANIFESTS_MAX = 1024
HOLDERS_MAX = 64
"""Nodes that are remembered for each manifest."""
BYTES_PER_S = 50e6
"""Assumed transfer rate of files, before one was measured."""
LEARNED_BYTES_MIN = 1 << 20
"""Smaller transfers do not measure the rate."""
SAVED_S_MIN = 0.5
"""Minimum saving for which a node is preferred."""


class FileHolders:
    """The nodes that have accepted tasks with files, by manifest, the latest first; in memory only. If a node has
    removed the files, another node loses one request, or it transfers them again."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._nodes: BoundedDict[bytes, BoundedDict[str, None]] = BoundedDict(MANIFESTS_MAX)
        self._bytes_per_s = BYTES_PER_S

    def has(self, node: str, task: HomeTask) -> None:
        """Record that a node has accepted a task and has its files."""
        if task.spec.files is None:
            return
        manifest = task.spec.files.manifest
        nodes = self._nodes[manifest] = self._nodes.get(manifest) or BoundedDict(HOLDERS_MAX)
        nodes[node] = None

    def took(self, staged: Staged | None) -> None:
        """Record the transfer rate of an ended attempt's files."""
        if staged is not None and staged.in_bytes >= LEARNED_BYTES_MIN and staged.in_s > 0:
            self._bytes_per_s += (staged.in_bytes / staged.in_s - self._bytes_per_s) / 2

    def nodes(self, task: HomeTask) -> list[str]:
        """The usable nodes that have the files of this task, the latest first."""
        if task.spec.files is None:
            return []
        known = self._nodes.get(task.spec.files.manifest, ())
        return [node for node in reversed(known) if self._membership.is_usable(node)]

    def sources(self, task: HomeTask, node: str) -> tuple[str, ...]:
        """Other nodes than its home from which this node may fetch the files."""
        return tuple([other for other in self.nodes(task) if other != node][: messages.SOURCES_MAX])

    def saved_at(self, node: str, task: HomeTask) -> float:
        """The seconds that this node saves by having the files of this task; 0 if that is none or too little."""
        files = task.spec.files
        return self.saved_s(task) if files is not None and node in self._nodes.get(files.manifest, ()) else 0.0

    def has_any(self, node: str) -> bool:
        """True if a node has files of some task."""
        return any(node in nodes for nodes in self._nodes.values())

    def saved_s(self, task: HomeTask) -> float:
        """The seconds that a node with the files saves; 0 if that is too little for a preference."""
        size_bytes = task.spec.files.size_bytes if task.spec.files is not None else 0
        saved_s = size_bytes / self._bytes_per_s
        return saved_s if saved_s >= SAVED_S_MIN else 0.0
