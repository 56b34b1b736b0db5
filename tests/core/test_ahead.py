"""Short tasks are given to the launcher ahead: each waits there for the end of the one before, and holds no room until then."""

from __future__ import annotations

import pytest

from peerload.core.work import RemoteTask
from peerload.model import events, messages
from peerload.model.actions import ForgetTask, SendResult, SetLease, SignalTask, SpawnTask
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport, ResourceRequest
from peerload.model.task import Exit, Guarantee, TaskSpec, TaskState, execution_key
from peerload.policy.registry import load_preset
from tests.core.given import WALL_S, Given, spec

CONFIG = CoreConfig(ahead_s=10.0, ahead_max=4)


def short(slots: int = 1, config: CoreConfig = CONFIG, policies: str = "none") -> Given:
    """A node that knows its command to take a second."""
    x = Given(peers=(), slots=slots, config=config, policies=load_preset(policies))
    for number in range(1, 4):
        x.submit()
        x.end(x.task(number).key)
    return x


def lane(x: Given, *tasks: TaskSpec) -> list[str]:
    """Submit these while all slots are taken, until one ends → the keys that each spawn waits for."""
    for task in (spec(), *tasks):
        x.submit(task)
    x.end(x.task(4).key)
    return [action.after for action in x.last if isinstance(action, SpawnTask)]


def test_each_waits_for_the_one_before_and_holds_room_when_that_has_ended() -> None:
    x = short()
    assert lane(x, *[spec()] * 6) == ["", *(x.task(number).key for number in (5, 6, 7, 8))]
    assert list(x.node.ledger.running) == [x.task(5).key]
    assert all(x.node.holds(x.task(number).key) for number in (5, 6, 7, 8, 9))
    assert x.task(10).record.state is TaskState.QUEUED
    x.end(x.task(5).key)
    assert list(x.node.ledger.running) == [x.task(6).key]
    assert x.done(SpawnTask).after == x.task(9).key  # the last goes behind the last
    for number in range(6, 11):
        x.end(x.task(number).key)
    assert not x.node.ledger.running
    assert not x.node.home.tasks


def test_no_slot_gets_more_than_its_share_of_what_waits() -> None:
    x = short(slots=2)
    x.submit()
    assert lane(x, *[spec()] * 7) == ["", *(x.task(number).key for number in (6, 7, 8))]


@pytest.mark.parametrize(
    ("policies", "gives", "given"),
    [("adaptive", False, 2), ("adaptive", True, 4), ("none", False, 4)],
    ids=["the peer may want some", "the peer has its own", "nothing is shared"],
)
def test_slots_of_peers_that_may_ask_for_work_share_what_waits(policies: str, gives: bool, given: int) -> None:
    x = short(policies=policies)
    x.meet("y")
    x.hear("y", messages.Pong(1, LoadReport(load_tasks=1, slots=1, gives=gives, incarnation=1, sequence=5)))
    for _ in range(6):
        x.submit()
    x.after(1.0).end(x.task(4).key)
    assert sum(bool(action.after) for action in x.last if isinstance(action, SpawnTask)) == given


@pytest.mark.parametrize(
    "task",
    [
        spec(guarantee=Guarantee.ONCE),
        spec(takes_input=True),
        spec(followed=True),
        spec(request=ResourceRequest(mem_bytes=1)),
        TaskSpec((b"unknown",), b"/tmp"),
    ],
)
def test_others_wait_at_home(task: TaskSpec) -> None:
    assert lane(short(), spec(), task) == [""]


def test_nothing_is_given_behind_a_task_that_is_long_or_while_the_node_is_drained() -> None:
    assert lane(short(config=CoreConfig(ahead_s=0.5)), *[spec()] * 4) == [""]
    y = short()
    lane(y, *[spec()] * 8)
    y.when(events.DrainRequested(99))
    assert not any(line.startswith("spawn") for line in y.end(y.task(5).key))


def test_what_the_launcher_gives_back_is_queued_again() -> None:
    x = short()
    lane(x, *[spec()] * 3)
    given = x.task(6)
    key = given.key
    x.when(events.TaskLost(key, "the task before it takes longer than expected", never_started=True))
    assert x.done(ForgetTask) == ForgetTask(key, output=True), "its scratch directory, if it has one"
    assert (given.record.state, given.record.losses) == (TaskState.QUEUED, 0)
    assert list(x.node.ledger.running) == [x.task(5).key]
    x.end(x.task(5).key)
    x.end(x.task(7).key)
    assert x.node.holds(given.key)
    assert given.record.attempt == 2


def test_one_that_is_cancelled_before_its_turn_is_ended_and_the_next_has_the_room() -> None:
    x = short()
    lane(x, *[spec()] * 3)
    key = x.task(6).key
    x.when(events.CancelRequested(100, ("x/6",), 15))
    assert x.done(SignalTask).key == key
    x.end(key, 143)
    assert x.done(ForgetTask).key == key
    x.end(x.task(5).key)
    assert list(x.node.ledger.running) == [x.task(7).key]


def test_an_end_that_is_told_before_that_of_the_task_before_it_is_taken() -> None:
    x = short()
    lane(x, *[spec()] * 3)
    x.when(events.TaskStarted(x.task(6).key, 0.0))
    assert x.task(6).running_at == 0.0
    x.end(x.task(6).key)
    assert list(x.node.ledger.running) == [x.task(5).key]
    x.end(x.task(5).key)
    assert list(x.node.ledger.running) == [x.task(7).key]


