"""`doctor` with real agents: each thing that goes wrong is made to go wrong, and found, with what mends it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.demo.broker import find_broker, start_broker
from peerload.cli.verbs.doctor import CHECKS
from tests.integration.cluster import Cluster, ended, program
from tests.support import cluster_of, kept_port, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.cluster import Agent


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """One that each test leaves as it found it."""
    with Cluster() as made:
        yield made.agent("n1")


def examined(cluster: Cluster, socket: str | None, **more: Any) -> dict[str, dict[str, str]]:
    """What each check finds, by its name; the exit code is as they say."""
    done = cluster.cli(socket, "doctor", "--json", **more)
    assert done.stderr == b""
    told = json.loads(done.stdout)
    found = {check["name"]: check for check in told["checks"]}
    assert list(found) == [check.name for check in CHECKS]
    failed = [name for name, check in found.items() if check["result"] == "fail"]
    assert (told["failed"], done.returncode) == (len(failed), 1 if failed else 0)
    assert all(check["fix"] for check in found.values() if check["result"] in ("warn", "fail"))
    assert not any(Says.CHECK_FAILED() in check["says"] for check in found.values())
    return found


def one(cluster: Cluster, agent: Agent | None, name: str, **more: Any) -> tuple[str, str, str]:
    check = examined(cluster, agent.socket if agent is not None else None, **more)[name]
    return check["result"], check["says"], check["fix"]


def config_of(cluster: Cluster, text: str) -> Path:
    path = cluster.directory / "config" / "peerload" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_sound_agent_fails_nothing(cluster: Cluster) -> None:
    first, second = cluster.linked(2)
    wait_until(lambda: first.call("checkup")["peers"][0]["datagram_age_s"] is not None)
    found: dict[str, dict[str, str]] = {}

    def is_sound() -> bool:
        """A peer that stands still a moment is not alive for that long; and one that does so while it introduces itself
        seems to have another time, until it does so again."""
        found.update(examined(cluster, first.socket))
        (peer,) = first.call("checkup")["peers"]
        is_near = peer["clock_ahead_s"] is not None and abs(peer["clock_ahead_s"]) < 1
        if peer["clock_ahead_s"] is not None and not is_near:
            second.kill()
            second.start()
        nothing_fails = all(one["result"] != "fail" for one in found.values())
        return is_near and nothing_fails and peer["state"] == "alive"

    wait_until(is_sound, what="nothing to fail")
    assert f"node {first.node} answers" in found["agent"]["says"]
    (peer,) = second.call("checkup")["peers"]
    assert peer["node"] == first.node
    assert abs(peer["clock_ahead_s"]) < 60
    with first.client() as client:
        told = [event for part in client.stream("events", what=["security"]) for event in part["events"]]
    assert [event for event in told if event["state"] == "J3"] == [], "doctor is no stranger to the agent"


def test_without_an_agent_what_can_be_looked_at_is(cluster: Cluster) -> None:
    found = examined(cluster, None)
    assert found["agent"]["result"] == "fail"
    assert found["agent"]["fix"] == "peerload up"
    assert found["settings"]["result"] == found["state"]["result"] == found["python"]["result"] == "ok"
    assert found["launcher"]["result"] == "skip"
    lines = [line.split()[:2] for line in cluster.cli(None, "doctor", "--quiet").stdout.decode().splitlines()]
    assert ["fail", "agent"] in lines
    assert not any(line[0] in ("ok", "skip") for line in lines)


@pytest.mark.long
def test_an_agent_that_was_stopped(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    agent.pause()
    result, _, fix = one(cluster, agent, "agent")
    agent.resume()
    assert (result, f"kill -CONT {agent.pid}" in fix) == ("fail", True)


def test_settings_that_cannot_be_used(cluster: Cluster) -> None:
    config_of(cluster, "slotz = 4\n")
    result, says, _ = one(cluster, None, "settings")
    assert (result, "slotz" in says) == ("fail", True)


def test_settings_changed_since_the_start(agent: Agent) -> None:
    assert one(agent.cluster, agent, "restart")[0] == "ok"
    changed = config_of(agent.cluster, "lease_s = 30\nnode = 'other'\n")
    result, says, fix = one(agent.cluster, agent, "restart")
    changed.unlink()
    assert (result, "lease_s" in says, "node" in says) == ("warn", True, False)  # n1 was given as a flag
    assert "config show" in fix


def test_a_socket_open_to_others(agent: Agent) -> None:
    assert one(agent.cluster, agent, "socket")[0] == "ok"
    Path(agent.socket).chmod(0o666)
    result, _, fix = one(agent.cluster, agent, "socket")
    assert (result, fix.startswith("chmod go= ")) == ("fail", True)
    Path(agent.socket).chmod(0o600)
    Path(agent.socket).parent.chmod(0o777)
    result, _, fix = one(agent.cluster, agent, "socket")
    Path(agent.socket).parent.chmod(0o700)
    assert (result, fix.startswith("chmod go-w ")) == ("fail", True)


def test_a_state_directory_open_to_others(agent: Agent) -> None:
    assert one(agent.cluster, agent, "state")[0] == "ok"
    agent.state.chmod(0o777)
    result, _, fix = one(agent.cluster, agent, "state")
    agent.state.chmod(0o700)
    assert (result, fix) == ("fail", f"chmod 700 {agent.state}")


def test_a_state_directory_in_memory(cluster: Cluster) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    place = Path("/dev/shm") / cluster.directory.name
    place.mkdir(mode=0o700)
    try:
        result, says, _ = one(cluster, None, "file system", env={"PEERLOAD_STATE": str(place)})
    finally:
        shutil.rmtree(place)
    assert (result, "tmpfs" in says) == ("warn", True)


def test_a_damaged_row(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    task = agent.submit("sleep", "60")
    assert one(cluster, agent, "damage")[0] == "ok"
    agent.kill()
    connection = sqlite3.connect(agent.state / "peerload.db")
    connection.execute("UPDATE tasks SET state = 'zombie'")
    connection.commit()
    connection.close()
    agent.start()
    result, says, _ = one(cluster, agent, "damage")
    assert (result, task in says) == ("fail", True)


def test_a_drained_node(agent: Agent) -> None:
    agent.call("drain", reason="new PSU")
    result, says, fix = one(agent.cluster, agent, "drained")
    agent.call("undrain")
    assert (result, '"new PSU"' in says, fix) == ("warn", True, "peerload undrain")


@pytest.mark.long
def test_tasks_of_a_silent_home(cluster: Cluster) -> None:
    home, other = cluster.linked(2, lease_s=2)
    task = home.submit("sleep", "60", placement={"node": other.node})
    home.await_state(task, "running")
    home.kill()
    wait_until(lambda: other.call("checkup")["frozen"] == [task], 30, "it to be frozen")
    result, says, fix = one(cluster, other, "frozen")
    assert (result, task in says, home.node in fix) == ("warn", True, True)
    home.start()


def test_a_cluster_directory_open_to_others(cluster: Cluster) -> None:
    copy = cluster.directory / "lab"
    shutil.copytree(cluster_of().directory, copy)
    copy.chmod(0o755)
    result, says, fix = one(cluster, None, "cluster", env={"PEERLOAD_CLUSTER": str(copy)})
    assert (result, str(copy) in says, fix) == ("fail", True, f"chmod -R go= {copy}")


def test_another_cluster_than_the_agents(agent: Agent) -> None:
    other = cluster_of("lab2").directory
    result, says, _ = one(agent.cluster, agent, "cluster", env={"PEERLOAD_CLUSTER": str(other)})
    assert (result, str(other) in says) == ("warn", True)


def test_an_address_that_only_this_machine_reaches(cluster: Cluster) -> None:
    config_of(cluster, 'peer = ["10.255.0.1:7117"]\n')
    result, says, fix = one(cluster, None, "listen")
    assert (result, "10.255.0.1:7117" in says, "--listen" in fix) == ("fail", True, True)


def test_a_peer_that_is_not_found(cluster: Cluster) -> None:
    with kept_port() as port:
        nobody = f"127.0.0.1:{port}"
        agent = cluster.agent("n1", "--peer", nobody)
        wait_until(lambda: agent.call("info")["sought"].get(nobody), what="it to be sought")
        result, says, _ = one(cluster, agent, "peers")
    assert (result, nobody in says) == ("fail", True)


def test_a_peer_of_another_cluster(cluster: Cluster) -> None:
    first = cluster.agent("n1")
    second = cluster.agent("n2", "--peer", first.listen, "--cluster", str(cluster_of("strangers").directory))
    wait_until(lambda: second.call("info")["sought"].get(first.listen), 20)
    result, says, _ = one(cluster, second, "peers", env={"PEERLOAD_CLUSTER": str(cluster_of("strangers").directory)})
    assert (result, first.listen in says) == ("fail", True), says


def test_a_peer_that_died(cluster: Cluster) -> None:
    first, second = cluster.linked(2)
    second.kill()
    wait_until(lambda: first.call("checkup")["peers"][0]["state"] in ("suspect", "dead"), 30)
    result, says, fix = one(cluster, first, "peers")
    assert (result, second.node in says, second.node in fix) == ("warn", True, True)
    second.start()


def test_two_agents_of_one_name(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    place = cluster.directory / "twin"
    place.mkdir(mode=0o700)
    words = ["--state", str(place / "state"), "--socket", str(place / "sock"), "--peer", agent.listen]
    twin = subprocess.Popen(
        [*program(), "agent", "--node", "n1", *words], env=cluster.environment, stderr=subprocess.DEVNULL, cwd="/"
    )
    try:
        wait_until(lambda: agent.call("checkup")["clashes"], 20, "the clash")
        result, says, fix = one(cluster, agent, "names")
        assert (result, "n1" in says, "--node" in fix) == ("fail", True, True)
    finally:
        cluster.cli(str(place / "sock"), "down", "--all")
        twin.wait(60)


def test_a_broker_that_is_away(cluster: Cluster) -> None:
    with kept_port() as port:
        config_of(cluster, f'mqtt = ["mqtt://me:secret@127.0.0.1:{port}"]\n')
        result, says, _ = one(cluster, None, "broker")
        assert (result, f"127.0.0.1:{port}" in says, "secret" in says) == ("fail", True, False)
        agent = cluster.agent("n1")
        wait_until(lambda: "127.0.0.1" in agent.call("checkup")["broker"]["why"], what="it to be missed")
        result, says, _ = one(cluster, agent, "broker")
        assert (result, f"127.0.0.1:{port}" in says, "secret" in says) == ("fail", True, False)


def test_a_broker_that_answers(cluster: Cluster) -> None:
    kind = find_broker()
    if kind is None:
        pytest.skip("no MQTT broker is installed")
    with start_broker(cluster.directory, kind) as broker:
        config_of(cluster, f'mqtt = ["{broker.url}"]\n')
        wait_until(lambda: one(cluster, None, "broker")[0] == "ok", what="it to answer in time")
        assert broker.url in one(cluster, None, "broker")[1]


def test_a_broker_that_refuses_us(cluster: Cluster, mosquitto: Path) -> None:
    passwords = cluster.directory / "passwords"
    passwords.write_text("", encoding="utf-8")
    configuration = cluster.directory / "mosquitto.conf"

    def refuses() -> bool:
        result, says, _ = one(cluster, None, "broker")
        return (result, f"127.0.0.1:{port}: " in says) == ("fail", True)

    with kept_port() as port:
        settings = f"listener {port} 127.0.0.1\nuser root\nallow_anonymous false\npassword_file {passwords}\n"
        configuration.write_text(settings, encoding="utf-8")
        config_of(cluster, f'mqtt = ["mqtt://me:secret@127.0.0.1:{port}"]\n')
        with ended(subprocess.Popen([str(mosquitto), "-c", str(configuration)], stderr=subprocess.DEVNULL)):
            wait_until(refuses, what="the refusal to be found")


def test_too_few_open_files(cluster: Cluster) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    assert one(cluster, None, "open files", preexec_fn=few)[0] == "fail"


def test_no_place_for_temporary_files(cluster: Cluster) -> None:
    nowhere = str(cluster.directory / "nowhere")
    result, says, _ = one(cluster, None, "temporary", env={"TMPDIR": nowhere})
    assert (result, nowhere in says) == ("fail", True)
