"""An agent as a service: what its manager is told, when it is told nothing, the socket it is given, and a HUP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from peerload.client.connection import AgentConnection
from tests.integration.cluster import Cluster
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WATCHDOG_S = 2.0
TOLD_S_MAX = 60.0


class Manager:
    """What a service manager does for a service: it listens."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self.heard: list[tuple[float, dict[str, str]]] = []

    def close(self) -> None:
        """Nobody is there any more."""
        self._sock.close()

    def listen(self) -> list[dict[str, str]]:
        """All that was told so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self._sock.recv(4096, socket.MSG_DONTWAIT).decode().splitlines()
                self.heard.append((time.monotonic(), dict(line.split("=", 1) for line in lines)))
        return [told for _, told in self.heard]

    def count(self, name: str) -> int:
        """How often this was told."""
        return sum(name in told for told in self.listen())

    def until(self, name: str, count: int = 1) -> dict[str, str]:
        """The message that tells it for that time."""
        wait_until(lambda: self.count(name) >= count, TOLD_S_MAX, f"{name} to be told {count} times")
        return [told for told in self.listen() if name in told][count - 1]


class Service:
    """One agent with a manager."""

    def __init__(self, cluster: Cluster, node: str, given: socket.socket | None = None) -> None:
        self.agent = cluster.add(node)
        socket_fd = -1 if given is None else given.fileno()
        if given is not None:
            self.agent.socket = given.getsockname()
        self.config = self.agent.directory / "settings.toml"
        self.config.write_text("clients_max = 100\n")
        self.manager = Manager(self.agent.directory / "notify")
        script = 'export LISTEN_PID=$$; exec "$@"'
        if socket_fd < 0:
            script = 'unset LISTEN_FDS LISTEN_PID; exec "$@"'
        elif socket_fd != 3:
            script = f"exec 3<&{socket_fd}; {script}"
        with self.agent.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script, "service", *self.agent.words(), "--config", str(self.config)],
                env={
                    **cluster.environment,
                    "NOTIFY_SOCKET": str(self.agent.directory / "notify"),
                    "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
                    "LISTEN_FDS": "1",
                    "LISTEN_FDNAMES": "agent",
                },
                pass_fds=() if socket_fd < 0 else (socket_fd,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
            )

    def settings(self) -> dict[str, Any]:
        """What it runs with."""
        return {told["key"]: told["value"] for told in self.agent.call("settings")["settings"]}

    def hup(self, settings: str) -> None:
        """Have it read these."""
        self.config.write_text(settings)
        os.kill(self.process.pid, signal.SIGHUP)

    def end(self) -> int:
        """Stop it → its exit code."""
        self.process.terminate()
        return self.process.wait(TOLD_S_MAX)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def service(cluster: Cluster) -> Iterator[Service]:
    service = Service(cluster, "one")
    service.manager.until("READY")
    yield service
    service.process.kill()
    service.process.wait()
    service.manager.close()


def test_ready_after_it_answers_and_alive_from_then_on(service: Service) -> None:
    assert service.agent.call("info")["node"] == "one"
    assert service.manager.until("READY")["STATUS"] == "node one: 0 running, 0 peers known"
    service.manager.until("WATCHDOG", 3)
    said = [told.get("STATUS", "") for told in service.manager.listen()]
    trouble = [
        status.removeprefix("health check failed: ").split("; ")
        for status in said
        if status.startswith("health check failed: ")
    ]
    assert all(" within " in words for each in trouble for words in each), "slow it may be, for this machine's sake"


def test_what_it_starts_is_not_told_of_the_manager(service: Service) -> None:
    task = service.agent.submit("sh", "-c", "echo $NOTIFY_SOCKET$LISTEN_FDS$LISTEN_PID$WATCHDOG_USEC")
    service.agent.wait(task)
    assert service.agent.output(task) == (b"\n", b"")


def test_a_hup_puts_new_settings_in_force(service: Service) -> None:
    count = service.manager.count("READY")
    service.hup("clients_max = 101\nlabel = ['new']\n")
    says = service.manager.until("READY", count + 1)["STATUS"]
    assert says.endswith(Says.RELOADED("clients_max", "label"))
    assert service.manager.count("RELOADING") == count
    assert service.settings()["clients_max"] == 101
    assert service.settings()["label"] == [], "what is not in force is not told as if it were"


@pytest.mark.parametrize("settings", ["clients_max = 0\n", "clients = 102\n", "clients_max = \n", "\xff"])
def test_a_file_with_a_mistake_changes_nothing(service: Service, settings: str) -> None:
    count = service.manager.count("READY") + 1
    service.hup("clients_max = 103\n")
    service.manager.until("READY", count)
    assert service.settings()["clients_max"] == 103
    service.config.write_bytes(settings.encode("latin-1"))
    os.kill(service.process.pid, signal.SIGHUP)
    says = service.manager.until("READY", count + 1)["STATUS"]
    assert Says.NOT_RELOADED() in says
    assert service.settings()["clients_max"] == 103
    assert "settings not reloaded" in service.agent.log_end()


@pytest.mark.long
def test_a_launcher_that_hangs_ends_the_signs_of_life(service: Service) -> None:
    launcher = service.agent.launcher_pid
    service.manager.until("WATCHDOG")
    os.kill(launcher, signal.SIGSTOP)
    try:
        count = service.manager.count("STATUS")
        wait_until(
            lambda: any("launcher does not answer" in told.get("STATUS", "") for told in service.manager.listen()[-1:]),
            TOLD_S_MAX,
        )
        alive = service.manager.count("WATCHDOG")
        wait_until(lambda: service.manager.count("STATUS") > count + 3, TOLD_S_MAX)
        assert service.manager.count("WATCHDOG") == alive
    finally:
        os.kill(launcher, signal.SIGCONT)
    service.manager.until("WATCHDOG", alive + 1)


def test_a_store_that_hangs_ends_the_signs_of_life(service: Service) -> None:
    """Somebody else holds the database: no commit gets through."""
    locked = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN IMMEDIATE'); print(1, flush=True); input()"
    service.manager.until("WATCHDOG")
    holder = subprocess.Popen(
        [sys.executable, "-c", locked, str(service.agent.state / "peerload.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        wait_until(
            lambda: any("store does not commit" in told.get("STATUS", "") for told in service.manager.listen()[-1:]),
            TOLD_S_MAX,
        )
        alive = service.manager.count("WATCHDOG")
        holder.stdin.write(b"\n")
    service.manager.until("WATCHDOG", alive + 1)


def test_it_says_that_it_stops(cluster: Cluster) -> None:
    """And of the socket that it was given it takes nothing away: who connects meanwhile is served by the next."""
    path = str(cluster.directory / "given" / "agent.sock")
    (cluster.directory / "given").mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        os.chmod(path, 0o660)  # noqa: PTH101 -- a name for a socket
        listener.listen(16)
        listener.set_inheritable(True)
        cluster.environment["PEERLOAD_SOCKET"] = path
        first = Service(cluster, "two", listener)
        first.agent.socket = path
        first.manager.until("READY")
        assert first.agent.call("info")["node"] == "two"
        assert first.end() == 0
        assert first.manager.count("STOPPING") == 1
        first.manager.close()
        with AgentConnection(path, timeout_s=TOLD_S_MAX) as client:  # nobody is there, and nobody is refused
            request = client.send("info")
            del cluster.agents["two"]
            (cluster.directory / "two").rename(cluster.directory / "two.first")
            second = Service(cluster, "two", listener)
            assert client.receive()[0] == request
        second.manager.until("READY")
        assert second.end() == 0
        second.manager.close()
