"""Agents of all users of a machine, on one whose accounts are those of a test; and processes of these users that ask them.

The accounts are in files that are mounted over /etc/passwd and /etc/group, in a mount namespace of each agent's own: the
machine's are not touched. A user is a process that has dropped to its ids before it connects.
"""

from __future__ import annotations

import ast
import os
import secrets
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from peerload.client.connection import refusal
from tests.integration.cluster import Agent, Cluster, program

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
AGENTS = 20100
GROUP, ADMINS, SERVICES = 20200, 20201, 900
ACCOUNTS = {"alice": 20001, "bob": 20002, "carol": 20003, "olga": 20004, "service": SERVICES}
MEMBERS = {"peerload": ("alice", "bob", "service"), "peerload-admin": ("carol",)}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users, and have other accounts")

ASKER = """
import ast, os, sys
sys.path.insert(0, sys.argv[1])
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError
uid, socket = int(sys.argv[2]), sys.argv[3]
os.setgroups([int(group) for group in sys.argv[4].split(",") if group])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
for line in sys.stdin:
    verb, fields, streams = ast.literal_eval(line)
    if verb == "!flood":
        told = []
        with AgentConnection(socket, timeout_s=60.0) as client:
            for _ in range(fields["times"]):
                try:
                    client.call(fields["verb"])
                    told.append("ok")
                except PeerloadError as error:
                    told.append(error.code)
        print(repr(("ok", told)), flush=True)
        continue
    if verb == "!hold":
        clients = [AgentConnection(socket, timeout_s=60.0) for _ in range(fields["times"])]
        told = []
        for client in clients:
            try:
                client.call("info")
                told.append("ok")
            except PeerloadError as error:
                told.append(error.code)
        for client in clients:
            client.close()
        print(repr(("ok", told)), flush=True)
        continue
    try:
        with AgentConnection(socket, timeout_s=60.0) as client:
            if streams:
                answer = list(client.stream(verb, **fields)), client.last
            else:
                answer = client.call(verb, **fields)
        told = ("ok", answer)
    except PeerloadError as error:
        told = ("error", {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint})
    except OSError as error:
        told = ("error", {"code": "os", "what": str(error.errno), "why": "", "hint": ""})
    print(repr(told), flush=True)
"""


