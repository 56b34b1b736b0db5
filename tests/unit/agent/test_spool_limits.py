"""The spool: what is kept is whole or not there, and no event is missed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peerload.agent.output.spool import READ_BYTES, Spool
from peerload.agent.stdin import StdinStore, StoredStdin
from tests.each import each
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


def test_what_was_wanted_in_full_is_cut_to_its_ends(tmp_path: Path) -> None:
    spool = Spool(tmp_path, output_bytes_max=64 << 10)
    for key, size in ((KEY, 1 << 20), ("small", 1000)):
        spool.path(key, 1).write_bytes(b"x" * size)
    newest = spool.path(KEY, 1).stat().st_mtime
    assert (spool.large(newest), spool.large(newest + 1)) == ([], [KEY])
    spool.cut(KEY)
    kept = spool.path(KEY, 1).read_bytes()
    assert (len(kept), kept.count(b"x"), kept[:1], kept[-1:]) == (1 << 20, 64 << 10, b"x", b"x")
    assert spool.large(newest + 1000) == []


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


@pytest.mark.rule("F1")
def test_whatever_a_task_puts_in_place_of_its_files_goes_or_stays_and_stops_nobody(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    inputs = StdinStore(spool.directory)
    for path in (*spool.paths(KEY), spool.input_path(KEY)):
        path.mkdir()
        (path / "file").touch()
    spool.drop(KEY)
    for name, suffix in (("one", ".in"), ("two", ".in-ended"), ("two", ".in")):
        (spool.directory / f"{name}{suffix}").mkdir()
    inputs.drop("one")
    inputs.drop_others(set())
    assert list(spool.directory.iterdir()) == []


def test_directories_that_lie_too_deep_in_one_another_stop_nobody(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    scratch = spool.make_scratch(KEY)
    here = os.open(scratch, os.O_RDONLY)
    for _ in range(2 * sys.getrecursionlimit()):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        assert spool.drop_scratch(KEY)
        spool.remove_dropped()
    finally:
        subprocess.run(["rm", "-rf", scratch.parent], check=True)


@each("put", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_an_input_in_whose_place_a_task_has_put_something_else_is_empty(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    path = tmp_path / "one.in"
    put(path)
    source = StoredStdin(path)
    source.add(b"abc", 0)
    assert path.read_bytes() == b"abc"
