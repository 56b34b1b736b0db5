"""What the benchmarks share: agents of their own, the limits to compare with, /proc accounting, medians."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from peerload.cli.common import agent_process
from peerload.cli.demo.broker import start_broker
from peerload.client.connection import AgentConnection
from peerload.client.submission import packed_variables
from peerload.security import cluster_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TRUE = "/bin/true"
ROUNDS = 5
ANSWER_WITHIN_S = 120.0
MEET_WITHIN_S = 60.0
NAMESPACE_PORT = 7117

_CONFIG = 'cluster = "{cluster}"\npeer = []\nmqtt = []\nlabel = []\n[load]\nforeign = "ignore"\n'
"""Of an agent. What else runs on this machine, such as a tool that is measured beside it, occupies no slot."""


class Meanwhile:
    """A client of its own that does something again and again, while a ``with`` block lasts. ``every_s``: between the end of
    one and the begin of the next."""

    every_s: float

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._repeat)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def once(self, client: AgentConnection) -> None:
        """What it does."""
        raise NotImplementedError

    def _repeat(self) -> None:
        with AgentConnection(self._socket, timeout_s=ANSWER_WITHIN_S) as client:
            while not self._ends.wait(self.every_s):
                self.once(client)


class Agent:
    """One agent started for a benchmark, with a connected client."""

    def __init__(self, info: dict[str, Any], slots: int) -> None:
        self.node = str(info["node"])
        self.slots = slots
        self.socket = str(info["socket"])
        self.pid = int(info["pid"])
        self.launcher_pid = int(info["launcher_pid"])
        self.client = AgentConnection(self.socket, timeout_s=ANSWER_WITHIN_S)

    @property
    def pids(self) -> tuple[int, int]:
        """Agent and launcher."""
        return self.pid, self.launcher_pid

    def submit(self, *argv: str, array: int = 0) -> str:
        """Queue one command line, or ``array`` of it → the id."""
        reply = self.client.call(
            "submit",
            token=os.urandom(16).hex(),
            spec={"argv": [word.encode() for word in argv], "directory": b"/tmp", "environment": ENVIRONMENT},
            array=[(1, array, 1)] if array else [],
        )
        return str(reply["id"])

    def wait(self, task: str) -> None:
        """Until it has ended, and that is durable."""
        self.client.call("wait", tasks=[task])

    def counters(self) -> dict[str, int]:
        """Its counters since its start."""
        counters: dict[str, int] = self.client.call("stats")["counters"]
        return counters


ENVIRONMENT = packed_variables({b"PATH": os.environb.get(b"PATH", b"/usr/bin:/bin")})


@contextlib.contextmanager
def agents(
    count: int,
    *,
    slots: int = 2,
    policy: str = "adaptive",
    mqtt: bool = False,
    prepare: Callable[[Path, str], None] | None = None,
    program: Sequence[str] = (),
    namespaces: Sequence[str] = (),
) -> Iterator[list[Agent]]:
    """So many agents in a temporary directory; with ``mqtt`` they share a broker and have met when this returns, and so with
    ``namespaces``, one for each agent (`network_namespaces`). ``prepare`` is called with the state directory and the name of each before it starts. program: as `agent_process.start` takes it."""
    started: list[Agent] = []
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="pl-bench-", dir=None))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        made = cluster_dir.make(directory / "cluster", "bench")
        (directory / "config.toml").write_text(_CONFIG.format(cluster=made.directory))
        url = [stack.enter_context(start_broker(directory)).url] if mqtt else []
        stack.callback(_stop, started)
        for number in range(count):
            settings: dict[str, Any] = {"node": f"node{number}", "state": str(directory / f"state{number}")}
            settings |= {"socket": str(directory / f"s{number}"), "slots": slots, "policy": policy, "mqtt": url}
            settings |= {"config": str(directory / "config.toml"), "listen": "127.0.0.1:0"}
            if namespaces:
                settings["listen"] = f"{namespace_address(number)}:{NAMESPACE_PORT}"
                settings["peer"] = [f"{namespace_address(0)}:{NAMESPACE_PORT}"] if number else []
                enters = ["ip", "netns", "exec", namespaces[number]]
                program = [*enters, *agent_process.program_words(), "agent"]
            if prepare is not None:
                prepare(directory / f"state{number}", f"node{number}")
            started.append(Agent(agent_process.start(settings, program), slots))
        if mqtt or namespaces:
            for agent in started:
                wait_until(lambda agent=agent: _alive(agent) == count, MEET_WITHIN_S)
        yield started


def namespace_address(number: int) -> str:
    """The address in one of `network_namespaces`."""
    return f"10.96.0.{number + 1}"


@contextlib.contextmanager
def network_namespaces() -> Iterator[tuple[str, ...]]:
    """The names of two network namespaces with a veth link between them; none where this process may not make them."""
    if os.geteuid() or shutil.which("ip") is None:
        yield ()
        return
    names = tuple(f"plbench-{os.getpid()}-{number}" for number in range(2))
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names):
            _ip("-n", name, "address", "add", f"{namespace_address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        yield names


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Have this thread, and what it forks, in a network namespace; "" is where it is."""
    with contextlib.ExitStack() as stack:
        if namespace:
            own, there = (
                os.open(path, os.O_RDONLY) for path in ("/proc/thread-self/ns/net", f"/run/netns/{namespace}")
            )
            for fd in (own, there):
                stack.callback(os.close, fd)
            _enter(there)
            stack.callback(_enter, own)
        yield


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _alive(agent: Agent) -> int:
    return sum(node["state"] == "alive" for node in agent.client.call("nodes")["nodes"])


