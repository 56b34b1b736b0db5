"""Copying what was captured into the file that a user wants it in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from peerload.launcher.system.write_as_user import FileChanged, append, empty

if TYPE_CHECKING:
    from pathlib import Path


def test_a_part_goes_to_its_place_however_often_it_is_written(tmp_path: Path) -> None:
    captured, target = tmp_path / "captured", tmp_path / "target"
    captured.write_bytes(b"0123456789")
    with captured.open("rb") as source:
        fd = source.fileno()
        append(bytes(target), [(fd, 0, 4)], 0o027, 0, ends=False)
        for _ in range(2):
            append(bytes(target), [(fd, 4, 6), (fd, 8, 10)], 0o027, 4, ends=True)
            assert target.read_bytes() == b"01234589"
        assert target.stat().st_mode & 0o777 == 0o640
        target.write_bytes(b"012")
        with pytest.raises(FileChanged):
            append(bytes(target), [(fd, 4, 6)], 0o027, 4, ends=False)
        target.unlink()
        with pytest.raises(FileChanged):
            append(bytes(target), [(fd, 4, 6)], 0o027, 4, ends=False)


def test_a_part_that_was_cut_meanwhile_is_not_written_as_zeros(tmp_path: Path) -> None:
    captured, target = tmp_path / "captured", tmp_path / "target"
    with captured.open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 20)
        file.write(b"end")
    with captured.open("rb") as source, pytest.raises(OSError, match="cut meanwhile"):
        append(bytes(target), [(source.fileno(), 0, 1 << 20)], 0o022, 0, ends=False)
    assert target.read_bytes() == b""


def test_a_directory_is_emptied_whatever_was_put_there(tmp_path: Path) -> None:
    """Deeper than any path is long, shut, with names that stand in the way, and with links that nobody follows."""
    outside, place = tmp_path / "outside", tmp_path / "place"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    place.mkdir()
    (place / ".1").write_text("in the way")
    (place / "link").symlink_to(outside)
    at = os.open(place, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d" * 200, dir_fd=at)
        (below, above) = os.open("d" * 200, os.O_RDONLY, dir_fd=at), at
        os.close(above)
        os.symlink(outside, "link", dir_fd=below)
        at = below
    os.fchmod(at, 0)
    os.close(at)
    (place / "shut").mkdir()
    (place / "shut" / "file").write_text("x")
    (place / "shut").chmod(0)
    empty(bytes(place))
    assert list(place.iterdir()) == []
    assert (outside / "kept").read_text() == "kept"


def test_a_directory_that_has_become_a_link_keeps_the_permissions_of_its_target(tmp_path: Path) -> None:
    """A process that a task has left in the background may put the link there while the directory is emptied."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        empty(bytes(tmp_path / "link"))
    assert outside.stat().st_mode & 0o777 == 0o500
