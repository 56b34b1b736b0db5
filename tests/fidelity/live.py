"""A workload played by real agents on this machine, with a broker between them, and what is known of it afterwards.

All clocks are those of one machine, so moments of different agents can be compared.
"""

from __future__ import annotations

import collections
import secrets
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from peerload.cli.demo.broker import start_broker
from peerload.wire import recording
from tests.integration.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from peerload.client.connection import AgentConnection
    from tests.integration.cluster import Agent

WAIT_S_MAX = 120.0
"""Everything must have ended so long after the last submission."""


class Job(NamedTuple):
    """One submission: so long after the beginning, at this node, of `sleep` for so long."""

    at_s: float
    node: str
    sleep_s: float


class Ran(NamedTuple):
    """What became of one job. Times in s from the beginning; started, ended: of its process."""

    home: str
    node: str
    submitted_s: float
    started_s: float
    ended_s: float
    migrations: int

    @property
    def service_s(self) -> float:
        """How long its process lived."""
        return self.ended_s - self.started_s

    @property
    def response_s(self) -> float:
        """From its submission to the end of its process."""
        return self.ended_s - self.submitted_s


class Delays(NamedTuple):
    """What things took, each the mean in s. message: from one core to another's; message_min: the 5th percentile;
    disk: what a row that must be durable first adds to a message; start: from the decision to a process's start, the
    disk included; end: from a process's end to the core's knowing."""

    message_s: float
    message_min_s: float
    disk_s: float
    start_s: float
    end_s: float


class Outcome(NamedTuple):
    """All jobs in the order of their submission, the agents' counters added up, and what was measured beside."""

    ran: list[Ran]
    counters: collections.Counter[str]
    delays: Delays | None

    @property
    def mean_response_s(self) -> float:
        """Over all jobs."""
        return statistics.fmean(ran.response_s for ran in self.ran)

    @property
    def transfers(self) -> float:
        """Transfers a task."""
        return self.counters["transfers_total"] / len(self.ran)


def play(policy: str, nodes: int, jobs: Sequence[Job], *, record: bool = True) -> Outcome:
    """The jobs, at their times, on so many agents n1 … with one slot each; with ``record``, delays are measured."""
    with (
        tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as place,
        start_broker(Path(place), "mosquitto") as broker,
        Cluster() as cluster,
    ):
        agents = _agents(cluster, broker.url, policy, nodes, record=record)
        before = _counters(agents.values())
        ran = _submit_all(agents, jobs)
        counters = _counters(agents.values())
        counters.subtract(before)
        for agent in agents.values():
            agent.call("stop", all=True)
            agent.reap()
        recorded = {node: (cluster.directory / f"{node}.rec") for node in agents}
        delays = measured({node: path.read_bytes() for node, path in recorded.items()}) if record else None
    return Outcome(ran, counters, delays)


def _agents(cluster: Cluster, url: str, policy: str, nodes: int, *, record: bool) -> dict[str, Agent]:
    agents = {}
    for node in (f"n{number}" for number in range(1, nodes + 1)):
        more = ["--record", str(cluster.directory / f"{node}.rec")] if record else []
        agents[node] = cluster.add(node, "--mqtt", url, "--policy", policy, *more, slots=1).spawn()
    for agent in agents.values():
        agent.await_ready()
    cluster.await_acquainted(agents.values())
    return agents


def _counters(agents: Iterable[Agent]) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for agent in agents:
        found.update(agent.counters())
    return found


def _submit_all(agents: dict[str, Agent], jobs: Sequence[Job]) -> list[Ran]:
    clients = {node: agent.client() for node, agent in agents.items()}
    requests: list[tuple[str, int]] = []
    pause = threading.Event()
    began_s = time.time()
    try:
        for job in jobs:
            pause.wait(max(job.at_s - (time.time() - began_s), 0.0))
            spec = agents[job.node].cluster.spec("sleep", f"{job.sleep_s:.6f}")
            number = clients[job.node].send("submit", token=secrets.token_hex(16), spec=spec, array=[])
            requests.append((job.node, number))
        ids = _answers(clients, requests)
    finally:
        for client in clients.values():
            client.close()
    for node, agent in agents.items():
        own = [task for task in ids if task.startswith(f"{node}/")]
        if own:
            agent.wait(*own, timeout_s=WAIT_S_MAX)
    told = {task["id"]: task for agent in agents.values() for task in agent.call("tasks", limit=len(jobs))["tasks"]}
    return [_ran(told[task], began_s) for task in ids]


