"""The claim on a database: whose launcher an agent may end, and whose it leaves alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
from typing import TYPE_CHECKING

import pytest

from peerload.agent import preflight
from peerload.agent.preflight import claim, end_foreign_launcher
from peerload.launcher.server import claim_store
from peerload.model.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Launcher:
    """This process, which says that it is the launcher of a database; the signals that it would have got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = secrets.token_hex(8)
        self.signals: list[tuple[int, int]] = []
        self.ends = True
        held = claim_store(self.store)
        assert held is not None
        self.held = held
        monkeypatch.setattr(os, "kill", lambda pid, number: self.signals.append((pid, number)))
        monkeypatch.setattr(preflight, "wait_gone", lambda _pid, _seconds: None)
        monkeypatch.setattr(preflight, "is_alive", lambda _pid: not self.ends)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    made = Launcher(monkeypatch)
    with contextlib.closing(made.held):
        yield made


def test_the_launcher_of_a_copy_is_ended(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "launcher.lock").touch()  # nobody holds that of this directory
    assert end_foreign_launcher(launcher.store, tmp_path)
    assert launcher.signals == [(os.getpid(), signal.SIGTERM)]


def test_one_that_does_not_end_stops_the_start(launcher: Launcher, tmp_path: Path) -> None:
    launcher.ends = False
    with pytest.raises(StoreError, match=f"pid {os.getpid()}"):
        end_foreign_launcher(launcher.store, tmp_path)


def test_a_process_of_another_user_is_left_alone(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may take the name: an agent of root would end their process of choice."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not end_foreign_launcher(launcher.store, tmp_path)
    assert launcher.signals == []


def test_the_launcher_of_this_very_directory_is_left_alone(launcher: Launcher, tmp_path: Path) -> None:
    with (tmp_path / "launcher.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not end_foreign_launcher(launcher.store, tmp_path)
    assert launcher.signals == []


def test_a_claim_is_held_until_it_is_closed(tmp_path: Path) -> None:
    store = secrets.token_hex(8)
    with contextlib.closing(claim(store, tmp_path)):
        with pytest.raises(StoreError, match=f"pid {os.getpid()}"):
            claim(store, tmp_path)
        claim(secrets.token_hex(8), tmp_path).close()
    claim(store, tmp_path).close()
