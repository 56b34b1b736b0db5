"""`peerload demo`: three agents and a broker on this machine, sharing real commands."""

from __future__ import annotations

import os
import sys
import time

from peerload.cli.common import agent_process
from peerload.cli.demo import report
from peerload.cli.demo.broker import find_broker, start_broker
from peerload.cli.demo.demo import ANSWER_WITHIN_S, MARK, TICK_S, Demo, wait
from peerload.cli.demo.work import commands
from peerload.client import submission
from peerload.client.connection import AgentConnection
from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.security import cluster_dir
from peerload.text.format import coloured

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from peerload.cli.demo.broker import Kind
    from peerload.cli.demo.work import DemoCommand

SLOTS = {"small": 1, "middle": 2, "large": 3}
HOME = "small"
"""All tasks are submitted here: what runs elsewhere, was shared."""
TASKS_MAX = 2_000
TASKS_WITHIN_S = 240.0
TASK_WITHIN_S = 1.0
"""All tasks must have ended within TASKS_WITHIN_S, or this for each if that is more."""
SHOWN_AT_A_TIME = 500

_CONFIG = 'cluster = "{cluster}"\npeer = []\nlabel = []\n[load]\nforeign = "ignore"\n'
"""Configuration that keeps the demo's agents out of a cluster in use. They share one machine, where each would take
the tasks of the others for foreign load."""


class SharingDemo(Demo):
    """Three agents of different size that meet over MQTT; all tasks are submitted to the smallest."""

    nodes = tuple(SLOTS)
    broker = ""

    def run(self, count: int, broker_kind: Kind | None = None) -> dict[str, Any]:
        """Start everything, have ``count`` commands run, and return the account. Raises PeerloadError."""
        began_s = time.monotonic()
        kind = broker_kind or find_broker()
        if kind is None:
            raise PeerloadError(
                "there is no MQTT broker to start",
                why="mosquitto is not installed, nor is amqtt",
                hint=f"apt install mosquitto        or:  {how_to_add('broker')}",
            )
        broker = self._stack.enter_context(start_broker(self.directory, kind))
        self.broker = kind
        config = self.directory / "config.toml"
        made = cluster_dir.make(self.directory / "cluster", f"demo-{os.getpid()}")
        config.write_text(_CONFIG.format(cluster=made.directory), encoding="utf-8")
        for node, slots in SLOTS.items():
            info = agent_process.start(
                {
                    "node": node,
                    "state": str(self.directory / node),
                    "socket": self.socket(node),
                    "listen": "127.0.0.1:0",
                    "mqtt": [broker.url],
                    "slots": slots,
                    "speed": 1,
                    "policy": self.policy,
                    "config": str(config),
                }
            )
            self.started |= {info["pid"], info["launcher_pid"]}
        self.started.add(broker.pid)
        self.started.update(self.processes())  # the guards of the launchers, too
        clients = {
            node: self._stack.enter_context(AgentConnection(self.socket(node), timeout_s=ANSWER_WITHIN_S))
            for node in SLOTS
        }
        for node, client in clients.items():
            wait(lambda client=client: _has_met(client), f"{node} did not meet the others over MQTT")  # type: ignore[misc]
        sys.stderr.write(
            f"{kind} at port {broker.port}, three agents (slots):"
            f" {', '.join(f'{node} ({slots})' for node, slots in SLOTS.items())}.\n"
            f"They met over MQTT, {time.monotonic() - began_s:.1f} s after the start."
            f" {count} commands go to {HOME}.\n"
            f"Policy: {printable(self.policy)}.\n\n"
        )
        work = commands(count)
        before = {node: _counters(client) for node, client in clients.items()}
        tasks = self._share(clients[HOME], work)
        after = {node: _counters(client) for node, client in clients.items()}
        counters = {
            node: {name: number - before[node].get(name, 0) for name, number in after[node].items()} for node in SLOTS
        }
        account = report.account(tasks, SLOTS, HOME, counters)
        return account | _checked(clients[HOME], tasks, work)

    def _share(self, client: AgentConnection, work: Sequence[DemoCommand]) -> list[dict[str, Any]]:
        """Submit all to one node and wait until they have ended → the tasks as `show` gives them, in order."""
        scratch = self.directory / "work"
        scratch.mkdir()
        variables = {b"PATH": os.environb.get(b"PATH", os.fsencode(os.defpath)), b"LC_ALL": b"C"}
        packed = submission.packed_variables({**variables, MARK.encode(): os.fsencode(self.directory)})
        ids: list[str] = []
        began_s = time.monotonic()
        for command in work:
            spec = {
                "argv": [word.encode() for word in command.argv],
                "directory": os.fsencode(scratch),
                "environment": packed,
                "name": command.name,
            }
            ids.append(client.call("submit", token=os.urandom(16).hex(), spec=spec)["id"])
        live = report.DemoScreen(SLOTS, HOME)
        within_s = max(TASKS_WITHIN_S, TASK_WITHIN_S * len(work))
        while True:
            timed_out = client.call("wait", tasks=ids, timeout_s=TICK_S)["timed_out"]
            elapsed_s = time.monotonic() - began_s
            live.show(client.call("tasks", limit=TASKS_MAX)["tasks"], elapsed_s, at_last=not timed_out)
            if not timed_out:
                break
            if elapsed_s > within_s:
                raise PeerloadError("the tasks have not all ended", why=f"{within_s:g} s have passed")
        shown: list[dict[str, Any]] = []
        for first in range(0, len(ids), SHOWN_AT_A_TIME):
            shown += client.call("show", tasks=ids[first : first + SHOWN_AT_A_TIME])["tasks"]
        return shown


def _has_met(client: AgentConnection) -> bool:
    nodes = client.call("nodes")["nodes"]
    alive = sum(node["state"] == "alive" and node["load"] is not None for node in nodes)
    return alive == len(SLOTS) and client.call("info")["mqtt"] is not None


def _counters(client: AgentConnection) -> dict[str, int]:
    counters: dict[str, int] = client.call("stats")["counters"]
    return counters


def _checked(client: AgentConnection, tasks: Sequence[dict[str, Any]], work: Sequence[DemoCommand]) -> dict[str, Any]:
    """Compare each task's output, read at its home, with the known answer → how many are right, and one that came
    from another node, to show."""
    right = best = 0
    example: dict[str, Any] | None = None
    for task, command in zip(tasks, work, strict=True):
        pieces = client.stream("output", task=task["id"], streams=[1])
        told = b"".join(piece["data"] for piece in pieces).decode("utf-8", "replace").strip()
        answer = command.answer()
        right += told == answer
        rank = 3 if told != answer else 0 if task["node"] == HOME else 2 if command.name.startswith("hash") else 1
        if rank > best:
            best = rank
            example = {"id": task["id"], "name": command.name, "node": task["node"], "output": told, "answer": answer}
    return {"outputs_right": right, "example": example}


def told(account: dict[str, Any]) -> list[str]:
    """The account as lines of text."""
    ended_well = account["tasks"] - account["failed"]
    verdict = f"{ended_well} of {account['tasks']} ended with exit code 0,"
    verdict += f" {account['outputs_right']} outputs came home as computed here"
    good = account["outputs_right"] == account["tasks"] == ended_well
    lines = [*report.lines(account), "", coloured(verdict, "green" if good else "red", sys.stdout)]
    example = account["example"]
    if example is not None:
        lines.append(f"{example['id']} ({example['name']}) on {printable(example['node'])}:")
        lines.append(f"  printed   {printable(example['output'])}")
        lines.append(f"  computed  {printable(example['answer'])}")
    return lines
