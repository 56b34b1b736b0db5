"""`peerload up --peer`: it says whether somebody answered there, and why not."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.integration.cluster import Cluster


def up(cluster: Cluster, directory: Path, *words: str) -> tuple[str, str]:
    """Start an agent in the background, and end it → what was said on stdout and stderr."""
    where = ("--socket", str(directory / "sock"))
    done = cluster.cli(None, "up", "--node", "late", "--state", str(directory / "state"), *where, *words)
    try:
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(), done.stderr.decode()
    finally:
        cluster.cli(None, "down", "--all", *where)


def test_up_says_who_has_not_answered_and_why(tmp_path: Path) -> None:
    with Cluster() as cluster, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        out, told = up(cluster, tmp_path, "--peer", address)
        assert "No peer met yet." in out
        assert told.startswith(f"peerload: no peer answered yet at {address} (")
        assert "refused" in told
        assert f"trying on:  peerload nodes --socket {tmp_path / 'sock'}" in told


def test_up_says_that_the_peer_is_of_another_cluster(tmp_path: Path) -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        assert cluster.cli(None, "cluster", "init", str(tmp_path / "lab")).returncode == 0
        _out, told = up(cluster, tmp_path, "--cluster", str(tmp_path / "lab"), "--peer", agent.listen)
        assert f"no peer answered yet at {agent.listen} (" in told
        assert "cluster" in told.partition("(")[2].partition(")")[0]


def test_up_tells_how_many_nodes_there_are_once_it_has_met_one(tmp_path: Path) -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        out, told = up(cluster, tmp_path, "--peer", agent.listen)
        assert "2 nodes known." in out
        assert told == ""
        agent.kill()
        out, told = up(cluster, tmp_path)
        assert "2 nodes known, looking for 1 of them." in out


def test_up_says_how_to_add_a_node_to_this_very_cluster(tmp_path: Path) -> None:
    with Cluster() as cluster:
        out, _told = up(cluster, tmp_path)
        assert "Add a machine:  peerload invite" in out
        assert "cluster init" not in out
        del cluster.environment["PEERLOAD_CLUSTER"]
        (tmp_path / "alone").mkdir()
        out, _told = up(cluster, tmp_path / "alone")
        assert "Add a machine:  peerload invite" in out
        assert "on this one too:  peerload up --peer 127.0.0.1:" in out
