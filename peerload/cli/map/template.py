"""The command of each task of `map` and of `submit --param`: a template with placeholders, and the inputs that fill it.

Inputs are words after `:::`, lines of files after `::::`, or lines of standard input. Several sources are combined: every
value of one with every value of the next (the last changes fastest), or pairwise after `:::+` and `::::+`. The first
source is read as needed, so it may be of any length; the others are kept in memory, up to a limit.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
import shlex
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from peerload.model.errors import BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import size_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Iterator, Sequence


Values = tuple[bytes, ...]
"""The inputs of one task."""
SEPARATORS = (":::", ":::+", "::::", "::::+")
READ_BYTES = 64 << 10
LINE_BYTES_MAX = 1 << 20
"""The kernel's limit for a word of a command."""
LINES_AHEAD_MAX = 1000
"""Number of lines read ahead."""
HELD_BYTES_MAX = 64 << 20
"""Limit of all sources except the first."""


class BadInput(UsageError):
    """An input that cannot become a task. Reading stops there."""


class LineReader:
    """The lines of a file, read as needed, without line ends. ``ended``: only the lines in ``ahead`` remain."""

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
        """All lines. Raises BadInput, also if they exceed the limit."""
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
        """The descriptor to poll before `read`; None if nothing more should be read now."""
        stream = self._stream
        wants = stream is not None and not stream.ended and len(stream.ahead) < LINES_AHEAD_MAX
        return stream.descriptor if wants and stream is not None else None

    def read(self) -> None:
        """Read more. Raises BadInput, after which no more inputs follow."""
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
        return self._is_over

    def stop(self) -> None:
        self._is_over = True

    def next(self) -> Values | None:
        """The inputs of the next task; None if none are available (yet)."""
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
    """The command, and each source: its separator and its words, without a leading `--`."""
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


def opened(sources: Sequence[tuple[str, list[str]]], *, end: bytes = b"\n") -> MapInputs:
    """The inputs from these sources; without sources, the lines of standard input. Raises UsageError."""
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
    """Groups of sources that are paired; several files after one `::::` are separate sources."""
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


_PLACE = re.compile(rb"\{(?:(#|%)|([0-9]{1,9})?(//|/\.|/|\.)?)\}")
"""`{}` `{.}` `{/}` `{//}` `{/.}` `{#}` `{%}`, and with the number of an input: `{1}` `{2.}` …"""
_NUMBER = 1
_INPUT = 2
_CHANGE = 3
SHELL = (b"/bin/sh", b"-c")


class CommandTemplate:
    """A command line with placeholders that are filled for each task.

    ``words``: the words of a command, or one line for /bin/sh (``is_shell``), in which inputs are quoted, so that each stays
    one word. Inputs are appended to a command without placeholders. ``inputs``: the number of inputs of each task. Raises
    UsageError for a placeholder that no input fills.
    """

    def __init__(self, words: Sequence[bytes], *, is_shell: bool, inputs: int = 1, verb: str = "map") -> None:
        self._is_shell = is_shell
        self._words = list(words)
        places = [place for word in self._words for place in _PLACE.finditer(word)]
        for place in places:
            shown = place.group().decode()
            if place[_NUMBER] == b"%":
                raise UsageError(
                    f"{verb}: {shown} has no meaning here",
                    why="it is the number of a job slot, and tasks run on many nodes",
                    hint="the number of the task is {#}; where it runs it finds in $PEERLOAD_NODE",
                )
            if place[_INPUT] and not 1 <= int(place[_INPUT]) <= inputs:
                raise UsageError(
                    f"{verb}: {shown} refers to an input that does not exist",
                    why=f"there {'is 1 input' if inputs == 1 else f'are {inputs} inputs'} for each task",
                    hint="each  :::  or  ::::  brings one more: {1}, {2} …",
                )
        if not places:
            if is_shell:
                self._words[0] += b" {}"
            else:
                self._words.append(b"{}")

    def argv(self, number: int, values: Sequence[bytes]) -> list[bytes]:
        if self._is_shell:
            return [*SHELL, _filled(self._words[0], number, values, _quoted)]
        filled: list[bytes] = []
        for word in self._words:
            if word == b"{}":
                filled += values
            else:
                filled.append(_filled(word, number, values, bytes))
        return filled


