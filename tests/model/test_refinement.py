"""Simulated runs do nothing that the model rules out."""

from __future__ import annotations

from collections import Counter

import pytest

from peerload.policy.registry import load_preset
from tests.chaos.campaign import PRESETS, codec
from tests.chaos.cluster import Cluster
from tests.chaos.draw import draw
from tests.model.refinement import TooMany, explained
from tests.model.watching import Watching

SHORT_SEEDS = 3
LONG_SEEDS = 100
FOLLOWED_MIN = 0.5
"""Of the tasks that were offered to anybody, so many are followed to the end; the others have too many states."""
SEEN_MAX = 40
NODES_MAX = 3
ATTEMPTS_MAX = 5


def refine(seed: int) -> Counter[str]:
    """Follow every task of this run → how many were, and were not."""
    plan = draw(seed, PRESETS, nodes_min=3, nodes_max=5, minutes=2.0)
    cluster = Cluster(plan, load_preset(plan.preset), codec=codec)
    watching = Watching.of(cluster)
    outcome = cluster.run()
    assert not outcome.broken, f"seed {seed}: {outcome.broken}"
    told: Counter[str] = Counter()
    for uid, (model, seen, lines) in watching.tasks().items():
        if len(seen) > SEEN_MAX or model.nodes > NODES_MAX or model.attempts > ATTEMPTS_MAX:
            told["too long"] += 1
            continue
        try:
            count = explained(model, seen)
        except TooMany:
            told["too many states"] += 1
            continue
        story = "\n".join(f"  {number} {line}" for number, line in enumerate(lines))
        assert count == len(seen), f"seed {seed}, task {uid}: not explained: {seen[count]} (number {count})\n{story}"
        told["followed"] += 1
    return told


def followed(seeds: range) -> None:
    told: Counter[str] = Counter()
    for seed in seeds:
        told.update(refine(seed))
    assert told["followed"] >= FOLLOWED_MIN * told.total(), told


def test_runs_refine_the_model() -> None:
    followed(range(1, SHORT_SEEDS + 1))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_runs_refine_the_model() -> None:
    followed(range(1, LONG_SEEDS + 1))
