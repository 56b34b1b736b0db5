"""How much one user may have of an agent that serves many, and one other node of any."""

from __future__ import annotations

import asyncio
import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.control.principal import Principal
from peerload.agent.control.quotas import (
    WAITED_BY_NODE_MAX,
    WAITED_MAX,
    Quotas,
    TokenBucket,
    WaitQuota,
    waits_for,
)
from peerload.agent.store.reader import StoreReader
from peerload.model.config import AgentConfig
from peerload.model.errors import DiskFull, SlowDown
from peerload.wire import control
from tests.each import each


def test_a_rate_is_granted_again_as_time_passes() -> None:
    rate = TokenBucket(10.0, 0.0)
    assert [rate.take(1, 0.0) for _ in range(11)] == [0.0] * 10 + [0.1]
    assert rate.take(1, 0.11) == 0.0
    assert rate.take(35, 5.0) == 0.0, "more at once than a second grants is owed"
    assert rate.take(1, 5.0) == pytest.approx(2.6)
    assert rate.take(1, 7.7) == 0.0


def quotas(**settings: Any) -> tuple[Quotas, Any]:
    has = SimpleNamespace(unfinished=0, output_bytes=0)
    store = SimpleNamespace(unfinished_of=lambda _: has.unfinished, output_bytes_of_owner=lambda _: has.output_bytes)
    config = AgentConfig(node="n", state="s", socket="k", mode="system", **settings)
    parts: Any = SimpleNamespace(config=config, store=store)
    return Quotas(parts), has


@pytest.mark.rule("L3", "L4")
def test_what_one_user_has_too_much_of_is_no_others_loss() -> None:
    limits, _ = quotas(user_connections_max=2, user_tasks_max=5, user_submits_per_s=10.0, user_requests_per_s=3.0)
    assert [limits.connected("a") is None for _ in range(3)] == [True, True, False]
    limits.hung_up("a")
    assert limits.connected("a") is None
    assert limits.connected("b") is None
    limits.submitted("a", 5)
    with pytest.raises(SlowDown):
        limits.submitted("a", 1)
    limits.submitted("b", 5)
    assert [bool(limits.requested("a")) for _ in range(4)] == [False, False, False, True]
    assert not limits.requested("b")


@pytest.mark.rule("L3")
def test_what_takes_long_takes_more_tokens_of_its_own_user() -> None:
    limits, _ = quotas(user_requests_per_s=1_000.0)
    assert [bool(limits.requested("a", 250)) for _ in range(6)] == [False] * 4 + [True, True]
    assert not limits.requested("b", 1_000_000), "however long, it may be asked"
    assert 0.0 < limits.requested("b") < 1.0, "and costs no more than a second"


@pytest.mark.rule("L3")
@each("is_system", [True, False])
def test_what_is_waited_for_has_a_bound_of_each_user_and_of_each_node(*, is_system: bool) -> None:
    async def story() -> None:
        waited, ends = WaitQuota(is_system=is_system), asyncio.Event()

        async def work() -> None:
            await ends.wait()

        def asks(who: str, tasks: int, node: str = "", *, works: bool = True) -> list[asyncio.Task[None]]:
            client: Any = SimpleNamespace(came_from=node, caller=Principal(who, uid=1, node=node), begun=None)
            begun = []
            with waited.handed_over(client, tasks):
                if works:
                    begun.append(asyncio.create_task(work()))
                    client.begun(begun[-1])
            assert client.begun is None
            return begun

        at_work = asks("1000", WAITED_MAX - 10)
        asks("1000", 10, works=False)  # what is answered at once counts no more
        at_work += asks("1000", 10)
        if is_system:
            with pytest.raises(SlowDown, match="too many tasks are waited for"):
                asks("1000", 1)
        else:
            at_work += asks("1000", 1)
        asks("1000", 0)
        at_work += asks("1001", WAITED_MAX)
        for number in range(WAITED_BY_NODE_MAX // WAITED_MAX):
            at_work += asks(str(2000 + number), WAITED_MAX, "ws2")
        with pytest.raises(SlowDown, match="too many tasks are waited for"):
            asks("3000", 1, "ws2")
        asks("3000", 1, "ws3")
        at_work.pop(0).cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client: Any = SimpleNamespace(came_from="", caller=Principal("1000", uid=1), begun=None)
        charge = waited.charge(client)
        charge.add(WAITED_MAX - 10)
        if is_system:
            with pytest.raises(SlowDown):
                charge.add(1)
        charge.end()
        ends.set()
        await asyncio.gather(*at_work)
        await asyncio.sleep(0)
        assert not waited._tasks

    asyncio.run(story())


@each(
    ("request_", "names"),
    [
        (control.Wait(tasks=("n1/1", "n1/2")), 2),
        (control.Cancel(tasks=("n1/1", "n1/2"), wait=True), 2),
        (control.Cancel(tasks=("n1/1", "n1/2")), 0),
        (control.Show(tasks=("n1/1", "n1/2")), 0),
        (control.Info(), 0),
    ],
)
def test_only_what_may_last_counts_as_waiting(request_: control.Request, names: int) -> None:
    assert waits_for(request_) == names


@pytest.mark.rule("L4")
def test_output_that_is_kept_keeps_more_from_being_queued() -> None:
    limits, has = quotas(user_output_bytes_max=100)
    has.output_bytes = 101
    with pytest.raises(DiskFull):
        limits.submitted("a", 1)
    plenty, _ = quotas(user_submits_per_s=10.0)
    plenty.submitted("a", 30)
    with pytest.raises(SlowDown) as slow:
        plenty.submitted("a", 1)
    assert slow.value.retry_after_s > 1.0


@pytest.mark.rule("L4")
def test_all_users_that_a_node_tells_of_are_counted_together() -> None:
    store = StoreReader("n1")
    store._reader = database = sqlite3.connect(":memory:")
    database.executescript("CREATE TABLE owners (counter, who); CREATE TABLE tasks (counter, ended_at, output_bytes)")
    for counter, who in enumerate(("n2:a", "n2:b", "n20:a", "n3:a", "20001", "2000")):
        database.execute("INSERT INTO owners VALUES (?, ?)", (counter, who))
        database.execute("INSERT INTO tasks VALUES (?, 0, 7)", (counter,))
    told = {who: store.unfinished_of(who) for who in ("n2:", "n2:a", "n3:", "2000")}
    assert told == {"n2:": 2, "n2:a": 1, "n3:": 1, "2000": 1}
    assert store.output_bytes_of_owner("n2:") == 14
    database.close()
    database.close()
