"""What real agents show from outside: the shape of every `--json`, exit codes, their state directory, what they and their
launcher say to each other, and recordings of what they decided."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from tests.integration.cluster import Cluster
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.cluster import Agent

LEAVES = {bool: "bool", int: "number", float: "number", str: "text", bytes: "bytes", type(None): "null"}
NAMES = re.compile(r"^(?=.*[0-9/ .:-])")
"""Keys like this are data (ids, addresses, sentences): what is below them is merged."""


def shape(value: Any) -> Any:
    """The keys and types of a value; the items of a list are merged."""
    if isinstance(value, dict):
        merged: dict[str, Any] = {}
        for key, item in value.items():
            text = key.decode("latin-1") if isinstance(key, bytes) else str(key)
            name = "*" if NAMES.search(text) else text
            merged[name] = united(merged[name], shape(item)) if name in merged else shape(item)
        return dict(sorted(merged.items()))
    if isinstance(value, list | tuple):
        items: Any = "nothing"
        for item in value:
            items = united(items, shape(item))
        return [items]
    return LEAVES.get(type(value), type(value).__name__)


def united(one: Any, other: Any) -> Any:
    """One shape that both values have. null and an empty list say nothing about the type."""
    if one == other or other in ("nothing", "null"):
        return one
    if one in ("nothing", "null"):
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: united(one.get(key, "nothing"), other.get(key, "nothing")) for key in sorted(one.keys() | other.keys())
        }
    if isinstance(one, list) and isinstance(other, list):
        return [united(one[0], other[0])]
    return "several types"


class Tap:
    """Between an agent and its launcher: passes everything on, and keeps what was said."""

    def __init__(self, state: Path) -> None:
        place = state / "launcher"
        self._real = place / "real.sock"
        (place / "launcher.sock").rename(self._real)
        self._fd = os.open(place, os.O_PATH | os.O_DIRECTORY)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"/proc/self/fd/{self._fd}/launcher.sock")
        self._server.listen()
        self.said: dict[str, Any] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                agent, _ = self._server.accept()
                launcher = socket.socket(socket.AF_UNIX)
                launcher.connect(f"/proc/self/fd/{self._fd}/real.sock")
                for source, sink in ((agent, launcher), (launcher, agent)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        waiting = b""
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                waiting += part
                while len(waiting) >= 4 and len(waiting) >= 4 + (size := int.from_bytes(waiting[:4], "big")):
                    self._keep(msgpack.unpackb(waiting[4 : 4 + size], strict_map_key=False))
                    waiting = waiting[4 + size :]
                sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _keep(self, frame: list[dict[str, Any]]) -> None:
        for message in frame:
            kind = f"do {message['do']}" if "do" in message else f"is {message.get('is')}"
            with self._lock:
                self.said[kind] = united(self.said.get(kind, "nothing"), shape(message))

    def end(self) -> None:
        """Let the launcher be found where it was."""
        self._server.close()
        with contextlib.suppress(OSError):
            (self._real.parent / "launcher.sock").unlink()
            self._real.rename(self._real.parent / "launcher.sock")
        os.close(self._fd)


class Session:
    """Verbs against real agents, and what came of each."""

    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}
        self.codes: dict[str, int] = {}

    def try_verb(self, agent: Agent | None, name: str, *words: str, cluster: Cluster, **more: Any) -> bytes:
        """Run a verb, note its exit code, and the shape of its stdout if it prints JSON."""
        socket_path = agent.socket if agent is not None else str(cluster.directory / "nowhere")
        done = cluster.cli(socket_path, *words, **more)
        self.codes[name] = done.returncode
        if "--json" in words:
            seen: Any = self.shapes.get(name, "nothing")
            for value in _values(done.stdout):
                seen = united(seen, shape(value))
            self.shapes[name] = seen
        return bytes(done.stdout)


def _values(text: bytes) -> Iterator[Any]:
    try:
        yield json.loads(text)
    except ValueError:
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


WITHOUT_AGENT = {
    "no verb": (),
    "unknown verb": ("sumbit",),
    "version": ("--version",),
    "unknown flag": ("ls", "--nothing"),
    "no command": ("submit",),
    "no agent": ("ls",),
    "no agent, json": ("ls", "--json"),
    "submit, no agent": ("submit", "true"),
    "policy ls": ("policy", "ls", "--json"),
    "policy show": ("policy", "show", "adaptive", "--json"),
    "policy check, no file": ("policy", "check", "/nowhere/p.toml"),
    "sim": ("sim", "--nodes", "3", "--tasks", "200", "--warmup", "20", "--replications", "2", "--seed", "1", "--json"),
    "replay, no file": ("replay", "/nowhere/recording"),
    "replay, no recording": ("replay", "/etc/hostname"),
    "config check, no file": ("config", "check", "/nowhere/c.toml"),
    "completions": ("completions", "bash"),
    "array wrong": ("submit", "--array", "9-1", "true"),
    "agent, wrong slots": ("agent", "--slots", "none"),
    "down, no agent": ("down",),
}


def _without_agent(session: Session, cluster: Cluster) -> None:
    for name, words in WITHOUT_AGENT.items():
        session.try_verb(None, name, *words, cluster=cluster)


def _at_work(session: Session, cluster: Cluster, one: Agent) -> None:  # noqa: PLR0915 -- one story, in order
    def try_verb(name: str, *words: str, **more: Any) -> bytes:
        return session.try_verb(one, name, *words, cluster=cluster, **more)

    try_verb("run", "run", "--", "sh", "-c", "echo out; exit 3")
    try_verb("run, not found", "run", "--", "/nowhere/program")
    try_verb("run, not executable", "run", "--", "/etc/hostname")
    try_verb("run, killed", "run", "--", "sh", "-c", "kill -9 $$")
    try_verb("run, time limit", "run", "--time", "1s", "--", "sleep", "1000")
    try_verb("run, standard input", "run", "--", "cat", input=b"in\n", stdin=None)
    try_verb("run on the other node", "run", "--node", "n2", "--", "true")
    try_verb("run, json", "run", "--json", "--", "true")
    try_verb("submit", "submit", "--json", "--name", "done", "true")
    try_verb("wait", "wait", "--json", "@")
    try_verb("submit an array", "submit", "--json", "--array", "1-3", "sh", "-c", "echo $PEERLOAD_ARRAY_INDEX")
    try_verb("wait for an array", "wait", "--json", "@")
    try_verb("submit, held", "submit", "--json", "--held", "--name", "kept", "true")
    held = _last_id(one)
    try_verb("submit, running", "submit", "--json", "--name", "sleeper", "sleep", "1000")
    running = _last_id(one)
    one.await_state(running, "running")
    try_verb("submit, impossible", "submit", "--json", "--mem", "900T", "true")
    try_verb("submit, waiting", "submit", "--json", "--after", held, "true")
    waiting = _last_id(one)
    for verb in ("ls", "show", "why", "events", "logs"):
        for name, task in (("running", running), ("waiting", waiting), ("held", held)):
            words = (verb, "--json", *(() if verb == "ls" else (task,)))
            if verb != "logs" or name == "running":
                try_verb(f"{verb}, {name}", *words)
    try_verb("why, ended", "why", "--json", "1")
    try_verb("logs, ended", "logs", "--json", "1")
    try_verb("show, ended", "show", "--json", "1")
    try_verb("show, not there", "show", "--json", "4711")
    try_verb("ls, all", "ls", "--json", "--all")
    try_verb("history", "history", "--json")
    try_verb("nodes", "nodes", "--json")
    try_verb("exec", "exec", running, "--", "true")
    try_verb("exec, failing", "exec", running, "--", "sh", "-c", "exit 4")
    try_verb("prio", "prio", "--json", "5", held)
    try_verb("group, set", "group", "set", "g", "--slots", "1", "--json")
    try_verb("group", "group", "--json")
    try_verb("hold", "hold", "--json", waiting)
    try_verb("release", "release", "--json", waiting)
    try_verb("drain", "drain", "--json")
    try_verb("undrain", "undrain", "--json")
    try_verb("retry", "retry", "--json", "1")
    try_verb("config", "config", "--json")
    try_verb("cluster", "cluster", "show", "--json")
    try_verb("doctor", "doctor", "--json")
    try_verb("policy, in force", "policy", "--json")
    try_verb("map", "map", "--json", "echo", "{}", ":::", "a", "b")
    try_verb("map, failing", "map", "sh", "-c", "exit {}", ":::", "1", "0")
    try_verb("attach, not there", "attach", "4711")
    try_verb("cancel", "cancel", "--json", running, waiting, held)
    try_verb("wait, cancelled", "wait", "--json", running)
    try_verb("clean", "clean", "--json", "--all", "--keep", "1")
    try_verb("forget, unknown", "forget", "--json", "n9")
    try_verb("revoke, unknown", "revoke", "--json", "n9")
    try_verb("down", "down", "--json")


def _last_id(agent: Agent) -> str:
    tasks = agent.call("tasks")["tasks"]
    return str(max(tasks, key=lambda task: int(task["id"].partition("/")[2].partition(".")[0]))["id"])


def layout(state: Path) -> list[str]:
    """The paths below a state directory with kind and mode; what differs from start to start is replaced."""
    found = set()
    for path in state.rglob("*"):
        mode = path.lstat().st_mode
        name = str(path.relative_to(state))
        if name.endswith(("-wal", "-shm")) or ".schema-" in name:
            continue
        name = re.sub(r"[0-9a-f]{8,}(-[0-9a-f]+)*", "ID", name)
        name = re.sub(r"\d+", "N", name)
        kind = "directory" if stat.S_ISDIR(mode) else "socket" if stat.S_ISSOCK(mode) else "file"
        found.add(f"{name} {kind} {stat.S_IMODE(mode):o}")
    return sorted(found)


def launcher_talk() -> dict[str, Any]:
    """Each kind of message between agent and launcher → its shape."""
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=3)
        agent.cli("run", "--", "true")
        agent.kill()
        tap = Tap(agent.state)
        try:
            agent.start()
            agent.cli("run", "--", "true")
            agent.cli("run", "--mem", "64M", "--", "cat", input=b"x" * 100_000, stdin=None)
            agent.cli("run", "--", "/nowhere/program")
            task = agent.submit("sleep", "1000")
            agent.await_state(task, "running")
            agent.cli("exec", task, "--", "true")
            agent.cli("show", "--json", task)
            agent.cli("ls", "--json")
            agent.cli("cancel", task)
            agent.wait(task)
            wait_until(lambda: {"do forget", "do ping"} <= tap.said.keys(), what="pings, and records to be forgotten")
            agent.call("stop", all=True)
            agent.reap()
            return dict(sorted(tap.said.items()))
        finally:
            tap.end()


def shown(recordings: Path | None = None) -> dict[str, Any]:
    """All of it. ``recordings``: a directory for new recordings of both agents."""
    session = Session()
    more = [["--record", str(recordings / f"n{number}.recording")] if recordings else [] for number in (1, 2)]
    with Cluster() as cluster:
        _without_agent(session, cluster)
        one = cluster.agent("n1", *more[0])
        two = cluster.agent("n2", "--peer", one.listen, *more[1])
        cluster.await_acquainted([one, two])
        _at_work(session, cluster, one)
        one.reap()
        state = layout(one.state)
    if recordings:
        _record_many(recordings)
    return {"json": session.shapes, "exit codes": session.codes, "state directory": state, "launcher": launcher_talk()}


def _record_many(recordings: Path) -> None:
    """More tasks than fit, of two homes, with retries and a drain: many decisions about where to run."""
    with Cluster() as cluster:
        file = recordings / "n3.recording"
        one = cluster.agent("n1", "--policy", "symmetric", "--record", str(file))
        two = cluster.agent("n2", "--policy", "symmetric", "--peer", one.listen)
        cluster.await_acquainted([one, two])
        tasks = [one.submit("sleep", "0.2") for _ in range(12)] + [one.submit("false") for _ in range(3)]
        one.cli("drain", "n1")
        one.cli("undrain", "n1")
        one.wait(*tasks)
