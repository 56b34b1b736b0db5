"""What becomes of a task whose attempt ended without a result: pauses, poison, at most once, fast."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.core.explain import uncollected_reason
from peerload.core.work import HomePhase, HomeTask
from peerload.model import events, messages
from peerload.model.actions import Answer, PutFloor
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import (
    ExecutionRecord,
    ExecutionState,
    Exit,
    FenceKind,
    Guarantee,
    TaskRecord,
    TaskSpec,
    TaskState,
)
from tests.core.given import ACCEPTS, SENDER, UID, Given, offer, spec
from tests.core.test_executor import KEY, commit
from tests.wording import Says

RESULT = Exit(0, started_at=5.0, ended_at=6.0)
ONCE: dict[str, Any] = {"guarantee": Guarantee.ONCE}
FAST: dict[str, Any] = {"guarantee": Guarantee.FAST}


def away(task: TaskSpec, peers: tuple[str, ...] = ("y",), **given: object) -> tuple[Given, HomeTask]:
    """x/1 runs here, x/2 is leased to y."""
    x = Given(policies=SENDER, peers=peers, **given)  # type: ignore[arg-type]
    x.submit()
    x.submit(task)
    for _ in peers:
        for peer in peers:
            x.hear(peer, messages.ProbeReply(1, accepts=peer == "y", report=ACCEPTS))
    return x, accepted(x, 2, "y")


def accepted(x: Given, number: int, node: str, store: str = "") -> HomeTask:
    task = x.task(number)
    attempt = task.record.attempt + 1
    x.hear(node, messages.Accept(task.task, task.uid, attempt, 77, 5.0, f"{node}-machine-1", store))
    assert task.phase is HomePhase.AWAY
    return task


# -- at least once -----------------------------------------------------------------------------------------------------


def test_a_lost_task_pauses_longer_each_time_and_fails_at_last() -> None:
    x = Given(peers=(), config=CoreConfig(poison_nodes=9))
    x.submit()
    task = x.task()
    for pause in (1, 2, 4, 8):
        assert f"timer rest {pause}" in x.when(events.LauncherReady())
        assert task.phase is HomePhase.RESTING
        assert "spawn" in x.after(pause).timer("rest", task.uid.hex())[-1]
    assert "persist failed" in x.when(events.LauncherReady())
    assert Says.LOSSES_MAX(5) in task.record.reason


@pytest.mark.parametrize(("losses", "pause"), [(0, None), (1, 1), (3, 4), (4, 8)])
def test_how_often_it_was_lost_outlives_the_agent(losses: int, pause: float | None) -> None:
    record = TaskRecord("x/4", UID, TaskState.QUEUED, 1.0, attempt=losses, losses=losses)
    x = Given(peers=(), started=events.AgentStarted((events.TaskRow(record, spec()),), counter=4))
    if pause is None:
        assert "spawn 1" in x.started
    else:
        assert f"timer rest {pause}" in x.started
        assert x.task(4).phase is HomePhase.RESTING


def test_a_task_that_took_down_two_nodes_is_held_until_it_is_released() -> None:
    x, task = away(spec(), peers=("y", "z"))
    x.meet("y", start=2, machine=2)
    assert task.record.lost_on == ("y",)
    x.timer("rest", task.uid.hex())
    assert task.record.state is TaskState.QUEUED
    x.when(events.TaskEnded(x.task(1).key, RESULT))  # it starts here
    assert "persist held" in x.when(events.LauncherReady())
    assert task.record.reason == Says.POISONED("y and x")
    assert x.when(events.ReleaseRequested(5, ("x/2", "x/7")))[:2] == ["persist queued", "changed queued"]
    assert x.done(Answer).reply == {"released": ["x/2"], "not_held": ["x/7"]}
    assert task.record.losses == 0
    assert not task.record.lost_on


def test_silence_counts_as_a_node_that_went_down_only_while_others_are_heard() -> None:
    x, task = away(spec(), peers=("y", "z"))
    x.after(65).timer("lease", task.uid.hex())
    assert task.record.lost_on == ("y",)
    x, task = away(spec())
    x.after(65).timer("lease", task.uid.hex())
    assert not task.record.lost_on
    assert task.record.losses == 1


def test_a_node_that_is_back_with_the_task_did_not_go_down() -> None:
    x, task = away(spec(), peers=("y", "z"))
    x.after(65).timer("lease", task.uid.hex())
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0, 8.0, 5.0),)))
    assert (task.record.state, task.record.losses) == (TaskState.LEASED, 0)
    assert not task.record.lost_on


def test_a_held_task_whose_node_is_back_goes_on_there() -> None:
    x, task = away(spec(), peers=("y", "z"), config=CoreConfig(poison_nodes=1))
    x.after(65).timer("lease", task.uid.hex())
    assert task.record.state is TaskState.HELD
    did = x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0, 8.0, 5.0),)))
    assert did[:4] == ["persist queued", "changed queued", "persist leased", "changed leased"]
    assert did[-1] == "RenewOk to y"


# -- at most once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["expired", "died", "rebooted"])
def test_once_what_became_of_it_is_unknown_and_it_is_not_started_again(how: str) -> None:
    x, task = away(spec(**ONCE))
    if how == "expired":
        did = x.after(65).timer("lease", task.uid.hex())
    elif how == "died":
        did = x.hear("y", messages.Died(task.task, task.uid, 1, "its launcher died"))
        assert did[-1] == "ResultAck to y"
    else:
        did = x.meet("y", start=2, machine=2)
    assert "persist unknown" in did
    assert task.record.reason.startswith(Says.ONCE())
    assert task.record.node == ("y" if how == "expired" else "")
    x.end(x.task(1).key)
    assert task.record.attempt == 1
    assert len(x.node.queue) == 0
    again = x.timer("ask", task.uid.hex())
    assert again == (["Query to y", "timer ask 2"] if how == "expired" else [])


def test_once_its_node_is_asked_as_long_as_it_may_know_more() -> None:
    x, task = away(spec(**ONCE))
    x.after(65).timer("lease", task.uid.hex())
    pauses = [x.timer("ask", task.uid.hex())[-1] for _ in range(10)]
    assert pauses == [f"timer ask {pause}" for pause in (2, 4, 8, 16, 32, 64, 128, 256, 300, 300)]


def test_once_the_node_comes_back_with_the_task_or_its_result() -> None:
    x, task = away(spec(**ONCE))
    x.after(65).timer("lease", task.uid.hex())
    did = x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0, 8.0, 5.0),)))
    assert did[:3] == ["persist leased", "changed leased", "timer lease 65"]
    assert task.record.attempt == 1
    x.after(65).timer("lease", task.uid.hex())
    assert x.hear("y", messages.Result(task.task, task.uid, 1, RESULT, inline=True)) == ["KeepOutput"]
    assert "persist done" in x.when(events.OutputArrived(task.uid, 1))


def test_once_an_output_that_breaks_off_leaves_it_unknown() -> None:
    x, task = away(spec(**ONCE))
    x.after(65).timer("lease", task.uid.hex())
    x.hear("y", messages.Result(task.task, task.uid, 1, RESULT))
    assert x.when(events.OutputArrived(task.uid, 1, "it broke off")) == []
    assert uncollected_reason(task) == Says.UNCOLLECTED("y", "it broke off")
    assert task.phase is HomePhase.UNKNOWN


@pytest.mark.parametrize("answer", [messages.NotStarted, messages.Return])
@pytest.mark.parametrize("late", [False, True])
def test_once_only_the_word_that_it_never_started_queues_it_again(answer: type, *, late: bool) -> None:
    x, task = away(spec(**ONCE))
    if late:
        x.after(65).timer("lease", task.uid.hex())
    assert "persist queued" in x.hear("y", answer(task.task, task.uid, 1))
    assert task.record.losses == 0
    x.end(x.task(1).key)
    assert task.record.attempt == 2


def test_once_a_commit_that_never_left_has_started_nothing() -> None:
    x, task = away(spec(**ONCE))
    failed = events.SendFailed("y", messages.Commit(task.task, task.uid, 1, 77, 5.0, 60.0))
    assert "persist queued" in x.when(failed)


def test_once_at_home_a_run_that_left_nothing_is_unknown() -> None:
    x = Given(peers=())
    x.submit(spec(**ONCE))
    assert "persist unknown" in x.when(events.LauncherReady())
    assert x.task().phase is HomePhase.UNKNOWN
    record = TaskRecord("x/4", UID, TaskState.LEASED, 1.0, attempt=1, node="x")
    x = Given(peers=(), started=events.AgentStarted((events.TaskRow(record, spec(**ONCE)),), counter=4))
    assert x.started[0] == "persist unknown"


def test_once_a_restarted_home_asks_again() -> None:
    record = TaskRecord("x/4", UID, TaskState.UNKNOWN, 1.0, attempt=1, node="y")
    x = Given(started=events.AgentStarted((events.TaskRow(record, spec(**ONCE)),), counter=4))
    assert x.started[:2] == ["Query to y", "timer ask 2"]
    assert x.when(events.CancelRequested(3, ("x/4",)))[:2] == ["persist cancelled", "changed cancelled"]
    assert x.sent(messages.Revoke).attempt == 1


def test_once_a_forgotten_node_is_not_asked_any_more() -> None:
    x, task = away(spec(**ONCE))
    x.after(65).timer("lease", task.uid.hex())
    x.hear("y", messages.Leaving())
    assert "persist unknown" in x.when(events.ForgetRequested(5, "y"))
    assert x.done(Answer).reply["tasks"] == 1
    assert task.record.node == ""


def test_once_the_executor_remembers_its_start_until_the_home_has_taken_note() -> None:
    x = Given(peers=("h",), config=CoreConfig(floor_kept_s=1.0))
    x.hear("h", offer(**ONCE))
    x.hear("h", commit(x))
    x.when(events.TaskStarted(KEY, 7.0))
    x.when(events.LauncherReady())
    x.after(10).timer("floors")
    query = messages.Query("h/1", UID, 1)
    assert x.hear("h", query) == ["Died to h"]
    assert x.hear("h", messages.ResultAck("h/1", UID, 1)) == ["persist floor=1"]
    assert x.hear("h", messages.ResultAck("h/1", UID, 1)) == []
    assert x.after(10).timer("floors")[0] == "persist drop 1 floors"


# -- fast --------------------------------------------------------------------------------------------------------------


def test_fast_is_queued_again_at_once_when_its_node_is_called_dead() -> None:
    x, task = away(spec(**FAST))
    x.node.state.actions = []
    x.node.handoff.leases.peer_died("y")
    assert task.record.state is TaskState.QUEUED
    assert task.record.reason == Says.CALLED_DEAD("y")
    assert task.phase is HomePhase.WAITING  # no pause
    x, task = away(spec())
    x.node.handoff.leases.peer_died("y")
    assert task.record.state is TaskState.LEASED  # no proof for any other


def test_fast_the_first_result_counts_and_the_other_copy_is_revoked() -> None:
    x, task = away(spec(**FAST), peers=("y", "z"))
    x.node.state.actions = []
    x.node.handoff.leases.peer_died("y")
    for number in range(2, 5):
        for peer in ("y", "z"):
            x.hear(peer, messages.ProbeReply(number, accepts=peer == "z", report=ACCEPTS))
    x.node.handoff.offer(task, "z", voluntary=True)
    accepted(x, 2, "z")
    assert task.record.attempt == 2
    x.hear("y", messages.Result(task.task, task.uid, 1, RESULT, inline=True))
    did = x.when(events.OutputArrived(task.uid, 1))
    assert did[-2:] == ["Revoke to z", "ResultAck to y"]
    assert x.hear("z", messages.Result(task.task, task.uid, 2, RESULT)) == ["ResultAck to z"]


# -- at the node that runs it ------------------------------------------------------------------------------------------


def test_a_process_that_never_was_is_not_started_durably() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer(**ONCE))
    x.hear("h", commit(x))
    lost = events.TaskLost(KEY, "its lease ran out before it could be started", never_started=True)
    assert x.when(lost) == ["persist drop floor=1", "NotStarted to h", "ForgetTask"]
    rows = [row for act in x.last if hasattr(act, "rows") for row in act.rows if isinstance(row, PutFloor)]
    assert [row.kind for row in rows] == [FenceKind.REFUSED]
    assert x.hear("h", messages.Query("h/1", UID, 1)) == ["NotStarted to h"]


def test_a_process_of_its_own_that_never_was_is_no_loss_and_is_started_again_after_a_pause() -> None:
    x = Given(peers=())
    x.submit(spec(**ONCE))
    task = x.task()
    uid = task.uid.hex()
    for attempt, pause in ((1, 1), (2, 2), (3, 4)):
        did = x.when(events.TaskLost(task.key, "no cgroup", never_started=True))
        assert did == ["persist queued", "changed queued", f"timer rest {pause}", "ForgetTask"]
        assert task.record.reason == "no cgroup"
        assert (task.record.attempt, task.record.losses, task.record.lost_on) == (attempt, 0, ())
        assert not x.node.ledger.running
        assert f"spawn {attempt + 1}" in x.after(pause).timer("rest", uid)
    assert "persist done" in x.end(task.key)


def test_a_cancelled_task_whose_process_never_was_is_over() -> None:
    x = Given(peers=())
    x.submit(spec(**ONCE))
    key = x.task().key
    x.when(events.CancelRequested(9, ("x/1",)))
    assert x.when(events.TaskLost(key, "no cgroup", never_started=True)) == ["ForgetTask"]
    assert not x.node.home.tasks
    assert not x.node.ledger.running


def test_an_attempt_nobody_knows_that_ends_without_a_record_is_said_to_have_died() -> None:
    x = Given(peers=("h",), started=events.AgentStarted(running=((KEY, 5.0, 50.0),)))
    query = messages.Query("h/1", UID, 1)
    assert x.hear("h", query) == []
    assert x.when(events.TaskLost(KEY, "it was frozen for too long")) == ["ForgetTask"]
    assert x.hear("h", query) == ["Died to h"]


def test_nothing_is_said_of_an_attempt_that_the_launcher_still_has() -> None:
    x = Given(peers=("h",), started=events.AgentStarted(running=((KEY, 5.0, 50.0),)))
    assert x.started[:2] == ["persist floor=1", "signal 9"]
    query = messages.Query("h/1", UID, 1)
    assert x.hear("h", query) == []
    x.end(KEY)
    assert x.hear("h", query) == ["Died to h"]


def test_a_start_without_its_process_is_said_to_have_died_after_a_restart() -> None:
    record = ExecutionRecord("h/1", UID, 1, "h", ExecutionState.START, spec(**ONCE), 50.0, 60.0)
    floors = ((UID, 1, FenceKind.STARTED_ONCE, "h"),)
    x = Given(peers=("h",), started=events.AgentStarted(executions=(record,), floors=floors))
    assert x.started[:2] == ["persist drop", "Died to h"]
    assert x.hear("h", messages.Query("h/1", UID, 1)) == ["Died to h"]


def test_another_priority_is_told_to_the_node_that_has_it_queued_and_with_each_renewal() -> None:
    x, task = away(spec())
    did = x.when(events.PriorityRequested(9, (task.task,), 7))
    assert did == ["persist leased", "changed leased", "RenewOk to y", "answer"]
    (extension,) = x.sent(messages.RenewOk).extensions
    assert (extension.uid, extension.attempt, extension.ts, extension.priority) == (task.uid, 1, 0.0, 7)
    assert x.done(Answer).reply["passed_on"] == [task.task]
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0),)))
    assert x.sent(messages.RenewOk).extensions[0].priority == 7
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 95.0, 94.0),)))
    assert x.sent(messages.RenewOk).extensions[0].priority is None  # it runs
    x.when(events.PriorityRequested(10, (task.task,), 8))
    assert x.done(Answer).reply["elsewhere"] == [task.task]


# -- a home whose database has lost its last commits -------------------------------------------------------------------


def _queued(number: int, task: TaskSpec) -> events.TaskRow:
    uid = bytes([number]) * 16
    return events.TaskRow(TaskRecord(f"x/{number}", uid, TaskState.QUEUED, 1.0), task)


def test_a_home_that_has_lost_commits_starts_nothing_as_long_as_a_lease_may_be_left() -> None:
    rows = (_queued(1, spec()), _queued(2, spec(**ONCE)), _queued(3, spec(lease_s=600.0)))
    started = events.AgentStarted(tasks=rows, counter=3, commits_lost=True)
    x = Given(slots=4, peers=(), started=started)
    assert not any(did.startswith("spawn") for did in x.started)
    assert [x.task(number).phase for number in (1, 2, 3)] == [HomePhase.RESTING, HomePhase.HELD, HomePhase.RESTING]
    assert Says.STARTED_UNKNOWN() in x.task(2).record.reason
    assert x.started.count("timer rest 650") == 2
    x.after(650)
    assert "spawn 1" in x.timer("rest", x.task(1).uid.hex())


def test_what_comes_back_to_such_a_home_waits_too() -> None:
    record = TaskRecord("x/1", UID, TaskState.LEASED, 1.0, attempt=1, node="y", lease_s=60.0)
    row = events.TaskRow(record, spec())
    x = Given(peers=("y",), started=events.AgentStarted(tasks=(row,), counter=1, commits_lost=True))
    assert "timer rest 65" in x.hear("y", messages.NotStarted("x/1", UID, 1, "not here"))
    assert x.task().phase is HomePhase.RESTING
    sound = Given(peers=("y",), started=events.AgentStarted(tasks=(row,), counter=1))
    assert "spawn 2" in sound.hear("y", messages.NotStarted("x/1", UID, 1, "not here"))


def test_what_such_a_home_believes_to_run_here_may_have_been_given_away_since() -> None:
    record = TaskRecord("x/1", UID, TaskState.LEASED, 1.0, attempt=1, node="x")
    row = events.TaskRow(record, spec(lease_s=600.0))
    x = Given(peers=(), started=events.AgentStarted(tasks=(row,), counter=1, commits_lost=True))
    assert x.task().phase is HomePhase.RESTING
    assert "timer rest 650" in x.started


def test_such_a_home_skips_the_numbers_of_attempts_that_it_may_have_granted() -> None:
    rows = (_queued(1, spec()), _queued(2, spec()))
    x = Given(
        slots=1, peers=(), started=events.AgentStarted(tasks=rows, counter=9, attempts_from=500, attempts_up_to=7)
    )
    assert x.task(1).record.attempt == 500
    x.end(x.task(1).key)
    assert x.task(2).record.attempt == 500
    x.end(x.task(2).key)
    x.submit()
    assert x.task(10).record.attempt == 1, "of what is submitted after the loss all is known"


def test_an_attempt_that_such_a_home_knows_nothing_of_is_nobodys_breach() -> None:
    """Its node has run it, and says so again and again until it is told that this was heard."""
    x = Given(policies=SENDER, peers=(), started=events.AgentStarted(tasks=(), counter=1))
    x.meet("y", start=5)
    x.meet("z", start=5)
    x.submit()
    x.submit()
    x.node.state.attempts_from, x.node.state.attempts_up_to = 500, 9
    x.hear("z", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.node.home.by_id["x/3"]
    assert x.sent(messages.Offer).attempt == 500
    late = messages.Result("x/3", task.uid, 1, RESULT)
    assert x.hear("y", late) == ["ResultAck to y"]
    x.hear("z", messages.Accept("x/3", task.uid, 500, 1, 0.0, "z-machine-1", "z-store"))
    assert (task.record.node, task.record.attempt) == ("z", 500)
    assert x.hear("y", late) == ["ResultAck to y"]
    assert not [note for note in x.notes if note.what == "security"]
    assert x.hear("y", messages.Died("x/3", task.uid, 1, "", "y-store")) == []
    assert not [note for note in x.notes if note.what == "security"]
    assert task.phase is HomePhase.AWAY


def test_what_is_released_in_such_a_home_waits_too() -> None:
    record = TaskRecord("x/1", UID, TaskState.HELD, 1.0)
    started = events.AgentStarted(
        tasks=(events.TaskRow(record, spec()),), counter=1, commits_lost=True, attempts_from=500, attempts_up_to=1
    )
    x = Given(peers=(), started=started)
    assert "timer rest 65" in x.when(events.ReleaseRequested(1, ("x/1",)))
    assert x.task().phase is HomePhase.RESTING
    x.submit()
    assert x.task(2).phase is HomePhase.HERE
    x.end(x.task(2).key)
    x.after(65)
    assert "spawn 500" in x.timer("rest", UID.hex())


def test_an_executor_promises_nothing_about_an_attempt_that_its_launcher_has_ended_and_it_knows_nothing_of() -> None:
    """Its database was put back from an older copy."""
    started = events.AgentStarted(ended=((KEY, RESULT),))
    x = Given(peers=("h",), started=started)
    assert "Died to h" in x.hear("h", messages.Query("h/1", UID, 1))


def test_the_word_of_a_node_that_has_come_back_with_an_older_database_counts_for_nothing() -> None:
    x = Given(policies=SENDER, peers=())
    x.meet("y", start=5)
    x.submit()
    x.submit(spec(**ONCE))
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = accepted(x, 2, "y", "y-store")
    older = messages.Identity("y", "y-boot-of-a-copy", "y-machine-1", "y-store", 3, "y:1")
    x.when(events.PeerMet(older, Profile("y", 1, cpus=1.0, slots_fixed=True), LoadReport()))
    x.hear("y", messages.NotStarted("x/2", task.uid, 1, "it was never started there", "y-store"))
    assert task.phase is HomePhase.AWAY
    x.hear("y", messages.Died("x/2", task.uid, 1, "nothing is left of it there", "y-store"))
    assert task.phase is HomePhase.AWAY
    x.after(65).timer("lease", task.uid.hex())
    assert task.record.state is TaskState.UNKNOWN


def test_a_late_word_of_an_earlier_start_is_no_older_database() -> None:
    x, task = away(spec(**ONCE))
    x.meet("y", start=2)
    x.meet("y", start=1)
    x.hear("y", messages.NotStarted("x/2", task.uid, 1, "it was never started there"))
    assert task.phase is not HomePhase.AWAY
