"""Machines as their users see them: a home of its own for each, and `peerload` typed there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from peerload.client.connection import AgentConnection
from tests.in_process import cli_in
from tests.integration.cluster import MARK, PATH, is_alive, processes_with, program
from tests.support import wait_until

if TYPE_CHECKING:
    from types import TracebackType


NEED_A_PROCESS = {"run", "demo", "doctor"}


class Machine:
    """One of them. namespace: its network namespace, "" for this machine's own network."""

    def __init__(self, lab: Lab, name: str, namespace: str = "") -> None:
        self.name = name
        self.directory = lab.directory / name
        self.state = self.directory / "state" / "peerload"
        self.socket = str(self.directory / "run" / "peerload" / "agent.sock")
        self._prefix = ["ip", "netns", "exec", namespace] if namespace else []
        for part in ("run", "config/peerload"):
            (self.directory / part).mkdir(mode=0o700, parents=True)
        self.environment = {
            "PATH": PATH,
            "HOME": str(self.directory),
            "XDG_CONFIG_HOME": str(self.directory / "config"),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
            "PEERLOAD_NODE": name,
            "PEERLOAD_GPU_CLAIMS": str(lab.directory),
            "PEERLOAD_SPEED": "1",
            "PEERLOAD_LOAD_FOREIGN": "ignore",
            MARK: str(lab.directory),
        }

    def configure(self, text: str) -> Self:
        """Write its configuration file."""
        (self.directory / "config" / "peerload" / "config.toml").write_text(text, encoding="utf-8")
        return self

    def type(self, *words: str, timeout_s: float = 60.0, **more: str) -> subprocess.CompletedProcess[str]:
        """Type `peerload WORDS` there: in this process, unless that is of another network, or the verb needs one to itself."""
        if not self._prefix and words[0] not in NEED_A_PROCESS:
            done = cli_in({**self.environment, **more}, "/", *words)
            return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
        return subprocess.run(
            [*self._prefix, *program(), *words],
            env={**self.environment, **more},
            cwd="/tmp",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def done(self, *words: str, **more: str) -> str:
        """The same, and it must go well → what it prints."""
        done = self.type(*words, timeout_s=60.0, **more)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout

    def token(self, *words: str) -> str:
        """Invite somebody → the token."""
        line = self.done("invite", *words).split()
        assert line[:2] == ["peerload", "join"]
        return line[2]

    def call(self, verb: str, **fields: object) -> dict[str, Any]:
        """Ask its agent."""
        with AgentConnection(self.socket, timeout_s=60) as client:
            return client.call(verb, **fields)

    def states(self) -> dict[str, str]:
        """node → state, as this machine sees them."""
        return {node["node"]: node["state"] for node in json.loads(self.done("nodes", "--json"))["nodes"]}

    def sees(self, *nodes: str) -> bool:
        """Whether it takes these, and itself, for alive, and nobody else."""
        alive = {node["node"] for node in self.call("nodes")["nodes"] if node["state"] == "alive"}
        return alive == {*nodes, self.name}

    def counters(self) -> dict[str, int]:
        """What its agent has counted."""
        counters = self.call("stats")["counters"]
        assert isinstance(counters, dict)
        return counters

    def log(self) -> str:
        """The end of what its agent says."""
        path = self.state / "agent.log"
        return path.read_text(encoding="utf-8", errors="replace")[-3000:] if path.exists() else ""

    def kill(self) -> None:
        """End its agent at once, as a crash would."""
        pid = self.call("info")["pid"]
        os.kill(pid, 9)
        wait_until(lambda: not is_alive(pid), what=f"{self.name} to be gone")


class Lab:
    """Machines, and the end of all of them."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pl-lab-", dir="/tmp"))
        self.machines: list[Machine] = []

    def machine(self, name: str, namespace: str = "") -> Machine:
        """Another one; nothing runs there yet."""
        made = Machine(self, name, namespace)
        self.machines.append(made)
        return made

    def cluster(self, *names: str, config: str = "") -> list[Machine]:
        """Machines on loopback, of which the first has made a cluster and let the others in."""
        first, *rest = [self.machine(name).configure(config) for name in names]
        first.done("up", "--slots", "1")
        for number, machine in enumerate(rest):
            token = first.token(*(("--listen", "127.0.0.1:0") if number == 0 else ()))
            machine.done("join", "--listen", "127.0.0.1:0", token)
        return [first, *rest]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for machine in self.machines:
                sys.stdout.write(f"---- {machine.name}\n{machine.log()}\n")
        for machine in self.machines:
            machine.type("down", "--all")
        try:
            wait_until(lambda: not processes_with(str(self.directory)), 15, "all processes to end")
        finally:
            for pid in processes_with(str(self.directory)):
                os.kill(pid, 9)
            shutil.rmtree(self.directory, ignore_errors=True)
