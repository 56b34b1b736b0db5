"""`peerload wait`: wait until tasks have ended."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common import messages, selection
from peerload.cli.common.options import Options
from peerload.cli.common.output import Bar, followed
from peerload.client.connection import RECONNECT_S_MAX, AgentConnection
from peerload.model.errors import AgentSilent, AgentUnavailable, PeerloadError
from peerload.model.text import printable
from peerload.text.format import print_json, say
from peerload.text.tasks import array_of, beyond_code, exit_text
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace

NAMES_TASKS = frozenset(("name", "group", "tags"))
"""Flags that also select ended tasks, so that the exit code includes tasks that failed before the wait began."""
FAILED_NAMED_MAX = 100
UNKNOWN_SAID_MAX = 3
"""Maximum number of messages about unknown outcomes."""


def main(words: list[str]) -> int:
    reader = Options(
        "wait",
        "Wait until these tasks have ended. Exit code: 0 if all succeeded, else that of the first that failed; 124 after the\n"
        "timeout, 125 if the output of one is not in its file (-o). A task whose outcome is unknown is waited for, and a message\n"
        "says so.",
        json_says="one object a task, as each ends",
    )
    selection.add(reader)
    reader.switch("--any", help="return when the first of them has ended")
    reader.flag("--timeout 30s", help="give up after this time (exit code 124)", type=duration)
    flags = reader.read(words)
    chosen = selection.Selection(flags, "wait")
    timed_out, away = False, ""
    with AgentConnection(flags.socket, room_s=RECONNECT_S_MAX) as client:
        refs = chosen.words
        if not refs or chosen.is_narrowed:
            takes_ended = not chosen.states and bool(chosen.narrowing.keys() & NAMES_TASKS)
            refs = chosen.references(client, () if takes_ended else selection.UNFINISHED) or []
            if takes_ended and not refs:
                return messages.CANNOT
        progress = WaitProgress(client, refs, flags)
        until_s = float("inf") if flags.timeout is None else time.monotonic() + flags.timeout
        for part in selection.batches(selection.pinned(client, refs)):
            asked = {"tasks": part, "any": flags.any, "files": True}
            try:
                for task in followed(client, "wait", lambda: asked | _time_left(until_s), until_s=until_s):  # noqa: B023 -- used up before the next one
                    progress.handle(task)
            except AgentUnavailable as error:
                if isinstance(error, AgentSilent) or time.monotonic() < until_s:
                    raise
                timed_out, away = True, f", and the agent is away: {error}"
                break
            timed_out = timed_out or bool(client.last.get("timed_out"))
            if flags.any and not client.last.get("timed_out"):
                timed_out = False
                break
    progress.finish()
    if timed_out:
        say(f"not ended within {flags.timeout:g} s{away}", "they continue; see:  peerload ls")
        return messages.TIMED_OUT
    return progress.code


def _time_left(until_s: float) -> dict[str, object]:
    return {"timeout_s": None if until_s == float("inf") else max(until_s - time.monotonic(), 0.0)}


class WaitProgress:
    """The display of a wait: a line for each task that the user named; for the others one bar, and a summary with the failed ones.
    code: the exit code of the first task that did not succeed, else 0."""

    def __init__(self, client: AgentConnection, refs: list[str], flags: Namespace) -> None:
        self.code = 0
        self._is_json = flags.json
        self._lines = flags.any
        self._is_by_id = refs == flags.task
        self._named = {_short(ref) for ref in flags.task}
        self._states: dict[str, int] = {}
        self._handled: set[str] = set()
        self._arrays: set[str] = set()
        self._failed: list[str] = []
        self._failed_more = 0
        self._unknown: set[str] = set()
        self._bar = Bar() if sys.stderr.isatty() and not flags.json and not flags.any else None
        self._total = self._count(client, refs) if self._bar is not None else None
        if self._total == 1 or (self._is_by_id and self._total == len(refs)):
            self._bar = None  # each has its own line

    @staticmethod
    def _count(client: AgentConnection, refs: list[str]) -> int | None:
        """The number of tasks; None if not known, then the bar shows no total."""
        try:
            return sum(int(client.call("select", tasks=part).get("count") or 0) for part in selection.batches(refs))
        except PeerloadError:
            return None

    def handle(self, task: dict[str, Any]) -> None:
        """Handle one part of the answer: an end, an unknown outcome, or the state of output files."""
        name = str(task["files"]["id"] if "files" in task else task.get("id", ""))
        what = f"files {name}" if "files" in task else name
        if what in self._handled:  # already seen before a reconnection
            return
        if task.get("state") != "unknown":
            self._handled.add(what)
        if "files" in task:
            self._clear()
            unsaved = messages.say_unsaved(task["files"])
            self.code = self.code or unsaved
            return
        is_single = self._lines or self._is_single(_short(name))
        if task.get("state") == "unknown":
            is_new = name not in self._unknown
            self._unknown.add(name)
            if is_new and (is_single or len(self._unknown) <= UNKNOWN_SAID_MAX):
                self._clear()
                messages.say_unknown(task)
            return
        failed = messages.exit_code_of(task) or messages.say_missing(task)
        self.code = self.code or failed
        self._unknown.discard(name)
        state = str(task.get("state", ""))
        self._states[state] = self._states.get(state, 0) + 1
        if self._is_json:
            print_json({key: task.get(key) for key in ("id", "state", "exit_code", "signal", "node", "out_of")})
        elif is_single:
            self._clear()
            sys.stdout.write(_line(task))
            sys.stdout.flush()
            messages.say_conflicts(task)
            self._states[state] -= 1
            self._total = None if self._total is None else self._total - 1
        else:
            self._arrays.add(array_of(name))
            if state == "failed":
                self._failed_more += len(self._failed) >= FAILED_NAMED_MAX
                self._failed += [_line(task)] if len(self._failed) < FAILED_NAMED_MAX else []
        self._show()

    def _is_single(self, short: str) -> bool:
        """True if the user named this task, not only its array."""
        _, dot, member = short.partition(".")
        return self._is_by_id and (not dot or short in self._named or f"@.{member}" in self._named)

    def finish(self) -> None:
        self._clear()
        ended = sum(self._states.values())
        if self._is_json or not ended:
            return
        sys.stdout.write("".join(self._failed))
        if self._failed_more:
            say(f"and {self._failed_more} more failed", "all of them:  peerload ls --state failed")
        (array,) = self._arrays if len(self._arrays) == 1 else ("",)
        whose = f"{printable(array)}: " if array else ""
        told = ", ".join(f"{self._states[state]} {state}" for state in sorted(self._states) if self._states[state])
        of = f" of {self._total}" if self._total is not None and self._total > ended else ""
        sys.stdout.write(
            f"{whose}{ended}{of} {'task' if ended == 1 and not of else 'tasks'} ended: {printable(told)}\n"
        )
        sys.stdout.flush()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.show(sum(self._states.values()), self._states.get("failed", 0), self._total)

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.clear()


def _short(ref: str) -> str:
    """The id without its home."""
    return ref.rpartition("/")[2]


def _line(task: dict[str, object]) -> str:
    """Text such as ``ws1/3  failed  exit 7  ws2``, with the reason if the code or signal is not enough."""
    how, reason = exit_text(task), str(task.get("reason") or "")
    if how == "-":
        how = reason
    elif not task.get("signal"):
        how = f"exit {how}"
    more = "" if reason == how else beyond_code(task)
    if task.get("state") == "failed" and more:
        how += f" ({more})"
    state = str(task.get("state", ""))
    facts = (task.get("id", ""), state, "" if how == state else how, task.get("node") or "")
    return "  ".join(printable(fact) for fact in facts if fact) + "\n"
