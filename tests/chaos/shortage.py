"""Which tasks of a run need more GPU memory than they ask for, and when nodes are short of processes. Drawn apart from all else
of a plan, so that a seed has the same other faults with them and without."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from tests.chaos.plan import Shortage

if TYPE_CHECKING:
    from tests.chaos.plan import Plan

EVERY = 10
"""One seed in so many has such tasks, …"""
SHARE = 0.5
"""… and of its tasks this share."""
GPU_GIB = (0.5, 1.4, 2.0, 3.0, 99.0)
"""Memory that tasks need; they ask for 1, then for half as much again each time: enough, after one, two or three times, never."""
LATE, TWICE = (0.0, 0.2, 0.4), (0.0, 0.2, 0.4)
"""The least share of words that come late, and twice."""


PROCESSES_EVERY, PROCESSES_FIRST = 10, 7
"""One seed in so many has nodes that are short of processes, …"""
SHORTAGES = (2, 12)
"""… so often, …"""
SHORT_S = (0.5, 90.0)
"""… and for so long."""


def short_of_processes(plan: Plan) -> Plan:
    """A plan to which some seeds add nodes that can start nothing for a while."""
    if plan.seed % PROCESSES_EVERY != PROCESSES_FIRST:
        return plan
    rng = random.Random(f"{plan.seed} processes")
    names = [machine.name for machine in plan.machines]
    faults = [
        Shortage(rng.uniform(2.0, plan.healed_s * 0.9), rng.choice(names), rng.uniform(*SHORT_S))
        for _ in range(rng.randint(*SHORTAGES))
    ]
    everything = sorted([*plan.faults, *faults], key=lambda fault: fault.at_s)
    return msgspec.structs.replace(plan, faults=tuple(everything))


def short_of_memory(plan: Plan) -> Plan:
    """A plan to which some seeds add tasks that run out of memory; words come twice and late there, since that is what the rules about them
    stand against."""
    if plan.seed % EVERY:
        return plan
    rng = random.Random(f"{plan.seed} memory")
    jobs = tuple(
        msgspec.structs.replace(job, gpu_gib=rng.choice(GPU_GIB)) if rng.random() < SHARE else job for job in plan.jobs
    )
    evils, late, twice = plan.evils, rng.choice(LATE), rng.choice(TWICE)
    evils = msgspec.structs.replace(evils, late=max(evils.late, late), duplication=max(evils.duplication, twice))
    return msgspec.structs.replace(plan, jobs=jobs, evils=evils)
