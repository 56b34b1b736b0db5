"""Five real agents and the simulator are given the same workload: the same response times and transfers come out.

The full form holds the project's own bounds, 10 % of the mean response and 20 % of the transfers a task. The short one
has a tenth of the tasks and one preset, so it allows besides what two simulated runs differ by chance alone.
"""

from __future__ import annotations

import random
import statistics
import sys

import pytest

from peerload.policy import registry
from tests.fidelity.live import Job, Outcome, play
from tests.fidelity.simulated import Simulated, simulate
from tests.integration.broker_fixtures import need_broker

NODES = 5
LOAD = 0.75
PRESETS = [name for name in ("threshold", "pairing", "adaptive") if name in registry.presets()]
RESPONSE_SHARE_MAX = 0.10
TRANSFERS_SHARE_MAX = 0.20
CHANCE_MAX = 3.0
"""Standard deviations of one run that chance may account for, in the short form."""
SLACK_S = 0.05
"""A task may be so much earlier or later than in any simulated run: a machine has more to do than to keep time."""
WITHIN_MIN = 0.9
"""Share of tasks that end no earlier and no later than in some simulated run."""


def workload(tasks: int, mean_s: float, seed: int) -> list[Job]:
    """Poisson arrivals, spread evenly, of tasks of exponential length."""
    rng = random.Random(seed)
    at_s = 0.2
    jobs = []
    for _ in range(tasks):
        at_s += rng.expovariate(NODES * LOAD / mean_s)
        jobs.append(Job(at_s, f"n{rng.randint(1, NODES)}", rng.expovariate(1.0 / mean_s)))
    return jobs


def compared(policy: str, live: Outcome, simulated: Simulated) -> tuple[float, float, float]:
    """How far apart they are, as shares of the simulator's: mean response, transfers; and which share of tasks took
    as long as in some simulated run. Printed, for the report of a failure and for `-s`."""
    response_s, transfers = statistics.fmean(simulated.mean_response_s), statistics.fmean(simulated.transfers)
    within = statistics.fmean(
        min(responses) - SLACK_S <= ran.response_s <= max(responses) + SLACK_S
        for ran, responses in zip(live.ran, simulated.responses_s, strict=True)
    )
    apart = live.mean_response_s / response_s - 1.0, live.transfers / transfers - 1.0
    sys.stdout.write(
        f"\n{policy}: {len(live.ran)} tasks; mean response {live.mean_response_s:.4f} s live, {response_s:.4f} s simulated "
        f"({apart[0]:+.1%}, chance {simulated.spread(simulated.mean_response_s):.1%}); transfers a task "
        f"{live.transfers:.3f} live, {transfers:.3f} simulated ({apart[1]:+.1%}, chance "
        f"{simulated.spread(simulated.transfers):.1%}); {within:.1%} of tasks within the simulated range; {live.delays}\n"
    )
    return abs(apart[0]), abs(apart[1]), within


def agree(policy: str, jobs: list[Job], chance: float) -> tuple[bool, str]:
    """Whether they do, with so many standard deviations left to chance, and how far apart they are."""
    live = play(policy, NODES, jobs)
    simulated = simulate(policy, NODES, live)
    response, transfers, within = compared(policy, live, simulated)
    response_max = RESPONSE_SHARE_MAX + chance * simulated.spread(simulated.mean_response_s)
    transfers_max = TRANSFERS_SHARE_MAX + chance * simulated.spread(simulated.transfers)
    is_so = response <= response_max and transfers <= transfers_max and within >= WITHIN_MIN
    found = (
        f"mean response {response:.1%} apart (at most {response_max:.1%}), transfers {transfers:.1%} apart "
        f"(at most {transfers_max:.1%}), {within:.1%} of tasks within the simulated range (at least {WITHIN_MIN:.0%})"
    )
    return is_so, found


def assert_they_agree(policy: str, jobs: list[Job], chance: float) -> None:
    is_so, found = agree(policy, jobs, chance)
    assert is_so, f"{policy}: {found}"


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", PRESETS[-1:])
def test_the_simulator_and_real_agents_agree_in_short(policy: str) -> None:
    need_broker("mosquitto")
    assert_they_agree(policy, workload(150, 0.2, seed=1), CHANCE_MAX)


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", PRESETS)
def test_the_simulator_and_real_agents_agree(policy: str) -> None:
    need_broker("mosquitto")
    assert_they_agree(policy, workload(1800, 0.5, seed=2), 0.0)
