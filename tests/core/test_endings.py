"""Cancelled attempts: they have time to obey, and whoever waits for their end is told of it."""

from __future__ import annotations

import pytest

from peerload.core.coordination import clients, runs
from peerload.core.membership.peers import PeerState
from peerload.core.state import TASKS_AT_A_TIME
from peerload.model import events, messages
from peerload.model.actions import Answer, AnswerPart, AttemptGone, Persist, PutUsage
from peerload.model.config import CoreConfig
from peerload.model.events import CancelledAttempt, EndAsked
from peerload.model.messages import Renewal, Revoke
from peerload.model.task import Exit, FenceKind, TaskState, Usage, execution_key
from tests.core.given import Given, spec
from tests.core.test_losses import away


def asked(task: str, uid: bytes, node: str, *, query: bool = False) -> EndAsked:
    return EndAsked((CancelledAttempt(task, uid, 1, node),), query=query)


def test_the_end_of_what_ran_here_is_told_when_its_process_is_gone() -> None:
    x = Given(peers=())
    x.submit()
    task = x.task()
    x.when(events.CancelRequested(9, ("x/1",)))
    assert x.when(asked("x/1", task.uid, "x")) == []
    assert x.end(task.key) == ["AttemptGone", "ForgetTask"]
    assert x.done(AttemptGone).key == task.key
    assert x.when(asked("x/1", task.uid, "x")) == ["AttemptGone"]


def test_the_word_of_the_node_that_had_it_is_its_end_and_no_other_ones() -> None:
    x, task = away(spec(), peers=("y", "z"))
    assert "Revoke to y" in x.when(events.CancelRequested(9, (task.task,)))
    assert x.when(asked(task.task, task.uid, "y", query=True)) == ["Query to y"]
    result = messages.Result(task.task, task.uid, 1, Exit(143, signal=15), inline=True)
    assert x.hear("z", result) == ["ResultAck to z"]
    assert x.hear("y", result) == ["AttemptGone", "ResultAck to y"]
    assert x.hear("y", result) == ["ResultAck to y"]
    assert x.when(asked(task.task, task.uid, "y", query=True)) == ["AttemptGone"]


USED = Usage(user_s=2.5, joules=40.0)


def killed(x: Given, key: str) -> list[str]:
    return x.when(events.TaskEnded(key, Exit(143, signal=15, usage=USED)))


def test_what_a_cancelled_task_has_used_is_kept_when_its_process_is_gone() -> None:
    x = Given(peers=())
    x.submit()
    task = x.task()
    x.when(events.CancelRequested(9, ("x/1",)))
    assert killed(x, task.key) == ["persist usage x/1 1 x", "ForgetTask"]
    assert x.done(Persist).rows == (PutUsage("x/1", task.uid, 1, "x", USED),)


def test_what_it_has_used_elsewhere_is_kept_before_that_node_may_forget_it() -> None:
    x, task = away(spec())
    x.when(events.CancelRequested(9, (task.task,)))
    result = messages.Result(task.task, task.uid, 1, Exit(143, signal=15, usage=USED), inline=True)
    assert x.hear("y", result) == [f"persist usage {task.task} 1 y", "ResultAck to y"]
    foreign = messages.Result("y/7", task.uid, 1, Exit(143, signal=15, usage=USED), inline=True)
    assert x.hear("y", foreign) == ["ResultAck to y"]


def test_what_was_cancelled_before_a_restart_is_known_by_the_uid_of_its_attempt() -> None:
    own, foreign, late = (bytes(15) + letter for letter in (b"a", b"b", b"c"))
    ended = tuple((execution_key(uid, 2), Exit(143, signal=15, usage=USED)) for uid in (own, foreign))
    running = ((execution_key(late, 1), 1.0, 0.0),)
    floors = ((foreign, 2, FenceKind.STARTED, "y"),)
    x = Given(peers=(), started=events.AgentStarted(ended=ended, running=running, floors=floors))
    assert [line for line in x.started if "usage" in line] == [f"persist usage {own.hex()} 2 x"]
    assert killed(x, execution_key(late, 1)) == [f"persist usage {late.hex()} 1 x", "ForgetTask"]


