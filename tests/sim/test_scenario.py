"""What a user asks to be simulated: workloads, what is measured of them, and what is said about it."""

from __future__ import annotations

import itertools
import math
import random
import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from peerload.core.membership.membership import Directory
from peerload.model.errors import ConfigError
from peerload.model.events import LoadSampled
from peerload.policy.registry import load_preset
from peerload.sim.outcome import Interval, Outcome, half_width, intervals, longer, mmc_response, outcome, student_t
from peerload.sim.queueing_model import (
    IDEAL_CONFIG,
    MIGRATIONS_MAX,
    Arrival,
    CompletedTask,
    Delays,
    QueueingModel,
    profiles_of,
)
from peerload.sim.recorded import TaskTrace, read_trace
from peerload.sim.replication import Sample
from peerload.sim.scenario import LIVE, Scenario, play, tasks_for
from peerload.sim.service import ServiceTimes, draw_of, read_service
from peerload.sim.utilization import UtilizationMonitor
from tests.chaos.engine.engine import Simulation, WorldOptions
from tests.chaos.engine.host import Host
from tests.chaos.engine.network import NetworkOptions
from tests.support import in_short
from tests.wording import Says
from tests.workloads import poisson


def scenario(**changes: Any) -> Scenario:
    trace = changes.get("trace")
    defaults: dict[str, Any] = {"policy": "threshold", "nodes": 4, "tasks": len(trace) if trace else 2000, "warm_up": 0}
    return Scenario(**{**defaults, "load": None if trace else 0.8, **changes})


def played(asked: Scenario, replications: int = 1, seed: int = 1) -> tuple[Outcome, list[Sample]]:
    samples = [
        play(asked, seed, number, clock=time.process_time, passed=lambda _tasks: None) for number in range(replications)
    ]
    return outcome(asked, samples), samples


def value(found: Outcome, metric: str) -> float:
    return found.metrics[metric].value


def ended(
    policy: str, arrivals: list[Arrival], slots: list[int], speeds: tuple[float, ...] = (), gpus: int = 0, **more: Any
) -> list[CompletedTask]:
    tasks: dict[int, CompletedTask] = {}
    cluster = QueueingModel(
        load_preset(policy, is_reference=True),
        profiles_of(slots, speeds, gpus),
        seed=1,
        ended=lambda task: tasks.__setitem__(task.number, task),
        **more,
    )
    cluster.run(iter(arrivals), tasks=len(arrivals))
    cluster.drain()
    return [tasks[number] for number in sorted(tasks)]


# -- idle while a task waits -------------------------------------------------------------------------------------------


def watched(arrivals: list[Arrival], slots: list[int]) -> UtilizationMonitor:
    watch = UtilizationMonitor()
    last = max(task.ended_s for task in ended("none", arrivals, slots, watch=watch))
    watch.count_until(last)
    return watch


def test_idle_while_waiting_by_hand() -> None:
    """n1 works from 0 to 11; its second task waits from 1 to 10, and n2 is idle all the while."""
    watch = watched([Arrival(0.0, "n1", 10.0), Arrival(1.0, "n1", 1.0)], [1, 1])
    assert (watch.total, watch.free) == (22.0, 11.0)
    assert watch.idle_while_waiting == 9.0


def test_waiting_at_two_nodes_leaves_only_the_third_idle() -> None:
    """Tasks wait at n1 from 1 to 4 and at n2 from 2 to 6; n3 is idle until 3, when a task of 2 comes."""
    arrivals = [
        Arrival(0.0, "n1", 4.0), Arrival(0.0, "n2", 6.0), Arrival(1.0, "n1", 4.0), Arrival(2.0, "n2", 1.0),
        Arrival(3.0, "n3", 2.0),
    ]  # fmt: skip
    watch = watched(arrivals, [1, 1, 1])
    assert watch.idle_while_waiting == (3 - 1) + (6 - 5)


def test_a_free_slot_beside_the_waiting_task_is_not_counted() -> None:
    """A task of two cpus waits at n1 from 1 to 5, beside a slot that is no use to it; the two of n2 are free."""
    watch = watched([Arrival(0.0, "n1", 5.0), Arrival(1.0, "n1", 1.0, cpus=2.0)], [2, 2])
    assert watch.idle_while_waiting == 4.0 * 2
    assert watch.free == 4.0 + 1.0 + 2 * 6.0, "n1: one slot until 5, none after that; n2: two all the time"


