"""`peerload up --peer`: it says whether somebody answered there, and why not."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import ROOT, Cluster

PATIENT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from peerload.cli.verbs import agent
from peerload.cli.main import main
agent.PEER_WITHIN_S = float(sys.argv.pop(1))
sys.exit(main())
"""


def up(cluster: Cluster, directory: Path, *words: str, within_s: float = 3.0) -> tuple[str, str]:
    """Start an agent in the background, and end it → what was said on stdout and stderr. ``within_s``: so long it waits
    for a peer."""
    where = ("--socket", str(directory / "sock"))
    start = [sys.executable, "-I", "-c", PATIENT, str(within_s)]
    done = subprocess.run(
        [*start, "up", "--node", "late", "--state", str(directory / "state"), *where, *words],
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/tmp",
        timeout=100,
        check=False,
    )
    try:
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(), done.stderr.decode()
    finally:
        cluster.cli(None, "down", "--all", *where)


def told_why(cluster: Cluster, directory: Path, *words: str) -> tuple[str, str]:
    """The same where no peer will answer, and it is known why: later on a machine that stands still."""
    out, told = up(cluster, directory, *words)
    for within_s in (15.0, 40.0):
        if "no answer within" in told:
            out, told = up(cluster, directory, *words, within_s=within_s)
    return out, told


@pytest.mark.long
def test_up_says_who_has_not_answered_and_why(tmp_path: Path) -> None:
    with Cluster() as cluster, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        _out, told = told_why(cluster, tmp_path, "--peer", address)
        assert f"{address} (" in told
        assert "refused" in told
        assert f"peerload nodes --socket {tmp_path / 'sock'}" in told


@pytest.mark.long
def test_up_says_that_the_peer_is_of_another_cluster(tmp_path: Path) -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        assert cluster.cli(None, "cluster", "init", str(tmp_path / "lab")).returncode == 0
        _out, told = told_why(cluster, tmp_path, "--cluster", str(tmp_path / "lab"), "--peer", agent.listen)
        assert f"{agent.listen} (" in told
        assert "cluster" in told.partition("(")[2].partition(")")[0]


def test_up_tells_how_many_nodes_there_are_once_it_has_met_one(tmp_path: Path) -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        out, told = up(cluster, tmp_path, "--peer", agent.listen, within_s=60.0)
        assert "2 nodes known." in out
        assert told == ""
        agent.kill()
        out, told = up(cluster, tmp_path)
        assert "2 nodes known" in out


def test_up_says_how_to_add_a_node_to_this_very_cluster(tmp_path: Path) -> None:
    with Cluster() as cluster:
        out, _told = up(cluster, tmp_path)
        assert "peerload invite" in out
        del cluster.environment["PEERLOAD_CLUSTER"]
        (tmp_path / "alone").mkdir()
        out, _told = up(cluster, tmp_path / "alone")
        assert "peerload invite" in out
        assert "peerload up --peer 127.0.0.1:" in out
