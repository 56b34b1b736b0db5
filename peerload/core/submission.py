"""What becomes of a `submit`: tokens, counters, members of arrays, and the refusal of what nobody could ever run."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from peerload.core.admission import why_never
from peerload.core.work import HomeTask
from peerload.model.actions import PutSubmission, PutTask
from peerload.model.errors import BadRequest, NeverRunnable, SlowDown
from peerload.model.events import Submission
from peerload.model.task import TaskRecord, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.core.membership import Peer
    from peerload.core.state import CoreState
    from peerload.model.events import TaskSubmitted
    from peerload.model.task import Exit, TaskSpec


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
        """The first answer, if this token was used before. Raises BadRequest if it stood for something else."""
        known = self._tokens.get(event.token)
        if known is None:
            return None
        digest, reply = known
        if digest != event.digest:
            raise BadRequest("this token was used before for another command", hint="submit again with a new token")
        return {**reply, "directory_here": event.directory_here, "repeated": True}

    def accept(self, event: TaskSubmitted, tasks_now: int) -> tuple[list[HomeTask], dict[str, object]]:
        """Number the task or the members of the array and keep them (D1). Raises SlowDown if the queue is full."""
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
        for member in [f"{name}.{index}" for index in event.indices] or [name]:
            uid = state.rng.getrandbits(128).to_bytes(16, "big")
            record = TaskRecord(member, uid, TaskState.QUEUED, submitted_at, reason="submitted")
            rows.append(PutTask(record, submitted_at, "submitted"))
            tasks.append(HomeTask(record, spec, state.now.boot_s))
        state.persist(*rows)
        state.count("tasks submitted", len(tasks))
        reply: dict[str, object] = {"id": name, "members": len(event.indices) or None}
        self._remember(event.token, event.digest, reply)
        return tasks, {**reply, "directory_here": event.directory_here}

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


def refuse_hopeless(
    state: CoreState, spec: TaskSpec, why_not_here: str, peers: list[Peer], *, directory_here: bool
) -> None:
    """Raise NeverRunnable: no node known could ever run it. Says why not this one, and how many others there are."""
    here = why_not_here
    hint = "peerload nodes"
    if not here and not directory_here:
        here = f"no directory {spec.directory.decode(errors='replace')}"
        hint = "another directory: -d DIR        a fresh scratch directory: -d -"
    reasons = [f"{state.node}: {here}"]
    for peer in peers[:3]:
        never = why_never(peer.profile, spec.request, spec.placement, state.node)
        reasons.append(f"{peer.identity.node}: {never or peer.state.value}")
    more = f", and {len(peers) - 3} more" if len(peers) > 3 else ""  # noqa: PLR2004 -- as many as fit a line
    raise NeverRunnable(
        "no node known can ever run this; nothing was submitted", why="; ".join(reasons) + more, hint=hint
    )


def limited(exit_: Exit, killed_because: str) -> Exit:
    """A task that was ended for its time limit shows that (exit code 124), whatever the signal made of it."""
    if killed_because != "time limit":
        return exit_
    return msgspec.structs.replace(exit_, exit_code=124, reason=killed_because)
