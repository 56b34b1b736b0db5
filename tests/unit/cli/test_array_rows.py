"""Members of arrays as rows of `ls`."""

from __future__ import annotations

from typing import Any

from peerload.cli.verbs import nodes
from peerload.text.format import width_of
from peerload.text.tasks import as_row, listed_table, number_of, ranges
from tests.each import each
from tests.unit.cli.test_verbs import NODE


def test_members_are_told_by_their_ranges_and_their_number() -> None:
    task: dict[str, Any] = {"id": "n1/2.1", "state": "done", "node": None}
    row = as_row(task | {"members": {"spans": [[1, 5], [8, 8]], "count": 6, "nodes": 2}})
    assert (row["id"], row["node"]) == ("n1/2.1-5,8  6 tasks", "2 nodes")
    assert as_row(task) == task
    assert number_of(task) == 1


def test_many_ranges_are_cut_short() -> None:
    assert ranges([[1, 1], [3, 3], [5, 6], [9, 9]]) == "1,3,5-6,…"


@each("members", [7, {}, {"spans": 3, "count": "x"}, {"spans": [1, [2], ["\x1b", {}]], "nodes": {}}])
def test_what_another_node_makes_up_is_no_bug(members: Any) -> None:
    assert str(as_row({"id": "x", "members": members})["id"]).startswith("x")


def test_the_command_of_a_list_gets_the_width_of_the_terminal() -> None:
    task = {"id": "n1/1", "name": "n" * 30, "state": "queued", "submitted_at": 1.0, "reason": "waits for room"}
    argv = ["python", *(f"--option-{number}=value" for number in range(9))]
    whole = " ".join(argv)
    assert whole in listed_table([task | {"argv": argv}], 2.0, 300)[1]
    for columns in (100, 120, 160):
        (_, line) = listed_table([task | {"argv": argv}], 2.0, columns)
        assert len(line) <= columns
        assert whole[:20] in line
    assert whole not in listed_table([task | {"argv": argv}], 2.0)[1]


@each("columns", range(25, 100, 3))
def test_no_row_wraps_on_a_narrow_terminal(columns: int) -> None:
    members = {"spans": [[1, 5], [8, 8]], "count": 6, "nodes": 2}
    task = {"id": "ws1/3.1", "name": "n" * 30, "state": "running", "node": "ws2", "reason": "waits for room " * 4}
    rows = [
        task | {"argv": ["true"] * 30},
        as_row(task | {"members": members}),
        task | {"id": "ws1/4", "name": "日本語"},
    ]
    listed = listed_table(rows, 2.0, columns)
    assert max(map(width_of, listed)) <= columns
    assert all("ws1/" in line for line in listed[1:])
    known = [NODE | {"node": f"node-{number}", "drained": True, "drain_reason": "a new disk" * 9} for number in (1, 2)]
    for wide in (False, True):
        headings = nodes.headings_for(known, is_wide=wide)
        listed = nodes.node_table(headings, [nodes.node_cells(node, headings) for node in known], columns)
        assert max(map(width_of, listed)) <= columns
        assert "node-1" in listed[1]
    assert (
        max(map(width_of, nodes.gpu_table([NODE | {"gpus": [{"model": "NVIDIA A100", "index": 0}]}], columns)))
        <= columns
    )
