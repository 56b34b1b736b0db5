"""`peerload wait`: block until tasks have ended."""

from __future__ import annotations

import sys

from peerload.cli.command import exit_code_of, say_missing, say_unknown, say_unsaved
from peerload.cli.options import Options, duration
from peerload.cli.text import print_json, printable, say
from peerload.client import Client

TIMED_OUT = 124


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "wait",
        "Block until these tasks have ended. Exit code: 0 if all succeeded, else that of the first that failed;\n"
        "124 if the time was up, 125 if the output of one is not\nin the file that it was to go to (-o). A task whose outcome is unknown is waited for, and that is said.",
        json_says="one object a task, as each ends",
    )
    reader.add_argument("task", nargs="+", metavar="ID")
    reader.switch("--any", help="until the first of them has ended")
    reader.flag("--timeout", type=duration, metavar="30s", help="no longer than this")
    flags = reader.read(words)
    code = 0
    with Client(flags.socket) as client:
        for task in client.stream("wait", tasks=flags.task, any=flags.any, timeout_s=flags.timeout, files=True):
            if "files" in task:
                code = code or say_unsaved(task["files"])
                continue
            if task.get("state") == "unknown":
                say_unknown(task)
                continue
            code = code or exit_code_of(task) or say_missing(task)
            if flags.json:
                print_json({key: task.get(key) for key in ("id", "state", "exit_code", "signal", "node", "out_of")})
            else:
                sys.stdout.write(_line(task))
                sys.stdout.flush()
        timed_out = bool(client.last.get("timed_out"))
    if timed_out:
        say(f"not ended within {flags.timeout:g} s", "they go on; see:  peerload ls")
        return TIMED_OUT
    return code


def _line(task: dict[str, object]) -> str:
    how = f"signal {task['signal']}" if task.get("signal") else f"exit {exit_code_of(task)}"
    if task.get("exit_code") is None and not task.get("signal"):
        how = str(task.get("reason") or "")
    elif task.get("out_of"):
        how += f" ({task.get('reason')})"
    return (
        f"{printable(task.get('id', ''))}  {printable(task.get('state', ''))}  {printable(how)}  {printable(task.get('node') or '')}".rstrip()
        + "\n"
    )
