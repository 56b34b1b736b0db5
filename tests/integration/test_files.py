"""Files travel between agents whose directories have nothing in common."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload import AsyncClient, Client, Executor
from peerload.agent.files.transfer import PIECE_BYTES
from peerload.model.errors import StagingFailed
from peerload.model.metrics import FILES_FETCHED_BYTES, FILES_SERVED_BYTES
from tests.integration import forks
from tests.integration.cluster import Agent, Cluster, program
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.client.operations import Ended


class User:
    """Somebody who stands in a directory and types commands for the first of one or two agents."""

    def __init__(self, cluster: Cluster, agents: list[Agent], directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.here, self.there = agents[0], agents[-1]
        self._environment = {
            **cluster.environment,
            "PEERLOAD_SOCKET": self.here.socket,
            "XDG_CACHE_HOME": str(directory.parent / "cache"),
        }

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        how: dict[str, Any] = {"cwd": self.directory, "env": self._environment, "stdin": subprocess.DEVNULL}
        done = forks.run([*program(), *words], program(), 110, **how)
        return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())

    def task(self, name: str = "@") -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.types("show", "--json", name).stdout)
        return shown

    def files(self) -> dict[str, str]:
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Cluster, list[Agent]]]:
    with Cluster() as cluster:
        yield cluster, cluster.linked(2, slots=4)


@pytest.fixture
def user(pair: tuple[Cluster, list[Agent]], tmp_path: Path) -> User:
    directory = tmp_path / "project"
    (directory / "src").mkdir(parents=True)
    (directory / "src/a").write_text("one\n")
    return User(*pair, directory)


@pytest.mark.parametrize("where", ["n1", "n2"])
def test_inputs_arrive_and_outputs_come_home_on_either_node_alike(user: User, where: str) -> None:
    done = user.types("run", "--node", where, "--in", "src/a", "--out", "out/*", "sh", "-c", "pwd; cat src/a > out/b")
    assert done.returncode == 0, done.stderr
    assert str(user.directory) not in done.stdout
    assert user.files() == {"out/b": "one\n", "src/a": "one\n"}
    files = user.task()["files"]
    assert (files["count"], files["bytes"], files["returned"], files["returned_bytes"]) == (1, 4, 1, 4)


def test_a_snapshot_is_of_the_moment_of_its_submission(user: User) -> None:
    (user.directory / ".gitignore").write_text("*.o\n")
    (user.directory / "x.o").write_text("object")
    command = ("sh", "-c", "ls -A; cat src/a; echo two >> src/a; mkdir out; echo r > out/r")
    submitted = user.types("submit", "--held", "--snapshot", "--node", "n2", *command)
    task = submitted.stdout.strip()
    (user.directory / "src/a").write_text("changed by the user\n")
    user.types("release", task)
    assert user.types("wait", task).returncode == 0
    assert user.types("logs", task).stdout == ".gitignore\nsrc\none\n"
    number = task.partition("/")[2]
    assert user.files() == {
        ".gitignore": "*.o\n",
        "out/r": "r\n",
        "src/a": "changed by the user\n",
        f"src/a.peerload-{number}": "one\ntwo\n",
        "x.o": "object",
    }
    assert user.task(task)["files"]["kept_beside"] == 1
    (ended,) = (one for one in json.loads(user.types("history", "--json").stdout)["tasks"] if one["id"] == task)
    assert ended["files"] == user.task(task)["files"]
    assert happened(user.there, task) == ["staged"]
    assert happened(user.here, task) == ["returned"]
    told = user.here.call("events", limit=1000, what=["files"], tasks=[task])["events"][-1]["reason"]
    assert told.endswith(": src/a")


def happened(agent: Agent, task: str) -> list[str]:
    """What the events of an agent say of the files of a task."""
    told = agent.call("events", limit=1000, what=["files"])["events"]
    return [event["state"] for event in told if event["task"] == task]


@pytest.mark.parametrize("where", ["n1", "n2"])
def test_an_output_that_is_not_made_is_no_success_and_the_others_come_home(user: User, where: str) -> None:
    done = user.types("run", "--node", where, "--out", "x*", "--out", "made", "sh", "-c", "echo one > made")
    assert done.returncode == 125
    shown = user.task()
    assert (shown["state"], shown["exit_code"]) == ("failed", 125)
    assert shown["reason"].startswith("staging: ")
    for told in (shown["reason"], done.stderr, user.types("why", "@").stdout):
        assert "--out x*" in told
    assert user.files() == {"made": "one\n", "src/a": "one\n"}


@pytest.mark.parametrize("where", ["n1", "n2"])
def test_only_the_last_attempt_of_a_retried_task_brings_outputs(user: User, where: str) -> None:
    flags = ("--node", where, "--retries", "1", "--out", "out/*")
    done = user.types("run", *flags, "-s", "touch out/$PEERLOAD_ATTEMPT; test $PEERLOAD_ATTEMPT = 2")
    assert done.returncode == 0, done.stderr
    assert user.files() == {"out/2": "", "src/a": "one\n"}
    assert user.types("run", *flags, "-s", "touch out/failed-$PEERLOAD_ATTEMPT; exit 7").returncode == 7
    assert user.files() == {"out/2": "", "out/failed-2": "", "src/a": "one\n"}
    lacks = "touch out/lacks-$PEERLOAD_ATTEMPT; test $PEERLOAD_ATTEMPT = 1 || touch made"
    assert user.types("run", *flags, "--out", "made", "-s", lacks).returncode == 0
    assert user.files() == {"made": "", "out/2": "", "out/failed-2": "", "out/lacks-2": "", "src/a": "one\n"}


def test_an_output_that_cannot_be_placed_is_no_success_and_is_named(user: User) -> None:
    refused = user.types("run", "--out", "src/a/*", "true")
    assert (refused.returncode, "src/a" in refused.stderr) == (125, True)
    script = 'echo x > out/y; printf "a file is in the way" > "$0"'
    done = user.types("run", "--node", "n2", "--out", "out/*", "sh", "-c", script, str(user.directory / "out"))
    assert done.returncode == 125
    assert "out/y" in user.task()["reason"]
    assert user.files()["out"] == "a file is in the way"


def test_members_of_an_array_share_one_snapshot_that_crosses_once(user: User) -> None:
    (user.directory / "large").write_bytes(os.urandom(3 << 20))
    done = user.types(
        "map", "--node", "n2", "--snapshot", "cksum < large > out/{}", ":::", *"abcdefgh", "--out", "out/*"
    )
    assert done.returncode == 0, done.stderr
    sums = {path.read_text() for path in (user.directory / "out").iterdir()}
    assert len(sums) == 1
    fetched = [user.task(f"@.{member}")["files"]["fetched_bytes"] for member in range(1, 9)]
    assert 3 << 20 <= sum(fetched) < 4 << 20
    assert len(list((user.directory / "out").iterdir())) == 8


def test_a_task_that_is_cancelled_leaves_nothing_on_its_node(user: User) -> None:
    submitted = user.types("submit", "--node", "n2", "--in", "src", "sleep", "1000")
    task = submitted.stdout.strip()
    scratch, notes = user.there.state / "scratch", user.there.state / "files/attempts"
    wait_until(lambda: any(notes.iterdir()), what="the attempt to be there")
    user.types("cancel", "--force", task)
    wait_until(lambda: not any(notes.iterdir()) and not any(scratch.iterdir()), what="its files to be gone")


def test_what_cannot_travel_is_refused_before_anything_is_queued(user: User) -> None:
    os.mkfifo(user.directory / "pipe")
    done = user.types("submit", "--snapshot", "true")
    assert done.returncode != 0
    assert "pipe" in done.stderr
    (user.directory / "pipe").unlink()
    assert user.types("submit", "--in", "../other", "true").returncode != 0
    listed = user.types("run", "--snapshot", "--dry-run", "--json", "true")
    assert json.loads(listed.stdout)["files_bytes"] == 4
    assert "src/a (4 B)" in user.types("map", "--snapshot", "--dry-run", "true", ":::", "1").stderr


def test_the_cache_is_shown_and_emptied(user: User) -> None:
    assert user.types("run", "--in", "src", "true").returncode == 0
    kept = json.loads(user.types("files", "--json").stdout)
    assert kept["snapshots"]
    left = json.loads(user.types("files", "--gc", "--json").stdout)
    assert left["removed_bytes"] > 0
    assert user.types("run", "--in", "src", "cat", "src/a").stdout == "one\n"


def test_what_a_task_needs_stays_in_the_caches_until_the_task_has_ended(user: User, tmp_path: Path) -> None:
    go = tmp_path / "go"
    (user.directory / "b").write_text("two\n")
    command = ("sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; cat src/a")
    running = user.types("submit", "--node", "n2", "--in", "src", *command).stdout.strip()
    held = user.types("submit", "--held", "--node", "n2", "--in", "b", "cat", "b").stdout.strip()
    user.here.await_state(running, "running", timeout_s=60.0)
    for agent, count in ((user.here, 2), (user.there, 1)):
        agent.call("files", gc=True)
        assert [one["in_use"] for one in agent.call("files")["snapshots"]] == [True] * count
    user.types("release", held)
    assert user.types("wait", held).returncode == 0
    assert user.types("logs", held).stdout == "two\n"
    go.touch()
    assert user.types("wait", running).returncode == 0

    def is_empty(agent: Agent) -> bool:
        agent.call("files", gc=True)
        return not agent.call("files")["snapshots"]

    for agent in (user.here, user.there):
        wait_until(functools.partial(is_empty, agent), 60.0, "nothing to be in use any more")


def test_files_travel_with_tasks_of_python_programs(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user.directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(user.directory.parent / "cache"))
    client = Client(user.here.socket)
    task = client.submit(["sh", "-c", "cat src/a > b"], node="n2", in_=["src/a"], out=["b"])
    assert task.wait(60).succeeded
    array = client.submit_array("cat src/a > m$PEERLOAD_ARRAY_INDEX", [1, 2], shell=True, node="n2", snapshot=True)
    assert all(ended.succeeded and ended.kept_beside == 0 for ended in client.wait([array]))
    ended = asyncio.run(awaited(user.here.socket))
    assert (ended.exit_code, ended.reason.partition(":")[0]) == (125, "staging")
    assert user.files() == {"b": "one\n", "m1": "one\n", "m2": "one\n", "src/a": "one\n"}
    with pytest.raises(StagingFailed, match="outside"):
        client.submit(["true"], in_=["/etc/passwd"])
    with Executor(user.here.socket, node="n2", in_=["src"], out=["made"]) as executor:
        assert executor.submit(lambda: Path("made").write_text(Path("src/a").read_text())).result(60) == 4
        with pytest.raises(StagingFailed, match="made"):
            executor.submit(lambda: 1).result(60)
    assert (user.directory / "made").read_text() == "one\n"


async def awaited(socket: str) -> Ended:
    return await (await AsyncClient(socket).submit(["true"], node="n2", snapshot=True, out=["none"])).wait(60)


# -- snapshot = "auto" ------------------------------------------------------------------------------------------------


class Apart(Agent):
    """An agent for which a directory is another, empty one."""

    hidden = ""

    def words(self) -> list[str]:
        mounts = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
        return [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            mounts,
            "sh",
            self.hidden,
            *super().words(),
        ]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    directory = tmp_path_factory.mktemp("apart") / "project"
    (directory / "src").mkdir(parents=True)
    (directory / "src/a").write_text("one\n")
    config = directory.parent / "config.toml"
    config.write_text('[files]\nsnapshot = "auto"\n')
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    with Cluster() as cluster:
        here = cluster.agent("n1", "--config", str(config))
        there = Apart(cluster, "n2", ["--peer", here.listen], None)
        there.hidden = str(directory)
        cluster.agents["n2"] = there
        there.start()
        cluster.await_acquainted([here, there])
        yield User(cluster, [here, there], directory)


def test_a_directory_that_another_node_does_not_have_travels_unasked(
    apart: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = apart.types("run", "--node", "n2", "sh", "-c", "pwd; cat src/a; echo two > b")
    assert ran.stdout.splitlines()[1:] == ["one"], ran.stderr
    assert not ran.stdout.startswith(str(apart.directory))
    assert apart.types("map", "-k", "--node", "n2", "cat src/a; echo {} > {}", ":::", "x", "y").stdout == "one\none\n"
    monkeypatch.chdir(apart.directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(apart.directory.parent / "cache"))
    assert Client(apart.here.socket).submit(["cat", "src/a"], node="n2").wait(60).succeeded
    assert asyncio.run(read_there(apart.here.socket)) == b"one\n"
    with Executor(apart.here.socket, node="n2") as executor:
        read = [executor.submit(lambda: Path("src/a").read_text()) for _ in range(3)]
        assert {future.result(60) for future in read} == {"one\n"}
    assert set(apart.files()) == {"b", "src/a", "x", "y"}


async def read_there(socket: str) -> bytes:
    task = await AsyncClient(socket).submit(["cat", "src/a"], node="n2")
    await task.wait(60)
    return (await task.output()).stdout


def test_a_directory_that_all_nodes_have_does_not_travel(apart: User, tmp_path: Path) -> None:
    shared = User(apart.cluster, [apart.here, apart.there], tmp_path)
    assert shared.types("run", "--node", "n2", "pwd").stdout == f"{tmp_path}\n"
    assert apart.types("run", "--node", "n1", "pwd").stdout == f"{apart.directory}\n"
    assert shared.types("run", "pwd").stdout == f"{tmp_path}\n"


def test_a_directory_that_is_too_large_to_travel_unasked_stays(apart: User) -> None:
    with (apart.directory / "large").open("wb") as file:
        file.truncate(2 << 30)
    ran = apart.types("run", "--local", "pwd")
    assert (ran.stdout, ran.stderr) == (f"{apart.directory}\n", "")

    def is_told() -> bool:
        ran = apart.types("run", "pwd")  # n2 may be too slow to answer before the first one is queued
        assert ran.stdout == f"{apart.directory}\n"
        return Says.DOES_NOT_TRAVEL() in ran.stderr

    wait_until(is_told, what="the command line to say that the directory stays")
    (apart.directory / "large").unlink()


def test_a_node_without_the_directory_is_named_at_once_and_by_every_view(apart: User) -> None:
    here = apart.cluster.agent("n3", "--peer", apart.here.listen)
    apart.cluster.await_acquainted([apart.here, apart.there, here])
    asked = User(apart.cluster, [here, apart.there], apart.directory)
    for words in (("submit", "true"), ("run", "true"), ("map", "true {}", ":::", "x")):
        asked.directory = apart.directory / words[0]
        asked.directory.mkdir()

        def is_named(words: tuple[str, ...] = words) -> bool:
            done = asked.types(*words)  # n2 may be too slow to answer before the first one is queued
            assert done.returncode == 0, done.stderr
            assert ("cannot run on n2" in done.stderr) == ("--snapshot" in done.stderr)
            return f"cannot run on n2: no directory {asked.directory} there" in done.stderr

        wait_until(is_named, what=f"{words} to name n2")
        assert is_named() == (words[0] == "map"), "submit and run say it once for a directory"
    waits = asked.types("submit", "-x", "n1", "-x", "n3", "--wait-for-node", "true").stdout.strip()
    for view in (("nodes", "--for", "@", "--json"), ("why", "--json", "@")):
        (told,) = (one for one in json.loads(asked.types(*view).stdout)["nodes"] if one["node"] == "n2")
        assert told["reason"] == f"no directory {asked.directory} there"
    asked.types("cancel", waits)


def test_what_is_damaged_in_the_cache_of_a_node_is_fetched_again(user: User) -> None:
    content = os.urandom(100_000).hex()
    (user.directory / "src/data").write_text(content)
    assert user.types("run", "--node", "n2", "--in", "src", "true").returncode == 0
    for pack in (user.there.state / "files/blocks").rglob("*"):
        if pack.is_file():
            pack.write_bytes(bytes(pack.stat().st_size))
    before = user.there.counters()[FILES_FETCHED_BYTES]
    assert user.types("run", "--node", "n2", "--in", "src", "cat", "src/data").stdout == content
    assert user.there.counters()[FILES_FETCHED_BYTES] - before >= 100_000


def test_files_that_a_cache_has_no_room_for_are_refused_at_submit_or_leave_the_task_with_a_reason(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "large").write_bytes(os.urandom(3 << 20))
    config = tmp_path / "config.toml"
    config.write_text('[files]\ncache = "2MiB"\n')
    with Cluster() as cluster:
        small = cluster.agent("n1", "--config", str(config))
        large = cluster.agent("n2", "--peer", small.listen)
        cluster.await_acquainted([small, large])
        refused = User(cluster, [small], directory).types("submit", "--in", "large", "true")
        assert (refused.returncode, refused.stdout) == (125, "")
        assert "the file cache is full: 0 of 2097152 bytes are in use, and 3145" in refused.stderr
        assert "peerload files" in refused.stderr
        assert small.states() == {}
        user = User(cluster, [large], directory)
        task = user.types("submit", "--node", "n1", "--in", "large", "true").stdout.strip()

        def reasons() -> list[str]:
            return [one["reason"] for one in json.loads(user.types("why", "--json", task).stdout)["nodes"]]

        wait_until(lambda: any("no room in its cache" in reason for reason in reasons()), 60.0, "the cache to be named")
        assert user.task(task)["state"] == "queued"
        user.types("cancel", task)


def test_outputs_that_are_larger_than_the_caches_come_home_all_the_same(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[files]\ncache = "2MiB"\n')
    directory = tmp_path / "project"
    directory.mkdir()
    with Cluster() as cluster:
        agents = [cluster.agent("n1", "--config", str(config))]
        agents.append(cluster.agent("n2", "--config", str(config), "--peer", agents[0].listen))
        cluster.await_acquainted(agents)
        user = User(cluster, agents, directory)
        for node in ("n1", "n2"):
            done = user.types(
                "run", "--node", node, "--out", node, "sh", "-c", f"head -c 5000000 /dev/urandom > {node}"
            )
            assert done.returncode == 0, done.stderr
            assert (directory / node).stat().st_size == 5_000_000
        for agent in agents:
            wait_until(lambda agent=agent: agent.call("files")["size_bytes"] <= 2 << 20, what="the cache to shrink")  # type: ignore[misc]


@pytest.mark.long
def test_a_hundred_members_of_one_snapshot_on_four_nodes_have_each_byte_cross_once_to_each(tmp_path: Path) -> None:
    directory, met = tmp_path / "project", tmp_path / "met"
    directory.mkdir()
    met.mkdir()
    (directory / "large").write_bytes(os.urandom(5 << 20))
    # members keep their slots until each node has one: home does not run all of them itself
    meet = f"touch {met}/$PEERLOAD_NODE; until [ $(ls {met} | wc -l) = 4 ]; do sleep 0.1; done"
    with Cluster() as cluster:
        agents = cluster.linked(4, slots=4)
        user = User(cluster, agents[:2], directory)
        done = user.types("map", "--snapshot", f"{meet}; cksum < large; : {{}}", ":::", *map(str, range(100)))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert (len(lines), len(set(lines))) == (100, 1)
        size = user.here.call("files")["size_bytes"]
        assert 5 << 20 < size < 6 << 20
        fetched = [agent.counters().get(FILES_FETCHED_BYTES, 0) for agent in agents]
        assert fetched == [0, size, size, size]
        assert sum(agent.counters().get(FILES_SERVED_BYTES, 0) for agent in agents) == 3 * size


@pytest.mark.long
def test_an_agent_that_is_killed_while_files_come_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    with (directory / "large").open("wb") as file:
        for _ in range(256):
            file.write(os.urandom(1 << 20))
    with Cluster() as cluster:
        here, there = cluster.linked(2, slots=1)
        user = User(cluster, [here, there], directory)
        task = user.types("submit", "--node", "n2", "--in", "large", "cksum", "large").stdout.strip()
        size = here.call("files")["size_bytes"]

        def fetched() -> int:
            return there.counters().get(FILES_FETCHED_BYTES, 0)

        wait_until(lambda: fetched() > 0, 60.0, "the first blocks")
        there.kill()
        there.start()
        assert user.types("wait", task).returncode == 0
        expected = subprocess.run(["cksum", "large"], cwd=directory, capture_output=True, check=True, text=True)
        assert user.types("logs", task).stdout == expected.stdout
        # what was on its way when it died is all that is sent again
        assert fetched() < size
        assert here.counters()[FILES_SERVED_BYTES] <= size + 16 * PIECE_BYTES
