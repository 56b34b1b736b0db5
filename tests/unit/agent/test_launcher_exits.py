"""Exit records of the launcher: what is reportable when, and what a slow disk holds up."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

import pytest

from peerload.launcher.protocol import EndedEvent, ExitRecord
from peerload.launcher.record_log import LOG_BYTES_MAX, Exits, RecordLog, whole_records
from tests.support import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECORD = ExitRecord(exit_code=0, started_at=1.0, ended_at=2.0)


class Disk:
    """Syncs end when the test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Semaphore(0)
        self.begun = 0

    def sync(self) -> None:
        self.begun += 1
        assert self.may_end.acquire(timeout=60)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(RecordLog, "sync", made.sync)
    return made


@pytest.fixture
def woken() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def flushed(exits: Exits) -> list[EndedEvent]:
    """What can be reported, and is written."""
    exits.write()
    return exits.reportable()


def made(path: Path, woken: tuple[int, int]) -> Exits:
    exits = Exits(str(path))
    exits.set_wake_fd(woken[1])
    return exits


def keys(events: list[EndedEvent]) -> list[str]:
    return [event.key for event in events]


def test_what_is_to_be_synced_is_told_after_that_and_nothing_else_waits(
    tmp_path: Path, disk: Disk, woken: tuple[int, int]
) -> None:
    exits = made(tmp_path, woken)
    exits.add("once", RECORD, is_synced=True)
    exits.add("plain", RECORD, is_synced=False)
    assert keys(flushed(exits)) == ["plain"]
    assert exits.unsynced() == {"once"}
    wait_until(lambda: disk.begun == 1)
    exits.add("late", RECORD, is_synced=True)  # may not be part of the sync that runs
    assert flushed(exits) == []
    disk.may_end.release()
    assert _is_woken(woken)
    os.read(woken[0], 1)
    assert keys(flushed(exits)) == ["once"]
    wait_until(lambda: disk.begun == 2)
    disk.may_end.release()
    assert _is_woken(woken)
    assert keys(flushed(exits)) == ["late"]
    assert exits.unsynced() == set()


def _is_woken(woken: tuple[int, int]) -> bool:
    return bool(select.select([woken[0]], [], [], PATIENCE_S)[0])


def test_a_batch_takes_one_sync(tmp_path: Path, disk: Disk, woken: tuple[int, int]) -> None:
    exits = made(tmp_path, woken)
    for number in range(50):
        exits.add(f"k{number}", RECORD, is_synced=True)
    assert flushed(exits) == []
    disk.may_end.release()
    assert _is_woken(woken)
    assert len(flushed(exits)) == 50
    assert disk.begun == 1


def test_a_sync_that_fails_holds_nothing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, woken: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: RecordLog) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(RecordLog, "sync", fail)
    exits = made(tmp_path, woken)
    exits.add("a", RECORD, is_synced=True)
    assert flushed(exits) == []
    assert _is_woken(woken)
    assert keys(flushed(exits)) == ["a"]
    assert capfd.readouterr().err


def test_the_file_is_not_replaced_while_it_is_synced(tmp_path: Path, disk: Disk, woken: tuple[int, int]) -> None:
    exits = made(tmp_path, woken)
    exits.add("once", RECORD, is_synced=True)
    flushed(exits)
    inode = (tmp_path / "exits.log").stat().st_ino
    long = RECORD.replace(reason="x" * 400)
    for number in range(LOG_BYTES_MAX // 400):
        exits.add(f"k{number}", long, is_synced=False)
        flushed(exits)
        exits.forget(f"k{number}")
    assert (tmp_path / "exits.log").stat().st_ino == inode
    disk.may_end.release()
    assert _is_woken(woken)
    assert keys(flushed(exits)) == ["once"]
    exits.add("next", RECORD, is_synced=False)
    flushed(exits)
    assert (tmp_path / "exits.log").stat().st_size < LOG_BYTES_MAX
    assert [row[0] for row in whole_records(str(tmp_path / "exits.log"))[0]] == ["once", "next"]
    assert set(Exits(str(tmp_path)).ended) == {"once", "next"}


def test_what_was_forgotten_is_not_listed_by_the_next_launcher(tmp_path: Path, woken: tuple[int, int]) -> None:
    exits = made(tmp_path, woken)
    for key in ("a", "b"):
        exits.add(key, RECORD, is_synced=False)
    assert keys(flushed(exits)) == ["a", "b"]
    exits.forget("a")
    flushed(exits)
    assert set(Exits(str(tmp_path)).ended) == {"b"}


def test_a_record_that_the_disk_has_changed_is_not_believed(tmp_path: Path, woken: tuple[int, int]) -> None:
    exits = made(tmp_path, woken)
    for key in ("a", "b", "c"):
        exits.add(key, RECORD.replace(reason=f"of {key}"), is_synced=False)
    flushed(exits)
    path = tmp_path / "exits.log"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"of b", b"of x"))  # as good a record, if nobody looks at its checksum
    assert set(Exits(str(tmp_path)).ended) == {"a"}
    assert path.read_bytes() == raw[: path.stat().st_size]


def test_where_no_thread_can_be_made_the_launcher_waits_for_the_disk_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    exits = Exits(str(tmp_path))
    reading, writing = os.pipe()
    exits.set_wake_fd(writing)
    exits.add("a-1", RECORD, is_synced=True)
    flushed(exits)
    assert select.select([reading], [], [], 0)[0], "it is woken up to tell"
    assert keys(flushed(exits)) == ["a-1"]
    os.close(reading)
    os.close(writing)
