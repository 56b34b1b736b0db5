"""What TLS costs between two nodes: tasks handed over in a second, and how long the first connection takes, beside the same
code over plain TCP.

`python tests/bench/bench_tls.py`: two pairs of agents, one with the links as they are and one with plain ones (there is no
such switch: `plain_agent.py` takes TLS out of its event loop), measured in turns, so that what else the machine does meets
both alike. /bin/true is submitted at one node of a pair and run at the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable
from peerload.model.messages import Envelope, Hello, Identity
from peerload.model.resources import LoadReport, Profile
from peerload.security import cluster_dir
from peerload.security.tls import Credentials
from peerload.wire import peer
from tests.bench.support import ENVIRONMENT, TRUE, Agent, arguments, cpu_s, median_text, report, summary, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.security.cluster_dir import ClusterDirectory

TASKS = 300
ROUNDS = 9
SLOTS = 2
CONNECTIONS = 50
NAMES = ("node0", "node1")
PLAIN = Path(__file__).with_name("plain_agent.py")
UP_S_MAX = 60.0


def words_of(directory: Path, of: ClusterDirectory, node: str, others: list[str]) -> list[str]:
    """The command line of one agent."""
    known = [word for address in others for word in ("--peer", address)]
    return [
        *("--node", node, "--state", str(directory / node), "--socket", str(directory / f"{node}.sock")),
        *("--cluster", str(of.directory), "--listen", "127.0.0.1:0", "--slots", str(SLOTS), "--speed", "1"),
        *("--config", str(directory / "config.toml"), *known),
    ]


@contextlib.contextmanager
def pair(directory: Path, of: ClusterDirectory, *, plain: bool) -> Iterator[list[Agent]]:
    """Two agents that have met."""
    directory.mkdir(mode=0o700)
    (directory / "config.toml").write_text("mqtt = []\n", encoding="utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    started: list[Agent] = []
    try:
        for node, other in zip(NAMES, reversed(NAMES), strict=True):
            words = words_of(directory, of, node, [str(one.client.call("info")["listen"]) for one in started])
            program = [sys.executable, str(PLAIN), other] if plain else [sys.executable, "-m", "peerload", "agent"]
            with (directory / f"{node}.log").open("ab") as log:
                processes.append(
                    subprocess.Popen([*program, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
                )
            path = str(directory / f"{node}.sock")
            wait_until(lambda path=path: answers(path), UP_S_MAX)
            with AgentConnection(path) as client:
                started.append(Agent(client.call("info"), SLOTS))
        for agent in started:
            wait_until(lambda agent=agent: alive(agent) == len(NAMES), UP_S_MAX)
        yield started
    finally:
        for agent in started:
            with contextlib.closing(agent.client):
                agent.client.call("stop", all=True)
        for process in processes:
            process.wait(UP_S_MAX)


def answers(path: str) -> bool:
    """Whether an agent is there."""
    try:
        with AgentConnection(path) as client:
            return bool(client.call("info"))
    except AgentUnavailable:
        return False


def alive(agent: Agent) -> int:
    """How many nodes it takes to be alive."""
    return sum(node["state"] == "alive" for node in agent.client.call("nodes")["nodes"])


def one_round(agents: list[Agent], count: int) -> tuple[float, float]:
    """→ tasks a second, and ms of processor time of all four processes a task."""
    home, other = agents
    pids = [*home.pids, *other.pids]
    spent_s, began_s = cpu_s(pids), time.perf_counter()
    spec: dict[str, Any] = {"argv": [TRUE.encode()], "directory": b"/tmp", "environment": ENVIRONMENT}
    spec["placement"] = {"node": other.node}
    reply = home.client.call("submit", token=os.urandom(16).hex(), spec=spec, array=[(1, count, 1)])
    home.wait(str(reply["id"]))
    took_s = time.perf_counter() - began_s
    return count / took_s, (cpu_s(pids) - spent_s) / count * 1000


def first_connection_s(address: str, credentials: Credentials | None, number: int) -> float:
    """From the first packet until both ends have introduced themselves. Without credentials: plain."""
    host, _, port = address.rpartition(":")
    boot = f"boot-{number}"
    name = "probe" if credentials is not None else NAMES[1]
    identity = Identity(name, boot, "machine", "store", number, "")
    hello = Hello(identity, Profile(node=name, slots=1, cpus=1.0), LoadReport(), stream=True)
    frame = peer.encode_frame(Envelope(v=1, cluster="bench", src=name, src_boot=boot, seq=1, body=hello))
    began_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        sock: socket.socket = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if credentials is not None:
            sock = stack.enter_context(credentials.client.wrap_socket(sock))
        sock.sendall(frame)
        heard = b""
        while len(heard) < 4 or len(heard) < 4 + int.from_bytes(heard[:4], "big"):
            heard += sock.recv(65536)
        return time.perf_counter() - began_s


def main() -> int:
    """Measure and print."""
    tasks = (int, TASKS, "tasks in a batch (default: %(default)s)")
    options = arguments(__doc__ or "", rounds=ROUNDS, tasks=tasks)
    directory = Path(tempfile.mkdtemp(prefix="pl-tls-", dir="/tmp"))
    try:
        made = cluster_dir.make(directory / "cluster", "bench")
        with pair(directory / "t", made, plain=False) as tls, pair(directory / "p", made, plain=True) as plain:
            for agents in (tls, plain):
                one_round(agents, 100)
            rounds = []
            for number in range(options.rounds):  # in turns, each first as often as the other
                order = (tls, plain) if number % 2 == 0 else (plain, tls)
                taken = {id(agents): one_round(agents, options.tasks) for agents in order}
                rounds.append((taken[id(tls)], taken[id(plain)]))
            credentials = Credentials(made, "probe", directory / "probe")
            addresses = [str(agents[0].client.call("info")["listen"]) for agents in (tls, plain)]
            connected = [
                (first_connection_s(addresses[0], credentials, n), first_connection_s(addresses[1], None, n))
                for n in range(1, CONNECTIONS + 1)
            ]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rates = [with_tls[0] / without[0] for with_tls, without in rounds]
    costs = [with_tls[1] / without[1] for with_tls, without in rounds]
    first_ms = [1000 * with_tls for with_tls, _ in connected]
    plain_ms = [1000 * without for _, without in connected]
    cost = 1 - statistics.median(rates)
    by_tls, by_plain = ([one[0][0] for one in rounds], [one[1][0] for one in rounds])
    spent, spent_plain = ([one[0][1] for one in rounds], [one[1][1] for one in rounds])
    head = f"{options.tasks} x {TRUE} handed to another node with {SLOTS} slots, {options.rounds} paired rounds"
    rate = f"  by TLS {median_text(by_tls)} tasks a second, plain {median_text(by_plain)}: TLS costs"
    rate += f" {100 * cost:.1f} % of the throughput (median of the pairs' ratios; at most 10)"
    processor = (
        f"  processor time a task: {median_text(spent, '.2f')} ms by TLS, {median_text(spent_plain, '.2f')} plain"
    )
    processor += f" ({100 * (statistics.median(costs) - 1):+.1f} %)"
    first = f"first connection, to both introductions: {median_text(first_ms, '.1f')} ms by TLS (at most 50),"
    text = [head, rate, processor, f"{first} {median_text(plain_ms, '.1f')} plain"]
    figures = {"rate_ratio": summary(rates), "cpu_ratio": summary(costs), "first_ms": summary(first_ms)}
    report(text, figures | {"first_plain_ms": summary(plain_ms), "cost": round(cost, 4)}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
