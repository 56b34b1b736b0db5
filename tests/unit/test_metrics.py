"""The names of counters: standard, distinct, and described in docs/metrics.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import peerload
from peerload.agent import mqtt
from peerload.agent.peers import connection
from peerload.model import metrics
from tests.docs_tables import DOCS, rows

NAMES = {key: value for key, value in vars(metrics).items() if key.isupper()}


def test_names_are_standard_and_distinct() -> None:
    assert len(set(NAMES.values())) == len(NAMES) > 100
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in NAMES.values())


def test_a_label_is_written_as_prometheus_writes_it() -> None:
    assert metrics.labelled("drops_total", reason="too_large") == 'drops_total{reason="too_large"}'


def test_the_page_describes_each() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    described = [name for row in rows(page) for name in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(described) == sorted(NAMES.values())


def test_each_reason_is_an_identifier_that_the_page_lists() -> None:
    reasons = {"earlier_start", "for_earlier_start", *connection.BROKEN_RULES, *mqtt.BROKEN_RULES}
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", reason) for reason in reasons)
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("- `")]
    assert {name for line in lines for name in re.findall(r"`([^`]+)`", line)} >= reasons


def test_every_counter_is_one_of_these() -> None:
    literal = []
    sources = {path: path.read_text(encoding="utf-8") for path in Path(peerload.__file__).parent.rglob("*.py")}
    for path, source in sources.items():
        if not any(word in source for word in ("counters[", ".count(")):
            continue
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Subscript(
                    ast.Attribute(attr="counters" | "_counters"), ast.Constant() | ast.JoinedStr() as name
                ):
                    literal.append((path.name, ast.unparse(name)))
                case ast.Call(ast.Attribute(ast.Attribute(attr="state" | "_state" | "core"), "count"), [name, *_]) if (
                    isinstance(name, ast.Constant | ast.JoinedStr)
                ):
                    literal.append((path.name, ast.unparse(name)))
    assert not literal
