"""Every request of a client is answered, whatever is wrong with what it asks for and however long the answer is."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from peerload.agent.control.connection import REQUESTS_PENDING_MAX
from peerload.model.errors import BadRequest
from tests.integration.cluster import Agent, Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMBERS = 10_000


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=1)


def test_a_damaged_row_is_told_to_whoever_asks_for_it(agent: Agent) -> None:
    damaged, sound = agent.submit("true"), agent.submit("echo", "sound")
    agent.wait(damaged, sound)
    pid = agent.pid
    with contextlib.closing(sqlite3.connect(agent.state / "peerload.db", timeout=60)) as database, database:
        database.execute("UPDATE tasks SET exit = x'c1' WHERE counter = ?", (int(damaged.partition("/")[2]),))
    for verb, fields in (
        ("show", {"tasks": [damaged]}),
        ("wait", {"tasks": [sound, damaged]}),
        ("output", {"task": damaged, "follow": True}),
        ("signal", {"task": damaged, "signal": 15}),
    ):
        with pytest.raises(BadRequest, match=damaged) as caught:
            agent.call(verb, **fields)
        assert caught.value.code == "store"
    assert agent.output(sound) == (b"sound\n", b"")
    for verb in ("tasks", "history"):
        told = agent.call(verb)
        assert [task["id"] for task in told["tasks"]] == [sound]  # one bad row hides none of the others
        assert [row["id"] for row in told["damaged"]] == [damaged]
    listed = agent.cli("ls")
    assert listed.returncode == 0
    assert sound.encode() in listed.stdout
    assert damaged.encode() in listed.stderr
    assert agent.call("info")["pid"] == pid


@pytest.mark.long
def test_a_large_array_is_shown_whole(agent: Agent) -> None:
    agent.await_state(agent.submit("sleep", "600"), "running")
    array = agent.submit("true", array=[(1, MEMBERS, 1)])
    with agent.client() as client:
        shown = client.call("show", tasks=[array])["tasks"]
        listed = client.call("tasks")
    assert [task["id"] for task in shown] == [f"{array}.{index}" for index in range(1, MEMBERS + 1)]
    assert {len(task["history"]) for task in shown} == {1}
    assert (len(listed["tasks"]), listed["truncated"]) == (MEMBERS, True)
    typed = agent.cli("show", "--json", array)
    assert (typed.returncode, typed.stdout.count(b"\n")) == (0, MEMBERS)


@pytest.mark.rule("L3")
def test_one_client_may_leave_only_so_much_unanswered(agent: Agent) -> None:
    task = agent.submit("sleep", "600")
    more = 10
    with agent.client() as client:
        for _ in range(REQUESTS_PENDING_MAX + more):
            client.send("wait", tasks=[task])
        refused = [client.receive() for _ in range(more)]
        assert agent.call("info")["node"] == "n1"  # another is not held up
        agent.call("cancel", tasks=[task], force=True)
        ended = Counter(client.receive()[1] for _ in range(2 * REQUESTS_PENDING_MAX))
    assert {(kind, body["code"]) for _, kind, body in refused} == {("error", "slow-down")}
    assert ended == {"more": REQUESTS_PENDING_MAX, "ok": REQUESTS_PENDING_MAX}
