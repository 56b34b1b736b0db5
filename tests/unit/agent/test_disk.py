"""How full the disk is, and the reserve for when it is."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.completion.completion_jobs import TRIES_MAX, CompletionJobs
from peerload.agent.runtime import RunState
from peerload.agent.store import disk_space
from peerload.agent.store.disk_space import ADMIT_BYTES, SLICE_BYTES, DiskReserve, DiskSpace
from peerload.agent.store.maintenance import DueJob, JobDone
from peerload.agent.store.reader import Criteria, StoreReader
from peerload.agent.store.schema import DATABASE
from peerload.model.errors import DiskFull, PeerloadError, StoreError
from peerload.model.task import CompletionJob
from tests.support import PATIENCE_S, PutEvents
from tests.wording import Says

MIB = 1 << 20


class Small(DiskSpace):
    """A disk of 1 GiB of which so much is free; what the reserve holds is not."""

    def __init__(self, directory: Path, free_mib: float) -> None:
        super().__init__(directory)
        self.total_bytes = 1 << 30
        self.reserve = DiskReserve(directory / "reserve", 4 * MIB)
        self.without_reserve = int(free_mib * MIB)
        self.told: list[str] = []

    def record(self, what: str, state: str, *, reason: str) -> None:
        """As the event log does."""
        assert (what, bool(reason)) == ("disk", True)
        self.told.append(state)

    @property
    def event_log(self) -> Any:
        return self

    def look_again(self) -> None:
        self.look(PutEvents(), self.event_log)

    def free_bytes(self) -> int:
        return max(self.without_reserve - self.reserve.size_bytes, 0)


def test_the_reserve_is_taken_and_given_up_in_slices(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve", 3 * SLICE_BYTES)
    assert reserve.take()
    status = (tmp_path / "reserve").stat()
    assert (status.st_size, status.st_mode & 0o777) == (3 * SLICE_BYTES, 0o600)
    assert status.st_blocks * 512 >= 3 * SLICE_BYTES
    assert [reserve.give() for _ in range(4)] == [True, True, True, False]
    assert (tmp_path / "reserve").stat().st_size == 0
    assert DiskReserve(tmp_path / "reserve", 3 * SLICE_BYTES).take()
    assert DiskReserve(tmp_path / "reserve", 3 * SLICE_BYTES).size_bytes == 3 * SLICE_BYTES  # the next start finds it


def test_submissions_are_refused_while_there_is_no_room_for_them_beside_the_reserve(tmp_path: Path) -> None:
    small = Small(tmp_path, 100)
    small.prepare()
    assert small.reserve.size_bytes == 4 * MIB
    small.admit(1, 1000)
    with pytest.raises(DiskFull):
        small.admit(100_000, 1000)
    small.without_reserve = 4 * MIB + ADMIT_BYTES  # full but for what is always left
    with pytest.raises(DiskFull):
        small.admit(1, 1000)
    with pytest.raises(DiskFull):
        small.admit_input(1000)
    small.admit_input(0)
    assert small.reserve.give()
    with pytest.raises(DiskFull):  # what was given up is for the tasks there are
        small.admit(1, 1000)


def test_a_removed_state_directory_is_named_to_who_submits_or_lists(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    disk = DiskSpace(state)
    state.rmdir()
    asks: list[Callable[[], None]] = [
        lambda: disk.admit(1, 1000),
        lambda: disk.admit_input(1000),
        lambda: _listed(state),
    ]
    told = []
    for ask in asks:
        with pytest.raises(StoreError) as caught:
            ask()
        told.append((caught.value.code, str(state) in str(caught.value), "peerload up" in caught.value.hint))
    assert told == [("store", True, True)] * 3


def _listed(state: Path) -> None:
    with StoreReader("n1").snapshot(state / DATABASE, Criteria()):
        pass


def test_low_full_and_room_again_are_told_once_each(tmp_path: Path) -> None:
    small = Small(tmp_path, 200)
    small.prepare()
    small.look_again()
    for free_mib in (50, 49, 5, 5, 30, 57, 63, 70, 200):
        small.without_reserve = free_mib * MIB
        small.refill()
        small.look_again()
    assert small.told == ["low", "full", "low", "ok"]  # 5 % of it are 51.2 MiB; there is room again at 61.4


def test_the_mark_of_a_very_large_disk_is_no_share_of_it(tmp_path: Path) -> None:
    small = Small(tmp_path, 100)
    assert small.low_bytes == int((1 << 30) * 0.05)
    small.total_bytes = 100 << 40
    assert small.low_bytes == disk_space.LOW_BYTES_MAX


def test_an_agent_that_starts_gets_room_from_the_reserve(tmp_path: Path) -> None:
    small = Small(tmp_path, 4)
    assert small.reserve.take()
    small.prepare()
    assert small.reserve.size_bytes == 2 * MIB
    assert small.state == "low"


def test_others_have_their_turn_while_the_reserve_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()
    fill = os.posix_fallocate

    def slow(descriptor: int, offset: int, length: int) -> None:
        began.set()
        assert threading.current_thread() is not threading.main_thread()
        assert may_end.wait(PATIENCE_S)
        fill(descriptor, offset, length)

    async def watched() -> None:
        small = Small(tmp_path, 100)
        watch = asyncio.create_task(small.watch(PutEvents(), small.event_log, RunState()))
        async with asyncio.timeout(PATIENCE_S):
            while not began.is_set():  # noqa: ASYNC110 -- it is for the loop to run meanwhile
                await asyncio.sleep(0)
            assert small.reserve.size_bytes == 0
            may_end.set()
            while small.reserve.size_bytes != 4 * MIB:  # noqa: ASYNC110 -- as above
                await asyncio.sleep(0)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch

    monkeypatch.setattr(os, "posix_fallocate", slow)
    asyncio.run(watched())


def test_the_disk_is_looked_at_again_when_descriptors_were_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watched() -> None:
        small, run, fill = Small(tmp_path, 100), RunState(), DiskSpace.refill
        refused = [errno.EMFILE, errno.ENOMEM]

        def refill(self: DiskSpace) -> None:
            if refused:
                raise OSError(refused.pop(), "short")
            fill(self)

        monkeypatch.setattr(DiskSpace, "refill", refill)
        watch = asyncio.create_task(small.watch(PutEvents(), small.event_log, run))
        async with asyncio.timeout(PATIENCE_S):
            while small.reserve.size_bytes != 4 * MIB:  # noqa: ASYNC110 -- as above
                await asyncio.sleep(0)
        assert not run.is_stopping
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch

    monkeypatch.setattr(disk_space, "LOOK_EVERY_S", 0.01)
    asyncio.run(watched())


def test_room_is_tried_by_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not disk_space.has_no_room(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert disk_space.has_no_room(tmp_path)
    assert not DiskReserve(tmp_path / "reserve", MIB).take()


def test_inodes_are_watched_as_bytes_are(tmp_path: Path) -> None:
    class Few(Small):
        files = 10_000

        def free_files(self) -> int:
            return self.files

    few = Few(tmp_path, 900)
    few.total_files = 10_000
    few.prepare()
    assert (few.state, few.low_files) == ("ok", 500)
    few.admit(1, 1000)
    few.files = 499
    few.look_again()
    few.admit(1, 1000)
    few.files = 63
    few.look_again()
    with pytest.raises(DiskFull, match=Says.NO_INODES()):
        few.admit(1, 1000)
    few.files = 501  # at the mark it does not flap
    few.look_again()
    few.files = 601
    few.look_again()
    assert few.told == ["low", "full", "low", "ok"]
    few.total_files = 0  # a file system without a fixed number
    assert DiskSpace.free_files(few) > 10_000


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_output_file_waits_for_room_and_for_nothing_else(error: int) -> None:
    """One try more than a job has."""
    kept: list[Any] = []

    async def full(_: DueJob) -> tuple[str, str]:
        raise PeerloadError(f"/data/out: {os.strerror(error)}")

    async def keep(row: Any) -> None:
        kept.append(row)

    async def story() -> None:
        info: Any = SimpleNamespace(config=SimpleNamespace(node="n1"))
        store: Any = SimpleNamespace(keep=keep)
        runner: Any = SimpleNamespace(carry_out=full)
        journal: Any = SimpleNamespace(note=lambda _: None)
        jobs = CompletionJobs(info, store, journal, RunState(), runner, runner)
        for number in range(2):
            await jobs._try(DueJob(number, CompletionJob.FILES, 1, -1, 0.0, TRIES_MAX - 1, "before"))

    asyncio.run(story())
    if error == errno.EROFS:
        assert kept == [JobDone(0), JobDone(1)]
    else:
        assert [(row.number, row.tries) for row in kept] == [(0, TRIES_MAX - 1), (1, TRIES_MAX - 1)]
