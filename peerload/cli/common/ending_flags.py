# ruff: noqa: PTH109, PTH111, PTH118
# os.path, since pathlib would cost every command its quick start.
"""The flags of `run`, `submit` and `map` about what is done at home when a task has ended: `-o`, `-e` and `--notify`."""

from __future__ import annotations

import os

from peerload.model.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from peerload.cli.common.options import Options

PATH_BYTES_MAX = 4096
NOTIFY_BYTES_MAX = 64 << 10
"""As peerload.model.submit_options has them (not imported: it would cost the start of every submit)."""


def add(reader: Options) -> None:
    """The flags."""
    reader.flag(
        "-o",
        "--output",
        metavar="FILE",
        help="write its stdout there as it comes; %%j is its number, %%A its array's, %%a its member's, %%x its name",
    )
    reader.flag("-e", "--error", metavar="FILE", help="the same of its stderr; both may be one file")
    reader.flag(
        "--notify", metavar="CMD", help="run this line in /bin/sh, here, when it has ended (an array: all of it)"
    )


def given(flags: Namespace, verb: str) -> dict[str, object]:
    """What of it was given, as terms."""
    found: dict[str, object] = {}
    for flag, key, pattern in (("-o", "output_file", flags.output), ("-e", "error_file", flags.error)):
        if pattern is not None:
            found[key] = _absolute(pattern, f"{verb}: {flag}")
    if flags.notify is not None:
        command = os.fsencode(flags.notify)
        if not command.strip() or b"\0" in command or len(command) > NOTIFY_BYTES_MAX:
            raise UsageError(
                f"{verb}: --notify needs a command of at most {NOTIFY_BYTES_MAX} bytes",
                hint="such as:  --notify 'notify-send \"$PEERLOAD_TASK_ID $PEERLOAD_STATE\"'",
            )
        found["notify"] = command
    return found


def _absolute(pattern: str, flag: str) -> bytes:
    """The pattern as a whole path; a % in the name of the directory we are in stands for itself."""
    raw = os.path.expanduser(os.fsencode(pattern))
    if not raw or raw.endswith(b"/"):
        raise UsageError(f"{flag} {pattern!r} names no file", hint=f"such as:  {flag.rpartition(' ')[2]} out-%j.txt")
    if not raw.startswith(b"/"):
        try:
            here = os.getcwdb()
        except FileNotFoundError:
            raise UsageError(f"{flag} {pattern!r}: the directory you are in has been removed") from None
        raw = os.path.join(here.replace(b"%", b"%%"), raw)
    if len(raw) > PATH_BYTES_MAX:
        raise UsageError(f"{flag}: the path has {len(raw)} bytes; at most {PATH_BYTES_MAX} are allowed")
    return raw
