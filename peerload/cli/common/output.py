"""Writers of a task's output to stdout and stderr as it arrives; a progress bar."""

from __future__ import annotations

import os
import select
import sys
import time

from peerload.client.connection import RECONNECT_EVERY_S, OutputGaps, Reconnection
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.text.format import duration_text, print_json, say, size_text, terminal_columns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from peerload.client.connection import AgentConnection


def followed(
    client: AgentConnection,
    verb: str,
    asked: Callable[[], dict[str, object]],
    *,
    until_s: float = float("inf"),
    stdout: int = 1,
) -> Iterator[dict[str, Any]]:
    """The parts of an answer that may never end. If the agent disconnects and returns within RECONNECT_S_MAX and before ``until_s``
    (monotonic), the request is sent again with the current fields from ``asked``. Raises BrokenPipeError as soon as the reader of
    stdout has closed it, not only at the next write."""
    reconnection = Reconnection(until_s=until_s)
    while True:
        try:
            poll = select.poll()
            poll.register(stdout, 0)  # reports errors only
            if reconnection.is_lost:
                if poll.poll(RECONNECT_EVERY_S * 1000):
                    raise BrokenPipeError
                client.connect()
            poll.register(client, select.POLLIN)
            for part in client.stream(verb, **asked()):
                reconnection.answered()
                yield part
                ready = poll.poll()
                if (stdout, select.POLLERR) in ready and len(ready) == 1:
                    raise BrokenPipeError
        except PeerloadError as error:
            if not reconnection.continues(error):
                raise
            client.close()
        else:
            return


class OutputWriter:
    """Writes pieces of output unbuffered to the descriptors 1 and 2.

    A gap between two pieces, caused by the capture limit, is reported on stderr. raw: bytes are written unchanged; without
    it, output to a terminal is sanitized (`SanitizedOutput`), and output to pipes and files is not changed. is_whole,
    streams: as for `OutputGaps`. is_json: each piece is printed as an object. Raises BrokenPipeError if the reader closed stdout.
    """

    def __init__(
        self, *, raw: bool = True, is_whole: bool = True, is_json: bool = False, streams: Iterable[int] = (1, 2)
    ) -> None:
        self._is_json = is_json
        self._gaps = OutputGaps(is_whole=is_whole, streams=streams)
        self._shown = {} if raw else {stream: SanitizedOutput() for stream in (1, 2) if os.isatty(stream)}

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
        return self._gaps.missing_bytes

    def end(self, reply: dict[str, Any]) -> None:
        """Report output that is missing at the end, from the final reply."""
        if gap := self._gaps.end(reply):
            say(f"{size_text(gap)} of output are missing at the end: they cannot be read")

    def close(self) -> None:
        """Write an incomplete last character."""
        for stream, shown in self._shown.items():
            write_all(stream, shown.of(b"", final=True))


class SanitizedOutput:
    r"""Output sanitized for a terminal, piece by piece: lines and tabs are kept; other control characters, bidi controls and bytes
    that are not UTF-8 become ``\x1b``-style escapes. A character may be split between pieces."""

    def __init__(self) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""

    def of(self, data: bytes, *, final: bool = False) -> bytes:
        """The bytes to write for the next piece."""
        words = (self._held + self._decoder.decode(data, final)).replace("\r\n", "\n")
        self._held = "\r" if words.endswith("\r") and not final else ""  # may be the first half of \r\n
        words = words.removesuffix(self._held)
        lines = ("\t".join(map(printable, line.split("\t"))) for line in words.split("\n"))
        return "\n".join(lines).encode()


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; wait until a non-blocking descriptor is writable."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            import select

            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


BAR_EVERY_S = 0.2
LINES_EVERY_S = 10.0
"""Pause between lines if stderr is not a terminal."""
_BAR_WIDTH = 30
COLUMNS, COLUMNS_MIN = 80, 20


class Bar:
    """A progress bar on stderr; if that is not a terminal, a line every ``lines_every_s``."""

    def __init__(self, lines_every_s: float = LINES_EVERY_S) -> None:
        self._lines_every_s = lines_every_s
        self._is_terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._drawn_s = self._began_s if not self._is_terminal else float("-inf")
        self._is_drawn = False

    def show(self, done: int, failed: int, total: int | None, *, at_once: bool = False) -> None:
        """Draw the bar, unless it was just drawn. ``total``: None if it is not known yet."""
        now_s = time.monotonic()
        every_s = BAR_EVERY_S if self._is_terminal else self._lines_every_s
        if now_s - self._drawn_s < every_s and not at_once:
            return
        self._drawn_s = now_s
        text = bar_text(done, failed, total, now_s - self._began_s)
        if self._is_terminal:
            width = max(terminal_columns(sys.stderr) or COLUMNS, COLUMNS_MIN)
            sys.stderr.write(f"\r\x1b[K{text[: width - 1]}")
            self._is_drawn = True
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the bar before other lines are printed."""
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False
            self._drawn_s = float("-inf")


def bar_text(done: int, failed: int, total: int | None, spent_s: float) -> str:
    """``[#####     ] 50% 5/10  1 failed  ETA 12s``; without a total ``5 done  1 failed  12s``."""
    told = f"  {failed} failed" if failed else ""
    if total is None:
        return f"{done} done{told}  {duration_text(spent_s)}"
    share = done / total if total else 1.0
    filled = int(share * _BAR_WIDTH)
    left = duration_text(spent_s / done * (total - done)) if done else "-"
    when = f"ETA {left}" if done < total else duration_text(spent_s)
    return f"[{'#' * filled}{' ' * (_BAR_WIDTH - filled)}] {int(share * 100)}% {done}/{total}{told}  {when}"
