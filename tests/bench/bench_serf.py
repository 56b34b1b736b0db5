"""Real agents beside as many of HashiCorp's serf, both with their `lan` timing and sealed, on this machine at once.

`python tests/bench/bench_serf.py --agents 10 --kills 5`: each kind lives in a network namespace of its own (root), so
that what each sends over its loopback can be read from the kernel. First both idle: processor, memory and bytes a
second of each agent. Then one agent of each kind is killed (SIGKILL) at the same moment, again and again, and it is
measured how soon all others know; then the same with one that hangs (SIGSTOP), which breaks no connection.
Needs serf (Debian package serf) and unshare, nsenter, ip.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable
from tests.bench.support import arguments, cpu_s, pss_bytes, report, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AGENTS, KILLS, SECONDS = 10, 5, 60.0
STAGGER_S = 0.3
SETTLE_S = 30.0
MEET_WITHIN_S, KNOWN_WITHIN_S = 180.0, 60.0
LOOK_EVERY_S = 0.1
PORT = 7946
RPC_PORT = 8946


class Network:
    """A network namespace with nothing but a loopback, for as long as the process that holds it lives."""

    def __init__(self) -> None:
        hold = "ip link set lo up && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "--net", "sh", "-c", hold])
        wait_until(self._is_up, 10.0)

    def _is_up(self) -> bool:
        if Path(f"/proc/{self._holder.pid}/ns/net").samefile("/proc/self/ns/net"):
            return False  # it has not got that far
        look = [*self.inside, "ip", "-o", "link", "show", "lo", "up"]
        return bool(subprocess.run(look, capture_output=True, check=False).stdout)

    @property
    def inside(self) -> list[str]:
        """What starts a command in it."""
        return ["nsenter", "--net", "--target", str(self._holder.pid)]

    def sent_bytes(self) -> int:
        """What has gone over its loopback, with all headers."""
        for line in Path(f"/proc/{self._holder.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[8])
        raise SystemExit("no loopback there")

    def close(self) -> None:
        """End it."""
        self._holder.kill()
        self._holder.wait()


class Cluster(Protocol):
    """So many agents of one kind."""

    name: str
    network: Network

    def pids(self) -> list[int]:
        """Of all processes that are still up."""

    def stop_one(self, number: int, how: int) -> None:
        """Send this signal to one agent."""

    def all_alive(self) -> bool:
        """Every agent holds every other for alive."""

    def unaware(self, number: int) -> int:
        """How many of the agents that run do not yet hold this one for dead."""

    def close(self) -> None:
        """End all."""


class Serf:
    """serf agents; what they believe is read from their logs."""

    name = "serf"

    def __init__(self, directory: Path, count: int) -> None:
        self.network = Network()
        self._logs = [directory / f"serf{number}.log" for number in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._gone: set[int] = set()
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        for number, log in enumerate(self._logs):
            join = ["-retry-join", f"127.0.0.1:{PORT}", "-retry-interval", "1s"] if number else []
            words = ["-node", f"n{number}", "-bind", f"127.0.0.1:{PORT + number}", "-encrypt", key, "-profile", "lan"]
            words += ["-rpc-addr", f"127.0.0.1:{RPC_PORT + number}", *join]
            with log.open("wb") as file:
                self._processes.append(
                    subprocess.Popen([*self.network.inside, "serf", "agent", *words], stdout=file, stderr=file)
                )
            threading.Event().wait(STAGGER_S)

    def pids(self) -> list[int]:
        return [process.pid for number, process in enumerate(self._processes) if number not in self._gone]

    def stop_one(self, number: int, how: int) -> None:
        self._gone.add(number)
        self._processes[number].send_signal(how)

    def _told(self, number: int, event: str) -> set[str]:
        lines = self._logs[number].read_text(errors="replace").splitlines()
        return {line.split(f"{event}: ")[1].split()[0] for line in lines if f"{event}: " in line}

    def all_alive(self) -> bool:
        return all(len(self._told(number, "EventMemberJoin")) == len(self._logs) for number in range(len(self._logs)))

    def unaware(self, number: int) -> int:
        others = (other for other in range(len(self._logs)) if other not in self._gone)
        return sum(f"n{number}" not in self._told(other, "EventMemberFailed") for other in others)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.network.close()


class Peerload:
    """Our agents; what they believe is asked over their control sockets."""

    name = "peerload"

    def __init__(self, directory: Path, count: int) -> None:
        self.network = Network()
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients: list[AgentConnection] = []
        self._launchers: list[int] = []
        self._gone: set[int] = set()
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(directory),
            "PEERLOAD_SPEED": "1",
            "PEERLOAD_LOAD_FOREIGN": "ignore",
        }
        environment |= {f"XDG_{name}": str(directory / name) for name in ("CONFIG_HOME", "STATE_HOME", "RUNTIME_DIR")}
        for number in range(count):
            words = ["--node", f"n{number}", "--state", str(directory / f"state{number}"), "--slots", "1"]
            words += ["--socket", self._socket(number), "--listen", f"127.0.0.1:{PORT + number}"]
            words += ["--peer", f"127.0.0.1:{PORT}"] if number else []
            program = [*self.network.inside, sys.executable, "-I", "-m", "peerload", "agent", *words]
            with (directory / f"agent{number}.log").open("wb") as file:
                self._processes.append(subprocess.Popen(program, env=environment, stdout=file, stderr=file))
            wait_until(lambda number=number: self._answers(number), MEET_WITHIN_S)
            self._launchers.append(int(self._clients[-1].call("info")["launcher_pid"]))

    def _answers(self, number: int) -> bool:
        with contextlib.suppress(AgentUnavailable):
            self._clients.append(AgentConnection(self._socket(number), timeout_s=MEET_WITHIN_S))
            return True
        return False

    def _socket(self, number: int) -> str:
        return str(self._directory / f"s{number}")

    def pids(self) -> list[int]:
        running = [number for number in range(len(self._processes)) if number not in self._gone]
        return [self._processes[number].pid for number in running] + [self._launchers[number] for number in running]

    def stop_one(self, number: int, how: int) -> None:
        self._gone.add(number)
        self._processes[number].send_signal(how)

    def _states(self, number: int) -> dict[str, str]:
        return {node["node"]: node["state"] for node in self._clients[number].call("nodes")["nodes"]}

    def all_alive(self) -> bool:
        want = len(self._processes)
        return all(list(self._states(number).values()).count("alive") == want for number in range(want))

    def unaware(self, number: int) -> int:
        others = (other for other in range(len(self._processes)) if other not in self._gone)
        return sum(self._states(other)[f"n{number}"] != "dead" for other in others)

    def close(self) -> None:
        for number, process in enumerate(self._processes):
            with contextlib.suppress(OSError):
                self._clients[number].close()
            process.kill()
            process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._launchers[number], signal.SIGKILL)
        self.network.close()


@contextlib.contextmanager
def clusters(count: int) -> Iterator[list[Cluster]]:
    """One of each kind, all acquainted."""
    directory = Path(tempfile.mkdtemp(prefix="pl-serf-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        started: list[Cluster] = []
        for kind in (Serf, Peerload):
            started.append(kind(directory, count))
            stack.callback(started[-1].close)
        for cluster in started:
            wait_until(cluster.all_alive, MEET_WITHIN_S)
        yield started


def idle(cluster: Cluster, agents: int, before: tuple[float, int], seconds: float) -> dict[str, float]:
    """What each agent cost since ``before`` (processor seconds, bytes)."""
    pids = cluster.pids()
    return {
        "cpu_share": (cpu_s(pids) - before[0]) / seconds / agents,
        "bytes_s": (cluster.network.sent_bytes() - before[1]) / seconds / agents,
        "pss_bytes": pss_bytes(pids) / agents,
    }


def detected(started: Sequence[Cluster], number: int, how: int) -> dict[str, float]:
    """Stop this agent of every kind → by kind, after how many seconds all others held it for dead."""
    began_s = time.monotonic()
    for cluster in started:
        cluster.stop_one(number, how)
    took_s: dict[str, float] = {}
    pause = threading.Event()
    while len(took_s) < len(started):
        for cluster in started:
            if cluster.name not in took_s and not cluster.unaware(number):
                took_s[cluster.name] = time.monotonic() - began_s
        if time.monotonic() - began_s > KNOWN_WITHIN_S:
            late = [cluster.name for cluster in started if cluster.name not in took_s]
            raise SystemExit(f"n{number} is not dead for all after {KNOWN_WITHIN_S:g} s: {late}")
        pause.wait(LOOK_EVERY_S)
    return took_s


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        agents=(int, AGENTS, "of each kind (default: %(default)s)"),
        kills=(int, KILLS, "agents killed, and as many that hang (default: %(default)s)"),
        seconds=(float, SECONDS, "how long to watch them idle (default: %(default)s)"),
    )
    if os.geteuid() or not shutil.which("serf"):
        raise SystemExit("it takes root, for the network namespaces, and serf (apt-get install serf)")
    pause = threading.Event()
    figures: dict[str, Any] = {"agents": options.agents, "seconds": options.seconds}
    with clusters(options.agents) as started:
        pause.wait(SETTLE_S)
        before = {cluster.name: (cpu_s(cluster.pids()), cluster.network.sent_bytes()) for cluster in started}
        pause.wait(options.seconds)
        for cluster in started:
            figures[cluster.name] = idle(cluster, options.agents, before[cluster.name], options.seconds)
        victims = iter(range(options.agents - 1, 0, -1))
        for name, how in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP)):
            for _ in range(options.kills):
                for kind, took_s in detected(started, next(victims), how).items():
                    figures[kind].setdefault(name, []).append(round(took_s, 2))
    text = [f"{options.agents} agents of each kind on loopback:"]
    for kind in (Serf.name, Peerload.name):
        told = figures[kind]
        text.append(
            f"  {kind:9} idle: {told['cpu_share']:.3%} of a processor, {told['bytes_s']:,.0f} bytes/s,"
            f" {told['pss_bytes'] / 2**20:.1f} MiB PSS an agent"
        )
        text += [
            f"            {name}, known to all others after {statistics.median(told[name]):.1f} s"
            f" [{min(told[name]):.1f}..{max(told[name]):.1f}]"
            for name in ("killed", "hung")
        ]
    report(text, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