def test_one_queue_for_all_is_never_idle_while_a_task_waits() -> None:
    found, _ = played(scenario(nodes=1, slots=4, load=0.9))
    assert value(found, "idle_while_waiting") == 0.0
    apart, _ = played(scenario(policy="none", load=0.9))
    assert 0.05 < value(apart, "idle_while_waiting") < 0.15


# -- delays, speeds, several cpus --------------------------------------------------------------------------------------


class Acquainted(Simulation):
    """Nodes that know one another from the start, and so have nothing to gossip about."""

    def start(self, host: Host) -> None:
        super().start(host)
        if all(other.node is not None for other in self.hosts.values()):
            directory = Directory((other.identity, other.profile) for other in self.hosts.values())
            for other in self.hosts.values():
                assert other.node is not None
                other.node.membership.meet_all(directory)
                self.after(0.05, partial(other.handle, LoadSampled(0.0, 0.0, 0)))  # whoever has met somebody may ask

    def _introduce(self, host: Host) -> None:
        pass


@pytest.mark.parametrize("policy", in_short(["receiver", "threshold", "adaptive"], 3))
def test_messages_that_take_time_do_what_they_do_in_the_engine_with_its_promises_checked(policy: str) -> None:
    policies = load_preset(policy, is_reference=True)
    arrivals = list(poisson([f"n{number}" for number in range(1, 6)], 4.5, 600, random.Random(3)))
    ideal = [task.response_s for task in ended(policy, arrivals, [1] * 5, delays=Delays(0.05))]
    network = NetworkOptions(delay_s=0.05)
    engine = Acquainted(policies, nodes=5, slots=1, seed=1, config=IDEAL_CONFIG, world=WorldOptions(network))
    engine.run(arrivals)
    assert sorted(ideal) == pytest.approx(sorted(engine.responses_s.values()), abs=1e-6)
    at_once = [task.response_s for task in ended(policy, arrivals, [1] * 5)]
    assert sorted(ideal) != pytest.approx(sorted(at_once), abs=1e-6)


def test_answers_to_a_broadcast_are_waited_for_however_long_messages_take() -> None:
    slow = scenario(policy="first-reply", message_s=0.3, load=0.9, tasks=600)
    found, _ = played(slow)
    assert value(found, "transfers_per_task") > 0.05
    live = msgspec.structs.replace(slow, is_live=True)
    assert live.setup().config.answer_wait_s > 0.6
    assert live.setup().config.retry_s_max == LIVE.retry_s_max
    assert scenario().setup().config.answer_wait_s == IDEAL_CONFIG.answer_wait_s


def test_a_task_takes_its_time_divided_by_the_speed_of_its_node() -> None:
    arrivals = [Arrival(0.0, "n1", 4.0), Arrival(1.0, "n2", 4.0), Arrival(2.0, "n3", 4.0)]
    tasks = ended("none", arrivals, [1, 1, 1], speeds=(1.0, 2.0, 0.5))
    assert [task.response_s for task in tasks] == [4.0, 2.0, 8.0]


def test_load_is_that_of_slots_times_speed() -> None:
    asked = scenario(policy="none", nodes=2, speeds=(1.5, 0.5), load=0.4, tasks=8000)
    assert asked.capacity == 2.0
    found, _ = played(asked)
    assert value(found, "mean_response") == pytest.approx((1 / (1.5 - 0.4) + 1 / (0.5 - 0.4)) / 2, rel=0.25)
    assert found.one_queue is None, "no formula for nodes that differ"


def test_a_task_of_several_cpus_takes_as_many_slots() -> None:
    arrivals = [Arrival(0.0, "n1", 4.0, cpus=2.0), Arrival(1.0, "n1", 1.0), Arrival(1.0, "n1", 1.0)]
    assert [task.started_s for task in ended("none", arrivals, [2])] == [0.0, 4.0, 4.0]


def test_a_task_that_its_home_cannot_run_goes_to_no_node_without_gpus() -> None:
    arrivals = [Arrival(0.0, "n1", 4.0, gpus=1), Arrival(0.0, "n2", 4.0, gpus=1), Arrival(0.0, "n2", 4.0, gpus=1)]
    tasks = ended("none", arrivals, [4, 4], gpus=1)
    assert [task.started_s for task in tasks] == [0.0, 0.0, 4.0]


# -- workloads ---------------------------------------------------------------------------------------------------------

TRACE = "arrival,duration,node\n" + "".join(f"{number * 2},{1 + number % 3},ws{number % 3}\n" for number in range(60))


def trace() -> TaskTrace:
    return read_trace("mine", TRACE)


