"""Intake of submitted tasks (refuse, number, make durable, answer) and dispatch of arriving tasks: to the gate, to the
queue here, or to a search for a place elsewhere.

A task that no node could ever run is refused. The tokens of the last submissions are remembered, so that repeating a
submit is safe. A task *arrives* when it is submitted, released, queued again, or given back by another node.
`sender.py` handles a task that this home can never run, or that no policy would keep waiting here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from peerload.core.membership.peers import NOT_MET, PeerState
from peerload.core.resources.admission import asked_text, lacks, seen_by, why_never
from peerload.core.work import HomePhase, HomeTask, UntouchedMembers
from peerload.energy.price import cheapest_start, integral
from peerload.model import metrics, timers
from peerload.model.actions import Answer, PutMaking, PutMembers, PutSubmission, PutTask
from peerload.model.bounded import BoundedDict
from peerload.model.errors import BadRequest, NeverRunnable, SlowDown
from peerload.model.events import Submission
from peerload.model.messages import Need
from peerload.model.task import TaskRecord, TaskState, member_of, ranges, submission_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from peerload.core.coordination.clients import ClientBinding
    from peerload.core.membership.membership import Membership
    from peerload.core.membership.peers import PeerInfo
    from peerload.core.sharing.sharing import Sharing
    from peerload.core.state import BatchedRequests, CoreState
    from peerload.core.tasks.eligibility import Eligibility
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.model.actions import Row
    from peerload.model.events import MembersRow, TaskRow, TaskSubmitted
    from peerload.model.messages import NotStarted, Return
    from peerload.model.task import TaskSpec


PEERS_NAMED_MAX = 3
"""Peers whose reason is named, so that they fit a line."""
HOPELESS_HINT = "peerload nodes        to wait for such a node:  --wait-for-node"
USED_BEFORE = "this token was used before for another command, directory or environment"
DIRECTORIES_TOLD_MAX = 100
DECLINING_TOLD_S = 3600.0
"""Time before a user is again notified that nodes decline the tasks of a directory."""
NEW_TOKEN = "submit again with a new token"  # noqa: S105 -- words


_tokens = msgspec.msgpack.Decoder(list[tuple[str, tuple[bytes, dict[str, object]]]])


class SubmissionInProgress:
    """A submission while its tasks are created. ``rows``: rows of its tasks that are not yet sent to the disk,
    ``unkept`` of them; is_begun: some rows were sent; ``repeated``: requests that have repeated it meanwhile."""

    def __init__(self, state: CoreState, event: TaskSubmitted, counter: int, spec: TaskSpec) -> None:
        self._state = state
        self.event = event
        self.spec = spec
        self.name = f"{state.node}/{counter}"
        self.submitted_at = state.now.wall_s
        self.tasks: list[HomeTask] = []
        self.submission = Submission(
            counter,
            event.token,
            event.digest,
            spec,
            event.indices,
            self.submitted_at,
            terms=event.terms,
            each=event.each,
        )
        self.rows: list[PutTask | PutMembers] = []
        self.unkept = 0
        self.is_begun = False
        self.repeated: list[TaskSubmitted] = []
        self._first, self._reason = (
            (TaskState.HELD, "submitted held") if event.held else (TaskState.QUEUED, "submitted")
        )
        if event.retry_of:
            self._reason = f"{self._reason}; repeats {event.retry_of}"

    def members(self) -> Iterator[str]:
        return (f"{self.name}.{index}" for index in self.event.indices) if self.event.indices else iter((self.name,))

    def left(self) -> int:
        """Number of members that are still to be created."""
        return max(len(self.event.indices), 1) - len(self.tasks)

    def clients(self) -> list[int]:
        """The clients that attend these tasks, once for each of their submissions."""
        return [event.client for event in (self.event, *self.repeated) if event.client]

    def make_uniform(self) -> None:
        """Give the members uids derived from one key, so that one row and one object may represent many."""
        self.submission = msgspec.structs.replace(self.submission, uid_key=self._uid())

    def parts(self, at_most: int) -> Iterator[range]:
        """The members of an array, in parts."""
        for members in ranges(self.event.indices):
            yield from (members[start : start + at_most] for start in range(0, len(members), at_most))

    def add_members(self, members: range) -> None:
        """Create these members of a uniform array."""
        record, key = self._record(self.name, b""), self.submission.uid_key
        self.rows.append(
            PutMembers(record, key, members[0], members[-1], members.step, self.submitted_at, self._reason)
        )
        self.unkept += len(members)

    def adopt_members(self, home: Home) -> list[UntouchedMembers]:
        """Add the members of a uniform array to the tasks of this home."""
        record, key, now_s = self._record(self.name, b""), self.submission.uid_key, self._state.now.boot_s
        blocks = [
            UntouchedMembers(home, members, record, key, self.spec, now_s, self.event.terms)
            for members in ranges(self.event.indices)
        ]
        for block in blocks:
            home.adopt_members(block)
        return blocks

    def _uid(self) -> bytes:
        return self._state.rng.getrandbits(128).to_bytes(16, "big")

    def _record(self, task: str, uid: bytes) -> TaskRecord:
        return TaskRecord(
            task,
            uid,
            self._first,
            self.submitted_at,
            reason=self._reason,
            retry_of=self.event.retry_of,
            attended=self.event.client > 0,
            input=self.event.input,
        )

    def add(self, member: str) -> HomeTask:
        record = self._record(member, self._uid())
        self.rows.append(PutTask(record, self.submitted_at, self._reason))
        self.unkept += 1
        spec = self.spec if not self.event.each else self.submission.spec_of(member_of(member))
        phase = HomePhase.HELD if self.event.held else HomePhase.WAITING
        task = HomeTask(record, spec, self._state.now.boot_s, self.event.terms, phase)
        self.tasks.append(task)
        return task


class SubmissionLog:
    """Log of submissions: numbers tasks and keeps the tokens of the last submissions, so that a submit can be
    repeated."""

    def __init__(self, state: CoreState, membership: Membership) -> None:
        self._state = state
        self._membership = membership
        self._counter = 0
        self._under_way: dict[str, SubmissionInProgress] = {}
        self._tokens: BoundedDict[str, tuple[bytes, dict[str, object]]] = BoundedDict(state.config.tokens_kept_max)
        self._environments: BoundedDict[bytes, bytes] = BoundedDict(state.config.environments_kept_max)
        self._told: BoundedDict[tuple[str, bytes], tuple[Mapping[str, str], float]] = BoundedDict(DIRECTORIES_TOLD_MAX)

    def restore(self, counter: int) -> None:
        """Restore the last number used before a restart. Earlier submissions come with each event (`before`)."""
        self._counter = counter

    def repeated(self, event: TaskSubmitted) -> dict[str, object] | None:
        """Answer to a repeated submission: the first answer to its token, without the obstacles of that time. None for
        a new token. Raises BadRequest if the token belongs to another submission."""
        known = self._tokens.get(event.token)
        if known is None and event.before is not None:
            digest, name, members = event.before
            known = digest, {"id": name, "members": members or None}
        if known is None:
            return None
        digest, reply = known
        if digest != event.digest:
            raise BadRequest(USED_BEFORE, hint=NEW_TOKEN)
        return {**reply, "directory_here": event.directory_here, "placeable": None, "repeated": True}

    @property
    def counter(self) -> int:
        """The last number given."""
        return self._counter

    def is_known(self, event: TaskSubmitted) -> bool:
        """True if a submission with this token was accepted before, or is in progress."""
        return event.token in self._tokens or event.before is not None or event.token in self._under_way

    def is_under_way(self, event: TaskSubmitted) -> bool:
        """True if an array with this token is being created; the request is then answered together with it. Raises
        BadRequest if the token belongs to another command."""
        made = self._under_way.get(event.token)
        if made is None:
            return False
        if made.event.digest != event.digest:
            raise BadRequest(USED_BEFORE, hint=NEW_TOKEN)
        made.repeated.append(event)
        return True

    def placeable(self, event: TaskSubmitted) -> tuple[str | None, dict[str, str]]:
        """Reason why no node can run the task now (None if one can), and the nodes that could run it but decline, each
        with its reason. Raises NeverRunnable if no known node could ever run it, unless it may wait for one."""
        state, membership = self._state, self._membership
        why = why_not_placeable(
            state, membership, event.spec, directory_here=event.directory_here, refuses=not event.waits_for_node
        )
        return why, declining(state, membership, event.spec)

    def begin(self, event: TaskSubmitted, tasks_now: int) -> SubmissionInProgress:
        """Number the submission. Raises SlowDown if the queue is full."""
        state = self._state
        tasks_now += sum(made.left() for made in self._under_way.values())
        if tasks_now + max(len(event.indices), 1) > state.config.tasks_queued_max:
            raise SlowDown(
                "the queue of this node is full",
                why=f"{tasks_now} tasks are unfinished; the limit is {state.config.tasks_queued_max}",
                retry_after_s=10.0,
            )
        self._counter += 1
        made = SubmissionInProgress(state, event, self._counter, self.shared(event.spec))
        self._under_way[event.token] = made
        return made

    def keep_so_far(self, made: SubmissionInProgress) -> None:
        """Persist the members created so far, once there are many. They take effect only with the submission's own
        row."""
        if made.unkept < self._state.config.members_at_a_time:
            return
        begins = () if made.is_begun else (PutMaking(made.submission.counter),)
        self._state.persist(*begins, *made.rows)
        made.rows.clear()
        made.unkept = 0
        made.is_begun = True

    def accept(
        self,
        made: SubmissionInProgress,
        placeable: str | None,
        rows: Iterable[Row] = (),
        declining: Mapping[str, str] | None = None,
    ) -> None:
        """Persist the submission, its remaining tasks (D1) and ``rows``, and answer. placeable: reason why no node can
        run it now; declining: the nodes that could run it but decline, each with its reason."""
        state, event = self._state, made.event
        del self._under_way[event.token]
        state.persist(PutSubmission(made.submission), *made.rows, *rows)
        made.rows.clear()
        state.count(metrics.TASKS_SUBMITTED, len(event.indices) or 1)
        reply: dict[str, object] = {"id": made.name, "members": len(event.indices) or None}
        if event.retry_of:
            reply["retry_of"] = event.retry_of
        self._tokens[event.token] = event.digest, reply
        reply = {**reply, "directory_here": event.directory_here, "placeable": placeable}
        if declining:
            reply["declining"] = dict(declining)
            key = event.spec.user, event.spec.directory
            told, told_s = self._told.get(key, (None, 0.0))
            if told == declining and state.now.boot_s - told_s < DECLINING_TOLD_S:
                reply["declining_told"] = True
            else:
                self._told[key] = declining, state.now.boot_s
        state.actions.append(Answer(event.request, reply))
        for again in made.repeated:
            state.actions.append(Answer(again.request, {**reply, "repeated": True}))

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """Equal spec that shares the bytes of its environment in memory with other tasks."""
        kept = self._environments.get(spec.environment)
        if kept is None:
            self._environments[spec.environment] = spec.environment
            return spec
        return spec if kept is spec.environment else msgspec.structs.replace(spec, environment=kept)

    def shrink(self) -> None:
        """Rebuild the tokens so that they are adjacent in memory: they were allocated between tasks that have ended."""
        packed = msgspec.msgpack.encode(list(self._tokens.items()))
        self._tokens.clear()
        self._tokens.update(_tokens.decode(packed))


def why_not_here(state: CoreState, spec: TaskSpec, *, directory_here: bool) -> str:
    """Reason why this node can never run a task of its own, in words; "" if it can."""
    never = why_never(state.profile, spec.request, spec.placement, state.node)
    return never or ("" if directory_here else _no_directory(spec))


def _no_directory(spec: TaskSpec) -> str:
    return f"no directory {spec.directory.decode(errors='replace')} on this node"


def why_not_placeable(
    state: CoreState, membership: Membership, spec: TaskSpec, *, directory_here: bool, refuses: bool = True
) -> str | None:
    """Reason why a task waits although this node is idle: it cannot run here, and no suitable node reports room. None
    if it only waits for its turn. Raises NeverRunnable if no known node could ever run it and ``refuses`` is set."""
    here = why_not_here(state, spec, directory_here=directory_here)
    if not here:
        return None
    need = Need(spec.request, spec.placement)
    if refuses and not membership.could_ever(spec, state.node):
        _refuse_hopeless(state, membership, spec, here, directory_here=directory_here)
    eligible = [
        membership.report(node)
        for node in membership.eligible(need, state.node)
        if not membership.will_decline(node, spec)
    ]
    if any(known is not None and seen_by(spec.request, known.report).accepts for known in eligible):
        return None
    if not membership.could_ever(spec, state.node):
        return f"no node known can ever run it; {here}"
    could = [
        peer for peer in _members(membership) if not why_never(peer.profile, spec.request, spec.placement, state.node)
    ]
    unmet = [f"{node}: {NOT_MET}" for node in membership.unmet(spec.placement, state.node)[:PEERS_NAMED_MAX]]
    return "; ".join([here, *_named([(peer, _why_not_now(membership, peer, spec)) for peer in could]), *unmet])


def declining(state: CoreState, membership: Membership, spec: TaskSpec) -> dict[str, str]:
    """The usable nodes that could run this task but decline it, each with its reason in words."""
    if not membership.any_declined():
        return {}
    nodes = membership.eligible(Need(spec.request, spec.placement), state.node)
    return {node: why for node in nodes if (why := membership.why_declines(node, spec))}


def _why_not_now(membership: Membership, peer: PeerInfo, spec: TaskSpec) -> str:
    if peer.state is not PeerState.ALIVE:
        return peer.state.value
    if peer.profile.drained:
        return "drained"
    declines = membership.why_declines(peer.identity.node, spec)
    return declines or "no room now" + _beside_others(membership, peer)


def _beside_others(membership: Membership, peer: PeerInfo) -> str:
    """Number of slots that other programs occupy there, as text to be added to a reason; "" if none."""
    known = membership.report(peer.identity.node)
    taken = known.report.slots_foreign if known is not None else 0
    return f" ({taken} of {peer.profile.slots} slots taken by other programs)" if taken else ""


def _members(membership: Membership) -> Iterator[PeerInfo]:
    """Peers without those that have left the cluster."""
    return (peer for peer in membership if peer.state is not PeerState.LEFT)


def _named(reasons: list[tuple[PeerInfo, str]]) -> list[str]:
    lines = [f"{peer.identity.node}: {why}" for peer, why in reasons[:PEERS_NAMED_MAX]]
    return lines if len(reasons) == len(lines) else [*lines, f"and {len(reasons) - len(lines)} more"]


def _refuse_hopeless(
    state: CoreState, membership: Membership, spec: TaskSpec, here: str, *, directory_here: bool
) -> None:
    reasons, lacks_there = [], False
    for peer in _members(membership):
        never = why_never(peer.profile, spec.request, spec.placement, state.node)
        lacks_there = lacks_there or (not never and membership.declined_code(peer.identity.node, spec) == "directory")
        never = never or membership.why_declines(peer.identity.node, spec)
        gone = "shut out" if peer.is_shut_out else "" if peer.state is PeerState.ALIVE else peer.state.value
        reasons.append((peer, ", ".join(filter(None, (gone, never)))))
    lacks_here = not directory_here and not why_not_here(state, spec, directory_here=True)
    hint = (
        "another directory:  -d DIR        take this one along:  --snapshot        a fresh one:  -d -"
        if lacks_here or lacks_there
        else HOPELESS_HINT
    )
    why = "; ".join([f"{state.node}: {here}", *_named(reasons)])
    if spec.request.takes_devices:
        nearest, lacking = _nearest_miss(state, membership, spec)
        others = [f"{state.node}: {here}"] if nearest != state.node else []
        others += _named([(peer, why) for peer, why in reasons if peer.identity.node != nearest])
        asked = asked_text(spec.request, spec.placement)
        why = "; ".join([f"asked {asked}, nearest is {nearest}: {lacking}", *others])
    raise NeverRunnable("no node known can ever run this; nothing was submitted", why=why, hint=hint)


def _nearest_miss(state: CoreState, membership: Membership, spec: TaskSpec) -> tuple[str, str]:
    """The node that lacks least for a task, and its lacking resources, in words."""
    profiles = [state.profile, *(peer.profile for peer in _members(membership) if peer.knows_profile)]
    lacking = [(lacks(profile, spec.request, spec.placement, state.node), profile) for profile in profiles]
    fewest = min(lacking, key=lambda one: (len(one[0]), one[1].gpus == 0, -one[1].gpus, one[1].node))
    return fewest[1].node, ", ".join(fewest[0])


SINGLY_MAX = 250
"""Members of a uniform array that are dispatched one by one at most; usually the first ones stay here."""


@dataclass(eq=False, repr=False)
class TaskDispatch:
    """Dispatch of arriving tasks: to the gate, to the queue, or to a search. One per node, without state of its own."""

    _state: CoreState
    _queue: WaitingQueue
    _membership: Membership
    _home: Home
    _sharing: Sharing
    _eligibility: Eligibility

    def adopt(self, task: HomeTask, *, directory_here: bool) -> None:
        self._home.adopt(task)
        if task.terms.is_conditional:
            self._eligibility.adopt(task)
        if not directory_here:
            task.cannot_here = _no_directory(task.spec)

    def _never_here(self, spec: TaskSpec) -> str:
        """Reason why this node can never run a task; "" if it can."""
        return why_never(self._state.profile, spec.request, spec.placement, self._state.node)

    def arrives(self, task: HomeTask) -> None:
        """Dispatch an arriving task: queue it here, or search for another node. The deciding load does not include
        it."""
        if self._home.rests_until_sure(task):
            return
        if task.terms.is_conditional and not self._eligibility.admits(task):
            return
        if self._state.prices and self._rests_for_price(task):
            return
        if cannot := task.cannot_here or self._never_here(task.spec):
            self._sharing.sender.strand(task, cannot)
            return
        sends = self._membership.has_any() and self._sharing.sender.sends(task)
        self._queue.add(task)
        if sends:
            self._sharing.sender.search_for(task)

    def arrive_together(self, block: UntouchedMembers) -> Iterator[int | None]:
        """Dispatch arriving members of a uniform array: queue them as one object, and search for nodes in turn."""
        sender = self._sharing.sender
        may_send = self._membership.has_any() and sender.may_send(block)
        if self._never_here(block.spec) or (may_send and sender.places_all):
            for member in block.members:
                task = self._home.by_id.get(f"{block.task}.{member}")
                if task is not None and self.has_yet_to_arrive(task):
                    self.arrives(task)
                yield None
            return
        for _ in range(SINGLY_MAX if may_send else 0):
            if not block.members or sender.sends(block):
                break
            self.arrives(self._home.touch(block, block.members[0]))
        if block.members:
            self._queue.add(block)
            if may_send and sender.still_sends(block):
                sender.search_for_members(block.task)

    def _rests_for_price(self, task: HomeTask) -> bool:
        """Defer a task that may start later until its cheapest hours. → True if it is deferred."""
        start_s = self._cheapest_start(task)
        now = self._state.now.wall_s
        if start_s > now:
            if not task.record.last_node:  # else a node may return with it
                self._home.mediator.task_kept_back(task)
            self._home.rest(task, start_s - now)
        return start_s > now

    def _cheapest_start(self, task: HomeTask) -> float:
        state, start_by = self._state, task.terms.start_by
        now = state.now.wall_s
        if start_by <= now or not state.prices:
            return 0.0
        return cheapest_start(state.prices, now, start_by, self._duration_s(task))

    def _duration_s(self, task: HomeTask) -> float:
        history = self._state.history
        return history.expected_of(task) or history.mean_s

    def deferral(self, task: HomeTask) -> tuple[float, float, float | None] | None:
        """Start (Unix s) of a task that is deferred for its price, the mean price of a kWh then, and the price now;
        None if it is not deferred."""
        start_s = self._cheapest_start(task) if task.phase is HomePhase.RESTING else 0.0
        if start_s <= self._state.now.wall_s:
            return None
        duration_s, prices = self._duration_s(task), self._state.prices
        price = integral(prices, start_s, start_s + duration_s) / duration_s
        return start_s, price, self._state.price

    def prices_changed(self, prices: tuple[tuple[float, float], ...]) -> None:
        """Replace the energy prices; deferred tasks arrive again."""
        put_off = [task for task in self._home.tasks.values() if self.deferral(task) is not None]
        self._state.prices = prices
        for task in put_off:
            self._state.clear_timer(timers.Rest(task.uid.hex()))
            self._home.rested(task)

    def reevaluate_waiting(self) -> None:
        """Handle a change of this node's devices: own tasks that need devices are queued here if this node can run them
        now, otherwise they search for another node."""
        sender = self._sharing.sender
        for task in [task for task in self._home.tasks.values() if task.spec.request.takes_devices]:
            is_queued, is_stranded = task.is_queued, task.uid in self._home.stranded
            if task.cannot_here or not (is_queued or is_stranded):
                continue
            cannot = self._never_here(task.spec)
            if is_stranded and cannot:
                task.stranded_because = cannot
            elif is_stranded:
                self._home.take_out(task)
                self.arrives(task)
            elif cannot:
                self._queue.remove(task)
                sender.strand(task, cannot)

    def directory_found(self, directory: bytes) -> None:
        """Handle a working directory that has appeared here: tasks that could not run here without it now can."""
        stranded = self._home.stranded
        for task in [
            task for task in self._home.tasks.values() if task.cannot_here and task.spec.directory == directory
        ]:
            task.cannot_here = ""
            if task.uid in stranded and task.phase is HomePhase.WAITING:
                self._home.take_out(task)
                self.arrives(task)

    def has_yet_to_arrive(self, task: HomeTask) -> bool:
        """True if this new task is neither dispatched nor changed so far."""
        is_waiting = task.phase is HomePhase.WAITING and self._home.tasks.get(task.uid) is task
        return is_waiting and not task.is_queued and task.uid not in self._home.stranded

    def _requeued(self, task: HomeTask) -> None:
        self._queue.remove(task)
        self.arrives(task)

    def returned(self, message: Return | NotStarted, to: str) -> None:
        """Handle NOT_STARTED: a node promises never to start its attempt. If it suggests a better node (``to``), the
        task is offered there immediately, without a search; otherwise the task arrives again."""
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.RESTING:  # None: it cannot be run again, and has failed
            return
        if task.terms.is_conditional and not self._eligibility.admits(task):
            self._queue.remove(task)
            return
        here = self._state.node
        runs_here = not task.cannot_here and not self._never_here(task.spec)
        if runs_here and to == here:
            self._state.count(metrics.TASKS_RETURNED)
            self._sharing.donor.taken_home(message.uid)
            if self._sharing.sender.passes_on:  # the same test as for all offers
                self._requeued(task)
        elif to in self._membership.eligible(task.need(), here) and self._home.may_migrate(task):
            if not runs_here:
                self._queue.remove(task)
                self._sharing.sender.strand(task, message.reason, searches=False)
            self._sharing.sender.forward(task, to)
        else:
            self._requeued(task)


@dataclass(eq=False, repr=False)
class Intake:
    """Intake of submissions and of stored tasks. One per node; ``client_binding`` is notified of each new task."""

    _state: CoreState
    _home: Home
    _submissions: SubmissionLog
    _batches: BatchedRequests
    _eligibility: Eligibility
    _client_binding: ClientBinding
    _dispatch: TaskDispatch

    def submitted(self, event: TaskSubmitted) -> None:
        """Persist, answer and dispatch a submission, or refuse it. Tasks that it waits for are first checked to
        exist."""
        if not event.terms.awaits or self._submissions.is_known(event):
            self.accepted(event)
        else:
            self._eligibility.remote_status.begin(event, self._submissions.counter)

    def accepted(self, event: TaskSubmitted) -> None:
        """Carry out a submission whose dependencies are known to exist."""
        self._batches.carry_out(event.request, self._submitted(event))

    def _repeated(self, event: TaskSubmitted, reply: dict[str, object]) -> Iterator[int | None]:
        """Answer a submission that was accepted before. The tasks are bound to this client, as the first may be
        gone."""
        if event.client:
            self._client_binding.submission_begun(event.client)
            for task in self._home.named(str(reply["id"])):
                self._client_binding.submitted(task, (event.client,))
                yield None
            self._client_binding.submission_done(event.client)
        self._state.actions.append(Answer(event.request, reply))

    def _is_uniform(self, event: TaskSubmitted) -> bool:
        """True if the members of an array differ only by number, and nothing keeps them from the queue."""
        if len(event.indices) < self._state.config.uniform_array_min:
            return False
        terms, spec = event.terms, event.spec
        is_apart = event.each or event.held or event.client or event.input or event.retry_of or not event.directory_here
        is_kept_back = terms.awaits or terms.group or terms.start_by or spec.request.takes_devices
        return not is_apart and not is_kept_back

    def _submitted(self, event: TaskSubmitted) -> Iterator[int | None]:
        """Create the members of an array, and persist them in parts. All count, and are announced, once the last part
        is stored. Then each arrives, unless it has changed already, and from then on ends with its client."""
        try:
            reply = self._submissions.repeated(event)
            if reply is not None:
                yield from self._repeated(event, reply)
                return
            if self._submissions.is_under_way(event):
                if event.client:
                    self._client_binding.submission_begun(event.client)
                return
            placeable, declining = self._submissions.placeable(event)
            array = self._submissions.begin(event, self._home.number)
        except BadRequest as error:
            self._state.actions.append(Answer(event.request, error=error))
            return
        self._home.begin_making(array.name)
        if event.client:
            self._client_binding.submission_begun(event.client)
        is_uniform = self._is_uniform(event)
        yield from self._make_members(array) if is_uniform else self._make_tasks(array)
        rows = self._eligibility.dependencies.rows(event.terms) if event.terms.awaits else ()
        self._submissions.accept(array, placeable, rows, declining)
        self._home.mark_durable(array.name)
        for block in array.adopt_members(self._home) if is_uniform else ():
            yield from self._dispatch.arrive_together(block)
        yield from self._arrive(array)

    def _make_members(self, array: SubmissionInProgress) -> Iterator[int | None]:
        array.make_uniform()
        for members in array.parts(self._state.config.uniform_at_a_time):
            self._submissions.keep_so_far(array)
            array.add_members(members)
            yield len(members)

    def _make_tasks(self, array: SubmissionInProgress) -> Iterator[int | None]:
        for member in array.members():
            self._submissions.keep_so_far(array)
            task = array.add(member)
            self._dispatch.adopt(task, directory_here=array.event.directory_here)
            yield None

    def _arrive(self, array: SubmissionInProgress) -> Iterator[int | None]:
        event, clients = array.event, array.clients()
        for task in array.tasks if clients or not event.held else ():
            if clients and self._home.tasks.get(task.uid) is task:
                self._client_binding.submitted(task, clients)
            if not event.held and self._dispatch.has_yet_to_arrive(task):
                self._dispatch.arrives(task)
            yield None
        for client in clients:
            self._client_binding.submission_done(client)

    # -- after a restart -----------------------------------------------------------------------------------------------

    def restored(self, row: TaskRow) -> HomeTask:
        """Restore a task of this home from its row, in the phase that matches its durable state."""
        phase = _phase_of(row.record, self._state.node)
        task = HomeTask(row.record, self._submissions.shared(row.spec), self._state.now.boot_s, row.terms, phase)
        self._dispatch.adopt(task, directory_here=row.directory_here)
        return task

    def restored_members(self, row: MembersRow) -> UntouchedMembers:
        """Restore the untouched members of a uniform array from their row."""
        spec, now_s = self._submissions.shared(row.spec), self._state.now.boot_s
        block = UntouchedMembers(self._home, row.members, row.record, row.key, spec, now_s, row.terms)
        self._home.adopt_members(block)
        return block


def submission_order(work: HomeTask | UntouchedMembers) -> tuple[int, int]:
    member = work.members[0] if isinstance(work, UntouchedMembers) else member_of(work.task)
    return submission_of(work.task), member


def _phase_of(record: TaskRecord, here: str) -> HomePhase:
    match record.state:
        case TaskState.HELD:
            return HomePhase.HELD
        case TaskState.LEASED:
            return HomePhase.HERE if record.node == here else HomePhase.AWAY
        case TaskState.UNKNOWN:
            return HomePhase.UNKNOWN
        case _:
            return HomePhase.WAITING
