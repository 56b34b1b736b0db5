"""The cluster under faults, at length: 500 seeds, in each hundred of which every fault of the menu has to happen, and every
broken variant from the first seed on."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import Options, run_all, total
from tests.chaos.hunt import SEEDS_MAX, hunt
from tests.chaos.required import SEEDS, too_rare
from tests.chaos.variants import VARIANTS

A_PART = 100


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("first", range(1, SEEDS + 1, A_PART))
def test_five_hundred_seeds(first: int) -> None:
    # One job: the other long tests have the other cores.
    outcomes = list(run_all(range(first, first + A_PART), Options(), jobs=1))
    broken = [f"seed {outcome.seed}: {outcome.broken}" for outcome in outcomes if outcome.broken]
    assert not broken, "\n".join(broken)
    # Each event happens at all. `make chaos SEEDS=500` says how often: in a hundred seeds chance decides.
    assert too_rare(total(outcomes), seeds=1) == []


@pytest.mark.long
@pytest.mark.sample
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1, 41, 10))
def test_forty_seeds(first: int) -> None:
    outcomes = run_all(range(first, first + 10), Options(), jobs=1)
    assert [f"seed {outcome.seed}: {outcome.broken}" for outcome in outcomes if outcome.broken] == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_rule_left_out_is_found_out(name: str) -> None:
    _, broken = hunt(VARIANTS[name], range(1, SEEDS_MAX + 1))
    assert broken
