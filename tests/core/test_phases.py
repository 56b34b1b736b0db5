"""The phases of tasks: one method sets them, and refuses what the tables do not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import peerload
from peerload.core.work import HOME_TRANSITIONS, REMOTE_TRANSITIONS, HomePhase, Offering, RemotePhase, RemoteTask
from peerload.model.errors import InvariantBroken
from tests.core.given import UID, Given, spec


def test_the_tables_have_every_phase() -> None:
    assert set(HOME_TRANSITIONS) == set(HomePhase)
    assert set(REMOTE_TRANSITIONS) == set(RemotePhase)


def test_a_transition_that_the_table_does_not_have_is_refused_with_the_story_of_the_task() -> None:
    x = Given(peers=())
    x.submit()
    x.submit()
    task = x.task(2)
    assert task.phase is HomePhase.WAITING
    with pytest.raises(InvariantBroken) as raised:
        task.enter(HomePhase.UNKNOWN)
    assert "x/2: waiting → unknown" in str(raised.value)
    assert "TaskRecord(task='x/2'" in raised.value.story
    assert task.phase is HomePhase.WAITING


@pytest.mark.parametrize(
    ("phase", "offering"),
    [(HomePhase.OFFERED, None), (HomePhase.GATED, Offering("y", is_voluntary=True, searches_on=True))],
)
def test_a_task_has_an_offering_in_its_phase_only(phase: HomePhase, offering: Offering | None) -> None:
    x = Given(peers=())
    x.submit()
    x.submit()
    with pytest.raises(InvariantBroken):
        x.task(2).enter(phase, offering=offering)


def test_an_attempt_of_another_home_does_not_run_before_it_is_committed() -> None:
    with pytest.raises(InvariantBroken, match="reserved → here"):
        RemoteTask("y/1", UID, 1, "y", spec(), 0.0).enter(RemotePhase.HERE)


def test_a_phase_is_set_in_one_place() -> None:
    root = Path(peerload.__file__).parent
    found = [
        path.name for path in root.rglob("*.py") for _ in re.findall(r"\.phase = ", path.read_text(encoding="utf-8"))
    ]
    assert found == ["work.py"] * 4  # when it is made, and in `enter`; for both kinds of task
