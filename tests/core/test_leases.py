"""How long a lease lasts, who may end it, and what is said again when it was lost (R1 … R8)."""

from __future__ import annotations

import msgspec
import pytest

from peerload.core.explain import uncollected_reason
from peerload.core.handoff.home import granted
from peerload.core.work import HomePhase, HomeTask
from peerload.model import events, messages
from peerload.model.actions import PutFloor, SetLease, SpawnTask
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport
from peerload.model.task import Exit, FenceKind, Guarantee, TaskRecord, TaskSpec, TaskState
from tests.core.given import SENDER, UID, Given, offer, spec
from tests.core.test_executor import KEY, commit, guest
from tests.core.test_losses import accepted, away


def renew(task: HomeTask, ts: float, ran_s: float = 0.0) -> messages.Renew:
    return messages.Renew((messages.Renewal(task.task, task.uid, task.record.attempt, ts, 8.0, 5.0, ran_s),))


# -- how long ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "lease_s", "deadline_s"),
    [
        (spec(), 60.0, 65.0),
        (spec(lease_s=10.0), 10.0, 15.0),
        (spec(lease_s=600.0), 600.0, 650.0),  # the grace grows with it: clocks drift
        (spec(lease_auto=True), 60.0, 65.0),
    ],
)
def test_a_task_may_have_a_lease_of_its_own(task: TaskSpec, lease_s: float, deadline_s: float) -> None:
    x, leased = away(task)
    assert x.sent(messages.Commit).lease_s == lease_s
    assert leased.record.lease_s == lease_s
    assert granted(leased).deadline_s == x.at_s + deadline_s
    x.hear("y", renew(leased, 9.0))
    assert x.sent(messages.RenewOk).extensions[0].lease_s == lease_s


def test_a_lease_grows_with_the_time_run_and_what_may_be_granted_is_durable_first() -> None:
    x, task = away(spec(lease_auto=True))
    x.hear("y", renew(task, 9.0, ran_s=500.0))
    assert x.sent(messages.RenewOk).extensions[0].lease_s == 60.0
    did = x.hear("y", renew(task, 10.0, ran_s=1000.0))
    assert did[0] == "persist leased"
    assert did[-1] == "RenewOk to y"
    assert task.record.lease_s == 200.0
    assert x.sent(messages.RenewOk).extensions[0].lease_s == 100.0
    assert "persist leased" not in x.hear("y", renew(task, 11.0, ran_s=2000.0))
    x.hear("y", renew(task, 12.0, ran_s=1e6))
    assert x.sent(messages.RenewOk).extensions[0].lease_s == 2400.0  # 40 min
    x.hear("y", renew(task, 13.0))  # what it says is not believed to take time away
    assert granted(task).deadline_s == x.at_s + 2600.0


def test_a_restarted_home_assumes_the_longest_lease_that_may_have_been_granted() -> None:
    record = TaskRecord("x/4", UID, TaskState.LEASED, 1.0, attempt=3, node="y", lease_s=1200.0)
    x = Given(peers=(), started=events.AgentStarted((events.TaskRow(record, spec(lease_auto=True)),), counter=4))
    assert x.started[0] == "timer lease 1300"


def test_the_deadline_never_moves_back() -> None:
    x, task = away(spec(lease_s=100.0))
    before_s = granted(task).deadline_s
    x.node.handoff.leases.extend(task, 10.0)
    assert granted(task).deadline_s == before_s


def test_how_long_it_has_run_is_said_where_that_counts() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer(lease_auto=True))
    x.hear("h", commit(x))
    x.when(events.TaskStarted(KEY, 7.0))
    x.after(30).timer("renew")
    assert x.sent(messages.Renew).renewals[0].ran_s == 30.0
    x = guest()
    x.after(30).timer("renew")
    assert x.sent(messages.Renew).renewals[0].ran_s == 0.0


def test_what_the_launcher_is_told_carries_the_ts_and_the_longest_freeze() -> None:
    x = Given(peers=("h",), config=CoreConfig(frozen_s_max=77.0))
    x.hear("h", offer())
    x.hear("h", commit(x))
    spawned = x.done(SpawnTask)
    assert (spawned.ts, spawned.deadline_s, spawned.frozen_s_max) == (100.0, 160.0, 77.0)
    x.when(events.TaskStarted(KEY, 7.0))
    x.after(10).hear("h", messages.RenewOk((messages.LeaseExtension(UID, 1, 110.0, 60.0),)))
    assert x.done(SetLease) == SetLease(KEY, 170.0, 110.0)


