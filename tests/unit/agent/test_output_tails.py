"""Where the last lines of an output begin."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerload.agent.output.spool import BLOCK_BYTES, tail_start
from tests.each import each

if TYPE_CHECKING:
    from pathlib import Path


def last(path: Path, data: bytes, lines: int) -> bytes:
    path.write_bytes(data)
    return data[tail_start(path, lines, len(data)) :]


@each(
    ("data", "lines", "expected"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\n", 5, b"a\nb\n"),
        (b"a\n", 0, b""),
        (b"", 3, b""),
        (b"\n\n\n", 2, b"\n\n"),
        (b"x" * (3 * BLOCK_BYTES) + b"\nend", 1, b"end"),
        (b"a\n" + b"x" * (3 * BLOCK_BYTES), 1, b"x" * (3 * BLOCK_BYTES)),
    ],
)
def test_last_lines(tmp_path: Path, data: bytes, lines: int, expected: bytes) -> None:
    assert last(tmp_path / "o", data, lines) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.sampled_from([b"\n", b"a", b"b" * 1000, b"c" * BLOCK_BYTES]), max_size=12), st.integers(0, 8))
def test_as_a_plain_reading_of_all_would_have_it(tmp_path: Path, parts: list[bytes], lines: int) -> None:
    data = b"".join(parts)
    expected = b"".join(data.splitlines(keepends=True)[-lines:]) if lines else b""
    assert last(tmp_path / "o", data, lines) == expected


def test_what_was_cut_out_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "o"
    hole = 1 << 20
    with path.open("wb") as file:
        file.write(b"head\n" + b"h" * 4085 + b"\nlast\n")  # up to a whole page, so that the hole is one
        file.seek(hole)
        file.write(b"of a line\nx\ny\n")
    if path.stat().st_blocks * 512 >= hole:
        pytest.skip("no holes on this file system")
    end = hole + len(b"of a line\nx\ny\n")
    assert tail_start(path, 2, end) == hole + len(b"of a line\n")
    assert tail_start(path, 3, end) == hole
    data = path.read_bytes()
    assert data[tail_start(path, 4, end) :].startswith(b"last\n")
    assert tail_start(path, 6, end) == 0


def test_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o"
    path.write_bytes(b"0123456\n" * (2 << 20))
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert tail_start(path, 100, 16 << 20) == (16 << 20) - 800
    assert sum(read) == BLOCK_BYTES


def test_an_output_that_is_not_there_begins_at_its_beginning(tmp_path: Path) -> None:
    assert tail_start(tmp_path / "nothing", 5, 100) == 0
    (tmp_path / "directory").mkdir()
    assert tail_start(tmp_path / "directory", 5, 100) == 0
