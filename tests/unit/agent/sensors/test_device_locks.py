"""One GPU, one agent."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from peerload.agent.sensors.gpus import DeviceLocks
from peerload.model.resources import Device
from tests.each import each

CARDS = tuple(Device(f"nvidia:GPU-fake-{number}", index=number) for number in range(2))
FILE = f"peerload-device-{CARDS[0].mark:08x}"


def test_a_card_is_claimed_by_one_agent(tmp_path: Path) -> None:
    first, second = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    assert first.claim(CARDS[:1]) == CARDS[:1]
    assert second.claim(CARDS) == CARDS[1:]
    assert str(os.getpid()) in second.refused["nvidia:GPU-fake-0"]
    assert first.claim(CARDS) == CARDS[:1]
    first.close()
    assert second.claim(CARDS) == CARDS
    second.close()


def test_a_card_that_is_left_alone_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    first.claim(CARDS[:1])
    for _ in range(3):
        second.claim(CARDS)
    assert len(caplog.records) == 1
    first.close()
    second.claim(CARDS)
    assert not second.refused
    second.close()


def _as_another_user(monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[Path, int], bool]) -> None:
    """Files are opened as a user may who does not own them; the tests may be root's."""
    opens = os.open

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if is_refused(path, flags):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opens(path, flags, mode)

    monkeypatch.setattr(os, "open", opened)


@each("may_write", [True, False])
def test_the_file_of_another_user_is_locked_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, may_write: bool
) -> None:
    first, second = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    assert first.claim(CARDS[:1]) == CARDS[:1]

    def is_refused(path: Path, flags: int) -> bool:
        """As with fs.protected_regular, or with a file that only its owner may write."""
        if not path.exists() or flags & os.O_EXCL:
            return False
        return bool(flags & os.O_CREAT) or (bool(flags & os.O_RDWR) and not may_write)

    _as_another_user(monkeypatch, is_refused)
    assert second.claim(CARDS[:1]) == ()
    assert "nvidia:GPU-fake-0" in second.refused
    first.close()
    assert second.claim(CARDS[:1]) == CARDS[:1]
    third = DeviceLocks(tmp_path)
    assert third.claim(CARDS[:1]) == ()
    second.close()
    third.close()


def test_a_card_that_cannot_be_claimed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claims = DeviceLocks(tmp_path / "nowhere")
    assert claims.claim(CARDS[:1]) == ()
    assert len(caplog.records) == 1
    assert "nvidia:GPU-fake-0" in claims.refused
    claims = DeviceLocks(tmp_path)
    os.mkfifo(tmp_path / FILE)
    assert claims.claim(CARDS[:1]) == ()
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to("elsewhere")
    assert claims.claim(CARDS[:1]) == ()
    (tmp_path / FILE).unlink()
    _as_another_user(monkeypatch, lambda _path, _flags: True)
    assert claims.claim(CARDS[:1]) == ()
    monkeypatch.undo()
    assert claims.claim(CARDS[:1]) == CARDS[:1]
    claims.close()


def test_a_claim_holds_though_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: bytes, _offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    first, second = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    assert first.claim(CARDS[:1]) == CARDS[:1]
    assert second.claim(CARDS[:1]) == ()
    assert "nvidia:GPU-fake-0" in second.refused
    first.close()


def test_files_are_where_the_machine_keeps_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roots, everybodys = tmp_path / "roots", tmp_path / "everybodys"
    places = (tmp_path / "nowhere", roots, everybodys, tmp_path / "temporary")
    for place, mode in zip(places[1:], (0o755, 0o1777, 0o1777), strict=True):
        place.mkdir()
        place.chmod(mode)
    monkeypatch.setattr("peerload.agent.sensors.gpus.PLACES", places)
    claims = DeviceLocks()
    claims.claim(CARDS[:1])
    assert [place for place in places if (place / FILE).exists()] == [everybodys]
    claims.close()


def test_where_nothing_can_be_written_an_agent_starts_and_claims_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A unit with ProtectSystem=strict on a machine whose /run/lock is root's alone."""
    tmp_path.chmod(0o755)
    monkeypatch.setattr("peerload.agent.sensors.gpus.PLACES", (tmp_path, tmp_path / "nowhere"))
    claims = DeviceLocks()
    assert claims.claim(CARDS[:1]) == ()
    assert CARDS[0].id in claims.refused
