"""The baselines against closed forms, and task by task against the queues that they are."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from peerload.model.actions import Send
from peerload.policy.api import Keep, Transfer
from peerload.policy.flows import bargaining, best_reply, nash, optimal, proportional
from peerload.policy.registry import load_preset
from peerload.sim.queueing_model import IDEAL_CONFIG, Arrival, CompletedTask, Delays, QueueingModel, profiles_of
from peerload.sim.recorded import read_trace
from peerload.sim.replication import Replication, Setup
from peerload.sim.scenario import Scenario
from peerload.sim.service import read_class, read_service
from tests.core.given import Given

IDEAL = Delays()


def arrivals_at(nodes: int, rate: float, tasks: int, seed: int = 1) -> list[Arrival]:
    rng, at_s, found = random.Random(seed), 0.0, []
    for _ in range(tasks):
        at_s += rng.expovariate(rate)
        found.append(Arrival(at_s, f"n{rng.randrange(nodes) + 1}", rng.expovariate(1.0)))
    return found


def played(policy: str, nodes: int, arrivals: Sequence[Arrival], delays: Delays = IDEAL) -> list[CompletedTask]:
    ended: list[CompletedTask] = []
    policies = load_preset(policy, is_reference=True)
    config = msgspec.structs.replace(IDEAL_CONFIG, settle_s=0.2)
    model = QueueingModel(policies, profiles_of([1] * nodes), seed=1, ended=ended.append, delays=delays, config=config)
    model.run(iter(arrivals), tasks=len(arrivals))
    model.drain()
    assert len(ended) == len(arrivals)
    assert model.counts().get("policy_errors_total", 0) == 0
    return sorted(ended, key=lambda task: task.number)


def one_queue(arrivals: Sequence[Arrival], servers: int) -> Iterator[float]:
    """Responses of first come, first served (Kiefer and Wolfowitz)."""
    free_s = [0.0] * servers
    for task in arrivals:
        start_s = max(task.at_s, min(free_s))
        free_s[free_s.index(min(free_s))] = start_s + task.service_s
        yield start_s + task.service_s - task.at_s


def test_central_fcfs_is_one_queue_task_by_task() -> None:
    arrivals = arrivals_at(4, 3.6, 500)
    responses = [task.response_s for task in played("central-fcfs", 4, arrivals)]
    assert responses == pytest.approx(list(one_queue(arrivals, 4)))


def test_central_jsq_never_lets_a_task_wait_beside_an_idle_node_and_is_the_exact_mean_for_two_nodes() -> None:
    """The mean number of tasks of the truncated Markov chain, by Little's law, against the simulation."""
    load, most = 0.8, 18
    states = [(a, b) for a in range(most) for b in range(a, most)]  # a is the shorter queue
    share = dict.fromkeys(states, 0.0)
    share[0, 0] = 1.0
    for _ in range(400):  # uniformized
        after = dict.fromkeys(states, 0.0)
        rate = 2 * load + 2
        for (a, b), held in share.items():
            if held < 1e-15:
                continue
            joined = (min(a + 1, b), max(a + 1, b)) if b < most - 1 or a < b else (a, b)
            after[joined] += held * 2 * load / rate
            after[max(a - 1, 0), b] += held / rate
            after[min(a, max(b - 1, 0)), max(a, b - 1, 0)] += held / rate
        share = after
    exact = sum((a + b) * held for (a, b), held in share.items()) / (2 * load)
    assert 1 / (1 - load**2) < exact < 1.1 / (1 - load**2)  # M/M/2 is a little better
    # The same tasks in one queue tell most of the chance (a control variate): its exact mean is known.
    found = []
    for seed in range(2):
        arrivals = arrivals_at(2, 2 * load, 1500, seed)
        mean = fmean(task.response_s for task in played("central-jsq", 2, arrivals))
        found.append(mean - fmean(one_queue(arrivals, 2)) + 1 / (1 - load**2))
    assert fmean(found) == pytest.approx(exact, rel=0.04)


