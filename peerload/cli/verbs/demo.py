"""`peerload demo`: three agents and a broker on this machine, sharing real commands.

Everything lives in one temporary directory and carries its name in the environment (`MARK`), so that whatever the demo
has started, agents, launchers, broker and tasks, can be found in /proc and is gone when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from peerload.cli.common import agent_process
from peerload.cli.common.errors import INTERRUPTED
from peerload.cli.common.options import Options, whole
from peerload.cli.demo import report
from peerload.cli.demo.broker import find_broker, start_broker
from peerload.cli.demo.work import commands
from peerload.client import environment
from peerload.client.connection import Client
from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.security import cluster_dir
from peerload.text.format import coloured, print_json, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from peerload.cli.demo.broker import Kind
    from peerload.cli.demo.work import Command

SLOTS = {"small": 1, "middle": 2, "large": 3}
HOME = "small"
"""All tasks are submitted here: what runs elsewhere, was shared."""
MARK = "PEERLOAD_DEMO"
TASKS = 60
TASKS_MAX = 2_000
MEET_WITHIN_S = 60.0
TICK_S = 0.1
TASKS_WITHIN_S = 240.0
TASK_WITHIN_S = 1.0
"""All tasks must have ended within TASKS_WITHIN_S, or this for each if that is more."""
GONE_WITHIN_S = 30.0
ANSWER_WITHIN_S = 20.0
PATH_BYTES_MAX = 60
"""A longer temporary directory leaves no room for the name of a socket; then it is /tmp."""
LOG_LINES_SHOWN = 5
SHOWN_AT_A_TIME = 500

_CONFIG = 'cluster = "{cluster}"\npeer = []\nlabel = []\n[load]\nforeign = "ignore"\n'
"""Nothing of this machine's own configuration may bring the demo's agents into a cluster in use. They share one machine, where
each would take the tasks of the others for foreign load."""


def main(words: list[str]) -> int:
    """Run the verb: 0 if all went well and nothing is left, 1 if not."""
    if words[:1] == ["gpu"]:
        from peerload.cli.demo import gpu

        return gpu.main(words[1:])
    reader = Options(
        "demo",
        "Start three agents and an MQTT broker on this machine, submit real commands of different length to one of"
        " the agents, show how they spread, count it up, and remove everything. `peerload demo gpu` shows how tasks"
        " share GPUs, on GPUs that are played.",
    )
    reader.flag("--tasks", type=whole(1, TASKS_MAX), default=TASKS, metavar="N", help="how many (default: %(default)s)")
    reader.flag("--policy", default="adaptive", metavar="NAME|FILE", help="the preset of policies (%(default)s)")
    reader.flag(
        "--broker", choices=("mosquitto", "amqtt"), help="which broker (default: Mosquitto where it is installed)"
    )
    flags = reader.read(words)
    policy = os.path.abspath(flags.policy) if flags.policy.endswith(".toml") else flags.policy  # noqa: PTH100 -- no links followed
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    demo = Demo(temporary_directory(), policy)
    account, left = carried_out(demo, lambda: demo.run(flags.tasks, flags.broker))
    if account is None:
        return INTERRUPTED
    account |= {"policy": flags.policy, "broker": demo.broker, "processes_left": len(left)}
    if flags.json:
        print_json(account)
    else:
        sys.stdout.write("\n" + "".join(f"{line}\n" for line in _told(account)))
    good = not left and not account["failed"] and account["outputs_right"] == account["tasks"]
    return 0 if good else 1


def carried_out(demo: Demo, act: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, list[tuple[int, str]]]:
    """Do it, and remove everything whatever comes of it → its account, None if it was interrupted, and what did
    not end when asked. Raises what ``act`` raises, with the agents' last words shown."""
    account: dict[str, Any] | None = None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            account = act()
    except (PeerloadError, OSError):
        demo.show_logs()
        raise
    finally:
        left = demo.clean()
        tell_left(left, demo.started)
    return account, left


