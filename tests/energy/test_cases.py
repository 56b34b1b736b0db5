"""The energy simulator: the public cases against their references, own ones against a closed form or a search."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerload.cli.simulate import report
from peerload.cli.simulate.flags import reader
from peerload.model.errors import ConfigError, UsageError
from peerload.sim.energy_model import play_case, read_cases
from tests.energy import fluid_model

FILE = Path(__file__).parent / "cases.json"
TEXT = FILE.read_bytes()
REFERENCE: dict[str, Any] = json.loads(TEXT)["reference"]
PUBLIC = [(case, run) for case in read_cases(TEXT, FILE.name) for run in case.runs]
GATE = {"name": "gate", "cores": 0}
LINEAR = {"cores": 10, "watts": [100, 200]}
SLEEPER = {**LINEAR, "off_w": 5, "wake_s": 30, "sleep_after_s": 60}
ENERGY = {"preset": "energy"}


def play(nodes: list[dict[str, Any]], tasks: list[dict[str, Any]], run: dict[str, Any], **case: Any) -> dict[str, Any]:
    named = [{"name": f"m{number}", **node} for number, node in enumerate(nodes)]
    tasks = [{"node": named[0]["name"], **task} for task in tasks]
    own = {"id": "own", "nodes": named, "tasks": tasks, "runs": [{"name": "run", **run}], **case}
    found = {"format": "energy-cases/1", "cases": [own]}
    (read,) = read_cases(json.dumps(found).encode(), "own.json")
    return play_case(read, read.runs[0])


def placed(result: dict[str, Any]) -> list[str]:
    return [row[2] for row in result["schedule"]]


LONG = ("stream-30-marginal", "stream-30-spread")


@pytest.mark.parametrize(
    ("case", "run"),
    [
        pytest.param(case, run, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for case, run in PUBLIC
        for name in [f"{case.id}-{run.name}"]
    ],
)
def test_public_case(case: Any, run: Any) -> None:
    found = play_case(case, run)
    for metric, wanted in REFERENCE[case.id].get(run.name, {}).items():
        if "value" in wanted:
            assert found[metric] == pytest.approx(wanted["value"], rel=wanted["tol"]), metric
        else:
            assert found[metric] <= wanted["max"], metric


# -- a second implementation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.long)], ids=["few", "many"])
def test_a_second_implementation_of_the_format_gives_the_same_schedule_and_joules(seeds: range) -> None:
    for seed in seeds:
        case = fluid_model.drawn_case(random.Random(seed))
        text = json.dumps({"format": "energy-cases/1", "cases": [case]}).encode()
        (read,) = read_cases(text, "drawn.json")
        for run, table in zip(read.runs, case["runs"], strict=True):
            found = play_case(read, run)
            schedule, joules = fluid_model.play(case, table)
            assert found["wh"] * 3600 == pytest.approx(joules), seed
            for row, wanted in zip(found["schedule"], schedule, strict=True):
                assert row == [pytest.approx(wanted[0]), pytest.approx(wanted[1]), *wanted[2:]], seed


# -- fleets of endless tasks, against every possible distribution --------------------------------------------------------


def watts_at(node: dict[str, Any], tasks: int, *, sleeps: bool) -> float:
    if not tasks and sleeps:
        return float(node["off_w"])
    steps = len(node["watts"]) - 1
    at = tasks / node["cores"] * steps
    step = min(int(at), steps - 1)
    return float(node["watts"][step] + (node["watts"][step + 1] - node["watts"][step]) * (at - step))


def least_watts(nodes: list[dict[str, Any]], tasks: int, *, sleeps: bool) -> float:
    found = {0: 0.0}
    for node in nodes:
        further: dict[int, float] = {}
        for so_far, watts in found.items():
            for count in range(min(node["cores"], tasks - so_far) + 1):
                total = watts + watts_at(node, count, sleeps=sleeps)
                further[so_far + count] = min(total, further.get(so_far + count, total))
        found = further
    return found[tasks]


def fleet(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    nodes = []
    for _ in range(rng.randint(2, 5)):
        cores = rng.choice([4, 8, 16, 24, 48])
        peak = cores * rng.uniform(3, 12)
        idle = peak * rng.uniform(0.1, 0.5)
        between = sorted(rng.uniform(idle, peak) for _ in range(9))
        nodes.append({"cores": cores, "watts": [idle, *between, peak], "off_w": rng.uniform(0, 8), "wake_s": 30})
    return nodes


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_fleet_takes_the_least_watts_that_any_distribution_takes(seed: int, *, sleeps: bool) -> None:
    nodes = fleet(seed)
    tasks = random.Random(seed).randint(1, sum(node["cores"] for node in nodes))
    found = play([GATE, *nodes], [{"count": tasks, "work_s": None}], {**ENERGY, "sleep": sleeps}, until_s=300)
    assert found["watts_at_end"] == pytest.approx(least_watts(nodes, tasks, sleeps=sleeps))


def test_a_node_may_have_any_name() -> None:
    nodes = fleet(2)
    tasks = [{"count": 20, "work_s": 100.0}]
    plain, named = (
        play([GATE, *({**node, "name": name} for node, name in zip(nodes, names, strict=False))], tasks, ENERGY)
        for names in ("abcde", ("backlog", "work", "z", "zz", "zzz"))
    )
    assert (named["makespan_s"], named["wh"]) == (plain["makespan_s"], plain["wh"])


def test_endless_tasks_that_come_in_small_numbers_stay_near_the_optimum() -> None:
    nodes = [{**node, "off_w": 5} for node in fleet(3)]
    cores = sum(node["cores"] for node in nodes)
    batches = [{"count": 1, "at_s": float(number), "work_s": None} for number in range(cores // 2)]
    found = play([GATE, *nodes], batches, ENERGY, until_s=1000)
    assert found["watts_at_end"] <= 1.1 * least_watts(nodes, cores // 2, sleeps=False)


# -- closed forms --------------------------------------------------------------------------------------------------------


def test_a_sleeping_node_wakes_for_a_task_and_sleeps_again() -> None:
    found = play([GATE, SLEEPER], [{"at_s": 100, "work_s": 50}], {**ENERGY, "sleep": True}, until_s=300)
    assert found["schedule"] == [[130.0, 180.0, "m1", None]]
    idle_w, busy_w, off_w = 100, 110, 5
    assert found["wh"] * 3600 == pytest.approx(
        60 * idle_w + 40 * off_w + 30 * idle_w + 50 * busy_w + 60 * (100 + off_w)
    )


def test_without_sleep_the_same_node_stays_idle() -> None:
    found = play([GATE, SLEEPER], [{"at_s": 100, "work_s": 50}], ENERGY)
    assert found["wh"] * 3600 == pytest.approx(100 * 100 + 50 * 110)


def test_more_tasks_than_threads_share_them_within_the_guarantee() -> None:
    node = {"cores": 4, "threads": 8, "smt_gain": 1.25, "all_core": 0.8, "speed": 2.0, "watts": [50, 100]}
    found = play([GATE, node], [{"count": 10, "work_s": 100}], {"preset": "spread", "guarantee": 0.8})
    assert found["makespan_s"] == pytest.approx(100 * 10 / (2.0 * 0.8 * 4 * 1.25))
    assert found["wh"] * 3600 == pytest.approx(found["makespan_s"] * 100)


def test_slots_bound_the_tasks_of_a_node_and_others_wait_in_their_order() -> None:
    found = play([GATE, LINEAR], [{"count": 5, "work_s": 10}], {"preset": "spread", "slots": 2})
    assert [row[0] for row in found["schedule"]] == [0.0, 0.0, 10.0, 10.0, 20.0]
    assert found["mean_response_s"] == pytest.approx((10 + 10 + 20 + 20 + 30) / 5)


def test_no_node_is_placed_above_its_tdp() -> None:
    found = play([GATE, {**LINEAR, "tdp_w": 131}], [{"count": 6, "work_s": 10}], ENERGY)
    assert [row[0] for row in found["schedule"]] == [0.0, 0.0, 0.0, 10.0, 10.0, 10.0]


def test_a_task_of_several_cores_takes_as_many_slots() -> None:
    found = play([GATE, LINEAR], [{"count": 4, "cpus": 4, "work_s": 10}], ENERGY)
    assert [row[0] for row in found["schedule"]] == [0.0, 0.0, 10.0, 10.0]
    assert found["wh"] * 3600 == pytest.approx(20 * 180)


def test_slack_says_how_much_later_a_task_may_end_where_it_costs_less() -> None:
    quick = {"cores": 4, "watts": [0, 400], "speed": 1.0}
    frugal = {"cores": 4, "watts": [0, 40], "speed": 0.75}
    at = {
        slack: placed(play([GATE, quick, frugal], [{"work_s": 10}], {**ENERGY, "slack": slack})) for slack in (0.1, 0.5)
    }
    assert at == {0.1: ["m1"], 0.5: ["m2"]}


def test_waking_counts_in_what_a_task_may_end_later() -> None:
    frugal = {**SLEEPER, "watts": [10, 20], "sleep_after_s": 0}
    tasks = [{"at_s": 10, "work_s": 20}, {"at_s": 10, "work_s": 1000}]
    found = play([GATE, LINEAR, frugal], tasks, {**ENERGY, "sleep": True})
    assert placed(found) == ["m1", "m2"]


def test_a_home_with_cores_places_by_the_policy_too() -> None:
    frugal = {"cores": 4, "watts": [0, 4]}
    found = play([LINEAR, frugal], [{"count": 6, "work_s": 10}], ENERGY)
    assert sorted(placed(found)) == ["m0", "m0", "m1", "m1", "m1", "m1"]


def test_a_home_whose_cores_sleep_still_places_its_tasks() -> None:
    tasks: list[dict[str, Any]] = [
        {"count": 8, "at_s": 10, "work_s": 100},
        {"node": "m1", "count": 4, "at_s": 55, "work_s": 100},
    ]
    nodes = [{**SLEEPER, "cores": 2, "sleep_after_s": 5}, {**SLEEPER, "cores": 3, "sleep_after_s": 5}]
    found = play(nodes, tasks, {"preset": "spread", "sleep": True})
    assert all(row[1] for row in found["schedule"])
    assert found["makespan_s"] <= 10 + 30 + 3 * 100


def test_tasks_of_two_homes_are_placed_side_by_side() -> None:
    tasks: list[dict[str, Any]] = [{"count": 5, "work_s": 10}, {"node": "m1", "count": 5, "work_s": 10}]
    found = play([GATE, {"cores": 0, "name": "m1"}, LINEAR], tasks, ENERGY)
    assert found["makespan_s"] == pytest.approx(10)


def test_of_nodes_with_equally_many_tasks_on_their_gpus_the_one_whose_cores_cost_less_is_first() -> None:
    nodes: list[dict[str, Any]] = [
        GATE,
        *({"cores": 8, "watts": [10, watts], "gpus": 1, "gpu_static_w": 5} for watts in (90, 50)),
    ]
    task = {"count": 3, "host_s": 1, "gpu_s": 10}
    assert placed(play(nodes, [task], {**ENERGY, "gpu_share": "time"})) == ["m2", "m1", "m2"]


@pytest.mark.parametrize(
    ("run", "ends_s"),
    [
        ({"gpu_share": "exclusive"}, 45.0),
        ({"gpu_share": "time", "gpu_tasks_max": 3}, 5 + 30.0),
        ({"gpu_share": "mps", "gpu_tasks_max": 3}, 5 + 10 * 1.5),
        ({"gpu_share": "mps", "gpu_tasks_max": 3, "gpu_pct": 25}, 5 + 20.0),
        ({"gpu_share": "mps", "gpu_tasks_max": 2}, 15 + 15.0),
    ],
)
def test_modes_of_sharing_a_gpu(run: dict[str, Any], ends_s: float) -> None:
    node = {"cores": 8, "watts": [0, 0], "gpus": 1, "gpu_static_w": 50}
    task = {"count": 3, "host_s": 5, "gpu_s": 10, "sm_share": 0.5, "gpu_j": 300}
    found = play([GATE, node], [task], {"preset": "spread", **run})
    assert found["makespan_s"] == pytest.approx(ends_s)
    assert found["wh"] * 3600 == pytest.approx(50 * ends_s + 3 * 300)


@pytest.mark.parametrize(
    ("run", "ends_s", "wh"),
    [
        ({"gpu_share": "time", "gpu_tasks_max": 3}, 509.28, 46.649),
        ({"gpu_share": "time", "gpu_tasks_max": 20}, 334.94, 34.986),
        ({"gpu_share": "mps", "gpu_tasks_max": 20}, 170.94, 24.014),
        ({"gpu_share": "mps", "gpu_tasks_max": 2}, 443.50, 42.249),
        ({"gpu_share": "mps", "gpu_tasks_max": 3}, 346.38, 35.751),
    ],
)
def test_a_task_goes_to_the_card_with_the_fewest(run: dict[str, Any], ends_s: float, wh: float) -> None:
    """The published job, by a model of our own: with three on a card the last four of 40 go two and two."""
    (t2,) = (case for case, one in PUBLIC if (case.id, one.name) == ("t2", "exclusive"))
    (read,) = read_cases(json.dumps({"format": "energy-cases/1", "cases": [{
        **msgspec.to_builtins(t2), "runs": [{"name": "run", "preset": "spread", **run}],
    }]}).encode(), "own.json")  # fmt: skip
    found = play_case(read, read.runs[0])
    assert (found["makespan_s"], found["wh"]) == (pytest.approx(ends_s, rel=1e-4), pytest.approx(wh, rel=1e-4))


def test_what_may_start_later_starts_in_the_cheapest_hours_that_remain() -> None:
    price = [[0, 300], [3600, 100], [7200, 200], [10800, 50]]
    node = {"cores": 10, "watts": [0, 3.6e6]}
    tasks = [{"work_s": 3600, "slack_s": slack_s} for slack_s in (0, 1800, 5400, 7200, 20_000)]
    found = play([GATE, node], tasks, {**ENERGY, "defer": True}, price=price)
    assert [row[0] for row in found["schedule"]] == [0, 1800, 3600, 3600, 10800]
    assert (found["price"], found["late"]) == (pytest.approx((300 + 200 + 100 + 100 + 50) * 0.1 * 3600), 0)
    at_once = play([GATE, node], tasks, ENERGY, price=price)
    assert at_once["price"] == pytest.approx(5 * 300 * 0.1 * 3600)


def test_what_has_not_ended_when_the_case_ends_counts_with_what_it_took() -> None:
    found = play([GATE, LINEAR], [{"work_s": 100}, {"at_s": 5, "work_s": 2}], ENERGY, until_s=50)
    assert [row[:2] for row in found["schedule"]] == [[0.0, 50.0], [5.0, 7.0]]
    assert found["mean_response_s"] == pytest.approx(2)
    assert found["wh"] * 3600 == pytest.approx(50 * 110 + 2 * 10)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_stream_without_sleep_never_takes_more_than_spread(load: float) -> None:
    rng, at_s, each = random.Random(1), 0.0, []
    nodes = fleet(4)
    for _ in range(200):
        at_s += rng.expovariate(load * sum(node["cores"] for node in nodes) / 60)
        each.append([at_s, 60 * rng.uniform(0.5, 1.5)])
    found = {preset: play([GATE, *nodes], [{"each": each}], {"preset": preset}) for preset in ("spread", "energy")}
    assert found["energy"]["joules_per_task"] < found["spread"]["joules_per_task"]
    assert found["energy"]["mean_slowdown"] <= 1.02


# -- bad input -----------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "id": "a",
    "nodes": [{"name": "n", "cores": 2, "watts": [1, 2]}],
    "tasks": [{"node": "n", "work_s": 1}],
    "runs": [{"name": "r", "preset": "energy"}],
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": []}, "nodes"),
        ({"nodes": [{"name": "n", "cores": 0}]}, "no node with cores"),
        ({"nodes": [{"name": "n", "cores": 2, "watts": [1]}]}, "watts"),
        ({"nodes": [{"name": "n", "cores": 2, "watts": [2, 1]}]}, "falls"),
        ({"nodes": [{"name": "n", "cores": 2, "threads": 1, "watts": [1, 2]}]}, "threads"),
        ({"nodes": [{"name": "n", "cores": 2, "watts": [5, 9], "tdp_w": 4}]}, "tdp_w"),
        ({"nodes": [{"name": "n", "cores": 2, "watts": [1, 2], "colour": 1}]}, "colour"),
        ({"nodes": [GOOD["nodes"][0], GOOD["nodes"][0]]}, "two nodes"),
        ({"tasks": [{"node": "x", "work_s": 1}]}, "no node 'x'"),
        ({"tasks": [{"node": "n"}]}, "either work_s"),
        ({"tasks": [{"node": "n", "work_s": 1, "gpu_s": 1}]}, "either work_s"),
        ({"tasks": [{"node": "n", "work_s": -1}]}, "work_s"),
        ({"tasks": [{"node": "n", "work_s": None}]}, "until_s"),
        ({"tasks": [{"node": "n", "each": [[0, 1]], "work_s": 1}]}, "each"),
        ({"tasks": [{"node": "n", "cpus": 3, "work_s": 1}]}, "no node can ever run"),
        ({"tasks": [{"node": "n", "host_s": 1, "gpu_s": 1}]}, "no node can ever run"),
        ({"runs": [{"name": "r", "preset": "fastest"}]}, "no preset"),
        ({"runs": [{"name": "r", "preset": "energy", "guarantee": 0}]}, "guarantee"),
        ({"runs": [{"name": "r", "preset": "energy", "defer": True}]}, "price"),
        ({"price": [[10, 1], [5, 1]]}, "ascend"),
    ],
)
def test_a_case_that_cannot_be_played_is_refused_with_the_reason(changes: dict[str, Any], says: str) -> None:
    text = json.dumps({"format": "energy-cases/1", "cases": [{**GOOD, **changes}]}).encode()
    with pytest.raises(ConfigError) as refused:
        read_cases(text, "bad.json")
    assert says in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"format": "energy-cases/2", "cases": []}', b'{"cases": [NaN]}'])
def test_a_file_of_another_format_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        read_cases(text, "bad.json")


def test_a_file_is_played_and_its_results_stand_beside_the_published_ones(tmp_path: Path) -> None:
    cases = json.loads(TEXT)
    cases["cases"] = [case for case in cases["cases"] if case["id"] in ("t1-unequal", "t2")]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    found = report.energy_results(reader().read(["--energy", str(path)]))
    assert {(case, run) for case, runs in found.items() for run in runs} >= report.PUBLISHED.keys()
    keys = "makespan_s wh joules_per_task mean_response_s mean_slowdown watts_at_end price late schedule"
    assert all(list(result) == keys.split() for runs in found.values() for result in runs.values())
    rows = {tuple(line.split()[:2]): line.split() for line in report.energy_lines(found)}
    for name, printed in report.PUBLISHED.items():
        assert [float(word) for word in rows[name][-2:]] == list(printed)
    others = (
        "--nodes 3",
        "--parquet x",
        "--loads 0.1:0.9:0.1",
        "--swf x",
        "--slots 2",
        "--class share=1",
        "--head-cost 1",
    )
    for other in others:
        with pytest.raises(UsageError, match=other.split()[0]):
            report.energy_results(reader().read(["--energy", str(path), *other.split()]))
