"""The verb `why`: explains why a task waits, or why it runs where it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.runtime import now
from peerload.agent.views import task as views
from peerload.core.explain import (
    EligibilityVerdict,
    Suggestion,
    WaitReasons,
    holding_reason,
    smallest_change,
    uncollected_reason,
)
from peerload.core.membership.membership import PeerState
from peerload.core.resources.admission import needs_text
from peerload.core.work import HomePhase
from peerload.model.errors import NoSuchTask
from peerload.model.task import how_it_ended, member_of

if TYPE_CHECKING:
    from peerload.agent.control.core_requests import Decisions
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.files.environments import Environments
    from peerload.agent.store.reader import StoreReader
    from peerload.agent.views.agent import ClusterView
    from peerload.core.node import Node
    from peerload.core.work import HomeTask
    from peerload.model.task import TaskRecord, TaskSpec

MEMBERS_MAX = 10_000
"""Members of an array that are examined; an array may have a million."""
GROUPS_MAX = 8
"""Groups of members with the same state and reason that are listed."""
AWAITED_NAMED_MAX = 4
"""Dependencies that are named in a suggestion."""
STEPS_MAX = 8
"""The last changes of a task that are listed."""
REVOKED = "was shut out of the cluster (revoked)"
LEFT = "has left the cluster, or was forgotten"
UNKNOWN = "is no node that is known here"
GONE = (REVOKED, LEFT, UNKNOWN)
WAITING_PHASES = (HomePhase.WAITING, HomePhase.OFFERED, HomePhase.RESTING, HomePhase.GATED)


def is_waiting(task: HomeTask | None) -> bool:
    """True if a task waits for room, at home or in the queue of another node."""
    if task is None:
        return False
    return task.phase in WAITING_PHASES or (task.phase is HomePhase.AWAY and not task.running_at)


@dataclass(eq=False, repr=False)
class WhyRequest:
    """Answers `why` for the tasks of one home."""

    _node: Node
    _store: StoreReader
    _task_ids: TaskIds
    _decisions: Decisions
    _cluster: ClusterView
    _environments: Environments

    async def explain(self, ref: str) -> dict[str, object]:
        """Explain one task or an array. Raises NoSuchTask, BadRequest for an invalid id."""
        counter, _ = self._task_ids.resolve(ref)
        records: list[TaskRecord] = []
        async for page in self._task_ids.pages(ref):
            records += page
            if len(records) >= MEMBERS_MAX:
                break
        if not records:
            raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
        spec = self._store.spec(counter)
        return self._array(records, spec) if len(records) > 1 else self._task(records[0], spec)

    def _task(self, record: TaskRecord, spec: TaskSpec) -> dict[str, object]:
        task = self._node.home.by_id.get(record.task)
        told = self._describe(record, spec)
        if task is not None and (task.phase is HomePhase.COLLECTING or uncollected_reason(task)):
            told["says"] = uncollected_reason(task) or holding_reason(task)
        if task is not None and self._environments.prepares(task.key):
            told["says"] = f"its environment is being built on {self._node.state.node}"
            told["staging"] = {"done_bytes": 0, "size_bytes": 0, "builds": True}
        return told | self._waiting(task) if task is not None and is_waiting(task) else told

    def _array(self, records: list[TaskRecord], spec: TaskSpec) -> dict[str, object]:
        """Explain an array: its members by state and reason, and the next member to start in full."""
        home = self._node.home
        groups: Counter[tuple[str, str]] = Counter()
        for record in records:
            task = home.by_id.get(record.task)
            is_queued = task is not None and task.phase in WAITING_PHASES
            state = "running" if task is not None and task.running_at else record.state.value
            reason = views.why_waiting(self._node, task, record) if is_queued else record.reason
            groups[state, reason] += 1
        name = records[0].task.rpartition(".")[0]
        home.touched(name, 1)
        waiting = [task for task in home.arrays.get(name, {}).values() if is_waiting(task)]
        next_one = min(waiting, key=lambda task: member_of(task.task), default=None)
        told = self._describe(records[0] if next_one is None else next_one.record, spec)
        told["array"] = {
            "id": name,
            "looked_at": len(records),
            "groups": [
                {"state": state, "reason": reason, "tasks": count}
                for (state, reason), count in groups.most_common(GROUPS_MAX)
            ],
            "more_groups": max(len(groups) - GROUPS_MAX, 0),
        }
        return told | self._waiting(next_one) if next_one is not None else told

    def _describe(self, record: TaskRecord, spec: TaskSpec) -> dict[str, object]:
        """The part of an explanation that every task has."""
        shown = views.task_here(self._node, record, spec, "")
        history = self._store.history(record.task)
        return {
            "id": record.task,
            "name": shown["name"],
            "state": shown["state"],
            "node": shown["node"],
            "needs": needs_text(spec.request, spec.placement),
            "says": _state_text(record),
            "since": history[-1].at if history else record.submitted_at,
            "steps": [views.history_step(event) for event in history[-STEPS_MAX:]],
            "devices": shown["device_names"],
            "decision": self._decisions.of_task(record.task),
            "nodes": [],
            "could_ever": None,
            "freshest_s": None,
            "oldest_s": None,
            "oldest_node": None,
            "change": None,
            "staging": None,
            "summary": "",
            "array": None,
        }

    def _waiting(self, task: HomeTask) -> dict[str, object]:
        """Why a waiting task does not start: a reason for every node."""
        node, now_s = self._node, now().boot_s
        reasons = WaitReasons(node, task, now_s)
        verdicts = [*map(self._as_trusted, reasons.verdicts()), *self._pinned_elsewhere(task)]
        ages = {verdict.node: verdict.age_s for verdict in verdicts if verdict.age_s is not None}
        oldest = max(ages, key=lambda name: ages[name], default=None)
        change = None
        gate = node.eligibility.reason(task)
        staging = task.offering.staging if task.offering is not None else None
        if gate:
            change = _group_suggestion(node, task, verdicts)
        elif not any(verdict.now for verdict in verdicts):
            change = smallest_change(node, reasons, task.spec) or _another_directory(task, node.state.node)
        return {
            "says": gate or views.deferral_text(node, task) or holding_reason(task),
            "staging": None
            if staging is None
            else {"done_bytes": staging.done_bytes, "size_bytes": staging.size_bytes, "builds": staging.builds},
            "nodes": [
                {
                    "node": verdict.node,
                    "can_ever": verdict.can_ever,
                    "now": verdict.now,
                    "reason": verdict.reason,
                    "age_s": verdict.age_s,
                }
                for verdict in verdicts
            ],
            "could_ever": sum(verdict.can_ever is True for verdict in verdicts),
            "freshest_s": min(ages.values(), default=None),
            "oldest_s": ages[oldest] if oldest is not None else None,
            "oldest_node": oldest,
            "change": None if change is None else {"words": change.words, "node": change.node},
            "summary": gate or self._isolation(verdicts) or _summary(verdicts, node.state.node),
        }

    def _as_trusted(self, verdict: EligibilityVerdict) -> EligibilityVerdict:
        """Replace the verdict of a revoked node."""
        peer = self._node.membership.get(verdict.node)
        if peer is None or not self._cluster.was_revoked(verdict.node) or not self._cluster.is_peer_revoked(peer):
            return verdict
        return msgspec.structs.replace(verdict, can_ever=False, now=None, reason=REVOKED)

    def _pinned_elsewhere(self, task: HomeTask) -> list[EligibilityVerdict]:
        """A verdict about the node that the task is pinned to, if that is not a known member."""
        own, name = self._node.state.node, task.spec.placement.node or ""
        peer = self._node.membership.get(name)
        if name in ("", own) or (peer is not None and peer.state is not PeerState.LEFT):
            return []
        reason = REVOKED if self._cluster.was_revoked(name) else UNKNOWN if peer is None else LEFT
        return [EligibilityVerdict(name, can_ever=False, now=None, reason=reason)]

    def _isolation(self, verdicts: list[EligibilityVerdict]) -> str:
        """Summary for a task that cannot start here while this node is revoked; "" otherwise."""
        if not self._cluster.is_revoked() or any(verdict.now for verdict in verdicts):
            return ""
        return f"{self._node.state.node} was shut out of its cluster (revoked) and works alone: {verdicts[0].reason}"


def _state_text(record: TaskRecord) -> str:
    """State of a task that does not wait for room, in words."""
    if record.state.is_final and record.exit is not None:
        return how_it_ended(record.exit)
    return record.reason


def _group_suggestion(node: Node, task: HomeTask, verdicts: list[EligibilityVerdict]) -> Suggestion | None:
    """The suggestion for a task that waits for its dependencies or its group, if a node has room for it."""
    room = next((verdict.node for verdict in verdicts if verdict.now), "")
    awaited = node.eligibility.dependencies.waits_for(task.terms) if task.phase is HomePhase.GATED else []
    if room and awaited:
        names = [name.partition(" (")[0] for name in awaited[:AWAITED_NAMED_MAX]]
        more = f" and {len(awaited) - len(names)} more" if len(awaited) > len(names) else ""
        return Suggestion(f"when {', '.join(names)}{more} {'has' if len(awaited) == 1 else 'have'} ended,", room)
    words = node.eligibility.opened_by(task)
    return Suggestion(f"after  {words} ", room) if room and words else None


def _another_directory(task: HomeTask, home: str) -> Suggestion | None:
    """The suggestion for a task whose directory is not here."""
    lacks = task.cannot_here.startswith("no directory ")
    return Suggestion("with -d DIR, or -d - for a fresh scratch directory,", home) if lacks else None


def _summary(verdicts: list[EligibilityVerdict], home: str) -> str:
    """One line on why a task waits: the reason of the nearest node that could run it. "" if a node has room."""
    if any(verdict.now for verdict in verdicts):
        return ""
    could = [verdict for verdict in verdicts if verdict.can_ever]
    if not could:
        shut_out = next((f": {verdict.node} {verdict.reason}" for verdict in verdicts if verdict.reason in GONE), "")
        return f"no node known can ever run it{shut_out}"
    nearest = min(could, key=lambda one: (one.now is not None, one.node != home, one.node))
    return f"{nearest.node}: {nearest.reason}"