class Demo:
    """One demonstration in one directory: `run`, then always `clean`."""

    nodes: tuple[str, ...] = tuple(SLOTS)

    def __init__(self, directory: Path, policy: str) -> None:
        self.directory = directory
        self.policy = policy
        self.broker = ""
        self.started: set[int] = set()
        self._stack = contextlib.ExitStack()
        for name in [name for name in os.environ if name.startswith("PEERLOAD_")]:
            del os.environ[name]  # settings meant for another agent
        os.environ[MARK] = str(directory)

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
            node: self._stack.enter_context(Client(self.socket(node), timeout_s=ANSWER_WITHIN_S)) for node in SLOTS
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

    def _share(self, client: Client, work: Sequence[Command]) -> list[dict[str, Any]]:
        """Submit all to one node and wait until they have ended → the tasks as `show` gives them, in order."""
        scratch = self.directory / "work"
        scratch.mkdir()
        variables = {b"PATH": os.environb.get(b"PATH", os.fsencode(os.defpath)), b"LC_ALL": b"C"}
        packed = environment.packed({**variables, MARK.encode(): os.fsencode(self.directory)})
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

    def clean(self) -> list[tuple[int, str]]:
        """End all that was started and remove the directory → (pid, command line) of what did not end when asked; it
        was killed. Takes two times GONE_WITHIN_S at most, and is not interrupted."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        told: list[str] = []
        for node in self.nodes:
            with contextlib.suppress(PeerloadError), Client(self.socket(node), timeout_s=GONE_WITHIN_S) as client:
                client.call("stop", all=True)
                told.append(node)
        self._stack.close()  # the broker, and our connections
        self._end(
            [pid for pid in self._agents() if not any(self._is_agent_of(pid, node) for node in told)], self._agents
        )
        left: list[tuple[int, str]] = []
        if not self._end(self.processes(), self.processes):  # the launcher of an agent that was interrupted early
            left = [(pid, _command_line(pid)) for pid in self.processes()]
            for pid, _ in left:
                _signal(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
        return left

    def _end(self, asked: Sequence[int], those: Callable[[], Sequence[int]]) -> bool:
        """SIGTERM to the ``asked``, then wait: whether none of ``those`` is left after GONE_WITHIN_S."""
        for pid in asked:
            _signal(pid, signal.SIGTERM)
        try:
            wait(lambda: not those(), "some processes do not end", GONE_WITHIN_S)
        except PeerloadError:
            return False
        return True

    def _agents(self) -> list[int]:
        return [pid for pid in self.processes() if any(self._is_agent_of(pid, node) for node in self.nodes)]

    def _is_agent_of(self, pid: int, node: str) -> bool:
        return f" --socket {self.socket(node)} " in f"{_command_line(pid)} "

    def show_logs(self) -> None:
        """The last lines of each agent's log, on stderr, before the directory goes."""
        for node in self.nodes:
            log = self.directory / node / "agent.log"
            if log.exists():
                for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]:
                    sys.stderr.write(f"  {node}: {printable(line)}\n")

    def socket(self, node: str) -> str:
        """Where this node's agent answers."""
        return str(self.directory / f"{node}.sock")

    def processes(self) -> list[int]:
        """Every living process that carries our mark, after reaping our own children."""
        mark = f"{MARK}={self.directory}".encode()
        found = []
        for entry in os.listdir("/proc"):  # noqa: PTH208 -- hundreds of names, ten times a second
            if not entry.isdecimal() or int(entry) == os.getpid():
                continue
            pid = int(entry)
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    continue
            try:
                with open(f"/proc/{entry}/environ", "rb") as environ:  # noqa: PTH123 -- as above
                    marked = mark in environ.read().split(b"\0")
            except OSError:
                continue  # it has just ended, or is somebody else's
            if marked:
                found.append(pid)
        return found


def temporary_directory() -> Path:
    """A new one for a demonstration."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > PATH_BYTES_MAX:
        base = "/tmp"  # noqa: S108 -- mkdtemp makes a directory there that nobody else can enter
    return Path(tempfile.mkdtemp(prefix="peerload-demo-", dir=base))


def interrupt(_number: int, _frame: object) -> None:
    """For signals that mean: clean up and go."""
    raise KeyboardInterrupt


def _has_met(client: Client) -> bool:
    nodes = client.call("nodes")["nodes"]
    alive = sum(node["state"] == "alive" and node["load"] is not None for node in nodes)
    return alive == len(SLOTS) and client.call("info")["mqtt"] is not None


def wait(predicate: Callable[[], bool], otherwise: str, within_s: float = MEET_WITHIN_S) -> None:
    """Return as soon as it is true. Raises PeerloadError saying ``otherwise``."""
    pause = threading.Event()
    deadline_s = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > deadline_s:
            raise PeerloadError(otherwise, why=f"{within_s:g} s have passed")
        pause.wait(TICK_S)


def _counters(client: Client) -> dict[str, int]:
    counters: dict[str, int] = client.call("stats")["counters"]
    return counters


def _checked(client: Client, tasks: Sequence[dict[str, Any]], work: Sequence[Command]) -> dict[str, Any]:
    """Whether each task's output, read at its home, is the known answer; and one that came from elsewhere to show."""
    right = 0
    example: dict[str, Any] | None = None
    for task, command in zip(tasks, work, strict=True):
        pieces = client.stream("output", task=task["id"], streams=[1])
        told = b"".join(piece["data"] for piece in pieces).decode("utf-8", "replace").strip()
        answer = command.answer()
        right += told == answer
        if (example is None and command.name.startswith("hash") and task["node"] != HOME) or told != answer:
            example = {"id": task["id"], "name": command.name, "node": task["node"], "output": told, "answer": answer}
    return {"outputs_right": right, "example": example}


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def _told(account: dict[str, Any]) -> list[str]:
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


def tell_left(left: Sequence[tuple[int, str]], started: set[int]) -> None:
    """Say on stderr what became of the processes."""
    if not left:
        sys.stderr.write(f"\nStopped: none of {len(started)} processes is left, the directory is removed.\n")
        return
    for pid, command_line in left:
        say(f"process {pid} did not end when asked and was killed: {command_line}")
