"""Tasks that wait at the gate: for other tasks, for a slot of their group; and those that are tried again when they fail."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.core.work import HomePhase, HomeTask
from peerload.model import events, messages
from peerload.model.actions import Answer, ForgetTask, Persist, PutFate, PutTask
from peerload.model.config import CoreConfig
from peerload.model.errors import BadRequest, NoSuchTask, SlowDown
from peerload.model.messages import AwaitedTask, AwaitTasks, TasksTold
from peerload.model.task import Exit, GroupSettings, SubmitOptions, TaskOutcome, TaskState
from tests.core.given import ACCEPTS, SENDER, Given, spec
from tests.wording import Says

RUNS = ["persist leased", "changed leased", "spawn 1"]
ENDS = ["changed done", "ForgetTask"]


def alone(slots: int = 4, **given: Any) -> Given:
    return Given(slots=slots, peers=(), **given)


def reply(x: Given) -> dict[str, Any]:
    return dict(x.done(Answer).reply)


def group(x: Given, name: str = "g", **wanted: Any) -> list[str]:
    x.requests += 1
    return x.when(events.GroupRequested(x.requests, name, **wanted))


def by_name(x: Given, name: str) -> HomeTask:
    return x.node.home.by_id[name]


def phase_of(task: HomeTask) -> HomePhase:
    return task.phase


def words(x: Given, number: int) -> str:
    return x.node.eligibility.reason(x.task(number))


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_lets_no_more_through_than_it_has_slots() -> None:
    x = alone()
    assert group(x, slots=2) == ["persist group g", "answer"]
    for _ in range(2):
        assert x.submit(terms=SubmitOptions(group="g"))[2:] == RUNS
    for number in (3, 4):
        assert x.submit(terms=SubmitOptions(group="g")) == ["persist submission queued", "answer"]
        assert words(x, number) == "group g: 2 of 2 slots taken"
        assert not x.task(number).is_queued
    assert x.submit()[2:] == RUNS  # others go past them
    assert x.end(x.task(2).key) == ["persist done", *ENDS, *RUNS]
    assert x.task(3).phase is HomePhase.HERE
    assert x.task(4).phase is HomePhase.GATED


def test_the_higher_priority_passes_first_then_who_came_first() -> None:
    x = alone(slots=1)
    group(x, slots=1)
    x.submit(terms=SubmitOptions(group="g"))
    for priority in (0, 5, 5, 0):
        x.submit(spec(priority=priority), terms=SubmitOptions(group="g"))
    x.when(events.PriorityRequested(90, ("x/5",), 9))
    assert reply(x) == {"changed": ["x/5"], "passed_on": [], "elsewhere": [], "ended": [], "priority": 9}
    order = []
    for _ in range(5):
        running = next(task for task in x.node.home.tasks.values() if task.phase is HomePhase.HERE)
        order.append(running.task)
        x.end(running.key)
    assert order == ["x/1", "x/5", "x/3", "x/4", "x/2"]


def test_a_paused_group_starts_nothing_until_it_goes_on() -> None:
    x = alone(slots=1)
    x.submit()
    x.submit(terms=SubmitOptions(group="g"))  # it waits for room, not at the gate
    assert x.task(2).is_queued
    assert group(x, paused=True) == ["persist group g", "answer"]
    assert reply(x)["group"] == {
        "name": "g", "slots": None, "paused": True, "taken": 0, "running": 0, "waiting": 1, "held": 0
    }  # fmt: skip
    assert words(x, 2) == Says.GROUP_PAUSED("g")
    assert x.end(x.task(1).key) == ["persist done", *ENDS]
    assert x.node.eligibility.opened_by(x.task(2)) == "peerload group resume g"
    assert group(x, paused=False) == ["persist no group g", "answer", *RUNS]


def test_an_offer_of_a_group_that_is_paused_counts_for_nothing() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit(terms=SubmitOptions(group="g"))
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    assert phase_of(task) is HomePhase.OFFERED
    group(x, paused=True)
    assert x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0)) == []
    assert phase_of(task) is HomePhase.GATED


def test_fewer_slots_end_nothing_and_let_nobody_through_before_there_are_few_enough() -> None:
    x = alone()
    for _ in range(4):
        x.submit(terms=SubmitOptions(group="g"))
    x.submit(terms=SubmitOptions(group="g"))  # waits for room
    group(x, slots=2)
    assert (reply(x)["group"]["taken"], x.task(5).phase) == (4, HomePhase.GATED)
    for number in (1, 2):
        assert x.end(x.task(number).key) == ["persist done", *ENDS]
    assert x.end(x.task(3).key) == ["persist done", *ENDS, *RUNS]


def test_what_is_lost_sight_of_keeps_its_slot() -> None:
    x = Given(policies=SENDER)
    group(x, slots=1)
    x.submit()
    x.submit(terms=SubmitOptions(group="g"))
    x.submit(terms=SubmitOptions(group="g"))
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0))
    x.after(1000.0).timer("lease", task.uid.hex())
    assert (task.record.state, task.record.last_node) == (TaskState.QUEUED, "y")
    assert x.task(3).phase is HomePhase.GATED
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 6.0),)))
    assert task.phase is HomePhase.AWAY  # taken back, without having been in anybody's way
    x.end(x.task(1).key)
    assert x.task(3).phase is HomePhase.GATED


def test_a_group_after_a_restart() -> None:
    x = alone(slots=2)
    group(x, slots=1)
    x.submit(terms=SubmitOptions(group="g"))
    x.submit(terms=SubmitOptions(group="g"))
    terms = SubmitOptions(group="g")
    rows = tuple(events.TaskRow(x.task(number).record, spec(), terms=terms) for number in (1, 2))
    key = x.task(1).key
    started = events.AgentStarted(
        rows, counter=2, running=((key, 5.0, 0.0),), groups=(GroupSettings("g", 1),)
    )  # fmt: skip
    again = alone(slots=2, started=started)
    assert (again.task(1).phase, again.task(2).phase) == (HomePhase.HERE, HomePhase.GATED)
    assert RUNS[0] in again.end(key)
    assert again.task(2).phase is HomePhase.HERE


def test_a_group_is_removed_only_when_it_is_empty() -> None:
    x = alone()
    assert group(x, removed=True) == ["refuse BadRequest"]
    assert group(x, paused=True) == ["refuse BadRequest"]  # nobody has made it
    group(x, slots=3)
    x.submit(terms=SubmitOptions(group="g"))
    assert group(x, removed=True) == ["refuse BadRequest"]
    x.end(x.task().key)
    assert group(x, removed=True) == ["persist no group g", "answer"]
    assert list(x.node.eligibility.groups) == []


def test_so_many_groups_may_be_set() -> None:
    x = alone(config=CoreConfig(groups_max=1))
    group(x, "a", slots=1)
    assert group(x, "b", slots=1) == ["refuse SlowDown"]
    assert isinstance(x.done(Answer).error, SlowDown)
    assert group(x, "a", slots=2) == ["persist group a", "answer"]
    x.submit(terms=SubmitOptions(group="c"))
    assert group(x, "c", paused=False) == ["persist no group c", "answer"]  # nothing is set by that
    assert group(x, "c", paused=True) == ["refuse SlowDown"]


def test_many_of_a_group_are_taken_back_some_at_a_time_before_it_is_answered() -> None:
    x = alone(slots=1)
    x.submit(indices=tuple(range(1, 1001)), terms=SubmitOptions(group="g"))
    x.finish(x.requests)
    x.timer("gates")
    assert "answer" not in group(x, paused=True)
    paused, turn = x.requests, list(x.last)
    gated = sum(task.phase is HomePhase.GATED for task in x.node.home.tasks.values())
    assert 0 < gated < 300
    x.last = turn
    assert "answer" in x.finish(paused)
    assert reply(x)["group"]["waiting"] == 999
    assert len(x.node.queue) == 0
    x.end(by_name(x, "x/1.1").key)
    assert not any(task.phase is HomePhase.HERE for task in x.node.home.tasks.values())


def test_a_group_that_goes_on_while_it_is_being_paused() -> None:
    x = alone(slots=1)
    x.submit(indices=tuple(range(1, 1001)), terms=SubmitOptions(group="g"))
    x.finish(x.requests)
    group(x, paused=True)
    paused = x.requests
    group(x, paused=False)
    assert "answer" in x.timer("request", str(paused))
    for _ in range(5):
        x.timer("gates")
    assert len(x.node.queue) == 999


def test_holding_a_task_frees_its_slot() -> None:
    x = Given(slots=1, peers=())
    group(x, slots=1)
    x.submit()
    x.submit(terms=SubmitOptions(group="g"))
    x.submit(terms=SubmitOptions(group="g"))
    x.when(events.HoldRequested(9, ("x/2",)))
    assert (x.task(2).phase, x.task(3).phase) == (HomePhase.HELD, HomePhase.WAITING)
    x.when(events.ReleaseRequested(10, ("x/2",)))
    assert x.task(2).phase is HomePhase.GATED


# -- waiting for tasks -------------------------------------------------------------------------------------------------


def test_a_task_waits_until_the_other_has_ended() -> None:
    x = alone()
    x.submit()
    assert x.submit(terms=SubmitOptions(after=("x/1",))) == ["persist submission queued", "answer"]
    assert words(x, 2) == Says.AFTER("x/1", "waits on x")
    x.when(events.TaskStarted(x.task(1).key, 5.0))
    assert words(x, 2) == Says.AFTER("x/1", "running on x")
    assert x.end(x.task(1).key, 3) == ["persist failed fate x/1", "changed failed", "ForgetTask", *RUNS]


def test_one_that_needs_a_success_is_cancelled_and_so_is_the_chain() -> None:
    x = alone()
    x.submit()
    for number in range(1, 50):
        x.submit(terms=SubmitOptions(after_ok=(f"x/{number}",)))
    x.submit(terms=SubmitOptions(after=("x/50",)))
    x.end(x.task(1).key, 3)
    assert list(x.node.home.by_id) == ["x/51"]
    ends = [row.record for act in x.last if isinstance(act, Persist) for row in act.rows if isinstance(row, PutTask)]
    reasons = {record.task: (record.state.value, record.reason) for record in ends}
    assert reasons["x/2"] == ("cancelled", "x/1 failed (exit code 3)")
    assert reasons["x/50"] == ("cancelled", "x/49 was cancelled")
    assert x.task(51).phase is HomePhase.HERE  # whatever the end was


def test_an_array_counts_when_all_of_it_has_ended_and_fails_at_once() -> None:
    x = alone()
    x.submit(indices=(1, 2))
    for terms in (SubmitOptions(after=("x/1",)), SubmitOptions(after_ok=("x/1",))):
        assert x.submit(terms=terms) == ["FindTasks", "timer inquiry 5"]  # some of it may have ended and failed before
        x.when(events.TasksFound((events.TaskFound("x/1", is_known=True),)))
    key = {name: x.node.home.by_id[name].key for name in ("x/1.1", "x/1.2")}
    x.end(key["x/1.2"], 1)
    assert "x/3" not in x.node.home.by_id
    assert words(x, 2) == Says.AFTER("x/1", "1 of it unfinished")
    assert x.end(key["x/1.1"])[-3:] == RUNS


def test_to_tell_that_a_task_waits_for_an_array_its_members_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = alone()
    x.submit(indices=(1, 2, 3))
    x.submit(terms=SubmitOptions(after=("x/1",)))
    x.when(events.TasksFound((events.TaskFound("x/1", is_known=True),)))
    monkeypatch.setattr(x.node.home, "unfinished_in", None)
    for left in (3, 2, 1):
        assert words(x, 2) == Says.AFTER("x/1", f"{left} of it unfinished")
        x.end(by_name(x, f"x/1.{left}").key)
    assert x.task(2).phase is HomePhase.HERE


def test_what_ended_before_is_found_on_disk() -> None:
    x = alone()
    x.submit()
    x.end(x.task().key)
    assert x.submit(terms=SubmitOptions(after_ok=("x/1",))) == ["FindTasks", "timer inquiry 5"]
    x.when(events.TasksFound((events.TaskFound("x/1", is_known=True),)))
    assert x.task(2).phase is HomePhase.HERE
    rows = [row for action in x.last if isinstance(action, Persist) for row in action.rows]
    assert PutFate(TaskOutcome("x/1", is_over=True)) in rows
    x.end(x.task(2).key)
    assert not x.node.eligibility.dependencies._awaited  # nobody waits for it any more


def test_an_array_may_end_while_it_is_looked_up_on_disk() -> None:
    x = alone()
    x.submit(indices=(1, 2))
    x.end(by_name(x, "x/1.1").key)
    assert x.submit(terms=SubmitOptions(after_ok=("x/1",))) == ["FindTasks", "timer inquiry 5"]
    x.end(by_name(x, "x/1.2").key)
    x.when(events.TasksFound((events.TaskFound("x/1", is_known=True),)))
    assert x.task(2).phase is HomePhase.HERE
    x.end(x.task(2).key)
    assert not x.node.eligibility.dependencies._awaited


def test_what_failed_before_counts_when_the_array_ends_while_it_is_looked_up() -> None:
    x = alone()
    x.submit(indices=(1, 2))
    x.end(by_name(x, "x/1.1").key, 3)
    x.submit(terms=SubmitOptions(after_ok=("x/1",)))
    x.end(by_name(x, "x/1.2").key)
    failed = "x/1.1 failed (exit code 3)"
    x.when(events.TasksFound((events.TaskFound("x/1", is_known=True, failed=failed),)))
    rows = [row for action in x.last if isinstance(action, Persist) for row in action.rows]
    assert PutFate(TaskOutcome("x/1", is_over=True, failed=failed)) in rows
    (end,) = [row.record for row in rows if isinstance(row, PutTask) and row.record.task == "x/2"][-1:]
    assert (end.state, end.reason) == (TaskState.CANCELLED, failed)


@pytest.mark.parametrize(("name", "says"), [("x/2", "x/2 → x/2"), ("x/3", "the last one submitted on x is x/1")])
def test_nobody_waits_in_a_circle(name: str, says: str) -> None:
    x = alone()
    x.submit()
    assert x.submit(terms=SubmitOptions(after=(name,))) == [
        "refuse NoSuchTask" if name == "x/3" else "refuse BadRequest"
    ]
    error = x.done(Answer).error
    assert says in error.why
    assert error.hint


def test_a_task_of_nobody_is_refused_and_leaves_nothing() -> None:
    x = alone()
    x.submit()
    x.submit(terms=SubmitOptions(after=("x/1.7",)))
    x.when(events.TasksFound((events.TaskFound("x/1.7", is_known=False),)))
    assert isinstance(x.done(Answer).error, NoSuchTask)
    assert not x.node.eligibility.dependencies._awaited


# -- of another home ---------------------------------------------------------------------------------------------------


def waits_for_y(**told: Any) -> Given:
    """x/1 waits for y/7."""
    x = Given(slots=4)
    x.submit(terms=SubmitOptions(after_ok=("y/7",)))
    assert x.sent(AwaitTasks) == AwaitTasks(("y/7",))
    x.hear("y", TasksTold((AwaitedTask("y/7", **({"says": "running on z"} | told)),)))
    return x


def test_another_home_is_asked_before_the_submission_is_accepted() -> None:
    x = waits_for_y()
    assert reply(x)["id"] == "x/1"
    assert words(x, 1) == Says.AFTER("y/7", "running on z")
    assert x.timer("await", "y") == ["AwaitTasks to y", "timer await 10"]
    did = x.hear("y", TasksTold((AwaitedTask("y/7", is_over=True),)))
    assert did == ["persist fate y/7", *RUNS]
    assert x.timer("await", "y") == []


def test_its_failure_is_told_across_homes() -> None:
    x = waits_for_y()
    x.hear("y", TasksTold((AwaitedTask("y/7", is_over=True, failed="y/7 failed (exit code 3)"),)))
    assert not x.node.home.tasks
    assert "cancelled" in str(x.last)


def test_nobody_but_its_home_may_tell() -> None:
    x = waits_for_y()
    x.meet("z")
    assert x.hear("z", TasksTold((AwaitedTask("y/7", is_over=True),))) == []


@pytest.mark.parametrize("says", ["nothing", "no such task"])
def test_it_is_refused_if_its_home_does_not_know_it(says: str) -> None:
    x = Given(slots=4)
    x.submit(terms=SubmitOptions(after=("y/7",)))
    number = str(next(iter(x.node.eligibility.remote_status._inquiries)))
    if says == "nothing":
        assert x.after(5.0).timer("inquiry", number) == ["refuse BadRequest"]
        assert Says.NO_ANSWER(5) in x.done(Answer).error.why
    else:
        x.hear("y", TasksTold((AwaitedTask("y/7", is_known=False),)))
        assert isinstance(x.done(Answer).error, NoSuchTask)
    assert not x.node.home.tasks
    assert x.timer("await", "y") == []


def test_a_home_that_nobody_knows() -> None:
    x = Given()
    assert x.submit(terms=SubmitOptions(after=("z/7",))) == ["refuse NoSuchTask"]


def test_a_home_that_forgot_holds_what_waits_for_it_until_a_user_lets_it_go() -> None:
    x = waits_for_y()
    did = x.hear("y", TasksTold((AwaitedTask("y/7", is_known=False),)))
    assert "persist held" in did
    assert x.task().record.reason == Says.FORGOTTEN("y", "y/7")
    x.when(events.ReleaseRequested(9, ("x/1",)))
    assert x.task().record.is_freed
    assert x.task().phase is HomePhase.HERE


def test_a_restart_keeps_what_was_told_and_asks_again_for_what_was_not() -> None:
    x = waits_for_y()
    row = events.TaskRow(x.task().record, spec(), terms=SubmitOptions(after_ok=("y/7",)))
    told = Given(slots=4, started=events.AgentStarted((row,), counter=1, fates=(TaskOutcome("y/7", is_over=True),)))
    assert told.task().phase is HomePhase.HERE
    untold = Given(slots=4, peers=(), started=events.AgentStarted((row,), counter=1))
    assert untold.task().phase is HomePhase.GATED
    assert words(untold, 1) == Says.AFTER_UNKNOWN("y/7", "y")
    untold.meet("y")
    assert untold.sent(AwaitTasks) == AwaitTasks(("y/7",))


def test_a_home_answers_and_tells_by_itself_when_a_task_ends() -> None:
    x = Given(slots=4)
    x.submit()
    assert x.hear("y", AwaitTasks(("x/1", "z/1"))) == ["TasksTold to y"]
    assert x.sent(TasksTold).tasks == (
        AwaitedTask("x/1", says="waits on x"),
        AwaitedTask("z/1", is_known=False),
    )
    assert x.end(x.task().key, 3) == ["persist failed", "changed failed", "FindTasks", "ForgetTask"]
    x.when(
        events.TasksFound((events.TaskFound("x/1", is_known=True, failed="x/1 failed (exit code 3)", is_over=True),))
    )
    told = x.sent(TasksTold).tasks
    assert told == (AwaitedTask("x/1", is_over=True, failed="x/1 failed (exit code 3)", says="over"),)
    assert x.hear("y", AwaitTasks(("x/9",))) == ["FindTasks"]
    x.when(events.TasksFound((events.TaskFound("x/9", is_known=False),)))
    assert x.sent(TasksTold).tasks[0].is_known is False


def test_the_end_of_an_array_is_told_only_with_what_failed_in_it() -> None:
    x = Given(slots=4)
    x.submit(indices=(1, 2))
    x.end(by_name(x, "x/1.1").key)
    assert x.hear("y", AwaitTasks(("x/1",))) == ["FindTasks"]
    assert "FindTasks" in x.end(by_name(x, "x/1.2").key, 3)  # after the disk was read for the first time
    x.when(events.TasksFound((events.TaskFound("x/1", is_known=True),)))
    assert x.sent(TasksTold).tasks == (AwaitedTask("x/1", says="ending"),)
    failed = "x/1.2 failed (exit code 3)"
    found = events.TasksFound((events.TaskFound("x/1", is_known=True, failed=failed, is_over=True),))
    assert x.when(found) == ["TasksTold to y"]  # it has not asked again
    assert x.sent(TasksTold).tasks == (AwaitedTask("x/1", is_over=True, failed=failed, says="over"),)
    assert x.when(found) == []


def test_of_a_watched_array_the_first_failure_and_the_end_are_news() -> None:
    x = Given(slots=8)
    x.submit(indices=(1, 2, 3, 4, 5))
    x.hear("y", AwaitTasks(("x/1",)))
    x.when(events.TasksFound((events.TaskFound("x/1", is_known=True),)))
    is_news = [
        "FindTasks" in x.end(by_name(x, f"x/1.{member}").key, exit_code)
        for member, exit_code in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 1))
    ]
    assert is_news == [False, True, False, False, True]


def test_nobody_waits_for_an_array_that_is_being_made() -> None:
    x = alone()
    x.submit(indices=tuple(range(1, 1001)), held=True)
    request = x.requests
    making = list(x.last)
    for name in ("x/1", "x/1.3"):
        assert x.submit(terms=SubmitOptions(after=(name,))) == ["refuse NoSuchTask"]
        assert Says.BEING_SUBMITTED() in x.done(Answer).error.why
    assert x.hear("y", AwaitTasks(("x/1.3",))) == ["FindTasks"]
    x.last = making
    assert "answer" in x.finish(request)
    assert x.submit(terms=SubmitOptions(after=("x/1.3",))) == ["persist submission queued", "answer"]


def test_a_repeated_submission_asks_nobody() -> None:
    x = waits_for_y()
    assert x.submit(token="token 1", terms=SubmitOptions(after_ok=("y/7",))) == ["answer"]
    assert reply(x)["repeated"]


# -- retries -----------------------------------------------------------------------------------------------------------


def test_a_failure_is_tried_again_after_a_growing_pause() -> None:
    x = alone()
    x.submit(terms=SubmitOptions(retries=2))
    for failures, pause_s in ((1, 1), (2, 2)):
        did = x.end(x.task().key, 3)
        assert did == ["persist queued", "changed queued", f"timer rest {pause_s}", "ForgetTask"]
        assert x.task().record.reason == Says.RETRY(failures, "x", 3, pause_s, failures, 2)
        x.timer("rest", x.task().uid.hex())
    task = x.task()
    assert x.end(task.key, 3) == ["persist failed", "changed failed", "ForgetTask"]
    assert (task.record.attempt, task.record.reason) == (3, f"exit code 3; {Says.TRIED(3)}")


def test_a_success_ends_it() -> None:
    x = alone()
    x.submit(terms=SubmitOptions(retries=2))
    assert x.end(x.task().key) == ["persist done", *ENDS]


@pytest.mark.parametrize("exit_", [Exit(130, signal=2), Exit(130)])
def test_one_that_its_user_ended_by_a_signal_is_not_tried_again(exit_: Exit) -> None:
    x = alone()
    x.submit(terms=SubmitOptions(retries=2))
    assert "persist queued" in x.when(events.TaskEnded(x.task().key, exit_))  # nobody has sent it one
    x.timer("rest", x.task().uid.hex())
    task = x.task()
    x.when(events.SignalRequested(9, "x/1", 2))
    assert x.when(events.TaskEnded(task.key, exit_)) == ["persist failed", "changed failed", "ForgetTask"]
    assert task.record.reason.endswith(Says.SIGNALLED())


def test_a_signal_of_a_user_that_it_survives_changes_nothing() -> None:
    x = alone()
    x.submit(terms=SubmitOptions(retries=2))
    x.when(events.SignalRequested(9, "x/1", 10))
    assert "persist queued" in x.end(x.task().key, 3)
    x.timer("rest", x.task().uid.hex())
    assert "persist queued" in x.end(x.task().key, 138)  # that was another attempt


def test_one_of_which_the_input_is_not_kept_has_its_failure_as_its_result() -> None:
    x = alone()
    x.submit(terms=SubmitOptions(retries=2), input="name")
    task = x.task()
    x.when(events.InputCut(task.uid))
    assert x.end(task.key, 3) == ["persist failed", "changed failed", "ForgetTask"]
    assert task.record.exit is not None
    assert task.record.exit.exit_code == 3
    assert Says.INPUT_CUT() in task.record.reason
    assert x.done(ForgetTask).output is False


def test_one_that_a_node_gives_back_and_that_cannot_run_again_has_failed() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit(input="name")
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0))
    x.when(events.InputCut(task.uid))
    assert "persist failed" in x.hear("y", messages.Return(task.task, task.uid, 1, "drained", "z"))
    assert task.uid not in x.node.home.tasks


def test_one_that_is_cancelled_is_not_tried_again() -> None:
    x = alone()
    x.submit(terms=SubmitOptions(retries=2))
    x.when(events.CancelRequested(9, ("x/1",)))
    x.end(x.task().key, 143)
    assert not x.node.home.tasks


def test_a_failure_elsewhere_is_noted_before_it_is_acknowledged_and_counts_once() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit(terms=SubmitOptions(retries=1))
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0))
    failed = messages.Result(task.task, task.uid, 1, Exit(3, started_at=5.0, ended_at=6.0), inline=True)
    did = x.hear("y", failed)
    assert did.index("persist queued") < did.index("ResultAck to y")
    assert x.hear("y", failed) == ["ResultAck to y"]  # said again
    assert (task.record.failures, task.phase) == (1, HomePhase.RESTING)


def test_a_task_that_rests_has_no_slot() -> None:
    x = alone(slots=1)
    group(x, slots=1)
    x.submit(terms=SubmitOptions(group="g", retries=1))
    x.submit(terms=SubmitOptions(group="g"))
    x.end(x.task(1).key, 3)
    assert (x.task(1).phase, x.task(2).phase) == (HomePhase.RESTING, HomePhase.HERE)
    x.timer("rest", x.task(1).uid.hex())
    assert x.task(1).phase is HomePhase.GATED


def test_dependents_wait_for_the_last_attempt() -> None:
    x = alone()
    x.submit(terms=SubmitOptions(retries=1))
    x.submit(terms=SubmitOptions(after_ok=("x/1",)))
    x.end(x.task(1).key, 3)
    assert x.task(2).phase is HomePhase.GATED
    x.timer("rest", x.task(1).uid.hex())
    assert x.end(x.task(1).key)[-3:] == RUNS


# -- priorities --------------------------------------------------------------------------------------------------------


def test_another_priority_is_durable_and_counts_in_the_queue() -> None:
    x = Given(slots=1, peers=())
    for _ in range(3):
        x.submit()
    assert x.when(events.PriorityRequested(9, ("x/3", "x/1", "x/7"), 5))[0] == "persist queued"
    assert reply(x) == {
        "changed": ["x/3"], "passed_on": [], "elsewhere": ["x/1"], "ended": ["x/7"], "priority": 5,
    }  # fmt: skip
    row = events.TaskRow(x.task(3).record, spec())
    assert Given(started=events.AgentStarted((row,), counter=3)).task(3).spec.priority == 5
    x.end(x.task(1).key)
    assert x.task(3).phase is HomePhase.HERE


def test_a_bad_request_names_the_next_command() -> None:
    x = alone()
    group(x, removed=True)
    error = x.done(Answer).error
    assert isinstance(error, BadRequest)
    assert error.hint == "peerload group"
