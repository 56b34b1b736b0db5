"""The cluster under faults, at length: 500 seeds, in which every fault of the menu has to happen."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import Options, run_all, total
from tests.chaos.required import SEEDS, too_rare


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_five_hundred_seeds() -> None:
    outcomes = list(run_all(range(1, SEEDS + 1), Options(), jobs=2))
    broken = [f"seed {outcome.seed}: {outcome.broken}" for outcome in outcomes if outcome.broken]
    assert not broken, "\n".join(broken)
    assert too_rare(total(outcomes), 1) == []  # everything on the menu happened; `make chaos` says what is rare
