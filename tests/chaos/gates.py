"""Which tasks of a run wait for others, have a group, or are tried again when they fail, and what users do with groups meanwhile.
Drawn apart from all else of a plan, so that a seed has the same faults with them and without. And who waits in vain then."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from peerload.model.task import NO_TERMS, TaskState
from tests.chaos.plan import GroupSet, Verb

if TYPE_CHECKING:
    from peerload.model.task import SubmitOptions, TaskRecord
    from tests.chaos.machine import Machine
    from tests.chaos.plan import Job, Plan

EVERY, FIRST = 4, 1
"""One seed in so many has such tasks, …"""
WAITS, GROUPED, TRIED = 0.4, 0.5, 0.4
"""… and of its tasks these shares wait for others, have a group, are tried again when they fail."""
NEAR = 12
"""A task waits for one of those submitted before it, at most so many of them back."""
GROUPS = ("a", "b")
STUCK = (TaskState.HELD, TaskState.UNKNOWN)
"""States in which a task may stay for ever without a bug."""


def gated(plan: Plan) -> Plan:
    """A plan to which some seeds add tasks with dependencies, groups and retries."""
    if plan.seed % EVERY != FIRST:
        return plan
    rng = random.Random(f"{plan.seed} gates")
    jobs = tuple(_job(rng, number, job) for number, job in enumerate(plan.jobs))
    names = [machine.name for machine in plan.machines]
    faults = [GroupSet(0.3, name, group, rng.choice([0, 1, 1, 2])) for name in names for group in GROUPS]
    for _ in range(rng.randint(2, 12)):
        at_s, name, group = rng.uniform(5.0, plan.healed_s * 0.9), rng.choice(names), rng.choice(GROUPS)
        if rng.random() < 0.5:
            faults += [GroupSet(at_s, name, group, -1, paused=1)]
            faults += [GroupSet(at_s + rng.uniform(1.0, 60.0), name, group, -1, paused=0)]
        else:
            faults.append(GroupSet(at_s, name, group, rng.choice([0, 1, 2, 3])))
    verbs = [Verb(rng.uniform(5.0, plan.healed_s * 0.9), "prio", rng.randrange(1000)) for _ in range(rng.randint(0, 8))]
    everything = sorted([*plan.faults, *faults, *verbs], key=lambda fault: fault.at_s)
    return msgspec.structs.replace(plan, jobs=jobs, faults=tuple(everything))


def _job(rng: random.Random, number: int, job: Job) -> Job:
    waits, grouped, tried = rng.random() < WAITS, rng.random() < GROUPED, rng.random() < TRIED
    changes: dict[str, object] = {}
    if waits and number:
        others = tuple({rng.randint(max(number - NEAR, 0), number - 1): None for _ in range(rng.choice([1, 1, 2]))})
        changes[rng.choice(["after", "after_ok"])] = others
    if grouped:
        changes["group"] = rng.choice(GROUPS)
    if tried and job.guarantee != "once":
        changes["retries"] = rng.choice([1, 2, 3])
    return msgspec.structs.replace(job, **changes)


def terms_of(machine: Machine, task: str) -> SubmitOptions:
    """On what terms a task of this home was submitted, as its disk has it."""
    kept = machine.disk.submissions.get(int(task.partition("/")[2].partition(".")[0]))
    return kept.terms if kept is not None else NO_TERMS


def records_of(machine: Machine, name: str) -> list[TaskRecord]:
    """The durable records of a task or an array."""
    return [record for task, record in machine.disk.tasks.items() if name in (task, task.rpartition(".")[0])]


def waits_in_vain(machines: dict[str, Machine], home: str, record: TaskRecord) -> bool:
    """True if a queued task waits for one that may never end, or such tasks have all slots of its group."""
    terms, machine = terms_of(machines[home], record.task), machines[home]
    settings = machine.disk.groups.get(terms.group)
    if settings is not None and settings.slots:
        stuck = [
            other
            for other in machine.disk.tasks.values()
            if other.state is TaskState.UNKNOWN and terms_of(machine, other.task).group == terms.group
        ]
        if len(stuck) >= settings.slots:
            return True
    for name in () if record.is_freed else (*terms.after, *terms.after_ok):
        other = machines[name.partition("/")[0]]
        for awaited in records_of(other, name):
            if awaited.state in STUCK:
                return True
            if awaited.state is TaskState.QUEUED and waits_in_vain(machines, other.name, awaited):
                return True
    return False
