"""Tail of a captured output: the offset of its last lines, found from the end, so that only these lines are read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from peerload.agent.output.spool import open_output

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 64 << 10
"""Read at a time."""


def tail_start(path: Path, lines: int, end: int) -> int:
    """The offset at which the last ``lines`` lines of what lies before ``end`` begin; one that is not ended by a newline
    counts. What the capture limit has cut out is no line, and ends the one before it. 0 where the file is missing or
    cannot be read. Blocks: for a thread."""
    try:
        fd = open_output(path)
    except OSError:
        return 0
    try:
        return _start(fd, lines, min(end, os.fstat(fd).st_size))
    except OSError:
        return 0
    finally:
        os.close(fd)


def _start(fd: int, lines: int, end: int) -> int:
    if lines <= 0 or end <= 0:
        return max(end, 0)
    left = lines
    at = end
    is_last = True
    while at > 0:
        before = max(at - BLOCK_BYTES, 0)
        first, after = _last_run(fd, before, at)
        if first >= after:  # nothing but a hole
            at = before
            continue
        block = os.pread(fd, after - first, first)
        stop = len(block)
        if is_last and block.endswith(b"\n"):
            stop -= 1
        is_last = False
        while (newline := block.rfind(b"\n", 0, stop)) >= 0:
            left -= 1
            if not left:
                return first + newline + 1
            stop = newline
        if first > before:  # a hole lies before it: here a line begins
            left -= 1
            if not left:
                return first
            is_last = True
        at = first
    return 0


def _last_run(fd: int, first: int, end: int) -> tuple[int, int]:
    """The begin and the end of the last run of data in this range; twice ``end`` if there is none."""
    run = end, end
    at = first
    while at < end:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # a hole up to the end of the file
            break
        if data >= end:
            break
        at = os.lseek(fd, data, os.SEEK_HOLE)
        run = data, min(at, end)
    return run
