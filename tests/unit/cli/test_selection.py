"""Selectors and sweeps, as the command line reads them."""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.common import selection
from peerload.cli.map import template
from peerload.model.errors import BadRequest, UsageError
from tests.each import each

if TYPE_CHECKING:
    from pathlib import Path


class Asked:
    """A client whose agent finds so many tasks."""

    def __init__(self, count: int) -> None:
        self.requests: list[dict[str, Any]] = []
        self._count = count

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        self.requests.append({"verb": verb, **fields})
        return {"selected": ["n1/2.1-25"], "count": self._count, "states": {"queued": self._count}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def flags(*task: str, **given: Any) -> Namespace:
    usual = {"state": [], "name": "", "group": "", "node": "", "tag": [], "all_users": False, "yes": False}
    return Namespace(task=list(task), **usual | given)


def chosen(client: Asked, given: Namespace, states: tuple[str, ...] = ("queued",)) -> list[str] | None:
    return selection.Selection(given, "cancel").references(client, states)  # type: ignore[arg-type]


@each(
    ("typed", "given", "count", "expected", "is_asked"),
    [
        ("n\n", flags("all"), 25, None, True),
        ("y\n", flags("all"), 25, ["n1/2.1-25"], True),
        ("\n", flags("2.1-25"), 25, None, True),
        ("", flags("all"), 25, None, True),  # its end
        ("n\n", flags("all"), 20, ["n1/2.1-25"], False),
        ("n\n", flags("all", yes=True), 25, ["n1/2.1-25"], False),
        ("n\n", flags("2", "n1/3.4", "@"), 25, ["2", "n1/3.4", "@"], False),  # plain ids are taken at their word
    ],
)
def test_many_are_asked_about_on_a_terminal(
    typed: str,
    given: Namespace,
    count: int,
    expected: list[str] | None,
    is_asked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys, "stderr", asked)
    assert chosen(Asked(count), given) == expected
    assert ("25" in asked.getvalue()) == is_asked
    asked.truncate(0)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))  # a script
    assert chosen(Asked(count), given) is not None
    assert asked.getvalue().strip("\0") == ""


def test_what_the_agent_is_asked() -> None:
    client = Asked(3)
    chosen(client, flags("3", node="n2", tag=["k=v"]))
    chosen(client, flags("all", state=["held,done"], all_users=True))
    chosen(client, flags("3.1-2"))
    assert client.requests == [
        {"verb": "select", "tasks": ["3"], "node": "n2", "tags": ["k=v"], "states": ["queued"]},
        {"verb": "select", "states": ["held", "done"], "all_users": True},
    ]
    with pytest.raises(UsageError):
        chosen(client, flags())
    with pytest.raises(UsageError):
        chosen(client, flags("all", state=["odd"]))


def test_many_references_go_in_several_requests() -> None:
    refs = [f"n1/{number}" for number in range(12_000)]
    assert [len(part) for part in selection.batches(refs)] == [5000, 5000, 2000]
    assert max(sum(map(len, part)) for part in selection.batches(["x" * 4000] * 1000)) <= selection.REFS_CHARS_AT_A_TIME
    assert list(selection.batches([])) == []


# -- sweeps ------------------------------------------------------------------------------------------------------------


def swept(*command: str, shell: bool = False, **given: Any) -> list[list[bytes]]:
    usual: dict[str, Any] = {
        "array": None,
        "each_line": None,
        "param": [],
        "param_file": [],
        "shell": command[-1] if shell else None,
    }
    argv = [word.encode() for word in command]
    return template.commands_of_parameters(
        Namespace(**usual | given), {"argv": [b"/bin/sh", b"-c", *argv] if shell else argv}
    )


def test_each_combination_is_a_command() -> None:
    found = swept("t", "--lr={lr}", "{seed}", "{x}", param=["lr=0.1,0.01", "seed=08-10:2"])
    assert [argv[1:] for argv in found] == [
        [b"--lr=0.1", b"08", b"{x}"], [b"--lr=0.1", b"10", b"{x}"],
        [b"--lr=0.01", b"08", b"{x}"], [b"--lr=0.01", b"10", b"{x}"],
    ]  # fmt: skip
    assert swept("cat {f/.} {#}", shell=True, param=["f=/a/b c.txt"]) == [[b"/bin/sh", b"-c", b"cat 'b c' 1"]]
    assert swept("t", "{}", param=["a=1", "b=2"]) == [[b"t", b"1", b"2"]]
    assert template.values("-1,1e-3,2024-01-02,") == ["-1", "1e-3", "2024-01-02", ""]


def test_a_table_gives_its_rows(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_bytes(b'a,b\n1,"x, y"\n2,\xff\n')
    assert swept("t", "{b}", "{a}", param_file=[str(table)]) == [[b"t", b"x, y", b"1"], [b"t", b"\xff", b"2"]]


@each(
    "given",
    [
        {"param": ["a"]},
        {"param": ["a="]},
        {"param": ["1=2"]},
        {"param": ["a=1", "a=2"]},
        {"param": ["a=1", "b=2"]},  # the command has no {b}
        {"param": ["a=3-1"]},
        {"param": ["a=1-999999999"]},
        {"param": ["a=1"], "array": "1-3"},
        {"param": ["a=1"], "each_line": "-"},
        {"param_file": ["/nonexistent"]},
    ],
)
def test_what_is_no_sweep_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        swept("t", "{a}", **given)


def test_a_table_with_a_hole_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    for text in ("", "a\n", "a,b\n1\n", "a b\n1\n"):
        table.write_text(text)
        with pytest.raises(UsageError):
            swept("t", "{a}", param_file=[str(table)])


def test_too_many_combinations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "LINES_MAX", 1000)
    with pytest.raises(BadRequest):
        swept("t", "{a}{b}{c}", param=["a=1-2000", "b=1-2000", "c=1-2000"])
