from __future__ import annotations

import argparse
import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from peerload.cli.common.options import past_instant
from peerload.wire import control
from tests.each import each
from tests.unit.cli.fake_agent import FakeAgent, Reply, fixture_agent, peerload  # noqa: F401 -- one is a fixture


def task(number: int, submitted_at: float, duration_s: float | None, **more: Any) -> dict[str, Any]:
    ended_at = submitted_at + 1.0 + (duration_s or 0.0)
    return {
        "id": f"ws1/{number}", "name": "work", "user": "", "state": "done", "node": "ws2", "home": "ws1", "cpus": 1.0,
        "gpus": 0, "submitted_at": submitted_at, "started_at": submitted_at + 1.0, "ended_at": ended_at, "exit_code": 0,
        "signal": None, "duration_s": duration_s, "waited_s": 1.0,
        "usage": {"user_s": 1.5, "system_s": 0.25, "memory_bytes_max": 3 << 20},
    } | more  # fmt: skip


PAST = [
    task(1, 1000.0, 2.5),
    task(2, 1000.25, None, state="cancelled"),
    task(3, 999.0, 0.0000001, cpus=0.5),
    task(4, 2000.125, 3600.0, cpus=4.0, gpus=2),
]


def has(agent: FakeAgent, *parts: list[dict[str, Any]], truncated: bool = False) -> None:
    def history(_request: control.History, reply: Reply) -> None:
        for part in parts[:-1]:
            reply.more(tasks=part)
        reply.ok(tasks=parts[-1], truncated=truncated)

    agent.handlers["history"] = history


def test_a_list_for_people_and_for_programs(agent: FakeAgent) -> None:
    has(agent, PAST[:2], [PAST[3] | {"user": "somebody-else"}], truncated=True)
    done = peerload("history", "--since", "1970-01-02", "--limit", "3", agent=agent)
    heading, first, second = done.stdout.decode().splitlines()
    assert heading.split() == [
        "ID",
        "NAME",
        "STATE",
        "NODE",
        "ENDED",
        "WAITED",
        "RAN",
        "CPU",
        "MEMORY",
        "ENERGY",
        "EXIT",
    ]
    assert first.split()[-6:] == ["2.5s", "1.8s", "3", "MiB", "-", "0"]
    assert second.split()[-4:] == ["-", "-", "-", "0"]
    assert b"only the newest 3" in done.stderr
    assert b"1 task of other users" in done.stderr
    asked, again = agent.asked(control.History)
    assert (asked.limit, asked.oldest_first, asked.own, again.own) == (3, False, False, True)
    used = {"gpu_memory_bytes_max": 3 << 30, "gpu_model": "NVIDIA A100"}
    has(agent, [PAST[0], PAST[3] | {"usage": PAST[3]["usage"] | used}])
    heading, without, on_gpus = peerload("history", agent=agent).stdout.decode().splitlines()
    assert heading.endswith("EXIT  GPUS  GPU MEM  GPU")
    assert without.split()[-4:] == ["0", "-", "-", "-"]
    assert on_gpus.split()[-6:] == ["0", "2", "3", "GiB", "NVIDIA", "A100"]
    has(agent, PAST[:2], [PAST[3] | {"user": "somebody-else"}], truncated=True)
    assert 0 < asked.since < 3 * 86_400
    told = json.loads(peerload("history", "--json", "--all", agent=agent).stdout)
    assert [one["id"] for one in told["tasks"]] == ["ws1/1", "ws1/2", "ws1/4"]
    assert told["truncated"] is True


def test_a_trace_as_csv(agent: FakeAgent, tmp_path: Path) -> None:
    has(agent, PAST[:2], PAST[2:])
    done = peerload("history", "--export", "-", agent=agent)
    assert done.stdout == (
        b"arrival,duration,cpus,gpus,node\n0,2.5,1,0,ws1\n0,0.000001,0.5,0,ws1\n1000.125,3600,4,2,ws1\n"
    )
    assert b"3 tasks written; 1 that never ran are left out" in done.stderr
    (asked,) = agent.asked(control.History)
    assert (asked.limit, asked.oldest_first) == (None, True)
    path = tmp_path / "past.csv"
    path.write_text("what was here before")
    assert peerload("history", "--export", str(path), agent=agent).stdout == b""
    assert path.read_bytes() == done.stdout
    assert [row["node"] for row in csv.DictReader(io.StringIO(path.read_text()))] == ["ws1"] * 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["past.csv"]