def _stop(started: Sequence[Agent]) -> None:
    for agent in started:
        with contextlib.closing(agent.client):
            agent.client.call("stop", all=True)
    for agent in started:
        wait_until(lambda agent=agent: _ended(agent.pid), ANSWER_WITHIN_S)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not Path(f"/proc/{pid}").exists()


def wait_until(predicate: Any, timeout_s: float) -> None:
    """Return as soon as it is true; SystemExit after ``timeout_s``."""
    pause = threading.Event()
    deadline_s = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within {timeout_s:g} s")
        pause.wait(0.02)


# -- the limits --------------------------------------------------------------------------------------------------------


def bare_loop_s(count: int, alive: int = 2) -> float:
    """``count`` times /bin/true with posix_spawn and waitpid, so many alive at a time: nothing can be quicker."""
    began_s = time.perf_counter()
    running = 0
    for _ in range(count):
        if running == alive:
            os.wait()
            running -= 1
        os.posix_spawn(TRUE, [TRUE], {})
        running += 1
    for _ in range(running):
        os.wait()
    return time.perf_counter() - began_s


def gnu_parallel_s(count: int) -> float | None:
    """The same with GNU parallel -j2; None where it is not installed."""
    program = shutil.which("parallel")
    said = subprocess.run([program, "--version"], capture_output=True, check=False).stdout if program else b""
    if program is None or not said.startswith(b"GNU parallel"):  # moreutils has another of this name
        return None
    numbers = "".join(f"{number}\n" for number in range(count)).encode()
    with tempfile.TemporaryDirectory(prefix="pl-bench-") as home:
        (Path(home) / ".parallel").mkdir()
        (Path(home) / ".parallel" / "will-cite").touch()
        began_s = time.perf_counter()
        subprocess.run(
            [program, "-j2", "-n1", TRUE, "{}"],
            input=numbers,
            env={**os.environ, "HOME": home},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return time.perf_counter() - began_s


# -- accounting --------------------------------------------------------------------------------------------------------


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of all threads of these processes so far; ended threads are not in it."""
    total = 0
    for pid in pids:
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(schedstat.read_text().split()[0])
    return total / 1e9


def pss_bytes(pids: Sequence[int]) -> int:
    """Proportional set size of these processes together."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def switches(pids: Sequence[int]) -> int:
    """How often these processes went to sleep so far: each is a wake-up."""
    total = 0
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    total += int(line.split()[1])
    return total


# -- figures -----------------------------------------------------------------------------------------------------------


def median_text(values: Sequence[float], form: str = ".0f") -> str:
    """``1,234 [1,100..1,300]``."""
    return f"{statistics.median(values):,{form}} [{min(values):,{form}}..{max(values):,{form}}]"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest and 95th percentile, for --json."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 6) for name, value in (figures | {"p95": percentile(values, 0.95)}).items()}


def load_text() -> str:
    """The machine's load average, which tells how far the figures can be trusted."""
    return f"load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}, {os.cpu_count()} processors"


def flush_us(directory: str = "/tmp", samples: int = 50) -> float:
    """Median time of one small append with fdatasync, in microseconds: what durability costs on this disk."""
    taken: list[float] = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(samples):
            began_s = time.perf_counter()
            file.write(b"x" * 256)
            os.fdatasync(file.fileno())
            taken.append((time.perf_counter() - began_s) * 1e6)
    return statistics.median(taken)


def _terminated(_number: int, _frame: object) -> None:
    raise SystemExit("terminated")


def arguments(says: str, *, rounds: int = ROUNDS, **options: tuple[type, object, str]) -> argparse.Namespace:
    """The command line of a benchmark: --json and --rounds (default: ``rounds``), and ``options`` (type, default, help); one of type bool is a
    flag."""
    signal.signal(signal.SIGTERM, _terminated)  # so that what was started is stopped
    parser = argparse.ArgumentParser(description=says)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each is measured (default: %(default)s)")
    for name, (kind, default, explains) in options.items():
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true", help=explains)
        else:
            parser.add_argument(f"--{name}", type=kind, default=default, help=explains)
    return parser.parse_args()


def report_taken(head: str, figures: dict[str, Any], taken: Mapping[str, Sequence[float]], *, as_json: bool) -> None:
    """Print a line for each thing that was measured, seconds by the thousandth; a name that ends otherwise is no time.
    ``figures``: what else belongs to them."""
    width = max(map(len, taken))
    times = {name for name in taken if name.endswith(" s")}
    lines = [
        f"  {name:{width}} {median_text(values, '.3f' if name in times else '.0f')}" for name, values in taken.items()
    ]
    report([head, *lines], figures | {name: summary(values) for name, values in taken.items()}, as_json=as_json)


def report(text: Sequence[str], figures: dict[str, Any], *, as_json: bool) -> None:
    """Print one or the other, with the load average."""
    if as_json:
        print(json.dumps({"v": 1, **figures, "load_average": os.getloadavg()}))  # noqa: T201 -- a measurement is its own report
    else:
        print("\n".join([*text, load_text(), ""]), flush=True)  # noqa: T201 -- as above
