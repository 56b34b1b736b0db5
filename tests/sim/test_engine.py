"""The simulator: equal seeds, closed forms, and what the presets promise of a burst."""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, get_args

import msgspec
import pytest

from peerload.model import actions
from peerload.model.messages import Envelope
from peerload.policy.api import Keep
from peerload.policy.registry import build_preset, load_preset
from peerload.sim.queueing_model import Arrival, CompletedTask, QueueingModel, profiles_of
from peerload.sim.scenario import Scenario
from peerload.wire.peer import decode, encode
from tests.chaos.engine.engine import Simulation, WorldOptions
from tests.chaos.engine.trace import Trace
from tests.workloads import burst, poisson

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.model.events import Event
    from peerload.policy.api import NodeView, Reply, TaskView

IDEAL_S = 120 * 0.2 / 6


def trace_hash(seed: int) -> str:
    simulation = Simulation(load_preset("symmetric"), nodes=3, slots=2, seed=seed, trace=Trace())
    return simulation.run(burst("n1", 60, 0.2)).trace_hash


def test_the_model_knows_each_kind_of_action() -> None:
    model = QueueingModel(load_preset("threshold"), profiles_of([1]), seed=1, ended=lambda _task: None)
    assert set(model._performers) == set(get_args(actions.Action))


def test_equal_seeds_give_equal_traces_and_others_differ() -> None:
    assert trace_hash(1) == trace_hash(1)
    assert trace_hash(1) != trace_hash(2)


def test_traces_do_not_depend_on_the_hash_seed() -> None:
    command = [sys.executable, "-m", "tests.chaos.engine", "--tasks", "60", "--seed", "3"]
    done = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False)
        for seed in ("0", "12345")
    ]
    assert [one.stderr for one in done] == ["", ""]
    assert done[0].stdout == done[1].stdout
    assert "tasks ended      60 of 60" in done[0].stdout


def test_the_codec_changes_nothing() -> None:
    def codec(envelope: Envelope) -> Envelope:
        return decode(encode(envelope))

    def run(codec_: Callable[[Envelope], Envelope] | None) -> str:
        simulation = Simulation(
            load_preset("symmetric"),
            nodes=3,
            slots=2,
            seed=5,
            trace=Trace(),
            world=WorldOptions(codec=codec_),
        )
        return simulation.run(burst("n1", 40, 0.2)).trace_hash

    assert run(codec) == run(None)


def test_symmetric_spreads_a_burst_and_a_sender_alone_cannot() -> None:
    makespans = {
        name: Simulation(load_preset(name), nodes=3, slots=2, seed=1).run(burst("n1", 120, 0.2)).makespan_s
        for name in ("symmetric", "threshold")
    }
    assert makespans["symmetric"] <= 1.15 * IDEAL_S
    assert makespans["threshold"] > 2.5 * IDEAL_S


def test_adaptive_spreads_a_burst() -> None:
    for seed in range(1, 4):
        report = Simulation(load_preset("adaptive"), nodes=3, slots=2, seed=seed).run(burst("n1", 120, 0.2))
        assert report.makespan_s <= 1.1 * IDEAL_S
        assert report.ended == 120


def test_with_adaptive_nobody_waits_beside_an_idle_node() -> None:
    """Five long tasks at one of three nodes with two slots each: all run at once, whoever is asked first."""
    for seed in range(1, 11):
        simulation = Simulation(load_preset("adaptive"), nodes=3, slots=2, seed=seed)
        assert simulation.run(burst("n1", 5, 3.0)).makespan_s < 3.1


def mmc_response(slots: int, load: float) -> float:
    """Mean response of M/M/c in mean service times (Erlang C)."""
    offered = slots * load
    below = sum(offered**k / math.factorial(k) for k in range(slots))
    last = offered**slots / math.factorial(slots) / (1 - load)
    return 1 + last / (below + last) / (slots * (1 - load))


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "probes"), [(1, 3), (2, 0)])
def test_without_probes_or_peers_every_node_is_m_m_c(nodes: int, probes: int) -> None:
    preset = build_preset(
        "t", {"transfer": {"threshold": 2.0}, "location": {"sender": {"policy": "threshold", "probes": probes}}}
    )
    means = []
    for seed in range(6):
        simulation = Simulation(preset, nodes=nodes, slots=2, seed=seed)
        arrivals = poisson(list(simulation.hosts), 0.7 * 2 * nodes, 1500, random.Random(seed))
        means.append(simulation.run(arrivals).mean_response_s)
    half_width = 2.571 * statistics.stdev(means) / math.sqrt(len(means))  # t of 5 degrees of freedom, 95 %
    assert abs(statistics.mean(means) - mmc_response(2, 0.7)) < max(2 * half_width, 0.15)


@pytest.mark.long
def test_sharing_helps_and_no_policy_beats_one_central_queue() -> None:
    means = {}
    for name in ("threshold", "symmetric"):
        simulation = Simulation(load_preset(name), nodes=5, slots=2, seed=2)
        means[name] = simulation.run(poisson(list(simulation.hosts), 8.0, 3000, random.Random(2))).mean_response_s
    for mean in means.values():
        assert 0.9 * mmc_response(10, 0.8) < mean < mmc_response(2, 0.8)


class _Counts:
    """A location policy that notes in itself which nodes have asked it."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Keep:
        del task, replies, rng
        self.nodes.add(view.node)
        assert len(self.nodes) == 1, "another node has used this instance"
        return Keep("counted")


def test_each_node_has_an_instance_of_a_policy_of_its_own() -> None:
    preset = msgspec.structs.replace(load_preset("threshold"), sender=_Counts())
    arrivals = (Arrival(number / 10, f"n{1 + number % 3}", 1.0) for number in range(30))
    report = Simulation(preset, nodes=3, slots=1, seed=1).run(arrivals)
    assert report.counts["sender_searches_total"] > 0
    assert report.counts.get("policy_errors_total", 0) == 0


def test_a_long_time_without_work_takes_no_steps() -> None:
    """Traces last months: what a simulation costs follows their tasks, not their seconds."""

    class Counted(QueueingModel):
        events = 0

        def _handle(self, name: str, event: Event) -> None:
            self.events += 1
            assert self.events < 1000
            super()._handle(name, event)

    setup = Scenario(policy="adaptive", nodes=3, tasks=1, warm_up=0, is_live=True).setup()
    ended: list[CompletedTask] = []
    model = Counted(
        setup.policies, profiles_of(setup.slots), seed=1, ended=ended.append, delays=setup.delays, config=setup.config
    )
    model.run(iter([Arrival(0.0, "n1", 1.0), Arrival(1e5, "n1", 1e5), Arrival(3e5, "n2", 1.0)]), tasks=3)
    assert [(task.number, task.ended_s) for task in ended[:2]] == [(1, 1.0), (2, 2e5)]
