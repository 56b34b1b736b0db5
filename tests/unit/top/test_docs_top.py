"""docs/top.md says what the keys do."""

from __future__ import annotations

from pathlib import Path

from peerload.top.keys import BY_NAME, KEYS
from peerload.top.look import NODE_ORDERS, TASK_ORDERS, node_words, task_words
from peerload.top.world import STALE_S, Node
from tests.unit.top.given import NOW, node, task

PAGE = (Path(__file__).resolve().parents[3] / "docs/top.md").read_text(encoding="utf-8")


def test_the_keys_are_those_of_the_program() -> None:
    table = PAGE[PAGE.index("## Keys") : PAGE.index("The mouse")]
    told = [
        tuple(cell.strip().strip("`") for cell in line.split("|")[1:3]) for line in table.splitlines() if "| `" in line
    ]
    assert told == [(key.shown, key.says) for key in KEYS]


def test_the_letters_that_sort_are_told() -> None:
    words = " ".join(PAGE.split())
    for what, orders in (("nodes", NODE_ORDERS), ("tasks", TASK_ORDERS)):
        told = ", ".join(f"`{letter}` {name}" for letter, (name, _) in orders.items())
        assert f"Letters that sort {what}: {told}." in words


def test_what_a_filter_looks_at_is_told() -> None:
    words = " ".join(PAGE.split())
    assert f"Of nodes: `{' '.join(node_words(Node(node('ws1'), NOW)))}`" in words
    assert f"of tasks: `{' '.join(task_words(task('ws1/1'), guest=False))}`" in words


def test_what_counts_as_old_is_told() -> None:
    assert f"older than {STALE_S:.0f} s" in PAGE


def test_no_key_does_two_things() -> None:
    names = [name for key in KEYS for name in key.names]
    assert len(names) == len(set(names)) == len(BY_NAME)
