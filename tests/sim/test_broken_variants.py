"""The fault runs find out every rule that is left out within 200 seeds."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.model.errors import InvariantBroken
from tests.chaos import broken_core
from tests.sim import broken_variants
from tests.sim.test_faults import run

SEEDS_MAX = 200


@pytest.mark.parametrize(
    ("variant", "first"),
    [
        (broken_core.lease_from_receipt, 9),
        (broken_variants.renew_no_extend, 0),
        pytest.param(broken_variants.reboot_deadline, 0, marks=pytest.mark.long),
        (broken_variants.suspicion_requeues, 6),
        (broken_variants.nobody_freezes, 6),
        (broken_variants.floor_volatile, 6),
        (broken_variants.promise_not_kept, 0),
        (broken_variants.renewal_of_any_attempt, 6),
    ],
)
def test_a_rule_left_out_is_found_out(variant: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``first``: the seed that finds it out today; later ones are tried where a change of the core has moved it."""
    variant(monkeypatch)
    for seed in range(first, first + SEEDS_MAX):
        try:
            run(seed)
        except InvariantBroken:
            return
    pytest.fail(f"{variant.__name__} breaks nothing in {SEEDS_MAX} seeds")
