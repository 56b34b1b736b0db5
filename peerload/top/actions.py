"""Keys and actions of `top`. Each action is equivalent to a command of the command line, which is shown."""

from __future__ import annotations

import secrets
import signal
from typing import NamedTuple

from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError
from peerload.text.format import counted
from peerload.top import view_state
from peerload.top.model import ANSWERS_WITHIN_S, at

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from peerload.top.model import NodeModel


class Key(NamedTuple):
    """Keys of one action. names: in Textual; shown: in the help; changes: True if it changes the
    cluster, which ``--readonly`` refuses; hint: its label in the last line, "" for none."""

    names: tuple[str, ...]
    shown: str
    does: str
    says: str
    changes: bool = False
    hint: str = ""


KEYS = (
    Key(("1", "2", "3", "4", "5"), "1 … 5", "toggle", "hide or show a pane; a pane without space gets space first"),
    Key(("tab",), "Tab", "focus_next", "the next pane: nodes, tasks, events"),
    Key(("shift+tab",), "Shift-Tab", "focus_previous", "the previous pane"),
    Key(("enter",), "Enter", "open", "expand or collapse an array; elsewhere as z", hint="open"),
    Key(("down", "j"), "↓, j", "down", "the next row"),
    Key(("up", "k"), "↑, k", "up", "the previous row"),
    Key(("pagedown", "ctrl+f"), "PgDn, Ctrl-F", "page_down", "a page down"),
    Key(("pageup", "ctrl+b"), "PgUp, Ctrl-B", "page_up", "a page up"),
    Key(("home", "g"), "Home, g", "first", "the first row"),
    Key(("end", "G"), "End, G", "last", "the last row; with events, the newest"),
    Key(
        ("slash",),
        "/",
        "filter",
        "show only rows with these words; Enter keeps the filter, Esc removes it",
        hint="filter",
    ),
    Key(
        ("space",),
        "Space",
        "mark",
        "mark or unmark the task; c, h, r and s then apply to all marked tasks",
        hint="mark",
    ),
    Key(("U",), "U", "unmark", "remove all marks"),
    Key(("w",), "w", "why", "why the task waits, or runs where it does", hint="why"),
    Key(("l",), "l", "logs", "follow the output of the task", hint="logs"),
    Key(("c",), "c", "cancel", "cancel the task (asks)", changes=True, hint="cancel"),
    Key(("s",), "s and a letter", "signal", "send a signal to the task (asks)", changes=True, hint="signal"),
    Key(("h",), "h", "hold", "hold a waiting task", changes=True),
    Key(("r",), "r", "release", "release a held task; run an ended task again", changes=True),
    Key(("d",), "d", "drain", "drain the node (asks), or undrain it", changes=True, hint="drain"),
    Key(("o",), "o and a letter", "sort", "sort by a column; the same letter again reverses the order", hint="sort"),
    Key(("z",), "z", "zoom", "show this pane alone, or all again", hint="zoom"),
    Key(("m",), "m", "mine", "show only my tasks, or all again", hint="mine"),
    Key(("p",), "p", "pause", "pause the view, or resume it", hint="pause"),
    Key(("a",), "a", "attach", "show the cluster as the chosen node sees it"),
    Key(("question_mark",), "?", "help", "this page", hint="help"),
    Key(("escape",), "Esc", "escape", "cancel the question, the filter, the zoom, the marks"),
    Key(("q", "ctrl+c"), "q, Ctrl-C", "quit", "quit", hint="quit"),
)

BY_NAME = {name: key for key in KEYS for name in key.names}


WAITING = ("queued",)
NOTHING_CHOSEN = "no task is chosen"
SIGNALS = {
    "t": "TERM", "k": "KILL", "i": "INT", "h": "HUP", "q": "QUIT", "1": "USR1", "2": "USR2", "s": "STOP",
    "c": "CONT",
}  # fmt: skip
"""Letter → the signal that it sends."""


class Action(NamedTuple):
    """Change of the cluster. words: the equivalent command line; verb, requests: the
    requests to the agent, in order; asks: the question to confirm, "" for none."""

    words: tuple[str, ...]
    verb: str
    requests: tuple[dict[str, object], ...]
    asks: str = ""

    def command(self) -> str:
        """The command line as text. Ids and names of nodes need no quotes."""
        return " ".join(self.words)

    def carry_out(self, socket_path: str | None) -> str:
        """Send the requests → the outcome in a few words. A refused request does not stop the others. Raises
        PeerloadError if all were refused."""
        replies, refused = [], []
        with AgentConnection(socket_path, timeout_s=2 * ANSWERS_WITHIN_S) as client:
            for fields in self.requests:
                try:
                    replies.append(client.call(self.verb, **fields))
                except PeerloadError as error:
                    refused.append(error)
        if not replies and refused:
            raise refused[0]
        done = outcome(self.verb, replies)
        return f"{done}, {len(refused)} refused: {refused[0].what}" if refused else done


class ActionRefused(NamedTuple):
    """Reason why an action is not possible for the chosen rows."""

    why: str


def cancel(rows: Sequence[dict[str, Any]]) -> Action | ActionRefused:
    if not rows:
        return ActionRefused(NOTHING_CHOSEN)
    some = [row for row in rows if not view_state.is_over(row)]
    if not some:
        return ActionRefused(f"{_called(rows)} {'has' if len(rows) == 1 else 'have'} ended already")
    names = _refs(some)
    return Action(
        ("peerload", "cancel", *names), "cancel", ({"tasks": names},), f"cancel {_called(some, view_state.OVER)} ?"
    )


