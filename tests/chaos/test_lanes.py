"""Short tasks on other nodes, given to their launchers ahead, under faults: two seeds, and at length two hundred."""

from __future__ import annotations

import pytest

from tests.chaos import lanes
from tests.chaos.campaign import total

SEEDS, A_PART = 200, 50
HAPPENS = (
    "events decided about together",
    "given ahead and back",
    "given ahead, of another home",
    "lease ended before the start, in a lane",
)
"""Gauges of what this is about: in every part it has to happen."""


@pytest.mark.parametrize("seed", [7, 18])  # leases that end in a lane; events that are decided about together
def test_no_promise_is_broken_about_what_waits_at_the_launchers_of_others(seed: int) -> None:
    outcome = lanes.run(seed)
    again = f"python -m tests.chaos.lanes --first {seed} --seeds 1 --trace"
    assert not outcome.broken, f"seed {seed}: {outcome.broken}; again: {again}; {outcome.story}"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1, SEEDS + 1, A_PART))
def test_two_hundred_seeds(first: int) -> None:
    outcomes = [lanes.run(seed) for seed in range(first, first + A_PART)]
    assert [f"seed {outcome.seed}: {outcome.broken}" for outcome in outcomes if outcome.broken] == []
    gauges = total(outcomes)
    assert [gauge for gauge in HAPPENS if not gauges[gauge]] == []
