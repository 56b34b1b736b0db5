"""`peerload sim`: what it takes, what it refuses, and how its answers look."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from peerload.cli.common.messages import CANNOT, INTERRUPTED, USAGE
from peerload.cli.main import main
from peerload.cli.simulate import flags, plot, report, work
from peerload.model.errors import ConfigError, UsageError
from peerload.sim.recorded import PUBLIC_HINTS
from peerload.sim.scenario import Scenario
from tests.each import each
from tests.support import in_short

QUICK = ["--nodes", "4", "--tasks", "100", "--replications", "2", "--workers", "1"]


def scenarios(*words: str) -> list[Scenario]:
    return flags.scenarios(flags.reader().read([*words]))


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sim", *QUICK, *words]) == 0
    return capsys.readouterr().out


# -- what it takes -----------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_help() -> None:
    (one,) = scenarios()
    assert (one.policy, one.nodes, one.slots, one.load, one.hot) == ("adaptive", 20, 1, 0.9, 0)
    assert not one.is_live
    assert one.warm_up >= one.tasks // 4


def test_policies_and_loads_make_one_scenario_each() -> None:
    found = scenarios("--compare", "none,threshold,none", "--load", "0.5:0.8:4", "--nodes", "5")
    assert [(one.policy, one.load) for one in found] == [
        (policy, load) for policy in ("none", "threshold") for load in (0.5, 0.6, 0.7, 0.8)
    ]
    assert [one.load for one in scenarios("--load", "0.5:0.95")] == [
        0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95,
    ]  # fmt: skip


def test_delays_are_in_mean_service_times_or_with_a_trace_in_seconds(tmp_path: Path) -> None:
    (one,) = scenarios("--message-delay", "0.05", "--transfer-delay", "1")
    assert (one.message_s, one.transfer_s, one.is_live) == (0.05, 1.0, True)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,duration,node\n0,5,b\n3,9,a\n7,1,c\n", encoding="utf-8")
    (one,) = scenarios("--arrivals", f"trace:{trace}", "--message-delay", "5ms", "--transfer-delay", "1m30s")
    assert (one.message_s, one.transfer_s, one.is_live) == (0.005, 90.0, True)
    assert (one.nodes, one.load, one.tasks, one.warm_up) == (3, None, 3, 0)
    (one,) = scenarios("--arrivals", f"trace:{trace}", "--tasks", "10", "--model", "reference", "--transfer-delay", "2")
    assert (one.tasks, one.is_live, one.transfer_s) == (3, False, 2.0)
    (one,) = scenarios("--service", f"trace:{trace}")
    assert (one.durations, one.load, one.mean_service_s) == ((5.0, 9.0, 1.0), 0.9, 5.0)


def test_speeds_are_a_list_or_name_their_nodes(tmp_path: Path) -> None:
    speeds = tmp_path / "speeds"
    speeds.write_text("# the old one is slow\n0.5\n1\n\n2\n", encoding="utf-8")
    assert scenarios("--nodes", "3", "--speeds", str(speeds))[0].speeds == (0.5, 1.0, 2.0)
    speeds.write_text("node,factor\nn3,1.5\n", encoding="utf-8")
    assert scenarios("--nodes", "4", "--speeds", str(speeds))[0].speeds == (1.0, 1.0, 1.5, 1.0)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,duration,node\n0,5,big\n3,9,small\n", encoding="utf-8")
    speeds.write_text("small,0.25\n", encoding="utf-8")
    assert scenarios("--arrivals", f"trace:{trace}", "--speeds", str(speeds))[0].speeds == (1.0, 0.25)


def test_a_public_trace_may_be_packed_and_have_comments_in_latin_1(tmp_path: Path) -> None:
    job = "1 0 -1 30 1 -1 -1 1 -1 -1 1 1 1 1 1 -1 -1 -1\n"
    trace = tmp_path / "trace.swf.gz"
    trace.write_bytes(gzip.compress(f"; Jörg\n{job}".encode("latin-1")))
    (one,) = scenarios("--swf", str(trace))
    assert (one.tasks, one.mean_service_s) == (1, 30.0)
    trace.write_bytes(gzip.compress(job.encode())[:-6])
    with pytest.raises(UsageError, match="cannot be read"):
        scenarios("--swf", str(trace))
    trace.write_bytes(b"")
    with pytest.raises(ConfigError) as raised:
        scenarios("--swf", str(trace))
    assert raised.value.hint == PUBLIC_HINTS["swf"]


# -- what it refuses ---------------------------------------------------------------------------------------------------


@each(
    ("words", "says"),
    [
        ("--nodes 0", "--nodes: 0 is not between 1 and 100000"),
        ("--slots 0", "--slots: 0 is not between"),
        ("--load -1", "--load: '-1' is not a load; allowed: a number above 0"),
        ("--load 0", "'0' is not a load"),
        ("--load nan", "'nan' is not a load"),
        ("--load 0.9:0.5", "'0.9:0.5' is not a range of loads"),
        ("--load 0.5:0.9:1", "2 to 100 steps"),
        ("--load 0.5:0.9:3:4", "is not a load"),
        ("--tasks 3", "--tasks: 3 is not between 10 and"),
        ("--tasks 100 --warmup 100", "--warmup 100 leaves nothing of 100 tasks: allowed: 0 to 99"),
        ("--replications 0", "--replications: 0 is not between 1 and 1000"),
        ("--seed x", "'x' is not a whole number"),
        ("--arrivals bursts", "'bursts' is not a kind of arrivals; allowed: poisson, hotspot:K"),
        ("--arrivals hotspot:0", "hotspot:K (K from 1)"),
        ("--arrivals hotspot:21", "allowed: hotspot:1 to hotspot:20"),
        ("--arrivals trace:", "'trace:' is not a kind of arrivals"),
        ("--arrivals trace:/no/such/file", "--arrivals: /no/such/file cannot be read: No such file"),
        ("--service normal", "no distribution normal: allowed: exp, det, h2:CV2 (≥ 1), bpareto:A,R"),
        ("--service h2:0.1", "allowed: exp, det"),
        ("--message-delay 50ms", "has the unit 'ms': without a trace there are no seconds"),
        ("--message-delay -1", "'-1' is not a delay"),
        ("--message-delay -5ms", "'-5ms' is not a delay; allowed: 0 to 1e+06, such as 0.05, or with a trace 50ms"),
        (
            "--policy shortest --compare none,threshold",
            "to compare all:  --compare shortest,none,threshold",
        ),
        ("--transfer-delay soon", "'soon' is not a duration"),
        ("--model ideal", "invalid choice: 'ideal'"),
        ("--compare none,,threshold", "has an empty name"),
        ("--plot curves.png", "--plot draws over loads"),
        ("--plot curves.gif --load 0.5:0.9", "allowed: a file ending in .png, .svg, .pdf"),
        ("--plot /no/such/place/curves.png --load 0.5:0.9", "/no/such/place is not an existing directory"),
        ("--csv /no/such/place/curves.csv", "/no/such/place is not an existing directory"),
    ],
)
def test_bad_input_names_the_flag_and_what_is_allowed(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *words.split()]) == USAGE
    shown = capsys.readouterr()
    assert says in shown.err
    assert not shown.out


def test_what_cannot_be_written_is_told_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerload.cli.simulate.work.run", lambda *_: pytest.fail("it was simulated"))
    picture = tmp_path / "curves.png"
    picture.mkdir()
    for flag, name, says in (
        ("--csv", "/proc/curves.csv", "No such file or directory"),
        ("--csv", str(tmp_path), "it is a directory"),
        ("--plot", "/proc/curves.png", "No such file or directory"),
        ("--plot", str(picture), "it is a directory"),
    ):
        assert main(["sim", "--load", "0.5:0.9", flag, name]) == USAGE
        assert f"sim: {flag} {name!r} cannot be written: {says}" in capsys.readouterr().err
    plot.check_writable("--csv", str(tmp_path / "new.csv"))
    assert not (tmp_path / "new.csv").exists()


def test_rows_are_saved_as_they_end_and_an_interrupted_run_reports_what_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play, left, saved = work._play, iter(range(5)), []

    def until_interrupted(*job: Any) -> Any:
        saved.append(policies())
        if next(left, None) is None:
            raise KeyboardInterrupt
        return play(*job)

    def policies() -> list[str]:
        if not (tmp_path / "some.csv").exists():
            return []
        with (tmp_path / "some.csv").open(encoding="utf-8") as file:
            return [row["policy"] for row in csv.DictReader(file)]

    monkeypatch.setattr("peerload.cli.simulate.work._play", until_interrupted)
    words = ["--compare", "none,random,threshold", "--load", "0.5", "--json", "--csv", str(tmp_path / "some.csv")]
    assert main(["sim", *QUICK, *words]) == INTERRUPTED
    shown = capsys.readouterr()
    told = json.loads(shown.out)["results"]
    assert [(one["policy"], one["replications"]) for one in told] == [("none", 2), ("random", 2), ("threshold", 1)]
    assert "3 of 3 simulations can be reported, 1 of them with fewer replications" in shown.err
    assert saved == [[], [], ["none"], ["none"], ["none", "random"], ["none", "random"]]
    assert policies() == ["none", "random", "threshold"]
    assert [file.name for file in tmp_path.iterdir()] == ["some.csv"]


def test_a_table_of_an_interrupted_run_leaves_gaps() -> None:
    told: list[dict[str, Any]] = [
        {"policy": policy, "load": load, "mean_response": mean, "ci95": None, "stable": True, "warnings": []}
        for policy, load, mean in (("none", 0.5, 2.0), ("none", 0.9, 10.0), ("adaptive", 0.9, 3.0))
    ]
    rest = {
        "nodes": 2, "slots": 1, "unit": "s", "arrivals": "poisson", "service": "exp", "tasks": 1, "replications": 1,
        "seed": 1, "model": "reference", "one_queue": None, "no_sharing": None,
    }  # fmt: skip
    rows = [line.split() for line in report.comparison_lines([one | rest for one in told])]
    assert ["0.5", "2", "-"] in rows
    assert ["0.9", "10", "3"] in rows


def test_a_file_that_turns_out_to_be_full_costs_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *QUICK, "--nodes", "2", "--csv", "/dev/full"]) == CANNOT
    shown = capsys.readouterr()
    assert "--csv /dev/full" in shown.err
    assert shown.out.startswith("adaptive on 2 nodes")


@each(
    ("text", "says"),
    [
        ("1\n2\n", "has 2 lines: 3 factors are needed"),
        ("1\n", "has 1 line: 3 factors are needed"),
        ("n1,1\nn2,2\nn1,3\n", ":3: 'n1' is the node of line 1: allowed: one factor a node"),
        ("n1,1\n2\n", ":2: '2' is not of the same kind"),
        ("1\nn2,3\n1\n", ":2: 'n2,3' is not of the same kind"),
        ("1\nn1,3\n1\n", ":2: 'n1,3' is not of the same kind"),
        ("n1,1,2\n", ":1: no node for 'n1,1,2'"),
        ("node,factor\n", "has 0 lines"),
        ("9" * 140_000, ":1: not CSV: field larger than field limit"),
        ("1\n2\n3\n4\n", ":4: no node for '4'"),
        ("1\n0\n3\n", ":2: '0' is not a factor: allowed: more than 0, at most 1000"),
        ("n1,fast\n", ":1: 'fast' is not a factor"),
        ("n9,2\n", ":1: no node for 'n9,2'"),
        ("", "has 0 lines"),
    ],
)
def test_bad_speeds_name_file_and_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = tmp_path / "speeds"
    speeds.write_text(text, encoding="utf-8")
    assert main(["sim", "--nodes", "3", "--speeds", str(speeds)]) == USAGE
    assert says in capsys.readouterr().err


def test_a_bad_preset_or_trace_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--policy", "thresold"]) == CANNOT
    assert "'threshold'" in capsys.readouterr().err
    preset = tmp_path / "mine.toml"
    preset.write_text("[reference.transfer]\nprefetsch = 1\n", encoding="utf-8")
    assert main(["sim", "--policy", str(preset), "--model", "live"]) == CANNOT
    assert "prefetsch" in capsys.readouterr().err
    preset.write_text("reference = 1\n", encoding="utf-8")
    assert main(["sim", "--policy", str(preset)]) == CANNOT
    assert "reference: " in capsys.readouterr().err
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,duration\n1,x\n", encoding="utf-8")
    assert main(["sim", "--arrivals", f"trace:{trace}"]) == CANNOT
    assert f"{trace}:2: " in capsys.readouterr().err


def test_a_trace_that_is_no_text_or_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(b"\xff\xfe\x00")
    assert main(["sim", "--arrivals", f"trace:{trace}"]) == USAGE
    assert str(trace) in capsys.readouterr().err
    monkeypatch.setattr(flags, "FILE_BYTES_MAX", 2)
    assert main(["sim", "--arrivals", f"trace:{trace}"]) == USAGE
    assert str(trace) in capsys.readouterr().err
    assert main(["sim", "--speeds", "/dev/zero"]) == USAGE
    assert "--speeds: /dev/zero " in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("peerload.cli.simulate.work.run", lambda *_: pytest.fail("it was simulated"))
    assert main(["sim", "--load", "0.5:0.9", "--plot", str(tmp_path / "curves.png")]) == CANNOT
    assert "pip install 'matplotlib>=" in capsys.readouterr().err


# -- what it says ------------------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(typed(capsys, "--json", *words))
    return found


def test_one_run_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", "threshold", "--nodes", "4", "--load", "0.5", "--seed", "7"]
    found = told(capsys, *words)
    assert (found["v"], found["policy"], found["nodes"], found["load"], found["seed"]) == (1, "threshold", 4, 0.5, 7)
    assert (found["tasks"], found["warmup"], found["replications"]) == (100, 25, 2)
    assert found["stable"] is True
    assert found["one_queue"] == pytest.approx(1.087, abs=0.001)
    assert found["no_sharing"] == 2.0
    low, high = found["intervals"]["mean_response"]
    assert (low + high) / 2 == pytest.approx(found["mean_response"], rel=1e-3) or low == 0.0
    assert len(found["homes"]) == 4
    assert set(found["intervals"]) == set(report.METRICS) <= set(found)
    text = typed(capsys, *words)
    assert "threshold on 4 nodes of 1 slot, load 0.5, arrivals poisson, service exp" in text
    assert f"{found['mean_response']:.4g}" in text
    assert "without load sharing: 2" in text


def test_the_classes_are_told_by_where_a_task_was_executed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", "threshold", "--nodes", "4", "--load", "0.9"]
    found = told(capsys, *words)
    here, away = found["executed_at_origin"], found["executed_remotely"]
    assert min(here, away) > 0
    assert here + away == found["replications"] * (found["tasks"] - found["warmup"])
    of_class = found["mean_response_executed_at_origin"], found["mean_response_executed_remotely"]
    assert min(of_class) < found["mean_response"] < max(of_class)
    text = typed(capsys, *words)
    for count, name, mean in ((here, "at origin", of_class[0]), (away, "remotely", of_class[1])):
        row = _row(text, f"executed {name}")
        assert (row[1], float(row[-4])) == (str(count), float(f"{mean:.4g}"))


def test_a_class_without_a_task_has_no_mean(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--policy", "none")
    assert (found["executed_remotely"], found["mean_response_executed_remotely"]) == (0, None)
    assert found["intervals"]["mean_response_executed_remotely"] == [None, None]
    assert _row(typed(capsys, "--policy", "none"), "executed remotely") == ["of", "0", "executed", "remotely", "-", "-"]


def _row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if name in line).split()


def test_one_is_one_and_points_stand_one_below_another(capsys: pytest.CaptureFixture[str]) -> None:
    text = typed(capsys, "--nodes", "1", "--slots", "2", "--replications", "1", "--warmup", "0")
    assert text.startswith("adaptive on 1 node of 2 slots, ")
    assert "\n1 replication of 100 tasks, seed 1, " in text
    rows = text.partition("INTERVAL\n")[2].split("\n\n")[0].splitlines()
    numbers = [row.removeprefix(row[: len("idle while a task waits")]) for row in rows]
    assert len({number.index(".") for number in numbers if "." in number.split()[0]}) == 1


def test_what_is_unstable_is_said_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--policy", "none", "--arrivals", "hotspot:1", "--tasks", "1000")
    assert found["stable"] is False
    assert found["warnings"]


def test_a_load_of_more_than_all_slots_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *QUICK, "--nodes", "2", "--load", "1.5"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("peerload: load 1.5: ")
    assert "NOT STABLE" in shown.out


@pytest.mark.long
def test_a_comparison_as_table_csv_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--compare", "none,receiver", "--nodes", "2", "--load", "0.5:0.7:3"]
    table = typed(capsys, *words).splitlines()
    assert table[3].split() == ["LOAD", "none", "receiver", "M/M/1", "M/M/2"]
    assert [line.split()[0] for line in table[4:7]] == ["0.5", "0.6", "0.7"]
    assert table[4].split()[-2:] == ["2", "1.333"]
    found = told(capsys, *words, "--csv", str(tmp_path / "curves.csv"))
    assert [(one["policy"], one["load"]) for one in found["results"]] == [
        (policy, load) for policy in ("none", "receiver") for load in (0.5, 0.6, 0.7)
    ]
    assert found["bounds"][0] == {
        "load": 0.5, "nodes": 2, "slots": 1, "one_queue": pytest.approx(1.33333), "no_sharing": 2.0,
    }  # fmt: skip
    written = (tmp_path / "curves.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(written)))
    assert [float(row["mean_response"]) for row in rows] == [one["mean_response"] for one in found["results"]]
    printed = list(csv.DictReader(io.StringIO(typed(capsys, *words, "--csv", "-"))))
    assert [row | {"command": ""} for row in printed] == [row | {"command": ""} for row in rows]


def test_a_trace_that_comes_all_at_once_has_no_load_to_be_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "array.csv"
    trace.write_text("arrival,duration,node\n5,1,a\n5,2,a\n5,3,b\n", encoding="utf-8")
    words = ["--arrivals", f"trace:{trace}", "--tasks", "10"]
    table = typed(capsys, "--compare", "none,threshold", *words)
    assert "without bound  2.333" in table
    assert "at load without bound: load without bound: more work arrives" in table
    assert ", load without bound, arrivals" in typed(capsys, *words)


def test_intervals_of_shares_end_at_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--policy", "none", "--nodes", "1", "--load", "0.95", "--tasks", "40")
    assert found["intervals"]["utilization"][1] == 1.0
    assert found["intervals"]["mean_response"][1] > 1.0


def test_policies_meet_the_same_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    """Comparing them is not left to chance: on one node all policies are the same, to the last digit."""
    found = told(capsys, "--compare", "none,threshold,adaptive", "--nodes", "1", "--load", "0.8")
    assert len({one["mean_response"] for one in found["results"]}) == 1


@pytest.mark.long
@pytest.mark.parametrize("ending", in_short([".svg", ".png", ".pdf"], 3))
def test_the_figure_is_drawn(ending: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / f"curves{ending}"
    words = ["--compare", "none,receiver", "--nodes", "6", "--load", "0.5:1.1:3", "--plot", str(picture)]
    typed(capsys, *words)
    beginning = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    content = picture.read_bytes()
    assert content.startswith(beginning)
    assert len(content) > 10_000


@pytest.mark.long
def test_the_figure_shows_curves_bounds_and_what_is_not_stable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "curves.svg"
    words = ["--compare", "none,receiver", "--nodes", "6", "--load", "0.5:1.1:3", "--plot", str(picture)]
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        typed(capsys, *words)
    text = picture.read_text(encoding="utf-8")
    for label in (
        "M/M/1: no sharing",
        "M/M/6: one queue for all",
        ">none<",
        ">receiver<",
        "none: not stable",
        ">load<",
    ):
        assert label in text


def played(policy: str, load: float, mean: float, *, stable: bool, warnings: list[str] | None = None) -> dict[str, Any]:
    return {
        "policy": policy, "load": load, "mean_response": mean, "stable": stable, "warnings": warnings or [], "ci95": 0.1,
        "arrivals": "poisson", "service": "exp",
    }  # fmt: skip


@pytest.mark.long
def test_no_line_is_drawn_to_what_is_not_stable_and_none_of_it_leaves_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_args, **_more: figures.append(self))
    results = [
        played("none", 0.5, 900.0, stable=False),
        played("none", 1.1, 800.0, stable=False),
        played("receiver", 0.5, 1.5, stable=True, warnings=["short"]),
        played("receiver", 1.1, 700.0, stable=False),
    ]
    plot.draw(str(tmp_path / "curves.svg"), scenarios("--compare", "none,receiver", "--load", "0.5:1.1:2"), results)
    axes: Any = figures[0].axes[0]
    top = axes.get_ylim()[1]
    drawn = {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}
    lines = [[place for place in drawn[name] if math.isfinite(place[1])] for name in ("none", "receiver")]
    assert lines == [[], [[0.5, 1.5]]]
    hollow = [line.get_xydata().tolist() for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert hollow == [[[0.5, top]], [[1.1, top]], [[1.1, top]]]
    assert [text.get_text() for text in axes.texts] == ["?"]
    assert {"not sure: see the table", "at the upper edge: beyond it"} <= drawn.keys()
    assert axes.get_xlim()[1] > 1.1


@pytest.mark.long
def test_no_bound_is_drawn_for_several_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_args, **_more: figures.append(self))
    made = scenarios("--policy", "none", "--load", "0.5:0.8:2", "--sweep", "nodes=2,4")
    results = [played(one.label, one.load or 0.0, 2.0, stable=True) for one in made]
    for shown in (made[:2], made):
        plot.draw(str(tmp_path / "curves.svg"), shown, results[: len(shown)])
    drawn = [[str(line.get_label()) for line in figure.axes[0].lines] for figure in figures]
    assert [any(label.startswith("M/M/") for label in labels) for labels in drawn] == [True, False]


def test_a_footnote_is_one_line_a_policy_and_kind_of_warning() -> None:
    def grew(times: float) -> str:
        return f"unfinished tasks became {times} times as many"

    full = "more work than all slots can do"
    results = [
        played("none", 0.5, 9.0, stable=False, warnings=[grew(2.5)]),
        played("none", 1.1, 9.0, stable=False, warnings=[full, grew(3.5)]),
        played("receiver", 0.5, 1.5, stable=True, warnings=["the warm-up of 500 tasks is short"]),
        played("receiver", 1.1, 9.0, stable=False, warnings=[full, grew(3.6)]),
    ]
    more = {"nodes": 1, "slots": 2, "no_sharing": None, "one_queue": None, "unit": "s", "tasks": 100, "seed": 1}
    lines = report.comparison_lines([{**one, **more, "replications": 1, "model": "live"} for one in results])
    assert lines[:2] == [
        "mean response in seconds: 1 node of 2 slots, arrivals poisson, service exp",
        "1 replication of 100 tasks, seed 1, live model",
    ]
    assert lines[-8:] == [
        "",
        "! NOT STABLE: the number depends on the length of the run",
        "  none at load 0.5, 1.1: at 1.1, unfinished tasks became 3.5 times as many",
        "  receiver at load 1.1: unfinished tasks became 3.6 times as many",
        "  none, receiver at load 1.1: more work than all slots can do",
        "",
        "? not sure:",
        "  receiver at load 0.5: the warm-up of 500 tasks is short",
    ]


def test_loads_and_infinities_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--tasks", "20", "--replications", "1", "--workers", "1", "--json", "--load", "1"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["one_queue"], found["over_one_queue"]) == (None, None)


def test_there_is_a_colour_and_a_mark_for_as_many_policies_as_a_reader_can_tell_apart() -> None:
    assert len(set(plot.COLOURS)) == len(plot.COLOURS) == len(plot.MARKERS)
