"""The home's side of the handoff: offers, commits, leases, results. docs/wire.md names the rules (D1 … R11).

An attempt number is granted once: an accepted offer burns it with a durable LEASED before COMMIT is said (D2). How long
that lasts is `leases.py`'s, what becomes of a task whose attempt was lost `lost_attempts.py`'s, and the task's record `home.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.handoff.file_holders import FileHolders
from peerload.core.handoff.leases import HomeLeases, TaskParking, granted
from peerload.core.resources.admission import asked_of, why_never
from peerload.core.tasks.retries import LostAttempts, MemoryRetries, Retries
from peerload.core.work import Collection, GrantedLease, HomePhase, Offering
from peerload.model import metrics, rules, timers
from peerload.model.actions import FetchOutput, KeepOutput
from peerload.model.messages import (
    Accept,
    Commit,
    Decline,
    Died,
    Need,
    NotStarted,
    Offer,
    Result,
    ResultAck,
    Return,
    Revoke,
    Staging,
)
from peerload.model.task import GRANTS_KEPT_MAX, Grant, Guarantee, TaskState, without_files, without_missing

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import HomeTask
    from peerload.model.events import OutputArrived, OutputComing
    from peerload.model.task import Exit

SIGKILL = 9
UNCOLLECTED_CHARS_MAX = 300
"""Of why a result could not be kept."""


class HomeHandoff:
    """The conversation of a home with the nodes that run its tasks; its timer is ``offer``.

    ``declined(task, node, reason)`` is called when an offer came to nothing.
    """

    def __init__(self, state: CoreState, queue: WaitingQueue, membership: Membership, home: Home) -> None:
        self._state = state
        self._queue = queue
        self._membership = membership
        self._home = home
        self.lost_attempts = LostAttempts(state, membership, home)
        self.memory = MemoryRetries(state, membership, home)
        self.retries = Retries(state, home, self.memory, self.lost_attempts)
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
        """Offer the next attempt to a node; the task keeps its place, withheld. ``search``: on a decline the sender's
        search goes on (False: a task given on request, whose loss triggers nothing)."""
        task.enter(HomePhase.OFFERED, offering=Offering(node, voluntary, search))
        self._queue.withhold(task)
        peer = self._membership.get(node)
        asked = asked_of(self._state, task, peer.profile if peer is not None else None)
        spec = task.spec if asked is task.spec.request else msgspec.structs.replace(task.spec, request=asked)
        self._state.count(metrics.OFFERS_SENT)
        self._state.send(
            node,
            Offer(
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
        self._state.set_timer_in(self._state.config.offer_timeout_s, timers.OfferTimeout.of(task.uid))

    def accept_received(self, src: str, message: Accept) -> None:
        """Grant the attempt durably, then send COMMIT: room is reserved there. An ACCEPT that is repeated has had no COMMIT yet."""
        task = self._home.tasks.get(message.uid)
        offering = task.offering if task is not None else None
        is_answer = task is not None and (src, message.attempt) == (task.offered_to, self._home.next_attempt(task))
        if task is None or offering is None or not is_answer:
            if task is not None and self._waits_for_commit(task, src, message):
                self._commit(task, message.ts)
            else:
                self._state.count(metrics.OFFERS_ACCEPTED_LATE)  # that reservation ends by itself
            return
        if task.spec.needs_feeding and not message.input:  # the reservation there ends by itself
            self._declined(task, offering, f"{src} is of an earlier version, and passes no standard input on")
            return
        if task.spec.is_staged and not message.files:  # as above
            self._declined(task, offering, f"{src} is of an earlier version, and takes no files")
            return
        self._membership.circuit_breaker.accepted(src)
        self.holders.has(src, task)
        self._home.withdraw(task)
        self._queue.remove(task)
        task.enter(HomePhase.AWAY)
        task.lease = GrantedLease(self._state.config.repeat_s, message.ts)
        peer = self._membership.get(src)
        known_boot = peer.identity.machine_boot if peer is not None else ""
        self._home.become(
            task,
            f"accepted by {src}",
            state=TaskState.LEASED,
            attempt=message.attempt,
            node=src,
            nonce=message.nonce,
            machine_boot=message.machine_boot or known_boot,
            store=message.store,
            lease_s=self.leases.first_s(task.spec),
            migrations=task.record.migrations + offering.is_voluntary,
            last_node="",
            grants=(*task.record.grants, Grant(message.attempt, src))[-GRANTS_KEPT_MAX:],
        )
        self._state.count(metrics.TRANSFERS)
        kind = "asked" if not offering.searches_on else "chosen" if offering.is_voluntary else "needed"
        self._state.count(metrics.labelled(metrics.PLACEMENTS, kind=kind))
        self._mediator.task_placed(task, src)
        self._commit(task, message.ts)

    def staging_received(self, src: str, message: Staging) -> None:
        """A node brings the files of a task that it was offered to itself: the offer stands meanwhile. It is told to stop if
        nobody waits for that any more."""
        task = self._home.tasks.get(message.uid)
        offering = task.offering if task is not None else None
        is_answer = task is not None and (src, message.attempt) == (task.offered_to, self._home.next_attempt(task))
        if task is not None and offering is not None and is_answer:
            task.offering = offering._replace(staging=message)
            self._state.set_timer_in(self._state.config.offer_timeout_s, timers.OfferTimeout.of(task.uid))
            return
        self._state.count(metrics.MESSAGES_FROM_NON_EXECUTOR)
        if task is None or message.attempt > task.record.attempt:
            reason = "its offer is not wanted any more"
            self._state.send(src, Revoke(message.task, message.uid, message.attempt, SIGKILL, reason))

    def _waits_for_commit(self, task: HomeTask, src: str, message: Accept) -> bool:
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
        self._state.send(record.node, Commit(task.task, task.uid, record.attempt, record.nonce, ts, lease_s))
        self._state.set_timer_in(lease.repeat_s, timers.QueryDue.of(task.uid))

    def decline_received(self, src: str, message: Decline) -> None:
        """Handle DECLINE: no room there after all, or never."""
        task = self._home.tasks.get(message.uid)
        offering = task.offering if task is not None else None
        is_answer = task is not None and (src, message.attempt) == (task.offered_to, self._home.next_attempt(task))
        if task is None or offering is None or not is_answer:
            self._state.count(metrics.DECLINES_WITHOUT_OFFER)
            return
        if message.code == "staging" or (message.code == "environment" and not self._may_be_built(task)):
            self._home.fail(task, f"{message.code}: {message.reason}")
            return
        self._membership.circuit_breaker.declined(src, message.code, accepts=message.report.accepts)
        self._declined(task, offering, message.reason)

    def run_again(self, task: HomeTask, exit_: Exit) -> str:
        """Queue a task again whose attempt here has ended so, if it is to be tried again: → "". Else why this is its result."""
        if exit_.not_built and task.spec.guarantee is not Guarantee.ONCE:
            task.cannot_here = exit_.reason
            if self._may_be_built(task):
                self._home.requeue(task, f"{exit_.reason}; another node may build it")
                return ""
            task.cannot_here = ""
        return self.retries.again(task, exit_)

    def _may_be_built(self, task: HomeTask) -> bool:
        """True if some node has not failed to build the environment of a task yet."""
        spec, here = task.spec, self._state.node
        if not task.cannot_here and not why_never(self._state.profile, spec.request, spec.placement, here):
            return True
        nodes = self._membership.could_run(Need(spec.request, spec.placement), here)
        return any(not self._membership.declined_code(node, spec) for node in nodes)

    def _declined(self, task: HomeTask, offering: Offering, reason: str) -> None:
        self._home.withdraw(task)
        self._state.count(metrics.OFFERS_DECLINED)
        self._mediator.offer_declined(task, offering, reason)

    def offer_failed(self, node: str, uid: bytes) -> None:
        """Handle an offer without an answer in time, or that never left, like a decline."""
        task = self._home.tasks.get(uid)
        offering = task.offering if task is not None else None
        if task is not None and offering is not None and offering.node == node:
            if self._membership.is_usable(node):
                self._membership.circuit_breaker.unanswered(node)
            self._declined(task, offering, f"no answer from {node}")

    # -- what its node says of it ---------------------------------------------------------------------------------------

    def not_started_received(self, src: str, message: NotStarted | Return) -> str | None:
        """A durable promise that the attempt never started: back to the queue, where the caller decides about it.
        → the node a RETURN suggests ("" for none), None if it was not about a current attempt."""
        task = self._home.tasks.get(message.uid)
        if task is None or not self._may_report(task, src, message):
            return None
        reason = message.reason or f"{src} has not started it"
        rests_s = 0.0 if isinstance(message, Return) else self.lost_attempts.refused(task)
        self._home.requeue(task, reason, arrives=False, rests_s=rests_s, grants=self._other_grants(task))
        return message.to if isinstance(message, Return) else ""

    def died_received(self, src: str, message: Died) -> None:
        """Handle DIED: the attempt started, its processes are gone, and there is no result."""
        task = self._home.tasks.get(message.uid)
        if task is not None and self._may_report(task, src, message):
            reason = f"{src}: {message.reason or 'the attempt died'}"
            self.lost_attempts.died(task, reason)
        elif task is not None and (task.record.attempt, task.record.node) == (message.attempt, src):
            return
        if task is None or task.spec.guarantee is Guarantee.ONCE:
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))  # its word is kept until then

    def _may_report(self, task: HomeTask, src: str, message: NotStarted | Return | Died) -> bool:
        """True if src has this attempt, and its word on it counts: with a new database it knows nothing of what its old one
        has promised (R6); only its lease, or a new start of its machine, ends the attempt then."""
        record = task.record
        has_it = task.phase in (HomePhase.AWAY, HomePhase.UNKNOWN)
        if not has_it or (src, message.attempt) != (record.node, record.attempt):
            self._state.count(metrics.MESSAGES_FROM_NON_EXECUTOR)
            if message.attempt > record.attempt and not self._home.may_be_lost(
                task, message.attempt
            ):  # else it may be late
                self._state.broken(
                    rules.ROLES_CHECKED, src, f"it speaks of attempt {message.attempt} of {task.task}; there is none"
                )
            return False
        if granted(task).is_forgotten or (message.store and record.store and message.store != record.store):
            self._state.count(metrics.PROMISES_OF_OTHER_STORE)
            self.lost_attempts.disk_lost(task)
            return False
        return True

    def peer_is_older(self, node: str) -> None:
        """A node has come back with an older copy of its database, which may not have what is granted to it now: its word
        that an attempt never started, or died, counts for nothing."""
        self._state.count(metrics.PEERS_WITH_OLDER_STORE)
        for task in self._home.at(node):
            granted(task).is_forgotten = True

    def commit_never_left(self, task: HomeTask, attempt: int) -> None:
        """The only COMMIT of this attempt never left this agent: nobody can have started it."""
        if task.phase is HomePhase.AWAY and task.record.attempt == attempt and granted(task).commits == 1:
            reason = f"{task.record.node} went away before it could be told to start"
            self._home.requeue(task, reason, grants=self._other_grants(task))

    def _other_grants(self, task: HomeTask) -> tuple[Grant, ...]:
        """All but the current one, which nobody has started, or ever will."""
        return tuple(grant for grant in task.record.grants if grant.attempt != task.record.attempt)

    def _was_granted(self, task: HomeTask, src: str, attempt: int) -> bool:
        """True if src may have run this attempt. Records of earlier versions know the current grant and the last."""
        record = task.record
        is_current = attempt == record.attempt and attempt > 0 and src in (record.node, record.last_node)
        return is_current or Grant(attempt, src) in record.grants

    def _may_have(self, task: HomeTask, src: str, attempt: int) -> bool:
        """True if it is src's still, or may become so again (R11)."""
        record = task.record
        return attempt == record.attempt and src in (record.node, record.last_node)

    # -- results -------------------------------------------------------------------------------------------------------

    def result_received(self, src: str, message: Result) -> None:
        """The first result of any attempt that was granted counts (R9), from the node that it was granted to; its output
        comes home before it is recorded.

        Until then another attempt that holds the lease by now runs on, renewed: should the output never come, it is needed,
        and its node is asked what has become of it."""
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.OVER or message.attempt > task.record.attempt:
            self._state.count(metrics.RESULTS_UNRECORDED)
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
            return
        if not self._was_granted(task, src, message.attempt):
            if self._home.may_be_lost(task, message.attempt):
                self._state.count(metrics.RESULTS_UNRECORDED)
                self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
                return
            self._state.count(metrics.RESULTS_OF_UNGRANTED_ATTEMPTS)
            self._state.broken(
                rules.ROLES_CHECKED, src, f"RESULT of {task.task}: attempt {message.attempt} was never given to it"
            )
            return
        if message.exit.signal and not self._may_have(task, src, message.attempt):
            # It was given up, and revoked: that it was killed there is no result.
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
            return
        if task.phase is HomePhase.AWAY and message.attempt == task.record.attempt:
            self._membership.circuit_breaker.ended(src, task.spec, message.exit)
        why = self._why_over(task, message)
        if why is None:
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
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
                KeepOutput(task.key, task.task, task.uid, message.attempt, message.stdout, message.stderr, src, files)
            )
        else:
            self._state.actions.append(
                FetchOutput(
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

    def _why_over(self, task: HomeTask, message: Result) -> str | None:
        """Why the task is not tried again; "" if there was no reason to. None: this is no result, since the task is (or was by
        now) queued again: with more GPU memory, or as it is to be tried again when it has failed. That is durable before it is
        acknowledged; said again after that, or of an attempt that was given up, it is dropped."""
        if not self.retries.concerns(task, message.exit):
            return ""
        if task.phase is HomePhase.AWAY and message.attempt == task.record.attempt:
            return self.retries.again(task, message.exit) or None
        collected = task.collection.attempt if task.collection is not None else 0
        if task.phase is HomePhase.COLLECTING and message.attempt == collected:
            return ""  # it has been decided that this is its result
        self._state.count(metrics.RESULTS_UNRECORDED)
        return None

    def output_coming(self, event: OutputComing) -> None:
        """Note how much of the output files is here, for those who ask."""
        task = self._home.tasks.get(event.uid)
        collection = task.collection if task is not None and task.phase is HomePhase.COLLECTING else None
        if task is not None and collection is not None and collection.attempt == event.attempt:
            task.collection = msgspec.structs.replace(collection, done_bytes=event.done_bytes)

    def output_arrived(self, event: OutputArrived) -> None:
        """Record a result whose output is here, synced (D5), then acknowledge it."""
        uid, attempt, error, missing = event.uid, event.attempt, event.error, event.missing
        task = self._home.tasks.get(uid)
        collection = task.collection if task is not None and task.phase is HomePhase.COLLECTING else None
        if task is None or collection is None or collection.attempt != attempt:
            return
        if error:
            self._state.count(metrics.OUTPUT_FETCHES_FAILED)
            failed_because = error[:UNCOLLECTED_CHARS_MAX]
            task.collection = msgspec.structs.replace(collection, failed_because=failed_because, done_bytes=0)
            self._home.resume(task)  # it will be repeated, and fetched again
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
            self._state.send(other, Revoke(task.task, uid, task.record.attempt, SIGKILL, reason))
        self._state.send(collection.node, ResultAck(task.task, uid, attempt))
