"""Sweeps, paired comparisons, precision and the Python interface."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import peerload.sim
from peerload import __version__
from peerload.cli.common.messages import CANNOT, USAGE
from peerload.cli.main import main
from peerload.cli.simulate import flags, report
from peerload.model.errors import ConfigError
from peerload.policy.registry import load_preset
from peerload.sim.outcome import Interval, Outcome, alike, more, paired, warned
from peerload.sim.scenario import Scenario
from tests.each import each
from tests.wording import Says

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--nodes", "3", "--tasks", "100", "--replications", "2", "--workers", "1"]


def scenarios(*words: str) -> list[Scenario]:
    return flags.scenarios(flags.reader().read([*words]))


def test_a_sweep_makes_a_scenario_of_each_combination() -> None:
    found = scenarios(
        "--policy", "threshold", "--sweep", "threshold=1..3", "--sweep", "nodes=4,5", "--loads", "0.5:0.95:0.2"
    )
    assert [one.load for one in found[:3]] == [0.5, 0.7, 0.9]
    assert len(found) == 3 * 2 * 3
    assert {(one.label, one.nodes) for one in found} == {
        (f"threshold[threshold={value},nodes={nodes}]", nodes) for value in (1, 2, 3) for nodes in (4, 5)
    }
    (one,) = scenarios("--policy", "threshold", "--sweep", "threshold=1.5")
    transfer: Any = one.setup().policies.transfer
    assert transfer.threshold == 1.5


def test_a_changed_parameter_holds_in_the_reference_model_too() -> None:
    for is_reference in (False, True):
        preset: Any = load_preset("adaptive", is_reference=is_reference, changes=[("prefetch", 3)])
        assert preset.transfer.prefetch == 3
        central: Any = load_preset("central-jsq", is_reference=is_reference, changes=[("queue", "head")])
        assert central.sender.queue == "head"
    with pytest.raises(ConfigError, match=r"location\.sender\.probes, location\.receiver\.probes"):
        load_preset("symmetric", changes=[("probes", 2)])
    with pytest.raises(ConfigError, match=Says.NO_PARAMETER()):
        load_preset("symmetric", changes=[("patience", 2)])


@each(
    ("words", "code"),
    [
        ("--sweep threshold", USAGE),
        ("--sweep threshold=5..1", USAGE),
        ("--sweep threshold=1..x", USAGE),
        ("--sweep nodes=0", USAGE),
        ("--sweep nodes=0..2", USAGE),
        ("--sweep nodes=2.5", USAGE),
        ("--sweep head_cost=-1,2", USAGE),
        ("--sweep message-delay=soon", USAGE),
        ("--sweep threshold=1..2 --sweep threshold=3..4", USAGE),
        ("--sweep patience=3", CANNOT),
        ("--loads 0.9:0.5:0.1", USAGE),
        ("--loads 0.5:0.9:0.1 --load 0.5", USAGE),
        ("--precision 0", USAGE),
        ("--precision many", USAGE),
    ],
)
def test_a_mistake_in_a_sweep_is_refused(words: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *words.split()]) in (code, USAGE)
    assert words.split(maxsplit=1)[0] in capsys.readouterr().err or code == CANNOT


def test_policies_are_compared_in_pairs_and_the_csv_says_where_it_comes_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*QUICK, "--policy", "none,adaptive", "--load", "0.8", "--replications", "3"]
    assert main(["sim", *words, "--json", "--csv", str(tmp_path / "out.csv")]) == 0
    told = json.loads(capsys.readouterr().out)
    (pair,) = told["paired"]
    assert (pair["better"], pair["than"]) == ("adaptive", "none")
    means = [one["means"] for one in told["results"]]
    assert pair["percent"] == pytest.approx(100 * paired(means[1], means[0]).value, abs=0.01)
    assert pair["low"] < pair["percent"] < pair["high"]
    (row, _) = csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text()))
    assert (row["version"], row["seed"]) == (__version__, "1")
    assert row["command"].startswith("peerload sim --nodes 3")
    assert main(["sim", *words]) == 0
    assert "adaptive is better than none by" in capsys.readouterr().out


def test_pairs_share_chance_and_so_are_narrower_than_each() -> None:
    base = [2.0, 4.0, 8.0]
    pair = paired([0.9 * mean for mean in base], base)
    assert pair.value == pytest.approx(0.1)
    assert pair.half == pytest.approx(0.0)
    one = {"policy": "a", "load": 0.5, "nodes": 3, "stable": True, "means": base}
    assert report.pairs([one, {**one, "policy": "b", "nodes": 4}]) == []  # other tasks
    assert report.pairs([one, {**one, "policy": "b", "tasks": 400}]) == []
    assert report.pairs([one, {**one, "policy": "b", "stable": False}]) == []


def test_a_sweep_takes_flags_as_they_are_spelled_and_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one.message_s for one in scenarios("--sweep", "message-delay=0,0.5")] == [0.0, 0.5]
    assert main(["sim", "--sweep", "patience=3"]) == CANNOT
    assert "message_delay" in capsys.readouterr().err


def test_a_public_trace_is_read_for_each_number_of_slots(tmp_path: Path) -> None:
    trace = tmp_path / "t.swf"
    trace.write_text("".join(f"1 {cpus} -1 30 {cpus} {'-1 ' * 5}1 {'-1 ' * 7}\n" for cpus in (1, 4)), encoding="utf-8")
    found = scenarios("--swf", str(trace), "--sweep", "slots=1,4")
    assert [(one.slots, one.tasks) for one in found] == [(1, 1), (4, 2)]


def test_bounds_belong_to_a_load_and_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", *QUICK, "--policy", "none", "--load", "0.5", "--sweep", "nodes=1,2"]
    assert main([*words, "--json"]) == 0
    bounds = json.loads(capsys.readouterr().out)["bounds"]
    assert [(one["nodes"], one["no_sharing"], one["one_queue"]) for one in bounds] == [
        (1, 2.0, 2.0), (2, 2.0, pytest.approx(4 / 3, rel=1e-5)),
    ]  # fmt: skip
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "M/M" not in told
    assert "1 node " not in told


def outcome_of(half: float = 0.1, replications: int = 4, *, is_stable: bool = True) -> Outcome:
    interval = {"mean_response": Interval(10.0, half)}
    return Outcome(interval, is_stable, [], [], 0, 0, None, None, (1.0,) * replications)


def test_stable_scenarios_are_played_as_long_as_the_longest_with_their_workload() -> None:
    words = ["--compare", "none,threshold,receiver,adaptive", "--load", "0.8"]
    first = scenarios(*words)[0]
    lengths = {"none": 8000, "threshold": 3000, "receiver": 9000, "adaptive": 1000}
    made = [msgspec.structs.replace(first, policy=policy, tasks=tasks) for policy, tasks in lengths.items()]
    made[0] = msgspec.structs.replace(made[0], warm_up=2000)
    found = {index: (one, outcome_of(is_stable=one.policy != "receiver")) for index, one in enumerate(made)}
    ((index, one),) = alike(found).items()
    assert (index, one.policy, one.tasks, one.warm_up) == (1, "threshold", 8000, 2000), "8 times as many cost too much"


def test_the_table_says_that_lengths_differ() -> None:
    told = {"policy": "a", "load": 0.5, "nodes": 3, "stable": True, "means": [2.0, 4.0], "tasks": 100}
    (*_, last) = report._paired([told, {**told, "policy": "b", "tasks": 400}])
    assert last.endswith("--tasks 400")
    assert all("--tasks" not in line for line in report._paired([told, {**told, "policy": "b"}]))


def test_a_precision_that_is_not_reached_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags, "REPLICATIONS_MAX", 5)
    assert main(["sim", *QUICK, "--policy", "none", "--precision", "0.5%", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["replications"] == 5
    reached = f"{100 * told['ci95'] / told['mean_response']:.2g}"
    assert told["warnings"][-1] == Says.IMPRECISE("0.5", reached)
    assert warned(outcome_of(0.1), 0.01).warnings == []
    assert len(warned(outcome_of(float("inf")), 0.01).warnings) == 1


def test_flags_of_a_head_node_are_noted_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for policy, is_noted in (("none", True), ("none,central-fcfs", False)):
        assert main(["sim", *QUICK, "--policy", policy, "--head-cost", "0.01"]) == 0
        assert ("--head-cost" in capsys.readouterr().err) is is_noted


def test_replications_follow_the_wanted_precision() -> None:
    found = outcome_of
    assert more(found(0.05), 0.01, 1000) == 4
    assert more(found(0.2), 0.01, 1000) == 16
    assert more(found(9.0), 0.01, 1000) == 32
    assert more(found(9.0), 0.01, 20) == 20
    assert more(found(float("inf"), 1), 0.01, 1000) == 2


def test_a_wanted_precision_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--nodes",
        "2",
        "--tasks",
        "200",
        "--workers",
        "1",
        "--load",
        "0.3",
        "--policy",
        "none",
        "--precision",
        "12%",
    ]
    assert main(["sim", *words, "--replications", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ci95"] <= 0.12 * told["mean_response"]
    assert told["replications"] == len(told["means"]) > 2


@each(
    ("changed", "key"),
    [
        ({"nodes": 0}, "nodes"),
        ({"slots": 0}, "slots"),
        ({"loads": -0.5}, "load"),
        ({"loads": 0}, "load"),
        ({"loads": float("nan"), "tasks": None}, "load"),
        ({"replications": 0}, "replications"),
        ({"tasks": 0}, "tasks"),
        ({"tasks": 10, "warm_up": 10}, "warm_up"),
        ({"speeds": (1.0,)}, "speeds"),
        ({"speeds": (1.0, 0.0, 2.0)}, "speeds"),
        ({"hot": 7}, "hot"),
        ({"message_s": -1.0}, "message_s"),
        ({"head_down": (1.0,)}, "head_down"),
        ({"service": "normal"}, "service"),
    ],
)
def test_the_python_interface_refuses_values_out_of_range(changed: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        peerload.sim.run("none", **{"nodes": 3, "tasks": 20, "replications": 1, **changed})
    assert raised.value.key == key


def test_the_python_interface_gives_a_table() -> None:
    table = peerload.sim.run(["none", "threshold"], loads=[0.5, 0.8], nodes=3, tasks=200, replications=2)
    assert [(row["policy"], row["load"]) for row in table] == [
        (policy, load) for policy in ("none", "threshold") for load in (0.5, 0.8)
    ]
    assert len({tuple(row) for row in table}) == 1
    assert table == peerload.sim.run(["none", "threshold"], loads=[0.5, 0.8], nodes=3, tasks=200, replications=2)
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [float(row["mean_response"]) for row in rows] == [row["mean_response"] for row in table]
    assert rows[0]["version"] == __version__
    (drawn,) = peerload.sim.run("none", loads=0.5, nodes=3, tasks=100, replications=1, service="det")
    assert drawn["mean_response"] != table[0]["mean_response"]
    assert table._repr_html_().count("<tr>") == 5
    (changed,) = peerload.sim.run("threshold", loads=0.5, nodes=3, tasks=100, changes=(("threshold", 1.0),))
    assert changed["policy"] == "threshold[threshold=1]"


def test_the_policy_of_the_page_can_be_written_and_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/ten-minutes.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for command in re.findall(r"^\$ peerload (.*)$", page, re.MULTILINE):
        assert main(command.replace("--tasks 1000", "--tasks 50 --workers 1").split()) == 0, capsys.readouterr().err
    assert "mine.toml[tries=3]" in (tmp_path / "mine.csv").read_text()
    (program,) = re.findall(r"^```python\n(import peerload.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(program.replace("tasks=500", "tasks=50"), "page", "exec"), {})
    assert "('mine.toml', " in capsys.readouterr().out


def test_a_parquet_file_has_the_rows_of_the_csv_and_says_where_it_comes_from(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    words = ["--policy", "none,threshold", *QUICK, "--seed", "7"]
    files = tmp_path / "out.parquet", tmp_path / "out.csv"
    assert main(["sim", *words, "--parquet", str(files[0]), "--csv", str(files[1])]) == 0
    table = parquet.read_table(files[0])
    rows = list(csv.DictReader(io.StringIO(files[1].read_text())))
    assert [row["policy"] for row in table.to_pylist()] == ["none", "threshold"]
    assert [row["mean_response"] for row in table.to_pylist()] == [float(row["mean_response"]) for row in rows]
    assert table.column_names == list(rows[0])
    metadata = table.schema.metadata
    assert (metadata[b"peerload.seed"], metadata[b"peerload.version"]) == (b"7", __version__.encode())
    assert metadata[b"peerload.command"].startswith(b"peerload sim --policy none,threshold ")


def test_without_pyarrow_a_parquet_file_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("peerload.cli.simulate.work.run", lambda *_: pytest.fail("it was simulated"))
    assert main(["sim", *QUICK, "--parquet", str(tmp_path / "out.parquet")]) == CANNOT
    assert "pip install 'pyarrow" in capsys.readouterr().err
