"""Plans made by hand: one task, one course of events, nothing drawn."""

from __future__ import annotations

from peerload.policy.registry import load_preset
from tests.chaos import plan
from tests.chaos.cluster import Cluster, Outcome

LEASE_S, GRACE_S = 8.0, 2.0


def scene(*faults: plan.Fault, service_s: float = 60.0, exclude: str = "n1", healed_s: float = 200.0) -> plan.Plan:
    """Three nodes with a slot each; the one task of n1 cannot run there."""
    machines = tuple(plan.Machine(f"n{number}", 1, 1.0, 1000.0 * number, 0.001) for number in (1, 2, 3))
    return plan.Plan(
        seed=1,
        preset="threshold",
        lease_s=LEASE_S,
        grace_s=GRACE_S,
        healed_s=healed_s,
        attempts_max=1000,
        poison_nodes=1000,
        frozen_s_max=86_400.0,
        has_broker=False,
        codec=False,
        machines=machines,
        evils=plan.Evils(delay_s=0.001),
        jobs=(plan.Job(5.0, "n1", service_s, exclude=exclude),),
        faults=faults,  # type: ignore[arg-type]
    )


def play(given: plan.Plan, *, checks_boots: bool = True) -> Outcome:
    """The run of it."""
    return Cluster(given, load_preset(given.preset), checks_boots=checks_boots).run()


PARKING = {
    "away": scene(plan.PoliteStop(20.0, "n1", 30.0)),
    "cut off when back": scene(plan.PoliteStop(20.0, "n1", 2.0, cut_s=40.0)),
    "PARK comes late": scene(plan.PoliteStop(20.0, "n1", 2.0, cut_s=40.0, cut_after_s=6.0, park_late_s=9.0)),
    "PARK comes late, cut off when back": scene(plan.PoliteStop(20.0, "n1", 2.0, cut_s=40.0, park_late_s=9.0)),
    "PARK comes late, after a restart": scene(
        plan.PoliteStop(20.0, "n1", 2.0, cut_s=40.0, cut_after_s=1.5, crash_after_s=4.0, park_late_s=9.0)
    ),
    "power lost before PARKED": scene(
        plan.CrashAtCommit(10.0, "PARKED", after=False, machine=True, down_s=1.0, cut_s=40.0),
        plan.PoliteStop(20.0, "n1", 2.0),
    ),
}
"""A home that goes away politely while n2 runs its task, and what may happen around its return."""
FOUND_IN = {
    "park-not-durable": "power lost before PARKED",
    "park-no-confirm": "cut off when back",
    "park-late": "PARK comes late",
    "park-flag": "PARK comes late, cut off when back",
    "park-ts-volatile": "PARK comes late, after a restart",
}
"""Which rule of parking each course of events stands against."""
