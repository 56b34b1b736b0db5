from __future__ import annotations

import re

from peerload.cli.main import ALIASES, HIDDEN, SUGGESTIONS, VERBS, listed, suggested
from tests.each import each
from tests.unit.cli.fake_agent import FakeAgent, fixture_agent, peerload  # noqa: F401 -- one is a fixture


def test_each_verb_is_listed_once_on_a_line_that_fits() -> None:
    lines = listed().splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(VERBS)
    assert max(map(len, lines)) <= 100


def test_other_words_are_no_verbs_and_what_they_suggest_is() -> None:
    assert not {*ALIASES, *SUGGESTIONS, "version"} & {*VERBS, *HIDDEN}
    assert set(ALIASES.values()) <= set(VERBS)
    named = {verb for text in SUGGESTIONS.values() for verb in re.findall(r"peerload ([a-z]+)", text)}
    assert named <= set(VERBS)
    assert suggested("sumbit") == "did you mean  peerload submit ?"
    assert suggested("kil") == "did you mean  peerload cancel ?"
    assert suggested("xyzzy") == ""
    assert "peerload clean" in suggested("remove")


@each(("words", "verb"), [(("ps",), "ls"), (("list",), "ls"), (("log",), "logs"), (("kill",), "cancel")])
def test_aliases_are_the_verb(words: tuple[str, ...], verb: str) -> None:
    for asked in ((*words, "--help"), ("help", *words)):
        assert f"usage: peerload {verb}" in peerload(*asked).stdout.decode()


def test_kill_cancels(agent: FakeAgent) -> None:
    agent.answer("cancel", cancelled=["ws1/42"], already_ended=[])
    assert peerload("kill", "42", agent=agent).stdout == b"ws1/42  cancelled\n"


@each(
    ("words", "hint"),
    [
        (("submit", "-g", "1", "x"), "did you mean -G ?"),
        (("submit", "--after-success", "1", "x"), "did you mean --after-ok ?"),
        (("submit", "-n", "4", "x"), ""),
        (("submit", "--delay", "3h", "x"), ""),
        (("show",), "peerload show @"),
        (("logs", "-f"), "@ for my last one"),
    ],
)
def test_a_mistake_is_told_with_what_was_meant_or_without_a_guess(words: tuple[str, ...], hint: str) -> None:
    said = peerload(*words).stderr.decode()
    assert hint in said
    assert ("did you mean" in said) == ("did you mean" in hint)


def test_version_is_a_word_too() -> None:
    assert peerload("version").stdout == peerload("--version").stdout
