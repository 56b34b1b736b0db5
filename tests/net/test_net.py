"""`make net-test` scenario by scenario; and its short form: one node behind address translation that works with one outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos_real.test_chaos_real import namespaces  # noqa: F401 -- a fixture
from tests.net.ground import Ground
from tests.net.scenarios import SCENARIOS, Scenario, crossed, share, there_and_back
from tests.support import wait_until


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("namespaces")
def test_a_node_that_can_only_dial_out_takes_part() -> None:
    with Ground({"wide": ["m1"], "west": ["w1"]}) as ground:
        ground.network.masquerade("west")
        ground.all_join("m1")
        share(ground, "m1", count=5)
        crossed(ground)
        there_and_back(ground, "m1", "w1")
        wait_until(
            lambda: ground.way("m1", "w1") == "theirs" and ground.way("w1", "m1") == "ours", 30.0, "both to know"
        )
        ground.await_agreement()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario, mosquitto: Path) -> None:
    told = scenario.play(mosquitto)
    assert told.across
    assert told.heal_s is not None
