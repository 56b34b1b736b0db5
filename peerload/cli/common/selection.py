"""The selectors of tasks on a command line: ids, ranges and `all`, narrowed by state, name, group, node and tags.

Plain ids are sent to the agent unchanged. The agent resolves everything else into references first (`select`), so that the verb
knows the number of tasks and asks on a terminal before it changes many.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common.options import node_name
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import counted, say

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Sequence

    from peerload.cli.common.options import Options
    from peerload.client.connection import AgentConnection

STATES = ("held", "queued", "leased", "running", "done", "failed", "cancelled", "unknown")
UNFINISHED = ("held", "queued", "leased", "running", "unknown")
ENDED = ("done", "failed", "cancelled")
ALL = "all"
WITHOUT_STATES = ("clean", "signal")
"""Verbs without `--state`, or with a different one."""
ASKED_ABOVE = 20
"""The largest number of tasks that are changed on a terminal without a question."""
REFS_AT_A_TIME = 5_000
REFS_CHARS_AT_A_TIME = 1 << 20
"""References in one request, well below the agent's limit."""
NAME_GLOB_CHARS_MAX = 128
"""The limit of peerload.wire.control."""
EPILOG = """\
ID: 42, 42.7, 42.3-9 (members 3 to 9), ws1/42, @ (my last task), @~1 (the one before it), or  all.
--state, --name, --group, --node and --tag narrow that; without an ID they select among all my tasks whose home is here."""


def add(reader: Options, *, changes: bool = False, has_state: bool = True) -> None:
    """Add the ids and the flags. changes: the verb changes tasks and asks before it changes many; has_state: False if the verb
    defines `--state` itself."""
    reader.add_argument("task", nargs="*", metavar="ID")
    if has_state:
        reader.flag("--state S …", help=f"only in this state: {' '.join(STATES)}")
    reader.flag("--name GLOB", help="only those of this name, such as 'train*'", default="")
    reader.flag("--group G", help="only those of this group", default="")
    reader.flag("--node NAME", help="only those on this node", type=node_name, default="")
    reader.flag("--tag K[=V] …", help="only those with this tag (repeatable)")
    if changes:
        reader.switch("--all-users", help="an administrator: the tasks of all users, where no ID is given")
        reader.switch("-y, --yes", help=f"do not ask before more than {ASKED_ABOVE} tasks are changed")
    reader.epilog = f"{reader.epilog}\n{EPILOG}" if reader.epilog else EPILOG


