"""The launcher on a full or failing disk, and with a date that was set: what it keeps, and what it says is lost."""

from __future__ import annotations

import _thread
import errno
import os
import select
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from peerload.agent.launcher.client import began_at, exit_of
from peerload.launcher import cgroup_limits
from peerload.launcher.cgroup_clone import CgroupClone
from peerload.launcher.cgroup_limits import PIDS, CgroupLimits
from peerload.launcher.containment import Cgroup2
from peerload.launcher.process import (
    CannotStart,
    Capture,
    HolePuncher,
    LauncherStdin,
    OwnCredentials,
    PseudoTerminals,
    spawn,
)
from peerload.launcher.protocol import ExitRecord, SpawnRequest
from peerload.launcher.record_log import LOG_BYTES_MAX, RecordLog, whole_records
from peerload.launcher.task import LaunchedTask
from tests.support import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.launcher.containment import Units


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- only how many


def test_a_log_that_cannot_be_rewritten_keeps_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "exits.log"
    log, rows = RecordLog(str(path)), [[f"k{number}", "x" * 400] for number in range(4000)]
    assert log.append(rows)
    before = open_files()
    assert log.size_bytes == path.stat().st_size > LOG_BYTES_MAX

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full)
    for _ in range(3):
        log.compact(rows[:2600], 2600)
    assert open_files() == before
    assert [found.name for found in tmp_path.iterdir()] == ["exits.log"]
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, raw: write(fd, bytes(raw)[:5]))  # as if it became full
    assert not log.append([["new", "y"]])
    assert len(whole_records(str(path))[0]) == 4000
    log.close()


def test_bytes_of_a_terminal_that_a_full_disk_does_not_take_are_counted() -> None:
    with select.epoll() as epoll:
        terminals = PseudoTerminals(epoll)
        for closes_first in (False, True):
            terminal = terminals.open("a", "/dev/full", 24, 80)
            os.write(terminal.slave, b"printed")
            wait_until(lambda: epoll.poll(0), what="the output")
            if closes_first:
                terminals.ready({terminal.master: select.EPOLLIN})
            assert terminals.close("a") == len(b"printed")
            assert terminals.close("a") == 0, "told once"


class NoRoomForHoles(HolePuncher):
    """A file system that has holes, and no room to note one."""

    def punch(self, fd: int, offset: int, size_bytes: int) -> bool:
        del fd, offset, size_bytes
        return False


@pytest.mark.parametrize("missing", ["pipe2", "open", "fork"])
def test_a_process_that_is_not_forked_for_want_of_descriptors_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    paths = str(tmp_path / "out"), str(tmp_path / "err")
    request = SpawnRequest("a-1", [b"/bin/true"], {}, b"/", 0o22, *paths, 0.0, 0)
    before = open_files()

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as short:
        short.setattr(os, missing, refuse)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            spawn(request, clone=cast("CgroupClone", SimpleNamespace(can_spawn=False, fork=os.fork)))
    assert open_files() == before


def test_where_no_process_can_be_cloned_the_trial_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: CgroupClone) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(_thread, "_count", lambda: 0)
    monkeypatch.setattr(CgroupClone, "fork", refuse)
    monkeypatch.setattr(Cgroup2, "enter", lambda self, *_, **__: self.clone.enter(str(tmp_path)))
    monkeypatch.setattr(Cgroup2, "close", lambda *_: True)
    units = Cgroup2.__new__(Cgroup2)
    units.clone, units._is_moved = None, False
    before = open_files()
    units._try_clone()
    assert units.clone is None
    assert open_files() == before


@pytest.mark.parametrize("terminal", [(24, 80), ()])
def test_an_input_that_cannot_be_opened_costs_no_descriptors(tmp_path: Path, terminal: tuple[int, ...]) -> None:
    request = SimpleNamespace(
        key="a", input=str(tmp_path / "no/input"), terminal=terminal, stdout=str(tmp_path / "out")
    )
    with select.epoll() as epoll:
        before = open_files()
        standard_input = LauncherStdin(epoll, [], OwnCredentials())
        with pytest.raises(CannotStart):
            standard_input.open(cast("SpawnRequest", request))
        standard_input.close("a")
        assert open_files() == before


def test_output_that_cannot_be_limited_now_is_left_whole(tmp_path: Path) -> None:
    path, size = tmp_path / "out", 4 << 20
    path.write_bytes(b"x" * size)
    capture = Capture(str(path), 1 << 20, OwnCredentials())
    assert capture.limit(NoRoomForHoles()) == path.stat().st_size == size
    assert capture.limit(HolePuncher()) == size, "tried again later"


def test_a_disk_that_fails_while_output_is_limited_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, holes = tmp_path / "out", HolePuncher()
    path.write_bytes(b"x" * (4 << 20))
    holes.is_supported = False

    def fails(_: int, __: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "ftruncate", fails)
    before = open_files()
    assert Capture(str(path), 1 << 20, OwnCredentials()).limit(holes) == 4 << 20
    assert open_files() == before


def test_a_date_near_1970_that_was_set_during_a_run_makes_no_invalid_exit() -> None:
    task = LaunchedTask.__new__(LaunchedTask)
    task.started_at, task.ended_at, task.ran_s = 1.8e9, 20.0, 3600.0
    assert exit_of(ExitRecord(0, task._start_date(), task.ended_at)).started_at == 0.0
    assert began_at(1.8e9, time.time() + 3600.0) == 0.0


def test_a_cgroup_that_somebody_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "pids"
    own.mkdir()
    (own / "cgroup.procs").touch()
    monkeypatch.setattr(cgroup_limits, "own_cgroup", lambda _: str(own))

    def write(path: str, raw: bytes) -> None:
        if not os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120 -- as the kernel does
            raise FileNotFoundError(errno.ENOENT, path)
        del raw

    monkeypatch.setattr(cgroup_limits, "write", write)
    limits = CgroupLimits(str(tmp_path), cast("Units", None), "root", (PIDS,))
    for _ in range(2):
        limits.enter("a", 10, 1.0)
        limits.leave()
        limits.close("a")
        (made,) = (own / "root").iterdir()
        made.rmdir()
    limits.remove()
