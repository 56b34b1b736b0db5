"""Real agents in processes of their own: started, killed, frozen, asked; at the end nothing of them is left.

Every process of a cluster can be known by the cluster's directory: agents and launchers have it on their command
lines, tasks and commands in the variable ``MARK``. So what is left over is found without asking anybody.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgpack

from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable
from peerload.model.task import TaskSpec
from tests.integration import forks
from tests.support import cluster_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

MARK = "CLUSTER_UNDER_TEST"
ROOT = Path(__file__).resolve().parents[2]
UP_S_MAX = 60.0
GONE_S_MAX = 60.0
PATH = "/usr/local/bin:/usr/bin:/bin"
SHORT_LEASE_S = 2
_WAITS = re.compile(rb"peerload: \S+ waits: [^\n]*\n|  (?:more|why|cancel it|another):  peerload [^\n]*\n")


@functools.cache
def program() -> tuple[str, ...]:
    """How to start peerload without heeding the directory we are in: installed, or else from this checkout."""
    isolated = [sys.executable, "-I", "-m", "peerload"]
    if subprocess.run([*isolated, "--version"], capture_output=True, check=False).returncode == 0:
        return tuple(isolated)
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from peerload.cli.main import main; sys.exit(main())"
    return (sys.executable, "-I", "-c", start)


def without_waits(said: bytes) -> bytes:
    """Output of `run` without its notice that the task waits, which it prints if some seconds pass before the start."""
    return _WAITS.sub(b"", said)


def is_alive(pid: int) -> bool:
    """Whether this process is there and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"


def processes_with(mark: str) -> dict[int, str]:
    """pid → command line of every living process that has ``mark`` on its command line or in its environment."""
    found = {}
    wanted = mark.encode()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            line = (directory / "cmdline").read_bytes()
            if wanted in line or wanted in (directory / "environ").read_bytes():
                found[int(directory.name)] = line.replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue  # it has ended, or is not ours
    return {pid: line for pid, line in found.items() if is_alive(pid)}


