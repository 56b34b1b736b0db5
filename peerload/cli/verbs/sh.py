"""`peerload sh NODE`: a shell on another node."""

from __future__ import annotations

import sys

from peerload.cli.common.options import Options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

SHELL = (
    'shell=$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f7); [ -x "$shell" ] || shell=/bin/sh; exec "$shell" "$@"'
)
"""The login shell of whoever the task runs as there, which need not be that of the user here."""
AT_HOME = f"cd ~ 2>/dev/null || cd /; {SHELL}"
ROOT = "/"
CPUS = "0.1"
PRIORITY = "1000"
"""A shell waits for room like any task, before others that wait."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "sh",
        "A shell on NODE: a task there that ends with the shell. Without a terminal it reads commands from stdin.\n"
        "It waits for a slot like any task, before tasks of usual priority.",
    )
    reader.add_argument("node", metavar="NODE")
    reader.flag("-d", "--chdir", metavar="DIR", help="start in DIR (default: the home directory there)")
    flags = reader.read(words)
    from peerload.cli.verbs import run

    return run.main(as_run(flags, has_terminal=sys.stdin.isatty() and sys.stdout.isatty()))


def as_run(flags: Namespace, *, has_terminal: bool) -> list[str]:
    """The words of the `peerload run` that does it."""
    words = ["--node", flags.node, "--name", "sh", "--cpus", CPUS, "--prio", PRIORITY]
    words += ["--chdir", ROOT if flags.chdir is None else flags.chdir]
    words += ["--socket", flags.socket] if flags.socket else []
    words += ["--json"] if flags.json else []
    words += ["--pty"] if has_terminal else []
    login = ["-l"] if has_terminal else []
    return [*words, "/bin/sh", "-c", AT_HOME if flags.chdir is None else SHELL, "sh", *login]
