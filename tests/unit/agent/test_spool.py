"""The spool: output as it grows, with holes, across a rename."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from peerload.agent.output.spool import PIECE_BYTES_MAX, Follower, Spool, remove
from tests.support import PATIENCE_S

KEY = "ab-1"
NOBODY = 65534
Story = Callable[[Spool], Coroutine[Any, Any, None]]


@pytest.fixture(name="play", params=[uvloop.new_event_loop])
def fixture_play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def whole() -> None:
            spool = Spool(tmp_path)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await story(spool)
            finally:
                if spool.inotify is not None:
                    spool.inotify.close()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(whole())

    return run


class Reader:
    """Follows in the background; ``text`` is what each stream has shown, by offset."""

    def __init__(self, spool: Spool, *start: int) -> None:
        self.follower = Follower(spool, KEY, *start)
        self.pieces: list[tuple[int, int, bytes]] = []
        self._more = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        async for piece in self.follower:
            self.pieces.append(piece)
            self._more.set()

    def text(self, stream: int) -> bytes:
        return b"".join(data for number, _, data in self.pieces if number == stream)

    async def until(self, stream: int, text: bytes) -> None:
        while self.text(stream) != text:
            self._more.clear()
            await self._more.wait()

    async def ended(self) -> None:
        await self.task
        self.follower.close()


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_it_follows_what_grows_from_before_there_is_a_file(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        reader = Reader(spool)
        out, err = spool.paths(KEY)
        await asyncio.sleep(0)
        _append(out, b"one\n")
        await reader.until(1, b"one\n")
        _append(err, b"oh\n")
        _append(out, b"two\n")
        await reader.until(1, b"one\ntwo\n")
        await reader.until(2, b"oh\n")
        reader.follower.end(8, 3)
        await reader.ended()

    play(story)


def test_several_followers_from_their_own_offsets(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        out, _ = spool.paths(KEY)
        _append(out, b"0123456789")
        whole, rest = Reader(spool), Reader(spool, 6)
        await whole.until(1, b"0123456789")
        await rest.until(1, b"6789")
        for reader in (whole, rest):
            reader.follower.end(10, 0)
            await reader.ended()

    play(story)


def test_others_get_their_turn_while_a_task_writes_faster_than_it_is_read(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        out, _ = spool.paths(KEY)
        turns: list[int] = []
        _append(out, b"y\n")
        follower = Follower(spool, KEY)
        async for _, offset, _ in follower:
            if turns or offset > 100:
                break
            asyncio.get_running_loop().call_soon(turns.append, offset)
            _append(out, b"y\n")
        follower.close()
        assert turns == [0]

    play(story)


def test_holes_are_skipped_and_pieces_bounded(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        head, tail, far = b"h" * (300 << 10), b"t" * 8192, 4 << 20
        spool.write_at(KEY, 1, 0, head)
        spool.write_at(KEY, 1, far, tail)
        reader = Reader(spool)
        reader.follower.end(far + len(tail), 0)
        await reader.ended()
        assert reader.text(1) == head + tail
        assert reader.pieces[-1] == (1, far, tail)
        assert max(len(data) for _, _, data in reader.pieces) <= PIECE_BYTES_MAX
        assert spool.sizes(KEY) == (far + len(tail), 0)

    play(story)


def test_what_takes_the_place_of_a_followed_file_is_read_on(play: Callable[[Story], None]) -> None:
    """A copy of a running task's output is followed; then the whole comes with the result and is renamed over it."""

    async def story(spool: Spool) -> None:
        spool.write_at(KEY, 1, 0, b"first ")
        reader = Reader(spool)
        await reader.until(1, b"first ")
        spool.keep(KEY, b"first and last", b"")
        await reader.until(1, b"first and last")
        reader.follower.end(14, 0)
        await reader.ended()
        assert spool.read_small(KEY, 14, 0) == (b"first and last", b"")

    play(story)


def test_an_end_with_a_missing_file_is_an_end(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        reader = Reader(spool)
        reader.follower.end(100, 100)
        await reader.ended()
        assert reader.pieces == []

    play(story)


def test_the_directory_is_watched_only_while_somebody_follows(play: Callable[[Story], None]) -> None:
    async def story(spool: Spool) -> None:
        reader = Reader(spool)
        assert spool.inotify is not None
        assert spool.inotify._watch >= 0
        reader.follower.end(0, 0)
        await reader.ended()
        assert spool.inotify._watch == -1

    play(story)


def test_dropping(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.keep(KEY, b"a", b"b")
    spool.sync(KEY)
    assert sorted(path.name for path in spool.directory.iterdir()) == [f"{KEY}.err", f"{KEY}.out"]
    spool.drop(KEY)
    spool.drop(KEY)
    assert list(spool.directory.iterdir()) == []
    scratch = spool.make_scratch(KEY)
    (scratch / "deep").mkdir()
    (scratch / "deep/file").write_text("x")
    assert spool.drop_scratch(KEY)
    assert not spool.drop_scratch(KEY)
    spool.make_scratch(KEY).rmdir()
    scratch.symlink_to(spool.directory)
    assert spool.drop_scratch(KEY)
    spool.remove_dropped()
    assert not any(scratch.parent.iterdir())
    assert spool.directory.is_dir()


def test_a_scratch_directory_that_cannot_be_put_aside_is_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    spool = Spool(tmp_path)
    scratch = spool.make_scratch(KEY)
    (scratch / "file").write_text("x")
    monkeypatch.setattr(os, "rename", full)
    assert not spool.drop_scratch(KEY)
    assert not scratch.exists()


def test_a_scratch_directory_with_read_only_directories_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where root runs the tests, it does this as another user."""
    mode = tmp_path.stat().st_mode & 0o777
    inner = tmp_path / "top/scratch/modules/x@v1"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (inner / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "top")
    if is_root := os.geteuid() == 0:
        for path in (tmp_path / "top", *(tmp_path / "top").rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for path in (inner, inner.parent, inner.parent.parent):
        path.chmod(0o500)
    try:
        os.seteuid(NOBODY if is_root else os.geteuid())
        remove("scratch")
    finally:
        os.seteuid(0 if is_root else os.geteuid())
    assert list((tmp_path / "top").iterdir()) == []
    assert tmp_path.stat().st_mode & 0o777 == mode


def test_a_scratch_directory_with_a_thousand_directories_one_in_the_other_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "scratch"
    top.mkdir()
    (tmp_path / "other").write_text("stays")
    flags = os.O_RDONLY | os.O_DIRECTORY
    at = os.open(top, flags)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        os.symlink(tmp_path / "other", "link", dir_fd=at)
        inner = os.open("d", flags, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    try:
        remove(top)
        assert [path.name for path in tmp_path.iterdir()] == ["other"]
    finally:
        subprocess.run(["rm", "-rf", top], check=True)  # pytest itself could not