def test_what_it_knows_of_the_past_is_bounded() -> None:
    x = Given()
    for number in range(runs.LATELY_MAX + 5):
        x.node.runs.terminations.message_received("y", messages.Died("x/1", number.to_bytes(16, "big"), 1))
    assert x.when(asked("x/1", bytes(16), "y", query=True)) == ["Query to y"]
    newest = (runs.LATELY_MAX + 4).to_bytes(16, "big")
    assert x.when(asked("x/1", newest, "y", query=True)) == ["AttemptGone"]
    assert x.done(AttemptGone).key == execution_key(newest, 1)


def test_a_cancel_names_the_nodes_that_may_not_hear_of_it() -> None:
    x, task = away(spec())
    x.when(events.CancelRequested(9, (task.task,)))
    assert x.done(Answer).reply == {"cancelled": ["x/2"], "already_ended": []}
    x, task = away(spec())
    peer = x.node.membership.get("y")
    assert peer is not None
    peer.state = PeerState.DEAD
    x.when(events.CancelRequested(9, ("x/1", task.task)))
    assert x.done(Answer).reply["unreachable"] == [{"id": "x/2", "node": "y", "state": "dead"}]


def test_a_renewal_does_not_cut_short_the_time_to_obey() -> None:
    x, task = away(spec())
    x.when(events.CancelRequested(9, (task.task,)))
    renew = messages.Renew((Renewal(task.task, task.uid, 1, 120.0, 8.0, 50.0),))
    assert x.hear("y", renew) == []
    x.after(x.node.state.config.kill_after_s)
    assert x.hear("y", renew) == ["Revoke to y"]
    assert x.sent(Revoke).signal == 9


def test_a_forced_cancel_kills_at_once_also_after_a_polite_one() -> None:
    x, task = away(spec())
    x.when(events.CancelRequested(9, (task.task,), force=True))
    assert x.sent(Revoke).signal == 9
    assert x.hear("y", messages.Renew((Renewal(task.task, task.uid, 1, 120.0, 8.0, 50.0),))) == ["Revoke to y"]


# -- many at a time ----------------------------------------------------------------------------------------------------


def test_a_request_about_many_tasks_lets_others_have_their_turn_and_is_answered_at_its_end() -> None:
    x = Given(peers=())
    members = 2 * TASKS_AT_A_TIME
    x.submit(indices=tuple(range(members)))
    x.finish(1)
    did = x.when(events.HoldRequested(7, ("x/1",)))
    assert did.count("persist held") == TASKS_AT_A_TIME - 1  # the first runs
    assert did[-1] == "timer request 0"
    assert "answer" in x.when(events.CancelRequested(8, (f"x/1.{members - 1}",)))
    did = x.timer("request", "7")
    assert did.count("persist held") == TASKS_AT_A_TIME - 1  # one is cancelled
    assert "answer" not in did
    assert x.timer("request", "7") == ["answer"]
    assert x.done(Answer).reply == {"held": ["x/1"], "already_held": [], "not_waiting": []}
    assert x.timer("request", "7") == []


def test_of_many_that_are_cancelled_none_is_started_in_the_room_of_another() -> None:
    x = Given(peers=(), slots=2)
    x.submit(indices=tuple(range(TASKS_AT_A_TIME + 10)))
    x.finish(1)
    first = [task for task in x.node.home.named("x/1") if task.record.state is TaskState.LEASED]
    did = x.when(events.CancelRequested(9, ("x/1",)))
    assert not any(line.startswith("signal") for line in did)
    did = x.timer("request", "9")
    assert did.count("signal 15") == len(first) == 2
    assert not any(line.startswith("spawn") for line in (*did, *x.end(first[0].key)))


def test_a_long_answer_comes_in_parts_each_when_its_tasks_are_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "NAMES_IN_A_PART", 3)
    x = Given(peers=(), slots=1)
    x.submit(indices=(1, 2, 3, 4, 5))
    x.submit(held=True)
    x.end(x.node.home.by_id["x/1.1"].key)  # x/1.2 runs
    did = x.when(events.CancelRequested(9, (*(f"x/1.{member}" for member in range(1, 6)), "x/2")))
    assert did[: did.index("AnswerPart")].count("persist cancelled") == 2
    assert x.done(AnswerPart).reply == {"cancelled": ["x/1.3", "x/1.4"], "already_ended": ["x/1.1"]}
    assert x.done(Answer).reply == {"cancelled": ["x/1.2", "x/1.5", "x/2"], "already_ended": []}


