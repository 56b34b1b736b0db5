"""How `join` is given its token."""

from __future__ import annotations

import io

import pytest

from peerload.cli.verbs import join
from peerload.model.errors import UsageError


@pytest.mark.rule("S13")
def test_a_token_may_come_on_stdin_as_invite_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join.token_words(["plj1-abc", "def"]) == ["plj1-abc", "def"]
    for line in ("plj1-abcdef\n", "peerload join plj1-abcdef", "  plj1-abcdef  \nmore\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        assert join.token_words(["-"]) == ["plj1-abcdef"]


def test_no_token_on_stdin_is_a_mistake_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("", "\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        with pytest.raises(UsageError, match="token"):
            join.token_words(["-"])
