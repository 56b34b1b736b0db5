"""The command of each task: a template with placeholders for inputs; the parameters of `submit --param`, whose combinations fill it."""

from __future__ import annotations

import csv
import itertools
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.map.inputs import LineReader
from peerload.model.errors import BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import size_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Iterator, Sequence


_PLACE = re.compile(rb"\{(?:(#|%)|([0-9]{1,9})?(//|/\.|/|\.)?)\}")
"""`{}` `{.}` `{/}` `{//}` `{/.}` `{#}` `{%}`, and with the number of an input: `{1}` `{2.}` …"""
_NUMBER = 1
_INPUT = 2
_CHANGE = 3
SHELL = (b"/bin/sh", b"-c")


class CommandTemplate:
    """A command line whose placeholders are filled for each task.

    ``words``: the words of a command, or one line for /bin/sh (``is_shell``), in which inputs are quoted, so that each stays one word.
    Inputs are appended to a command without placeholders. ``inputs``: the number of inputs of each task. Raises UsageError for a
    placeholder that no input fills.
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
                    f"{verb}: {shown} names an input that is not there",
                    why=f"there {'is 1 input' if inputs == 1 else f'are {inputs} inputs'} for each task",
                    hint="each  :::  or  ::::  brings one more: {1}, {2} …",
                )
        if not places:
            if is_shell:
                self._words[0] += b" {}"
            else:
                self._words.append(b"{}")

    def argv(self, number: int, values: Sequence[bytes]) -> list[bytes]:
        """The command line of one task. ``number``: its own, from 1."""
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
    """A command line as one types it; a line for the shell as it is."""
    if tuple(argv[:2]) == SHELL and len(argv) == len(SHELL) + 1:
        return argv[-1]
    return b" ".join(_quoted(word) for word in argv)


LINES_MAX = 100_000
COMMANDS_BYTES_MAX = 3 << 20
"""Bound of all commands of an array: they travel in one frame."""
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
    """The single values of ``0.1,0.01``, ``1-5``, ``0-9:3`` or ``01-10``. Raises UsageError."""
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
    """The names in the first line of a CSV file, and the rows below: one combination each. Raises UsageError."""
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
    """The word with `{1}` for `{lr}`, as `CommandTemplate` has it."""

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
    too many."""
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
    """The command line for each row of values. name: their source. Raises BadRequest for too many, and for a NUL byte."""
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