def _filled(word: bytes, number: int, values: Sequence[bytes], written: Callable[[bytes], bytes]) -> bytes:
    def fill(place: re.Match[bytes]) -> bytes:
        if place[_NUMBER]:
            return b"%d" % number
        chosen = values if not place[_INPUT] else (values[int(place[_INPUT]) - 1],)
        change = _CHANGES[place[_CHANGE] or b""]
        return b" ".join(written(change(value)) for value in chosen)

    return _PLACE.sub(fill, word)


def _quoted(value: bytes) -> bytes:
    return os.fsencode(shlex.quote(os.fsdecode(value)))


def _without_extension(value: bytes) -> bytes:
    return re.sub(rb"\.[^/.]+\Z", b"", value)


def _last_part(value: bytes) -> bytes:
    return value.rpartition(b"/")[2]


def _directory(value: bytes) -> bytes:
    head, slash, _ = value.rpartition(b"/")
    return (head.rstrip(b"/") or b"/") if slash else b"."


_CHANGES: dict[bytes, Callable[[bytes], bytes]] = {
    b"": bytes,
    b".": _without_extension,
    b"/": _last_part,
    b"//": _directory,
    b"/.": lambda value: _without_extension(_last_part(value)),
}


def shown(argv: Sequence[bytes]) -> bytes:
    """A command line quoted for a shell; with --shell, its line unchanged."""
    if tuple(argv[:2]) == SHELL and len(argv) == len(SHELL) + 1:
        return argv[-1]
    return b" ".join(_quoted(word) for word in argv)


LINES_MAX = 100_000
COMMANDS_BYTES_MAX = 3 << 20
"""Limit of all commands of an array, which are sent in one frame."""
WORD_BYTES = 5
"""Overhead of each word."""
VALUES_MAX = 100_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?")
_PARAMETER = re.compile(rb"\{([A-Za-z_][A-Za-z0-9_]{0,39})(//|/\.|/|\.)?\}")
"""`{lr}`; `{path/.}` and the like change the value, as with `{1}`."""
_HINT = "such as:  peerload submit --param lr=0.1,0.01 --param seed=1-5 python train.py --lr {lr} --seed {seed}"


def commands_of_parameters(flags: Namespace, spec: dict[str, Any]) -> list[list[bytes]]:
    """The command line of each combination: the last parameter changes fastest. Raises UsageError and BadRequest."""
    if flags.array is not None or flags.each_line is not None:
        other = "--array" if flags.array is not None else "--each-line"
        raise UsageError(f"submit: --param and {other} contradict each other", hint="each combination is a member")
    names: list[str] = []
    sources: list[list[tuple[bytes, ...]]] = []
    for word in flags.param:
        name, equals, text = word.partition("=")
        if not equals or not _NAME.fullmatch(name) or not text:
            raise UsageError(f"submit: --param {printable(word[:60])!r} is not a parameter with values", hint=_HINT)
        names.append(name)
        sources.append([(os.fsencode(value),) for value in values(text)])
    for file in flags.param_file:
        columns, rows = _table(file)
        names += columns
        sources.append(rows)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"submit: the parameter {twice} is given twice", hint="all its values at once:  --param a=1,2")
    is_shell = flags.shell is not None
    words = [_numbered(word, names) for word in (spec["argv"][-1:] if is_shell else spec["argv"])]
    _check_all_used(words, names)
    template = CommandTemplate(words, is_shell=is_shell, inputs=len(names), verb="submit")
    combined = itertools.product(*sources)
    return gathered(template, (tuple(itertools.chain.from_iterable(row)) for row in combined), "--param")


def values(text: str) -> list[str]:
    """The list of values in ``0.1,0.01``, ``1-5``, ``0-9:3`` or ``01-10``. Raises UsageError."""
    found: list[str] = []
    for part in text.split(","):
        span = _RANGE.fullmatch(part)
        if span is None:
            found.append(part)
            continue
        low, high, step = int(span[1]), int(span[2]), int(span[3] or 1)
        if high < low:
            raise UsageError(f"submit: --param {part!r}: the start is greater than the end", hint=_HINT)
        if (high - low) // step >= VALUES_MAX:
            raise UsageError(f"submit: --param {part!r} has more than {VALUES_MAX} values")
        width = len(span[1]) if span[1].startswith("0") else 0
        found += [f"{number:0{width}d}" for number in range(low, high + 1, step)]
    return found


