"""Each rule of docs/security.md is held by tests that bear its id, and no test names a rule that there is not."""

from __future__ import annotations

from tests.each import each
from tests.security.rules import IDS, TESTS, marked


def test_tests_name_rules_that_there_are() -> None:
    assert set(marked()) <= set(IDS)
    assert tuple(TESTS) == IDS


@each("rule", IDS)
def test_the_tests_that_are_named_are_there_and_marked(rule: str) -> None:
    assert TESTS[rule]
    assert set(TESTS[rule]) <= set(marked().get(rule, ())), "each bears the mark of its rule"
