"""The simulator against queueing theory: closed forms, invariants that need no table, and reference cases.

Where service times are deterministic many invariants hold path by path, so that no interval is needed: who runs a task
then changes nothing but whose it is. The statistical ones run few tasks and allow for much; `make theory` runs many.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import msgspec
import pytest

from peerload.model.config import CoreConfig
from peerload.sim.outcome import mmc_response, student_t
from peerload.sim.queueing_model import IDEAL_CONFIG, Arrival, CompletedTask, QueueingModel, profiles_of
from peerload.sim.replication import Replication, Sample, quantile
from tests.chaos.engine.engine import Simulation, WorldOptions
from tests.chaos.engine.network import NetworkOptions
from tests.theory import made
from tests.theory.control_variates import controlled
from tests.theory.mapping import NotYet, Parameters, service_of, setup_of
from tests.theory.replicate import ALONE, alone, mmc_beyond, replicate
from tests.theory.run import _with_looks, combine, service_names

CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))["cases"]
FEW_NODES = [pytest.param(case, id=case["id"]) for case in CASES if case["params"]["N"] <= 20]

pytestmark = pytest.mark.sample

BOTH = {"sender": "threshold", "T_send": 1, "T_accept": 1, "T_recv": 1, "T_give": 1}


def measured(parameters: Parameters, tasks: int = 4000, replications: int = 3) -> dict[str, list[float]]:
    """metric → [value, half width]."""
    setup = setup_of(parameters)
    return combine(
        [
            replicate(setup, seed, tasks=tasks, clock=time.process_time, **service_names(parameters))
            for seed in range(1, replications + 1)
        ]
    )


def played(parameters: Parameters, tasks: int, seed: int = 1) -> list[float]:
    """Response times in the order of arrival, until the last task has ended."""
    player = Replication(setup_of(parameters), seed)
    player.play(tasks)
    player.cluster.drain()
    assert player.cluster.unfinished == 0
    return list(player.responses[1:])


# -- closed forms and reference values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "slots", "load"), [pytest.param(8, 1, 0.6, marks=pytest.mark.long), (3, 4, 0.7)])
def test_without_sharing_every_node_is_m_m_c(nodes: int, slots: int, load: float) -> None:
    value, half = measured({"N": nodes, "c": slots, "rho": load})["mean_response"]
    assert abs(value - mmc_response(slots, load)) < 2 * half + 0.03 * value


@pytest.mark.long
@pytest.mark.parametrize("case", FEW_NODES)
def test_reference_cases(case: dict) -> None:
    """Wide: what fails here is wrong in kind. Counts settle sooner than response times."""
    reference = {**case.get("simref", {}), **case["reference"]}
    found = measured(case["params"])
    for metric, share in (("mean_response", 0.12), ("transfers_per_task", 0.06), ("probes_per_task", 0.12)):
        value, half = found[metric]
        expected = reference[metric]["value"]
        assert abs(value - expected) <= 2 * half + share * expected, (metric, value, half, expected)


def test_the_engine_with_its_promises_checked_plays_the_same_game() -> None:
    """Task by task: the same response times, and every counter equal."""
    parameters = {**BOTH, "N": 3, "rho": 0.9, "T_send": 2, "T_accept": 2, "L": 2, "L_recv": 2}
    setup = setup_of(parameters)
    arrivals = list(itertools.islice(setup.arrivals(random.Random(1)), 600))
    ideal: dict[int, CompletedTask] = {}
    cluster = QueueingModel(
        setup.policies, profiles_of(setup.slots), seed=1, ended=lambda task: ideal.__setitem__(task.number, task)
    )
    cluster.run(iter(arrivals), tasks=len(arrivals))
    cluster.drain()
    engine = Simulation(
        setup.policies,
        nodes=3,
        slots=1,
        seed=1,
        config=IDEAL_CONFIG,
        world=WorldOptions(NetworkOptions(delay_s=0.0)),
    )
    report = engine.run(arrivals)
    numbers = {name: itertools.count(1) for name in engine.hosts}
    for number, arrival in enumerate(arrivals, 1):
        task = f"{arrival.node}/{next(numbers[arrival.node])}"
        assert ideal[number].response_s == pytest.approx(engine.responses_s[task], abs=1e-6)
    counts = cluster.counts()
    # The engine stops at the last result, before the node that had the task asks others for more.
    assert 0 <= counts.pop("receiver_probes_total") - report.counts.pop("receiver_probes_total") <= 2
    del report.counts["gossip_messages_queued_total"]  # the joining; the ideal cluster has no gossip
    assert report.counts == dict(sorted(counts.items()))
    assert report.counts["tasks_given_total"] > 0


# -- invariants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
def test_threshold_without_probes_or_peers_is_no_sharing(slots: int) -> None:
    threshold = {"sender": "threshold", "T_send": slots, "T_accept": slots}
    for nodes, probes in ((3, 0), (1, 3)):
        without = played({"N": nodes, "c": slots, "rho": 0.8}, 500)
        assert played({"N": nodes, "c": slots, "rho": 0.8, **threshold, "L": probes}, 500) == without


@pytest.mark.parametrize(
    ("nodes", "slots"),
    [(2, 2), *(pytest.param(nodes, slots, marks=pytest.mark.long) for nodes, slots in ((2, 1), (5, 1), (5, 2)))],
)
def test_both_sides_that_ask_everybody_are_one_central_queue(nodes: int, slots: int) -> None:
    """Equal service times: work leaves a work-conserving system at the same moments, whoever does it."""
    thresholds = dict.fromkeys(("T_send", "T_accept", "T_recv", "T_give"), slots)
    everybody = {**BOTH, **thresholds, "N": nodes, "c": slots, "L": nodes - 1, "L_recv": nodes - 1}
    shared = played({**everybody, "rho": 0.9, "service": "det"}, 1000)
    central = played({"N": 1, "c": nodes * slots, "rho": 0.9, "service": "det"}, 1000)
    assert fmean(shared) == pytest.approx(fmean(central), rel=1e-9)


@pytest.mark.long
def test_both_sides_of_two_nodes_are_m_m_2() -> None:
    found = measured({**BOTH, "N": 2, "rho": 0.7, "L": 1, "L_recv": 1, "service": "exp"}, 6000)
    value, half = found["mean_response"]
    assert abs(value - mmc_response(2, 0.7)) < 2 * half + 0.02 * value


ADAPTIVE: Parameters = {
    "N": 20, "sender": "idle-first", "T_send": 1, "T_accept": 1, "L": 2, "delta": 2, "T_recv": 1, "T_give": 1, "L_recv": 2,
    "footprints": True, "steal": "head", "retry_rate": 0.5, "L_retry": 1, "max_migrations": 4,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("load", "share"), [(0.5, 1.00), (0.7, 1.03), (0.9, 1.09)])
def test_adaptive_comes_near_one_central_queue(load: float, share: float) -> None:
    """Against the same tasks in one queue with all the slots, so that few of them are enough."""
    shared = played({**ADAPTIVE, "rho": load}, 6000)
    central = played({"N": 1, "c": 20, "rho": load}, 6000)
    assert fmean(shared) / fmean(central) == pytest.approx(share, rel=0.02)


@pytest.mark.long
def test_only_the_class_means_depend_on_the_priority() -> None:
    """Equal service times: the numbers of tasks at the nodes are the same path by path; only whose turn it is differs."""
    common = {"N": 6, "rho": 0.85, "sender": "threshold", "T_send": 2, "T_accept": 2, "L": 2, "service": "det"}
    means = {
        priority: fmean(played({**common, "priority": priority}, 3000))
        for priority in ("fcfs", "selfish", "altruistic", "intermediate")
    }
    assert max(means.values()) == pytest.approx(min(means.values()), rel=1e-9)


@pytest.mark.long
def test_shortest_equals_threshold_where_only_idle_nodes_accept_and_probes_more() -> None:
    common = {"N": 10, "rho": 0.8, "T_send": 1, "T_accept": 1, "L": 3}
    threshold = measured({**common, "sender": "threshold"}, 5000)
    shortest = measured({**common, "sender": "shortest"}, 5000)
    for metric in ("mean_response", "transfers_per_task"):
        (one, half), (other, other_half) = threshold[metric], shortest[metric]
        assert abs(one - other) < 2 * math.hypot(half, other_half) + 0.01 * one
    assert shortest["sender_probes_per_task"][0] > 1.1 * threshold["sender_probes_per_task"][0]
    assert shortest["sender_probes_per_task"][0] == pytest.approx(3 * 0.8, rel=0.05)


@pytest.mark.long
def test_shortest_equals_threshold_task_by_task_with_one_probe() -> None:
    common = {"N": 4, "rho": 0.8, "T_send": 1, "T_accept": 1, "L": 1}
    assert played({**common, "sender": "shortest"}, 3000) == played({**common, "sender": "threshold"}, 3000)


@pytest.mark.long
def test_littles_law() -> None:
    """The tasks that the nodes themselves count, looked at every half mean service time, are rate times response."""
    setup = setup_of({**BOTH, "N": 6, "c": 2, "rho": 0.8, "T_send": 3, "T_accept": 3, "L": 2, "L_recv": 2})
    responses: list[float] = []
    seen: list[int] = []
    cluster = QueueingModel(
        setup.policies, profiles_of(setup.slots), seed=3, ended=lambda task: responses.append(task.response_s)
    )
    stream = setup.arrivals(random.Random(3))
    look_at_s = 0.0
    for arrival in itertools.islice(stream, 6000):
        while look_at_s < arrival.at_s:
            cluster.advance(look_at_s)
            seen.append(cluster.load_tasks())
            look_at_s += 0.5
        cluster.run(iter([arrival]), tasks=1)
    rate = 6000 / cluster.now_s
    cluster.drain()
    assert fmean(seen) == pytest.approx(rate * fmean(responses), rel=0.02)
    assert cluster.load_tasks() == 0


@pytest.mark.long
def test_giving_the_oldest_or_the_newest_changes_the_tail_and_not_the_mean() -> None:
    """Equal service times: the numbers of tasks at the nodes are the same path by path; only who waits differs."""
    common = {"N": 4, "rho": 0.9, "T_recv": 1, "T_give": 1, "L_recv": 2, "service": "det"}
    oldest = played({**common, "steal": "head"}, 6000)
    newest = played({**common, "steal": "tail"}, 6000)
    assert fmean(oldest) == pytest.approx(fmean(newest), rel=1e-9)
    assert quantile(sorted(oldest), 0.99) < 0.97 * quantile(sorted(newest), 0.99)


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({"sender": "threshold", "T_send": 1, "T_accept": 1, "L": 3}, marks=pytest.mark.long),
        pytest.param({"sender": "shortest", "T_send": 2, "T_accept": 2, "L": 4}, marks=pytest.mark.long),
        pytest.param({"T_recv": 1, "T_give": 1, "L_recv": 4}, marks=pytest.mark.long),
        {**BOTH, "L": 4, "L_recv": 4},
    ],
    ids=["threshold", "shortest", "receiver", "symmetric"],
)
def test_nothing_beats_one_central_queue(parameters: Parameters) -> None:
    """Equal service times again, so that chance has no say: not in the sum, whatever the policy does."""
    shared = played({**parameters, "N": 5, "rho": 0.9, "service": "det"}, 1000)
    central = played({"N": 1, "c": 5, "rho": 0.9, "service": "det"}, 1000)
    assert fmean(shared) >= fmean(central) * (1 - 1e-9)


def test_an_idle_home_takes_its_own_waiting_task_back() -> None:
    """n1 is busy and sends its third task to n2, where it waits behind a long one. When n1 has nothing left it asks n2,
    which has a task to give: that one ([SK90]; the reference model counts it as a transfer)."""
    parameters = {"N": 2, "rho": 0.5, "sender": "threshold", "T_send": 2, "T_accept": 2, "L": 1}
    setup = setup_of({**parameters, "T_recv": 1, "T_give": 1, "L_recv": 1})
    ended: dict[int, CompletedTask] = {}
    cluster = QueueingModel(
        setup.policies, profiles_of(setup.slots), seed=1, ended=lambda task: ended.__setitem__(task.number, task)
    )
    moments = [(0.0, "n1", 10.0), (0.5, "n2", 100.0), (1.0, "n1", 1.0), (2.0, "n1", 1.0)]
    cluster.run((Arrival(*moment) for moment in moments), tasks=len(moments))
    cluster.drain()
    assert cluster.counts()["sender_probes_total"] == 1
    assert (ended[4].ended_s, ended[4].node) == (12.0, "n1")


def test_a_hot_spot_that_a_policy_cannot_cope_with_is_seen_to_grow() -> None:
    spot = {"N": 20, "lam_spec": [[2, 9.0], [18, 0.0]], "T_recv": 1, "T_give": 1, "L_recv": 3}
    found = replicate(setup_of(spot), 1, tasks=6000, clock=time.process_time).values
    assert found["last_tenth_mean_response"] > 1.5 * found["first_tenth_mean_response"]


def test_a_task_on_its_way_counts_at_its_destination_and_delays_nobody_else() -> None:
    quick = {"N": 2, "rho": 0.6, "sender": "threshold", "T_send": 1, "T_accept": 1, "L": 1, "service": "det"}
    setup = setup_of({**quick, "xdelay": 0.25})
    ended: list[CompletedTask] = []
    cluster = QueueingModel(setup.policies, profiles_of(setup.slots), seed=1, ended=ended.append, delays=setup.delays)
    cluster.run(setup.arrivals(random.Random(1)), tasks=400)
    cluster.drain()
    away = [task.response_s for task in ended if task.node != task.home]
    assert min(away) == pytest.approx(1.25)
    assert min(task.response_s for task in ended) == pytest.approx(1.0)


# -- the tools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "variation"),
    [("exp", [], 1.0), ("det", [], 0.0), ("h2", [4], 4.0), ("bpareto", [1.5, 100], None), ("bpareto", [1, 50], None)],
)
def test_service_times_have_mean_one(name: str, parameters: list[float], variation: float | None) -> None:
    rng = random.Random(5)
    draw = service_of(name, parameters)
    values = [draw(rng) for _ in range(100_000)]
    mean = fmean(values)
    assert mean == pytest.approx(1.0, rel=0.03)
    if variation is not None:
        assert fmean((value - mean) ** 2 for value in values) == pytest.approx(variation, rel=0.06)
    if name == "bpareto":
        assert 0.5 * parameters[1] < max(values) / min(values) <= parameters[1] * (1 + 1e-9)


@pytest.mark.parametrize(
    "parameters",
    [
        {"sender": "telepathy", "L": 2},
        {"pair_rate": -0.5},
        {"colour": "red"},
        {"service": "odd"},
        {"lam_spec": [[1, 0.5]]},
        {"speed_spec": [[3, 0.5]]},
    ],
)
def test_a_case_that_cannot_be_played_says_why(parameters: Parameters) -> None:
    with pytest.raises(NotYet) as raised:
        setup_of({"N": 2, "rho": 0.5, **parameters})
    assert len(str(raised.value)) > 10


@pytest.mark.long
def test_marks_in_tasks_of_the_node_survive_the_division_by_its_slots() -> None:
    for slots in range(1, 60):
        for tasks in (slots, slots + 1, 2 * slots + 1):
            thresholds = {"sender": "threshold", "T_send": tasks, "L": 1, "T_recv": tasks, "L_recv": 1}
            preset = setup_of({"N": 2, "c": slots, "rho": 0.5, **thresholds}).policies
            found = preset.transfer.thresholds(None)  # type: ignore[arg-type]
            assert tasks - 1 < found.send_at * slots <= tasks
            assert tasks - 1 < found.accept_below * slots <= tasks
            assert tasks - 1 < found.receive_below * slots <= tasks
            assert tasks <= found.give_above * slots < tasks + 1


def test_the_quantile_of_students_t() -> None:
    for freedom, expected in ((4, 2.776), (9, 2.262), (29, 2.045)):
        assert student_t(freedom) == pytest.approx(expected, rel=0.005)


def test_an_ideal_world_differs_from_the_default_in_time_and_bounds_only() -> None:
    def differ(ideal: msgspec.Struct, usual: msgspec.Struct) -> set[str]:
        return {name for name in usual.__struct_fields__ if getattr(ideal, name) != getattr(usual, name)}

    changed = differ(IDEAL_CONFIG, CoreConfig()) - {"gossip"} | differ(IDEAL_CONFIG.gossip, CoreConfig().gossip)
    assert all(name.endswith(("_s", "_s_min", "_s_max", "_max")) for name in changed)


def test_made_cases_can_all_be_played_and_the_mean_of_known_queues_is_exact() -> None:
    found = made.cases()
    assert len({case["id"] for case in found}) == len(found) == made.CASES
    for case in found:
        assert setup_of(case["params"]).rates
    value, half = measured({"N": 3, "rho": 0.8, "sender": "none"}, 500, replications=2)["mean_response"]
    assert value == pytest.approx(5.0)
    assert half == pytest.approx(0.0, abs=1e-9)
    one = {"N": 2, "rho": 0.7, "sender": "none", "service": "h2", "service_params": [4]}
    value, half = measured(one, 500)["mean_response"]
    assert value == pytest.approx(1 + 0.7 / 0.3 * 5 / 2)


def test_a_run_too_short_for_batches_counts_the_probes_of_a_node_itself() -> None:
    placement = SimpleNamespace(probed=4, looks=2)
    values = {"probes_per_task": 2.0, "sender_probes_per_task": 2.0}
    assert _with_looks(Sample(values, {}, 1, 0.0), placement).values["probes_per_task"] == 3.0


@pytest.mark.long
def test_known_queues_narrow_the_interval_of_a_sharing_policy() -> None:
    parameters = {"N": 4, "rho": 0.8, "sender": "shortest", "T_send": 1, "L": 3}
    setup = setup_of(parameters)
    samples = [
        replicate(setup, seed, tasks=4000, clock=time.process_time, **service_names(parameters)) for seed in (1, 2)
    ]
    without = [
        msgspec.structs.replace(sample, batches={"mean_response": sample.batches["mean_response"]})
        for sample in samples
    ]
    narrow, plain = combine(samples)["mean_response"], combine(without)["mean_response"]
    assert narrow[1] < plain[1] / 2


@pytest.mark.long
def test_quantiles_have_intervals_where_enough_responses_lie_beyond_them() -> None:
    setup = setup_of({"N": 2, "c": 1, "rho": 0.5, "sender": "none"})
    few = replicate(setup, 1, tasks=4000, clock=time.process_time, service="exp")
    assert combine([few], 0.5)["p99"][1] == math.inf
    value, half = combine([replicate(setup, seed, tasks=8000, clock=time.process_time) for seed in range(6)])["p99"]
    assert abs(value - 2 * math.log(100)) < half < value / 4


def test_queues_alone_have_the_means_that_theory_knows() -> None:
    """M/D/1, whose mean wait at load 0.8 is 2 service times (Pollaczek and Khinchine); M/M/4, with the shares beyond two values."""
    of_one = alone(
        setup_of({"N": 1, "rho": 0.8, "service": "det"}), 1, 120_000, {"one_queue": [9.0] * 3}, lambda: False
    )
    assert fmean(of_one["one_queue.mean"]) == pytest.approx(3.0, rel=0.05)
    of_four = alone(setup_of({"N": 4, "rho": 0.7}), 1, 60_000, {"one_queue": [1.0, 4.0, 9.0]}, lambda: False)
    assert fmean(of_four["one_queue.mean"]) == pytest.approx(mmc_response(4, 0.7), rel=0.03)
    for name, at in (("one_queue.0.5", 1.0), ("one_queue.0.95", 4.0)):
        assert fmean(of_four[name]) == pytest.approx(mmc_beyond(4, 0.7, at), rel=0.08)
    assert mmc_beyond(1, 0.8, 5.0) == pytest.approx(math.exp(-1))
    assert mmc_beyond(2, 0.5, 3.0) == pytest.approx(mmc_beyond(2, 0.5 + 1e-5, 3.0), rel=1e-4)


def test_control_variates_explain_what_they_can_and_nothing_by_chance() -> None:
    rng = random.Random(3)
    noise = {name: [[rng.gauss(0, 1) for _ in range(40)] for _ in range(2)] for name in ("a", "b", "c", "d")}
    runs = [[7 + 2 * one + 0.1 * rng.gauss(0, 1) for one in run] for run in noise["b"]]
    found = controlled(runs, noise)
    assert list(found.slopes) == ["b"]
    assert found.slopes["b"] == pytest.approx(2.0, rel=0.05)
    assert all(abs(value - 7) < 0.5 for run in found.runs for value in run)
    alone_ = controlled(noise["a"], {name: noise[name] for name in ("c", "d")})
    left = [fmean(value * value for run in runs for value in run) for runs in (alone_.runs, noise["a"])]
    assert left[0] > 0.9 * left[1]
    assert controlled([[1.0] * 40], {"b": noise["b"][:1]}).slopes == {}


def test_an_estimated_mean_widens_the_interval_that_it_narrows() -> None:
    parameters: Parameters = {"N": 2, "rho": 0.8, "sender": "shortest", "L": 1, "service": "h2", "service_params": [4]}
    setup = setup_of(parameters)
    sample = replicate(setup, 1, tasks=6000, clock=time.process_time, **service_names(parameters))
    plain = combine([msgspec.structs.replace(sample, batches={"mean_response": sample.batches["mean_response"]})])
    narrow = combine([sample])
    exact = {name: values for name, values in sample.batches.items() if not name.endswith(ALONE)}
    certain = combine([msgspec.structs.replace(sample, batches=exact)])
    halves = [found["mean_response"][1] for found in (certain, narrow, plain)]
    assert halves == sorted(halves)
    assert halves[0] < halves[1] < halves[2] / 1.5


def test_replications_that_did_not_settle_count_only_where_no_other_did() -> None:
    setup = setup_of({"N": 2, "rho": 0.8, "sender": "none", "service": "det"})
    settled = replicate(setup, 1, tasks=4000, clock=time.process_time)
    short = msgspec.structs.replace(settled, batches={}, values=settled.values | {"mean_response": 1.0})
    both, alone_ = combine([short, settled], 0.8), combine([short], 0.8)
    assert both["mean_response"] == combine([settled], 0.8)["mean_response"]
    assert both["tasks"][0] == 2 * settled.tasks
    assert (alone_["mean_response"], alone_["p95"][1]) == ([1.0, math.inf], math.inf)


def test_a_queue_that_cannot_be_stable_is_no_control() -> None:
    spot = {"N": 4, "lam_spec": [[1, 2.0], [3, 0.0]], "sender": "jsqd", "L": 3}
    names = {name.split(".")[0] for name in replicate(setup_of(spot), 1, tasks=4000, clock=time.process_time).batches}
    assert "one_queue" in names
    assert not names & {"no_sharing", "asks_two"}
