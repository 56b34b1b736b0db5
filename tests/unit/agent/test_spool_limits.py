"""The spool: what is kept is whole or not there, and no event is missed."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from peerload.agent.inotify import READ_BYTES
from peerload.agent.spool import Spool
from tests.unit.agent.test_spool import KEY, Reader, Story, fixture_play  # noqa: F401 -- a fixture

QUEUE_EVENTS = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text(encoding="ascii"))


def test_what_cannot_be_kept_whole_is_not_there(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            spool.keep(KEY, b"x" * 2000, b"")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not spool.path(KEY, 1).exists()
    spool.keep(KEY, b"x" * 2000, b"")
    assert spool.sizes(KEY) == (2000, 0)
    assert [path.name for path in spool.directory.iterdir()] == [f"{KEY}.out"]


def test_a_small_result_is_read_no_further_than_its_size(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    path = spool.path(KEY, 1)
    path.write_bytes(b"result")
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # what its process left behind has written on
    assert spool.read_small(KEY, 6, 4) == (b"result", b"")
    assert spool.read_small("none", 6, 4) == (b"", b"")


def test_pieces_may_come_in_any_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for offset, data in ((8, b"89"), (0, b"01"), (4, b"45")):
        spool.write_at(KEY, 2, offset, data)
    assert spool.path(KEY, 2).read_bytes() == b"01\0\x0045\0\x0089"
    spool.sync(KEY)


@pytest.mark.skipif(QUEUE_EVENTS > 200_000, reason="this system's queue of events is too long to fill")
def test_more_events_than_the_kernel_keeps(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        reader = Reader(spool)
        spool.path(KEY, 1).write_bytes(b"first ")
        await reader.until(1, b"first ")
        others = [os.open(spool.directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in "ab"]
        for number in range(QUEUE_EVENTS + 100):  # events that are alike are kept as one, so there are two files
            os.write(others[number % 2], b"x")
        with spool.path(KEY, 1).open("ab") as file:
            file.write(b"last")
        await reader.until(1, b"first last")
        assert READ_BYTES < QUEUE_EVENTS * 32, "it takes more than one reading"
        reader.follower.end(10, 0)
        await reader.ended()
        for fd in others:
            os.close(fd)

    play(story)


def test_an_end_is_waited_for_until_all_of_it_was_read(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        spool.write_at(KEY, 1, 0, b"0123456789")
        reader = Reader(spool, 4)
        await reader.until(1, b"456789")
        reader.follower.end(10, 0)
        await reader.ended()
        shorter = Reader(spool)
        shorter.follower.end(3, 0)
        await shorter.ended()
        assert shorter.text(1) == b"012", "what was written after the end is not its output"

    play(story)
