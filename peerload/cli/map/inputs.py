"""The inputs of `map`: words after `:::`, lines of files after `::::`, or lines of standard input.

Several sources are combined: every value of one with every value of the next (the last changes fastest), or, after `:::+` and
`::::+`, one with one. The first source is read as needed, so it may be of any length; the others are kept in memory, within a
bound.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections import deque
from typing import TYPE_CHECKING

from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Values = tuple[bytes, ...]

SEPARATORS = (":::", ":::+", "::::", "::::+")
READ_BYTES = 64 << 10
LINE_BYTES_MAX = 1 << 20
"""A longer line cannot be a word of a command."""
LINES_AHEAD_MAX = 1000
"""Lines read ahead of the tasks made of them."""
INPUTS_NAMED_MAX = 3
"""Inputs of each source that an error repeats."""
HELD_BYTES_MAX = 64 << 20
"""Bound of all sources but the first."""


class BadInput(UsageError):
    """An input that cannot become a task; nothing is read after it."""


class LineReader:
    """The lines of a file, read as needed, without their ends. ``ended``: there are no more than those in ``ahead``."""

    def __init__(self, name: str, end: bytes = b"\n", *, verb: str = "map") -> None:
        self.name = name
        self._verb = verb
        self._end = end
        self._rest = b""
        self.ahead: deque[bytes] = deque()
        self.ended = False
        try:
            self.descriptor = 0 if name == "-" else os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"{verb}: {printable(name)} cannot be read",
                why=error.strerror or str(error),
                hint=":::: takes files of lines"
                if verb == "map"
                else "one task for each line of it:  --each-line FILE",
            ) from None

    def read(self) -> None:
        """Read the available inputs; block only if there are none. Raises BadInput."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise BadInput(
                f"{self._verb}: {printable(self.name)} cannot be read", why=error.strerror or str(error)
            ) from None
        *lines, self._rest = (self._rest + data).split(self._end)
        if not data:
            self.ended = True
            if self._rest:
                lines.append(self._rest)
                self._rest = b""
            if self.descriptor:
                os.close(self.descriptor)
        if len(self._rest) > LINE_BYTES_MAX:
            raise BadInput(
                f"{self._verb}: a line of {printable(self.name)} is longer than {size_text(LINE_BYTES_MAX)}",
                why="an input is a word of a command",
            )
        self.ahead.extend(lines)

    def all(self) -> list[bytes]:
        """All lines. Raises BadInput, also if they exceed the bound."""
        size = 0
        found: list[bytes] = []
        while not self.ended:
            self.read()
            found += self.ahead
            size += sum(len(line) + 1 for line in self.ahead)
            self.ahead.clear()
            if size > HELD_BYTES_MAX:
                raise BadInput(
                    f"map: {printable(self.name)} has more than {size_text(HELD_BYTES_MAX)}",
                    why="of several sources only the first may be of any size",
                    hint="name this source first",
                )
        return found


class MapInputs:
    """The inputs of each task, in order. ``width``: the number of inputs of one task."""

    def __init__(self, first: LineReader | list[Values], others: Sequence[list[Values]], width: int) -> None:
        self.width = width
        self._stream = first if isinstance(first, LineReader) else None
        self._first: Iterator[Values] = iter(first if isinstance(first, list) else ())
        self._others = others
        self._each_first = 1
        for other in others:
            self._each_first *= len(other)
        self._known = None if isinstance(first, LineReader) else len(first)
        self._came = 0
        self._current: Iterator[Values] = iter(())
        self._is_over = False

    @property
    def descriptor(self) -> int | None:
        """The descriptor to poll before `read`; None if there is nothing to read now."""
        stream = self._stream
        wants = stream is not None and not stream.ended and len(stream.ahead) < LINES_AHEAD_MAX
        return stream.descriptor if wants and stream is not None else None

    def read(self) -> None:
        """Read more. Raises BadInput, after which there is nothing more."""
        assert self._stream is not None
        try:
            self._stream.read()
        except BadInput:
            self.stop()
            raise

    @property
    def total(self) -> int | None:
        """The number of tasks in all; None while it is not known."""
        if self._known is not None:
            return self._known * self._each_first
        assert self._stream is not None
        return (self._came + len(self._stream.ahead)) * self._each_first if self._stream.ended else None

    @property
    def is_over(self) -> bool:
        """True if all inputs were taken."""
        return self._is_over

    def stop(self) -> None:
        """End the inputs."""
        self._is_over = True

    def next(self) -> Values | None:
        """The inputs of the next task; None if there are none (yet)."""
        while not self._is_over:
            values = next(self._current, None)
            if values is not None:
                return values
            head = self._head()
            if head is None:
                return None
            self._current = (tuple(itertools.chain(head, *rest)) for rest in itertools.product(*self._others))
        return None

    def _head(self) -> Values | None:
        if self._stream is None:
            head = next(self._first, None)
            self._is_over = head is None
            return head
        if self._stream.ahead:
            self._came += 1
            return (self._stream.ahead.popleft(),)
        self._is_over = self._stream.ended
        return None


