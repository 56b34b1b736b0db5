"""Write-ahead: nothing goes out before the rows decided before it are durable, and nothing overtakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerload.agent.runtime import RunState
from peerload.agent.store.write_ahead import ROWS_AHEAD_MAX, Outbox
from peerload.model.actions import PutFloor, PutTask, Row
from peerload.model.errors import StoreError
from peerload.model.task import TaskRecord, TaskState


def row(number: int) -> PutFloor:
    return PutFloor(number.to_bytes(16, "big"), 1, 0.0)


class Disk:
    """Commits when it is told to, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[list[Row], Callable[[], None]]] = []
        self.durable: list[Row] = []

    def persist(self, rows: Sequence[Row], done: Callable[[], None]) -> None:
        self.waiting.append((list(rows), done))

    def commit(self) -> None:
        if self.waiting:
            rows, done = self.waiting.pop(0)
            self.durable += rows
            done()


def test_without_rows_it_goes_out_at_once() -> None:
    release, gone = Outbox(Disk(), RunState()), list[str]()
    release.when_durable(lambda: gone.append("a"))
    assert gone == ["a"]
    release.flush()
    assert release.held == 0


def test_what_follows_a_row_waits_for_it() -> None:
    disk, gone = Disk(), list[str]()
    release = Outbox(disk, RunState())
    release.when_durable(lambda: gone.append("before"))
    release.keep((row(1),))
    release.when_durable(lambda: gone.append("after"))
    release.flush()
    release.when_durable(lambda: gone.append("the next turn"))
    assert (gone, release.held) == (["before"], 2)
    disk.commit()
    assert (gone, release.held) == (["before", "after", "the next turn"], 0)


def test_what_goes_out_may_decide_something_itself() -> None:
    disk, gone = Disk(), list[str]()
    release = Outbox(disk, RunState())

    def act() -> None:
        gone.append("first")
        release.keep((row(2),))
        release.when_durable(lambda: gone.append("of its own"))
        release.flush()

    release.keep((row(1),))
    release.when_durable(act)
    release.when_durable(lambda: gone.append("second"))
    release.flush()
    disk.commit()
    assert gone == ["first", "second"]
    disk.commit()
    assert gone == ["first", "second", "of its own"]


@given(st.lists(st.sampled_from(["keep", "outward", "flush", "commit"]), max_size=60))
def test_any_order_of_turns_and_commits(steps: list[str]) -> None:
    disk = Disk()
    release = Outbox(disk, RunState())
    kept: list[Row] = []
    wanted = 0
    gone: list[int] = []

    def act(number: int, before: int) -> None:
        assert disk.durable[:before] == kept[:before], "a row decided before it is not durable"
        assert len(disk.durable) >= before
        gone.append(number)

    for step in steps:
        if step == "keep":
            kept.append(row(len(kept)))
            release.keep((kept[-1],))
        elif step == "outward":
            release.when_durable(partial(act, wanted, len(kept)))
            wanted += 1
        elif step == "flush":
            release.flush()
        else:
            disk.commit()
        assert gone == list(range(len(gone))), "one has overtaken another"
        assert len(gone) + release.held == wanted
    release.flush()
    while disk.waiting:
        disk.commit()
    assert (gone, release.held) == (list(range(wanted)), 0)
    assert disk.durable == kept


def test_after_a_turn_that_could_not_be_kept_nothing_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, gone = Disk(), list[str]()
    release = Outbox(disk, RunState())
    release.keep((row(1),))
    release.when_durable(lambda: gone.append("kept"))
    release.flush()

    def refuse(_rows: list[Row], _done: Callable[[], None]) -> None:
        raise StoreError("the disk does not keep up")

    monkeypatch.setattr(disk, "persist", refuse)
    release.keep((row(2),))
    release.when_durable(lambda: gone.append("lost"))
    with pytest.raises(StoreError):
        release.flush()
    release.keep((row(3),))
    release.when_durable(lambda: gone.append("decided on top of it"))
    release.flush()
    disk.commit()
    assert (gone, disk.durable) == (["kept"], [row(1)])


def task_row(number: int) -> PutTask:
    return PutTask(TaskRecord(f"x/{number}", number.to_bytes(16, "big"), TaskState.QUEUED, 0.0), 0.0, "")


def test_a_renewed_lease_waits_for_rows_of_its_own_tasks_alone() -> None:
    disk, gone = Disk(), list[str]()
    release = Outbox(disk, RunState())
    release.keep(tuple(task_row(number) for number in range(9)))
    release.flush()
    release.keep((task_row(20),))
    release.when_durable(lambda: gone.append("answer"))
    release.renewal([task_row(30).record.uid], lambda: gone.append("of another"))
    release.renewal([task_row(30).record.uid, task_row(4).record.uid], lambda: gone.append("under way"))
    release.renewal([task_row(20).record.uid], lambda: gone.append("of this turn"))
    release.flush()
    assert gone == ["of another"]
    disk.commit()
    assert gone == ["of another"]
    disk.commit()
    assert gone == ["of another", "answer", "under way", "of this turn"]
    release.renewal([task_row(20).record.uid], lambda: gone.append("durable by now"))
    assert gone[-1] == "durable by now"


def test_advice_waits_for_no_row() -> None:
    disk, gone = Disk(), list[str]()
    release = Outbox(disk, RunState())
    release.keep((row(1),))
    release.when_durable(lambda: gone.append("offer"))
    release.at_once(lambda: gone.append("probe"))
    release.flush()
    release.at_once(lambda: gone.append("another"))
    assert gone == ["probe", "another"]
    disk.commit()
    assert gone == ["probe", "another", "offer"]


def test_bulk_requests_wait_while_the_disk_is_behind() -> None:
    disk, gone = Disk(), list[str]()
    release = Outbox(disk, RunState())
    release.when_room(lambda: gone.append("a"))
    for first in (0, ROWS_AHEAD_MAX):
        release.keep(tuple(row(first + number) for number in range(ROWS_AHEAD_MAX)))
        release.flush()
    release.when_room(lambda: gone.append("b"))
    release.when_room(lambda: gone.append("c"))
    assert gone == ["a"]
    disk.commit()
    assert gone == ["a", "b", "c"]


def test_no_renewal_and_no_advice_goes_out_once_rows_could_not_be_kept() -> None:
    class Full:
        def persist(self, _rows: Sequence[Row], _done: Callable[[], None]) -> None:
            raise StoreError("the disk does not keep up")

    release, gone = Outbox(Full(), RunState()), list[str]()
    release.keep((task_row(1),))
    with pytest.raises(StoreError):
        release.flush()
    release.renewal([task_row(30).record.uid], lambda: gone.append("renewed"))
    release.at_once(lambda: gone.append("advised"))
    assert gone == []


def test_a_bug_in_what_waited_for_the_disk_stops_the_agent() -> None:
    disk, run = Disk(), RunState()
    release = Outbox(disk, run)
    release.keep((row(1),))
    release.when_durable(lambda: next(iter(())))
    release.flush()
    disk.commit()
    assert run.has_failed
