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
    "variant",
    [
        broken_core.lease_from_receipt,
        broken_variants.renew_no_extend,
        pytest.param(broken_variants.reboot_deadline, marks=pytest.mark.long),
        broken_variants.suspicion_requeues,
        broken_variants.nobody_freezes,
        broken_variants.floor_volatile,
        broken_variants.promise_not_kept,
        broken_variants.renewal_of_any_attempt,
    ],
)
def test_a_rule_left_out_is_found_out(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variant(monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            run(seed)
        except InvariantBroken:
            return
    pytest.fail(f"{variant.__name__} breaks nothing in {SEEDS_MAX} seeds")
