"""`peerload demo`: three agents and a broker on this machine share real commands with known results; a report follows.

`Demo` is the base class of the demonstrations: real agents in a temporary directory. The directory's name is in the environment
of every process that is started (`MARK`), so that agents, launchers, broker and tasks can be found in /proc and are always
ended with the demonstration.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from peerload.cli.common import agent_process
from peerload.cli.demo.broker import start_broker
from peerload.client import submission
from peerload.client.connection import AgentConnection
from peerload.model import metrics
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.security import cluster_dir
from peerload.text.format import coloured, say, table

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from peerload.cli.demo.broker import Kind


KINDS = ("hash", "read", "sleep", "hash", "read", "hash", "sleep", "read", "hash", "read")
"""Kinds of task in a round of the mix. Four of ten tasks need a processor all the time; the others mostly wait, like downloads and
tests, so that six slots are visibly busy even on a machine with fewer processors."""

HASH_BYTES = (80_000_000, 120_000_000, 160_000_000)
READ_PARTS = (3, 4, 5)
READ_LINES = 20_000
READ_PAUSE_S = 0.22
SLEEP_S = (0.3, 0.9, 0.6, 1.2)


class DemoCommand(NamedTuple):
    """Command line of a task: a ``name`` for display, its ``argv``, and the ``answer`` it must print (computed here on
    access)."""

    name: str
    argv: list[str]
    answer: Callable[[], str]


def commands(count: int) -> list[DemoCommand]:
    """The first ``count`` commands of the mix, always the same."""
    makers = {"hash": _hash, "read": _read, "sleep": _sleep}
    met = dict.fromkeys(makers, 0)
    chosen = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        chosen.append(makers[kind](met[kind]))
        met[kind] += 1
    return chosen


def list_schedule_s(durations_s: Iterable[float], slots: int) -> float:
    """Time that tasks of these durations take on one node that starts them in this order, ``slots`` at a time."""
    free_at = [0.0] * slots
    for duration_s in durations_s:
        heapq.heapreplace(free_at, free_at[0] + duration_s)
    return max(free_at)


def _shell(line: str) -> list[str]:
    return ["/bin/sh", "-c", line]


def _hash(number: int) -> DemoCommand:
    size = HASH_BYTES[number % len(HASH_BYTES)]
    line = f"yes peerload | head -c {size} | sha256sum"
    return DemoCommand(f"hash-{size // 1_000_000}MB", _shell(line), lambda: f"{_digest_of_repeats(size)}  -")


def _read(number: int) -> DemoCommand:
    parts = READ_PARTS[number % len(READ_PARTS)]
    numbers = " ".join(map(str, range(parts)))
    line = f"for part in {numbers}; do sleep {READ_PAUSE_S}; seq {READ_LINES}; done | sha256sum"
    return DemoCommand(f"read-{parts}-parts", _shell(line), lambda: f"{_digest_of_numbers(parts)}  -")


def _sleep(number: int) -> DemoCommand:
    seconds = SLEEP_S[number % len(SLEEP_S)]
    return DemoCommand(f"sleep-{seconds}", _shell(f"sleep {seconds}; echo slept {seconds}"), lambda: f"slept {seconds}")


@functools.cache
def _digest_of_repeats(size: int) -> str:
    block = b"peerload\n" * 100_000
    digest = hashlib.sha256()
    for _ in range(size // len(block)):
        digest.update(block)
    digest.update(block[: size % len(block)])
    return digest.hexdigest()


@functools.cache
def _digest_of_numbers(times: int) -> str:
    text = "".join(f"{number}\n" for number in range(1, READ_LINES + 1))
    return hashlib.sha256(text.encode() * times).hexdigest()


BAR_WIDTH = 30
SLOT_MARKS_MAX = 8
LINE_EVERY_S = 1.0
REDRAW_EVERY_S = 0.2
HANDOFF_COUNTERS = {
    "offers sent": metrics.OFFERS_SENT,
    "offers declined": metrics.OFFERS_DECLINED,
    "transfers": metrics.TRANSFERS,
    "tasks given": metrics.TASKS_GIVEN,
}
"""Keys of the report, and their counters."""

_UP_TO_START = "\x1b[{lines}F\x1b[J"


class DemoScreen:
    """Live view of how the tasks spread, on stderr: redrawn on a terminal, otherwise a line a second."""

    def __init__(self, slots: Mapping[str, int], home: str) -> None:
        self._slots = slots
        self._home = home
        self._redraws = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn_lines = 0
        self._due_s = 0.0

    def show(self, tasks: Sequence[Mapping[str, Any]], elapsed_s: float, *, at_last: bool = False) -> None:
        """Draw if the interval has passed; always with ``at_last``."""
        now_s = time.monotonic()
        if now_s < self._due_s and not at_last:
            return
        self._due_s = now_s + (REDRAW_EVERY_S if self._redraws else LINE_EVERY_S)
        spread = {node: tally(tasks, node) for node in self._slots}
        waiting = sum(task["state"] == "queued" for task in tasks)
        if self._redraws:
            lines = self._picture(spread, waiting, len(tasks), elapsed_s)
            back = _UP_TO_START.format(lines=self._drawn_lines) if self._drawn_lines else ""
            sys.stderr.write(back + "".join(f"{line}\n" for line in lines))
            self._drawn_lines = len(lines)
        else:
            each = "  ".join(f"{node} {running}/{done}" for node, (running, _, done) in spread.items())
            sys.stderr.write(f"{elapsed_s:5.1f} s  running/done:  {each}   {waiting} waiting at {self._home}\n")
        sys.stderr.flush()

    def _picture(
        self, spread: Mapping[str, tuple[int, int, int]], waiting: int, total: int, elapsed_s: float
    ) -> list[str]:
        done_in_all = sum(done for _, _, done in spread.values())
        head = f"{elapsed_s:5.1f} s   {done_in_all} of {total} done, {waiting} waiting at {self._home}"
        lines = [coloured(head, "bold", sys.stderr)]
        most = max(1, total // 2)
        for node, (running, held, done) in spread.items():
            slots = self._slots[node]
            marks = "#" * min(running, SLOT_MARKS_MAX) + "." * max(0, min(slots, SLOT_MARKS_MAX) - running)
            bar = "#" * min(BAR_WIDTH, round(done * BAR_WIDTH / most))
            lines.append(f"  {node:8} running [{marks}]".ljust(32) + f"{held:3} next  {done:4} done {bar}")
        return lines


def tally(tasks: Sequence[Mapping[str, Any]], node: str) -> tuple[int, int, int]:
    """Count tasks on this node → running, held there to run next, ended there."""
    there = [task["state"] for task in tasks if task["node"] == node]
    running, held = there.count("running"), there.count("leased")
    return running, held, len(there) - running - held - there.count("queued")


def account_of(
    tasks: Sequence[Mapping[str, Any]], slots: Mapping[str, int], home: str, counters: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """The figures of the report, as `--json` prints them.

    tasks: answers to `show` for the ended tasks; slots: node → tasks at a time; counters: node → its agent's counters. The ideal
    is the sum of the measured durations over all slots, alone_s the same durations in the same order on the home's slots.
    """
    took_s = {task["id"]: max(task["ended_at"] - (task["started_at"] or task["ended_at"]), 0.0) for task in tasks}
    makespan_s = max(task["ended_at"] for task in tasks) - min(task["submitted_at"] for task in tasks)
    sum_s = sum(took_s.values())
    ideal_s = max(sum_s / sum(slots.values()), *took_s.values())
    alone_s = list_schedule_s((took_s[task["id"]] for task in tasks), slots[home])
    cpu_s = sum((task["usage"]["user_s"] or 0.0) + (task["usage"]["system_s"] or 0.0) for task in tasks)
    nodes = []
    for node, room in slots.items():
        there = [task for task in tasks if task["node"] == node]
        busy_s = sum(took_s[task["id"]] for task in there)
        nodes.append(
            {
                "node": node,
                "slots": room,
                "tasks": len(there),
                "from_elsewhere": len(there) if node != home else 0,
                "busy_s": busy_s,
                "busy_share": busy_s / (room * makespan_s) if makespan_s else 0.0,
            }
        )
    return {
        "home": home,
        "tasks": len(tasks),
        "failed": sum(task["exit_code"] != 0 for task in tasks),
        "nodes": nodes,
        "migrations": sum(task["migrations"] for task in tasks),
        "makespan_s": makespan_s,
        "ideal_s": ideal_s,
        "alone_s": alone_s,
        "sum_s": sum_s,
        "cpu_s": cpu_s,
        "cpus": len(os.sched_getaffinity(0)),
        "mqtt": _by_type(counters),
        "handoffs": {key: _sum(counters, name) for key, name in HANDOFF_COUNTERS.items()},
        "peer_link": {
            "sent": _sum(counters, metrics.PEER_MESSAGES_SENT),
            "received": _sum(counters, metrics.PEER_MESSAGES_RECEIVED),
        },
    }


def _by_type(counters: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """MQTT messages of all agents together: published and received, and each by type."""
    told: dict[str, Any] = {}
    names = (("published", metrics.MQTT_MESSAGES_PUBLISHED), ("received", metrics.MQTT_MESSAGES_RECEIVED))
    for way, metric in names:
        found = sorted({name for one in counters.values() for name in one if name.startswith(f"{metric}{{")})
        counts = {name.partition('"')[2].removesuffix('"}'): _sum(counters, name) for name in found}
        told[way] = sum(counts.values())
        told[f"{way}_by_type"] = {kind: count for kind, count in counts.items() if count}
    return told


def _sum(counters: Mapping[str, Mapping[str, int]], name: str) -> int:
    return sum(one.get(name, 0) for one in counters.values())


def account_lines(told: Mapping[str, Any]) -> list[str]:
    """The report as text, 80 columns."""
    headings = ("NODE", "SLOTS", "TASKS", "FROM ELSEWHERE", "BUSY")
    rows = [
        (one["node"], one["slots"], one["tasks"], one["from_elsewhere"] or "-", f"{one['busy_share']:.0%}")
        for one in told["nodes"]
    ]
    slots = sum(one["slots"] for one in told["nodes"])
    home = next(one for one in told["nodes"] if one["node"] == told["home"])
    makespan_s, ideal_s, alone_s = told["makespan_s"], told["ideal_s"], told["alone_s"]
    least_s = told["cpu_s"] / told["cpus"]
    handoffs = told["handoffs"]
    slower, faster = makespan_s / ideal_s, alone_s / makespan_s
    of_tasks = f"{told['sum_s']:.1f} s of tasks on {slots} slots; took {slower:.2f} times as long"
    of_home = f"on its {home['slots']} slot{'s' if home['slots'] > 1 else ''}; sharing was {faster:.1f} times as fast"
    of_work = f"at least: {told['cpu_s']:.1f} s of work for the {told['cpus']} of this machine"
    of_offers = f"{handoffs['offers sent']} offers ({handoffs['offers declined']} declined)"
    return [
        *table(headings, rows, headings[1:]),
        "",
        f"all tasks in   {makespan_s:6.1f} s",
        f"ideal          {ideal_s:6.1f} s  {of_tasks}",
        f"{home['node']} alone".ljust(15) + f"{alone_s:6.1f} s  the same {of_home}",
        f"processors     {least_s:6.1f} s  {of_work}",
        "",
        f"migrations     {told['migrations']:6}    placements on another node than {home['node']}",
        f"hand-offs      {handoffs['transfers']:6}    of {of_offers}; {told['peer_link']['sent']} peer-link messages",
        "",
        *_messages(told["mqtt"]),
    ]


def _messages(mqtt: Mapping[str, Any]) -> list[str]:
    """MQTT messages by type; several nodes may receive one published message."""
    published, received = mqtt["published_by_type"], mqtt["received_by_type"]
    rows = [(kind, published.get(kind, 0), received.get(kind, 0)) for kind in sorted({*published, *received})]
    headings = ("MQTT MESSAGES", "PUBLISHED", "RECEIVED")
    return table(headings, [*rows, ("all", mqtt["published"], mqtt["received"])], headings[1:])


MARK = "PEERLOAD_DEMO"
MEET_WITHIN_S = 60.0
TICK_S = 0.1
GONE_WITHIN_S = 30.0
ANSWER_WITHIN_S = 20.0
PATH_BYTES_MAX = 60
"""Limit for the path of the temporary directory, so that the path of a socket fits; a longer one is replaced by /tmp."""
LOG_LINES_SHOWN = 5


def run_and_clean(demo: Demo, act: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, list[tuple[int, str]]]:
    """Run a demonstration, and always clean up → its report, None if it was interrupted, and the processes that
    ignored SIGTERM. Raises the errors of ``act``, after showing the agents' last log lines."""
    account: dict[str, Any] | None = None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            account = act()
    except (PeerloadError, OSError):
        demo.show_logs()
        raise
    finally:
        left = demo.clean()
        report_leftovers(left, demo.started)
    return account, left


