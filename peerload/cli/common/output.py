"""A task's output as it comes from the agent, written to our own stdout and stderr, byte for byte."""

from __future__ import annotations

import os

from peerload.client.protocol import OutputGaps
from peerload.model.text import printable
from peerload.text.format import print_json, say, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class OutputWriter:
    """Writes pieces of output unbuffered to the descriptors 1 and 2.

    What is missing between two pieces was cut out by the capture limit, and stderr says so. raw: bytes are written as they
    are; without it that is so into pipes and files, and what goes to a terminal is made harmless to it (`Shown`). is_whole:
    as `OutputGaps` has it; is_json: each piece is printed as an object. Raises BrokenPipeError if the reader has gone.
    """

    def __init__(self, *, raw: bool = True, is_whole: bool = True, is_json: bool = False) -> None:
        self._is_json = is_json
        self._gaps = OutputGaps(is_whole=is_whole)
        self._shown = {} if raw else {stream: Shown() for stream in (1, 2) if os.isatty(stream)}

    def write(self, piece: dict[str, Any]) -> None:
        """One piece: {stream: 1|2, offset, data}."""
        stream, data = piece["stream"], piece["data"]
        if not data:
            return
        if gap := self._gaps.add(piece):
            say(f"{size_text(gap)} of output are missing here: more was written than is kept")
        if self._is_json:
            print_json(piece)
            return
        shown = self._shown.get(stream)
        write_all(stream, data if shown is None else shown.of(data))

    @property
    def missing_bytes(self) -> int:
        """How much is missing of what the task has written."""
        return self._gaps.missing_bytes

    def end(self, reply: dict[str, Any]) -> None:
        """Say what is missing at the end, by the reply that ends the answer about both streams."""
        if gap := self._gaps.end(reply):
            say(f"{size_text(gap)} of output are missing at the end: they were written, and cannot be read")

    def close(self) -> None:
        """Write what was held back: the beginning of a character that nothing followed."""
        for stream, shown in self._shown.items():
            write_all(stream, shown.of(b"", final=True))


class Shown:
    r"""Output as a terminal may be given it, piece by piece: lines and tabs are kept; every other control character, colours
    among them, bidi controls and bytes that are no UTF-8 become ``\x1b``-style escapes. A character may be in two pieces."""

    def __init__(self) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""

    def of(self, data: bytes, *, final: bool = False) -> bytes:
        """What to write for the next piece."""
        words = (self._held + self._decoder.decode(data, final)).replace("\r\n", "\n")
        self._held = (
            "\r" if words.endswith("\r") and not final else ""
        )  # of a line that ends as on other systems, perhaps
        words = words.removesuffix(self._held)
        lines = ("\t".join(map(printable, line.split("\t"))) for line in words.split("\n"))
        return "\n".join(lines).encode()


def write_all(descriptor: int, data: bytes) -> None:
    """Every byte, however few the descriptor takes at a time; waits for room on one that does not block."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            import select

            select.select([], [descriptor], [])
