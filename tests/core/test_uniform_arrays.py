"""A uniform array: its untouched members are one object, and nobody can tell the difference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from peerload.core.work import HomePhase, UntouchedMembers
from peerload.model import events, messages
from peerload.model.actions import Answer, MembersCancelled, Persist, PutMembers, PutTask, TaskChanged
from peerload.model.config import CoreConfig
from peerload.model.events import AgentStarted, MembersRow, TaskRow
from peerload.model.task import Exit, SubmitOptions, TaskRecord, TaskState, execution_key, member_uid, ranges
from tests.core.given import ACCEPTS, SENDER, Given, spec

NEVER = 1_000_000
MEMBERS = tuple(range(1, 21))
KEY = bytes(16)


def given(uniform_array_min: int = 2, members_at_a_time: int = 250, **more: Any) -> Given:
    config = CoreConfig(uniform_array_min=uniform_array_min, uniform_at_a_time=4, members_at_a_time=members_at_a_time)
    return Given(config=config, **{"peers": (), **more})


def blocks(x: Given, array: str = "x/1") -> list[range]:
    return [block.members for block in x.node.home.untouched.get(array, [])]


def rows(x: Given) -> list[PutTask]:
    """What the last event made durable, member by member."""
    kept = [row for action in x.last if isinstance(action, Persist) for row in action.rows]
    return [
        one
        for row in kept
        for one in (row.rows() if isinstance(row, PutMembers) else [row])
        if isinstance(one, PutTask)
    ]


def changes(x: Given) -> list[TaskChanged]:
    """What clients are told of the last event, member by member."""
    told: list[TaskChanged] = []
    for action in x.last:
        if isinstance(action, MembersCancelled):
            told += action.changes()
        elif isinstance(action, TaskChanged):
            told.append(action)
    return told


def waiting(x: Given) -> list[str]:
    """The queue, looked at without touching it."""
    names: list[tuple[int, str]] = []
    for work in x.node.queue.as_it_is():
        if isinstance(work, UntouchedMembers):
            names += [(work.order + at, f"{work.task}.{member}") for at, member in enumerate(work.members)]
        else:
            names.append((work.order, work.task))
    return [name for _, name in sorted(names)]


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ((), []),
        ((7,), [range(7, 8)]),
        ((1, 2, 3, 9), [range(1, 4), range(9, 10)]),
        ((0, 5, 10, 11, 12), [range(0, 11, 5), range(11, 13)]),
        ((3, 9), [range(3, 10, 6)]),
    ],
)
def test_numbers_as_ranges(numbers: tuple[int, ...], found: list[range]) -> None:
    assert ranges(numbers) == found
    assert [one for members in ranges(numbers) for one in members] == list(numbers)


def test_members_become_tasks_when_they_start() -> None:
    x = given(slots=2)
    x.submit(indices=MEMBERS)
    x.finish(1)
    assert [task.task for task in x.node.home.tasks.values()] == ["x/1.1", "x/1.2"]
    assert blocks(x) == [range(3, 21)]
    assert (x.node.home.number, x.node.home.unfinished()) == (20, {"queued": 18, "leased": 2})
    assert len(x.node.queue) == x.node.ledger.waiting == 18
    x.end(x.node.home.by_id["x/1.1"].key)
    assert x.node.home.by_id["x/1.3"].phase is HomePhase.HERE
    assert len(x.node.queue) == 17


def test_all_members_are_durable_before_the_answer() -> None:
    x = given(members_at_a_time=1)
    turns = [*x.submit(indices=MEMBERS), *x.finish(1)]
    kept = [turn for turn in turns if turn.startswith("persist")]
    assert kept[:2] == ["persist making 4 queued", "persist 4 queued"]
    assert turns.index("answer") > turns.index(kept[4]) == turns.index("persist submission 4 queued")


def test_a_member_that_is_named_is_a_task_in_its_place() -> None:
    x = given()
    x.submit(indices=MEMBERS)
    x.finish(1)
    x.when(events.HoldRequested(7, ("x/1.9",)))
    assert x.done(Answer).reply["held"] == ["x/1.9"]
    assert blocks(x) == [range(2, 9), range(10, 21)]
    x.when(events.PriorityRequested(8, ("x/1.15",), 5))
    assert x.node.home.by_id["x/1.15"].spec.priority == 5
    assert [work.task for work in x.node.queue.oldest_first()][:2] == ["x/1.15", "x/1.2"]
    assert "x/1.21" not in x.node.home.by_id
    assert "x/2.1" not in x.node.home.by_id


def test_cancelled_members_are_one_row_and_each_is_told() -> None:
    x = given()
    x.submit(indices=MEMBERS)
    x.finish(1)
    did = x.when(events.CancelRequested(7, tuple(f"x/1.{member}" for member in range(5, 8))))
    assert did == ["persist 3 cancelled", "cancelled 3", "answer"]
    assert [row.record for row in rows(x)] == [change.record for change in changes(x)]
    assert x.done(Answer).reply == {"cancelled": ["x/1.5", "x/1.6", "x/1.7"], "already_ended": []}
    assert blocks(x) == [range(2, 5), range(8, 21)]
    assert x.node.home.number == 17
    x.when(events.CancelRequested(8, ("x/1",)))
    x.finish(8)
    assert (blocks(x), x.node.home.unfinished()) == ([], {})


def test_of_members_that_others_wait_for_each_end_is_noticed() -> None:
    x = given()
    x.submit(indices=MEMBERS)
    x.finish(1)
    x.submit(terms=SubmitOptions(after=("x/1",)))
    x.when(events.TasksFound((events.TaskFound("x/1", is_known=True),)))
    assert x.node.home.by_id["x/2"].phase is HomePhase.GATED
    for member in MEMBERS:
        x.when(events.CancelRequested(100 + member, (f"x/1.{member}",)))
    x.end(next(iter(x.node.ledger.running)))
    assert x.node.home.by_id["x/2"].phase is not HomePhase.GATED


def test_members_look_for_places_one_after_the_other() -> None:
    x = given(peers=("y",), policies=SENDER)
    x.hear("y", messages.Pong(1, ACCEPTS))
    x.submit(indices=MEMBERS)
    x.finish(1)
    searched = [task.task for task in x.node.home.tasks.values() if task.search]
    most = x.node.state.config.searches_in_flight_max
    assert len(searched) == min(most, len(MEMBERS) - 1)
    assert x.node.home.number == len(MEMBERS)
    assert sum(map(len, blocks(x))) == len(MEMBERS) - len(x.node.home.tasks)


def test_untouched_members_come_back_as_one() -> None:
    record = TaskRecord("x/4", b"", TaskState.QUEUED, 5.0, reason="submitted")
    row = MembersRow(record, KEY, 3, 9, 2, spec())
    x = given(started=AgentStarted(members=(row,), counter=4))
    assert x.node.home.by_id["x/4.3"].phase is HomePhase.HERE
    assert x.node.home.by_id["x/4.3"].uid == member_uid(KEY, 3)
    assert blocks(x, "x/4") == [range(5, 10, 2)]
    assert waiting(x) == ["x/4.5", "x/4.7", "x/4.9"]


def test_after_a_restart_untouched_members_are_waited_for() -> None:
    array = TaskRecord("x/4", b"", TaskState.QUEUED, 5.0, reason="submitted")
    first = msgspec.structs.replace(array, task="x/4.1", uid=member_uid(KEY, 1))
    later = msgspec.structs.replace(array, task="x/5", uid=bytes(range(16)))
    tasks = (TaskRow(first, spec()), TaskRow(later, spec(), terms=SubmitOptions(after=("x/4",))))
    x = given(started=AgentStarted(tasks, members=(MembersRow(array, KEY, 2, 4, 1, spec()),), counter=5))
    for _ in range(4):
        assert x.node.home.by_id["x/5"].phase is HomePhase.GATED
        x.end(next(iter(x.node.ledger.running)))
    assert x.node.home.by_id["x/5"].phase is not HomePhase.GATED


def test_an_end_that_is_found_at_a_restart_is_one_of_many_that_are_waited_for() -> None:
    array = TaskRecord("x/4", b"", TaskState.QUEUED, 5.0, reason="submitted")
    later = msgspec.structs.replace(array, task="x/5", uid=bytes(range(16)))
    first = msgspec.structs.replace(
        array, task="x/4.1", uid=member_uid(KEY, 1), state=TaskState.LEASED, attempt=1, node="x"
    )
    tasks = (TaskRow(later, spec(), terms=SubmitOptions(after=("x/4",))), TaskRow(first, spec()))
    members = (MembersRow(array, KEY, 2, 4, 1, spec()),)
    ended = ((execution_key(first.uid, 1), Exit(0)),)
    x = given(started=AgentStarted(tasks, members=members, ended=ended, counter=5))
    for _ in range(3):
        assert x.node.home.by_id["x/5"].phase is HomePhase.GATED
        x.end(next(iter(x.node.ledger.running)))
    assert x.node.home.by_id["x/5"].phase is not HomePhase.GATED


@pytest.mark.parametrize("lost", [{"commits_lost": True}, {"attempts_from": 50, "attempts_up_to": 4}])
def test_after_a_loss_of_commits_each_member_is_a_task(lost: dict[str, Any]) -> None:
    record = TaskRecord("x/4", b"", TaskState.QUEUED, 5.0, reason="submitted")
    x = given(started=AgentStarted(members=(MembersRow(record, KEY, 1, 3, 1, spec()),), counter=4, **lost))
    assert (blocks(x, "x/4"), len(x.node.home.tasks)) == ([], 3)


def test_a_message_about_an_untouched_member_finds_it() -> None:
    """As after a database was put back from a copy, where an attempt runs that it does not know of."""
    x = given(peers=("y",))
    x.submit(indices=MEMBERS)
    x.finish(1)
    (block,) = x.node.home.untouched["x/1"]
    uid = member_uid(block.uid_key, 17)
    x.hear("y", messages.Renew((messages.Renewal("x/1.17", uid, 3, 50.0),)))
    assert uid in x.node.home.tasks


# -- beside the same array with each member as an object of its own ----------------------------------------------------


def facts(x: Given) -> dict[str, object]:
    """What anybody can see of a node."""
    home = x.node.home
    tasks = {task.task: (task.record.state.value, task.phase.value, task.spec.priority) for task in home.tasks.values()}
    for array in home.untouched:
        for members in blocks(x, array):
            tasks |= {f"{array}.{member}": ("queued", "waiting", 0) for member in members}
    ledger = x.node.ledger
    return {
        "tasks": dict(sorted(tasks.items())),
        "queue": waiting(x),
        "numbers": (home.number, home.unfinished(), len(x.node.queue), ledger.waiting, ledger.load_tasks),
        "cores": round(ledger.cpus_requested, 6),
        "expected_s": round(x.node.queue.expected_s, 6),
        "oldest_s": x.node.queue.oldest_wait_s(),
        "answers": [action.reply for action in x.last if isinstance(action, Answer)],
        "rows": sorted((row.record.task, row.record.state.value, row.reason) for row in rows(x)),
        "changed": sorted((change.record.task, change.record.state.value, change.reason) for change in changes(x)),
        "first": [work.task for work in x.node.queue.oldest_first()][:3] if len(x.node.queue) % 5 == 0 else [],
        "last": [work.task for work in x.node.queue.newest_first()][:3] if len(x.node.queue) % 7 == 0 else [],
    }


def things(rng: random.Random) -> Iterator[events.Event | str]:
    """What users do with arrays."""
    for number in range(100, 140):
        array = f"x/{rng.choice((1, 1, 3))}"
        first = rng.choice(MEMBERS)
        some = tuple(f"{array}.{member}" for member in range(first, min(first + rng.randint(1, 9), 21)))
        yield rng.choice(
            (
                "end",
                "end",
                events.HoldRequested(number, some[:3]),
                events.ReleaseRequested(number, some),
                events.PriorityRequested(number, some[:2], rng.randint(-1, 2)),
                events.CancelRequested(number, some),
                events.CancelRequested(number, tuple(rng.sample(some, len(some)))),
                events.SignalRequested(number, some[0], 15),
                events.CancelRequested(number, (array,)) if rng.random() < 0.1 else "end",
            )
        )


@pytest.mark.parametrize("seed", range(40))
def test_nobody_can_tell_the_difference(seed: int) -> None:
    pair = [given(2, slots=2), given(NEVER, slots=2)]
    for x in pair:
        x.submit(indices=MEMBERS)
        x.finish(1)
        x.submit()
        x.submit(indices=MEMBERS[::3])
        x.finish(3)
    assert facts(pair[0])["tasks"] == facts(pair[1])["tasks"]
    for thing in things(random.Random(seed)):
        seen = []
        for x in pair:
            x.after(1.0)
            if thing == "end":
                if x.node.ledger.running:
                    x.end(min(x.node.ledger.running, key=lambda key: _name(x, key)))
            elif isinstance(thing, events.Event):
                x.when(thing)
                x.finish(getattr(thing, "request", 0))
            seen.append(facts(x))
        assert seen[0] == seen[1], thing


def _name(x: Given, key: str) -> str:
    return next(work.task for work in x.node.runs.works() if work.key == key)
