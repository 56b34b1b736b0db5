"""What has ended is told however long ago, page by page, and as a trace."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
from collections.abc import Iterator

import pytest

from tests.integration.cluster import Agent, Cluster

MEMBERS = 3000
YEAR_S = 365 * 86_400.0


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=1)


def test_tasks_that_ended_long_ago_are_told_and_exported(agent: Agent) -> None:
    old = agent.submit("sleep", "0.05", array=[(1, 3, 1)])
    agent.wait(old)
    with contextlib.closing(sqlite3.connect(agent.state / "peerload.db", timeout=60)) as database, database:
        database.execute(
            "UPDATE tasks SET submitted_at = submitted_at - ?1, started_at = started_at - ?1, ended_at = ended_at - ?1",
            (YEAR_S,),
        )
    failed = agent.submit("sh", "-c", "exit 3")
    missing = agent.submit("/no/such/program")
    agent.wait(failed, missing)
    assert len(agent.call("tasks")["tasks"]) == 2
    told = agent.call("history")
    assert [task["id"] for task in told["tasks"]] == [missing, failed, f"{old}.3", f"{old}.2", f"{old}.1"]
    assert [task["duration_s"] is None for task in told["tasks"]] == [True, False, False, False, False]
    assert told["tasks"][1]["exit_code"] == 3
    assert told["tasks"][4]["duration_s"] >= 0.05
    assert [task["id"] for task in agent.call("history", limit=2)["tasks"]] == [missing, failed]
    assert agent.call("history", limit=2)["truncated"] is True
    assert agent.call("history", limit=5)["truncated"] is False
    newest = agent.call("history", limit=4, oldest_first=True)
    assert [task["id"] for task in newest["tasks"]] == [f"{old}.2", f"{old}.3", failed, missing]
    assert newest["truncated"] is True
    assert f"{old}.1" not in agent.cli("history", "--since", "1d").stdout.decode()
    rows = list(csv.reader(io.StringIO(agent.cli("history", "--export", "-").stdout.decode())))
    assert rows[0] == ["arrival", "duration", "cpus", "gpus", "node"]
    assert [row[2:] for row in rows[1:]] == [["1", "0", "n1"]] * 4
    assert float(rows[1][0]) == 0.0
    assert float(rows[1][1]) >= 0.05
    assert float(rows[4][0]) == pytest.approx(YEAR_S, abs=60.0)


def test_a_long_history_comes_whole_and_each_task_once(agent: Agent) -> None:
    agent.call("drain")  # what has begun would end a moment after it is cancelled
    array = agent.submit("sleep", "600", array=[(1, MEMBERS, 1)])
    agent.call("cancel", tasks=[array])
    names = [f"{array}.{index}" for index in range(1, MEMBERS + 1)]
    everything = json.loads(agent.cli("history", "--json", "--limit", str(MEMBERS)).stdout)
    assert (sorted(task["id"] for task in everything["tasks"]), everything["truncated"]) == (sorted(names), False)
    oldest = agent.call("history", oldest_first=True, limit=None)["tasks"]
    assert [task["id"] for task in oldest] == names
