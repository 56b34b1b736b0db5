"""Task assignment: every solver against brute force, the published example, and what is wrong with a program named."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from peerload.assign.program import Limit, Program, ProgramTask, in_order, read_program
from peerload.assign.solver import _Branches, _heuristic, cut, lower_bound, serial, solve
from peerload.cli.verbs.assign import _as_json, _lines
from peerload.model.errors import ConfigError
from peerload.wire.control import Cancel, Submit
from tests.conftest import require_program
from tests.each import each
from tests.unit.cli.fake_agent import FakeAgent, fixture_agent, peerload  # noqa: F401 -- one is a fixture
from tests.wording import Says

EXAMPLE = Path(__file__).resolve().parents[3] / "docs/examples/assign.toml"


def drawn(rng: random.Random, tasks: int, nodes: int, *, is_limited: bool) -> Program:
    def costs() -> tuple[float, ...]:
        found = [float(rng.randrange(20)) if rng.random() > 0.15 else math.inf for _ in range(nodes)]
        return tuple(found) if any(map(math.isfinite, found)) else (1.0,) * nodes

    density, most = rng.random(), rng.choice([2, 10, 40])
    pairs = [pair for pair in itertools.combinations(range(tasks), 2) if rng.random() < density]
    limits = [
        Limit(float(rng.randrange(3, 12)), rng.randrange(tasks + 1)) if is_limited else Limit() for _ in range(nodes)
    ]
    return Program(
        tuple(f"n{node}" for node in range(nodes)),
        tuple(ProgramTask(f"t{task}", costs(), rng.randrange(1, 5)) for task in range(tasks)),
        {pair: float(rng.randrange(1, most + 1)) for pair in pairs},
        tuple(limits),
    )


def by_brute_force(program: Program) -> float:
    every = itertools.product(range(len(program.nodes)), repeat=len(program.tasks))
    return min((sum(program.cost(places)) for places in every if program.fits(places)), default=math.inf)


@pytest.mark.parametrize("is_limited", [False, True])
def test_the_optimum_is_that_of_brute_force_and_the_bound_is_below_it(is_limited: bool) -> None:
    rng = random.Random(int(is_limited))
    infeasible = 0
    for _ in range(60):
        program = drawn(rng, rng.randrange(1, 7), rng.randrange(1, 4), is_limited=is_limited)
        least = by_brute_force(program)
        if math.isinf(least):
            infeasible += 1
            with pytest.raises(ConfigError, match="fits"):
                solve(program)
            continue
        found = solve(program)
        assert program.fits(found.places)
        assert found.total == pytest.approx(least)
        assert found.gap == 0.0
        assert _Branches(program, None).best() is not None
        assert lower_bound(program, least) <= least + 1e-6
        guessed = _heuristic(program)
        assert guessed is None or (program.fits(guessed) and sum(program.cost(guessed)) >= least - 1e-9)
    assert bool(infeasible) is is_limited


def test_the_largest_exact_size_is_solved_and_a_larger_one_has_a_gap() -> None:
    rng = random.Random(5)
    exact = solve(drawn(rng, 12, 5, is_limited=False))
    assert (exact.method, exact.gap) == ("branch and bound", 0.0)
    program = drawn(rng, 24, 6, is_limited=False)
    found = solve(program)
    assert found.method == "heuristic"
    assert 0 < found.bound <= found.total
    assert found.gap is not None
    assert found.gap < 0.2
    assert solve(program) == found


def test_the_bound_knows_limits() -> None:
    tasks = tuple(ProgramTask(f"t{number}", (0.0, 5.0), 2) for number in range(20))
    for limit in (Limit(tasks=10), Limit(mem_bytes=20.0), Limit(tasks=0), Limit(mem_bytes=1.0)):
        found = solve(Program(("a", "b"), tasks, {}, (limit, Limit())))
        assert found.total in (50.0, 100.0)
        assert found.gap == pytest.approx(0.0, abs=0.03)


def test_a_bound_of_nothing_makes_no_gap() -> None:
    program = read_program(EXAMPLE.read_bytes(), "assign.toml")
    found = solve(program)._replace(bound=0.0, method="heuristic")
    assert found.gap is None
    assert "%" not in "".join(_lines(program, found, {}))
    assert _as_json(program, found)["gap"] is None
    assert found._replace(execution=0.0, communication=0.0).gap == 0.0


def test_a_cut_is_the_least_set() -> None:
    rng = random.Random(3)
    for _ in range(30):
        inside, outside = ([float(rng.randrange(9)) for _ in range(5)] for _ in range(2))
        apart = {pair: float(rng.randrange(9)) for pair in itertools.combinations(range(5), 2)}

        def cost(chosen: set[int]) -> float:
            ends = sum(inside[one] if one in chosen else outside[one] for one in range(5))  # noqa: B023
            return ends + sum(value for (one, other), value in apart.items() if (one in chosen) != (other in chosen))  # noqa: B023

        subsets = [set(some) for size in range(6) for some in itertools.combinations(range(5), size)]
        assert cost(cut(inside, outside, apart)) == min(map(cost, subsets))


def test_the_published_example_has_the_published_totals() -> None:
    program = read_program(EXAMPLE.read_bytes(), "assign.toml")
    found, in_parts = solve(program), serial(program)
    assert found.method == "minimum cut"
    assert (found.total, found.execution, found.communication) == (38.0, 26.0, 12.0)
    assert [program.nodes[node] for node in found.places] == ["ws1"] * 5 + ["ws2"]
    assert in_parts is not None
    assert (in_parts.total, in_parts.execution) == (58.0, 20.0)
    limited = program._replace(limits=(Limit(tasks=3), Limit()))
    assert solve(limited).method == "branch and bound"
    assert solve(limited).total == by_brute_force(limited) > 38.0


SOUND = EXAMPLE.read_text(encoding="utf-8")


@each(
    ("right", "wrong", "key", "says"),
    [
        ("ws1 = 5, ws2 = 10", "ws1 = -5, ws2 = 10", "tasks.A.cost.ws1", "negative"),
        ("ws1 = 5, ws2 = 10", "ws1 = 5", "tasks.A.cost", "ws2"),
        ("ws1 = 5, ws2 = 10", "ws1 = inf, ws2 = inf", "tasks.A.cost", "any node"),
        ("ws1 = 5, ws2 = 10", "ws1 = 5, ws2 = nan", "tasks.A.cost.ws2", "number"),
        ("ws1 = 5, ws2 = 10", "ws1 = 5, ws2 = 1e99", "tasks.A.cost.ws2", "large"),
        ("ws1 = 5, ws2 = 10", "ws1 = 5, ws3 = 10", "tasks.A.cost.ws3", "unknown"),
        ("B = { C = 8,", "B = { A = 7, C = 8,", "communication.B.A", "asymmetric"),
        ("B = { C = 8,", "B = { B = 7, C = 8,", "communication.B.B", "the same task"),
        ("B = { C = 8,", "B = { X = 7, C = 8,", "communication.B.X", "unknown"),
        ("B = { C = 8,", "B = { C = -8,", "communication.B.C", "negative"),
        ('after = ["B", "C"]', 'after = ["B", "X"]', "tasks.E.after", "'X'"),
        ("cost = { ws1 = 5, ws2 = 10 }", 'cost = { ws1 = 5, ws2 = 10 }\nafter = ["E"]', "tasks", "one another"),
        ("tasks = 6", 'tasks = "6"', "limits.ws1.tasks", "number"),
        ('mem = "8G"', "mem = 8", "limits.ws1.mem", "unit"),
        ("[limits.ws1]", "[limits.ws9]", "limits.ws9", "unknown"),
        ('["ws1", "ws2"]', '["ws1", "ws1"]', "nodes", "different"),
        ("nodes =", "node =", "node", "unknown"),
        ("nodes =", "nodes", "assign", "TOML"),
        ("[tasks.F]", "[tasks.F]\ncolour = 1", "tasks.F.colour", "unknown"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(right: str, wrong: str, key: str, says: str) -> None:
    assert right in SOUND
    with pytest.raises(ConfigError) as caught:
        read_program(SOUND.replace(right, wrong, 1).encode(), "p.toml")
    assert (caught.value.file, caught.value.key) in (("p.toml", key), ("", key))
    assert says in str(caught.value)


def test_a_task_that_fits_nowhere_is_named() -> None:
    program = read_program(SOUND.replace("tasks = 6", "tasks = 0").encode(), "p.toml")
    with pytest.raises(ConfigError, match=Says.FITS_NOWHERE("B", "ws1")):
        solve(program)


def test_a_task_comes_after_those_that_it_waits_for() -> None:
    program = read_program(EXAMPLE.read_bytes(), "assign.toml")
    order = [task.name for task in in_order(program)]
    assert all(order.index(before) < order.index(task.name) for task in program.tasks for before in task.after)


# -- the verb ------------------------------------------------------------------------------------------------------------


def test_the_verb_tells_matrix_and_totals_and_draws() -> None:
    told = json.loads(peerload("assign", str(EXAMPLE), "--json").stdout)
    assert told["assignment"] == {name: "ws2" if name == "F" else "ws1" for name in "ABCDEF"}
    assert (told["total"], told["serial"], told["gap"]) == (38.0, 58.0, 0.0)
    text = peerload("assign", str(EXAMPLE)).stdout.decode()
    assert {tuple(line.split()) for line in text.splitlines()} >= {("A", "5", "*", "10"), ("F", "-", "4", "*")}
    drawn_ = peerload("assign", "--dot", str(EXAMPLE)).stdout.decode()
    assert drawn_.startswith("digraph")
    assert drawn_.count("color=red") == 1
    assert peerload("assign", "none.toml").returncode == 2


def test_graphviz_draws_every_task_in_the_box_of_its_node() -> None:
    dot = require_program("dot", "graphviz")
    graph = peerload("assign", "--dot", str(EXAMPLE)).stdout
    drawn_ = subprocess.run([dot, "-Tsvg"], input=graph, capture_output=True, check=True, timeout=60).stdout
    svg = ET.fromstring(drawn_)
    texts = {(text.text or "").partition(" ")[0] for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    groups = [group.get("class") for group in svg.iter("{http://www.w3.org/2000/svg}g")]
    program = read_program(EXAMPLE.read_bytes(), "assign.toml")
    assert texts >= {*program.nodes, *(task.name for task in program.tasks)}
    assert (groups.count("cluster"), groups.count("node")) == (len(program.nodes), len(program.tasks))


def test_each_task_is_submitted_to_its_node_after_those_before_it(agent: FakeAgent) -> None:
    numbers = itertools.count(1)
    agent.handlers["submit"] = lambda _request, reply: reply.ok(id=f"ws1/{next(numbers)}", placeable=True)
    done = peerload("assign", "--submit", "--json", str(EXAMPLE), agent=agent)
    assert done.returncode == 0, done.stderr
    ids = json.loads(done.stdout)["tasks"]
    asked = {request.spec.name: request for request in agent.asked(Submit)}
    assert set(asked) == set("ABCDEF")
    assert {name: one.spec.placement.node for name, one in asked.items()} == {
        **dict.fromkeys("ABCDE", "ws1"),
        "F": "ws2",
    }
    assert set(asked["E"].terms.after_ok) == {ids["B"], ids["C"]}
    assert asked["E"].spec.argv == (b"/bin/sh", b"-c", b"echo E on $PEERLOAD_NODE")


def test_what_was_submitted_before_a_refusal_is_cancelled(agent: FakeAgent) -> None:
    numbers = itertools.count(1)

    def submit(request: Submit, reply: object) -> None:
        assert hasattr(reply, "ok")
        assert hasattr(reply, "error")
        if request.spec.name == "D":
            reply.error("bad-request", "no")
        else:
            reply.ok(id=f"ws1/{next(numbers)}", placeable=True)

    agent.handlers["submit"] = submit
    agent.answer("cancel", cancelled=[], already_ended=[])
    done = peerload("assign", "--submit", str(EXAMPLE), agent=agent)
    assert done.returncode == 125
    (cancelled,) = agent.asked(Cancel)
    assert " ".join(cancelled.tasks).encode() in done.stderr
    assert len(cancelled.tasks) == len(agent.asked(Submit)) - 1