def within_reach(directory: Path) -> list[str]:
    """Commands that let every user of a mount namespace run this interpreter, where it lies in a directory, such as
    root's, that only its owner may enter. That directory shows nothing else then. ``directory``: one of the test's own."""
    prefix = Path(sys.base_prefix).resolve()
    closed = [parent for parent in prefix.parents if not parent.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return []
    here = directory / "interpreter"
    return [
        f"mkdir -p {here}",
        f"mount --bind {prefix} {here}",
        f"mount -t tmpfs -o mode=711 tmpfs {closed[-1]}",
        f"mkdir -p {prefix}",
        f"mount --bind {here} {prefix}",
    ]


class User:
    """One user's process. groups: those that the process has, whatever the account database says."""

    def __init__(self, socket: str, uid: int, groups: Iterable[int] = (GROUP,)) -> None:
        words = [str(ROOT), str(uid), socket, ",".join(map(str, groups))]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", ASKER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def call(self, verb: str, **fields: object) -> dict[str, Any]:
        """One request, one reply. Raises what the agent refuses with."""
        answer = self._ask(verb, fields, streams=False)
        assert isinstance(answer, dict)
        return answer

    def stream(self, verb: str, **fields: object) -> list[dict[str, Any]]:
        """What comes before the last word."""
        return list(self._ask(verb, fields, streams=True)[0])

    def refused(self, verb: str, **fields: object) -> tuple[str, str, str, str]:
        """How the agent refuses this: code, what, why, hint."""
        kind, told = self._told(verb, fields, streams=False)
        assert kind == "error", f"{verb} {fields} was not refused: {told}"
        return told["code"], told["what"], told["why"], told["hint"]

    def submits(self, spec: dict[str, object]) -> bool:
        """Whether it may queue a task now."""
        fields = {"spec": spec, "token": secrets.token_hex(8), "held": True}
        return bool(self._told("submit", fields, streams=False)[0] == "ok")

    def flood(self, verb: str, times: int) -> list[str]:
        """So many requests over one connection, one after the other → "ok", or the code of the refusal, of each."""
        return list(self._ask("!flood", {"verb": verb, "times": times}, streams=False))

    def hold_connections(self, times: int) -> list[str]:
        """So many connections at a time → the same of the first request over each."""
        return list(self._ask("!hold", {"times": times}, streams=False))

    def _ask(self, verb: str, fields: dict[str, object], *, streams: bool) -> Any:
        kind, told = self._told(verb, fields, streams=streams)
        if kind == "error":
            raise refusal(told)
        return told

    def _told(self, verb: str, fields: dict[str, object], *, streams: bool) -> tuple[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(repr((verb, fields, streams)) + "\n")
        self._process.stdin.flush()
        kind, told = ast.literal_eval(self._process.stdout.readline())
        return kind, told

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60.0)
        self._process.stdout.close()


class SystemAgent(Agent):
    """One agent in system mode, run as root, with the accounts of the test; and its launcher, which outlives it."""

    runs_as: tuple[str, ...] = ()
    """What has the agent be another than root."""
    user = "root"
    launcher_more: tuple[str, ...] = ()
    """Further words of its launcher's command line."""
    prepares: tuple[str, ...] = ()
    """Further commands that make its machine, before anything runs there."""

    @property
    def sockets(self) -> str:
        """Where its launcher listens."""
        return f"{self.cluster.directory}/{self.node}-launcher/run"

    def launcher_words(self) -> list[str]:
        """The command line of its launcher."""
        config = self.more[self.more.index("--config") + 1] if "--config" in self.more else "/nonexistent"
        return [
            *(*program(), "launcher", "--system", "--sockets", self.sockets, "--agent-user", self.user),
            *("--directory", f"{self.cluster.directory}/{self.node}-launcher/state"),
            *("--config", config, "--config-directory", "/nonexistent"),
            *self.launcher_more,
        ]

    def words(self) -> list[str]:
        """Its command line: mounts first, in a namespace of its own, then its launcher, unless that is there already."""
        mounts = f"mount --bind {self.cluster.directory}/passwd /etc/passwd && mount --bind {self.cluster.directory}/group /etc/group"
        mounts += "".join(f" && {command}" for command in (*within_reach(self.cluster.directory), *self.prepares))
        launcher = f"{shlex.join(self.launcher_words())} 2>>{self.cluster.directory}/{self.node}-launcher.log"
        script = f'{mounts} && {{ {launcher} & }} && export PEERLOAD_LAUNCHER={self.sockets} && exec "$@"'
        return [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"),
            *self.runs_as,
            *program(),
            *("agent", "--system", "--node", self.node, "--state", str(self.state), "--socket", self.socket),
            *self.more,
        ]

    def spec(self, *argv: str, **fields: object) -> dict[str, object]:
        """What a task of this machine is submitted as."""
        return self.cluster.spec(*argv, **fields)


class SystemCluster(Cluster):
    """Agents in system mode, and users of their machines."""

    def __init__(self) -> None:
        super().__init__()
        self.directory.chmod(0o755)
        self._users: dict[tuple[str, int], User] = {}
        accounts = {"root": 0, **ACCOUNTS}
        lines = [f"{name}:x:{uid}:{uid}::/nonexistent:/bin/sh\n" for name, uid in accounts.items()]
        (self.directory / "passwd").write_text("".join(lines), encoding="utf-8")
        numbers = {"peerload": GROUP, "peerload-admin": ADMINS}
        groups = [f"{name}:x:{numbers[name]}:{','.join(members)}\n" for name, members in MEMBERS.items()]
        groups += [f"{name}:x:{uid}:\n" for name, uid in accounts.items()]
        (self.directory / "group").write_text("".join(groups), encoding="utf-8")

    def system(self, node: str, *more: str, settings: str = "", slots: int = 2) -> SystemAgent:
        """One more agent, with these lines in its configuration file; not started yet."""
        agent = SystemAgent(self, node, ["--slots", str(slots), *more], None)
        agent.directory.chmod(0o755)
        if settings:
            config = agent.directory / "config.toml"
            config.write_text(settings, encoding="utf-8")
            agent.more += ["--config", str(config)]
        self.agents[node] = agent
        return agent

    def user(self, agent: Agent, name: str, groups: Iterable[int] | None = None) -> User:
        """This user of that agent's machine, by name or as ``uid``."""
        uid = ACCOUNTS.get(name) if not name.isdigit() else int(name)
        assert uid is not None
        if (agent.node, uid) not in self._users:
            self._users[agent.node, uid] = User(agent.socket, uid, (GROUP,) if groups is None else groups)
        return self._users[agent.node, uid]

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for user in self._users.values():
            user.close()
        super().__exit__(kind, error, traceback)
