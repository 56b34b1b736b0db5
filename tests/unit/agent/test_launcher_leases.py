"""Leases as the launcher enforces them: what is frozen, and what thaws it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerload.launcher import task
from peerload.launcher.protocol import FrozenEvent, LauncherEvent, ThawedEvent
from peerload.launcher.task import LeaseTimers

KEY = "ab-1"


class Held:
    """One task without a process, a clock that stands still, and what was done to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.did: list[str] = []
        self.events: list[LauncherEvent] = []
        monkeypatch.setattr(task, "boot_s", lambda: self.now_s)
        self.task: Any = SimpleNamespace(
            key=KEY,
            deadline_s=0.0,
            ts=0.0,
            ended_at=0.0,
            frozen_at_s=0.0,
            frozen_s_max=1000.0,
            lost_because="",
        )
        units = SimpleNamespace(
            freeze=lambda key: self.did.append(f"freeze {key}"),
            thaw=lambda key: self.did.append(f"thaw {key}"),
            kill=lambda key: self.did.append(f"kill {key}"),
        )
        self.leases = LeaseTimers(cast("Any", {KEY: self.task}), cast("Any", units), self.events)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Frozen at 160, as its lease was granted for a message of 100."""
    made = Held(monkeypatch)
    made.leases.apply(made.task, 160.0, 100.0)
    made.now_s = 160.0
    made.leases.enforce()
    assert (made.did, made.events) == ([f"freeze {KEY}"], [FrozenEvent(KEY)])
    made.did.clear()
    made.events.clear()
    return made


@pytest.mark.parametrize("now_s", [170.0, 171.0])
def test_a_renewal_that_comes_after_its_own_deadline_does_not_thaw(held: Held, now_s: float) -> None:
    held.now_s = now_s
    held.leases.apply(held.task, 170.0, 110.0)
    held.leases.enforce()
    assert (held.did, held.events) == ([], [])
    assert held.task.frozen_at_s == 160.0
    assert held.task.ts == 110.0  # it is the newest word all the same


@pytest.mark.parametrize("deadline_s", [200.0, 0.0])
def test_a_deadline_that_lies_ahead_thaws_and_so_does_none(held: Held, deadline_s: float) -> None:
    held.now_s = 171.0
    held.leases.apply(held.task, deadline_s, 140.0)
    held.leases.enforce()
    assert held.did == [f"thaw {KEY}"]
    assert held.events == [ThawedEvent(KEY)]
    assert held.task.frozen_at_s == 0.0


def test_an_older_word_than_the_last_does_nothing(held: Held) -> None:
    held.leases.apply(held.task, 200.0, 99.0)
    assert (held.did, held.task.deadline_s, held.task.ts) == ([], 160.0, 100.0)


def test_what_is_being_killed_is_not_thawed(held: Held) -> None:
    held.leases.evict(held.task, "room is needed")
    held.leases.apply(held.task, 400.0, 150.0)
    assert held.did == [f"kill {KEY}"]
