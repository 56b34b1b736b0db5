"""Short tasks of one home on other nodes, whose launchers have lanes of them: `python -m tests.chaos.lanes --seeds 200`.

Durations are known after the first few, and are wrong now and then: then a lane waits behind a long task, for longer than its leases
last, unless it is given back. A seed draws the work and the faults.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING

from peerload.model.config import CoreConfig
from peerload.policy.registry import load_preset
from tests.chaos import plan
from tests.chaos.campaign import codec
from tests.chaos.cluster import Cluster, Outcome
from tests.chaos.engine.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.plan import Fault

HOME = "n1"
HEALED_S = 50.0
LEASES_S = (1.5, 2.0, 4.0)
GRACE_S, LOSS_BACKOFF_S = 1.6, 0.1
"""What a launcher that is stopped for up to a second needs, and a little; no clock drifts. What was lost is
placed anew at once: the sooner, the more would run twice at a time."""
AHEAD_S = 4.0
"""Expected work that waits in a lane: longer than the shorter leases last. The simulated launcher gives back what has waited for longer."""
LONG_SHARE, LONG_S = 0.4, (1.5, 8.0)
"""Share of the arrays with long tasks beside them, and how long these take."""
CUT_SHARE = 0.6
"""Share of the long tasks of other nodes after which these are cut off: the leases end of what waits behind."""
PREFETCH = (1, 4, 12)
"""Tasks that a node of the default preset asks for beyond its slots: what waits there goes to the launcher in lanes."""


def draw(seed: int) -> plan.Plan:
    """The plan of a seed."""
    rng = random.Random(f"{seed} lanes")
    lease_s = rng.choice(LEASES_S)
    others = [f"n{number}" for number in range(2, rng.randint(3, 5))]
    machines = [plan.Machine(HOME, 1, 1.0, 1000.0, rng.choice((0.001, 0.02)))]
    machines += [plan.Machine(name, rng.choice((1, 2)), 1.0, 2000.0, rng.choice((0.001, 0.02))) for name in others]
    jobs = _jobs(rng, others)
    faults = _faults(rng, lease_s, others, [job.at_s for job in jobs])
    for job in jobs:
        if job.node != HOME and rng.random() < CUT_SHARE:
            pairs = (HOME, job.node), (job.node, HOME)
            faults.append(plan.Cut(job.at_s + rng.uniform(0.5, 2.0), "partial", pairs, 4.0 * lease_s))
    return plan.Plan(
        seed=seed,
        preset="adaptive",
        lease_s=lease_s,
        grace_s=GRACE_S,
        healed_s=HEALED_S,
        attempts_max=1000,
        poison_nodes=1000,
        frozen_s_max=86_400.0,
        has_broker=False,
        codec=seed % 5 == 0,
        machines=tuple(machines),
        evils=plan.Evils(
            delay_s=rng.choice((0.001, 0.03, 0.1)),
            loss=rng.choice((0.0, 0.0, 0.05)),
            duplication=rng.choice((0.0, 0.1)),
            late=rng.choice((0.0, 0.02)),
            late_s=10.0,
        ),
        jobs=tuple(sorted(jobs, key=lambda job: job.at_s)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),  # type: ignore[arg-type]
    )


def _jobs(rng: random.Random, others: list[str]) -> list[plan.Job]:
    """Arrays of short tasks of the home whose own slot is taken, and some long tasks that look like them, also of the others: a lane
    behind one of these holds what has a lease behind what has none."""
    short_s = rng.choice((0.1, 0.3, 0.6))
    jobs = [plan.Job(0.5, HOME, HEALED_S, guarantee="once", only=HOME)]
    for _ in range(rng.randint(4, 8)):
        at_s = rng.uniform(2.0, HEALED_S * 0.8)
        jobs.append(plan.Job(at_s, HOME, short_s, members=rng.randint(12, 40)))
        if rng.random() < LONG_SHARE:
            jobs.append(plan.Job(at_s + rng.uniform(0.0, 0.3), HOME, rng.uniform(*LONG_S), members=rng.randint(2, 6)))
        if rng.random() < LONG_SHARE:
            jobs.append(plan.Job(at_s + rng.uniform(0.0, 2.0), rng.choice(others), rng.uniform(*LONG_S), members=2))
    return jobs


def _faults(rng: random.Random, lease_s: float, others: list[str], busy_s: list[float]) -> list[Fault]:
    """Faults, most while many tasks are on their way. Half of the seeds have all kinds, the others repeat one."""

    def down_s() -> float:
        return rng.choice((0.05, rng.uniform(0.1, 2.0), rng.uniform(0.5, 2.5) * lease_s))

    def other() -> str:
        return rng.choice((plan.HOST, rng.choice(others)))

    def anyone() -> str:
        return rng.choice((HOME, plan.HOST, rng.choice(others)))

    def cut(at_s: float) -> Fault:
        one = rng.choice(others)
        pairs = ((HOME, one), (one, HOME)) if rng.random() < 0.6 else rng.choice((((HOME, one),), ((one, HOME),)))
        return plan.Cut(at_s, "partial", pairs, rng.uniform(0.3, 4.0) * lease_s)

    said = ("Accept", "Commit", "Renew", "RenewOk", "Result", "ResultAck", "Return", "Died", "GiveReply", "Revoke")
    menu: list[Callable[[float], Fault]] = [
        cut,
        lambda at_s: plan.AgentCrash(at_s, anyone(), down_s()),
        lambda at_s: plan.LauncherCrash(at_s, other(), rng.uniform(0.05, 1.0), at_spawn=rng.random() < 0.5),
        lambda at_s: plan.LauncherPause(at_s, other(), rng.uniform(0.2, 1.0)),
        lambda at_s: plan.CutAtSend(at_s, rng.choice((HOME, *others)), rng.choice(said), down_s(), rng.random() < 0.5),
        lambda at_s: plan.CrashAtSend(
            at_s, rng.choice((HOME, *others)), rng.choice((*said, "SpawnTask")), rng.random() < 0.3, down_s()
        ),
        lambda at_s: plan.PoliteStop(at_s, HOME, down_s()),
        lambda at_s: plan.Drain(at_s, rng.choice(others), rng.uniform(0.5, 5.0)),
        lambda at_s: plan.Verb(at_s, rng.choice(("cancel", "hold", "prio", "release")), rng.randrange(1000)),
        lambda at_s: plan.MachineCrash(at_s, anyone(), down_s()),
        lambda at_s: plan.AgentPause(at_s, anyone(), down_s()),
        lambda at_s: plan.Suspend(at_s, other(), down_s(), polite=rng.random() < 0.5),
        lambda at_s: plan.DiskStall(at_s, anyone(), rng.uniform(0.1, 2.0 * lease_s)),
        lambda at_s: plan.BothCrash(at_s, plan.HOST, rng.random() < 0.3, down_s()),
        lambda at_s: plan.Shortage(at_s, rng.choice(others), rng.uniform(0.2, 4.0)),
        lambda at_s: plan.LinkReset(at_s, HOME, rng.choice(others)),
    ]
    if rng.random() < 0.5:
        menu = [rng.choice(menu)]
    return [rng.choice(menu)(rng.choice(busy_s) + rng.uniform(0.0, 4.0)) for _ in range(rng.randint(3, 14))]


def run(seed: int, write: Callable[[str], object] | None = None) -> Outcome:
    """One seed. ``write`` gets each line of its trace."""
    given = draw(seed)
    config = CoreConfig(
        lease_s=given.lease_s,
        lease_grace_s=given.grace_s,
        attempts_max=given.attempts_max,
        poison_nodes=given.poison_nodes,
        frozen_s_max=given.frozen_s_max,
        loss_backoff_s=LOSS_BACKOFF_S,
        ahead_s=AHEAD_S,
    )
    trace = Trace(write) if write is not None else None
    policies = load_preset(given.preset, changes=[("prefetch", PREFETCH[seed % len(PREFETCH)])])
    cluster = Cluster(given, policies, codec=codec, trace=trace, config=config)
    try:
        return cluster.run()
    except Exception as error:
        error.add_note(f"seed {seed}, at {cluster.now_s:.6f} s")
        raise


def main() -> int:
    reader = argparse.ArgumentParser(prog="python -m tests.chaos.lanes", description=__doc__)
    reader.add_argument("--seeds", type=int, default=200)
    reader.add_argument("--first", type=int, default=1)
    reader.add_argument("--trace", action="store_true", help="every event and action")
    flags = reader.parse_args()
    gauges: Counter[str] = Counter()
    broken = tasks = 0
    for seed in range(flags.first, flags.first + flags.seeds):
        outcome = run(seed, (lambda line: sys.stdout.write(f"{line}\n")) if flags.trace else None)
        gauges.update(outcome.gauges)
        tasks += outcome.tasks
        if outcome.broken:
            broken += 1
            sys.stdout.write(f"seed {seed}: {outcome.broken}; {outcome.story}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{flags.seeds} seeds, {tasks} tasks, {broken} violations\n")
    for name, count in sorted(gauges.items()):
        sys.stdout.write(f"  {count:8d}  {name}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
