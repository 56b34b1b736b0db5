"""The recording in README.md can be made again: the same commands work, and show what they are there for."""

from __future__ import annotations

from tests import recording

SHOWN = (
    "\n1\n2\n3\non ws2\npeerload: ws1/1 failed on ws2: exit code 7\n7\n",
    "\n0.2 on ",
    "ws1/3  5 tasks  sleep",
    "ws1/4  big  ",
    "needs 2 cpus. It waits",
    "NODE  CAN EVER  NOW  REASON",
    "2 of 2 nodes alive",
    "ws1/4  cancelled",
    "\n0.6 on ",
)
"""Of each command what it shows wherever things go, in the order of the commands."""


def test_the_recording_shows_a_task_that_waits() -> None:
    assert "big  waiting: ws1: 2 of 2 slots taken" in recording.in_readme()


def test_the_recording_is_what_is_shown() -> None:
    for text in (recording.recorded(), recording.in_readme()):
        typed = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
        assert typed == list(recording.TYPED)
        at = 0
        for shown in SHOWN:
            assert shown in text[at:], shown
            at = text.index(shown, at)
        assert "bug" not in text