def test_a_shorter_lease_is_renewed_sooner_from_then_on() -> None:
    x = guest()
    did = x.after(1).hear("h", messages.RenewOk((messages.LeaseExtension(UID, 1, 101.0, 8.0),)))
    assert did == ["timer renew 2", "SetLease"]


# -- said again --------------------------------------------------------------------------------------------------------


def test_an_accept_is_said_again_until_the_commit_comes_or_its_time_is_up() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer())
    first = x.sent(messages.Accept)
    assert (first.machine_boot, first.store) == ("x-machine-1", "x-store")
    pauses = []
    for pause in (1, 2, 4):
        pauses.append(x.after(pause).timer("reserved", KEY))
        assert x.sent(messages.Accept) == first  # R1: the lease counts from the first
    assert pauses == [["Accept to h", f"timer reserved {pause}"] for pause in (2, 4, 3)]
    assert x.after(3).timer("reserved", KEY) == ["clear reserved"]
    assert x.node.ledger.load_tasks == 0


def test_an_accept_said_again_is_answered_with_the_commit_after_moving_the_deadline() -> None:
    x, task = away(spec())
    again = messages.Accept(task.task, task.uid, 1, 77, 5.0)
    assert x.after(3).hear("y", again) == ["timer lease 65", "Commit to y", "timer ask 1"]
    assert x.sent(messages.Commit).ts == 5.0
    failed = events.SendFailed("y", x.sent(messages.Commit))
    assert x.when(failed) == []  # the first one may have arrived
    assert x.hear("y", messages.Accept(task.task, task.uid, 1, 78, 6.0)) == []  # another reservation
    assert x.hear("z", again) == []


def test_a_restarted_home_commits_to_the_reservation_that_it_has_granted() -> None:
    record = TaskRecord("x/4", UID, TaskState.LEASED, 1.0, attempt=3, node="y", nonce=9, lease_s=60.0)
    x = Given(peers=(), started=events.AgentStarted((events.TaskRow(record, spec()),), counter=4))
    assert "Commit to y" in x.hear("y", messages.Accept("x/4", UID, 3, 9, 5.0))
    x = Given(peers=(), started=events.AgentStarted((events.TaskRow(record, spec()),), counter=4))
    assert x.hear("y", messages.Accept("x/4", UID, 3, 8, 5.0)) == []


def test_a_restarted_home_takes_no_commit_for_the_only_one() -> None:
    record = TaskRecord("x/4", UID, TaskState.LEASED, 1.0, attempt=3, node="y", nonce=9, lease_s=60.0)
    x = Given(peers=(), started=events.AgentStarted((events.TaskRow(record, spec()),), counter=4))
    x.hear("y", messages.Accept("x/4", UID, 3, 9, 5.0))
    failed = events.SendFailed("y", x.sent(messages.Commit))
    assert x.when(failed) == []  # one that was said before the restart may have arrived
    assert (x.task(4).phase, x.task(4).record.state) == (HomePhase.AWAY, TaskState.LEASED)


# -- who may end it ----------------------------------------------------------------------------------------------------


def test_the_machine_boot_of_the_accept_counts_not_the_one_seen_last() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=LoadReport(slots=1, accepts=True)))
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0, "y-machine-2", "s"))
    x.meet("y", start=2, machine=2)  # what the ACCEPT has said already
    assert task.phase is HomePhase.AWAY
    assert "persist queued" in x.meet("y", start=3, machine=3)


@pytest.mark.parametrize("answer", [messages.NotStarted, messages.Return, messages.Died])
def test_the_word_of_another_database_does_not_count(answer: type) -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=LoadReport(slots=1, accepts=True)))
    task = accepted(x, 2, "y", "first")
    assert x.hear("y", answer(task.task, task.uid, 1, store="second")) == []
    assert task.record.state is TaskState.LEASED
    assert "persist queued" in x.hear("y", answer(task.task, task.uid, 1, store="first"))


# -- floors ------------------------------------------------------------------------------------------------------------


def queried(x: Given, number: int) -> bytes:
    uid = bytes([number]) * 16
    x.hear("h", messages.Query(f"h/{number}", uid, 1))
    return uid


