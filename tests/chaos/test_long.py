"""The cluster under faults, at length: 500 seeds, in which every fault of the menu has to happen, and every broken variant
from the first seed on."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import Options, run_all, total
from tests.chaos.hunt import SEEDS_MAX, hunt_all
from tests.chaos.required import SEEDS, too_rare
from tests.chaos.variants import VARIANTS


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_five_hundred_seeds() -> None:
    outcomes = list(run_all(range(1, SEEDS + 1), Options(), jobs=2))
    broken = [f"seed {outcome.seed}: {outcome.broken}" for outcome in outcomes if outcome.broken]
    assert not broken, "\n".join(broken)
    assert too_rare(total(outcomes), SEEDS) == []


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_every_rule_left_out_is_found_out() -> None:
    found = hunt_all(VARIANTS, range(1, SEEDS_MAX + 1), jobs=2)
    assert [name for name, _, broken, _ in found if not broken] == []
