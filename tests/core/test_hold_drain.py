"""Tasks kept back, and nodes that take no more."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peerload.core.work import HomePhase
from peerload.model import events, messages
from peerload.model.actions import Answer, Persist, PutDrain
from peerload.model.resources import LoadReport, Placement
from peerload.model.task import Exit, TaskRecord, TaskState
from tests.core.given import ACCEPTS, ALONE, RECEIVER, SENDER, UID, Given, offer, spec
from tests.core.test_executor import KEY, commit
from tests.core.test_losses import away
from tests.wording import Says


def test_waiting_tasks_are_held_and_released() -> None:
    x = Given(peers=())
    x.submit()
    x.submit(indices=(1, 2))
    did = x.when(events.HoldRequested(7, ("x/1", "x/2", "x/9")))
    assert did == ["persist held", "changed held"] * 2 + ["answer"]
    assert x.done(Answer).reply == {"held": ["x/2"], "already_held": [], "not_waiting": ["x/1", "x/9"]}
    assert x.when(events.HoldRequested(7, ("x/2", "x/2.1"))) == ["answer"]
    assert x.done(Answer).reply == {"held": [], "already_held": ["x/2", "x/2.1"], "not_waiting": []}
    assert "spawn 1" not in x.end(x.task(1).key)
    did = x.when(events.ReleaseRequested(8, ("x/2.1",)))
    assert did[:3] == ["persist queued", "changed queued", "answer"]
    assert did[-1] == "spawn 1"


def test_an_offered_task_can_be_held_and_the_accept_comes_too_late() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    assert "persist held" in x.when(events.HoldRequested(7, ("x/2",)))
    assert x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0)) == []
    assert task.record.state is TaskState.HELD


def test_what_its_user_holds_does_not_go_on_when_a_lost_node_is_back() -> None:
    x, task = away(spec(), peers=("y", "z"))
    x.after(65).timer("lease", task.uid.hex())
    assert task.record.last_node == "y"
    assert "persist held" in x.when(events.HoldRequested(7, (task.task,)))
    renew = messages.Renew((messages.Renewal(task.task, task.uid, 1, 120.0, 8.0, 50.0),))
    assert x.hear("y", renew) == ["Revoke to y"]
    assert task.record.state is TaskState.HELD
    assert task.record.reason == Says.HELD()
    x.when(events.ReleaseRequested(8, (task.task,)))
    assert x.hear("y", renew) == ["Revoke to y"]
    result = messages.Result(task.task, task.uid, 1, Exit(0), inline=True)
    x.hear("y", result)  # one that was finished before is good
    assert "persist done" in x.when(events.OutputArrived(task.uid, 1))


def test_a_task_can_be_submitted_held_and_stays_so_after_a_restart() -> None:
    x = Given(peers=())
    assert x.submit(held=True) == ["persist submission held", "answer"]
    record = x.task().record
    x = Given(peers=(), started=events.AgentStarted((events.TaskRow(record, spec()),), counter=1))
    assert "spawn 1" not in x.started
    assert x.task().phase is HomePhase.HELD
    assert "spawn 1" in x.when(events.ReleaseRequested(8, ("x/1",)))
    assert x.when(events.CancelRequested(9, ("x/1",)))[0] == "persist cancelled"


def test_a_held_task_is_cancelled() -> None:
    x = Given(peers=())
    x.submit(held=True)
    assert x.when(events.CancelRequested(9, ("x/1",))) == ["persist cancelled", "changed cancelled", "answer"]
    assert not x.node.home.tasks


def test_what_a_task_repeats_is_in_its_record() -> None:
    x = Given(peers=())
    x.submit(retry_of="x/77")
    assert x.task().record.retry_of == "x/77"


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_drained_node_gives_back_what_has_not_started_and_lets_the_rest_run() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    x.when(events.TaskStarted(KEY, 7.0))
    x.hear("h", messages.Offer("h/2", UID[::-1], 1, spec(), 60.0, only=True))
    accept = x.sent(messages.Accept)
    late = messages.Commit("h/2", UID[::-1], 1, accept.nonce, accept.ts, 60.0)
    x.hear("h", late)
    third = bytes(16)
    x.hear("h", messages.Offer("h/3", third, 1, spec(), 60.0, only=True))
    did = x.when(events.DrainRequested(5, "new disks"))
    assert did[0] == "persist drained"
    assert "Return to h" in did
    assert "clear reserved" in did
    assert x.sent(messages.Return).reason == "x is drained: new disks"
    assert x.done(Answer).reply == {"returned": 1, "running": 1}
    assert x.hear("h", messages.Offer("h/4", bytes([4]) * 16, 1, spec(), 60.0, only=True)) == ["Decline to h"]
    assert x.sent(messages.Decline).code == "drained"
    assert x.node.state.profile.drained
    assert x.end(KEY)[0] == "persist result"


def test_its_own_tasks_look_for_a_place_elsewhere_and_do_not_start_here() -> None:
    x = Given(policies=SENDER, slots=1)
    x.when(events.DrainRequested(5))
    assert "ProbeRequest to y" in x.submit()
    assert "Offer to y" in x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    x.hear("y", messages.Decline("x/1", x.task().uid, 1, "room", "full", LoadReport()))
    assert x.task().record.state is TaskState.QUEUED
    assert "spawn 1" in x.when(events.UndrainRequested(6))
    (row,) = x.last[0].rows if isinstance(x.last[0], Persist) else ()
    assert row == PutDrain(None)
    assert x.done(Answer).reply == {"was_drained": True}
    assert x.when(events.UndrainRequested(7)) == ["answer"]
    assert x.done(Answer).reply == {"was_drained": False}


def test_a_task_that_may_run_nowhere_else_waits_for_the_end_of_the_drain() -> None:
    x = Given(policies=SENDER)
    x.when(events.DrainRequested(5))
    x.submit(spec(placement=Placement(local=True)))
    assert x.task().is_queued
    assert "spawn 1" in x.when(events.UndrainRequested(6))


@pytest.mark.parametrize("comes", ["before the drain", "later", "held until then"])
def test_tasks_that_stay_do_not_stand_in_the_way_of_one_that_may_leave(
    comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerload.core.coordination.evacuation.LOOKED_AT_MAX", 4)
    x = Given()
    x.submit()
    for _ in range(20):
        x.submit(spec(placement=Placement(local=True)))
    if comes != "later":
        x.submit(held=comes != "before the drain")
    x.when(events.DrainRequested(900))
    if comes == "later":
        x.submit()
    elif comes == "held until then":
        x.when(events.ReleaseRequested(901, ("x/22",)))
    assert x.task(22).uid in x.node.home.stranded
    assert len(x.node.queue) == 20
    x.when(events.UndrainRequested(902))
    assert x.task(22).is_queued
    x.when(events.DrainRequested(903))
    assert x.task(22).uid in x.node.home.stranded


def test_a_bounded_number_of_tasks_looks_for_a_place_at_a_time_until_all_have_had_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peerload.core.coordination.evacuation.LEAVING_MAX", 2)
    monkeypatch.setattr("peerload.core.coordination.evacuation.LOOKED_AT_MAX", 1)
    x = Given()
    for number in range(6):
        x.submit(spec(priority=number == 5))
    x.when(events.DrainRequested(900))
    stranded = x.node.home.stranded
    left = [task.task for task in stranded.values()]
    assert left == ["x/6"]
    while any(x.node.queue.oldest_first()):
        x.when(events.CancelRequested(901, (next(iter(stranded.values())).task,)))
        left += [task.task for task in stranded.values() if task.task not in left]
        assert len(stranded) <= 2
    assert left == ["x/6", "x/2", "x/3", "x/4", "x/5"]


def test_a_drain_is_durable() -> None:
    record = TaskRecord("x/4", UID, TaskState.QUEUED, 1.0)
    started = events.AgentStarted((events.TaskRow(record, spec()),), counter=4, drained="new disks")
    x = Given(peers=(), started=started)
    assert "spawn 1" not in x.started
    assert x.node.state.profile.drain_reason == "new disks"


def test_who_waits_for_a_drained_node_is_answered_when_it_is_empty() -> None:
    x = Given(peers=("h",), slots=2)
    x.submit(spec(placement=Placement(local=True)))
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    x.when(events.TaskStarted(KEY, 7.0))
    assert x.when(events.EmptyAwaited(4)) == ["refuse BadRequest"]
    x.when(events.DrainRequested(5))
    assert x.when(events.EmptyAwaited(6)) == []
    assert "answer" not in x.end(x.task().key)
    assert "answer" not in x.end(KEY)  # its home has not got the result
    assert x.hear("h", messages.ResultAck("h/1", UID, 1))[-1] == "answer"
    assert x.when(events.EmptyAwaited(7)) == ["answer"]
    assert not any(isinstance(action, Answer) and action.request == 6 for action in x.last)


def test_who_waits_for_a_drained_node_is_told_when_it_is_drained_no_more() -> None:
    x = Given(peers=())
    x.submit()
    x.when(events.DrainRequested(5))
    x.when(events.EmptyAwaited(6))
    assert "refuse BadRequest" in x.when(events.UndrainRequested(7))


def test_who_has_given_up_waiting_is_not_answered_and_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.core.coordination.evacuation.AWAITING_MAX", 2)
    x = Given(peers=())
    x.submit()
    x.when(events.DrainRequested(1))
    for request in range(2, 20):
        assert x.when(events.EmptyAwaited(request)) == []
        assert x.when(events.EmptyAwaitedNoMore(request)) == []
    assert [x.when(events.EmptyAwaited(request)) for request in (20, 21, 22)] == [[], [], ["refuse SlowDown"]]
    x.when(events.EmptyAwaitedNoMore(20))
    did = x.end(x.task().key)
    assert did.count("answer") == 1
    assert x.done(Answer).request == 21


def test_a_drain_that_is_asked_for_again_is_noted_once() -> None:
    x = Given(peers=())
    x.when(events.DrainRequested(1, "new disks"))
    assert [(note.what, note.state, note.reason) for note in x.notes] == [("agent", "draining", "new disks")]
    version = x.node.state.profile.version
    assert x.when(events.DrainRequested(2, "new disks")) == ["answer"]
    assert x.notes == []
    assert x.node.state.profile.version == version
    assert "persist drained" in x.when(events.DrainRequested(3, "newer disks"))
    x.when(events.UndrainRequested(4))
    assert [(note.what, note.state) for note in x.notes] == [("agent", "undrained")]
    x.when(events.UndrainRequested(5))
    assert x.notes == []


# -- room on the disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policies", [ALONE, SENDER, RECEIVER])
def test_without_room_on_the_disk_nothing_is_accepted_or_offered(policies: dict[str, Any]) -> None:
    x = Given(peers=("h", "y"), policies=policies)
    x.when(events.DiskRoomChanged(has_room=False))
    assert x.hear("h", offer(only=True)) == ["Decline to h"]
    assert x.sent(messages.Decline).code == "disk"
    x.hear("y", messages.ProbeRequest(4, messages.Need(), ACCEPTS))
    assert not x.sent(messages.ProbeReply).accepts
    x.submit()
    assert x.submit() == ["persist submission queued", "answer"]  # no search
    x.when(events.DiskRoomChanged(has_room=True))
    assert x.hear("h", messages.Offer("h/2", UID, 1, spec(), 60.0, only=True))[1] == "Accept to h"


def test_troubles_are_facts_of_the_node_that_others_are_told() -> None:
    x = Given()
    before = x.node.state.profile
    x.when(events.DiskRoomChanged(has_room=False, trouble="disk low"))
    x.when(events.LauncherSilent(is_silent=True))
    assert x.node.state.profile.trouble == f"disk low, {Says.LAUNCHER_SILENT()}"
    assert x.node.state.profile.version == before.version + 2
    x.when(events.LauncherSilent(is_silent=True))
    assert x.node.state.profile.version == before.version + 2
    x.when(events.DiskRoomChanged(has_room=True))
    x.when(events.LauncherSilent(is_silent=False))
    assert x.node.state.profile == msgspec.structs.replace(before, version=before.version + 4)


def test_nothing_starts_while_the_launcher_does_not_answer() -> None:
    x = Given(peers=())
    x.when(events.LauncherSilent(is_silent=True))
    assert [(note.what, note.state) for note in x.notes] == [("launcher", "silent")]
    assert "spawn 1" not in x.submit()
    assert "spawn 1" in x.when(events.LauncherSilent(is_silent=False))
    x.when(events.LauncherSilent(is_silent=True))
    x.when(events.LauncherLost())
    assert not x.node.state.profile.trouble
    x.when(events.LauncherReady())
    assert x.notes[0].state == "ready"
