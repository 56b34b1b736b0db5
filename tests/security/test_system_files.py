"""Files that travel with tasks of all users of a machine: read, put in place and brought home as their users, and kept apart
(rules F1, F3, S5)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from peerload.model import metrics
from tests.integration.cluster import program
from tests.integration.test_environments import requirement
from tests.security.service import PROJECT, ServiceAgent, ServiceCluster, guests
from tests.security.users import ACCOUNTS, GROUP, needs_root, within_reach
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_root


class Machine:
    """Two nodes, and the command line of their users. ws2 runs tasks of ws1 as the same accounts, ws3 as guests."""

    def __init__(self, cluster: ServiceCluster) -> None:
        self.cluster = cluster
        self.here = cluster.node("ws1", slots=2).start()
        self.there = cluster.node("ws2", "--peer", self.here.listen, settings='users = "same-name"\n').start()
        self.strange = cluster.node("ws3", "--peer", self.here.listen).start()
        cluster.await_acquainted([self.here, self.there, self.strange])

    def types(
        self, user: str, *words: str, at: ServiceAgent | None = None, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """A command line of a user in a fresh directory beneath its home."""
        uid, home = ACCOUNTS[user], self.cluster.home(user)
        mounts = "".join(f"{command} && " for command in within_reach(self.cluster.directory))
        groups = f"--groups={uid},{GROUP},{PROJECT}"
        found = subprocess.run(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} exec "$@"', "sh"),
                *("setpriv", f"--reuid={uid}", f"--regid={uid}", groups, *program(), *words),
            ],
            cwd=home / "project",
            env={"PATH": os.environ["PATH"], "HOME": str(home), "PEERLOAD_SOCKET": (at or self.here).socket},
            capture_output=True,
            text=True,
            check=False,
            timeout=120.0,
        )
        assert found.returncode == code, (words, found)
        return found

    def project(self, user: str, **files: str) -> Path:
        """A fresh directory `project` of a user with these files."""
        path = self.cluster.home(user) / "project"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        shutil.chown(path, ACCOUNTS[user], ACCOUNTS[user])
        for name, text in files.items():
            (path / name).write_text(text)
            shutil.chown(path / name, ACCOUNTS[user], ACCOUNTS[user])
        return path

    def told(self, user: str, task: str) -> dict[str, Any]:
        """A task as its user sees it."""
        found: dict[str, Any] = self.cluster.user(self.here, user).call("show", tasks=[task])["tasks"][0]
        return found


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with ServiceCluster() as cluster:
        yield Machine(cluster)


SAYS = "import os, sys, tool; print(tool.VERSION, os.getuid(), sys.prefix)"
SCRIPT = "id -u > out; cat a >> out; ln -s out link; pwd >> out; touch -d 2000-01-01 a"


@pytest.mark.rule("F3", "S5", "X6")
@pytest.mark.parametrize("node", ["ws1", "ws2", "ws3"])
def test_files_travel_as_their_user_and_nobody_else(machine: Machine, node: str) -> None:
    project = machine.project("alice", a="text\n")
    machine.types(
        "alice", "run", "--snapshot", "--out", "out", "--out", "link", "--node", node, "--", "sh", "-c", SCRIPT
    )
    uid, text, where = (project / "out").read_text().split()
    assert text == "text"
    assert guests([int(uid)]) if node == "ws3" else int(uid) == ACCOUNTS["alice"]
    assert not where.startswith(str(machine.cluster.home("alice")))
    assert {path.name for path in project.iterdir()} == {"a", "out", "link"}
    assert (project / "out").stat().st_uid == ACCOUNTS["alice"]
    assert (project / "link").readlink() == Path("out")
    agent = {"ws1": machine.here, "ws2": machine.there, "ws3": machine.strange}[node]
    left = Path(agent.sockets).parent / "state/scratch"
    wait_until(
        lambda: not any(left.iterdir()) and not any((agent.state / "files/attempts").iterdir()),
        60.0,
        "its files to be gone",
    )


def test_an_array_streams_and_brings_home_what_each_member_has_made(machine: Machine) -> None:
    project = machine.project("alice", a="text\n")
    machine.types("alice", "map", "--snapshot", "--out", "*.up", "tr a-z A-Z < a > {}.up", ":::", "1", "2", "3", "4")
    assert {path.name: path.read_text() for path in project.glob("*.up")} == {f"{n}.up": "TEXT\n" for n in range(1, 5)}
    machine.types("alice", "run", "--snapshot", "--node", "ws2", "-o", "log", "--", "cat", "a")
    wait_until(lambda: (project / "log").exists() and (project / "log").read_text() == "text\n", 60.0, "the file")


@pytest.mark.rule("S5")
def test_what_one_user_has_is_neither_named_nor_had_by_another(machine: Machine) -> None:
    """Neither the blocks, by their digests, nor whether they are there, nor a whole tree by its id."""
    machine.project("alice", secret="hers\n")
    machine.types("alice", "run", "--snapshot", "--node", "ws2", "--", "true")
    alice, bob = machine.cluster.user(machine.here, "alice"), machine.cluster.user(machine.here, "bob")
    [tree, *_] = [bytes.fromhex(one["id"]) for one in alice.call("files")["snapshots"]]
    assert alice.call("files", manifest=tree)["complete"]
    assert bob.call("files")["snapshots"] == []
    assert not bob.call("files", manifest=tree)["complete"]
    assert bob.call("files", have=[tree])["missing"] == [tree]
    spec = {"argv": [b"true"], "directory": b"-", "files": {"manifest": tree, "outputs": ["*"]}}
    home = bytes(machine.cluster.home("bob"))
    bob.refused("submit", token=secrets.token_hex(8), spec=spec, terms={"files_home": home})
    other = machine.cluster.user(machine.there, "bob")
    assert not other.call("files", manifest=tree)["complete"]
    for agent in (machine.here, machine.there):
        for path in (agent.state / "files").rglob("*"):
            assert path.lstat().st_mode & 0o007 == 0 or not path.is_file() or agent.state.stat().st_mode & 0o007 == 0
    assert machine.cluster.user(machine.here, "carol").call("files")["snapshots"], "an administrator sees what is kept"


def test_a_node_that_has_a_snapshot_gives_it_to_the_next(machine: Machine) -> None:
    there = machine.cluster.user(machine.there, "alice")

    def has_served() -> bool:
        """A node that cannot reach it yet asks the home."""
        machine.project("alice", a=secrets.token_hex(500_000))
        before = there.call("stats")["counters"].get(metrics.FILES_SERVED_BYTES, 0)
        for node in ("ws2", "ws3"):
            machine.types("alice", "run", "--snapshot", "--node", node, "--", "true")
        return bool(there.call("stats")["counters"].get(metrics.FILES_SERVED_BYTES, 0) - before > 1_000_000)

    wait_until(has_served, 60.0, "the second node to give the files to the third")


@pytest.mark.rule("F3", "S5")
def test_outputs_go_nowhere_that_their_user_may_not_write(machine: Machine) -> None:
    """Neither by the directory that a client names, nor by a link that is put in its way."""
    project = machine.project("bob", a="text\n")
    target = machine.cluster.home("alice") / "mine"
    target.mkdir(mode=0o755, exist_ok=True)
    bob = machine.cluster.user(machine.here, "bob")
    shutil.chown(target, ACCOUNTS["alice"], ACCOUNTS["alice"])
    machine.types("bob", "run", "--snapshot", "--", "true")
    [tree, *_] = [bytes.fromhex(one["id"]) for one in bob.call("files")["snapshots"]]
    spec = {"argv": [b"true"], "directory": b"-", "files": {"manifest": tree, "outputs": ["*"]}}
    code, *_ = bob.refused("submit", token=secrets.token_hex(8), spec=spec, terms={"files_home": bytes(target)})
    assert code == "bad-request"
    script = "mkdir out; echo pwned > out/file"
    words = ["--held", "--in", "a", "--out", "out/*", "--", "sh", "-c", script]
    name = machine.types("bob", "submit", *words).stdout.strip()
    (project / "out").symlink_to("/tmp")
    bob.call("release", tasks=[name])
    assert "out/file" in machine.types("bob", "wait", name, code=125).stdout
    found = machine.types("bob", "run", "--in", "a", "--out", "out/*", "--", "sh", "-c", script, code=125)
    assert "its path contains a symbolic link" in found.stderr
    assert not Path("/tmp/file").exists()


def test_outputs_outlive_an_agent_and_a_launcher_that_are_killed_before_they_came_home(machine: Machine) -> None:
    project, there = machine.project("alice"), machine.there
    go = machine.cluster.directory / "go"
    wait = f"echo made > b; while [ ! -e {go} ]; do sleep 0.05; done"
    name = machine.types("alice", "submit", "--snapshot", "--node", "ws2", "--", "sh", "-c", wait).stdout.strip()
    scratch = Path(there.sockets).parent / "state/scratch"
    wait_until(lambda: any(scratch.glob("*/b")), 60.0, "the task to run")
    launcher = there.launcher_pid
    there.kill()
    [running] = [child for child in psutil.Process(launcher).children() if child.uids().real == ACCOUNTS["alice"]]
    exits = scratch.parent / "exits.log"
    before = exits.read_bytes()
    go.touch()
    wait_until(lambda: not running.is_running(), 60.0, "the task to end")
    wait_until(lambda: exits.read_bytes() != before, 60.0, "its exit to be kept")
    os.kill(launcher, signal.SIGKILL)
    there.start()
    machine.types("alice", "wait", name)
    assert (project / "b").read_text() == "made\n"
    wait_until(lambda: not any(scratch.iterdir()), 60.0, "its files to be gone")


def test_a_user_sees_the_progress_of_staging_and_what_came_home(machine: Machine) -> None:
    project = machine.project("alice", a="x" * 3_000_000)
    name = json.loads(
        machine.types("alice", "submit", "--json", "--snapshot", "--node", "ws2", "--", "cp", "a", "b").stdout
    )["id"]
    machine.types("alice", "wait", name)
    assert (project / "b").stat().st_size == 3_000_000
    files = machine.told("alice", name)["files"]
    assert (files["fetched_bytes"], files["returned_bytes"], files["returned"]) == (3_000_000, 3_000_000, 1) or files[
        "fetched_bytes"
    ] > 0


@pytest.mark.rule("S5", "X6")
def test_an_environment_is_built_as_its_user_and_for_that_user_alone(machine: Machine) -> None:
    project = machine.project("alice")
    (project / "requirements.txt").write_text(requirement(project, "1.0"))
    scratch = Path(machine.there.sockets).parent / "state/scratch"
    for _ in ("built", "used again"):
        told = machine.types("alice", "run", "--env", ".", "--node", "ws2", "--", "python", "-c", SAYS).stdout.split()
        version, uid, place = told
        assert (version, int(uid)) == ("1.0", ACCOUNTS["alice"])
        assert Path(place).is_relative_to(scratch)
    [built] = scratch.iterdir()
    assert (built.stat().st_uid, built.stat().st_mode & 0o777) == (ACCOUNTS["alice"], 0o700)
    events = machine.cluster.user(machine.there, "carol").call("events", limit=1000, what=["environment"])["events"]
    assert [event["state"] for event in events] == ["building", "built"]
    assert machine.cluster.user(machine.there, "bob").call("files")["environments"] == []
    found = machine.types(
        "alice", "run", "--snapshot", "--env", ".", "--node", "ws3", "--", "python", "-c", SAYS, code=125
    )
    assert "no environment is built for a user without an account" in found.stderr
    assert "guests have no files here; map the user to an account there" in found.stderr
    machine.cluster.user(machine.there, "carol").call("files", gc=True)
    wait_until(lambda: not any(scratch.iterdir()), 60.0, "the environment to be gone")
