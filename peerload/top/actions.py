"""What can be done from the view. Each is a command of the command line, shown as it would be typed, and done the same way."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from peerload.client import Client
from peerload.top.sample import ANSWERS_WITHIN_S, at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from peerload.top.world import Node

ENDED = ("done", "failed", "cancelled")
WAITING = ("queued",)


class Action(NamedTuple):
    """words: the command line that does the same; verb and fields: the request; asks: the question, "" if none is put."""

    words: tuple[str, ...]
    verb: str
    fields: dict[str, object]
    asks: str = ""

    def command(self) -> str:
        """As it could be typed. Ids and names of nodes need no quotes."""
        return " ".join(self.words)

    def carry_out(self, socket_path: str | None) -> str:
        """Do it → what came of it, in a few words. Raises PeerloadError."""
        with Client(socket_path, timeout_s=2 * ANSWERS_WITHIN_S) as client:
            return outcome(self.verb, client.call(self.verb, **self.fields))


class Refused(NamedTuple):
    """Why something cannot be done with what is chosen."""

    why: str


def cancel(task: dict[str, Any] | None) -> Action | Refused:
    """Stop a task that has not ended."""
    if task is None:
        return Refused("no task is chosen")
    name = str(task.get("id"))
    if task.get("state") in ENDED:
        return Refused(f"{name} has ended already")
    return Action(("peerload", "cancel", name), "cancel", {"tasks": [name]}, f"cancel {name} ?")


def hold(task: dict[str, Any] | None) -> Action | Refused:
    """Keep a waiting task back."""
    if task is None:
        return Refused("no task is chosen")
    name = str(task.get("id"))
    if task.get("state") not in WAITING:
        return Refused(f"{name} does not wait: it is {task.get('state')}")
    return Action(("peerload", "hold", name), "hold", {"tasks": [name]})


def release(task: dict[str, Any] | None) -> Action | Refused:
    """Let a held task go on, or run one that has ended again."""
    if task is None:
        return Refused("no task is chosen")
    name, state = str(task.get("id")), task.get("state")
    if state == "held":
        return Action(("peerload", "release", name), "release", {"tasks": [name]})
    if state in (*ENDED, "unknown"):
        fields: dict[str, object] = {"token": secrets.token_hex(16), "task": name}
        return Action(("peerload", "retry", name), "retry", fields, f"run {name} again?")
    return Refused(f"{name} is neither held nor has it ended: it is {state}")


def drain(node: Node | None, asked: str) -> Action | Refused:
    """Have a node take no more tasks; one that is drained takes them again. asked: the node that is asked to do it."""
    if node is None:
        return Refused("no node is chosen: Tab goes to the nodes")
    if node.state != "alive":
        return Refused(f"{node.name} is {node.state}")
    verb = "undrain" if node.facts.get("drained") else "drain"
    there = () if node.name == asked else (node.name,)
    fields: dict[str, object] = dict(at(node.name if there else ""))
    return Action(("peerload", verb, *there), verb, fields, f"{verb} {node.name} ?")


def outcome(verb: str, reply: dict[str, Any]) -> str:
    """What an answer means, in a few words."""
    match verb:
        case "cancel":
            return "cancelled" if reply.get("cancelled") else "it had ended already"
        case "hold":
            return "held" if reply.get("held") else "it does not wait any more"
        case "release":
            return "released" if reply.get("released") else "it was not held"
        case "retry":
            return f"queued as {reply.get('id')}"
        case "drain":
            return f"drained: {reply.get('returned', 0)} went back, {reply.get('running', 0)} run on"
        case "undrain":
            return "takes tasks again" if reply.get("was_drained") else "it was not drained"
        case _:
            return "done"