def split(words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The command, and each source: its separator and its words, without a `--` that stands before all of them."""
    command: list[str] = []
    sources: list[tuple[str, list[str]]] = []
    before = ""
    for word in words:
        if word in SEPARATORS:
            sources.append((word, []))
        elif sources and not (word == "--" and before in SEPARATORS):
            sources[-1][1].append(word)
        elif not sources:
            command.append(word)
        before = word
    return command, sources


def refuse_late_flags(head: Sequence[str], rest: Sequence[str], flags: Mapping[str, bool]) -> None:
    """Raise UsageError, with the line to type, if a long flag of `map` stands among the inputs: it would be an input.

    head: the words before the command; rest: the command and the inputs; flags: those of `map`, and whether each takes a
    value. A source that begins with `--` has inputs alone.
    """
    at = next((index for index, word in enumerate(rest) if word in SEPARATORS), len(rest))
    late: list[str] = []
    kept: list[str] = list(rest[:at])
    since, is_plain = 0, False
    words = iter(rest[at:])
    for word in words:
        name, equals, _ = word.partition("=")
        since = 0 if word in SEPARATORS else since + 1
        is_plain = since > 0 and (is_plain or (since == 1 and word == "--"))
        if not is_plain and name.startswith("--") and name in flags:
            late += [word, *itertools.islice(words, int(flags[name] and not equals))]
        elif since <= INPUTS_NAMED_MAX:
            kept.append(word)
        elif since == INPUTS_NAMED_MAX + 1:
            kept.append("…")
    if late:
        ends = [word for word in head[-1:] if word == "--"]
        line = [*head[: len(head) - len(ends)], *late, *ends, *kept]
        shown = " ".join(word if word in ("…", *SEPARATORS) else shlex.quote(printable(word)) for word in line)
        raise UsageError(
            f"map: {late[0].partition('=')[0]} comes after the command and would be taken as an input",
            hint=f"flags come first:  peerload map {shown}        as an input:  ::: -- {late[0]}",
        )


def opened(sources: Sequence[tuple[str, list[str]]], *, end: bytes = b"\n") -> MapInputs:
    """The inputs from these sources; without any, the lines of standard input. Raises UsageError."""
    if not sources:
        return MapInputs(LineReader("-", end), [], 1)
    groups = _groups(sources)
    if sum(name == "-" for group in groups for kind, names in group if kind == "::::" for name in names) > 1:
        raise UsageError("map: standard input (-) can be read once only", hint="name a file:  :::: FILE")
    first = groups[0]
    others = [_values(group, end) for group in groups[1:]]
    width = sum(map(len, groups))
    if len(first) == 1 and first[0][0] == "::::":
        (name,) = first[0][1]
        return MapInputs(LineReader(name, end), others, width)
    return MapInputs(_values(first, end), others, width)


def _groups(sources: Sequence[tuple[str, list[str]]]) -> list[list[tuple[str, list[str]]]]:
    """Groups of sources that are combined one with one; several files after one `::::` are sources of their own."""
    groups: list[list[tuple[str, list[str]]]] = []
    for separator, words in sources:
        kind, is_linked = separator.rstrip("+"), separator.endswith("+")
        if is_linked and not groups:
            raise UsageError(f"map: {separator} needs a source before it", hint=f"begin with  {kind}")
        if kind == "::::" and not words:
            raise UsageError(
                f"map: {separator} names no file", hint="such as:  :::: names.txt        words:  ::: a b c"
            )
        for one in [words] if kind == ":::" else [[name] for name in words]:
            if is_linked:
                groups[-1].append((kind, one))
            else:
                groups.append([(kind, one)])
    return groups


def _values(group: Sequence[tuple[str, list[str]]], end: bytes) -> list[Values]:
    columns = [
        [os.fsencode(word) for word in words] if kind == ":::" else LineReader(words[0], end).all()
        for kind, words in group
    ]
    return list(zip(*columns, strict=False))
