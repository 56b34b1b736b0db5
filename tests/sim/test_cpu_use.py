"""Load policies that measure: CPU utilization is played in the simulator, what is not is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from peerload.model.errors import ConfigError
from peerload.policy.preset import PolicySet
from peerload.policy.registry import build_preset
from peerload.sim.queueing_model import Arrival, CompletedTask, QueueingModel, profiles_of
from peerload.sim.utilization import readings_of
from tests.chaos.engine.engine import Simulation


def preset(load: str) -> PolicySet:
    tables: dict[str, Any] = {"load": {"policy": load}, "transfer": {"threshold": 1.0}}
    return build_preset("given", tables)


@pytest.mark.parametrize(
    ("load", "gpus", "reads"),
    [
        ("tasks", 0, set()),
        ("composite", 2, set()),
        ("cpu", 0, {"cpus_busy"}),
        ("gpu", 0, set()),
        ("gpu", 2, {"gpus_busy"}),
    ],
)
def test_what_a_load_policy_looks_at_is_found_out(load: str, gpus: int, reads: set[str]) -> None:
    assert readings_of(preset(load), gpus) == reads


def test_cpu_utilization_is_that_of_the_running_tasks_averaged_over_five_seconds() -> None:
    ended: list[CompletedTask] = []
    cluster = QueueingModel(preset("cpu"), profiles_of([2, 2]), seed=1, ended=ended.append)
    node = cluster.nodes["n1"]
    cluster.run(itertools.chain([Arrival(1.0, "n1", 60.0)]), tasks=1)
    cluster.advance(6.5)
    assert 0.55 < node.sharing.shown().cpus_busy < 0.7, "63 % of one core after 5 s"
    cluster.advance(60.0)
    told = node.sharing.shown()
    assert (told.cpus_busy, told.load) == pytest.approx((1.0, 0.5), abs=0.01)
    assert cluster.nodes["n2"].sharing.shown().cpus_busy == 0.0
    cluster.advance(120.0)
    assert len(ended) == 1
    assert node.sharing.shown().cpus_busy == 0.0
    cluster.drain()


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        QueueingModel(preset("gpu"), profiles_of([1], gpus=1), seed=1, ended=print)
    assert caught.value.key == "load.policy"
    with pytest.raises(ConfigError):
        Simulation(preset("cpu"), nodes=1, slots=1, seed=1)