class Selection:
    """The selectors on one command line. Raises UsageError if they contradict each other, or, with ``needed``, if there are none."""

    def __init__(self, flags: Namespace, verb: str, *, needed: bool = True) -> None:
        self._verb = verb
        self._asks = not getattr(flags, "yes", True)
        self.states = states_of(flags.state, verb) if verb not in WITHOUT_STATES else []
        self.words = [word for word in flags.task if word != ALL]
        self.means_all = ALL in flags.task
        if self.words and self.means_all:
            raise UsageError(f"{verb}: {ALL!r} and {self.words[0]!r} contradict each other", hint="one of them alone")
        if len(flags.name) > NAME_GLOB_CHARS_MAX:
            raise UsageError(f"{verb}: --name has more than {NAME_GLOB_CHARS_MAX} characters")
        given = {"name": flags.name, "group": flags.group, "node": flags.node, "tags": flags.tag}
        self.narrowing: dict[str, Any] = {key: value for key, value in given.items() if value}
        self._all_users = bool(getattr(flags, "all_users", False))
        if needed and not (self.words or self.means_all or self.is_narrowed):
            hint = f"ids, @ for my last one, {ALL}, or flags such as  --state S  --name GLOB;  more:  peerload {verb} --help"
            raise UsageError(f"{verb}: which tasks?", hint=hint)

    @property
    def is_narrowed(self) -> bool:
        return bool(self.narrowing or self.states)

    @property
    def is_plain(self) -> bool:
        """True if there are only ids, each naming one task or one array."""
        return bool(self.words) and not self.is_narrowed and all(map(is_plain_id, self.words))

    def request_fields(self, states: Iterable[str] = ()) -> dict[str, Any]:
        """The fields of a request that describe the selection. ``states``: the states if the user names none."""
        wanted = self.states or list(states)
        fields = {"tasks": self.words, **self.narrowing, "states": wanted}
        return {key: value for key, value in fields.items() if value}

    def selected(self, client: AgentConnection, states: Iterable[str] = ()) -> dict[str, Any]:
        """The agent's reply: selected count states."""
        more = {"all_users": True} if self._all_users else {}
        return client.call("select", **self.request_fields(states), **more)

    def references(self, client: AgentConnection, states: Sequence[str] = ()) -> list[str] | None:
        """References to the tasks to change; empty, with a message, if none matches; None if the user declined. ``states``: the states
        of tasks that are selected without ids."""
        if self.is_plain:
            return list(self.words)
        names_only = self.words and not self.is_narrowed
        if names_only and not self.would_ask():
            return list(self.words)
        found = self.selected(client, () if names_only else states)
        count = int(found.get("count") or 0)
        if not count:
            say_none()
            return []
        if self.would_ask() and not agreed(self._verb, count, found.get("states") or {}):
            return None
        return [str(ref) for ref in found.get("selected") or ()]

    def would_ask(self) -> bool:
        """True if there is a user at a terminal to ask."""
        return self._asks and sys.stdin.isatty() and sys.stderr.isatty()


def changed(client: AgentConnection, verb: str, refs: Sequence[str], **fields: object) -> dict[str, Any]:
    """Change tasks with as many requests as needed → one reply with joined lists."""
    answer: dict[str, Any] = {}
    for part in batches(refs):
        for key, value in client.call(verb, tasks=part, **fields).items():
            answer[key] = [*answer.get(key, ()), *value] if isinstance(value, list) else value
    return answer


def batches(refs: Sequence[str]) -> Iterator[list[str]]:
    """The references in batches that fit into one request."""
    part: list[str] = []
    size = 0
    for ref in refs:
        if part and (len(part) >= REFS_AT_A_TIME or size + len(ref) > REFS_CHARS_AT_A_TIME):
            yield part
            part, size = [], 0
        part.append(ref)
        size += len(ref)
    if part:
        yield part


def pinned(client: AgentConnection, refs: Sequence[str]) -> list[str]:
    """The references, with those like `@` resolved to ids, since they may mean other tasks after a reconnection."""
    return [
        str(name)
        for ref in refs
        for name in (client.call("select", tasks=[ref])["selected"] if ref.startswith("@") else [ref])
    ]


def say_none() -> None:
    say("no task matches", "what there is:  peerload ls        peerload history")


def states_of(given: list[str], verb: str) -> list[str]:
    """The states that a user names, separated by commas or flags. Raises UsageError."""
    states = [name for value in given for name in value.split(",") if name]
    for name in states:
        if name not in STATES:
            raise UsageError(f"{verb}: no such state: {name!r}", hint=f"there are:  {' '.join(STATES)}")
    return states


def is_plain_id(word: str) -> bool:
    """True if this is the id of one task or array, not a range or `@~1`."""
    members = word.rpartition("/")[2].partition(".")[2]
    return "~" not in word and "-" not in members and "," not in members


def agreed(verb: str, count: int, states: dict[str, Any] | None = None) -> bool:
    """True if the user at the terminal agrees, or if the tasks are too few to ask."""
    if count <= ASKED_ABOVE:
        return True
    told = ", ".join(f"{number} {printable(state)}" for state, number in sorted((states or {}).items()))
    many = counted(count, "task") + (f" ({told})" if told else "")
    sys.stderr.write(f"peerload: {verb} {many}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say(f"nothing was changed: {counted(count, 'task')}")
    return False