def test_a_slow_head_is_the_bottleneck_and_one_that_fails_holds_everything_up() -> None:
    arrivals = arrivals_at(4, 2.0, 400)
    quick = fmean(task.response_s for task in played("central-jsq", 4, arrivals))
    slow = fmean(task.response_s for task in played("central-jsq", 4, arrivals, Delays(head_s=0.2)))
    assert slow > 3 * quick  # six messages a task reach the head, 2.4 times what it can read
    at_s = arrivals[100].at_s
    down = played("central-jsq", 4, arrivals, Delays(head_fails_s=at_s, head_down_s=50.0))
    assert not any(at_s <= task.started_s < at_s + 50.0 for task in down)
    assert [task.response_s for task in down[:90]] == [
        task.response_s for task in played("central-jsq", 4, arrivals)[:90]
    ]


def test_messages_of_a_central_server_take_their_time() -> None:
    arrivals = arrivals_at(3, 1.0, 200)
    for task in played("central-fcfs", 3, arrivals, Delays(message_s=0.1)):
        assert task.started_s - task.arrival.at_s >= 0.4 - 1e-9  # to the head, OFFER, ACCEPT, COMMIT
        assert task.ended_s - task.started_s - task.arrival.service_s >= 0.2 - 1e-9


def test_a_fixed_map_is_no_sharing_elsewhere() -> None:
    """All tasks of a home have the responses that they would have at home, one node on."""
    arrivals = arrivals_at(3, 2.1, 600)
    moved, kept = played("static-deterministic", 3, arrivals), played("none", 3, arrivals)
    assert [task.response_s for task in moved] == pytest.approx([task.response_s for task in kept])
    assert {(task.home, task.node) for task in moved} == {("n1", "n2"), ("n2", "n3"), ("n3", "n1")}


def test_round_robin_gives_each_node_every_nth_task_of_a_home() -> None:
    arrivals = [msgspec.structs.replace(one, node="n2") for one in arrivals_at(3, 2.1, 300)]
    assert [task.node for task in played("round-robin", 3, arrivals)[:6]] == ["n2", "n3", "n1"] * 2


# -- the splits ----------------------------------------------------------------------------------------------------------

SERVICES, ARRIVALS = (4.0, 2.0, 1.0, 0.5), (0.5, 3.0, 0.25, 1.25)


def flows(rows: Sequence[Sequence[float]], arrivals: Sequence[float] = ARRIVALS) -> list[float]:
    assert all(sum(row) == pytest.approx(1.0) and min(row) >= 0.0 for row in rows)
    return [sum(rate * row[node] for rate, row in zip(arrivals, rows, strict=True)) for node in range(len(rows[0]))]


def mean_response(found: Sequence[float]) -> float:
    return sum(flow / (mu - flow) for mu, flow in zip(SERVICES, found, strict=True) if flow) / sum(found)


def test_the_optimal_split_has_equal_marginal_delays() -> None:
    """The square-root rule: on the nodes in use μ/(μ - x)² is equal, and at the others it is larger."""
    found = flows(optimal(SERVICES, ARRIVALS))
    marginal = [mu / (mu - flow) ** 2 for mu, flow in zip(SERVICES, found, strict=True)]
    used = [value for value, flow in zip(marginal, found, strict=True) if flow > 1e-9]
    assert used == pytest.approx([used[0]] * len(used))
    assert min(marginal) == pytest.approx(used[0])
    assert sum(found) == pytest.approx(sum(ARRIVALS))
    best = mean_response(found)
    for other in (proportional, nash, bargaining):
        assert mean_response(flows(other(SERVICES, ARRIVALS))) > best


def test_with_a_dear_transfer_less_moves_and_with_a_prohibitive_one_nothing() -> None:
    stable = (0.5, 1.5, 0.25, 0.25)
    kept = [sum(rate * row[home] for home, (rate, row) in enumerate(zip(stable, optimal(SERVICES, stable, cost), strict=True)))
            for cost in (0.0, 0.5, 100.0)]  # fmt: skip
    assert kept[0] < kept[1] < kept[2] == pytest.approx(sum(stable))
    found = flows(optimal(SERVICES, stable, 0.5), stable)
    marginal = [mu / (mu - flow) ** 2 for mu, flow in zip(SERVICES, found, strict=True) if flow]
    assert max(marginal) - min(marginal) == pytest.approx(0.5)  # between sources and sinks


