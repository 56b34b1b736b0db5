"""Tasks that end with their client: a connection that closes, a client that detaches, an agent that was restarted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from peerload.core.coordination import clients
from peerload.model import timers
from peerload.model.actions import Answer, ClearTimer, SetTimer, SignalTask
from peerload.model.events import (
    AgentStarted,
    AttendRequested,
    ClientGone,
    DetachRequested,
    InputCame,
    InputCut,
    TaskRow,
    TaskSubmitted,
    TimerExpired,
)
from peerload.model.messages import AwaitedTask, TasksTold
from peerload.model.task import SubmitOptions, TaskRecord, TaskSpec, TaskState
from tests.core.given import Given
from tests.wording import Says

if TYPE_CHECKING:
    from peerload.model.actions import Action
    from peerload.model.events import Event

SPEC = TaskSpec((b"true",), b"/")
CLIENT, OTHER = 7, 8


def does(given: Given, event: Event) -> list[Action]:
    """What is done about this event, but for what people are told."""
    given.when(event)
    return given.last


def submitted(given: Given, token: str = "token-1") -> TaskRecord:
    """A task that CLIENT attends; it runs here."""
    does(given, TaskSubmitted(1, token, b"d", SPEC, client=CLIENT, input="name"))
    record = given.node.home.by_id[f"{given.node.state.node}/{1}"].record
    assert record.attended
    assert record.input == "name"
    return record


def test_a_task_ends_with_its_client() -> None:
    given = Given()
    record = submitted(given)
    actions = does(given, ClientGone(CLIENT))
    assert [action.signal for action in actions if isinstance(action, SignalTask)] == [15]
    task = given.node.home.tasks[record.uid]
    assert task.record.state is TaskState.CANCELLED
    assert task.record.reason == clients.CLIENT_GONE
    assert does(given, ClientGone(CLIENT)) == []


def test_another_client_keeps_it() -> None:
    given = Given()
    record = submitted(given)
    does(given, AttendRequested(2, OTHER, record.task))
    does(given, ClientGone(CLIENT))
    assert given.node.home.tasks[record.uid].record.state is TaskState.LEASED
    does(given, ClientGone(OTHER))
    assert given.node.home.tasks[record.uid].record.state is TaskState.CANCELLED


def test_a_task_that_was_left_to_itself_runs_on() -> None:
    given = Given()
    record = submitted(given)
    actions = does(given, DetachRequested(2, record.task))
    assert Answer(2, {}) in actions
    assert not given.node.home.tasks[record.uid].record.attended
    does(given, ClientGone(CLIENT))
    assert given.node.home.tasks[record.uid].record.state is TaskState.LEASED


def test_detaching_from_what_is_not_attended_changes_nothing() -> None:
    given = Given()
    assert does(given, DetachRequested(2, "ws1/9")) == [Answer(2, {})]
    assert does(given, AttendRequested(3, OTHER, "ws1/9")) == [Answer(3, {"attended": False})]


def restarted(given: Given) -> TaskRecord:
    """A queued, attended task of an earlier start, which no other node could run either."""
    record = TaskRecord(f"{given.node.state.node}/1", b"u" * 16, TaskState.QUEUED, 1.0, attended=True)
    never = msgspec.structs.replace(SPEC, request=msgspec.structs.replace(SPEC.request, cpus=10_000.0))
    actions = does(given, AgentStarted(tasks=(TaskRow(record, never),)))
    timers_set = [action.timer for action in actions if isinstance(action, SetTimer)]
    assert timers.ClientTimeout(record.uid.hex()) in timers_set
    return record


def test_a_client_that_is_not_back_after_a_restart_is_gone() -> None:
    given = Given()
    record = restarted(given)
    does(given, TimerExpired(timers.ClientTimeout(record.uid.hex())))
    assert record.uid not in given.node.home.tasks


def test_a_client_that_is_back_after_a_restart_is_waited_for_no_more() -> None:
    given = Given()
    record = restarted(given)
    actions = does(given, AttendRequested(2, OTHER, record.task))
    assert ClearTimer(timers.ClientTimeout(record.uid.hex())) in actions
    assert Answer(2, {"attended": True}) in actions
    does(given, TimerExpired(timers.ClientTimeout(record.uid.hex())))
    assert record.uid in given.node.home.tasks
    does(given, ClientGone(OTHER))
    assert record.uid not in given.node.home.tasks


def test_a_task_whose_input_is_cut_fails_instead_of_being_repeated() -> None:
    given = Given()
    record = submitted(given)
    does(given, InputCut(record.uid))
    task = given.node.home.tasks[record.uid]
    assert task.record.input_is_cut
    assert does(given, InputCut(record.uid)) == []
    given.node.handoff.lost_attempts.died(task, "lost")
    assert task.record.state is TaskState.FAILED
    assert "lost" in task.record.reason
    assert Says.INPUT_NOT_KEPT() in task.record.reason


def test_that_input_has_come_is_in_the_record_of_an_ended_task() -> None:
    given = Given()
    record = submitted(given)
    task = given.node.home.tasks[record.uid]
    assert does(given, InputCame(record.uid)) == []
    assert does(given, InputCame(record.uid)) == []
    given.node.home.fail(task, "for a test")
    assert (task.record.state, task.record.input_came) == (TaskState.FAILED, True)
    assert does(given, InputCame(record.uid)) == []


def again(request: int, client: int, **event: Any) -> TaskSubmitted:
    """The submission with token-1, as a client says it that attends what comes of it."""
    return TaskSubmitted(request, "token-1", b"d", SPEC, client=client, **event)


def test_whoever_submits_it_again_attends_it() -> None:
    given = Given()
    record = submitted(given)
    does(given, again(2, OTHER, input="name"))
    does(given, ClientGone(CLIENT))
    assert given.node.home.tasks[record.uid].record.state is TaskState.LEASED
    does(given, ClientGone(OTHER))
    assert given.node.home.tasks[record.uid].record.state is TaskState.CANCELLED


def test_after_a_restart_a_submission_that_is_repeated_is_waited_for_no_more() -> None:
    given = Given()
    record = restarted(given)
    name = (b"d", record.task, 0)
    actions = does(given, again(2, OTHER, before=name))
    assert ClearTimer(timers.ClientTimeout(record.uid.hex())) in actions
    does(given, TimerExpired(timers.ClientTimeout(record.uid.hex())))
    assert record.uid in given.node.home.tasks
    does(given, ClientGone(OTHER))
    assert record.uid not in given.node.home.tasks


MEMBERS = tuple(range(1, 1001))


def test_an_array_ends_with_its_client_some_tasks_at_a_time_and_none_starts_meanwhile() -> None:
    given = Given()
    does(given, again(1, CLIENT, indices=MEMBERS))
    given.finish(1)
    assert len(given.node.home.tasks) == len(MEMBERS)
    does(given, ClientGone(CLIENT))
    assert len(MEMBERS) - 300 < len(given.node.home.tasks) < len(MEMBERS)
    did = given.finish(-CLIENT)
    assert not any(shape.startswith("spawn") for shape in did)
    (task,) = given.node.home.tasks.values()
    assert task.record.state is TaskState.CANCELLED  # until its process is gone
    given.end(task.key, 143)
    assert not given.node.client_binding._attending
    assert not given.node.client_binding._clients


@pytest.mark.parametrize("after", [0, 2, 5])
def test_an_array_ends_with_its_client_also_if_it_is_only_being_made(after: int) -> None:
    given = Given()
    does(given, again(1, CLIENT, indices=MEMBERS))
    for _ in range(after):
        given.timer("request", "1")
    turn = list(given.last)
    does(given, ClientGone(CLIENT))
    if after < 4:
        given.last = turn
        given.finish(1)
    for _ in range(10):  # whichever goes on
        given.timer("request", "1")
        given.timer("request", str(-CLIENT))
    assert all(task.record.state is TaskState.CANCELLED for task in given.node.home.tasks.values())
    assert not given.node.client_binding._gone
    assert not given.node.client_binding._coming


def test_whoever_submits_an_array_again_while_it_is_made_attends_it() -> None:
    given = Given()
    does(given, again(1, CLIENT, indices=MEMBERS))
    turn = list(given.last)
    does(given, again(2, OTHER, indices=MEMBERS))
    does(given, ClientGone(CLIENT))
    given.last = turn
    given.finish(1)
    assert len(given.node.home.tasks) == len(MEMBERS)
    assert not any(task.record.state is TaskState.CANCELLED for task in given.node.home.tasks.values())
    does(given, ClientGone(OTHER))
    given.finish(-OTHER)
    assert all(task.record.state is TaskState.CANCELLED for task in given.node.home.tasks.values())


def test_a_submission_that_asks_after_other_tasks_is_dropped_with_its_client() -> None:
    given = Given()
    does(given, again(1, CLIENT, terms=SubmitOptions(after=("y/7",))))
    assert "refuse BadRequest" in given.when(ClientGone(CLIENT))
    assert not given.node.eligibility.remote_status._inquiries
    given.hear("y", TasksTold((AwaitedTask("y/7", says="running"),)))
    assert not given.node.home.tasks


def test_of_tasks_that_have_ended_nothing_is_kept() -> None:
    given = Given()
    for number in range(1, 4):
        does(given, TaskSubmitted(number, f"token-{number}", b"d", SPEC, client=CLIENT))
        given.end(given.task(number).key)
    assert not given.node.client_binding._attending
    assert not given.node.client_binding._clients
