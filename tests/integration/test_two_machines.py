"""Two machines, each a network namespace of its own: a copy of the cluster's directory is all it takes to be a member."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.integration.cluster import Agent, Cluster
from tests.support import total, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

CLAIMS = ("@peerload-agent-", "@peerload-launcher-")
"""Abstract sockets that claim a database for one agent on this machine: nothing is accepted there."""
ADDRESSES = {"n1": "198.51.100.1", "n2": "198.51.100.2"}
PORT = 7117


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """node → its network namespace; they are linked by a cable and by nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = {node: f"pl-{os.getpid()}-{node}" for node in ADDRESSES}
    try:
        for name in made.values():
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        for name in made.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    try:
        one, two = made
        ip("link", "add", "cable", "netns", made[one], "type", "veth", "peer", "name", "cable", "netns", made[two])
        for node, name in made.items():
            ip("-n", name, "address", "add", f"{ADDRESSES[node]}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made.values():
            ip("netns", "del", name)


class Elsewhere(Agent):
    """An agent in a namespace."""

    namespace = ""

    def words(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *super().words()]


def on(cluster: Cluster, namespace: str, node: str, *more: str, slots: int = 2) -> Elsewhere:
    """An agent of that name there, not started yet; it listens at its machine's address."""
    agent = Elsewhere(cluster, node, ["--slots", str(slots), "--listen", f"{ADDRESSES[node]}:{PORT}", *more], None)
    agent.namespace = namespace
    cluster.agents[node] = agent
    return agent


def test_a_copy_of_the_directory_makes_a_machine_a_member(machines: dict[str, str]) -> None:
    with Cluster() as cluster:
        del cluster.environment["PEERLOAD_CLUSTER"]
        own, copy = cluster.directory / "lab", cluster.directory / "copied" / "lab"
        done = cluster.cli(None, "cluster", "init", str(own))
        assert done.returncode == 0, done.stderr
        assert str(own) in done.stdout.decode()
        copy.parent.mkdir()
        subprocess.run(["cp", "-rp", str(own), str(copy)], check=True, timeout=60)
        first = on(cluster, machines["n1"], "n1", "--cluster", str(own), slots=1).start()
        peer = ["--peer", f"{ADDRESSES['n1']}:{PORT}"]
        second = on(cluster, machines["n2"], "n2", "--cluster", str(copy), *peer).start()
        cluster.await_acquainted([first, second])
        gate = cluster.directory / "gate"
        array = first.submit("sh", "-c", f"until [ -e {gate} ]; do sleep 0.05; done", array=[(1, 6, 1)])

        def nodes() -> set[str | None]:
            return {task["node"] for task in first.call("show", tasks=[array])["tasks"] if task["state"] == "running"}

        wait_until(lambda: nodes() == {"n1", "n2"}, what="some to run on the other machine")
        gate.touch()
        assert {task["state"] for task in first.wait(array).values()} == {"done"}
        task = first.submit("sh", "-c", "seq 200000", placement={"node": "n2"})
        assert first.wait(task)[task]["node"] == "n2"
        assert first.output(task)[0] == b"".join(b"%d\n" % number for number in range(1, 200001))


def test_a_machine_with_another_directory_is_none(machines: dict[str, str]) -> None:
    with Cluster() as cluster:
        del cluster.environment["PEERLOAD_CLUSTER"]
        for name in ("lab", "other"):
            assert cluster.cli(None, "cluster", "init", str(cluster.directory / name), "--name", "lab").returncode == 0
        first = on(cluster, machines["n1"], "n1", "--cluster", str(cluster.directory / "lab")).start()
        other = ["--cluster", str(cluster.directory / "other"), "--peer", f"{ADDRESSES['n1']}:{PORT}"]
        second = on(cluster, machines["n2"], "n2", *other).start()
        wait_until(lambda: Says.OTHER_CLUSTER() in second.log_end(), what="the newcomer says why")
        wait_until(lambda: total(first.counters(), "peer_frames_dropped_total"), what="it is counted")
        assert (first.peers_alive(), second.peers_alive()) == ({"n1"}, {"n2"})


# -- what listens ------------------------------------------------------------------------------------------------------


def listening(pid: int) -> tuple[set[tuple[str, str, int]], set[str]]:
    """({(tcp or udp, address, port)}, paths of Unix sockets) that this process listens on, but for its claim of a database."""
    process = psutil.Process(pid)
    inet = {
        ("udp" if found.type == 2 else "tcp", found.laddr.ip, found.laddr.port)
        for found in process.net_connections("inet")
        if found.type == 2 or found.status == psutil.CONN_LISTEN
    }
    unix = {str(found.laddr) for found in process.net_connections("unix")} - {""}
    return inet, {path for path in unix if not path.startswith(CLAIMS)}


@pytest.mark.rule("S2")
def test_an_agent_listens_at_its_socket_and_one_address_alone() -> None:
    with Cluster() as cluster:
        agent = cluster.agent()
        host, _, port = agent.listen.rpartition(":")
        inet, unix = listening(agent.pid)
        assert ("tcp", host, int(port)) in inet
        assert inet <= {("tcp", host, int(port)), ("udp", host, int(port))}
        assert host == "127.0.0.1"
        assert unix == {agent.socket}
        inet, unix = listening(agent.launcher_pid)
        assert inet == set(), "nothing reaches a launcher over a network"
        assert unix == {"launcher.sock"}, "in the state directory, which is its working directory"
