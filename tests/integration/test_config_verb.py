"""`config show` and `config check`, with a real agent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BAD = """\
# a comment
slotz = 4
slots = "many"
listen = "nowhere"
peer = ["a:1", "b"]
mqtt = ["mqtts://me:hunter2@x/path"]
policy = "thresold"
lease_s = 0.2
node = "My Node"

[gpu]
max_tasks = 0
reserve = "8"
colour = "red"

[load]
foreign = "some"

[[device]]
kind = "fpga"
ids = []
"""
MISTAKES = [
    ("slotz", "no such setting", "did you mean 'slots'?"),
    ("slots", "a whole number or nothing is wanted", ""),
    ("listen", "is not HOST:PORT", "127.0.0.1:7117"),
    ("peer", "'b' is not HOST:PORT", ""),
    ("mqtt", "not a broker's address", "mqtts://broker.lab:8883"),
    ("policy", "there are adaptive", "did you mean 'threshold'?"),
    ("lease_s", "of at least 1.0", ""),
    ("node", "a-z, 0-9", ""),
    ("gpu.max_tasks", "of at least 1", ""),
    ("gpu.reserve", "8G is 8 GiB", ""),
    ("gpu.colour", "no such setting", "there are: max_tasks"),
    ("load.foreign", "count or ignore", ""),
    ("device[0].ids", "a length of at least 1", ""),
]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


def user_file(cluster: Cluster) -> Path:
    path = cluster.directory / "config" / "peerload" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def shown(cluster: Cluster, socket: str | None, **more: Any) -> tuple[str | None, dict[str, dict[str, Any]]]:
    done = cluster.cli(socket, "config", "--json", **more)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["agent"], {row["key"]: row for row in told["settings"]}


def test_each_setting_says_where_it_comes_from(cluster: Cluster) -> None:
    text = 'lease_s = 30\nlabel = ["a", "b"]\nmqtt = ["mqtt://me:hunter2@127.0.0.1:9"]\n'
    user_file(cluster).write_text(text, encoding="utf-8")
    agent = cluster.agent("n1", slots=3)
    node, rows = shown(cluster, agent.socket)
    assert node == "n1"
    assert (rows["lease_s"]["value"], rows["lease_s"]["origin"]) == (30.0, str(user_file(cluster)))
    assert (rows["slots"]["value"], rows["slots"]["origin"]) == (3, "flag")
    assert (rows["speed"]["value"], rows["speed"]["origin"]) == (1.0, "PEERLOAD_SPEED")
    assert rows["policy"]["origin"] == "built-in"
    assert rows["mqtt"]["value"] == ["mqtt://me:***@127.0.0.1:9"]
    assert not any(row["needs_restart"] for row in rows.values())
    text = cluster.cli(agent.socket, "config", "show", "--origin").stdout.decode()
    assert "hunter2" not in text
    assert all(key in text for key in rows)
    assert str(user_file(cluster)) in text


def test_what_a_restart_would_change_is_marked(cluster: Cluster) -> None:
    agent = cluster.agent("n1", slots=3)
    user_file(cluster).write_text("lease_s = 30\nslots = 9\n", encoding="utf-8")
    _, rows = shown(cluster, agent.socket)
    assert {key for key, row in rows.items() if row["needs_restart"]} == {"lease_s"}  # slots was given as a flag
    assert (rows["lease_s"]["value"], rows["lease_s"]["now"]) == (60.0, 30.0)
    marked = [line.split() for line in cluster.cli(agent.socket, "config").stdout.decode().splitlines()]
    assert ["lease_s", "60.0"] in [words[1:3] for words in marked if words[:1] == ["*"]]
    user_file(cluster).write_text("lease_s = 0\n", encoding="utf-8")
    done = cluster.cli(agent.socket, "config")
    assert (done.returncode, b"lease_s" in done.stderr) == (0, True)


def test_the_file_that_the_agent_was_started_with_is_compared(cluster: Cluster) -> None:
    file = cluster.directory / "own.toml"
    file.write_text("lease_s = 30\nclients_max = 101\n", encoding="utf-8")
    agent = cluster.agent("n1", "--config", str(file))
    _, rows = shown(cluster, agent.socket)
    assert rows["lease_s"]["origin"] == str(file)
    assert not any(row["needs_restart"] for row in rows.values())
    file.write_text("lease_s = 40\nclients_max = 101\n", encoding="utf-8")
    _, rows = shown(cluster, agent.socket)
    assert [(key, row["now"]) for key, row in rows.items() if row["needs_restart"]] == [("lease_s", 40.0)]
    told = json.loads(cluster.cli(agent.socket, "doctor", "--json").stdout)
    (says,) = [check["says"] for check in told["checks"] if check["name"] == "restart"]
    assert says.endswith(": lease_s")


def test_without_an_agent_it_is_what_one_would_use(cluster: Cluster) -> None:
    user_file(cluster).write_text("lease_s = 30\n", encoding="utf-8")
    node, rows = shown(cluster, None, env={"PEERLOAD_SLOTS": "7"})
    assert (node, rows["lease_s"]["value"], rows["slots"]["value"]) == (None, 30.0, 7)
    assert rows["slots"]["origin"] == "PEERLOAD_SLOTS"


def test_every_mistake_is_named_with_its_key(cluster: Cluster) -> None:
    path = cluster.directory / "bad.toml"
    path.write_text(BAD, encoding="utf-8")
    done = cluster.cli(None, "config", "check", str(path))
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (125, b"")
    assert "hunter2" not in done.stderr.decode()
    told = [line for line in lines if line.startswith("peerload: ")]
    assert len(told) == len(MISTAKES)
    for line, (key, says, hint) in zip(told, MISTAKES, strict=True):
        assert line.startswith(f"peerload: {path}: {key}: "), line
        assert says in line
        assert hint in lines[lines.index(line) + 1]
    listed = json.loads(cluster.cli(None, "config", "check", "--json", str(path)).stdout)
    assert [one["key"] for one in listed["mistakes"]] == [key for key, _, _ in MISTAKES]


def test_what_is_no_toml(cluster: Cluster) -> None:
    path = cluster.directory / "bad.toml"
    for raw, line in (
        (b"slots = 4\nlabel = [\n", 3),
        (b"slots = 4\nnode = x y\n", 2),
        (b"slots = 4\nnode = '\xff'\n", 2),
    ):
        path.write_bytes(raw)
        done = cluster.cli(None, "config", "check", str(path))
        assert done.returncode == 125
        assert f"{path}:{line}: TOML" in done.stderr.decode()


def test_what_an_agent_reads_is_checked_without_a_name(cluster: Cluster) -> None:
    assert cluster.cli(None, "config", "check").returncode == 0
    user_file(cluster).write_text("slots = 4\n", encoding="utf-8")
    assert cluster.cli(None, "config", "check").stdout.decode() == f"{user_file(cluster)}: ok\n"
    done = cluster.cli(None, "config", "check", env={"PEERLOAD_LEASE_S": "never"})
    assert (done.returncode, b"lease_s" in done.stderr) == (125, True)
    user_file(cluster).write_text("slots = -4\n", encoding="utf-8")
    assert cluster.cli(None, "config", "check").returncode == 125


def test_what_is_no_file_to_be_read(cluster: Cluster) -> None:
    for name in ("/nowhere", "/tmp", "/dev/zero"):
        done = cluster.cli(None, "config", "check", name)
        assert (done.returncode, name in done.stderr.decode()) == (125, True)
