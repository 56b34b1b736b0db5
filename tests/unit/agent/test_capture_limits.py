"""Captured output is held to its limit by what it takes of the disk, and not by what it says of its size."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import pytest

from peerload.launcher.process import Capture, HolePuncher, OwnCredentials
from tests.each import each

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_BYTES = 1 << 20
KEEP_SIZE = 1


@pytest.mark.rule("F2", "L4")
@each("size", [5, 4 * LIMIT_BYTES])
def test_what_is_reserved_beyond_its_end_is_given_back(tmp_path: Path, size: int) -> None:
    """A task may have the disk keep room for its output, of which the file's size tells nothing."""
    path = tmp_path / "out"
    path.write_bytes(b"x" * size)
    with path.open("r+b") as file:
        reserve = ctypes.CDLL(None).fallocate
        reserve.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if reserve(file.fileno(), KEEP_SIZE, 0, 64 << 20) != 0:
            pytest.skip("this file system reserves nothing")
        assert path.stat().st_blocks * 512 >= 64 << 20
        assert Capture(str(path), LIMIT_BYTES, OwnCredentials()).limit(HolePuncher()) == size
        found = os.fstat(file.fileno())
    assert found.st_size == size
    assert found.st_blocks * 512 <= 2 * LIMIT_BYTES
    assert path.read_bytes()[:5] == b"xxxxx"


def test_a_file_that_is_gone_keeps_the_size_that_was_seen(tmp_path: Path) -> None:
    """The agent finds its output missing, and says so; 0 would be an empty output."""
    path, holes = tmp_path / "out", HolePuncher()
    capture = Capture(str(path), LIMIT_BYTES, OwnCredentials())
    assert capture.limit(holes) == 0
    path.write_bytes(b"printed")
    assert capture.limit(holes) == 7
    path.unlink()
    assert capture.close(holes) == 7
    assert Capture(str(path), LIMIT_BYTES, OwnCredentials()).close(holes) == 0
