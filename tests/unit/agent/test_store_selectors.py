"""Selectors in the store: references, and whose tasks are meant."""

from __future__ import annotations

import asyncio
import collections
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from peerload.agent.control import authorization
from peerload.agent.control.authorization import Principal, Quotas
from peerload.agent.control.task_ids import TaskIds
from peerload.agent.requests import task_queries
from peerload.agent.requests.task_queries import TaskQueries
from peerload.agent.store.reader import REF_CHARS_MAX, SINGLE_MAX, Criteria, references
from peerload.agent.store.schema import TaskSelection
from peerload.agent.views import task as views
from peerload.model.actions import PutSubmission
from peerload.model.config import AgentConfig
from peerload.model.errors import BadRequest, NoSuchTask, SlowDown
from peerload.model.events import Submission
from peerload.model.task import SINGLE, SubmitOptions, TaskState
from peerload.wire import control
from tests.unit.agent.test_store import NOW, SPEC, Opened, put, uid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALICE, BOB, ROOT = (
    Principal("20001", "alice", 20001),
    Principal("20002", "bob", 20002),
    Principal("0", "root", 0, is_admin=True),
)


def kept(counter: int, owner: int = -1, indices: tuple[int, ...] = (), **terms: Any) -> PutSubmission:
    told = SubmitOptions(owner=owner, **terms)
    return PutSubmission(Submission(counter, f"token-{counter}", b"d" * 32, SPEC, indices, NOW, terms=told))


@pytest.fixture(name="parts")
def fixture_parts(tmp_path: Path) -> Iterator[Any]:
    with Opened(tmp_path / "db") as opened:
        opened.keep(kept(1, 20001, tags=("p=x",)), put(1), kept(2, 20002, tags=("p=x",)), put(2))
        opened.keep(kept(3, 20001, (1, 2, 3, 5)), put(3, TaskState.LEASED, 1, attempt=1, node="ws2"))
        opened.keep(
            *(put(3, TaskState.LEASED, 2, attempt=1), put(3, TaskState.CANCELLED, 3, ended_at=NOW), put(3, member=5))
        )
        running = SimpleNamespace(record=SimpleNamespace(attempt=1), running_at=NOW)
        home = SimpleNamespace(tasks={uid(3002): running})
        node = SimpleNamespace(home=home, state=SimpleNamespace(node="ws1"))
        yield SimpleNamespace(store=opened.store, node=node)


async def _now(store: Any) -> Any:
    return store


def answer(parts: Any, caller: Principal = ROOT, **asked: Any) -> dict[str, Any]:
    told: dict[str, Any] = {}
    connection: Any = SimpleNamespace(caller=caller, ok=lambda _number, body: told.update(body))
    unused: Any = None
    reads: Any = SimpleNamespace(readable=lambda _connection: _now(parts.store))
    lists = TaskQueries(reads, TaskIds(parts.store, "ws1"), unused, unused, unused, parts.node, unused)
    asyncio.run(lists.select(connection, control.Select(**asked)))
    return told


def test_a_selector_matches_what_the_asker_may_see(parts: Any) -> None:
    assert answer(parts, ALICE, tags=("p=x",))["selected"] == ["ws1/1"]
    assert answer(parts, BOB)["selected"] == ["ws1/2"]
    assert answer(parts, BOB, all_users=True)["selected"] == ["ws1/2"]
    assert answer(parts, ROOT)["selected"] == []
    assert answer(parts, ROOT, all_users=True, tags=("p",))["selected"] == ["ws1/1", "ws1/2"]
    assert answer(parts, ROOT, tasks=("3",), states=("queued",))["selected"] == ["ws1/3.5"]
    assert answer(parts, BOB, tasks=("3",))["selected"] == []