def test_an_end_that_is_told_with_its_start_counts_as_both() -> None:
    said = []
    for together in (False, True):
        x = short()
        lane(x, *[spec()] * 3)
        x.end(x.task(5).key)
        key, exit_ = x.task(6).key, Exit(0, started_at=WALL_S, ended_at=WALL_S + 1.0)
        lines = [] if together else x.when(events.TaskStarted(key, WALL_S))
        lines += x.when(events.TaskEnded(key, exit_, with_start=together))
        said.append(lines)
    assert said[0] == said[1]
    assert any("running" in line for line in said[0])


def test_a_launcher_that_is_listed_again_says_what_became_of_each() -> None:
    x = short()
    lane(x, *[spec()] * 3)
    keys = [x.task(number).key for number in (5, 6, 7)]
    x.when(events.LauncherLost())
    x.when(events.LauncherReady(((keys[1], 0.0, 0.0), (keys[2], 0.0, 0.0)), (), ()))
    assert sorted(x.node.ledger.running) == sorted(keys[1:])
    assert x.task(5).record.losses == 1
    for key in keys[1:]:
        x.end(key)
    assert not x.node.holds(keys[2])


# -- tasks of other homes ----------------------------------------------------------------------------------------------


def remote(x: Given, number: int) -> RemoteTask:
    return x.node.executor.remote_tasks[execution_key(uid(number), 1)]


def uid(number: int) -> bytes:
    return bytes(15) + bytes((number,))


def committed(number_of_tasks: int) -> Given:
    """A node that runs a task of another home, and has been committed others while it ran."""
    x = Given(peers=("h",), config=CONFIG, policies=load_preset("none"))
    for number in range(1, 4):
        x.submit()
        x.end(x.task(number).key)
    for number in range(1, number_of_tasks + 1):
        x.hear("h", messages.Offer(f"h/{number}", uid(number), 1, spec(), 60.0, only=True))
        accept = x.sent(messages.Accept)
        x.hear("h", messages.Commit(f"h/{number}", uid(number), 1, accept.nonce, accept.ts, 60.0))
    return x


def test_short_tasks_of_another_home_are_given_ahead_too_durably_started_and_count_as_load() -> None:
    x = committed(5)
    load = x.node.ledger.load_tasks
    x.end(remote(x, 1).key)
    spawns = [action for action in x.last if isinstance(action, SpawnTask)]
    assert [action.after for action in spawns] == ["", *(remote(x, number).key for number in (2, 3, 4))]
    assert all(action.deadline_s == remote(x, 2).deadline_s for action in spawns)
    assert x.node.ledger.load_tasks == load - 1
    assert list(x.node.ledger.running) == [remote(x, 2).key]
    for number in range(2, 6):
        x.end(remote(x, number).key)
    assert not x.node.ledger.running
    assert not x.node.ledger.inbound


def test_what_the_launcher_gives_back_of_another_home_goes_home_for_good() -> None:
    x = committed(4)
    x.end(remote(x, 1).key)
    did = x.when(events.TaskLost(remote(x, 3).key, "the task before it takes longer than expected", never_started=True))
    assert [line for line in did if "to h" in line] == ["Return to h"]
    assert x.done(ForgetTask) == ForgetTask(execution_key(uid(3), 1), output=True), (
        "its scratch directory, if it has one"
    )
    assert uid(3) not in x.node.executor.by_uid
    assert x.node.executor.fences.was_refused(uid(3), 1)
    x.end(remote(x, 2).key)
    assert list(x.node.ledger.running) == [remote(x, 4).key]


def test_one_that_waits_ahead_is_renewed_and_ended_as_one_that_runs() -> None:
    x = committed(3)
    x.end(remote(x, 1).key)
    key = remote(x, 3).key
    x.after(15.0).timer("renew")
    assert {renewal.uid for renewal in x.sent(messages.Renew).renewals} == {uid(2), uid(3)}
    x.hear("h", messages.RenewOk((messages.LeaseExtension(uid(3), 1, x.at_s, 60.0),)))
    assert x.done(SetLease) == SetLease(key, x.at_s + 60.0, x.at_s)
    x.hear("h", messages.Revoke("h/3", uid(3), 1, 9, "cancelled"))
    assert x.done(SignalTask).key == key


def test_starts_of_short_tasks_are_told_together_a_little_later_unless_they_have_ended() -> None:
    x = committed(2)
    assert not any("Renew" in line for line in x.when(events.TaskStarted(remote(x, 1).key, WALL_S)))
    x.end(remote(x, 1).key)
    x.when(events.TaskStarted(remote(x, 2).key, WALL_S))
    x.after(0.25).timer("starts")
    assert [renewal.uid for renewal in x.sent(messages.Renew).renewals] == [uid(2)]


def test_ends_that_come_together_are_followed_by_one_look_at_what_starts_next() -> None:
    x = committed(6)
    x.end(remote(x, 1).key)
    exit_ = Exit(0, started_at=WALL_S, ended_at=WALL_S + 1.0)
    ends = tuple(events.TaskEnded(remote(x, number).key, exit_, with_start=True) for number in (2, 3))
    x.when(events.Together(ends))
    sent = [action.task for action in x.last if isinstance(action, SendResult)]
    assert sent == ["h/2", "h/3"]
    assert list(x.node.ledger.running) == [remote(x, 4).key]


def test_the_start_of_one_that_has_died_meanwhile_is_not_told() -> None:
    x = committed(1)
    x.when(events.TaskStarted(remote(x, 1).key, WALL_S))
    assert "Died to h" in str(x.when(events.TaskLost(remote(x, 1).key, "its launcher died", never_started=False)))
    assert not any("Renew" in line for line in x.after(0.25).timer("starts"))