def _table(file: str) -> tuple[list[str], list[tuple[bytes, ...]]]:
    """The names in the first line of a CSV file, and the other rows: one combination each. Raises UsageError."""
    shown = printable(file)
    try:
        descriptor = sys.stdin.fileno() if file == "-" else file
        with open(descriptor, newline="", encoding="utf-8", errors="surrogateescape", closefd=file != "-") as opened:
            lines = [row for row in csv.reader(opened, skipinitialspace=True) if row]
    except (OSError, csv.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"submit: --param-file {shown} cannot be read", why=why) from None
    if len(lines) < 2:  # noqa: PLR2004 -- names, and something to try
        raise UsageError(
            f"submit: --param-file {shown} has no rows", hint="names in the first line, values below:  lr,seed"
        )
    names, rows = lines[0], lines[1:]
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(f"submit: --param-file {shown}: {printable(name)!r} is not a valid name of a parameter")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            why = f"row {number} has {len(row)} values, the first line has {len(names)} names"
            raise UsageError(f"submit: --param-file {shown} is not a table", why=why)
    return names, [tuple(map(os.fsencode, row)) for row in rows]


def _numbered(word: bytes, names: list[str]) -> bytes:
    """The word with `{lr}` replaced by `{1}`, the form of `CommandTemplate`."""

    def number(place: re.Match[bytes]) -> bytes:
        name = place[1].decode()
        return b"{%d%s}" % (names.index(name) + 1, place[2] or b"") if name in names else place.group()

    return _PARAMETER.sub(number, word)


def _check_all_used(words: list[bytes], names: list[str]) -> None:
    """Raise UsageError for a parameter that the command does not use."""
    text = b"\0".join(words)
    for number, name in enumerate(names, start=1):
        if b"{}" not in text and not re.search(rb"\{%d(//|/\.|/|\.)?\}" % number, text):
            raise UsageError(
                f"submit: the command has no place for the parameter {name}", hint=f"write  {{{name}}}  in it"
            )


def commands_of_lines(flags: Namespace, spec: dict[str, Any]) -> list[list[bytes]]:
    """The command line of each member. Raises UsageError for a file that cannot be read or has no lines, BadRequest for
    too many lines."""
    if flags.array is not None:
        raise UsageError("submit: --array and --each-line contradict each other", hint="each line is a member")
    name = printable(flags.each_line)
    is_shell = flags.shell is not None
    template = CommandTemplate(spec["argv"][-1:] if is_shell else spec["argv"], is_shell=is_shell, verb="submit")
    found = gathered(template, ((line,) for line in _lines(flags.each_line)), name)
    if not found:
        raise UsageError(f"submit: {name} has no lines", hint="a task is made for each line")
    return found


def _lines(file: str) -> Iterator[bytes]:
    lines = LineReader(file, verb="submit")
    while not lines.ended:
        lines.read()
        yield from lines.ahead
        lines.ahead.clear()


def gathered(template: CommandTemplate, rows: Iterable[tuple[bytes, ...]], name: str) -> list[list[bytes]]:
    """The command line for each row of values. name: their source. Raises BadRequest for too many rows, and for a NUL byte."""
    found: list[list[bytes]] = []
    size = 0
    for row in rows:
        if any(b"\0" in value for value in row):
            raise BadRequest(
                f"line {len(found) + 1} of {name} has a NUL byte in it", why="no word of a command can have one"
            )
        found.append(template.argv(len(found) + 1, row))
        size += sum(len(word) + WORD_BYTES for word in found[-1])
        if len(found) > LINES_MAX or size > COMMANDS_BYTES_MAX:
            raise BadRequest(
                f"{name} has too many lines for one array"
                if name != "--param"
                else "there are too many combinations for one array",
                why=f"at most {LINES_MAX} of {size_text(COMMANDS_BYTES_MAX)} in all, with the command",
                hint="any number, at the pace of the work:  peerload map 'COMMAND {}' :::: FILE",
            )
    return found
