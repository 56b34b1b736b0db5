"""How much one user may have of an agent that serves many, and one other node of any."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerload.agent.control.authorization import (
    WAITED_BY_NODE_MAX,
    WAITED_MAX,
    Principal,
    Quotas,
    TokenBucket,
    WaitCharge,
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


def quotas(mode: Any = "system", **settings: Any) -> tuple[Quotas, Any]:
    has = SimpleNamespace(unfinished=0, output_bytes=0)
    store = SimpleNamespace(unfinished_of=lambda _: has.unfinished, output_bytes_of_owner=lambda _: has.output_bytes)
    config = AgentConfig(node="n", state="s", socket="k", mode=mode, **settings)
    security: Any = SimpleNamespace(report=lambda *_: None)
    return Quotas(config, cast("Any", store), security, clock=lambda: 100.0), has


ALICE, BOB = Principal("a", "alice", 1), Principal("b", "bob", 2)


@pytest.mark.rule("L3", "L4")
def test_what_one_user_has_too_much_of_is_no_others_loss() -> None:
    limits, _ = quotas(user_connections_max=2, user_tasks_max=5, user_submits_per_s=10.0, user_requests_per_s=3.0)
    assert [limits.connected(ALICE) is None for _ in range(3)] == [True, True, False]
    limits.disconnected(ALICE)
    assert limits.connected(ALICE) is None
    assert limits.connected(BOB) is None
    limits.check_submission(ALICE, 5)
    with pytest.raises(SlowDown):
        limits.check_submission(ALICE, 1)
    limits.check_submission(BOB, 5)
    assert [bool(limits.take_tokens(ALICE)) for _ in range(4)] == [False, False, False, True]
    assert not limits.take_tokens(BOB)


@pytest.mark.rule("L3")
def test_what_takes_long_takes_more_tokens_of_its_own_user() -> None:
    limits, _ = quotas(user_requests_per_s=1_000.0)
    assert [bool(limits.take_tokens(ALICE, 250)) for _ in range(6)] == [False] * 4 + [True, True]
    assert not limits.take_tokens(BOB, 1_000_000), "however long, it may be asked"
    assert 0.0 < limits.take_tokens(BOB) < 1.0, "and costs no more than a second"


@pytest.mark.rule("L3")
@each("is_system", [True, False])
def test_what_is_waited_for_has_a_bound_of_each_user_and_of_each_node(*, is_system: bool) -> None:
    waited, _ = quotas("system" if is_system else "user")

    def asks(who: str, tasks: int, node: str = "") -> WaitCharge:
        return waited.charge(Principal(who, uid=1, node=node), tasks)

    charges = [asks("1000", WAITED_MAX - 10)]
    asks("1000", 10).end()
    charges.append(asks("1000", 10))
    if is_system:
        with pytest.raises(SlowDown):
            asks("1000", 1)
    else:
        charges.append(asks("1000", 1))
    asks("1000", 0)
    charges.append(asks("1001", WAITED_MAX))
    charges += [asks(str(2000 + number), WAITED_MAX, "ws2") for number in range(WAITED_BY_NODE_MAX // WAITED_MAX)]
    with pytest.raises(SlowDown):
        asks("3000", 1, "ws2")
    charges.append(asks("3000", 1, "ws3"))
    charges.pop(0).end()
    charge = asks("1000", 0)
    charge.add(WAITED_MAX - 10)
    if is_system:
        with pytest.raises(SlowDown):
            charge.add(1)
    for one in (charge, *charges):
        one.end()
    assert not waited._waited


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
        limits.check_submission(ALICE, 1)
    plenty, _ = quotas(user_submits_per_s=10.0)
    plenty.check_submission(ALICE, 30)
    with pytest.raises(SlowDown) as slow:
        plenty.check_submission(ALICE, 1)
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
