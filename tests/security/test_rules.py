"""Each rule is held by tests that say so and that the page names, and no test names a rule that there is not."""

from __future__ import annotations

import re

import pytest

from peerload.cli.doctor.security_rules import HELD_BY, RULES
from tests.security.rules import IDS, ROOT, marked

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
ROWS = {cells[0]: cells for cells in re.findall(r"^\| ([A-Z]\d+) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)}


def test_tests_name_rules_that_there_are() -> None:
    assert set(marked()) <= set(IDS)


def test_each_rule_is_said_in_one_line() -> None:
    assert all(re.fullmatch(r"[CFJLMPSTX]\d+", name) for name in IDS)


@pytest.mark.rule("C2")
def test_the_page_says_each_rule_as_the_doctor_does() -> None:
    assert {rule: cells[1] for rule, cells in ROWS.items()} == RULES
    assert list(ROWS) == list(RULES), "in the same order"


@pytest.mark.rule("C2")
@pytest.mark.parametrize("rule", IDS)
def test_the_tests_that_are_named_are_there_and_marked(rule: str) -> None:
    named = re.findall(r"`(tests/[^`]+)`", ROWS[rule][3])
    assert tuple(named) == HELD_BY.get(rule, ()), "the page and the doctor name the same"
    assert set(named) <= set(marked().get(rule, ())), "each bears the mark of its rule"
    assert named or ROWS[rule][3] == "nothing yet"
