"""What `run` says and sends at a terminal."""

from __future__ import annotations

import os

import pytest

from peerload.cli.common import task_session
from tests.each import each


@pytest.fixture(autouse=True)
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _descriptor: True)
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@each(
    ("line", "is_said"),
    [
        ("bash", True),
        ("/bin/bash -l", True),
        ("vi notes.txt", True),
        ("python3 -i", True),
        ("bash script.sh", False),
        ("bash -c true", False),
        ("python3 -m http.server", False),
        ("top -b", False),
        ("hostname", False),
    ],
)
def test_a_command_that_needs_a_terminal_is_told_so(
    line: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    task_session.say_if_it_needs_a_terminal([word.encode() for word in line.split()])
    assert (f"peerload run --pty {line}" in capsys.readouterr().err) == is_said


def test_nothing_is_said_to_a_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor != 1)
    task_session.say_if_it_needs_a_terminal([b"bash"])
    assert capsys.readouterr().err == ""


def test_colours_are_asked_for_where_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = task_session.with_colours
    assert asked(["A=b"], has_terminal=False) == ["A=b", "CLICOLOR_FORCE=1", "FORCE_COLOR=1"]
    assert asked(["FORCE_COLOR=3"], has_terminal=False) == ["FORCE_COLOR=3", "CLICOLOR_FORCE=1"]
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert asked([], has_terminal=True) == ["COLORTERM=truecolor"]
    monkeypatch.setenv("FORCE_COLOR", "0")  # the user's own, which goes along
    assert asked([], has_terminal=False) == ["CLICOLOR_FORCE=1", "COLORTERM=truecolor"]
    monkeypatch.setenv("TERM", "dumb")
    assert asked([], has_terminal=False) == ["COLORTERM=truecolor"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert asked([], has_terminal=True) == []
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor != 2)
    assert asked([], has_terminal=False) == []
