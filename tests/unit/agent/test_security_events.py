"""What is refused for a rule's sake: counted always, written within bounds, and harmless to read."""

from __future__ import annotations

import collections
import logging
from typing import cast

import pytest

from peerload.agent.main import LogLines
from peerload.agent.store.write_ahead import CULPRITS_MAX, NOTED_MAX, NOTICE_EVERY_S, EventLog, SecurityEvents
from peerload.model.rules import SECURITY_RULES
from tests.security.rules import IDS


class Kept:
    """What the journal was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, str]] = []

    def record(self, what: str, state: str, *, node: str = "", reason: str = "") -> None:
        self.events.append((what, state, node, reason))


class Told:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.counters: collections.Counter[str] = collections.Counter()
        self.kept = Kept()
        self.security = SecurityEvents(self.counters, cast("EventLog", self.kept), lambda: self.now_s)
        self.report = self.security.report


def test_each_is_counted_and_the_first_is_noted() -> None:
    told = Told()
    for _ in range(50):
        told.report("P1", "n2", "garbage")
    told.report("P1", "n3", "garbage")
    told.report("J3", "n2", "no proof")
    assert told.kept.events == [
        ("security", "P1", "n2", "garbage"),
        ("security", "P1", "n3", "garbage"),
        ("security", "J3", "n2", "no proof"),
    ]
    assert told.counters == {
        "security_events_total": 52,
        'security_events_total{rule="P1"}': 51,
        'security_events_total{rule="J3"}': 1,
    }


def test_the_next_one_says_how_many_there_were() -> None:
    told = Told()
    for _ in range(5):
        told.report("P1", "n2", "garbage")
    told.now_s += NOTICE_EVERY_S
    told.report("P1", "n2", "other garbage")
    assert told.kept.events[-1] == ("security", "P1", "n2", "other garbage (and 4 more before)")


def test_one_with_many_names_is_bounded() -> None:
    told = Told()
    for number in range(10 * CULPRITS_MAX):
        told.report("J3", f"2001:db8::{number:x}", "no proof")
    assert len(told.kept.events) == NOTED_MAX
    assert len(told.security._culprits) == CULPRITS_MAX
    told.report("P3", "n2", "another rule has a share of its own")
    assert len(told.kept.events) == NOTED_MAX + 1
    told.now_s += NOTICE_EVERY_S
    told.report("J3", "192.0.2.1", "no proof")
    assert len(told.kept.events) == NOTED_MAX + 2


def test_what_may_be_nobodys_fault_is_noted_when_it_is_too_often() -> None:
    told = Told()
    for _ in range(3):
        for _ in range(4):
            told.report("P5", "n2", "replayed", tolerated=4)
        told.now_s += NOTICE_EVERY_S
    assert told.kept.events == []
    for _ in range(5):
        told.report("P5", "n2", "replayed", tolerated=4)
    assert told.kept.events == [("security", "P5", "n2", "replayed")]


def test_the_rules_are_those_that_there_are() -> None:
    assert IDS == SECURITY_RULES


@pytest.mark.rule("T1")
def test_foreign_text_is_cut_and_escaped(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.report("P1", "n2\n2026-01-01 CRITICAL forged", "\x1b]0;owned\x07\u202e\u2028" + "x" * 10_000)
    ((_, _, who, what),) = told.kept.events
    assert who == "n2\\x0a2026-01-01 CRITICAL forged"
    assert what.startswith("\\x1b]0;owned\\x07\\u202e\\u2028xxx")
    assert len(what) < 1000
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert "\x1b" not in record.getMessage()


@pytest.mark.rule("T1")
def test_a_record_of_the_log_is_one_line_and_a_traceback_is_indented() -> None:
    lines = LogLines()
    record = logging.LogRecord(
        "peerload.x", logging.WARNING, "f", 1, "a node said %s", ("\x1b[2J\r\nforged\u2029",), None
    )
    assert lines.format(record).endswith("WARNING peerload.x: a node said \\x1b[2J\\x0d\\x0aforged\\u2029")
    try:
        int("\n2026-01-01 00:00:00 CRITICAL forged \x1b[31m\n2027")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    first, *rest = lines.format(record).split("\n")
    assert "forged\\u2029" in first
    assert len(rest) > 2
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)


@pytest.mark.rule("T1")
def test_a_long_message_is_cut() -> None:
    record = logging.LogRecord("peerload.x", logging.INFO, "f", 1, "x" * 10_000_000, (), None)
    assert len(LogLines().format(record)) < 5000
