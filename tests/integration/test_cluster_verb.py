"""`peerload cluster`, and agents with and without a directory of their own: what they say, and what they never say."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.test_bad_input import refused, start_and_fail
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def desk() -> Iterator[Cluster]:
    """A user without a cluster's directory."""
    with Cluster() as made:
        del made.environment["PEERLOAD_CLUSTER"]
        yield made


def shown(desk: Cluster, *words: str, **more: Any) -> dict[str, object]:
    done = desk.cli(None, "cluster", *words, "--json", **more)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_init_says_what_to_type_next_and_show_tells_the_same(desk: Cluster) -> None:
    directory = desk.directory / "my lab"
    done = desk.cli(None, "cluster", "init", str(directory))
    assert done.returncode == 0, done.stderr
    assert f"peerload up --cluster '{directory}' --listen " in done.stdout.decode()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    told = shown(desk, "show", str(directory))
    assert (told["name"], told["local"], told["directory"]) == ("my-lab", False, str(directory))
    assert {**told, "agent": None} == shown(desk, env={"PEERLOAD_CLUSTER": str(directory)})
    text = desk.cli(None, "cluster", "show", str(directory)).stdout.decode()
    assert f"sha256:{told['certificate_sha256']}" in text


def test_show_without_one_tells_the_local_one(desk: Cluster) -> None:
    told = shown(desk)
    assert (told["name"], told["local"]) == ("local", True)


def test_the_users_own_directory_is_found(desk: Cluster) -> None:
    own = desk.directory / "config" / "peerload" / "cluster"
    assert shown(desk, "init", str(own), "--name", "lab")["name"] == "lab"
    assert shown(desk)["directory"] == str(own)


def test_mistakes_are_named(desk: Cluster) -> None:
    directory = str(desk.directory / "lab")
    refused(desk.cli(None, "cluster", "init"), 2)
    refused(desk.cli(None, "cluster", "init", "a", "b"), 2)
    refused(desk.cli(None, "cluster", "make", directory), 2, "make")
    refused(desk.cli(None, "cluster", "show", "--name", "x"), 2, "--name")
    refused(desk.cli(None, "cluster", "init", directory, "--name", "My Lab"), 125, "My Lab")
    refused(desk.cli(None, "cluster", "show", directory), 125, f"peerload cluster init {directory}")
    assert desk.cli(None, "cluster", "init", directory).returncode == 0
    refused(desk.cli(None, "cluster", "init", directory), 125, directory)
    Path(directory).chmod(0o755)
    refused(desk.cli(None, "cluster", "show", directory), 125, f"chmod -R go= {directory}")


@pytest.mark.rule("M1")
def test_what_a_broker_needs_is_one_command(desk: Cluster) -> None:
    lab, out = desk.directory / "lab", desk.directory / "broker"
    words = ("cluster", "broker-certificate", str(out), "--host", "broker.lab")
    refused(desk.cli(None, *words), 125, "peerload invite")
    assert desk.cli(None, "cluster", "init", str(lab)).returncode == 0
    desk.environment["PEERLOAD_CLUSTER"] = str(lab)
    refused(desk.cli(None, *words[:2]), 2)
    refused(desk.cli(None, *words[:3]), 125, "--host broker.lab")
    refused(desk.cli(None, "cluster", "show", "--host", "x"), 2, "--host")
    done = desk.cli(None, *words, "--host", "192.0.2.7")
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode()
    assert "mqtts://broker.lab:8883" in said
    assert (out / "broker.key").read_text(encoding="utf-8").splitlines()[1] not in said
    refused(desk.cli(None, *words), 125, str(out))
    told = shown(desk, "broker-certificate", str(desk.directory / "next"), "--host", "b")
    assert told["hosts"] == ["b"]
    done = desk.cli(None, *words[:2], str(desk.directory / "six"), "--host", "fd00::5")
    assert 'mqtt = ["mqtts://[fd00::5]:8883"]' in done.stdout.decode(), done
    (lab / "ca.key").unlink()
    refused(desk.cli(None, *words[:2], str(lab / "x"), *words[3:]), 125, "peerload invite")


