"""`peerload energy` and `power`: rows for people and for programs."""

from __future__ import annotations

import json
from typing import Any

from peerload.agent.views.task import usage_object
from peerload.cli.verbs import ls, nodes, show
from peerload.model.resources import Quality
from peerload.model.task import TaskRecord, TaskState, Usage
from peerload.wire import control
from tests.unit.cli.fake_agent import FakeAgent, Reply, fixture_agent, peerload  # noqa: F401 -- one is a fixture

ROW = {
    "node": "ws1", "since": 1.0, "until": 2.0, "joules": 3600.0, "wh": 1.0, "tasks_joules": 1000.0, "other_joules": 600.0,
    "idle_joules": 2000.0, "gap_s": 0.0, "quality": "measured", "scope": "package", "source": "powercap",
}  # fmt: skip


def task(
    number: int, user: str, joules: float | None, quality: str = "derived", scope: str = "package"
) -> dict[str, Any]:
    usage = {"joules": joules, "energy_quality": quality, "energy_scope": scope}
    return {"id": f"ws1/{number}", "user": user, "node": "ws2", "started_at": 1.0, "ended_at": 2.0, "usage": usage}


def rows(agent: FakeAgent, *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in peerload("energy", *words, "--json", agent=agent).stdout.splitlines()]


def test_a_row_of_a_node(agent: FakeAgent) -> None:
    agent.answer("energy", **ROW)
    assert rows(agent, "--node", "ws1") == [{"v": 1, **ROW}]
    (asked,) = agent.asked(control.Energy)
    assert asked.at == "ws1"
    text = peerload("energy", agent=agent).stdout.decode().splitlines()[1]
    assert text.split() == ["ws1", "3600", "1", "1000", "600", "2000", "0.0s", "measured", "package", "powercap"]


def test_every_text_with_an_estimate_says_so() -> None:
    usage = {"user_s": 1.0, "system_s": 0.0, "memory_bytes_max": 1 << 20, "joules": 7.0, "energy_quality": "estimated"}
    usage |= {"energy_scope": "node"}
    node = {"node": "ws1", "watts": 7.0, "watts_quality": "estimated"}
    assert "7 J estimated" in show._usage(usage)
    assert show._usage({**usage, "energy_scope": None}).endswith(", 7 J estimated")
    assert "7 J estimated" in ls._history_row({**task(1, "ann", None), "usage": usage})
    assert nodes.node_cells(node, ["WATTS"]) == ["7 estimated"]


def test_a_cancelled_task_has_what_it_used_once_that_is_known() -> None:
    used = Usage(user_s=3.0, joules=7.0, energy_quality=Quality.ESTIMATED)
    told = usage_object(TaskRecord("ws1/1", bytes(16), TaskState.CANCELLED, 1.0, ended_at=30.0, usage=used))
    assert "7 J estimated" in show._usage(told["usage"])  # type: ignore[arg-type]
    assert told.get("exit_code") is None


def test_a_cancelled_task_has_no_usage_rather_than_none_of_it() -> None:
    record = TaskRecord("ws1/1", bytes(16), TaskState.CANCELLED, 1.0, started_at=2.0, ended_at=30.0)
    told = usage_object(record)
    assert isinstance(told["usage"], dict)
    assert set(told["usage"].values()) == {None}
    assert not show._usage(told["usage"])
    assert ls._history_row({**task(1, "ann", None), **told})[7:10] == ["-", "-", "-"]


def test_nodes_shows_watts_unasked_where_a_sensor_tells_them() -> None:
    guessed, silent = {"watts": 7.0, "watts_quality": "estimated"}, {"watts": None, "watts_quality": None}
    assert "WATTS" not in nodes.headings_for([guessed, silent], is_wide=False)
    assert "WATTS" in nodes.headings_for([guessed, {"watts": 7.0, "watts_quality": "measured"}], is_wide=False)


def test_small_figures_are_shown(agent: FakeAgent) -> None:
    agent.answer("energy", **{**ROW, "joules": 0.123, "wh": 0.123 / 3600, "tasks_joules": 0.05})
    text = peerload("energy", agent=agent).stdout.decode().splitlines()[1]
    assert text.split()[1:4] == ["0.12", "0.000034", "0.050"]


def test_a_row_of_each_node_that_is_alive(agent: FakeAgent) -> None:
    agent.answer("energy", **ROW)
    names = (("ws1", "alive", True), ("ws2", "alive", False), ("ws3", "dead", False))
    agent.answer("nodes", nodes=[{"node": name, "state": state, "self": is_self} for name, state, is_self in names])
    assert len(rows(agent, "--node")) == 2
    assert [asked.at for asked in agent.asked(control.Energy)] == ["", "ws2"]


def test_nodes_that_do_not_answer_are_an_error(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[{"node": name, "state": "alive", "self": name == "ws1"} for name in ("ws1", "ws2")])

    def answer(request: control.Energy, reply: Reply) -> None:
        reply.error("unavailable", "it is away") if request.at else reply.ok(**ROW)

    agent.handlers["energy"] = answer
    done = peerload("energy", "--node", agent=agent)
    assert (done.returncode, len(done.stdout.splitlines())) == (125, 2)
    missing = [{"node": "ws2", "state": "alive", "why": "it is away"}]
    agent.answer("history", tasks=[task(1, "ann", 10.0)], truncated=False, missing=missing)
    assert peerload("energy", "--node", "--task", agent=agent).returncode == 125


def test_what_is_not_known_is_not_zero(agent: FakeAgent) -> None:
    agent.answer("energy", node="ws1", **dict.fromkeys(list(ROW)[1:]))
    text = peerload("energy", agent=agent).stdout.decode().splitlines()[1]
    assert text.split() == ["ws1", *"-" * 9]


def test_tasks_and_users(agent: FakeAgent) -> None:
    ended = [
        task(1, "ann", 10.0),
        task(2, "bob", 5.0),
        task(3, "ann", 7.0, "estimated", "package+gpu"),
        task(4, "ann", None),
    ]
    agent.answer("history", tasks=ended, truncated=False)
    assert [(row["task"], row["joules"]) for row in rows(agent, "--task")] == [
        ("ws1/1", 10.0), ("ws1/2", 5.0), ("ws1/3", 7.0), ("ws1/4", None),
    ]  # fmt: skip
    assert [row["other_joules"] for row in rows(agent, "--task")] == [0.0, 0.0, 0.0, None]
    heading, *lines = peerload("energy", "--task", agent=agent).stdout.decode().splitlines()
    assert heading.split() == ["TASK", "JOULES", "WH", "QUALITY", "SCOPE"]
    assert lines[3].split() == ["ws1/4", "-", "-", "derived", "package"]
    ann, bob = rows(agent, "--user")
    assert (ann["user"], ann["joules"], ann["quality"], ann["scope"]) == ("ann", 17.0, "estimated", "package+gpu")
    assert (bob["joules"], bob["quality"]) == (5.0, "derived")
