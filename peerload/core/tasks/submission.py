"""Submissions: tokens, counters, members of arrays, and the refusal of tasks that no node could ever run."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from peerload.core.membership.membership import PeerState
from peerload.core.resources.admission import asked_text, lacks, seen_by, why_never
from peerload.core.work import HomePhase, HomeTask, UntouchedMembers
from peerload.model import metrics
from peerload.model.actions import Answer, PutMaking, PutMembers, PutSubmission, PutTask
from peerload.model.errors import BadRequest, NeverRunnable, SlowDown
from peerload.model.events import Submission
from peerload.model.messages import Need
from peerload.model.task import TaskRecord, TaskState, member_of, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from peerload.core.membership.membership import Membership, PeerInfo
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.model.actions import Row
    from peerload.model.events import TaskSubmitted
    from peerload.model.task import TaskSpec


PEERS_NAMED_MAX = 3
"""Peers whose reason is told; as many as fit a line."""
HOPELESS_HINT = "peerload nodes        to wait for such a node:  --wait-for-node"
USED_BEFORE = "this token was used before for another command"
NEW_TOKEN = "submit again with a new token"  # noqa: S105 -- words


_tokens = msgspec.msgpack.Decoder(list[tuple[str, tuple[bytes, dict[str, object]]]])


class SubmissionInProgress:
    """A submission while its tasks are made. ``rows``: those of its tasks that are not on their way to the disk yet, ``unkept``
    of them; begun: whether some are; ``repeated``: requests that repeat it meanwhile."""

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
        """The names of all."""
        return (f"{self.name}.{index}" for index in self.event.indices) if self.event.indices else iter((self.name,))

    def left(self) -> int:
        """How many are still to be made."""
        return max(len(self.event.indices), 1) - len(self.tasks)

    def clients(self) -> list[int]:
        """The clients that attend these tasks, once for each submission that they sent."""
        return [event.client for event in (self.event, *self.repeated) if event.client]

    def make_uniform(self) -> None:
        """Give the members uids of one key, so that one row and one object may stand for many of them."""
        self.submission = msgspec.structs.replace(self.submission, uid_key=self._uid())

    def parts(self, at_most: int) -> Iterator[range]:
        """The members of an array, some at a time."""
        for members in ranges(self.event.indices):
            yield from (members[start : start + at_most] for start in range(0, len(members), at_most))

    def add_members(self, members: range) -> None:
        """Make these members of a uniform array."""
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
        """Make one."""
        record = self._record(member, self._uid())
        self.rows.append(PutTask(record, self.submitted_at, self._reason))
        self.unkept += 1
        spec = self.spec if not self.event.each else self.submission.spec_of(member_of(member))
        phase = HomePhase.HELD if self.event.held else HomePhase.WAITING
        task = HomeTask(record, spec, self._state.now.boot_s, self.event.terms, phase)
        self.tasks.append(task)
        return task


class SubmissionLog:
    """Numbers tasks, and knows the tokens of the last submissions, so that repeating a submit is safe."""

    def __init__(self, state: CoreState, membership: Membership) -> None:
        self._state = state
        self._membership = membership
        self._counter = 0
        self._under_way: dict[str, SubmissionInProgress] = {}
        self._tokens: OrderedDict[str, tuple[bytes, dict[str, object]]] = OrderedDict()
        self._environments: OrderedDict[bytes, bytes] = OrderedDict()

    def restore(self, counter: int) -> None:
        """After a restart: the last number used. What was submitted before comes with each event (`before`)."""
        self._counter = counter

    def repeated(self, event: TaskSubmitted) -> dict[str, object] | None:
        """The first answer (what stood in its task's way then is not told again), if this token was used before.
        Raises BadRequest if it stood for something else."""
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
        """True if a submission with this token was accepted before, or is being made."""
        return event.token in self._tokens or event.before is not None or event.token in self._under_way

    def is_under_way(self, event: TaskSubmitted) -> bool:
        """True if an array with this token is being made: then it is answered with that. Raises BadRequest if it is another
        command."""
        made = self._under_way.get(event.token)
        if made is None:
            return False
        if made.event.digest != event.digest:
            raise BadRequest(USED_BEFORE, hint=NEW_TOKEN)
        made.repeated.append(event)
        return True

    def placeable(self, event: TaskSubmitted) -> tuple[str | None, dict[str, str]]:
        """Why nobody can run it now, None if somebody can; and the nodes that could and decline, each with its reason. Raises
        NeverRunnable if no node known could ever run it, unless it may wait for one."""
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
                why=f"{tasks_now} tasks are unfinished; at most {state.config.tasks_queued_max} may be",
                retry_after_s=10.0,
            )
        self._counter += 1
        made = SubmissionInProgress(state, event, self._counter, self.shared(event.spec))
        self._under_way[event.token] = made
        return made

    def keep_so_far(self, made: SubmissionInProgress) -> None:
        """Keep the members that were made so far, once there are many. They count for nothing until the submission is kept."""
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
        """Keep the submission and what is left of its tasks (D1), and ``rows`` with them, and answer. placeable: why nobody
        can run it now; declining: the nodes that could run it and decline, each with its reason."""
        state, event = self._state, made.event
        del self._under_way[event.token]
        state.persist(PutSubmission(made.submission), *made.rows, *rows)
        made.rows.clear()
        state.count(metrics.TASKS_SUBMITTED, len(event.indices) or 1)
        reply: dict[str, object] = {"id": made.name, "members": len(event.indices) or None}
        if event.retry_of:
            reply["retry_of"] = event.retry_of
        self._remember(event.token, event.digest, reply)
        reply = {**reply, "directory_here": event.directory_here, "placeable": placeable}
        if declining:
            reply["declining"] = dict(declining)
        state.actions.append(Answer(event.request, reply))
        for again in made.repeated:
            state.actions.append(Answer(again.request, {**reply, "repeated": True}))

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """An equal spec whose environment is shared in memory with all tasks that have the same."""
        kept = self._environments.get(spec.environment)
        if kept is None:
            self._environments[spec.environment] = spec.environment
            if len(self._environments) > self._state.config.environments_kept_max:
                self._environments.popitem(last=False)
            return spec
        return spec if kept is spec.environment else msgspec.structs.replace(spec, environment=kept)

    def shrink(self) -> None:
        """Make the tokens anew, so that they lie together: each of them was made between tasks that have ended since."""
        packed = msgspec.msgpack.encode(list(self._tokens.items()))
        self._tokens = OrderedDict(_tokens.decode(packed))

    def _remember(self, token: str, digest: bytes, reply: dict[str, object]) -> None:
        self._tokens[token] = (digest, reply)
        if len(self._tokens) > self._state.config.tokens_kept_max:
            self._tokens.popitem(last=False)


def why_not_here(state: CoreState, spec: TaskSpec, *, directory_here: bool) -> str:
    """Why this node can never run a task of its own, in words; "" if it can."""
    never = why_never(state.profile, spec.request, spec.placement, state.node)
    if never or directory_here:
        return never
    return f"no directory {spec.directory.decode(errors='replace')} on this node"


def why_not_placeable(
    state: CoreState, membership: Membership, spec: TaskSpec, *, directory_here: bool, refuses: bool = True
) -> str | None:
    """Why a task waits though this node is idle: it cannot run here, and no node that could says that it has room.
    None if there is nothing to wait for but a turn. Raises NeverRunnable if no node known could ever run it, unless it
    may wait for one (not ``refuses``)."""
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
    return "; ".join([here, *_named([(peer, _why_not_now(membership, peer, spec)) for peer in could])])


def declining(state: CoreState, membership: Membership, spec: TaskSpec) -> dict[str, str]:
    """The usable nodes that could run this task and decline it, each with its reason in words."""
    if not membership.any_declined():
        return {}
    nodes = membership.eligible(Need(spec.request, spec.placement), state.node)
    return {node: why for node in nodes if (why := membership.why_declines(node, spec))}


def _why_not_now(membership: Membership, peer: PeerInfo, spec: TaskSpec) -> str:
    if peer.state is not PeerState.ALIVE:
        return peer.state.value
    if peer.profile.drained:
        return "drained"
    return membership.why_declines(peer.identity.node, spec) or "no room now"


def _members(membership: Membership) -> Iterator[PeerInfo]:
    """The peers without those that have left: they are no nodes any more."""
    return (peer for peer in membership if peer.state is not PeerState.LEFT)


def _why_never_there(peer: PeerInfo, never: str) -> str:
    """True if anybody is there comes first."""
    gone = "" if peer.state is PeerState.ALIVE else peer.state.value
    return ", ".join(filter(None, (gone, never)))


def _named(reasons: list[tuple[PeerInfo, str]]) -> list[str]:
    lines = [f"{peer.identity.node}: {why}" for peer, why in reasons[:PEERS_NAMED_MAX]]
    return lines if len(reasons) == len(lines) else [*lines, f"and {len(reasons) - len(lines)} more"]


def _refuse_hopeless(
    state: CoreState, membership: Membership, spec: TaskSpec, here: str, *, directory_here: bool
) -> None:
    reasons = [
        (
            peer,
            _why_never_there(
                peer,
                why_never(peer.profile, spec.request, spec.placement, state.node)
                or membership.why_declines(peer.identity.node, spec),
            ),
        )
        for peer in _members(membership)
    ]
    lacks_here = not directory_here and not why_not_here(state, spec, directory_here=True)
    lacks_there = any(membership.declined_code(peer.identity.node, spec) == "directory" for peer, _ in reasons)
    hint = (
        "another directory: -d DIR        a fresh scratch directory: -d -"
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
    """The node that lacks least, and what it lacks, in words."""
    profiles = [state.profile, *(peer.profile for peer in _members(membership) if peer.knows_profile)]
    lacking = [(lacks(profile, spec.request, spec.placement, state.node), profile) for profile in profiles]
    fewest = min(lacking, key=lambda one: (len(one[0]), one[1].gpus == 0, -one[1].gpus, one[1].node))
    return fewest[1].node, ", ".join(fewest[0])