def test_a_trace_as_json_lines(agent: FakeAgent, tmp_path: Path) -> None:
    has(agent, PAST)
    path = tmp_path / "past.jsonl"
    told = json.loads(peerload("history", "--json", "--export", str(path), agent=agent).stdout)
    assert told == {"v": 1, "file": str(path), "tasks": 3, "left_out": 1}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1] == {"arrival": 1000.125, "duration": 3600.0, "cpus": 4.0, "gpus": 2, "node": "ws1"}


def test_a_trace_of_the_cluster_is_in_order_and_names_who_did_not_answer(agent: FakeAgent, tmp_path: Path) -> None:
    other = [task(1, 1000.5, 4.0, home="ws2"), task(2, 1500.0, 1.0, home="ws2")]
    other += [task(3, 1500.0, 1.0, home="a,b"), task(4, 1500.0, 1.0, home="ws2", cpus="all")]
    missing = [{"node": "ws3", "state": "dead", "why": "it was last heard of 60 s ago (dead)"}]

    def history(_request: control.History, reply: Reply) -> None:
        reply.more(tasks=other)
        reply.ok(tasks=PAST, truncated=False, missing=missing)

    agent.handlers["history"] = history
    done = peerload("history", "--cluster", "--export", "-", agent=agent)
    assert done.returncode == 125
    assert b"without the tasks of ws3" in done.stderr
    assert b"5 tasks written; 3 that" in done.stderr
    assert [row["node"] for row in csv.DictReader(io.StringIO(done.stdout.decode()))] == [
        "ws1", "ws1", "ws2", "ws2", "ws1"
    ]  # fmt: skip
    arrivals = [float(row["arrival"]) for row in csv.DictReader(io.StringIO(done.stdout.decode()))]
    assert arrivals == [0.0, 1.0, 1.5, 501.0, 1001.125]
    (asked,) = agent.asked(control.History)
    assert (asked.cluster, asked.oldest_first, asked.limit) == (True, True, None)
    path = tmp_path / "past.csv"
    done = peerload("history", "--cluster", "--limit", "2", "--export", str(path), "--json", agent=agent)
    told = json.loads(done.stdout)
    assert (done.returncode, told["tasks"], told["missing"]) == (125, 2, missing)
    missing.clear()
    assert peerload("history", "--cluster", "--export", str(path), agent=agent).returncode == 0


@pytest.mark.long
def test_the_past_is_played_again_also_if_it_came_all_at_once(agent: FakeAgent, tmp_path: Path) -> None:
    for name, apart_s in (("apart", 0.5), ("at-once", 0.0)):
        has(agent, [task(number, 1000.0 + number * apart_s, 1.0) for number in range(200)])
        path = tmp_path / f"{name}.csv"
        exported = peerload("history", "--export", str(path), agent=agent)
        assert exported.returncode == 0
        hint = exported.stderr.decode().splitlines()[-1]
        assert hint == f"  replay them:  peerload sim --arrivals trace:{path}", "with the durations they had"
        done = peerload(*hint.split()[3:], "--policy", "adaptive", "--nodes", "3")
        assert done.returncode == 0, done.stderr
        assert b"mean response" in done.stdout


@each(
    ("words", "says"),
    [
        (("--export", "past.txt"), b".csv or .jsonl"),
        (("--export", "-", "--json"), b".jsonl"),
        (("--since", "yesterday"), b"'yesterday'"),
        (("--since", "zz"), b"or a day or moment: 2026-11-20, 2026-11-20T14:30"),
        (("--since", "2026-13-01"), b"2026-11-20T14:30"),
        (("--limit", "0"), b"not between"),
    ],
)
def test_what_makes_no_sense_is_refused(agent: FakeAgent, words: tuple[str, ...], says: bytes) -> None:
    done = peerload("history", *words, agent=agent)
    assert (done.returncode, says in done.stderr) == (2, True)
    assert agent.requests == []


def test_a_trace_that_cannot_be_written_leaves_nothing(agent: FakeAgent, tmp_path: Path) -> None:
    done = peerload("history", "--export", str(tmp_path / "gone" / "past.csv"), agent=agent)
    assert (done.returncode, b"past.csv cannot be written" in done.stderr) == (125, True)
    agent.handlers["history"] = lambda _request, reply: reply.hang_up()
    done = peerload("history", "--export", str(tmp_path / "past.csv"), agent=agent)
    assert done.returncode == 125
    assert list(tmp_path.iterdir()) == []


def test_moments() -> None:
    assert past_instant("2h") == pytest.approx(time.time() - 7200, abs=60)
    assert past_instant("2026-11-20T14:30:00+00:00") == 1795185000.0
    assert past_instant("1000000000s") >= 0.0
    with pytest.raises(argparse.ArgumentTypeError):
        past_instant("5")