def arrivals_of(asked: Scenario, seed: int = 1) -> list[Arrival]:
    return list(itertools.islice(asked.setup().arrivals(random.Random(seed)), 60))


def test_a_trace_is_played_as_recorded() -> None:
    asked = scenario(trace=trace(), nodes=3)
    found = arrivals_of(asked)
    assert [one.at_s for one in found] == [2.0 * number for number in range(60)]
    assert [one.node for one in found[:4]] == ["n1", "n2", "n3", "n1"]
    assert asked.offered_load == pytest.approx(2 / 2 / 3)
    result, samples = played(asked)
    assert value(result, "mean_response") == fmean(trace().durations), "nobody waits"
    assert [count for count, _ in samples[0].homes] == [20, 20, 20]


def test_more_names_than_nodes_wrap_round_and_tasks_without_one_are_spread() -> None:
    assert {one.node for one in arrivals_of(scenario(trace=trace(), nodes=2))} == {"n1", "n2"}
    found, _ = played(scenario(trace=trace(), nodes=2))
    assert found.warnings == [Says.FEW_NODES(3, 2)]
    anonymous = read_trace("mine", "arrival,duration\n" + "".join(f"{number},1\n" for number in range(60)))
    asked = scenario(trace=anonymous, nodes=3)
    assert {one.node for one in arrivals_of(asked)} == {"n1", "n2", "n3"}
    assert arrivals_of(asked) == arrivals_of(asked)
    assert arrivals_of(asked) != arrivals_of(asked, seed=2)


def test_a_load_stretches_a_trace() -> None:
    asked = scenario(trace=trace(), nodes=3, load=0.5)
    assert arrivals_of(asked)[1].at_s == pytest.approx(2.0 * (1 / 3) / 0.5)
    found, _ = played(asked)
    assert value(found, "utilization") == pytest.approx(0.5, rel=0.06)


def test_recorded_arrivals_with_drawn_durations_and_the_reverse() -> None:
    drawn = arrivals_of(scenario(trace=trace(), nodes=3, service=ServiceTimes("det")))
    assert {one.service_s for one in drawn} == {2.0}, "the mean of the trace"
    poisson_stream = scenario(nodes=3, durations=(2.0, 4.0), load=0.75)
    found = arrivals_of(poisson_stream)
    assert {one.service_s for one in found} == {2.0, 4.0}
    assert found[-1].at_s == pytest.approx(60 / (0.75 * 3 / 3.0), rel=0.4)


def test_a_hot_spot_has_the_load_of_all() -> None:
    asked = scenario(nodes=10, hot=2, load=0.9)
    setup = asked.setup()
    assert setup.rates == [4.5, 4.5, *[0.0] * 8]


def test_what_no_node_could_run_is_refused_before() -> None:
    wide = read_trace("mine", "arrival,duration,cpus\n0,1,4\n")
    with pytest.raises(ConfigError, match=Says.TASK_TOO_WIDE(4, 2)):
        scenario(trace=wide, slots=2).check()
    with_gpu = read_trace("mine", "arrival,duration,gpus\n0,1,2\n")
    with pytest.raises(ConfigError, match="2 gpus"):
        scenario(trace=with_gpu).check()
    with pytest.raises(ConfigError, match=Says.NO_PRESET()):
        scenario(policy="nobody").check()


@pytest.mark.parametrize(
    ("text", "service"),
    [
        ("exp", ServiceTimes()),
        ("h2:10", ServiceTimes("h2", (10.0,))),
        ("bpareto:1.5,100", ServiceTimes("bpareto", (1.5, 100.0))),
    ],
)
def test_a_distribution_is_read_as_it_is_written(text: str, service: ServiceTimes) -> None:
    assert read_service(text) == service
    assert str(service) == text