def test_floors_of_no_use_any_more_are_forgotten_durably() -> None:
    x = Given(peers=("h",), config=CoreConfig(floor_kept_s=100.0))
    queried(x, 1)
    queried(x.after(50), 2)
    assert x.after(50).timer("floors") == ["persist drop 1 floors", "timer floors 50"]
    assert len(x.node.executor.fences) == 1
    assert x.after(50).timer("floors") == ["persist drop 1 floors", "timer floors 100"]


def test_a_floor_stays_while_its_task_is_here() -> None:
    x = guest(config=CoreConfig(floor_kept_s=100.0))
    assert x.after(100).timer("floors") == ["timer floors 100"]
    assert x.hear("h", offer()) == ["Renew to h", "Decline to h"]


def test_floors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.core.handoff.executor.DROPPED_AT_ONCE_MAX", 3)
    x = Given(peers=("h",), config=CoreConfig(floors_kept_max=5))
    for number in range(20):
        queried(x.after(1), number)
        assert len(x.node.executor.fences) <= 8
    assert bytes([19]) * 16 in x.node.executor.fences
    assert bytes([0]) * 16 not in x.node.executor.fences


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.ONCE])
def test_floors_of_started_attempts_are_bounded_too(monkeypatch: pytest.MonkeyPatch, guarantee: Guarantee) -> None:
    monkeypatch.setattr("peerload.core.handoff.executor.DROPPED_AT_ONCE_MAX", 3)
    x = Given(peers=("h",), config=CoreConfig(floors_kept_max=5))
    waits_for_ack = []
    for number in range(20):
        task, uid = f"h/{number}", bytes([number]) * 16
        x.after(1).hear("h", messages.Offer(task, uid, 1, spec(guarantee=guarantee), 60.0))
        accept = x.sent(messages.Accept)
        assert "spawn 1" in x.hear("h", messages.Commit(task, uid, 1, accept.nonce, accept.ts, 60.0))
        x.end(f"{uid.hex()}-1")
        if number:
            x.hear("h", messages.ResultAck(task, uid, 1))
        else:  # what nobody has taken note of is kept: it is here
            waits_for_ack.append(uid)
        assert len(x.node.executor.fences) <= 8
    assert all(uid in x.node.executor.fences for uid in [*waits_for_ack, uid])
    assert bytes([1]) * 16 not in x.node.executor.fences


def test_a_floor_tells_why_it_is_there() -> None:
    x = Given(peers=("h",))
    queried(x, 1)
    rows = [row for act in x.last if hasattr(act, "rows") for row in act.rows if isinstance(row, PutFloor)]
    assert [row.kind for row in rows] == [FenceKind.REFUSED]


# -- outputs that wait -------------------------------------------------------------------------------------------------


def test_a_home_hears_at_once_that_output_files_wait_where_their_task_ran() -> None:
    y = guest()
    y.when(events.OutputWaits(KEY, "the disk is full" * 100))
    told = y.sent(messages.Renew).renewals[0].output_waits_because
    assert told == ("the disk is full" * 100)[: messages.WHY_LENGTH_MAX]
    assert y.after(15).sent(messages.Renew).renewals[0].output_waits_because == told


def test_a_home_forgets_that_output_files_wait_when_the_attempt_says_so_no_more_or_is_lost() -> None:
    x, task = away(spec())
    told = msgspec.structs.replace(renew(task, 9.0).renewals[0], output_waits_because="the disk is full")
    x.hear("y", messages.Renew((told,)))
    assert uncollected_reason(task).endswith("the disk is full")
    x.hear("y", renew(task, 10.0))
    assert uncollected_reason(task) == ""
    x.hear("y", messages.Renew((msgspec.structs.replace(told, ts=11.0),)))
    x.hear("y", messages.Result(task.task, task.uid, task.record.attempt, Exit(0), inline=True))
    assert task.output_waits_because == ""


def test_a_home_forgets_that_output_files_wait_with_a_lost_attempt() -> None:
    x, task = away(spec())
    told = msgspec.structs.replace(renew(task, 9.0).renewals[0], output_waits_because="the disk is full")
    x.hear("y", messages.Renew((told,)))
    x.hear("y", messages.Died(task.task, task.uid, task.record.attempt, "its launcher died"))
    assert task.output_waits_because == ""