def test_an_agent_does_not_start_with_a_directory_that_cannot_be_used(desk: Cluster) -> None:
    directory = desk.directory / "lab"
    assert desk.cli(None, "cluster", "init", str(directory)).returncode == 0
    for number, (name, mode) in enumerate((("seal.key", 0o644), ("ca.key", 0o640))):
        (directory / name).chmod(mode)
        agent = desk.add(f"n{number}", "--cluster", str(directory))
        refused(start_and_fail(agent), 125, f"cluster: {directory / name}", "chmod -R go=")
        (directory / name).chmod(0o600)
    refused(
        start_and_fail(desk.add("n8", "--cluster", str(desk.directory / "none"))), 125, str(desk.directory / "none")
    )
    desk.environment["PEERLOAD_CLUSTER"] = "lab"
    refused(start_and_fail(desk.add("n9")), 125, "'lab'", "peerload cluster init DIR")


@pytest.mark.rule("J6")
def test_without_a_directory_other_machines_are_refused_with_a_way_out(desk: Cluster) -> None:
    for more in (["--listen", "192.0.2.1:7117"], ["--peer", "192.0.2.1:7117"], ["--peer", "example.org:7117"]):
        agent = desk.add(f"n{len(desk.agents)}", *more)
        refused(start_and_fail(agent), 125, more[0][2:], "peerload invite")


@pytest.mark.rule("J6")
def test_agents_of_one_user_meet_without_a_directory_and_others_do_not(desk: Cluster) -> None:
    first, second = desk.linked(2)
    assert first.call("info")["cluster"] == "local"
    with Cluster() as somebody:
        del somebody.environment["PEERLOAD_CLUSTER"]
        third = somebody.agent("n3", "--peer", first.listen)
        wait_until(lambda: third.call("info")["sought"].get(first.listen), what="it says why")
        assert third.peers_alive() == {"n3"}
    wait_until(lambda: first.peers_alive() == second.peers_alive() == {"n1", "n2"}, what="the two to be alive")


def test_a_name_is_all_that_is_needed_to_move_a_cluster(desk: Cluster) -> None:
    """The same directory at another place, after the first agent has gone: the node's certificate is still good."""
    old, new = desk.directory / "old", desk.directory / "new"
    assert desk.cli(None, "cluster", "init", str(old), "--name", "lab").returncode == 0
    agent = desk.add("n1", "--cluster", str(old), "--listen", "127.0.0.1:0").start()
    agent.call("stop", all=True)
    agent.reap()
    before = (agent.state / "tls" / "node.pem").read_bytes()
    shutil.move(old, new)
    agent.more = [word if word != str(old) else str(new) for word in agent.more]
    agent.start()
    assert (agent.state / "tls" / "node.pem").read_bytes() == before


@pytest.mark.rule("S13")
def test_no_key_is_told_logged_or_recorded(desk: Cluster) -> None:
    directory = desk.directory / "lab"
    assert desk.cli(None, "cluster", "init", str(directory)).returncode == 0
    recording = desk.directory / "recording"
    first = desk.agent("n1", "--cluster", str(directory), "--record", str(recording))
    second = desk.agent("n2", "--cluster", str(directory), "--peer", first.listen)
    desk.await_acquainted([first, second])
    task = first.submit("env", placement={"node": "n2"})
    first.wait(task)
    told = [json.dumps(first.call(verb)) for verb in ("info", "stats", "nodes", "policy", "tasks")]
    told += [first.output(task)[0].decode(), desk.cli(None, "cluster", "show", str(directory)).stdout.decode()]
    for agent in (first, second):
        agent.call("stop", all=True)
        agent.reap()
    secrets = [(directory / "seal.key").read_text().strip().encode()]
    secrets.append(bytes.fromhex(secrets[0].decode()))
    for pem in [directory / "ca.key", *desk.directory.glob("n*/state/tls/node.pem")]:
        lines = pem.read_bytes().splitlines()
        secrets.append(lines[1])  # the body of an Ed25519 key has one line
    assert len(secrets) == 5
    places = [path for path in desk.directory.rglob("*") if path.is_file() and path.name != "node.pem"]
    places = [path for path in places if directory not in path.parents]
    assert {"log", "recording"} <= {path.name for path in places}
    for secret in secrets:
        assert not [path for path in places if secret in path.read_bytes()]
        assert not [text for text in told if secret.decode("latin-1") in text]
