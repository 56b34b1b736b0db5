"""Power curves, envelope, plan and price as pure functions."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from peerload.energy.plan import (
    Candidate,
    _costs,
    _exact,
    _total,
    envelope,
    plan,
)
from peerload.energy.price import cheapest_start, integral
from peerload.model.resources import PowerCurve, Quality, estimated_curve

S_SHAPED = PowerCurve((10.0, 40.0, 50.0, 60.0, 90.0), 4, 4, off_w=2.0, may_sleep=True)


def test_the_envelope_begins_where_nothing_runs_and_is_convex() -> None:
    begins, slopes = envelope(S_SHAPED, 4)
    assert (begins, slopes) == ((0.0, 3.0), (58 / 3, 30.0))
    awake = msgspec.structs.replace(S_SHAPED, may_sleep=False)
    assert envelope(awake, 4) == ((0.0, 3.0), (50 / 3, 30.0))


def test_a_plan_is_the_cheapest_of_all_distributions() -> None:
    curves = (S_SHAPED, PowerCurve((5.0, 9.0, 20.0), 3, 3), PowerCurve((30.0, 31.0), 5, 5, off_w=1.0, may_sleep=True))
    candidates = [Candidate(f"n{number}", curve, 0.0, curve.cores, curve.cores) for number, curve in enumerate(curves)]
    for tasks in range(1, 13):
        found = plan(candidates, tasks, 0.0, 1.0)
        every = itertools.product(*(range(curve.cores + 1) for curve in curves))
        watts = {
            counts: sum(curve.settled_watts(count) for curve, count in zip(curves, counts, strict=True))
            for counts in every
            if sum(counts) == tasks
        }
        assert watts[tuple(found)] == pytest.approx(min(watts.values()))


@pytest.mark.parametrize("nodes", [7, 16])
def test_a_plan_for_more_nodes_is_as_cheap_as_the_exact_one(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.energy.plan.EXACT_STEPS_MAX", 0)
    for seed in range(4):
        dice, candidates = random.Random(seed), []
        for number in range(nodes):
            cores = dice.choice([8, 24, 48, 64])
            peak_w = cores * dice.uniform(3, 12)
            watts = (peak_w * 0.3, *sorted(dice.uniform(peak_w * 0.3, peak_w) for _ in range(9)), peak_w)
            curve = PowerCurve(watts, cores, cores, off_w=5.0, may_sleep=seed % 2 > 0)
            candidates.append(Candidate(f"n{number}", curve, 0.0, cores, cores))
        tasks = sum(one.room for one in candidates) * dice.choice([2, 3]) // 4
        costs = [_costs(one, 0.0, 1.0) for one in candidates]
        found, exact = plan(candidates, tasks, 0.0, 1.0), _exact(candidates, tasks, costs)
        assert sum(found) == tasks
        assert _total(costs, found) == pytest.approx(_total(costs, exact), rel=1e-3)


def test_a_large_plan_places_all_tasks_within_the_room() -> None:
    curve = estimated_curve(64)
    candidates = [Candidate(f"n{number}", curve, number % 5, 64 - number % 5, 64) for number in range(300)]
    counts = plan(candidates, 5000, 60.0, 1.0)
    assert sum(counts) == 5000
    assert all(0 <= count <= one.room for one, count in zip(candidates, counts, strict=True))


@pytest.mark.parametrize("watts", [(2.0, 1.0), (1.0,), (float("nan"), 1.0)])
def test_a_curve_that_falls_or_has_one_point_is_refused(watts: tuple[float, ...]) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError)):
        msgspec.convert({"watts": watts, "cores": 1, "threads": 1}, PowerCurve)


def test_the_quality_of_a_sum_is_that_of_its_worst_part() -> None:
    assert Quality.worst((Quality.MEASURED, Quality.ESTIMATED, Quality.DERIVED)) is Quality.ESTIMATED
    assert Quality.worst(()) is Quality.ESTIMATED


def test_the_cheapest_start_is_no_worse_than_any_other() -> None:
    price = ((0.0, 5.0), (10.0, 1.0), (25.0, 7.0), (40.0, 0.5))
    for duration_s, latest_s in itertools.product((1.0, 12.0, 30.0), (0.0, 15.0, 100.0)):
        found = cheapest_start(price, 0.0, latest_s, duration_s)
        tried = [integral(price, at_s, at_s + duration_s) for at_s in range(int(latest_s) + 1)]
        assert integral(price, found, found + duration_s) <= min(tried) + 1e-9
