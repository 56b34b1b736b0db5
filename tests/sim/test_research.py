"""Sweeps, paired comparisons, precision and the Python interface."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import peerload.sim
from peerload import __version__
from peerload.cli.common.messages import CANNOT, USAGE
from peerload.cli.main import main
from peerload.cli.simulate import flags, report
from peerload.model.errors import ConfigError
from peerload.policy.registry import load_preset
from peerload.sim.outcome import Interval, Outcome, more, paired
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
        ("--sweep nodes=0", CANNOT),
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
    assert report.pairs([one, {**one, "policy": "b", "stable": False}]) == []


def test_replications_follow_the_wanted_precision() -> None:
    def found(half: float, replications: int = 4) -> Outcome:
        return Outcome({"mean_response": Interval(10.0, half)}, True, [], [], 0, 0, None, None, (1.0,) * replications)

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


def test_the_python_interface_gives_a_table() -> None:
    table = peerload.sim.run(["none", "threshold"], loads=[0.5, 0.8], nodes=3, tasks=200, replications=2)
    assert [(row["policy"], row["load"]) for row in table] == [
        (policy, load) for policy in ("none", "threshold") for load in (0.5, 0.8)
    ]
    assert len({tuple(row) for row in table}) == 1
    assert table == peerload.sim.run(["none", "threshold"], loads=[0.5, 0.8], nodes=3, tasks=200, replications=2)
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [float(row["mean_response"]) for row in rows] == [row["mean_response"] for row in table]
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
