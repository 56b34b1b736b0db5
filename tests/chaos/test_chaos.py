"""The cluster under faults, in short: 60 seeds, replay, and the broken variants that are found out at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from peerload.sim.chaos.draw import draw
from tests.chaos.campaign import PRESETS, run
from tests.chaos.hunt import hunt
from tests.chaos.required import FAULTS, too_rare
from tests.chaos.variants import VARIANTS

SEEDS = 60
QUICKLY_FOUND = (
    "ack-submit-early",
    "two-phase",
    "no-adopt",
    "exec-before-start",
    "floor-volatile",
    "ack-result-early",
    "return-queued",
    "n-not-burnt",
)
"""Broken variants that one of the first seeds finds out; all of them: `python -m tests.chaos.hunt`."""


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_no_promise_is_broken(seed: int) -> None:
    outcome = run(seed)
    assert not outcome.broken, f"seed {seed}: {outcome.broken}; again: make chaos SEED={seed} TRACE=1; {outcome.story}"


@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_is_a_run_whatever_the_hash_seed(seed: int) -> None:
    command = [sys.executable, "-m", "tests.chaos.run", "--seed", str(seed), "--minutes", "2", "--hash"]
    shown = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        ).stdout
        for hash_seed in ("0", "12345")
    ]
    assert shown[0] == shown[1]
    assert len(shown[0].split()[-1]) == 64


def test_every_fault_is_on_the_menu() -> None:
    plans = [draw(seed, PRESETS) for seed in range(200)]
    kinds = Counter(type(fault).__name__ for plan in plans for fault in plan.faults)
    assert {kind.split()[0].rstrip(",") for kind in FAULTS} - {"Forget"} <= set(kinds)
    assert {len(plan.machines) for plan in plans} == {3, 4, 5, 6, 7}
    assert draw(7, PRESETS) == plans[7]
    assert plans[7] != plans[8]


def test_rare_faults_are_named() -> None:
    lines = too_rare(Counter({"D1 crashed before": 100}), 500)
    assert "D1 crashed after: 0, at least 100 are wanted" in lines
    assert not any(line.startswith("D1 crashed before") for line in lines)


@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_a_rule_left_out_is_found_out(name: str) -> None:
    seed, broken = hunt(VARIANTS[name], range(1, 1 + SEEDS // 4))
    assert broken, f"{name} breaks nothing in {SEEDS // 4} seeds"
    assert seed
