"""`peerload why`: what a client is told of why a task waits, or why it went where it went. It only looks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from peerload.agent import answers
from peerload.core.admission import needs_text
from peerload.core.change import smallest_change
from peerload.core.reasons import Reasons, holds_words
from peerload.core.work import HomePhase
from peerload.model.errors import NoSuchTask
from peerload.model.task import how_it_ended

if TYPE_CHECKING:
    from peerload.agent.naming import Names
    from peerload.agent.parts import Parts
    from peerload.agent.pending import Decisions
    from peerload.core.reasons import Verdict
    from peerload.core.work import HomeTask
    from peerload.model.task import TaskRecord, TaskSpec

MEMBERS_MAX = 10_000
"""Members of an array that are looked at; all of them may be a million."""
GROUPS_MAX = 8
"""Different states with their reasons that are told of an array."""
STEPS_MAX = 8
"""The last so many changes of a task that are told."""
WAITS = (HomePhase.WAITING, HomePhase.OFFERED, HomePhase.RESTING)


def waits(task: HomeTask | None) -> bool:
    """Whether it waits for room: at home, or in the queue of another node."""
    if task is None:
        return False
    return task.phase in WAITS or (task.phase is HomePhase.AWAY and not task.running_at)


class Why:
    """One per agent."""

    def __init__(self, parts: Parts, names: Names, decisions: Decisions) -> None:
        self._parts = parts
        self._names = names
        self._decisions = decisions

    async def about(self, ref: str) -> dict[str, object]:
        """About one task, or an array. Raises NoSuchTask, and BadRequest for what is no id."""
        counter, _ = self._names.resolve(ref)
        records: list[TaskRecord] = []
        async for page in self._names.pages(ref):
            records += page
            if len(records) >= MEMBERS_MAX:
                break
        if not records:
            raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
        spec = self._parts.store.spec(counter)
        return self._array(records, spec) if len(records) > 1 else self._task(records[0], spec)

    def _task(self, record: TaskRecord, spec: TaskSpec) -> dict[str, object]:
        task = self._parts.node.home.tasks.get(record.uid)
        told = self._about(record, spec)
        if task is not None and task.phase is HomePhase.COLLECTING:
            told["says"] = holds_words(task)
        return told | self._waiting(task) if task is not None and waits(task) else told

    def _array(self, records: list[TaskRecord], spec: TaskSpec) -> dict[str, object]:
        """How many members are in which state and why, and all that is told of one about the next to start."""
        home = self._parts.node.home
        groups: Counter[tuple[str, str]] = Counter()
        for record in records:
            task = home.tasks.get(record.uid)
            is_queued = task is not None and task.phase in WAITS
            state = "running" if task is not None and task.running_at else record.state.value
            reason = answers.why_waiting(task, record) if is_queued else record.reason
            groups[state, reason] += 1
        name = records[0].task.rpartition(".")[0]
        unfinished = home.arrays.get(name, {}).values()
        next_one = next((task for task in unfinished if waits(task)), None)
        told = self._about(records[0] if next_one is None else next_one.record, spec)
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

    def _about(self, record: TaskRecord, spec: TaskSpec) -> dict[str, object]:
        """What is told of every task, whatever has become of it."""
        shown = answers.task_here(self._parts.node, record, spec, "")
        history = self._parts.store.history(record.task)
        return {
            "id": record.task,
            "name": shown["name"],
            "state": shown["state"],
            "node": shown["node"],
            "needs": needs_text(spec.request, spec.placement),
            "says": _says(record),
            "since": history[-1].at if history else record.submitted_at,
            "steps": [answers.step(event) for event in history[-STEPS_MAX:]],
            "devices": shown["device_names"],
            "decision": self._decisions.about(record.task),
            "nodes": [],
            "could_ever": None,
            "freshest_s": None,
            "oldest_s": None,
            "oldest_node": None,
            "change": None,
            "summary": "",
            "array": None,
        }

    def _waiting(self, task: HomeTask) -> dict[str, object]:
        """Why it does not start: a reason for every node."""
        node, now_s = self._parts.node, self._parts.now().boot_s
        reasons = Reasons(node, task, now_s)
        verdicts = list(reasons.verdicts())
        ages = {verdict.node: verdict.age_s for verdict in verdicts if verdict.age_s is not None}
        oldest = max(ages, key=lambda name: ages[name], default=None)
        change = None
        if not any(verdict.now for verdict in verdicts):
            change = smallest_change(node, reasons, task.spec)
        return {
            "says": holds_words(task),
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
            "summary": _summary(verdicts, node.state.node),
        }


def _says(record: TaskRecord) -> str:
    """Of a task that does not wait for room: how it stands, in words."""
    if record.state.is_final and record.exit is not None:
        return how_it_ended(record.exit)
    return record.reason


def _summary(verdicts: list[Verdict], home: str) -> str:
    """In one line why it waits: what keeps it from the node that could run it soonest. "" where one has room."""
    if any(verdict.now for verdict in verdicts):
        return ""
    could = [verdict for verdict in verdicts if verdict.can_ever]
    if not could:
        return "no node known can ever run it"
    nearest = min(could, key=lambda one: (one.now is not None, one.node != home, one.node))
    return f"{nearest.node}: {nearest.reason}"