def _answers(clients: dict[str, AgentConnection], requests: list[tuple[str, int]]) -> list[str]:
    """The ids that the requests were answered with, in the order of the requests."""
    ids: dict[tuple[str, int], str] = {}
    for node, client in clients.items():
        for _ in range(sum(asked == node for asked, _ in requests)):
            number, kind, body = client.receive()
            assert kind == "ok", body
            ids[(node, number)] = body["id"]
    return [ids[request] for request in requests]


def _ran(task: dict[str, Any], began_s: float) -> Ran:
    assert task["state"] == "done", task
    submitted_s, started_s, ended_s = (task[name] - began_s for name in ("submitted_at", "started_at", "ended_at"))
    return Ran(task["home"], task["node"], submitted_s, started_s, ended_s, task["migrations"])


# -- what recordings tell of delays ------------------------------------------------------------------------------------


class _Seen:
    """What the recordings hold that took time. Messages are known by sender, receiver and content."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, str, bytes], list[tuple[float, bool]]] = collections.defaultdict(list)
        self.received: dict[tuple[str, str, bytes], list[float]] = collections.defaultdict(list)
        self.spawned: dict[tuple[str, str], float] = {}
        self.started: dict[tuple[str, str], float] = {}
        self.end_s: list[float] = []

    def read(self, node: str, data: bytes) -> None:
        """One recording."""
        for entry in recording.entries(memoryview(data)):
            if isinstance(entry, recording.Handled):
                at_s = entry.now.wall_s
                self._event(node, at_s, recording.plain(entry.event))
                self._actions(node, at_s, recording.plain(entry.actions))

    def _event(self, node: str, at_s: float, event: dict[str, Any]) -> None:
        if event["type"] == "MessageReceived":
            self.received[(event["src"], node, msgspec.msgpack.encode(event["message"]))].append(at_s)
        elif event["type"] == "TaskEnded":
            self.started[(node, event["key"])] = event["exit"]["started_at"]
            self.end_s.append(at_s - event["exit"]["ended_at"])

    def _actions(self, node: str, at_s: float, actions: list[dict[str, Any]]) -> None:
        is_behind_disk = False
        for action in actions:
            if action["type"] == "Persist":
                is_behind_disk = True
            elif action["type"] == "Send":
                key = (node, action["dst"], msgspec.msgpack.encode(action["message"]))
                self.sent[key].append((at_s, is_behind_disk))
            elif action["type"] == "SpawnTask":
                self.spawned[(node, action["key"])] = at_s

    def message_delays_s(self, *, behind_disk: bool) -> Iterator[float]:
        """Of all messages that arrived, and waited for the disk or did not."""
        for key, sent in self.sent.items():
            for (sent_s, was_behind_disk), received_s in zip(sent, self.received[key], strict=False):
                if was_behind_disk is behind_disk:
                    yield received_s - sent_s


def measured(recordings: dict[str, bytes]) -> Delays:
    """What things took, by the recordings of all agents."""
    seen = _Seen()
    for node, data in recordings.items():
        seen.read(node, data)
    plain = sorted(seen.message_delays_s(behind_disk=False))
    durable = list(seen.message_delays_s(behind_disk=True))
    start = [seen.started[key] - at_s for key, at_s in seen.spawned.items() if key in seen.started]
    message_s = statistics.fmean(plain)
    return Delays(
        message_s,
        plain[len(plain) // 20],
        max(statistics.fmean(durable) - message_s, 0.0) if durable else 0.0,
        statistics.fmean(start),
        statistics.fmean(seen.end_s),
    )
