"""A task's output as it comes from the agent, written to our own stdout and stderr, byte for byte."""

from __future__ import annotations

import os

from peerload.cli.text import printable, say, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class OutputWriter:
    """Writes pieces of output unbuffered to the descriptors 1 and 2.

    What lies between two pieces was cut out by the capture limit, and is said so on stderr. raw: bytes are written as they
    are; without it that is so into pipes and files, and what goes to a terminal is made harmless to it (`Shown`). Raises
    BrokenPipeError if the reader has gone.
    """

    def __init__(self, *, raw: bool = True) -> None:
        self.missing_bytes = 0
        """So much was cut out of the middle of what was written."""
        self._next: dict[int, int | None] = {1: None, 2: None}
        self._shown = {} if raw else {stream: Shown() for stream in (1, 2) if os.isatty(stream)}

    def write(self, piece: dict[str, Any]) -> None:
        """One piece: {stream: 1|2, offset, data}."""
        stream, offset, data = piece["stream"], piece["offset"], piece["data"]
        if not data:
            return
        expected = self._next[stream]
        if expected is not None and offset > expected:
            self.missing_bytes += offset - expected
            say(f"{size_text(offset - expected)} of output are missing here: more was written than is kept")
        self._next[stream] = offset + len(data)
        shown = self._shown.get(stream)
        write_all(stream, data if shown is None else shown.of(data))

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
