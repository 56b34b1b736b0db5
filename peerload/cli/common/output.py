"""The output of a task, written to our stdout and stderr as it comes."""

from __future__ import annotations

import os
from typing import Any

from peerload.client.protocol import OutputGaps
from peerload.model.text import printable
from peerload.text.format import print_json, say, size_text


class OutputWriter:
    """Writes pieces of output unbuffered to the descriptors 1 and 2.

    A gap between two pieces was cut out by the capture limit; stderr says so. raw: bytes are written as they are; without it, output
    to a terminal is made harmless (`HarmlessOutput`), and output to pipes and files is not changed. is_whole: as for `OutputGaps`.
    is_json: each piece is printed as an object. Raises BrokenPipeError if the reader has gone.
    """

    def __init__(self, *, raw: bool = True, is_whole: bool = True, is_json: bool = False) -> None:
        self._is_json = is_json
        self._gaps = OutputGaps(is_whole=is_whole)
        self._shown = {} if raw else {stream: HarmlessOutput() for stream in (1, 2) if os.isatty(stream)}

    def write(self, piece: dict[str, Any]) -> None:
        """Write one piece {stream: 1|2, offset, data}."""
        stream, data = piece["stream"], piece["data"]
        if not data:
            return
        if gap := self._gaps.add(piece):
            say(f"{size_text(gap)} of output are missing here: the capture limit was exceeded")
        if self._is_json:
            print_json(piece)
            return
        shown = self._shown.get(stream)
        write_all(stream, data if shown is None else shown.of(data))

    @property
    def missing_bytes(self) -> int:
        """The bytes of output that are missing so far."""
        return self._gaps.missing_bytes

    def end(self, reply: dict[str, Any]) -> None:
        """Say what is missing at the end, from the final reply of an answer about both streams."""
        if gap := self._gaps.end(reply):
            say(f"{size_text(gap)} of output are missing at the end: they cannot be read")

    def close(self) -> None:
        """Write what was held back: an incomplete character."""
        for stream, shown in self._shown.items():
            write_all(stream, shown.of(b"", final=True))


class HarmlessOutput:
    r"""Output made harmless to a terminal, piece by piece: lines and tabs are kept; other control characters, bidi controls and bytes
    that are not UTF-8 become ``\x1b``-style escapes. A character may be split between pieces."""

    def __init__(self) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""

    def of(self, data: bytes, *, final: bool = False) -> bytes:
        """The bytes to write for the next piece."""
        words = (self._held + self._decoder.decode(data, final)).replace("\r\n", "\n")
        self._held = "\r" if words.endswith("\r") and not final else ""  # perhaps the first half of \r\n
        words = words.removesuffix(self._held)
        lines = ("\t".join(map(printable, line.split("\t"))) for line in words.split("\n"))
        return "\n".join(lines).encode()


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; wait for room if the descriptor does not block."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            import select

            select.select([], [descriptor], [])
