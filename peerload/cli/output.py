"""A task's output as it comes from the agent, written to our own stdout and stderr, byte for byte."""

from __future__ import annotations

import os

from peerload.cli.text import say, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class OutputWriter:
    """Writes pieces of output unbuffered to the descriptors 1 and 2.

    ``first``: per stream the offset below which nothing is shown. What lies between two pieces was cut out by the
    capture limit, and is said so on stderr. Raises BrokenPipeError if the reader has gone.
    """

    def __init__(self, first: dict[int, int] | None = None) -> None:
        self._next: dict[int, int | None] = {1: None, 2: None}
        self._first = first or {}

    def write(self, piece: dict[str, Any]) -> None:
        """One piece: {stream: 1|2, offset, data}."""
        stream, offset, data = piece["stream"], piece["offset"], piece["data"]
        first = self._first.get(stream, 0)
        if offset < first:
            data = data[first - offset :]
            offset = first
        if not data:
            return
        expected = self._next[stream]
        if expected is not None and offset > expected:
            say(f"{size_text(offset - expected)} of output are missing here: more was written than is kept")
        self._next[stream] = offset + len(data)
        write_all(stream, data)


def write_all(descriptor: int, data: bytes) -> None:
    """Every byte, however few the descriptor takes at a time; waits for room on one that does not block."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            import select

            select.select([], [descriptor], [])