def test_at_the_nash_equilibrium_no_home_gains_by_another_split() -> None:
    rows = nash(SERVICES, ARRIVALS)
    done = flows(rows)
    for home, rate in enumerate(ARRIVALS):
        own = [rate * share for share in rows[home]]
        free = [mu - all_ + mine for mu, all_, mine in zip(SERVICES, done, own, strict=True)]

        def cost(split: Sequence[float], free: Sequence[float] = free) -> float:
            return sum(flow / (room - flow) for flow, room in zip(split, free, strict=True))

        assert own == pytest.approx(best_reply(free, rate), abs=1e-6)
        for giver in range(4):
            for taker in range(4):
                step = min(1e-3, own[giver])
                moved = [flow - step * (node == giver) + step * (node == taker) for node, flow in enumerate(own)]
                assert cost(moved) >= cost(own) - 1e-9
    (alone,) = nash((1.0,), (0.5,))
    assert alone == (1.0,)


@pytest.mark.parametrize(("factor", "in_use"), [(1.0, 4), (0.4, 2), (0.2, 1)])
def test_the_optimal_split_without_transfer_cost_is_the_square_root_rule(factor: float, in_use: int) -> None:
    """x = μ - √μ (Σμ - λ) / Σ√μ over the nodes in use, which are those with √μ above that quotient [TT85]."""
    arrivals, used = tuple(factor * rate for rate in ARRIVALS), SERVICES[:in_use]
    level = (sum(used) - sum(arrivals)) / sum(map(math.sqrt, used))
    assert [math.sqrt(mu) > level for mu in SERVICES] == [True] * in_use + [False] * (4 - in_use)
    exact = [mu - math.sqrt(mu) * level for mu in used] + [0.0] * (4 - in_use)
    assert flows(optimal(SERVICES, arrivals), arrivals) == pytest.approx(exact)


def test_one_player_is_optimal_and_very_many_are_at_the_bargaining_solution() -> None:
    """Between them a Nash equilibrium of m equal homes has (μ - x + x/m) / (μ - x)² equal on the nodes in use [GC05]."""
    work = sum(ARRIVALS)
    (alone,) = nash(SERVICES, (work,))
    assert flows([alone], [work]) == pytest.approx(flows(optimal(SERVICES, ARRIVALS)), abs=1e-6)
    found: list[float] = []
    for homes in (3, 40):
        each = (work / homes,) * homes
        found = flows(nash(SERVICES, each), each)
        terms = [(mu - x + x / homes) / (mu - x) ** 2 for mu, x in zip(SERVICES, found, strict=True) if x > 1e-6]
        assert terms == pytest.approx([terms[0]] * len(terms), rel=1e-4)
    assert found == pytest.approx(flows(bargaining(SERVICES, ARRIVALS)), abs=0.06)


def test_two_equal_homes_at_two_equal_nodes_share_evenly_in_equilibrium() -> None:
    assert flows(nash((1.0, 1.0), (0.6, 0.6)), (0.6, 0.6)) == pytest.approx([0.6, 0.6])


def test_bargaining_gives_nodes_in_use_equal_mean_response_and_leaves_slow_ones_out() -> None:
    found = flows(bargaining(SERVICES, ARRIVALS))
    assert [mu - flow for mu, flow in zip(SERVICES, found, strict=True)] == pytest.approx([2 / 3] * 3 + [0.5])
    assert found[3] == 0.0


def test_splits_without_room_or_work_are_proportional() -> None:
    for split in (optimal, nash, bargaining):
        for arrivals in ((9.0, 0.0, 0.0, 0.0), (0.0,) * 4):
            assert split(SERVICES, arrivals) == proportional(SERVICES, arrivals)


@pytest.mark.parametrize(
    ("policy", "split"),
    [
        ("static-probabilistic", proportional),
        ("static-optimal", optimal),
        ("non-cooperative", nash),
        ("cooperative", bargaining),
    ],
)
def test_a_split_is_simulated_as_m_m_1_nodes(policy: str, split: object) -> None:
    assert callable(split)
    speeds, load = (4.0, 2.0, 1.0, 1.0), 0.5
    setup = Scenario(policy=policy, nodes=4, speeds=speeds, load=load, tasks=1, warm_up=0).setup()
    found = flows(split(speeds, tuple(setup.rates)), setup.rates)
    exact = sum(flow / (mu - flow) for mu, flow in zip(speeds, found, strict=True)) / sum(found)
    nodes: list[str] = []
    player = Replication(setup, 1)
    ended = player.cluster._ended

    def noted(task: CompletedTask) -> None:
        nodes.append(task.node)
        ended(task)

    player.cluster._ended = noted
    player.play(1500)
    player.drain()
    done = [nodes.count(f"n{number}") / 1500 for number in range(1, 5)]
    assert done == pytest.approx([flow / sum(found) for flow in found], abs=0.03)
    assert fmean(player.responses[1:]) == pytest.approx(exact, rel=0.15)
    assert player.counts().get("sender_probes_total", 0) == 0