class Agent:
    """One agent. ``more`` are further words for its command line; ``lease_s`` goes into its config file."""

    def __init__(self, cluster: Cluster, node: str, more: Iterable[str], lease_s: float | None) -> None:
        self.cluster = cluster
        self.node = node
        self.directory = cluster.directory / node
        self.directory.mkdir(mode=0o700)
        self.state = self.directory / "state"
        self.socket = str(self.directory / "sock")
        self.log = self.directory / "log"
        self.listen = ""
        self.more = list(more)
        self._process: subprocess.Popen[bytes] | None = None
        if lease_s is not None:
            config = self.directory / "config.toml"
            config.write_text(f"lease_s = {lease_s}\n", encoding="utf-8")
            self.more += ["--config", str(config)]

    # -- life ----------------------------------------------------------------------------------------------------------

    def words(self) -> list[str]:
        """Its command line."""
        return [
            *program(),
            "agent",
            *("--node", self.node, "--state", str(self.state), "--socket", self.socket),
            *self.more,
        ]

    def spawn(self, **how: Any) -> Self:
        """Start it; it is not ready yet. how: further arguments of `Popen`."""
        with self.log.open("ab") as log:
            self._process = forks.start(
                self.words(),
                program(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.cluster.environment,
                cwd="/",
                start_new_session=True,
                **how,
            )
        return self

    def await_ready(self) -> Self:
        """Return when it answers."""
        wait_until(self._answers, UP_S_MAX, f"{self.node} to answer")
        self.listen = self.call("info")["listen"]
        return self

    def start(self) -> Self:
        """Start it, also again with the same state, and return when it answers."""
        return self.spawn().await_ready()

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.node} ended with {self._process.returncode}:\n{self.log_end()}")
        try:
            with AgentConnection(self.socket, timeout_s=UP_S_MAX) as client:
                return bool(client.call("info"))
        except AgentUnavailable:
            return False

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        """Its memory. What it has grown by is to be judged of an agent of which nothing was asked before."""
        return int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def launcher_pid(self) -> int:
        """The process that starts its tasks; if there is none just now, the next one."""
        pid = 0

        def is_there() -> bool:
            nonlocal pid
            pid = int(self.call("info")["launcher_pid"])
            return pid > 0

        wait_until(is_there, what="a launcher")
        return pid

    def kill(self) -> None:
        """End it at once, as a crash would; its launcher and tasks go on."""
        os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> int:
        """Wait for its end → its exit code."""
        assert self._process is not None
        return self._process.wait(GONE_S_MAX)

    def reap_if_started(self) -> None:
        """The same, unless it never was."""
        if self._process is not None:
            self.reap()

    def pause(self) -> None:
        """Freeze the agent alone."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def log_end(self) -> str:
        """What it said last."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:] if self.log.exists() else ""

    # -- asking --------------------------------------------------------------------------------------------------------

    def client(self) -> AgentConnection:
        """A connection to it."""
        return AgentConnection(self.socket, timeout_s=60)

    def call(self, verb: str, **fields: object) -> dict[str, Any]:
        """One request, one reply."""
        with self.client() as client:
            return client.call(verb, **fields)

    def submit(
        self, *argv: str | bytes, token: str = "", array: Iterable[object] = (), held: bool = False, **fields: object
    ) -> str:
        """Queue a command → its id. ``fields`` are those of a spec: placement, time_limit_s, …"""
        assert fields.keys() <= set(TaskSpec.__struct_fields__), "the agent ignores a field that it does not know"
        spec = self.cluster.spec(*argv, **fields)
        reply = self.call("submit", token=token or secrets.token_hex(16), spec=spec, array=list(array), held=held)
        assert isinstance(reply["id"], str)
        return reply["id"]

    def show(self, task: str) -> dict[str, Any]:
        """One task."""
        (shown,) = self.call("show", tasks=[task])["tasks"]
        assert isinstance(shown, dict)
        return shown

    def states(self) -> dict[str, str]:
        """id → state of every task whose home it is."""
        return {task["id"]: task["state"] for task in self.call("tasks")["tasks"]}

    def await_state(self, task: str, *states: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Wait until a task is in one of these states → the task."""
        wait_until(lambda: self.show(task)["state"] in states, timeout_s, f"{task} to be {' or '.join(states)}")
        return self.show(task)

    def wait(self, *tasks: str, timeout_s: float = 60.0) -> dict[str, dict[str, Any]]:
        """Wait until all these have ended → id → how."""
        with AgentConnection(self.socket, timeout_s=timeout_s + 10.0) as client:
            ended = {task["id"]: task for task in client.stream("wait", tasks=list(tasks), timeout_s=timeout_s)}
            assert not client.last["timed_out"], f"not ended in {timeout_s:g} s: {self.states()}"
        return ended

    def output(self, task: str) -> tuple[bytes, bytes]:
        """What a task has written to stdout and stderr, as there is now."""
        streams = {1: bytearray(), 2: bytearray()}
        with self.client() as client:
            for piece in client.stream("output", task=task):
                assert len(streams[piece["stream"]]) == piece["offset"]
                streams[piece["stream"]] += piece["data"]
        return bytes(streams[1]), bytes(streams[2])

    def counters(self) -> dict[str, int]:
        """What it has counted."""
        counters = self.call("stats")["counters"]
        assert isinstance(counters, dict)
        return counters

    def cli(self, *words: str | bytes, timeout_s: float = 60.0, **more: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a verb against it to its end."""
        return self.cluster.cli(self.socket, *words, timeout_s=timeout_s, **more)

    def spawn_cli(self, *words: str | bytes, **more: Any) -> subprocess.Popen[bytes]:
        """Start a verb against it, its output in pipes."""
        more.setdefault("stdout", subprocess.PIPE)
        more.setdefault("stderr", subprocess.PIPE)
        more.setdefault("stdin", subprocess.DEVNULL)
        more.setdefault("cwd", "/tmp")
        environment = {**self.cluster.environment, "PEERLOAD_SOCKET": self.socket}
        return forks.start([*program(), *words], program(), env=environment, **more)

    def peers_alive(self) -> set[str]:
        """The nodes it believes to be alive, itself too."""
        return {node["node"] for node in self.call("nodes")["nodes"] if node["state"] == "alive"}

    def database(self, query: str) -> list[tuple[Any, ...]]:
        """Read its database as it lies on disk."""
        with contextlib.closing(sqlite3.connect(self.state / "peerload.db", timeout=60)) as connection:
            return connection.execute(query).fetchall()


class Cluster:
    """Agents below one short directory, and the end of all of them."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
        self.agents: dict[str, Agent] = {}
        self.environment = {
            "PATH": PATH,
            "HOME": str(self.directory),
            "XDG_CONFIG_HOME": str(self.directory / "config"),
            "XDG_STATE_HOME": str(self.directory / "xdg-state"),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
            "PEERLOAD_CLUSTER": str(cluster_of().directory),
            "PEERLOAD_GPU_CLAIMS": str(self.directory / "claims"),
            "PEERLOAD_SPEED": "1",  # measuring would take a second of each agent's processor
            "PEERLOAD_LOAD_FOREIGN": "ignore",  # other tests on this machine place no tasks here
            MARK: str(self.directory),
        }
        (self.directory / "run").mkdir(mode=0o700)
        (self.directory / "claims").mkdir(mode=0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.print_logs()
        self.close(quiet=error is not None)

    def print_logs(self) -> None:
        """For the report of a test that failed."""
        for agent in self.agents.values():
            sys.stdout.write(f"---- {agent.node}\n{agent.log_end()}\n")

    def add(self, node: str, *more: str, slots: int | None = 2, lease_s: float | None = None) -> Agent:
        """Another agent, not started yet."""
        words = [*more] if slots is None else ["--slots", str(slots), *more]
        self.agents[node] = Agent(self, node, words, lease_s)
        return self.agents[node]

    def agent(self, node: str = "n1", *more: str, slots: int | None = 2, lease_s: float | None = None) -> Agent:
        """Another agent, started and ready."""
        return self.add(node, *more, slots=slots, lease_s=lease_s).start()

    def linked(self, count: int, *more: str, slots: int = 2, lease_s: float | None = None) -> list[Agent]:
        """Agents n1, n2, … that all know n1 and have got to know each other."""
        first = self.agent("n1", *more, slots=slots, lease_s=lease_s)
        rest = [
            self.add(f"n{number}", "--peer", first.listen, *more, slots=slots, lease_s=lease_s).spawn()
            for number in range(2, count + 1)
        ]
        agents = [first, *(agent.await_ready() for agent in rest)]
        self.await_acquainted(agents)
        return agents

    def await_acquainted(self, agents: Iterable[Agent]) -> None:
        """Wait until all of them know all of them."""
        together = list(agents)
        names = {agent.node for agent in together}
        for agent in together:
            wait_until(lambda agent=agent: names <= agent.peers_alive(), 20, f"{agent.node} to know {names}")  # type: ignore[misc]

    def spec(self, *argv: str | bytes, **fields: object) -> dict[str, object]:
        """A task's spec as the control socket takes it."""
        variables = {b"PATH": PATH.encode(), MARK.encode(): str(self.directory).encode()}
        return {
            "argv": [os.fsencode(word) for word in argv],
            "directory": b"/tmp",
            "environment": msgpack.packb(variables),
            **fields,
        }

    def cli(
        self, socket_path: str | None, *words: str | bytes, timeout_s: float = 60.0, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a verb to its end, away from the user's own settings."""
        environment = {**self.environment, **more.pop("env", {})}
        if socket_path is not None:
            environment["PEERLOAD_SOCKET"] = socket_path
        more.setdefault("stdin", subprocess.DEVNULL)
        more.setdefault("cwd", "/tmp")
        return forks.run([*program(), *words], program(), timeout_s, more.pop("input", None), env=environment, **more)

    def left_over(self) -> dict[int, str]:
        """What lives of this cluster."""
        return processes_with(str(self.directory))

    def close(self, *, quiet: bool = False) -> None:
        """Stop everything, launchers and tasks too; fail if something has to be killed for that."""
        try:
            self._stop_politely()
            wait_until(lambda: not self.left_over(), GONE_S_MAX, "all processes to end")
        except (AssertionError, subprocess.TimeoutExpired):
            left = self.left_over()
            for pid in left:
                _signal(pid, signal.SIGKILL)
            for agent in self.agents.values():
                agent.reap_if_started()
            if not quiet:
                self.print_logs()
                raise AssertionError(f"left over: {left}") from None
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _stop_politely(self) -> None:
        """Agents as `down --all` would; then the launchers of those that a test has killed."""
        running = [agent for agent in self.agents.values() if agent.runs]
        for agent in running:
            _signal(agent.pid, signal.SIGCONT)
        for agent in running:
            with contextlib.suppress(AgentUnavailable):
                agent.call("stop", all=True)
        for agent in self.agents.values():
            agent.reap_if_started()
        for pid, line in self.left_over().items():
            if "--directory" in line:
                _signal(pid, signal.SIGTERM)


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone by now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block, with its pipes closed."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
