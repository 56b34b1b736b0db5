"""What becomes of a `submit`: tokens, counters, members of arrays, and the refusal of what nobody could ever run."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from peerload.core.admission import asked_text, lacks, why_never
from peerload.core.membership import PeerState
from peerload.core.work import HomeTask
from peerload.model.actions import PutSubmission, PutTask
from peerload.model.errors import BadRequest, NeverRunnable, SlowDown
from peerload.model.events import Submission
from peerload.model.messages import Need
from peerload.model.task import TaskRecord, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.core.membership import Membership, Peer
    from peerload.core.state import CoreState
    from peerload.model.events import TaskSubmitted
    from peerload.model.task import TaskSpec


PEERS_NAMED_MAX = 3
"""Peers whose reason is told; as many as fit a line."""
HOPELESS_HINT = "peerload nodes        to wait for such a node:  --wait-for-node"


class Submissions:
    """Numbers tasks, and knows the tokens of the last submissions, so that repeating a submit is safe."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._counter = 0
        self._tokens: OrderedDict[str, tuple[bytes, dict[str, object]]] = OrderedDict()
        self._environments: OrderedDict[bytes, bytes] = OrderedDict()

    def restore(self, counter: int, tokens: Iterable[tuple[str, bytes, str, int]]) -> None:
        """After a restart: the last number used; tokens as (token, digest, id, members; 0 = a single task)."""
        self._counter = counter
        for token, digest, name, members in tokens:
            self._remember(token, digest, {"id": name, "members": members or None})

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
            raise BadRequest("this token was used before for another command", hint="submit again with a new token")
        return {**reply, "directory_here": event.directory_here, "placeable": None, "repeated": True}

    def accept(
        self, event: TaskSubmitted, tasks_now: int, placeable: str | None
    ) -> tuple[list[HomeTask], dict[str, object]]:
        """Number the task or the members of the array and keep them (D1). Raises SlowDown if the queue is full.
        placeable: why nobody can run it now, for the answer."""
        state = self._state
        if tasks_now + max(len(event.indices), 1) > state.config.tasks_queued_max:
            raise SlowDown(
                "the queue of this node is full",
                why=f"{tasks_now} tasks are unfinished; at most {state.config.tasks_queued_max} may be",
                retry_after_s=10.0,
            )
        self._counter += 1
        name = f"{state.node}/{self._counter}"
        spec = self.shared(event.spec)
        submitted_at = state.now.wall_s
        tasks = []
        rows: list[PutSubmission | PutTask] = [
            PutSubmission(Submission(self._counter, event.token, event.digest, spec, event.indices, submitted_at))
        ]
        first, reason = (TaskState.HELD, "submitted held") if event.held else (TaskState.QUEUED, "submitted")
        if event.retry_of:
            reason = f"{reason}; repeats {event.retry_of}"
        for member in [f"{name}.{index}" for index in event.indices] or [name]:
            uid = state.rng.getrandbits(128).to_bytes(16, "big")
            record = TaskRecord(member, uid, first, submitted_at, reason=reason, retry_of=event.retry_of)
            rows.append(PutTask(record, submitted_at, reason))
            tasks.append(HomeTask(record, spec, state.now.boot_s))
        state.persist(*rows)
        state.count("tasks submitted", len(tasks))
        reply: dict[str, object] = {"id": name, "members": len(event.indices) or None}
        if event.retry_of:
            reply["retry_of"] = event.retry_of
        self._remember(event.token, event.digest, reply)
        return tasks, {**reply, "directory_here": event.directory_here, "placeable": placeable}

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """The same spec with its environment kept once in memory, however many tasks have an equal one."""
        kept = self._environments.get(spec.environment)
        if kept is None:
            self._environments[spec.environment] = spec.environment
            if len(self._environments) > self._state.config.environments_kept_max:
                self._environments.popitem(last=False)
            return spec
        return spec if kept is spec.environment else msgspec.structs.replace(spec, environment=kept)

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
    if refuses and not membership.could_ever(need, state.node):
        _refuse_hopeless(state, membership, spec, here, directory_here=directory_here)
    eligible = [membership.report(node) for node in membership.eligible(need, state.node)]
    if any(known is not None and known.report.accepts for known in eligible):
        return None
    if not membership.could_ever(need, state.node):
        return f"no node known can ever run it; {here}"
    could = [peer for peer in membership if not why_never(peer.profile, spec.request, spec.placement, state.node)]
    return "; ".join([here, *_named([(peer, _why_not_now(peer)) for peer in could])])


def _why_not_now(peer: Peer) -> str:
    if peer.state is not PeerState.ALIVE:
        return peer.state.value
    return "drained" if peer.profile.drained else "no room now"


def _named(reasons: list[tuple[Peer, str]]) -> list[str]:
    lines = [f"{peer.identity.node}: {why}" for peer, why in reasons[:PEERS_NAMED_MAX]]
    return lines if len(reasons) == len(lines) else [*lines, f"and {len(reasons) - len(lines)} more"]


def _refuse_hopeless(
    state: CoreState, membership: Membership, spec: TaskSpec, here: str, *, directory_here: bool
) -> None:
    reasons = [
        (peer, why_never(peer.profile, spec.request, spec.placement, state.node) or peer.state.value)
        for peer in membership
    ]
    is_the_directory = not directory_here and not why_not_here(state, spec, directory_here=True)
    hint = "another directory: -d DIR        a fresh scratch directory: -d -" if is_the_directory else HOPELESS_HINT
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
    profiles = [state.profile, *(peer.profile for peer in membership if peer.knows_profile)]
    lacking = [(lacks(profile, spec.request, spec.placement, state.node), profile) for profile in profiles]
    fewest = min(lacking, key=lambda one: (len(one[0]), one[1].gpus == 0, -one[1].gpus, one[1].node))
    return fewest[1].node, ", ".join(fewest[0])