def test_released_tasks_come_back_some_at_a_time_in_order() -> None:
    x = Given(peers=())
    x.submit(held=True, indices=tuple(range(TASKS_AT_A_TIME + 1)))
    x.finish(1)
    did = x.when(events.ReleaseRequested(7, ("x/1",)))
    assert did.count("persist queued") == TASKS_AT_A_TIME
    assert "spawn 1" in did
    assert x.timer("request", "7")[-1] == "answer"
    assert [work.task for work in x.node.queue.oldest_first()][-1] == f"x/1.{TASKS_AT_A_TIME}"


def test_a_large_array_is_kept_before_it_is_answered_and_then_arrives() -> None:
    x = Given(peers=(), config=CoreConfig(uniform_array_min=1000))
    members = TASKS_AT_A_TIME + 1
    assert x.submit(indices=tuple(range(members))) == ["timer request 0"]
    assert x.submit(token="token 1", indices=tuple(range(members))) == []  # said again: it will be answered
    assert x.submit(token="token 1", digest=b"another") == ["refuse BadRequest"]
    did = x.timer("request", "1")
    assert did[0] == "persist making" + " queued" * TASKS_AT_A_TIME
    assert did[1:4] == ["persist submission queued", "answer", "answer"]
    answers = [action for action in x.last if isinstance(action, Answer)]
    assert [(answer.request, answer.reply.get("repeated", False)) for answer in answers] == [(1, False), (2, True)]
    assert "timer request 0" in did
    assert len(x.node.queue) + len(x.node.ledger.running) < members
    x.finish(1)
    assert len(x.node.queue) + len(x.node.ledger.running) == members
    assert x.submit(token="token 1") == ["answer"]


def test_what_has_become_of_a_member_before_it_arrives_stays_so() -> None:
    x = Given(peers=())
    members = 2 * TASKS_AT_A_TIME
    x.submit(indices=tuple(range(members)))
    while not any(isinstance(action, Answer) for action in x.last):
        x.timer("request", "1")
    last = [f"x/1.{members - number}" for number in (1, 2, 3)]
    x.when(events.CancelRequested(7, (last[0],)))
    x.when(events.HoldRequested(8, (last[1], last[2])))
    x.when(events.ReleaseRequested(9, (last[2],)))
    x.timer("request", "1")
    x.finish(1)
    assert len(x.node.queue) + len(x.node.ledger.running) == members - 2
    assert x.node.home.by_id[last[1]].record.state is TaskState.HELD
    assert last[0] not in x.node.home.by_id


def test_tasks_that_are_being_made_count() -> None:
    x = Given(peers=(), config=CoreConfig(tasks_queued_max=TASKS_AT_A_TIME + 10))
    assert x.submit(indices=tuple(range(TASKS_AT_A_TIME + 5))) == ["timer request 0"]
    assert x.submit(indices=tuple(range(6))) == ["refuse SlowDown"]
    assert "answer" in x.submit(indices=tuple(range(5)))


@pytest.mark.parametrize("name", ["x/1", "x/1.1"])
@pytest.mark.parametrize("held", [False, True])
def test_nobody_can_mean_an_array_before_it_is_durable(name: str, *, held: bool) -> None:
    x = Given(peers=())
    x.submit(held=held, indices=tuple(range(TASKS_AT_A_TIME + 10)))
    members = list(x.node.home.tasks.values())
    assert x.when(events.CancelRequested(9, (name,))) == ["answer"]
    assert x.done(Answer).reply == {"cancelled": [], "already_ended": [name]}
    assert x.when(events.HoldRequested(9, (name,))) == ["answer"]
    assert x.when(events.ReleaseRequested(9, (name,))) == ["answer"]
    assert x.when(events.SignalRequested(9, "x/1.1", 15)) == ["refuse NoSuchTask"]
    x.timer("request", "1")
    x.finish(1)
    state = TaskState.HELD if held else TaskState.QUEUED
    assert all(task.record.state is state for task in members[1:])  # the first may run
    x.when(events.CancelRequested(9, (name,)))
    x.finish(9)
    assert x.done(Answer).reply == {"cancelled": [name], "already_ended": []}
