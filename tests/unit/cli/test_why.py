"""`peerload why`: what its answer looks like."""

from __future__ import annotations

import json
from typing import Any

from peerload.text.tasks import why_lines
from peerload.wire import control
from tests.unit.cli.fake_agent import FakeAgent, fixture_agent, peerload

__all__ = ["fixture_agent"]

NODES: list[dict[str, Any]] = [
    {"node": "ws1", "can_ever": False, "now": None, "reason": "no GPU", "age_s": None},
    {"node": "gpu1", "can_ever": True, "now": False, "reason": "5 of 8 GPUs busy: lab3/2 (3), ws2/9 (2)", "age_s": 0.4},
    {"node": "lab4", "can_ever": True, "now": False, "reason": 'drained: "\x1b[2Jnew\nPSU\u202e"', "age_s": 2.1},
    {"node": "new", "can_ever": None, "now": None, "reason": "its resources are not known here yet", "age_s": 1.0},
]
WAITS: dict[str, Any] = {
    "id": "ws1/43",
    "name": "big\x1b[31m.py",
    "state": "queued",
    "node": None,
    "needs": "1 cpu and 8 GPUs",
    "says": "",
    "since": 1000.0,
    "steps": [],
    "devices": [],
    "decision": None,
    "nodes": NODES,
    "could_ever": 2,
    "freshest_s": 0.4,
    "oldest_s": 2.1,
    "oldest_node": "lab4",
    "change": {"words": "with -G3", "node": "gpu1"},
    "staging": None,
    "summary": "gpu1: 5 of 8 GPUs busy",
    "array": None,
}


def test_a_reason_for_every_node(agent: FakeAgent) -> None:
    agent.answer("why", **WAITS)
    assert peerload("why", "43", agent=agent).stdout.decode().splitlines() == [
        "ws1/43 big\\x1b[31m.py needs 1 cpu and 8 GPUs. It waits: 2 of 4 nodes could ever run it, 1 may.",
        "  NODE  CAN EVER  NOW  REASON",
        "  ws1   no        -    no GPU",
        "  gpu1  yes       no   5 of 8 GPUs busy: lab3/2 (3), ws2/9 (2)",
        '  lab4  yes       no   drained: "\\x1b[2Jnew\\x0aPSU\\u202e"',
        "  new   ?         ?    its resources are not known here yet",
        "Facts: freshest 0.4 s old, oldest 2.1 s (lab4).",
        "With -G3 it would start now on gpu1.",
    ]
    assert json.loads(peerload("why", "@", "--json", agent=agent).stdout) == {"v": 1, **WAITS}
    assert [request.task for request in agent.asked(control.ExplainTask)] == ["43", "@"]


def test_what_the_policy_said() -> None:
    inputs = [{"node": "gpu1", "load": 2.0, "age_s": 0.0}, {"node": "gpu2", "load": -1.0, "age_s": 0.0}]
    decision = {"at": 1.0, "policy": "threshold", "choice": "stay", "reason": "no node accepts", "inputs": inputs}
    lines = why_lines(WAITS | {"decision": decision, "says": "it is offered to gpu1"}, 10.0)
    assert lines[1] == "  it is offered to gpu1"
    assert lines[-1] == (
        "The policy threshold said 9.0s ago, stay: no node accepts. It asked gpu1 (load 2), gpu2 (no answer)."
    )


def test_where_it_runs_and_how_it_ended() -> None:
    step = {"at": 1000.0, "state": "leased", "reason": "accepted by gpu2", "attempt": 1, "node": "gpu2"}
    runs = WAITS | {
        "nodes": [],
        "state": "running",
        "node": "gpu2",
        "says": "accepted by gpu2",
        "devices": ["GPU 1 (RTX 4090)"],
        "steps": [step],
    }
    lines = why_lines(runs, 1065.0)
    assert lines[0] == "ws1/43 big\\x1b[31m.py needs 1 cpu and 8 GPUs."
    assert lines[1] == "It is running on gpu2, for 1m05s: accepted by gpu2"
    assert lines[2] == "  with GPU 1 (RTX 4090)"
    assert lines[-1].endswith("leased  gpu2  accepted by gpu2")
    lines = why_lines(runs | {"state": "failed", "says": "exit code 3"}, 1065.0)
    assert lines[1] == "It ended on gpu2 1m05s ago, failed: exit code 3"
    lines = why_lines(runs | {"state": "held", "node": None, "says": "held by its user"}, 1065.0)
    assert lines[1] == "It is held, for 1m05s: held by its user"


def test_an_array_by_its_reasons() -> None:
    groups = [
        {"state": "queued", "reason": "waits for room", "tasks": 70},
        {"state": "done", "reason": "ended", "tasks": 30},
    ]
    array = {"id": "ws1/43", "looked_at": 101, "groups": groups, "more_groups": 1}
    lines = why_lines(WAITS | {"array": array, "id": "ws1/43.31"}, 1010.0)
    assert lines[:6] == [
        "ws1/43: 101 members",
        "       70 queued: waits for room",
        "       30 done: ended",
        "  and 1 other reason",
        "",
        "One of them, ws1/43.31:",
    ]
    assert lines[6].startswith("ws1/43.31 big")


def test_no_such_task(agent: FakeAgent) -> None:
    agent.handlers["why"] = lambda _request, reply: reply.error("no-such-task", "no such task: 9", "", "peerload ls")
    done = peerload("why", "9", agent=agent)
    assert (done.returncode, done.stderr) == (125, b"peerload: no such task: 9\n  peerload ls\n")
    assert peerload("why", "--socket", "/tmp/none/agent.sock", "9").returncode == 125
    assert peerload("why").returncode == 2


def test_what_each_node_is_to_a_task(agent: FakeAgent) -> None:
    there = [{"node": name, "state": "alive"} for name in ("ws1", "gpu1", "lab4")]
    agent.answer("nodes", nodes=there)
    agent.answer("why", **WAITS)
    lines = peerload("nodes", "--for", "43", agent=agent).stdout.decode().splitlines()
    assert lines[0].split() == ["NODE", "STATE", "CAN", "EVER", "NOW", "REASON"]
    assert lines[1].split() == ["ws1", "alive", "no", "-", "no", "GPU"]
    shown = json.loads(peerload("nodes", "--for", "43", "--json", agent=agent).stdout)["nodes"]
    assert [(node["node"], node["can_ever"]) for node in shown] == [("ws1", False), ("gpu1", True), ("lab4", True)]
    agent.answer("why", **WAITS | {"nodes": [], "state": "running", "node": "gpu1"})
    assert b"running on gpu1" in peerload("nodes", "--for", "43", agent=agent).stderr