def hold(rows: Sequence[dict[str, Any]]) -> Action | ActionRefused:
    if not rows:
        return ActionRefused(NOTHING_CHOSEN)
    some = [row for row in rows if _has(row, WAITING)]
    if not some:
        return ActionRefused(f"{_called(rows)} {_do(rows)} not wait: {_states(rows)}")
    names = _refs(some)
    return Action(("peerload", "hold", *names), "hold", ({"tasks": names},))


def release(rows: Sequence[dict[str, Any]]) -> Action | ActionRefused:
    """Release held tasks; if none is held, queue ended ones again."""
    if not rows:
        return ActionRefused(NOTHING_CHOSEN)
    if held := [row for row in rows if _has(row, ("held",))]:
        names = _refs(held)
        return Action(("peerload", "release", *names), "release", ({"tasks": names},))
    if any(row.get("members") for row in rows):
        return ActionRefused("these are some members of an array: choose the row of the array")
    over = [row for row in rows if row.get("state") in (*view_state.OVER, "unknown")]
    if not over:
        what = "is neither held nor ended" if len(rows) == 1 else "are neither held nor ended"
        return ActionRefused(f"{_called(rows)} {what}: {_states(rows)}")
    names = _refs(over)
    requests: tuple[dict[str, object], ...] = tuple({"token": secrets.token_hex(16), "task": name} for name in names)
    asks = f"run {_called(over)} again?"
    if any(row.get("array") for row in over):
        asks = f"run {_called(over)} again, of an array what has not succeeded?"
    return Action(("peerload", "retry", *names), "retry", requests, asks)


ON_TASKS = {"cancel": cancel, "hold": hold, "release": release}
"""The changes to the chosen tasks, by key."""


def send(rows: Sequence[dict[str, Any]], name: str) -> Action | ActionRefused:
    if not rows:
        return ActionRefused(NOTHING_CHOSEN)
    running = tuple(task for row in rows for task in view_state.running(row))
    if not running:
        return ActionRefused(f"{_called(rows)} {_do(rows)} not run: {_states(rows)}")
    number = int(signal.Signals[f"SIG{name}"])
    requests: tuple[dict[str, object], ...] = tuple({"task": task, "signal": number} for task in running)
    called = running[0] if len(running) == 1 else f"{len(running)} tasks that run"
    return Action(("peerload", "signal", name, *running), "signal", requests, f"send {name} to {called} ?")


def _refs(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(ref for row in rows for ref in view_state.refs(row))


def _has(row: dict[str, Any], states: Sequence[str]) -> bool:
    return any(state in states for state in (row.get("array") or (row.get("state"),)))


def _called(rows: Sequence[dict[str, Any]], but: Sequence[str] = ()) -> str:
    """Name of the rows in a message: the id of one task, else the number of tasks, without those in the states
    ``but``."""
    number = 0
    for row in rows:
        counts = row.get("array")
        left_out = sum(count for state, count in counts.items() if state in but) if isinstance(counts, dict) else 0
        number += view_state.number_in(row) - left_out
    if len(rows) > 1:
        return counted(number, "task")
    name = str(rows[0].get("id"))
    return f"{name} ({counted(number, 'task')})" if rows[0].get("array") else name


def _do(rows: Sequence[dict[str, Any]]) -> str:
    return "does" if len(rows) == 1 else "do"


def _states(rows: Sequence[dict[str, Any]]) -> str:
    if len(rows) == 1:
        return f"it is {rows[0].get('state')}"
    return "they are " + ", ".join(sorted({str(row.get("state")) for row in rows}))


def drain(node: NodeModel | None, asked: str) -> Action | ActionRefused:
    """Drain a node, or undrain a drained one. asked: the node that receives the request."""
    if node is None:
        return ActionRefused("no node is chosen: press Tab to go to the nodes")
    if node.state != "alive":
        return ActionRefused(f"{node.name} is {node.state}")
    verb = "undrain" if node.facts.get("drained") else "drain"
    there = () if node.name == asked else (node.name,)
    fields: dict[str, object] = dict(at(node.name if there else ""))
    return Action(("peerload", verb, *there), verb, (fields,), f"{verb} {node.name} ?")


def outcome(verb: str, replies: Sequence[dict[str, Any]]) -> str:
    reply = replies[0] if replies else {}
    match verb:
        case "cancel":
            silent = ", ".join(dict.fromkeys(str(task.get("node")) for task in reply.get("unreachable") or ()))
            done = _did("cancelled", reply.get("cancelled")) or "it had ended already"
            return f"{done}; it may run on at {silent}, which does not answer" if silent else done
        case "hold":
            return _did("held", reply.get("held")) or "it is not waiting any more"
        case "release":
            return _did("released", reply.get("released")) or "it was not held"
        case "retry":
            return f"queued as {', '.join(str(reply.get('id')) for reply in replies)}"
        case "signal":
            return "sent" if len(replies) == 1 else f"sent to {len(replies)} tasks"
        case "drain":
            return f"drained: {reply.get('returned', 0)} went back, {reply.get('running', 0)} run on"
        case "undrain":
            return "takes tasks again" if reply.get("was_drained") else "it was not drained"
        case _:
            return "done"


def _did(word: str, names: object) -> str:
    """The word if any task was changed, with their number if there are several."""
    number = len(names) if isinstance(names, (list, tuple)) else 0
    return "" if not number else word if number == 1 else f"{word} {number} tasks"
