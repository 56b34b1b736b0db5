r"""`peerload run`: run a command where there is room, in the foreground; and `peerload sh`: a shell on another node.

Output comes as it is written, stdout and stderr apart; standard input and Ctrl-C go to the task; the exit code is the task's. The
task ends with this command, unless `--keep` is given or Ctrl-\ has detached from it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from peerload.cli.common import command, files, task_flags
from peerload.cli.common.options import Options
from peerload.cli.common.output import OutputWriter
from peerload.cli.common.standard_input import StdinReader, takes_input
from peerload.cli.common.task_session import Detached, TaskSession, report_end, report_missing, say_detached
from peerload.cli.common.terminal import say_if_it_needs_a_terminal, window, with_colours, with_term
from peerload.client.connection import Client
from peerload.text.format import print_json

if TYPE_CHECKING:
    from argparse import Namespace


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = command.command_options(
        "run",
        "Run a command where there is room, as if it ran here: input, live output, Ctrl-C and exit code pass through.\n"
        "Ctrl-\\ detaches from it (peerload attach ID follows it again); otherwise it is cancelled when this command ends.",
        usage="[flags] COMMAND ...",
        epilog="The flags end at the first word that is not a flag; the rest is the command.",
    )
    reader.switch("--pty", help="give it a terminal, for interactive programs: stdout and stderr are one")
    reader.switch("--keep", help="let it go on when this command ends")
    flags, rest = reader.read_command(words)
    if flags.pty:
        flags.env = with_term(flags.env)
    flags.env = with_colours(flags.env, has_terminal=flags.pty)
    spec, secret = command.specification(flags, rest, "run")
    terms = task_flags.terms(flags, "run")
    stdin = StdinReader() if takes_input() else None
    if flags.pty:
        rows, columns = window()
        spec["terminal"] = {"rows": rows, "columns": columns}
    if stdin is not None or flags.pty:
        spec["takes_input"] = True
    spec["followed"] = True
    found = files.prepare(flags, "run", spec, terms)
    if flags.dry_run:
        return command.print_dry_run(spec, secret, flags, **(files.described(found, spec) | terms))
    unsaved = 0
    if not flags.pty:
        say_if_it_needs_a_terminal(spec["argv"])
    with Client(flags.socket) as client:
        writer = OutputWriter(is_json=flags.json)
        following = TaskSession(
            client, writer.write, attends=not flags.keep, stdin=stdin, has_terminal=flags.pty, is_source=True
        )
        with following:
            files.send(client, spec, terms, found)
            reply = command.submit(
                client,
                spec,
                wait_for_node=flags.wait_for_node,
                attended=not flags.keep,
                terms=terms,
                input_comes=stdin is not None,
            )
            command.warn_if_stranded(client, reply, spec)
            try:
                ended = following.follow(reply["id"])
            except Detached:
                return say_detached(reply["id"])
        if "output_file" in terms or "error_file" in terms:
            unsaved = _unsaved(following.client, reply["id"])
    if flags.json:
        keys = ("id", "state", "exit_code", "signal", "node", "reason", "out_of")
        print_json({key: ended.get(key) for key in keys})
    writer.end(ended)
    files.say_conflicts(ended)
    code = report_end(ended, interrupted=following.interrupts > 0)
    if code:
        command.say_left_out(secret)
    return report_missing(ended, code, writer.missing_bytes) or unsaved


def _unsaved(client: Client, task: str) -> int:
    """Wait until its output is in its files → CANNOT, with a message, if not all of it is."""
    unsaved = 0
    for body in client.stream("wait", tasks=[task], files=True):
        if "files" in body:
            unsaved = command.say_unsaved(body["files"])
    return unsaved


LOGIN_SHELL = (
    'shell=$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f7); [ -x "$shell" ] || shell=/bin/sh; exec "$shell" "$@"'
)
"""Starts the login shell of the user that the task runs as, which may be another one than here."""
SHELL_AT_HOME = f"cd ~ 2>/dev/null || cd /; {LOGIN_SHELL}"
SHELL_CPUS = "0.1"
SHELL_PRIORITY = "1000"
"""A shell waits for room like any task, but before the others."""


def shell(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "sh",
        "Open a shell on NODE: a task there that ends with the shell. Without a terminal it reads commands from stdin.\n"
        "It waits for a slot like any task, but before tasks of default priority.",
    )
    reader.add_argument("node", metavar="NODE")
    reader.flag("-d", "--chdir", metavar="DIR", help="start in DIR (default: the home directory there)")
    flags = reader.read(words)
    return main(as_run(flags, has_terminal=sys.stdin.isatty() and sys.stdout.isatty()))


def as_run(flags: Namespace, *, has_terminal: bool) -> list[str]:
    """The words of the equivalent `peerload run`."""
    words = ["--node", flags.node, "--name", "sh", "--cpus", SHELL_CPUS, "--prio", SHELL_PRIORITY]
    words += ["--chdir", "/" if flags.chdir is None else flags.chdir]
    words += ["--socket", flags.socket] if flags.socket else []
    words += ["--json"] if flags.json else []
    words += ["--pty"] if has_terminal else []
    login = ["-l"] if has_terminal else []
    return [*words, "/bin/sh", "-c", SHELL_AT_HOME if flags.chdir is None else LOGIN_SHELL, "sh", *login]
