"""Members of arrays as rows of `ls`."""

from __future__ import annotations

from typing import Any

from peerload.cli.array_rows import gathered, ranges


def task(name: str, state: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "state": state, "name": "x", "argv": ["x"], "reason": "", "node": "n1"} | more


def test_what_waits_or_is_done_is_one_row_and_what_runs_or_failed_is_not() -> None:
    tasks = [
        task("n1/1", "done"),
        task("n1/2.1", "done", started_at=5.0, ended_at=9.0, node="n2"),
        task("n1/2.2", "done", started_at=3.0, ended_at=8.0),
        task("n1/2.3", "failed"),
        task("n1/2.4", "running"),
        task("n1/2.5", "queued", reason="no room", node=None),
        task("n1/2.7", "queued", reason="a turn", node=None),
        task("n.dot", "queued"),
    ]
    rows = gathered(tasks)
    assert [row["id"] for row in rows] == [
        "n1/1", "n1/2.1-2  2 tasks", "n1/2.3", "n1/2.4", "n1/2.5,7  2 tasks", "n.dot",
    ]  # fmt: skip
    assert (rows[1]["started_at"], rows[1]["ended_at"], rows[1]["node"]) == (3.0, 9.0, "2 nodes")
    assert "reason" not in rows[4]


def test_many_ranges_are_cut_short() -> None:
    assert ranges([1, 3, 5, 7]) == "1,3,5,…"