@pytest.mark.parametrize(
    "text",
    ["", "normal", "exp:2", "det:1", "h2", "h2:0.5", "h2:x", "h2:nan", "bpareto:1", "bpareto:0,10", "bpareto:2,1"],
)
def test_a_distribution_that_does_not_exist_says_which_do(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: exp, det, h2:CV2"):
        read_service(text)


def test_the_largest_bounded_pareto_is_its_ratio_from_the_smallest() -> None:
    draw, rng = draw_of("bpareto", [1.1, 1000.0]), random.Random(1)
    values = [draw(rng) for _ in range(200_000)]
    assert fmean(values) == pytest.approx(1.0, rel=0.05)
    assert max(values) / min(values) < 1000


# -- what is said about it ---------------------------------------------------------------------------------------------


def test_mean_wait_and_response_differ_by_the_service() -> None:
    found, _ = played(scenario(service=ServiceTimes("det"), tasks=600))
    assert value(found, "mean_response") == pytest.approx(value(found, "mean_wait") + 1.0)


@pytest.mark.long
def test_tasks_that_run_at_the_end_count_as_they_will_end() -> None:
    """A few take hundreds of times the mean: they are still running when as many more tasks have come."""
    heavy = ServiceTimes("h2", (100.0,))
    found, samples = played(scenario(policy="adaptive", nodes=50, load=0.3, service=heavy, tasks=2000, warm_up=500))
    assert value(found, "mean_wait") < 0.05
    assert samples[0].cut_off == 0
    assert found.warnings == []
    lasting, _ = played(
        scenario(nodes=100, load=0.5, service=ServiceTimes("det"), tasks=400, policy="random", message_s=0.1)
    )
    assert value(lasting, "mean_response") - value(lasting, "mean_wait") == pytest.approx(
        1.0 + 0.1 * value(lasting, "remote_fraction")
    ), "the last know already when their homes will hear of it"


@pytest.mark.long
def test_tasks_that_wait_at_the_end_are_followed_until_they_begin_unless_it_grows() -> None:
    settled = scenario(nodes=50, load=0.3, service=ServiceTimes("h2", (100.0,)), tasks=2000, warm_up=500)
    assert [played(settled, seed=seed)[1][0].cut_off for seed in range(1, 5)] == [0] * 4
    growing, (sample,) = played(scenario(nodes=2, load=4.0, tasks=600, warm_up=590))
    assert sample.cut_off == 10, "those of the warm-up are nobody's concern"
    assert not any(Says.COUNT_WITH_AGE() in said for said in growing.warnings), "what does not end is said already"
    assert value(growing, "mean_wait") > 10


def test_measured_tasks_that_never_began_are_said_to_count_with_their_age() -> None:
    asked = scenario(nodes=2, load=0.5)
    _, (sample,) = played(asked)
    said = outcome(asked, [msgspec.structs.replace(sample, cut_off=3)]).warnings
    assert Says.CUT_OFF(3, 2000, Says.COUNT_WITH_AGE()) in said


def test_what_only_fills_up_is_not_called_unstable() -> None:
    found, _ = played(scenario(policy="adaptive", nodes=1000, load=0.5, tasks=500, warm_up=125))
    assert found.is_stable is None
    assert found.warnings[0].endswith(Says.NO_STABILITY(120000))
    assert value(found, "mean_response") == pytest.approx(1.0, rel=0.1)


def test_an_interval_below_one_queue_is_said_and_played_longer() -> None:
    asked = scenario(policy="none", nodes=1, load=0.9, tasks=1000, warm_up=250)
    _, samples = played(asked, 4)
    lucky = [
        msgspec.structs.replace(one, values={**one.values, "mean_response": 7.0 + number / 10})
        for number, one in enumerate(samples)
    ]
    found = outcome(asked, lucky)
    assert found.warnings[0].startswith(Says.BELOW_ONE_QUEUE(10))
    assert found.warnings[0].endswith("--tasks 4000")
    more = longer(asked, found)
    assert more is not None
    assert (more.tasks, more.warm_up) == (4000, 1000)


def test_few_measured_tasks_are_said() -> None:
    found, _ = played(scenario(nodes=2, load=0.2, tasks=100, warm_up=99), 2)
    assert Says.FEW_MEASURED(2) in found.warnings


RAISES = """
class Raises:
    def locate(self, view, task, replies, rng):
        raise ValueError("on purpose")
"""


def test_what_a_policy_could_not_do_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RAISES, encoding="utf-8")
    preset = tmp_path / "mine.toml"
    preset.write_text('[location.sender]\npolicy = "mine.py:Raises"\n', encoding="utf-8")
    found, (sample,) = played(scenario(policy=str(preset)))
    assert sample.policy_errors > 100
    assert Says.POLICY_ERRORS(sample.policy_errors) in found.warnings[-1]
    assert found.warnings[-1].endswith(f"ValueError: on purpose ({tmp_path / 'mine.py'}:4)")
    assert value(found, "transfers_per_task") == 0


KEEPS_STATE = """
class Counts:
    def __init__(self):
        self.nodes = set()

    def locate(self, view, task, replies, rng):
        self.nodes.add(view.node)
        assert len(self.nodes) == 1, "another node has used this instance"
        return Keep("counted")

from peerload.policy.api import Keep
"""


