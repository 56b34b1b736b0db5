"""The files that a user wants the output of a task in (`submit -o FILE -e FILE`): what they are called, whether they can be
written, and writing them.

They grow while the task runs (`saving.py`). A link is followed, as a shell's ``>`` would; what was in a file is cut off, and its
permissions are kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from peerload.agent.output.spool import open_output
from peerload.agent.runtime import done_within, in_own_thread
from peerload.agent.store.rows import SINGLE
from peerload.launcher.system import write_as_user
from peerload.launcher.system.write_as_user import FileChanged, Unwritable
from peerload.model.errors import BadRequest, PeerloadError, SlowDown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskRecord, TaskSpec

CHECK_S_MAX = 2.0
"""A directory that cannot be looked at for so long is refused."""
CHECKS_MAX = 32
NULL = os.makedev(1, 3)
"""`/dev/null`: what goes there need not be written."""
Segment = tuple["Path", int, int]
"""A part of a captured file: the file, and from where to where."""
_LETTERS = re.compile(rb"%(.?)", re.DOTALL)
_KNOWN = b"jAaxN%"
_SAYS = (
    "%j is the number of the task, %A that of its array, %a its member's, %x its name, %N the node it ran on, %% a %"
)


# -- names -------------------------------------------------------------------------------------------------------------


def named(pattern: bytes, counter: int, member: int, name: str, node: str) -> bytes:
    """The path that a pattern stands for. In names from elsewhere a ``/`` becomes ``_``, so that none leads elsewhere."""
    array = str(counter)
    values = {
        b"j": array if member == SINGLE else f"{array}.{member}",
        b"A": array,
        b"a": "" if member == SINGLE else str(member),
        b"x": name.replace("/", "_").replace("\0", "_"),
        b"N": node.replace("/", "_"),
        b"%": "%",
    }
    return _LETTERS.sub(lambda found: os.fsencode(values.get(found[1], "")), pattern)


def patterns(terms: SubmitOptions) -> list[bytes]:
    """The patterns that are given, each once."""
    return list(dict.fromkeys(filter(None, (terms.output_file, terms.error_file))))


def check_patterns(terms: SubmitOptions, members: int) -> None:
    """Raises BadRequest for what no file can be called. members: how many tasks there are, 0 = one that is in no array."""
    for pattern in patterns(terms):
        shown = pattern.decode("utf-8", "backslashreplace")
        directory, slash, name = pattern.rpartition(b"/")
        if not pattern.startswith(b"/") or b"\0" in pattern:
            raise BadRequest(f"the file {shown} is no absolute path")
        letters = _LETTERS.findall(pattern)
        if unknown := [letter for letter in letters if not letter or letter not in _KNOWN]:
            what = (b"%" + unknown[0]).decode("utf-8", "backslashreplace")
            raise BadRequest(f"{what} in {shown} stands for nothing", why=_SAYS)
        if set(_LETTERS.findall(directory)) - {b"%"}:
            raise BadRequest(
                f"the directory of {shown} is named by a placeholder", why="only the file's own name may have them"
            )
        if slash and name in (b"", b".", b".."):
            raise BadRequest(f"{shown} is a directory", hint=f"name a file in it:  {shown.rstrip('/.')}/out-%j")
        if members > 1 and not {b"a", b"j"} & set(letters):
            raise BadRequest(
                f"all {members} members would write {shown}, one over the other",
                hint="put %a into its name: the number of the member",
            )
        if not members and b"a" in letters:
            raise BadRequest(
                f"%a in {shown} stands for a member of an array, and this is none", hint="%j  is its number"
            )


# -- checks -------------------------------------------------------------------------------------------------------------


class WritableChecks:
    """Looks whether files can be written, a bounded number at a time."""

    def __init__(self) -> None:
        self._under_way = 0

    async def look(self, terms: SubmitOptions) -> None:
        """Raises BadRequest, if the directory of a file is not there or may not be written to, or a file that has no
        placeholder in its name is none; SlowDown if too many are being looked at."""
        wanted = patterns(terms)
        if not wanted:
            return
        if self._under_way >= CHECKS_MAX:
            raise SlowDown("too many files at once", why=f"{CHECKS_MAX} are being looked at")
        try:
            check = in_own_thread(lambda: _check(wanted))
        except BlockingIOError as error:
            raise SlowDown("files cannot be looked at", why=str(error.strerror)) from None
        self._under_way += 1
        try:
            if not await done_within(check, CHECK_S_MAX):
                shown = wanted[0].decode("utf-8", "backslashreplace")
                raise BadRequest(f"{shown} cannot be written", why="its directory does not answer")
            check.result()
        finally:
            check.cancel()
            self._under_way -= 1


def _check(wanted: Sequence[bytes]) -> None:
    for pattern in wanted:
        path = pattern.replace(b"%%", b"%")
        shown, directory = pattern.decode("utf-8", "backslashreplace"), os.path.dirname(path)  # noqa: PTH120 -- bytes
        where = directory.decode("utf-8", "backslashreplace")
        if not os.path.isdir(directory):  # noqa: PTH112
            raise BadRequest(
                f"{shown} cannot be written", why=f"there is no directory {where}", hint=f"mkdir -p {where}"
            )
        try:
            target = _target(path)
        except OSError as error:
            raise BadRequest(f"{shown} cannot be written", why=str(error.strerror)) from None
        if target is not None and not os.access(os.path.dirname(target), os.W_OK | os.X_OK):  # noqa: PTH120
            raise BadRequest(f"{shown} cannot be written", why=f"you may not write to {where}")


# -- writing -----------------------------------------------------------------------------------------------------------


def append(path: bytes, segments: Sequence[Segment], umask: int, at: int, *, ends: bool) -> None:
    """Put these parts of captured files into the file ``path``, as `write_as_user.append` does. Raises Changed, OSError."""
    target = _target(path)
    if target is None:
        return
    with contextlib.ExitStack() as opened:
        parts: list[tuple[int, int, int]] = []
        for source, first, end in segments:
            captured = open_output(source)
            opened.callback(os.close, captured)
            parts.append((captured, first, end))
        try:
            write_as_user.append(target, parts, umask, at, ends=ends)
        except FileChanged:
            raise
        except Unwritable as error:
            raise PeerloadError(str(error)) from None


def _target(path: bytes) -> bytes | None:
    """The file itself, links followed; None where nothing need be written. Raises OSError if it is none that may be."""
    target = os.path.realpath(path)
    try:
        found = os.stat(target)  # noqa: PTH116
    except FileNotFoundError:
        return target
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == NULL:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, "the file that is there may not be written to")
    return target


def targets(terms: SubmitOptions, record: TaskRecord, spec: TaskSpec, place: tuple[int, int]) -> dict[bytes, list[int]]:
    """The files of a task, and the streams that go to each, stdout first."""
    found: dict[bytes, list[int]] = {}
    for stream, pattern in ((1, terms.output_file), (2, terms.error_file)):
        if pattern:
            path = named(pattern, *place, spec.name, record.node or record.last_node)
            found.setdefault(path, []).append(stream)
    return found
