"""Write-ahead: nothing goes out before the rows decided before it are durable, and nothing overtakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerload.agent.release import Release
from peerload.model.actions import PutFloor, Row
from peerload.model.errors import StoreError


def row(number: int) -> PutFloor:
    return PutFloor(number.to_bytes(16, "big"), 1, 0.0)


class Disk:
    """Commits when it is told to, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[list[Row], Callable[[], None]]] = []
        self.durable: list[Row] = []

    def persist(self, rows: list[Row], done: Callable[[], None]) -> None:
        self.waiting.append((rows, done))

    def commit(self) -> None:
        if self.waiting:
            rows, done = self.waiting.pop(0)
            self.durable += rows
            done()


def test_without_rows_it_goes_out_at_once() -> None:
    release, gone = Release(Disk().persist), list[str]()
    release.outward(lambda: gone.append("a"))
    assert gone == ["a"]
    release.flush()
    assert release.held == 0


def test_what_follows_a_row_waits_for_it() -> None:
    disk, gone = Disk(), list[str]()
    release = Release(disk.persist)
    release.outward(lambda: gone.append("before"))
    release.keep((row(1),))
    release.outward(lambda: gone.append("after"))
    release.flush()
    release.outward(lambda: gone.append("the next turn"))
    assert (gone, release.held) == (["before"], 2)
    disk.commit()
    assert (gone, release.held) == (["before", "after", "the next turn"], 0)


def test_what_goes_out_may_decide_something_itself() -> None:
    disk, gone = Disk(), list[str]()
    release = Release(disk.persist)

    def act() -> None:
        gone.append("first")
        release.keep((row(2),))
        release.outward(lambda: gone.append("of its own"))
        release.flush()

    release.keep((row(1),))
    release.outward(act)
    release.outward(lambda: gone.append("second"))
    release.flush()
    disk.commit()
    assert gone == ["first", "second"]
    disk.commit()
    assert gone == ["first", "second", "of its own"]


@given(st.lists(st.sampled_from(["keep", "outward", "flush", "commit"]), max_size=60))
def test_any_order_of_turns_and_commits(steps: list[str]) -> None:
    disk = Disk()
    release = Release(disk.persist)
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
            release.outward(partial(act, wanted, len(kept)))
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


def test_after_a_turn_that_could_not_be_kept_nothing_goes_out() -> None:
    disk, gone = Disk(), list[str]()
    release = Release(disk.persist)
    release.keep((row(1),))
    release.outward(lambda: gone.append("kept"))
    release.flush()

    def refuse(_rows: list[Row], _done: Callable[[], None]) -> None:
        raise StoreError("the disk does not keep up")

    release._persist = refuse
    release.keep((row(2),))
    release.outward(lambda: gone.append("lost"))
    with pytest.raises(StoreError):
        release.flush()
    release.keep((row(3),))
    release.outward(lambda: gone.append("decided on top of it"))
    release.flush()
    disk.commit()
    assert (gone, disk.durable) == (["kept"], [row(1)])