def test_each_node_has_an_instance_of_a_policy_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KEEPS_STATE, encoding="utf-8")
    preset = tmp_path / "mine.toml"
    preset.write_text('[location.sender]\npolicy = "mine.py:Counts"\n', encoding="utf-8")
    _, (sample,) = played(scenario(policy=str(preset), tasks=400))
    assert sample.policy_errors == 0


def test_tasks_that_wander_without_a_limit_come_to_an_end_which_is_said(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text(
        '[location.sender]\npolicy = "random"\n[transfer]\npolicy = "single-threshold"\nthreshold = 1.0\n'
        '[migration]\npolicy = "uncontrolled"\n',
        encoding="utf-8",
    )
    found, (sample,) = played(scenario(policy=str(preset), nodes=2, load=0.9, tasks=100))
    assert 0 < sample.at_migrations_max <= sample.tasks
    assert any(f"{sample.at_migrations_max} tasks moved {MIGRATIONS_MAX} times" in note for note in found.warnings)


@pytest.mark.parametrize("pause_s", [0, 1])
def test_a_trace_of_tasks_that_take_no_time_is_played_and_makes_no_load(pause_s: int) -> None:
    rows = "".join(f"{number * pause_s},0,ws{number % 2}\n" for number in range(20))
    nothing = read_trace("mine", "arrival,duration,node\n" + rows)
    found, _ = played(scenario(trace=nothing, nodes=2))
    assert (value(found, "mean_response"), value(found, "utilization")) == (0.0, 0.0)
    with pytest.raises(ConfigError, match=Says.NO_DURATION()):
        scenario(trace=nothing, nodes=2, load=0.5).check()


def test_no_load_can_be_made_of_a_trace_without_pauses() -> None:
    at_once = read_trace("mine", "arrival,duration\n5,1\n5,2\n")
    scenario(trace=at_once, nodes=2).check()
    with pytest.raises(ConfigError, match=Says.NO_PAUSES("mine")):
        scenario(trace=at_once, nodes=2, load=0.5).check()


def test_a_load_that_stretches_a_trace_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        scenario(trace=read_trace("mine", "arrival,duration\n0,1\n5,2\n"), nodes=2, load=1e-10).check()
    assert raised.value.key == "load"


def test_a_hot_spot_that_receivers_cannot_cope_with_is_called_unstable() -> None:
    found, _ = played(scenario(policy="receiver", nodes=20, hot=2, load=0.9, tasks=5000, warm_up=1250), 2)
    assert found.is_stable is False
    assert "unstable" in found.warnings[0]
    assert value(found, "mean_response") > 50


@pytest.mark.long
@pytest.mark.parametrize(("policy", "nodes", "load"), [("none", 8, 0.7), ("threshold", 8, 0.9), ("none", 1, 0.8)])
def test_what_is_stable_is_not_called_unstable(policy: str, nodes: int, load: float) -> None:
    for seed in range(1, 6):
        found, _ = played(scenario(policy=policy, nodes=nodes, load=load, tasks=5000, warm_up=1250), 2, seed)
        assert found.is_stable


def test_a_load_of_one_and_more_is_never_called_stable() -> None:
    found, _ = played(scenario(nodes=2, load=1.0, tasks=1000))
    assert found.is_stable is False
    assert Says.FULL_LOAD(1) in found.warnings[0]
    assert found.one_queue is None


def test_an_index_of_gpus_is_noted_where_no_node_has_one(tmp_path: Path) -> None:
    for load, readings in (("gpu", {"gpus_busy"}), ("tasks", set())):
        preset = tmp_path / f"{load}.toml"
        preset.write_text(f'[load]\npolicy = "{load}"\n')
        asked = scenario(policy=str(preset), nodes=2, load=0.3, tasks=200)
        assert asked.unused_readings() == readings
        found, _ = played(asked)
        assert any("GPUs" in warning for warning in found.warnings) is bool(readings)


def test_what_was_too_short_is_said_and_made_longer() -> None:
    asked = scenario(policy="none", nodes=2, load=0.9, tasks=400, warm_up=40)
    found, _ = played(asked)
    assert found.is_stable is False or "--tasks" in found.warnings[0]
    more = longer(asked, found)
    assert more is not None
    assert more.warm_up > 40
    assert more.tasks >= 4 * more.warm_up - 4
    settled = scenario(policy="none", nodes=2, load=0.5, tasks=4000, warm_up=1000)
    assert longer(settled, played(settled)[0]) is None


def test_what_seems_unstable_is_looked_at_again_but_not_for_ever() -> None:
    asked = scenario(policy="receiver", nodes=20, hot=2, load=0.9, tasks=2000, warm_up=500)
    found, _ = played(asked)
    again = longer(asked, found)
    assert again is not None
    assert (again.tasks, again.warm_up) == (8000, 2000)
    assert longer(scenario(policy="receiver", nodes=20, hot=2, load=0.9, tasks=80_000), found) is None


def test_the_usual_number_of_tasks() -> None:
    assert tasks_for(20, 1, 0.9) == (20_000, 5000)
    assert tasks_for(20, 1, 0.9, several=True) == (10_000, 2500)
    assert tasks_for(1000, 1, 0.9) == (108_000, 54_000), "long enough for all to have begun"
    assert tasks_for(1, 1, 5.0)[0] == 20_000


def test_fairness_by_home_node() -> None:
    """n1 gets tasks of 3 s, n2 tasks of 1 s, nobody waits."""
    rows = "".join(f"{number * 10},{3 if number % 2 else 1},ws{number % 2}\n" for number in range(20))
    found, _ = played(scenario(trace=read_trace("mine", "arrival,duration,node\n" + rows), nodes=3, policy="none"))
    assert found.homes == [1.0, 3.0, None]
    assert found.spread == (3.0, 0.5)
    assert found.is_stable is None


@pytest.mark.long
def test_equal_seeds_give_equal_samples_and_others_differ() -> None:
    asked = scenario(policy="adaptive", nodes=5, tasks=1500)
    (_, first), (_, again), (_, other) = played(asked, 2), played(asked, 2), played(asked, 2, seed=2)
    assert [sample.values for sample in first] == [sample.values for sample in again]
    assert len({sample.values["mean_response"] for sample in first + other}) == 4


@pytest.mark.parametrize(("nodes", "most"), [(20, 15.0), pytest.param(100, 18.0, marks=pytest.mark.long)])
def test_the_messages_of_adaptive_for_a_task_hardly_grow_with_the_nodes(nodes: int, most: float) -> None:
    """As agents play it. They were 50 and 99 while every node with room answered an announcement of work."""
    asked = scenario(policy="adaptive", is_live=True, nodes=nodes, load=0.9, tasks=20 * nodes, warm_up=5 * nodes)
    _, (sample,) = played(asked, 1)
    assert sample.values["messages_per_task"] <= most


def test_intervals_come_from_replications() -> None:
    samples = [Sample({"mean": mean}, {"mean": [0.0, 9.0]}, 10, 0.0) for mean in (1.0, 2.0, 3.0)]
    found = intervals(samples)["mean"]
    assert found.value == 2.0
    assert found.half == pytest.approx(student_t(2) / math.sqrt(3))
    assert intervals(samples[:1])["mean"] == Interval(1.0, math.inf)  # two batches of one run tell nothing
    steady = [Sample({"mean": 1.0}, {"mean": [1.0, 2.0, 3.0, 3.0, 1.0, 3.0, 2.0, 1.0]}, 10, 0.0)]
    assert 0.0 < intervals(steady)["mean"].half < math.inf
    assert half_width([1.0]) == math.inf
    assert [student_t(freedom) for freedom in (1, 2, 3)] == pytest.approx([12.71, 4.303, 3.182], rel=0.01)


def test_erlang_c() -> None:
    assert mmc_response(1, 0.9) == pytest.approx(10.0)
    assert mmc_response(2, 0.7) == pytest.approx(1 / (1 - 0.7**2))
    assert mmc_response(3, 0.5) == pytest.approx(1 + (1.5**3 / 6 / 0.5) / (1 + 1.5 + 1.125 + 1.125) / 1.5)
    assert mmc_response(10_000, 0.9) == pytest.approx(1.0)
    assert (mmc_response(4, 0.0), mmc_response(4, 1.0)) == (1.0, math.inf)


def test_the_presets_reference_table_changes_what_it_names() -> None:
    live, reference = load_preset("adaptive"), load_preset("adaptive", is_reference=True)
    assert (live.names["information"], reference.names["information"]) == ("region-change", "poll")
    assert live.transfer.thresholds(None).prefetch == 1  # type: ignore[arg-type]
    assert reference.transfer.thresholds(None).prefetch == 0  # type: ignore[arg-type]
    assert live.sender == reference.sender
    assert load_preset("threshold") == load_preset("threshold", is_reference=True)
