"""A database that is not what it was: the agent starts, says so, serves what it can, and gives no id twice."""

from __future__ import annotations

import contextlib
import os
import sqlite3

import pytest

from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until


def _held(agent: Agent, number: int) -> str:
    reply = agent.call("submit", token=f"token-of-{number}", spec=agent.cluster.spec("echo", f"{number}"), held=True)
    return str(reply["id"])


def test_a_damaged_task_keeps_nobody_from_starting() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=1)
        held = [_held(agent, number) for number in range(3)]
        agent.kill()
        with contextlib.closing(sqlite3.connect(agent.state / "peerload.db", timeout=60)) as connection:
            connection.execute("UPDATE tasks SET state = 'zombie' WHERE counter = 3")
            connection.commit()
        agent.start()
        assert "n1/3" in agent.log_end()
        assert [row["id"] for row in agent.call("tasks")["damaged"]] == ["n1/3"]
        assert b"n1/3" in agent.cli("ls").stderr
        shown = agent.cli("show", held[2])
        assert shown.returncode
        assert b"zombie" in shown.stderr
        wait_until(lambda: b"n1/3" in agent.cli("events", "--what", "store").stdout, what="an event of it")
        assert agent.cli("release", held[0], held[1]).returncode == 0
        assert agent.wait(held[0], held[1])[held[1]]["state"] == "done"
        assert agent.submit("true") == "n1/4"
        assert any("n1/3" in notice for notice in agent.call("info")["notices"])
        assert agent.database("SELECT state FROM tasks WHERE counter = 3") == [("zombie",)]


def test_a_database_that_was_lost_is_told_and_no_id_comes_again() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=1)
        assert agent.call("info")["notices"] == []
        agent.wait(agent.submit("echo", "1"))
        agent.kill()
        for suffix in ("", "-wal", "-shm"):
            (agent.state / f"peerload.db{suffix}").unlink(missing_ok=True)
        agent.start()
        (notice,) = agent.call("info")["notices"]
        assert notice in agent.log_end()
        assert agent.call("checkup")["lost"] == notice
        counter = int(agent.submit("true").partition("/")[2])
        assert counter > 1_000_000
        wait_until(lambda: b"lost" in agent.cli("events", "--what", "store").stdout, what="an event of it")
        assert agent.submit("true") == f"n1/{counter + 1}"
        agent.kill()
        agent.start()
        assert agent.call("info")["notices"] == []
        assert agent.submit("true") == f"n1/{counter + 2}"


def test_a_damaged_wal_is_told_and_no_id_comes_again() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=1)
        assert [_held(agent, number) for number in range(2)] == ["n1/1", "n1/2"]
        wal = agent.state / "peerload.db-wal"
        sound_bytes = wal.stat().st_size
        assert [_held(agent, number) for number in range(2, 5)] == ["n1/3", "n1/4", "n1/5"]
        store = agent.database("SELECT value FROM meta WHERE key = 'store_id'")
        agent.kill()
        os.truncate(wal, sound_bytes)
        agent.start()
        info = agent.call("info")
        (notice,) = info["notices"]
        assert "n1/3 to n1/5" in notice
        assert notice in agent.log_end()
        assert agent.database("SELECT value FROM meta WHERE key = 'store_id'") != store
        assert set(agent.states()) == {"n1/1", "n1/2"}
        assert b"n1/3 to n1/5" in agent.cli("events", "--what", "store").stdout
        number = int(agent.submit("true").partition("/")[2])
        assert number > 5
        assert agent.submit("true") == f"n1/{number + 1}"


@pytest.mark.long
def test_a_task_that_an_older_copy_knows_as_held_runs_again_with_an_output_of_its_own() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=1, lease_s=1)
        task = _held(agent, 1)
        agent.kill()
        copied = {path: path.read_bytes() for path in agent.state.glob("peerload.db*")}
        agent.start()
        agent.cli("release", task)
        agent.wait(task)
        assert agent.show(task)["attempt"] == 1
        agent.kill()
        for path in agent.state.glob("peerload.db*"):
            path.unlink()
        for path, content in copied.items():
            path.write_bytes(content)
        agent.start()
        assert agent.show(task)["state"] == "held"
        agent.cli("release", task)
        assert agent.wait(task)[task]["state"] == "done"
        assert agent.output(task) == (b"1\n", b"")
        assert agent.show(task)["attempt"] > 1