def test_a_policy_with_knowledge_is_told_the_rates_of_a_hot_spot() -> None:
    setup = Scenario(policy="static-optimal", nodes=4, load=0.5, hot=1, tasks=1, warm_up=0).setup()
    assert isinstance(setup, Setup)
    player = Replication(setup, 1)
    player.play(1000)
    player.drain()
    moved = sum(player.remote[1:]) / 1000
    assert math.isclose(moved, 0.75, abs_tol=0.05)


def told(scenario: Scenario) -> tuple[dict[str, float], float]:
    """Work of each home and delay of a transfer as a policy with knowledge is told them, in mean slot times."""
    sender: Any = next(iter(Replication(scenario.setup(), 1).cluster.nodes.values())).state.policies.sender
    return dict(sender._known.works), sender._known.transfer


def test_a_policy_with_knowledge_is_told_the_work_of_each_home_in_a_trace() -> None:
    trace = read_trace("t", "arrival,duration,cpus,node\n0,6,1,ws1\n2,3,2,ws2\n4,6,1,ws1\n8,2,1,\n")
    asked = Scenario(policy="static-optimal", nodes=2, slots=2, trace=trace, tasks=4, warm_up=0, is_live=True)
    span_s = 8 * 4 / 3
    assert told(asked)[0] == pytest.approx({"n1": 13 / span_s, "n2": 7 / span_s})
    faster = msgspec.structs.replace(asked, load=2 * asked.offered_load)
    assert told(faster)[0] == pytest.approx({"n1": 26 / span_s, "n2": 14 / span_s})
    drawn = msgspec.structs.replace(asked, service=read_service("exp"))
    assert told(drawn)[0] == pytest.approx(dict.fromkeys(("n1", "n2"), 2.5 * fmean(trace.durations) / span_s))


def test_a_policy_with_knowledge_is_told_the_work_of_tasks_of_several_cpus() -> None:
    classes = (read_class("share=0.5 cpus=2"), read_class("share=0.5 mean=3"))
    asked = Scenario(
        policy="static-optimal", nodes=2, slots=2, load=0.5, classes=classes, transfer_s=0.5, tasks=1, warm_up=0
    )
    works, transfer = told(asked)
    assert sum(works.values()) == pytest.approx(0.5 * asked.capacity)
    assert transfer == pytest.approx(0.5 / 2.5)


@pytest.mark.parametrize(
    "preset", ["static-probabilistic", "static-optimal", "non-cooperative", "cooperative", "round-robin"]
)
def test_a_home_without_slots_splits_its_tasks_among_the_others(preset: str) -> None:
    x = Given(slots=0, peers=("y", "z"), policies=load_preset(preset), facts={"cpus": 1.0})
    offered = Counter[str]()
    for _ in range(x.node.state.config.searches_in_flight_max):
        x.submit()
        offered.update(action.dst for action in x.last if isinstance(action, Send))
    assert offered.total() == 8
    assert min(offered["y"], offered["z"]) >= (4 if preset == "round-robin" else 2)


@pytest.mark.parametrize("preset", ["static-probabilistic", "static-optimal", "non-cooperative", "cooperative"])
def test_a_split_among_nodes_without_slots_names_none(preset: str) -> None:
    splits = load_preset(preset).sender.locate
    nobody = SimpleNamespace(node="x", peers=("y",), profile=lambda _: SimpleNamespace(slots=0, speed=1.0))
    for _ in range(2):
        assert isinstance(splits(cast("Any", nobody), cast("Any", None), (), random.Random(1)), Keep)
    somebody = SimpleNamespace(
        node="x", peers=("y",), profile=lambda node: SimpleNamespace(slots=node == "y", speed=1.0)
    )
    assert isinstance(splits(cast("Any", somebody), cast("Any", None), (), random.Random(1)), Transfer)
