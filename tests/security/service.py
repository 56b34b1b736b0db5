"""Machines as their services have them: an agent that is the user peerload, a launcher that is root, users with homes of their
own, and nodes that share tasks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from tests.integration.cluster import MARK, PATH
from tests.security.users import ACCOUNTS, SystemAgent, SystemCluster
from tests.support import cluster_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

PEERLOAD = 20190
PROJECT = 20300
"""A group that alice and bob have besides their own."""


class ServiceAgent(SystemAgent):
    """An agent that is nobody's but its service's."""

    runs_as = ("setpriv", "--reuid=peerload", "--regid=peerload", "--init-groups")
    user = "peerload"


class ServiceCluster(SystemCluster):
    """Nodes with the accounts of `tests.security.users`, and one for the agent."""

    def __init__(self) -> None:
        super().__init__()
        with (self.directory / "passwd").open("a", encoding="utf-8") as file:
            file.write(f"peerload:x:{PEERLOAD}:20200::/nonexistent:/bin/false\n1234567:x:20077:20077::/:/bin/sh\n")
        groups = (self.directory / "group").read_text(encoding="utf-8")
        groups = (
            groups.replace("peerload:x:20200:", "peerload:x:20200:1234567,", 1) + f"project:x:{PROJECT}:alice,bob\n"
        )
        (self.directory / "group").write_text(groups, encoding="utf-8")
        self._own("claims", "run")
        shutil.copytree(cluster_of().directory, self.directory / "member")
        self._own("member", *(f"member/{path.name}" for path in (self.directory / "member").iterdir()))
        self.environment["PEERLOAD_CLUSTER"] = str(self.directory / "member")
        for name in ("alice", "bob"):
            home = self.directory / "homes" / name
            home.mkdir(parents=True, mode=0o700)
            shutil.chown(home, ACCOUNTS[name], ACCOUNTS[name])
        (self.directory / "homes").chmod(0o755)

    def _own(self, *names: str) -> None:
        for name in names:
            shutil.chown(self.directory / name, PEERLOAD, 20200)

    def home(self, name: str) -> Path:
        """This user's own directory, which nobody else may enter."""
        return self.directory / "homes" / name

    def node(self, name: str, *more: str, settings: str = "", slots: int = 4) -> ServiceAgent:
        """One more, not started yet."""
        agent = ServiceAgent(self, name, ["--slots", str(slots), *more], None)
        shutil.chown(agent.directory, PEERLOAD, 20200)
        agent.directory.chmod(0o755)
        config = self.directory / f"{name}.toml"
        config.write_text(settings, encoding="utf-8")
        agent.more += ["--config", str(config)]
        self.agents[name] = agent
        return agent

    def run(self, agent: SystemAgent, user: str, script: str, **fields: Any) -> dict[str, Any]:
        """A shell's script as a task of that user, to its end → its record, with what it wrote as ``out`` and ``err``."""
        return self.ended(agent, user, self.submit(agent, user, script, **fields))

    def submit(self, agent: SystemAgent, user: str, script: str, **fields: Any) -> str:
        """The same, only queued → its id."""
        terms = fields.pop("terms", {})
        variables = {b"PATH": PATH.encode(), MARK.encode(): str(self.directory).encode(), **fields.pop("variables", {})}
        fields.setdefault("directory", b"/")
        spec = {"argv": [b"/bin/sh", b"-c", script.encode()], "environment": msgpack.packb(variables), **fields}
        token = f"{user}-{agent.node}-{len(self.tokens)}"
        self.tokens.append(token)
        reply = self.user(agent, user).call("submit", token=token, spec=spec, terms=terms)
        assert isinstance(reply["id"], str)
        return reply["id"]

    @property
    def tokens(self) -> list[str]:
        """Those of all submissions so far."""
        found: list[str] = self.__dict__.setdefault("_tokens", [])
        return found

    def ended(self, agent: SystemAgent, user: str, task: str) -> dict[str, Any]:
        """Wait for the end of a task."""
        asker = self.user(agent, user)

        def show() -> dict[str, Any]:
            found: dict[str, Any] = asker.call("show", tasks=[task])["tasks"][0]
            return found

        wait_until(lambda: show()["state"] in {"done", "failed", "cancelled", "unknown"}, 60.0, f"{task} to end")
        told = show()
        written = {1: b"", 2: b""}
        for piece in asker.stream("output", task=task):
            written[piece["stream"]] += piece["data"]
        return {**told, "out": written[1].decode(), "err": written[2].decode()}


def lines(text: str) -> dict[str, str]:
    """``Name: value`` of each line of /proc/self/status, values with single spaces."""
    return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in text.splitlines())}


def guests(uids: Iterable[int]) -> bool:
    """Whether all these are of the range for guests."""
    return all(61_184 <= uid <= 65_519 for uid in uids)
