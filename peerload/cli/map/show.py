"""The display of `map`: the output of each task in one piece, in the order of ends or inputs, and a progress bar."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common.messages import exit_code_of
from peerload.cli.common.output import write_all
from peerload.model.text import printable
from peerload.text.format import duration_text, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Fetch = Callable[[str], Iterator[dict[str, Any]]]

KEPT_BYTES_MAX = 64 << 20
"""Output kept in memory for --keep-order; beyond that it is fetched when its turn comes."""
KEPT_TASKS_MAX = 10_000
"""Bound of ended tasks that wait for their turn; no others are submitted meanwhile."""
BAR_EVERY_S = 0.2
LINES_EVERY_S = 10.0
"""Pause between lines if stderr is no terminal."""
_BAR_WIDTH = 30
COMMAND_WIDTH_MAX = 100
COLUMNS, COLUMNS_MIN = 80, 20


class MapResult:
    """A task that has ended: its number, its inputs, and its part of the answer to `wait`."""

    __slots__ = ("body", "number", "tag")

    def __init__(self, number: int, tag: bytes, body: dict[str, Any]) -> None:
        self.number = number
        self.tag = tag
        self.body = body


class MapView:
    """The display of a map while it runs; this one shows nothing."""

    @property
    def is_full(self) -> bool:
        """True if no more tasks should be submitted for now."""
        return False

    def ended(self, task: MapResult) -> None:
        """A task has ended."""

    def skipped(self, number: int) -> None:
        """A task was done in an earlier run."""

    def progress(self) -> None:
        """Update the bar; called often."""


class Outputs:
    """Prints outputs byte for byte, stdout on 1 and stderr on 2, the output of one task in one piece.

    ``fetch(id)``: the pieces of an output that is not in the body. ``before``: called before anything is printed.
    """

    def __init__(
        self, fetch: Fetch, *, keeps_order: bool = False, tags: bool = False, before: Callable[[], None] = lambda: None
    ) -> None:
        self._fetch = fetch
        self._keeps_order = keeps_order
        self._tags = tags
        self._before = before
        self._next = 1
        self._waiting: dict[int, MapResult | None] = {}
        self._kept_bytes = 0

    def ended(self, task: MapResult) -> None:
        """Print the output of a task, or keep it until its turn comes."""
        if not self._keeps_order:
            self._print(task)
            return
        size = _size(task.body)
        if size and self._kept_bytes + size > KEPT_BYTES_MAX:
            task.body.pop("stdout")
            task.body.pop("stderr")
            size = 0
        self._kept_bytes += size
        self._waiting[task.number] = task
        self._print_ready()

    @property
    def is_full(self) -> bool:
        """True if the bound of kept tasks is reached."""
        return len(self._waiting) >= KEPT_TASKS_MAX

    def skipped(self, number: int) -> None:
        """A task was done in an earlier run: it has no output."""
        if self._keeps_order:
            self._waiting[number] = None
            self._print_ready()

    def finish(self) -> None:
        """Print all outputs that are still kept."""
        for number in sorted(self._waiting):
            self._release(self._waiting.pop(number))

    def _print_ready(self) -> None:
        while self._next in self._waiting:
            self._release(self._waiting.pop(self._next))
            self._next += 1

    def _release(self, task: MapResult | None) -> None:
        if task is not None:
            self._kept_bytes -= _size(task.body)
            self._print(task)

    def _print(self, task: MapResult) -> None:
        body = task.body
        if not body.get("stdout_bytes") and not body.get("stderr_bytes"):
            return
        self._before()
        tag = task.tag if self._tags else b""
        written = {stream: _Tagged(stream, tag) for stream in (1, 2)} if self._tags else {}
        for stream, data in self._pieces(body):
            if written:
                written[stream].write(data)
            else:
                write_all(stream, data)

    def _pieces(self, body: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
        if "stdout" in body:
            for stream, key in ((1, "stdout"), (2, "stderr")):
                if body[key]:
                    yield stream, body[key]
            return
        for piece in self._fetch(body["id"]):
            if "data" in piece:
                yield piece["stream"], piece["data"]


class _Tagged:
    """A stream with a tag before each line."""

    def __init__(self, stream: int, tag: bytes) -> None:
        self._stream = stream
        self._tag = printable(tag).encode("utf-8", "backslashreplace") + b"\t"
        self._is_at_start = True

    def write(self, data: bytes) -> None:
        lines = data.split(b"\n")
        ends_line = not lines[-1]
        text = (b"\n" + self._tag).join(lines[:-1] if ends_line else lines) + (b"\n" if ends_line else b"")
        write_all(self._stream, (self._tag if self._is_at_start else b"") + text)
        self._is_at_start = ends_line


def _size(body: dict[str, Any]) -> int:
    return len(body.get("stdout") or b"") + len(body.get("stderr") or b"")


class Bar:
    """A progress bar on stderr; if that is no terminal, a line every few seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._drawn_s = self._began_s if not self._is_terminal else float("-inf")
        self._is_drawn = False

    def show(self, done: int, failed: int, total: int | None, *, at_once: bool = False) -> None:
        """Draw the bar, unless it was just drawn. ``total``: None if it is not known yet."""
        now_s = time.monotonic()
        every_s = BAR_EVERY_S if self._is_terminal else LINES_EVERY_S
        if now_s - self._drawn_s < every_s and not at_once:
            return
        self._drawn_s = now_s
        text = bar_text(done, failed, total, now_s - self._began_s)
        if self._is_terminal:
            width = _terminal_width()
            sys.stderr.write(f"\r\x1b[K{text[: width - 1]}")
            self._is_drawn = True
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the bar, to make room for other lines."""
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


def _terminal_width() -> int:
    try:
        return max(os.get_terminal_size(2).columns or COLUMNS, COLUMNS_MIN)
    except OSError:
        return COLUMNS


def failure_text(body: dict[str, Any], line: bytes) -> str:
    """One line about a failed task."""
    signal_ = body.get("signal")
    how = f"signal {signal_}" if signal_ else f"exit {exit_code_of(body)}"
    if (body.get("exit_code") is None and not signal_) or body.get("out_of"):
        how = f"{how} ({body.get('reason') or body.get('state')})"
    where = f"on {body['node']}" if body.get("node") else ""
    said = ": ".join(filter(None, (where, str(body.get("error_line") or ""))))
    command_line = shortened(printable(line), COMMAND_WIDTH_MAX)
    return f"{printable(body.get('id', ''))}  {printable(how)}  {command_line}" + (
        f"  ({printable(said)})" if said else ""
    )