class Demo:
    """Demonstration in its own directory; call `clean` at the end. nodes: the names of its agents."""

    nodes: tuple[str, ...] = ()

    def __init__(self, directory: Path, policy: str) -> None:
        self.directory = directory
        self.policy = policy
        self.started: set[int] = set()
        self._stack = contextlib.ExitStack()
        for name in [name for name in os.environ if name.startswith("PEERLOAD_")]:
            del os.environ[name]  # settings meant for another agent
        os.environ[MARK] = str(directory)

    def clean(self) -> list[tuple[int, str]]:
        """Stop everything and remove the directory → (pid, command line) of processes that ignored SIGTERM
        and were killed. Takes at most two times GONE_WITHIN_S, and ignores interrupts."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        told: list[str] = []
        for node in self.nodes:
            with (
                contextlib.suppress(PeerloadError),
                AgentConnection(self.socket(node), timeout_s=GONE_WITHIN_S) as client,
            ):
                client.call("stop", all=True)
                told.append(node)
        self._stack.close()  # the broker, and our connections
        self._end(
            [pid for pid in self._agents() if not any(self._is_agent_of(pid, node) for node in told)], self._agents
        )
        left: list[tuple[int, str]] = []
        if not self._end(self.processes(), self.processes):  # an interrupted start leaves a launcher
            left = [(pid, _command_line(pid)) for pid in self.processes()]
            for pid, _ in left:
                _signal(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
        return left

    def _end(self, asked: Sequence[int], those: Callable[[], Sequence[int]]) -> bool:
        """Send SIGTERM to the processes ``asked`` → True if ``those()`` is empty within GONE_WITHIN_S."""
        for pid in asked:
            _signal(pid, signal.SIGTERM)
        try:
            wait(lambda: not those(), "some processes have not ended", GONE_WITHIN_S)
        except PeerloadError:
            return False
        return True

    def _agents(self) -> list[int]:
        return [pid for pid in self.processes() if any(self._is_agent_of(pid, node) for node in self.nodes)]

    def _is_agent_of(self, pid: int, node: str) -> bool:
        return f" --socket {self.socket(node)} " in f"{_command_line(pid)} "

    def show_logs(self) -> None:
        """Print the last lines of each agent's log on stderr, before the directory is removed."""
        for node in self.nodes:
            log = self.directory / node / "agent.log"
            if log.exists():
                for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]:
                    sys.stderr.write(f"  {node}: {printable(line)}\n")

    def socket(self, node: str) -> str:
        return str(self.directory / f"{node}.sock")

    def processes(self) -> list[int]:
        """Process ids of all living processes with the mark of this demonstration, after reaping children."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(process.pid, os.WNOHANG)[0] == process.pid:
                    continue
            with contextlib.suppress(psutil.Error):  # the process has just ended, or belongs to another user
                if process.pid != os.getpid() and process.environ().get(MARK) == str(self.directory):
                    found.append(process.pid)
        return found


def temporary_directory() -> Path:
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > PATH_BYTES_MAX:
        base = "/tmp"  # noqa: S108 -- mkdtemp creates a private directory there
    return Path(tempfile.mkdtemp(prefix="peerload-demo-", dir=base))


def interrupt(_number: int, _frame: object) -> None:
    """Signal handler that raises KeyboardInterrupt: clean up and exit."""
    raise KeyboardInterrupt


def wait(predicate: Callable[[], bool], otherwise: str, within_s: float = MEET_WITHIN_S) -> None:
    """Wait until the predicate is true. Raises PeerloadError with the text ``otherwise``."""
    pause = threading.Event()
    deadline_s = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > deadline_s:
            raise PeerloadError(otherwise, why=f"{within_s:g} s have passed")
        pause.wait(TICK_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return "?"


def report_leftovers(left: Sequence[tuple[int, str]], started: set[int]) -> None:
    if not left:
        sys.stderr.write(f"\nStopped: none of {len(started)} processes is left, the directory is removed.\n")
        return
    for pid, command_line in left:
        say(f"process {pid} ignored SIGTERM and was killed: {command_line}")


SLOTS = {"small": 1, "middle": 2, "large": 3}
HOME = "small"
"""All tasks are submitted here: every task that runs elsewhere was shared."""
TASKS_MAX = 2_000
TASKS_WITHIN_S = 240.0
TASK_WITHIN_S = 1.0
"""Time limit for all tasks: TASKS_WITHIN_S, or this for each task if that is more."""
SHOWN_AT_A_TIME = 500

_CONFIG = 'cluster = "{cluster}"\npeer = []\nlabel = []\n[load]\nforeign = "ignore"\n'
"""Configuration that keeps the demo's agents out of a real cluster. They share one machine, where each would count
the tasks of the others as foreign load."""


class SharingDemo(Demo):
    """Three agents of different size, connected by MQTT; all tasks are submitted to the smallest one."""

    nodes = tuple(SLOTS)
    broker = ""

    def run(self, count: int, broker_kind: Kind | None = None) -> dict[str, Any]:
        """Start everything and run ``count`` commands → the report. Raises PeerloadError."""
        began_s = time.monotonic()
        broker = self._stack.enter_context(start_broker(self.directory, broker_kind))
        self.broker = broker.kind
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
            wait(lambda client=client: _has_met(client), f"{node} did not find the others over MQTT")  # type: ignore[misc]
        sys.stderr.write(
            f"{broker.kind} at port {broker.port}, three agents (slots):"
            f" {', '.join(f'{node} ({slots})' for node, slots in SLOTS.items())}.\n"
            f"They found each other over MQTT, {time.monotonic() - began_s:.1f} s after the start."
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
        account = account_of(tasks, SLOTS, HOME, counters)
        return account | _checked(clients[HOME], tasks, work)

    def _share(self, client: AgentConnection, work: Sequence[DemoCommand]) -> list[dict[str, Any]]:
        """Submit all tasks to one node and wait until they have ended → the answers to `show`, in order."""
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
        live = DemoScreen(SLOTS, HOME)
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
    """Compare each task's output, read at its home, with the known answer → the number of right ones, and an example
    from another node."""
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
    ended_well = account["tasks"] - account["failed"]
    verdict = f"{ended_well} of {account['tasks']} ended with exit code 0,"
    verdict += f" {account['outputs_right']} outputs are equal to those computed here"
    good = account["outputs_right"] == account["tasks"] == ended_well
    lines = [*account_lines(account), "", coloured(verdict, "green" if good else "red", sys.stdout)]
    example = account["example"]
    if example is not None:
        lines.append(f"{example['id']} ({example['name']}) on {printable(example['node'])}:")
        lines.append(f"  printed   {printable(example['output'])}")
        lines.append(f"  computed  {printable(example['answer'])}")
    return lines
