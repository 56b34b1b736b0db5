"""The cluster under faults, in short: four seeds, replay, and every twelfth broken variant at a seed that finds it out
(test_long.py looks for all of them, from the first seed on)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from peerload.policy.registry import load_preset
from tests.chaos.campaign import PRESETS, run
from tests.chaos.cluster import Cluster
from tests.chaos.draw import draw
from tests.chaos.hunt import hunt
from tests.chaos.required import FAULTS, too_rare
from tests.chaos.variants import VARIANTS

SEEDS = 60
NEAR = 30
"""Seeds that are tried after the one that found a variant, since a change of the core may move it."""


@pytest.mark.parametrize("seed", [11, 21, 41, 7])  # 7: nodes are short of processes
def test_no_promise_is_broken(seed: int) -> None:
    outcome = run(seed)
    assert not outcome.broken, f"seed {seed}: {outcome.broken}; again: make chaos SEED={seed} TRACE=1; {outcome.story}"


@pytest.mark.long
@pytest.mark.sample
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


def test_each_node_has_policy_instances_of_its_own() -> None:
    machines = Cluster(draw(1, PRESETS), load_preset("adaptive")).machines.values()
    for machine in machines:
        machine.start_agent()
    assert len({id(machine.node.state.policies) for machine in machines if machine.node is not None}) == len(machines)


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


@pytest.mark.parametrize("name", list(VARIANTS)[::12])
def test_a_rule_left_out_is_found_out(name: str) -> None:
    hint = VARIANTS[name].hint
    _, broken = hunt(VARIANTS[name], range(hint, hint + NEAR), kept=range(1, SEEDS + 1))
    assert broken, f"{name} breaks nothing in seeds {hint} to {hint + NEAR - 1}; python -m tests.chaos.hunt {name}"
