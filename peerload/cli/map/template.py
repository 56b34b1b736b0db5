"""A command with placeholders for inputs, `{}` and the like, for `map` and `submit --each-line`."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from peerload.model.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