@pytest.mark.rule("L3")
def test_lists_that_their_client_does_not_read_have_a_bound(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization, "WAITED_MAX", 30)  # a list has 5 tasks
    monkeypatch.setattr(task_queries, "task_row", lambda *_: {"state": "held"})

    async def story() -> None:
        sent, read, unused = asyncio.Event(), asyncio.Event(), None

        async def stream(*_: object) -> None:
            sent.set()
            await read.wait()

        connection: Any = SimpleNamespace(caller=ROOT, ok=lambda *_: None, stream=stream)
        reads: Any = SimpleNamespace(readable=lambda _connection: _now(parts.store))
        access: Any = SimpleNamespace(store=lambda _caller: parts.store)
        parts.node.home.unfinished = dict
        config = AgentConfig(node="ws1", state="s", socket="k", mode="system")
        quotas = Quotas(config, parts.store, unused, clock=lambda: 0.0)  # type: ignore[arg-type]
        ids: Any = TaskIds(parts.store, "ws1")
        lists = TaskQueries(reads, ids, access, quotas, unused, parts.node, unused)  # type: ignore[arg-type]
        wanted = control.TasksRequest(id=1, limit=2001)
        held = asyncio.create_task(lists.tasks(connection, wanted))
        await sent.wait()
        with pytest.raises(SlowDown):
            async with asyncio.timeout(30.0):
                await lists.tasks(connection, wanted)
        read.set()
        await held
        await lists.tasks(connection, wanted)

    asyncio.run(story())


@pytest.mark.parametrize("kind", [control.TasksRequest, control.History])
def test_a_list_of_own_tasks_has_no_others_for_an_administrator_either(parts: Any, kind: Any) -> None:
    unused: Any = None
    access: Any = SimpleNamespace(store=lambda _: parts.store)
    lists = TaskQueries(SimpleNamespace(store=parts.store), unused, access, unused, unused, parts.node, unused)  # type: ignore[arg-type]
    admin = Principal("20001", "alice", 20001, is_admin=True)

    def counters(request: Any) -> set[int]:
        found, _ = lists._seen(admin, request).listed(0.0, 100)
        return {row.first[0] for row in found}

    assert counters(kind()) == {1, 2, 3}
    assert counters(kind(own=True)) == {1, 3}


