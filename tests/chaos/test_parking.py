"""R12, scene by scene: each holds, and each would not without the one rule that it stands against."""

from __future__ import annotations

import pytest

from tests.chaos.scenes import FOUND_IN, PARKING, play
from tests.chaos.variants import VARIANTS


@pytest.mark.parametrize("name", PARKING)
@pytest.mark.parametrize("checks_boots", [True, False])
def test_a_home_may_go_away(name: str, checks_boots: bool) -> None:
    assert play(PARKING[name], checks_boots=checks_boots).broken == ""


@pytest.mark.parametrize("name", FOUND_IN)
def test_no_rule_of_parking_may_be_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    VARIANTS[name].apply(monkeypatch)
    outcome = play(PARKING[FOUND_IN[name]], checks_boots=VARIANTS[name].checks_boots)
    assert outcome.broken.startswith("I2")


def test_a_parked_task_is_not_frozen_while_its_home_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    gauges = play(PARKING["away"]).gauges
    assert gauges["parked"] == 1
    assert "frozen at the end of a lease" not in gauges
    VARIANTS["park-strict"].apply(monkeypatch)  # a PARK as new as the last answer is ignored: the lid never works
    gauges = play(PARKING["away"]).gauges
    assert "parked" not in gauges
    assert gauges["frozen at the end of a lease"] == 1
