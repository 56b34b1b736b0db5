"""Inputs on the disk: what is believed after a crash, what a client may send, how many files that takes."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from peerload.agent.control.connection import Connection
from peerload.agent.requests.attach import AttachRequests
from peerload.agent.runtime import CoreRequests
from peerload.agent.stdin import (
    INPUT_AHEAD_BYTES_MAX,
    INPUT_UNASKED_BYTES_MAX,
    StdinFull,
    StdinStore,
    StoredStdin,
)
from peerload.model.actions import Answer
from peerload.model.errors import BadRequest, SlowDown
from tests.each import each
from tests.support import PATIENCE_S

MIB = 1 << 20


class Client(Connection):
    """One that hears what it is told."""

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__(nobody)

    def _write(self, raw: bytes) -> None:
        assert raw


def test_an_end_is_believed_with_all_that_it_is_the_end_of(tmp_path: Path) -> None:
    path = tmp_path / "a.in"
    source = StoredStdin(path)
    source.add(b"abc", 0)
    asyncio.run(source.finish())
    assert source.has_ended
    assert StoredStdin(path).has_ended
    source.add(b"late", None)
    assert path.read_bytes() == b"abc"
    os.truncate(path, 2)  # as a power cut could leave it
    assert not StoredStdin(path).has_ended


def test_an_end_is_synced_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = StoredStdin(tmp_path / "a.in")
    source.add(b"abc", 0)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink().name))
    asyncio.run(source.finish())
    assert synced == ["a.in", f".a.in-ended.{os.getpid()}", tmp_path.name]
    synced.clear()
    other = StoredStdin(tmp_path / "b.in")
    asyncio.run(other.leave())
    assert synced == ["b.in", f".b.in-left.{os.getpid()}", tmp_path.name]


@each("verb", ["finish", "leave"])
def test_a_mark_that_is_on_its_way_to_the_disk_when_the_task_ends_does_not_stay(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = StdinStore(tmp_path)
    source = inputs.get("a")
    source.add(b"abc", 0)
    loop = asyncio.new_event_loop()
    syncing, go_on, sync = threading.Event(), threading.Event(), os.fsync

    def waits(file: int) -> None:
        syncing.set()
        assert go_on.wait(PATIENCE_S)
        sync(file)

    monkeypatch.setattr(os, "fsync", waits)
    sealing = loop.create_task(getattr(source, verb)())

    async def drop() -> None:
        await asyncio.to_thread(syncing.wait, PATIENCE_S)
        inputs.drop("a")
        go_on.set()
        await sealing

    try:
        loop.run_until_complete(drop())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    assert not list(tmp_path.iterdir())


def test_what_was_left_open_stays_so_unless_some_of_it_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.in"
    source = StoredStdin(path)
    source.add(b"abc", 0)
    asyncio.run(source.leave())
    source.add(b"def", None)
    assert StoredStdin(path).was_left
    os.truncate(path, 2)
    assert not StoredStdin(path).was_left


def test_an_end_that_cannot_be_kept_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = StoredStdin(tmp_path / "a.in")

    def fails(_file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StdinFull):
        asyncio.run(source.finish())
    assert not source.has_ended
    source.add(b"more", None)
    assert source.size_bytes == 4


def test_a_client_that_does_not_wait_is_stopped(tmp_path: Path) -> None:
    source = StoredStdin(tmp_path / "a.in")
    piece = bytes(MIB)
    for _ in range((INPUT_AHEAD_BYTES_MAX + INPUT_UNASKED_BYTES_MAX) // MIB):
        source.add(piece, None)
    with pytest.raises(SlowDown):
        source.add(piece, None)
    source.take(source.size_bytes, is_closed=False)
    source.add(piece, None)


def test_an_input_takes_no_descriptor(tmp_path: Path) -> None:
    inputs = StdinStore(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(50):
        inputs.get(f"{number:032x}").add(b"abc", 0)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_what_repeats_an_ended_submission_leaves_nothing_behind() -> None:
    nobody: Any = None
    pending = CoreRequests(nobody)
    undone: list[int] = []
    connection = Client()
    replies: list[dict[str, object]] = [{"id": "n1/1"}, {"id": "n1/1", "repeated": True}]
    for number, answer in enumerate(replies, 1):
        asked = pending.expect(connection, number, lambda number=number: undone.append(number))  # type: ignore[misc]
        pending.answered(Answer(asked, answer))
    assert undone == [2]
    asked = pending.expect(connection, 3, lambda: undone.append(3))
    pending.answered(Answer(asked, {}, BadRequest("no")))
    assert undone == [2, 3]


def test_a_connection_is_minded_once() -> None:
    nobody: Any = None
    attending = AttachRequests(nobody, nobody, nobody, nobody, nobody, nobody)
    connection = Client()
    for _ in range(3):
        attending.watch_connection(connection)
    attending.client_number(connection)
    assert len(connection.on_disconnect) == 1