def test_members_that_were_on_no_node_are_not_said_to_be_on_that_of_another(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(kept(1, indices=(1, 2)), put(1, TaskState.CANCELLED, 1, ended_at=NOW, node="ws2"))
        opened.keep(put(1, TaskState.CANCELLED, 2, ended_at=NOW), kept(2, indices=(1, 2)))
        opened.keep(*(put(2, TaskState.DONE, member, ended_at=NOW, node="ws2") for member in (1, 2)))
        found, _ = opened.store.listed_in_thread(opened.store.path, 0.0, 9, Criteria(), gathered=True)
        first: dict[str, object] = dict.fromkeys(("exit_code", "signal", "reason")) | {"state": "done", "node": "ws2"}
        assert [(row.nodes, views.array_row(first, row)["node"]) for row in found] == [(1, None), (1, "ws2")]


def test_running_and_leased_are_told_apart(parts: Any) -> None:
    assert answer(parts, ALICE, states=("running",)) == {"selected": ["ws1/3.2"], "count": 1, "states": {"running": 1}}
    assert answer(parts, ALICE, states=("leased",))["selected"] == ["ws1/3.1"]
    assert answer(parts, ALICE, states=("running",), node="ws9")["selected"] == []
    whole = answer(parts, ALICE, tasks=("@",))
    assert whole["selected"] == ["ws1/3"]
    assert collections.Counter(whole["states"]) == {"running": 1, "leased": 1, "cancelled": 1, "queued": 1}


def test_one_that_was_seen_running_runs_no_more_once_it_is_another_attempt(parts: Any) -> None:
    parts.node.home.tasks[uid(3002)].record.attempt = 2
    assert answer(parts, ALICE, states=("running",))["selected"] == []
    assert answer(parts, ALICE, states=("leased",))["selected"] == ["ws1/3.1-2"]


def test_a_group_and_the_name_of_a_program_without_its_directory(tmp_path: Path) -> None:
    long = msgspec.structs.replace(SPEC, argv=(b"/usr/bin/train.py", b"x"))
    with Opened(tmp_path / "db") as opened:
        opened.keep(kept(1, group="gpu"), put(1), kept(2), put(2), kept(3, group="gpus"), put(3))
        submitted = Submission(4, "token-4", b"d" * 32, long, (), NOW, terms=SubmitOptions(group="gpu"))
        opened.keep(PutSubmission(submitted), put(4))

        def found(**asked: Any) -> list[int]:
            return sorted(opened.store.selected_in_thread(opened.store.path, Criteria(**asked)).members)

        assert found(group="gpu") == [1, 4]
        assert found(name="train.py") == [4]
        assert found(name="train*", group="gpu") == [4]
        assert found(name="true", group="gpu") == [1]
        assert found(name="/usr/bin/train.py") == []


def test_names_of_ranges(parts: Any) -> None:
    names = TaskIds(parts.store, "ws1")
    assert names.whole_id("3.9,1-4,2,4-5") == "ws1/3.1-5,9"
    assert names.parse("@~1").counter == 2
    assert not names.parse("3.7-7").is_range
    with pytest.raises(NoSuchTask):
        names.parse("@~3")
    for word in ("3.4-2", "3.", "3.1-", "@~", "@~x", "@3", "all"):
        with pytest.raises(BadRequest):
            names.parse(word)
    with pytest.raises(BadRequest):
        names.resolve("3.1-2")
    with pytest.raises(NoSuchTask):
        asyncio.run(names.known_ids(["3.6-9"]))


def test_references_are_short_and_name_no_other() -> None:
    sparse = list(range(0, 20_000, 2))
    found = references("ws1", {7: sparse, 8: [SINGLE], 9: [1, 2]}, {7: 20_000, 8: 0, 9: 2})
    assert found[-2:] == ["ws1/8", "ws1/9"]
    assert all(len(ref) <= control.REF_CHARS_MAX for ref in found)
    assert len(found) < 3 + 20_000 * 6 // REF_CHARS_MAX
    members = [int(one) for ref in found[:-2] for one in ref.partition(".")[2].split(",")]
    assert members == sparse


def test_a_name_that_is_no_glob_is_taken_as_it_is(parts: Any) -> None:
    store, path = parts.store, parts.store.path
    assert store.selected_in_thread(path, Criteria(name="true")).members == {1: [SINGLE], 2: [SINGLE], 3: [3, 5]}
    assert store.selected_in_thread(path, Criteria(name="tru")).members == {}


def test_members_in_one_state_are_one_row_of_a_list(parts: Any) -> None:
    store, path = parts.store, parts.store.path
    found, truncated = store.listed_in_thread(path, 0.0, 4, Criteria(meant=(TaskSelection(3),)), gathered=True)
    assert not truncated
    assert [(row.first[1], row.spans, row.count) for row in found] == [
        (1, (), 1), (2, (), 1), (3, ((3, 3),), 1), (5, ((5, 5),), 1)
    ]  # fmt: skip


def test_a_large_array_leaves_room_for_others(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        members = tuple(range(1, 400))
        opened.keep(kept(1, indices=members), *(put(1, member=member) for member in members if member % 100))
        opened.keep(*(put(1, TaskState.DONE, member, ended_at=NOW, node=f"n{member}") for member in (100, 200, 300)))
        opened.keep(kept(2), put(2), kept(3), put(3, TaskState.FAILED, ended_at=NOW, node="n1"))
        store, path = opened.store, opened.store.path
        found, truncated = store.listed_in_thread(path, 0.0, 4, Criteria(), gathered=True)
        assert not truncated
        assert [(row.first[:2], row.spans, row.count, row.nodes) for row in found] == [
            ((1, 1), ((1, 99), (101, 199), (201, 299), (301, 399)), 396, 0),
            ((1, 100), ((100, 100), (200, 200), (300, 300)), 3, 3),
            ((2, SINGLE), ((SINGLE, SINGLE),), 1, 0),
            ((3, SINGLE), (), 1, 0),
        ]
        assert [row.count for row in store.behind(path, found[:1])] == [395]
        assert store.listed_in_thread(path, 0.0, 3, Criteria(), gathered=True)[1]
        assert store.listed_in_thread(path, 0.0, 200, Criteria())[1]


def test_many_failed_members_are_one_row(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(kept(1, indices=tuple(range(1, 301))), kept(2, indices=tuple(range(1, SINGLE_MAX + 1))), kept(3))
        for counter, members in ((1, range(1, 301)), (2, range(1, SINGLE_MAX + 1))):
            told = [put(counter, TaskState.FAILED, member, ended_at=NOW + member, node="n1") for member in members]
            opened.keep(*told)
        opened.keep(put(3, TaskState.FAILED, ended_at=NOW, node="n1"))
        store, path = opened.store, opened.store.path
        for criteria in (Criteria(), Criteria(states=("failed",))):
            found, truncated = store.listed_in_thread(path, 0.0, 200, criteria, gathered=True)
            assert not truncated
            assert [row.count for row in found] == [300, *[1] * SINGLE_MAX, 1]
            assert found[0].spans == ((1, 300),)
            assert [row.count for row in store.behind(path, found[:1])] == [299]
        few = Criteria(meant=(TaskSelection(1, ((281, 300),)),))
        assert len(store.listed_in_thread(path, 0.0, 200, few, gathered=True)[0]) == SINGLE_MAX
