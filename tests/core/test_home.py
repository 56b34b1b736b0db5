"""The home's side: from submit to the one result, through every way in which a handoff can go wrong."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from peerload.core.work import HomePhase
from peerload.model import events, messages, timers
from peerload.model.actions import Answer, Persist, SetTimer
from peerload.model.config import CoreConfig
from peerload.model.errors import NoSuchTask
from peerload.model.gossip import MemberStatus
from peerload.model.resources import LoadReport, Placement, Profile, ResourceRequest
from peerload.model.task import Exit, Guarantee, TaskRecord, TaskState, execution_key
from tests.core.given import ACCEPTS, RECEIVER, SENDER, UID, WALL_S, Given, identity, offer, spec
from tests.each import each
from tests.wording import Says

LEASED = ["persist leased", "changed leased"]
LOCAL = ["persist submission queued", "answer", *LEASED, "spawn 1"]
RESULT = Exit(0, started_at=5.0, ended_at=6.0)


def away(guarantee: Guarantee = Guarantee.AT_LEAST_ONCE, **given: object) -> Given:
    """x/1 runs here, x/2 is leased to y and reported waiting there."""
    x = Given(policies=SENDER, **given)  # type: ignore[arg-type]
    x.submit()
    x.submit(spec(guarantee=guarantee))
    x.hear("z", messages.ProbeReply(1, accepts=False, report=ACCEPTS))  # if it was the one asked first
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0, "y-machine-1"))
    assert task.phase is HomePhase.AWAY
    return x


def test_a_task_with_room_starts_at_once_and_ends_with_its_result() -> None:
    x = Given()
    assert x.submit() == LOCAL
    task = x.task()
    assert x.when(events.TaskStarted(task.key, 5.0)) == ["changed running"]
    assert x.end(task.key) == ["persist done", "changed done", "ForgetTask"]
    assert not x.node.home.tasks
    assert not x.node.home.by_id
    assert x.end(task.key) == ["ForgetTask"]  # told twice


def test_the_next_starts_when_one_ends() -> None:
    x = Given(peers=())
    x.submit()
    assert x.submit() == ["persist submission queued", "answer"]
    assert x.end(x.task(1).key, 3) == ["persist failed", "changed failed", "ForgetTask", *LEASED, "spawn 1"]


def test_an_array_has_members_and_is_cancelled_as_a_whole() -> None:
    x = Given(peers=())
    assert x.submit(indices=(1, 2))[:2] == ["persist submission queued queued", "answer"]
    assert [task.task for task in x.node.home.named("x/1")] == ["x/1.1", "x/1.2"]
    cancel = events.CancelRequested(9, ("x/1", "x/7"))
    waiting = ["persist cancelled", "changed cancelled"]
    assert x.when(cancel) == [*waiting, *waiting, "signal 15", "timer kill 10", "answer"]
    assert x.done(Answer).reply == {"cancelled": ["x/1"], "already_ended": ["x/7"]}


def test_offer_accept_commit() -> None:
    x = Given(policies=SENDER)
    x.submit()
    assert x.submit() == ["persist submission queued", "answer", "ProbeRequest to y", "timer probe 0.25"]
    task = x.task(2)
    accepts = messages.ProbeReply(1, accepts=True, report=ACCEPTS)
    assert x.hear("y", accepts) == ["clear probe", "Offer to y", "timer offer 5"]
    said = ["clear offer", *LEASED, "decided y", "timer lease 65", "Commit to y", "timer ask 1"]
    assert x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0)) == said
    commit = x.sent(messages.Commit)
    assert (commit.nonce, commit.ts, commit.attempt) == (77, 5.0, 1)
    assert task.record.migrations == 1
    assert x.hear("y", messages.Accept(task.task, task.uid, 1, 78, 6.0)) == []  # again: too late
    assert x.hear("y", accepts) == []


def test_a_decline_goes_back_to_the_policy_and_the_task_stays() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    decline = messages.Decline(task.task, task.uid, 1, "room", "full", LoadReport())
    assert x.hear("y", decline) == ["clear offer", "decided stay"]
    assert task.phase is HomePhase.WAITING
    assert not task.withheld
    assert x.hear("y", decline) == []


@pytest.mark.parametrize("how", ["timer", "send failed"])
def test_an_offer_without_an_answer_is_a_decline(how: str) -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    offer = x.sent(messages.Offer)
    did = x.timer("offer", task.uid.hex()) if how == "timer" else x.when(events.SendFailed("y", offer))
    assert did == ["clear offer", "decided stay"]


def test_a_probe_without_a_reply_does_not_accept() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit()
    assert x.timer("probe", "1") == ["decided stay"]
    assert x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS)) == []


def test_searches_wait_for_their_turn_and_get_it() -> None:
    x = Given(policies=SENDER, config=CoreConfig(searches_in_flight_max=1))
    x.submit()
    x.submit()
    assert x.submit() == ["persist submission queued", "answer"]
    assert x.timer("probe", "1") == ["decided stay", "ProbeRequest to y", "timer probe 0.25"]


def test_a_commit_that_never_left_comes_back_at_once() -> None:
    x = away()
    task = x.task(2)
    failed = events.SendFailed("y", messages.Commit(task.task, task.uid, 1, 77, 5.0, 60.0))
    back = ["clear lease", "clear ask", "persist queued", "changed queued"]
    assert x.when(failed)[:4] == back
    assert task.record.attempt == 1


@pytest.mark.parametrize("answer", [messages.NotStarted, messages.Return, messages.Died])
def test_a_refused_or_dead_attempt_is_queued_again_and_its_number_is_burnt(answer: type) -> None:
    x = away()
    task = x.task(2)
    assert x.hear("z", answer(task.task, task.uid, 1)) == []  # not from whom it was leased to
    assert x.hear("y", answer(task.task, task.uid, 9)) == []
    assert x.hear("y", answer(task.task, task.uid, 1))[2:4] == ["persist queued", "changed queued"]
    assert x.hear("y", answer(task.task, task.uid, 1)) == []  # late copy
    if answer is messages.Died:
        x.timer("rest", task.uid.hex())
    x.end(x.task(1).key)
    assert task.record.attempt == 2
    assert task.record.node == "x"


def test_a_task_without_a_limit_is_bounded_by_what_an_offer_can_tell() -> None:
    policies = {"location": {"sender": {"policy": "random"}}, "migration": {"policy": "uncontrolled"}}
    x = Given(policies=policies)
    x.submit()
    x.submit()
    task = x.task(2)
    limit = x.node.home.migrations_max(task)
    assert limit == x.node.state.config.migrations_max
    x.node.home.become(task, "as if it had moved so often", migrations=limit - 1)
    assert x.node.home.may_migrate(task)
    x.node.home.become(task, "as if it had moved so often", migrations=limit)
    assert not x.node.home.may_migrate(task)


def test_return_with_a_suggestion_is_offered_there_without_a_search() -> None:
    x = away(peers=("y", "z"))
    task = x.task(2)
    policies = x.node.state.policies
    assert policies.migration.migrations_max == 1
    returned = x.hear("y", messages.Return(task.task, task.uid, 1, "z"))
    assert "Offer to z" not in returned  # its one migration is used up
    x2 = away(peers=("y", "z"))
    task = x2.task(2)
    x2.node.home.become(task, "as if nothing had been counted", migrations=0)
    assert x2.hear("y", messages.Return(task.task, task.uid, 1, "z"))[-2:] == ["Offer to z", "timer offer 5"]


def test_leases_are_renewed_and_strangers_revoked() -> None:
    x = away()
    task = x.task(2)
    renew = messages.Renew((messages.Renewal(task.task, task.uid, 1, 9.0, 8.0),))
    said = ["timer lease 65", "timer ask 30", "changed running", "RenewOk to y"]
    assert x.hear("y", renew) == said
    assert x.sent(messages.RenewOk).extensions[0].ts == 9.0
    other = messages.Renew((messages.Renewal("x/9", UID, 1, 9.0),))
    assert x.hear("y", other) == ["Revoke to y"]
    assert x.hear("z", renew) == ["Revoke to z"]


def test_a_result_without_a_renewal_before_it_tells_of_the_start() -> None:
    x = away()
    task = x.task(2)
    result = messages.Result(task.task, task.uid, 1, Exit(0, started_at=WALL_S + x.at_s, ended_at=WALL_S + x.at_s))
    told = x.hear("y", result)
    assert told[0] == "changed running"
    assert [(note.state, note.node) for note in x.notes] == [("running", "y")]
    assert "changed running" not in x.hear("y", result)  # it is repeated while its output is fetched


@pytest.mark.parametrize("ahead_s", [5 * 3600.0, -5 * 3600.0])
def test_times_by_a_clock_that_is_wrong_are_neither_in_the_future_nor_before_the_submission(ahead_s: float) -> None:
    x = away()
    task, began = x.task(2), WALL_S + x.at_s
    x.after(10)
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 9.0, began + ahead_s),)))
    assert task.record.submitted_at <= task.running_at <= began + 10
    exit_ = Exit(0, started_at=began + ahead_s, ended_at=began + ahead_s + 4.0)
    x.hear("y", messages.Result(task.task, task.uid, 1, exit_, inline=True))
    assert x.when(events.OutputArrived(task.uid, 1))[0] == "persist done"
    record = task.record
    assert (record.state, record.submitted_at <= record.started_at) == (TaskState.DONE, True)
    assert record.ended_at - record.started_at == pytest.approx(4.0)
    assert record.ended_at <= began + 10


def test_nothing_heard_is_asked_less_and_less_often() -> None:
    x = away()
    uid = x.task(2).uid.hex()
    assert [x.timer("ask", uid) for _ in range(4)] == [["Query to y", f"timer ask {pause}"] for pause in (2, 4, 8, 15)]


def test_a_lease_runs_out_and_is_taken_back_while_nobody_else_has_it() -> None:
    x = away()
    task = x.task(2)
    assert x.after(64).timer("lease", task.uid.hex()) == ["timer lease 1"]
    assert x.after(1).timer("lease", task.uid.hex())[2:4] == ["persist queued", "changed queued"]
    assert task.record.losses == 1
    assert task.record.last_node == "y"
    renew = messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0, 8.0),))
    back = x.hear("y", renew)
    assert "persist leased" in back
    assert back[-1] == "RenewOk to y"
    assert task.phase is HomePhase.AWAY
    assert task.record.losses == 0  # it was none
    assert task.record.attempt == 1
    assert len(x.node.queue) == 0


def test_a_late_renewal_of_a_refused_attempt_is_not_taken_back() -> None:
    x = away()
    task = x.task(2)
    x.hear("y", messages.NotStarted(task.task, task.uid, 1))
    assert "Revoke to y" in x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0),)))
    assert task.record.state is TaskState.QUEUED


def test_only_another_machine_boot_told_by_itself_proves_death() -> None:
    x = away()
    task = x.task(2)
    assert x.meet("y", start=2) == ["Query to y", "timer ask 1"]  # another start of the agent: ask
    x.meet("y", start=3, machine=2, retained=True)
    assert task.phase is HomePhase.AWAY
    x.meet("y", start=1, machine=7)  # a late word of an earlier start
    assert task.phase is HomePhase.AWAY
    assert "persist queued" in x.meet("y", start=3, machine=2)
    assert task.record.reason == Says.REBOOTED("y")


def test_a_late_word_from_before_a_disk_was_lost_proves_nothing() -> None:
    """With its disk a node loses the count of its starts: its first word after that looks older than the last before."""
    x = Given(policies=SENDER)
    before = events.PeerMet(identity("y", 5, 1), Profile("y", slots=1, cpus=1.0, slots_fixed=True), LoadReport())
    anew = replace(identity("y", 1, 2), boot="y-anew", store="another")
    x.when(before)
    x.when(replace(before, identity=anew))
    x.submit()
    x.submit()
    x.hear("z", messages.ProbeReply(1, accepts=False, report=ACCEPTS))  # if it was the one asked first
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0, anew.machine_boot, anew.store))
    x.when(before)
    assert task.phase is HomePhase.AWAY
    x.when(replace(before, identity=replace(anew, boot="y-once-more", machine_boot="y-machine-3")))
    assert task.record.reason == Says.REBOOTED("y")


@pytest.mark.parametrize("released", [False, True])
def test_that_a_task_given_up_for_good_was_killed_is_no_result(released: bool) -> None:
    x = away()
    task = x.task(2)
    x.after(120).timer("lease", task.uid.hex())
    x.when(events.HoldRequested(5, (task.task,)))
    if released:
        x.when(events.ReleaseRequested(6, (task.task,)))
    state = task.record.state
    assert "Revoke to y" in x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0),)))
    did = x.hear("y", messages.Result(task.task, task.uid, 1, Exit(137, 9), inline=True))
    assert did == ["ResultAck to y"]
    assert task.record.state is state
    x.hear("y", messages.Result(task.task, task.uid, 1, RESULT, inline=True))  # that it had ended by then is one (R9)
    assert task.phase is HomePhase.COLLECTING


def test_one_that_may_run_once_is_taken_back_from_a_node_that_was_forgotten() -> None:
    x = away(guarantee=Guarantee.ONCE)
    task = x.task(2)
    x.after(120).timer("lease", task.uid.hex())
    x.rumour("y", MemberStatus.DEAD)
    x.when(events.ForgetRequested(9, "y"))
    assert (task.record.state, task.record.node) == (TaskState.UNKNOWN, "")
    x.meet("y", start=1)
    assert "RenewOk to y" in x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 90.0),)))
    assert (task.record.state, task.record.node) == (TaskState.LEASED, "y")


@pytest.mark.rule("P4")
def test_a_node_that_takes_a_task_and_never_starts_it_is_not_asked_again_and_again() -> None:
    x = Given(policies=SENDER, peers=("y",))
    x.submit(spec(placement=Placement(exclude=("x",))))
    task = x.task(1)
    pauses = []
    for _ in range(20):
        rests = [
            action.at_s - x.at_s
            for action in x.last
            if isinstance(action, SetTimer) and isinstance(action.timer, timers.Rest)
        ]
        if rests:
            pauses.append(rests[0])
            x.after(rests[0]).timer("rest", task.uid.hex())
        elif task.phase is HomePhase.OFFERED:
            offered = x.sent(messages.Offer)
            x.hear(task.offered_to, messages.Accept(task.task, task.uid, offered.attempt, 77, 5.0))
            x.hear(task.record.node, messages.NotStarted(task.task, task.uid, offered.attempt, "no unit to be had"))
        else:
            search = x.sent(messages.ProbeRequest).search
            x.hear("y", messages.ProbeReply(search, accepts=True, report=ACCEPTS))
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]


def test_the_output_is_home_before_the_result_is_recorded_and_acknowledged() -> None:
    x = away()
    task = x.task(2)
    result = messages.Result(task.task, task.uid, 1, RESULT, inline=True)
    assert x.hear("y", result) == ["changed running", "KeepOutput"]
    assert x.hear("y", result) == []
    renew = messages.Renew((messages.Renewal(task.task, task.uid, 1, 9.0, 8.0),))
    assert x.hear("y", renew) == []
    assert x.when(events.OutputArrived(task.uid, 7)) == []
    arrived = x.when(events.OutputArrived(task.uid, 1))
    assert arrived == ["persist done", "changed done", "clear lease", "clear ask", "ResultAck to y"]
    assert x.hear("y", result) == ["ResultAck to y"]


def test_long_output_is_fetched_and_fetched_again_after_an_error() -> None:
    x = away()
    task = x.task(2)
    result = messages.Result(task.task, task.uid, 1, RESULT)
    assert x.hear("y", result) == ["changed running", "FetchOutput"]
    assert x.when(events.OutputArrived(task.uid, 1, "link broke")) == ["timer lease 65"]
    assert x.hear("y", result) == ["FetchOutput"]


def test_output_that_did_not_come_is_recorded_as_missing() -> None:
    x = away()
    task = x.task(2)
    exit_ = replace(RESULT, stdout_bytes=100, stderr_bytes=10)
    x.hear("y", messages.Result(task.task, task.uid, 1, exit_))
    x.when(events.OutputArrived(task.uid, 1, missing=(100, 0)))
    kept = task.record.exit
    assert kept is not None
    assert (kept.stdout_bytes, kept.stderr_bytes, kept.missing_bytes) == (0, 10, 100)
    assert "100 bytes" in task.record.reason


@pytest.mark.parametrize(("sizes", "missing"), [((3, 3), 0), ((5, 7), 6), ((2, 5), 2)])
def test_output_that_the_result_does_not_carry_is_recorded_as_missing(sizes: tuple[int, int], missing: int) -> None:
    x = away()
    task = x.task(2)
    exit_ = replace(RESULT, stdout_bytes=sizes[0], stderr_bytes=sizes[1])
    result = messages.Result(task.task, task.uid, 1, exit_, inline=True, stdout=b"out", stderr=b"err")
    assert x.hear("y", result) == ["changed running", "KeepOutput"]
    x.when(events.OutputArrived(task.uid, 1))
    kept = task.record.exit
    assert kept is not None
    assert (kept.stdout_bytes, kept.stderr_bytes) == (min(sizes[0], 3), min(sizes[1], 3))
    assert kept.missing_bytes == missing


def test_the_first_result_of_any_granted_attempt_counts() -> None:
    x = away(peers=("y", "z"))
    task = x.task(2)
    x.after(65).timer("lease", task.uid.hex())
    assert task.record.state is TaskState.QUEUED
    did = x.hear("y", messages.Result(task.task, task.uid, 1, RESULT, inline=True))
    assert did == ["clear rest", "KeepOutput"]
    assert len(x.node.queue) == 0
    assert "persist done" in x.when(events.OutputArrived(task.uid, 1))
    unknown = messages.Result("x/9", UID, 1, RESULT)
    assert x.hear("y", unknown) == ["ResultAck to y"]


def test_cancel_in_every_phase() -> None:
    final = ["persist cancelled", "changed cancelled"]

    def cancel(x: Given, name: str, *, force: bool = False) -> list[str]:
        return x.when(events.CancelRequested(9, (name,), force=force))

    x = Given(policies=SENDER)
    x.submit()
    key = x.task(1).key
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    assert cancel(x, "x/2") == ["clear offer", "decided over", *final, "answer"]
    assert cancel(x, "x/1", force=True) == [*final, "signal 9", "timer kill 10", "answer"]
    assert cancel(x, "x/1") == ["answer"]  # had ended already
    assert x.timer("kill", key) == ["signal 9"]
    assert x.end(key, 137)[0] == "ForgetTask"
    assert not x.node.home.tasks

    x = away()
    gone = [*final, "Revoke to y", "clear lease", "clear ask", "answer"]
    assert cancel(x, "x/2") == gone

    x = away()
    task = x.task(2)
    x.hear("y", messages.Result(task.task, task.uid, 1, RESULT, inline=True))
    assert cancel(x, "x/2") == [*final, "clear lease", "clear ask", "answer"]
    assert x.when(events.OutputArrived(task.uid, 1)) == []


def test_a_search_ends_with_its_task() -> None:
    x = Given(policies=SENDER, config=CoreConfig(searches_in_flight_max=1))
    x.submit()
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    x.when(events.CancelRequested(9, ("x/2",)))
    assert "ProbeRequest to y" in x.submit()  # the only turn is free again


def test_signals_go_where_it_runs() -> None:
    x = away()
    assert x.when(events.SignalRequested(1, "x/1", 10)) == ["signal 10", "answer"]
    assert x.when(events.SignalRequested(1, "x/2", 10)) == ["refuse BadRequest"]  # not known to run yet
    task = x.task(2)
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 9.0, 8.0),)))
    assert x.when(events.SignalRequested(1, "x/2", 10)) == ["Signal to y", "answer"]
    assert x.when(events.SignalRequested(1, "x/9", 10)) == ["refuse NoSuchTask"]
    assert isinstance(x.done(Answer).error, NoSuchTask)


def test_a_process_that_has_ended_elsewhere_gets_no_signal_while_its_output_waits() -> None:
    """Whoever wants to end the task is told so, and cancels it."""
    x = away()
    task = x.task(2)
    renewal = messages.Renewal(task.task, task.uid, 1, 9.0, 8.0, output_waits_because="no room")
    x.hear("y", messages.Renew((renewal,)))
    assert x.when(events.SignalRequested(1, "x/2", 10)) == ["refuse BadRequest"]
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 10.0, 8.0),)))
    assert x.when(events.SignalRequested(1, "x/2", 10)) == ["Signal to y", "answer"]
    x.hear("y", messages.Result("x/2", task.uid, 1, Exit(0, started_at=9.0, ended_at=10.0, stdout_bytes=5)))
    x.when(events.OutputArrived(task.uid, 1, "the disk of x is full"))
    assert task.phase is HomePhase.AWAY
    assert x.when(events.SignalRequested(1, "x/2", 10)) == ["refuse BadRequest"]


def test_a_time_limit_ends_with_124() -> None:
    x = Given(peers=())
    x.submit(spec(time_limit_s=3.0))
    key = x.task().key
    assert x.when(events.TaskStarted(key, 1_000_100.0)) == ["timer limit 3", "changed running"]
    assert x.after(3).timer("limit", key) == ["signal 15", "timer kill 10"]
    assert x.timer("kill", key) == ["signal 9"]
    x.when(events.TaskEnded(key, Exit(137, started_at=1_000_100.0, ended_at=1_000_113.0)))  # a shell's, of its child
    (row,) = x.done(Persist).rows
    assert row.record.exit.exit_code == 124


@each(("exit_code", "killed_by", "code"), [(0, 0, 0), (3, 0, 3), (143, 15, 124)])
def test_a_task_that_ended_by_itself_in_time_keeps_its_exit_however_late_that_comes(
    exit_code: int, killed_by: int, code: int
) -> None:
    x = Given(peers=())
    x.submit(spec(time_limit_s=3.0))
    key = x.task().key
    x.when(events.TaskStarted(key, 1_000_100.0))
    assert x.after(3).timer("limit", key) == ["signal 15", "timer kill 10"]
    x.when(events.OutputWaits(key, "the disk is full"))
    assert x.after(10).timer("kill", key) == [], "its outputs are not given up"
    x.when(events.TaskEnded(key, Exit(exit_code, killed_by, started_at=1_000_100.0, ended_at=1_000_102.0)))
    (row,) = x.done(Persist).rows
    assert row.record.exit.exit_code == code


def test_a_task_that_was_cancelled_while_its_outputs_were_collected_does_not_wait_for_room() -> None:
    x = Given(peers=())
    x.submit()
    key = x.task().key
    x.when(events.TaskStarted(key, 1_000_100.0))
    x.when(events.CancelRequested(9, ("x/1",)))
    assert x.when(events.OutputWaits(key, "the disk is full"))[-1] == "signal 9"


def test_lost_attempts_are_bounded() -> None:
    x = Given(peers=(), config=CoreConfig(attempts_max=2))
    x.submit()
    assert x.when(events.LauncherReady()) == ["persist queued", "changed queued", "timer rest 1", "ForgetTask"]
    assert "spawn 2" in x.after(1).timer("rest", x.task().uid.hex())
    assert x.when(events.LauncherReady())[:2] == ["persist failed", "changed failed"]


def test_nothing_starts_while_the_launcher_is_away() -> None:
    x = Given(peers=())
    x.when(events.LauncherLost())
    assert x.submit() == ["persist submission queued", "answer"]
    assert x.when(events.LauncherReady()) == [*LEASED, "spawn 1"]


def test_a_restarted_home_assumes_the_lease_was_just_renewed_and_asks() -> None:
    record = TaskRecord("x/4", UID, TaskState.LEASED, 1.0, attempt=3, node="y", nonce=1, machine_boot="m", lease_s=60.0)
    row = events.TaskRow(record, spec())
    x = Given(peers=(), started=events.AgentStarted((row,), counter=4))
    assert x.started[:3] == ["timer lease 65", "Query to y", "timer ask 2"]
    assert x.submit()[0] == "persist submission queued"
    assert "x/5" in x.node.home.by_id


@pytest.mark.parametrize("found", ["running", "ended", "died"])
def test_a_restart_finds_its_own_task(found: str) -> None:
    record = TaskRecord("x/4", UID, TaskState.LEASED, 1.0, attempt=1, node="x", machine_boot="m")
    key = f"{UID.hex()}-1"
    x = Given(
        peers=(),
        started=events.AgentStarted(
            (events.TaskRow(record, spec()),),
            counter=4,
            running=((key, 5.0, 0.0), ("stranger-1", 5.0, 0.0)) if found == "running" else (),
            ended=((key, RESULT),) if found == "ended" else (),
        ),
    )
    expected = {
        "running": ["changed running", "signal 9"],
        "ended": ["persist done", "changed done", "ForgetTask"],
        "died": ["persist queued", "changed queued", "timer rest 1", "ForgetTask"],
    }
    assert x.started == [*expected[found], "timer floors 3600", "Announce"]


def test_a_pinned_task_waits_at_the_only_node_that_may_run_it() -> None:
    x = Given()
    pinned = spec(placement=Placement(node="y"))
    did = x.submit(pinned)
    assert did == ["persist submission queued", "answer", "Offer to y", "timer offer 5", "timer stranded 0.5"]
    assert x.sent(messages.Offer).only
    task = x.task()
    assert x.hear("y", messages.Accept(task.task, task.uid, 1, 7, 5.0))[:3] == ["clear offer", *LEASED]
    assert task.record.migrations == 0  # not by choice
    assert not x.node.home.stranded


def test_a_stranded_task_never_comes_back_to_a_home_that_cannot_run_it() -> None:
    x = Given(peers=("y",))
    x.submit(spec(directory=b"/data"), directory_here=False)
    task = x.task()
    x.hear("y", messages.Accept(task.task, task.uid, 1, 7, 5.0))
    did = x.hear("y", messages.Return(task.task, task.uid, 1, "x"))
    assert "spawn 2" not in did
    assert task.uid in x.node.home.stranded


def test_a_lasting_decline_is_remembered_for_a_minute() -> None:
    x = Given(peers=("y", "z"))
    x.submit(spec(directory=b"/data"), directory_here=False)
    task = x.task()
    first = x.sent(messages.ProbeRequest)
    x.hear("y", messages.ProbeReply(first.search, accepts=True, report=ACCEPTS))
    x.hear("z", messages.ProbeReply(first.search, accepts=False, report=LoadReport()))
    assert x.sent(messages.Offer)
    no = messages.Decline(task.task, task.uid, 1, "directory", "no directory /data there", LoadReport())
    x.hear("y", no)
    assert x.node.membership.has_declined("y", "directory", b"/data")
    assert task.stranded_because == "no directory /data there"
    x.after(61).timer("gates")
    assert not x.node.membership.has_declined("y", "directory", b"/data")


def test_a_file_system_that_did_not_answer_is_asked_again_after_seconds() -> None:
    x = Given(peers=("y",))
    x.submit(spec(directory=b"/data"), directory_here=False)
    task = x.task()
    x.hear("y", messages.Decline(task.task, task.uid, 1, "stalled", "it does not answer", LoadReport()))
    assert x.node.membership.will_decline("y", task.spec)
    assert "Offer to y" in x.after(4).timer("stranded", task.uid.hex())


def test_a_task_that_only_others_can_run_goes_where_an_executor_says() -> None:
    x = Given(peers=(), policies=SENDER)
    x.meet("y", labels=("fast",))
    x.meet("z", labels=("fast",))
    first = x.submit(spec(placement=Placement(labels=("fast",))))
    asked, other = ("y", "z") if "ProbeRequest to y" in first else ("z", "y")
    assert f"Offer to {asked}" in x.hear(asked, messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task()
    x.hear(asked, messages.Accept(task.task, task.uid, 1, 7, 1.0))
    assert task.phase is HomePhase.AWAY
    did = x.hear(asked, messages.Return(task.task, task.uid, 1, to=other, reason="has room"))
    assert f"Offer to {other}" in did
    assert x.sent(messages.Offer).migrations == 1  # a move by choice, which the limit ends
    assert not task.is_queued
    declined = x.hear(other, messages.Decline(task.task, task.uid, 2, "room", "full by now", LoadReport(sequence=9)))
    assert any(name.startswith("ProbeRequest to") for name in declined), "a place is looked for again"
    assert task.uid in x.node.home.stranded


def test_what_was_promised_is_known_better_when_it_is_offered() -> None:
    x = Given(peers=("h",), slots=8, policies=RECEIVER)
    x.node.ledger.expect(UID, ResourceRequest())
    assert x.node.ledger.load_tasks == 1
    x.hear("h", offer(request=ResourceRequest(cpus=4.0)))
    assert x.node.ledger.load_tasks == 4
    x.after(10).timer("reserved", execution_key(UID, 1))
    assert x.node.ledger.load_tasks == 0


def test_a_late_word_of_a_peer_is_not_acted_upon() -> None:
    x = Given(peers=("y",), policies=RECEIVER)
    has_work = LoadReport(load_tasks=5, slots=1, movable=4, gives=True, incarnation=1, sequence=3)
    x.hear("y", messages.Pong(1, LoadReport(slots=1, incarnation=1, sequence=50)))
    late = events.PeerMet(identity("y"), Profile("y", 1, 1.0, slots_fixed=True), has_work, retained=True)
    assert not [name for name in x.when(late) if name.startswith("GiveRequest")]
