"""The trusted date: what a wrong date of the machine may not do."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.launcher import client
from peerload.agent.store.maintenance import JobPostponed, due_jobs
from peerload.agent.store.store import SLACK_S, DateAnchor, TrustedDate, anchor_of
from peerload.launcher import protocol
from peerload.launcher.task import LaunchedTask
from peerload.model.actions import PutChores, PutSubmission
from peerload.model.events import Submission
from peerload.model.task import SINGLE, CompletionJob, Exit, TaskState
from tests.each import each
from tests.unit.agent.test_retention import left, retention_of
from tests.unit.agent.test_store import SPEC, Opened, put, submission

DAY_S = 86_400.0
WALL_S = 1_790_000_000.0


class Machine:
    """Its two clocks."""

    def __init__(self) -> None:
        self.boot_id = "boot-1"
        self.boot_s = 1000.0
        self.wall_s = WALL_S

    def clocks(self) -> tuple[float, float]:
        return self.boot_s, self.wall_s

    def passes(self, seconds: float) -> None:
        self.boot_s += seconds
        self.wall_s += seconds

    def date(self, anchor: DateAnchor | None = None) -> TrustedDate:
        return TrustedDate(anchor, boot_id=self.boot_id, clocks=self.clocks)


def test_a_date_ahead_for_a_while_is_never_believed() -> None:
    machine = Machine()
    date = machine.date()
    machine.wall_s += 40 * DAY_S
    machine.passes(70)
    assert date.now() == WALL_S + 70
    machine.wall_s -= 40 * DAY_S
    machine.passes(10)
    assert date.now() == WALL_S + 80


def test_a_date_that_stays_ahead_is_believed_after_a_day() -> None:
    machine = Machine()
    date = machine.date()
    machine.wall_s += 40 * DAY_S
    for _ in range(24):
        assert date.now() < WALL_S + DAY_S
        machine.passes(3600)
    assert date.now() == machine.wall_s == WALL_S + 41 * DAY_S


def test_steps_of_a_clock_that_is_kept_right_and_jumps_back_count_at_once() -> None:
    machine = Machine()
    date = machine.date()
    machine.wall_s += SLACK_S - 1
    assert date.now() == machine.wall_s
    machine.wall_s -= 40 * DAY_S
    assert date.now() == machine.wall_s


def test_a_restart_knows_the_date_by_the_boot_clock_of_the_same_boot() -> None:
    machine = Machine()
    anchor = anchor_of(machine.date().anchor.packed())
    machine.passes(5000)
    machine.wall_s += 40 * DAY_S
    assert machine.date(anchor).now() == WALL_S + 5000


def test_after_a_reboot_the_time_that_the_machine_was_off_counts_when_it_has_been_on_for_a_day() -> None:
    machine = Machine()
    date = machine.date()
    for night in range(9):
        anchor = anchor_of(date.anchor.packed())
        machine.boot_id, machine.boot_s = f"boot-{night + 2}", 5.0
        machine.wall_s += 16 * 3600
        date = machine.date(anchor)
        assert date.now() < machine.wall_s - 15 * 3600
        for _ in range(8):
            machine.passes(3600)
            date.now()
    assert machine.wall_s - date.now() < 2 * DAY_S


def test_the_boot_clock_of_another_boot_says_nothing() -> None:
    machine = Machine()
    anchor = anchor_of(machine.date().anchor.packed())
    machine.boot_id, machine.boot_s = "boot-2", 1000.0 + 5 * DAY_S
    machine.wall_s += 40 * DAY_S
    assert machine.date(anchor).now() == WALL_S


def test_an_anchor_that_cannot_be_read_is_none() -> None:
    for packed in (None, "", "a b c", b"x", "boot 1 2", "boot 1 2 three"):
        assert anchor_of(packed) is None


# -- what goes by it ---------------------------------------------------------------------------------------------------


@pytest.fixture(name="ahead")
def fixture_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the date of this process so many seconds ahead of the right one."""
    real = time.time

    def set_ahead(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return set_ahead


def test_a_token_is_remembered_although_the_agent_starts_under_a_date_ahead(
    tmp_path: Path, ahead: Callable[[float], None]
) -> None:
    kept = PutSubmission(Submission(1, "token", b"d" * 32, SPEC, (), time.time()))
    with Opened(tmp_path / "db") as opened:
        opened.keep(kept, put(1))
    ahead(40 * DAY_S)
    with Opened(tmp_path / "db") as opened:
        assert opened.store.submission_of("token") == (b"d" * 32, "ws1/1", 0)


def test_retention_does_not_act_on_a_date_ahead(tmp_path: Path, ahead: Callable[[float], None]) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(submission(1), put(1, TaskState.DONE, ended_at=time.time(), attempt=1, exit=Exit(0)))
        ahead(40 * DAY_S)
        cut_at: list[float] = []
        retention = retention_of(opened, cut_at=cut_at)
        asyncio.run(retention.enforce())
        assert left(opened) == [(1, SINGLE)]
        assert cut_at[0] < time.time() - 39 * DAY_S
        anchor = anchor_of(opened.store.rows("SELECT value FROM meta WHERE key = 'date'")[0][0])
        assert anchor is not None
        assert anchor.ahead_s >= 0
        opened.store.date.anchor = anchor._replace(ahead_s=DAY_S)  # it has lasted
        asyncio.run(retention.enforce())
        assert left(opened) == []


@pytest.mark.parametrize("ahead_s", [40 * DAY_S, 3000.0])
def test_a_chore_postponed_under_a_date_ahead_is_due_again(tmp_path: Path, ahead_s: float) -> None:
    now = time.time()
    with Opened(tmp_path / "db") as opened:
        opened.keep(submission(1), put(1, TaskState.DONE, ended_at=now), PutChores("ws1/1", (CompletionJob.FILES,)))
        (owed,) = due_jobs(opened.store, CompletionJob.FILES, now, 9, ())
        opened.keep(JobPostponed(owed.number, 1, now + 30.0, "no room"))
        assert due_jobs(opened.store, CompletionJob.FILES, now, 9, ()) == []
        assert len(due_jobs(opened.store, CompletionJob.FILES, now + 30.0, 9, ())) == 1
        opened.keep(JobPostponed(owed.number, 2, now + ahead_s, "no room"))
        assert len(due_jobs(opened.store, CompletionJob.FILES, now, 9, ())) == 1


# -- how long tasks run ------------------------------------------------------------------------------------------------


@each(("set_s", "ran_s"), [(0.0, 0.5), (40 * DAY_S, 5.0), (-40 * DAY_S, 5.0)])
def test_an_exit_tells_the_time_that_the_boot_clock_has_counted(set_s: float, ran_s: float) -> None:
    process = subprocess.Popen(["true"])
    capture: Any = SimpleNamespace(close=lambda _holes: 0)
    task = LaunchedTask("a-1", process.pid, WALL_S, (capture, capture))
    task.ended_at, task.ran_s = WALL_S + set_s + ran_s, ran_s
    holes: Any = None
    record = task.reap(holes)
    process.returncode = 0
    assert record.ended_at - record.started_at == pytest.approx(ran_s)
    assert (record.started_at == WALL_S) == (set_s == 0.0)


async def _listed(ran_s: float = 0.0) -> tuple[str, float, float]:
    """What the agent makes of a launcher that holds one attempt, which it says started at WALL_S."""
    task = protocol.ListedTask("a-1", WALL_S, 7.0, 0.0, False, ran_s)
    event = protocol.ListedEvent(1, False, [task], [], protocol.VERSION, "r1", "bare", [], "rlimit", False)
    body = protocol.frame([protocol.encode(event)])
    frames = client.EventFrames()
    transport: Any = SimpleNamespace(write=lambda _frame: None)
    frames.connection_made(transport)
    frames.data_received(body)
    ready, _ = await client.fetch_list(frames)
    (running,) = ready.running
    return running


def test_a_start_is_told_by_the_date_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: WALL_S + 40 * DAY_S)
    assert asyncio.run(_listed(ran_s=30.0)) == ("a-1", WALL_S + 40 * DAY_S - 30.0, 7.0)
    assert asyncio.run(_listed()) == ("a-1", WALL_S, 7.0)
    monkeypatch.setattr(time, "time", lambda: WALL_S + 30.2)
    assert asyncio.run(_listed(ran_s=30.0)) == ("a-1", WALL_S, 7.0)
