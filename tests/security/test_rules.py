"""Each rule is held by tests that bear its mark, is on the page as in the doctor, and no test names an unknown rule."""

from __future__ import annotations

import re

import pytest

from peerload.cli.doctor.security_rules import HELD_BY, RULES
from tests.security.rules import IDS, ROOT, marked

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
SAYS = dict(re.findall(r"^\| ([A-Z]\d+) \| (.*?) \| .* \|$", PAGE, re.MULTILINE))


def test_tests_name_rules_that_there_are() -> None:
    assert set(marked()) <= set(IDS)


def test_each_rule_is_said_in_one_line() -> None:
    assert all(re.fullmatch(r"[CFJLMPSTX]\d+", name) for name in IDS)


@pytest.mark.rule("C2")
def test_the_page_says_each_rule_as_the_doctor_does() -> None:
    assert {rule: says for rule, says in SAYS.items() if rule in RULES} == RULES
    assert [rule for rule in SAYS if rule in RULES] == list(RULES), "in the same order"


@pytest.mark.rule("C2")
@pytest.mark.parametrize("rule", IDS)
def test_the_tests_that_are_named_are_there_and_marked(rule: str) -> None:
    named = HELD_BY[rule]
    assert named
    assert set(named) <= set(marked()[rule]), "each bears the mark of its rule"
