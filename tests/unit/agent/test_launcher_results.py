"""Copying what was captured into the file that a user wants it in."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NoReturn

import pytest

from peerload.agent.launcher_results import copy, empty

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("tail", [b"end", b""])
def test_a_hole_is_left_out(tmp_path: Path, tail: bytes) -> None:
    captured, target = tmp_path / "captured", tmp_path / "target"
    with captured.open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(1 << 20)
        if tail:
            file.seek(1 << 20)
            file.write(tail)
    with captured.open("rb") as source, target.open("wb") as made:
        copy(source.fileno(), made.fileno())
    assert target.read_bytes().rstrip(b"\0") == b"x" * 4096 + tail


def test_a_disk_that_cannot_give_it_is_no_end_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "the disk is broken")

    captured, target = tmp_path / "captured", tmp_path / "target"
    captured.write_bytes(b"whole")
    monkeypatch.setattr(os, "lseek", broken)
    with (
        captured.open("rb", buffering=0) as source,
        target.open("wb", buffering=0) as made,
        pytest.raises(OSError, match="the disk is broken"),
    ):
        copy(source.fileno(), made.fileno())


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
