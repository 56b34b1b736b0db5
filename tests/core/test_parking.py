"""A home that goes away politely, and the nodes that run its tasks meanwhile (R12), message by message."""

from __future__ import annotations

import msgspec
import pytest

from peerload.core.work import HomePhase, HomeTask
from peerload.model import events, messages
from peerload.model.actions import Answer, SetLease, SpawnTask
from peerload.model.gossip import MemberStatus
from peerload.model.task import ExecutionRecord, ExecutionState, Exit, FenceKind, TaskRecord, TaskState
from tests.core.given import SENDER, UID, Given, offer, spec
from tests.core.test_executor import KEY, commit, guest
from tests.core.test_home import away
from tests.wording import Says

EXIT = Exit(0, started_at=5.0, ended_at=6.0)
PARKED = TaskRecord(
    "x/4", UID, TaskState.LEASED, 1.0, attempt=3, node="y", machine_boot="y-machine-1", lease_s=60.0, parked_ts=20.0
)
PARKED_NOT = msgspec.structs.replace(PARKED, parked_ts=0.0)


def renewal(ts: float, deadline_ts: float = 0.0, task: HomeTask | None = None) -> messages.Renew:
    name, uid, attempt = ("x/4", UID, 3) if task is None else (task.task, task.uid, task.record.attempt)
    return messages.Renew((messages.Renewal(name, uid, attempt, ts, 7.0, deadline_ts),))


def back(record: TaskRecord = PARKED) -> Given:
    """A home that was started again and finds a parked task."""
    return Given(policies=SENDER, started=events.AgentStarted((events.TaskRow(record, spec()),), counter=4))


def test_a_home_that_stops_parks_what_it_has_heard_of_durably_first() -> None:
    x = away()
    task = x.task(2)
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 9.0, 8.0, 5.0),)))
    said = x.when(events.AgentStopping())
    assert said[:4] == ["persist leased", "changed leased", "clear lease", "Park to y"]
    assert x.sent(messages.Park).parkings == (messages.Parking(task.task, task.uid, 1, 9.0),)
    assert task.record.parked_ts == 9.0
    assert task.phase is HomePhase.AWAY


def test_what_is_at_a_node_that_was_forgotten_is_not_parked() -> None:
    x = away()
    task = x.task(2)
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 9.0, 8.0, 5.0),)))
    x.rumour("y", MemberStatus.DEAD)
    x.when(events.ForgetRequested(9, "y"))
    assert "Park to y" not in x.when(events.AgentStopping())
    assert not task.record.parked_ts  # its lease will run out, also after the next start


def test_while_it_is_away_nothing_is_granted_or_taken_back() -> None:
    x = away()
    task = x.task(2)
    x.when(events.AgentStopping())
    assert x.hear("y", renewal(30.0, 5.0, task)) == []
    assert x.hear("y", messages.Died(task.task, task.uid, 1)) == []
    assert x.hear("y", messages.Result(task.task, task.uid, 1, exit=EXIT)) == []
    assert x.after(1000).timer("lease", task.uid.hex()) == []
    assert task.record.state is TaskState.LEASED


def test_a_home_that_has_heard_nothing_since_its_start_parks_nothing() -> None:
    x = back(PARKED_NOT)
    assert not any(name.startswith("Park to") for name in x.when(events.AgentStopping()))
    x = back()
    assert not any(name.startswith("Park to") for name in x.when(events.AgentStopping()))


def test_parked_again_with_what_was_heard_since() -> None:
    x = back()
    x.hear("y", renewal(30.0))
    assert "Park to y" in x.when(events.AgentStopping())
    assert x.sent(messages.Park).parkings[0].ts == 30.0


def test_a_parked_task_found_at_start_is_asked_about_and_has_no_deadline() -> None:
    x = back()
    assert x.started[:2] == ["Query to y", "timer ask 2"]
    task = x.task(4)
    assert x.after(10_000).timer("lease", UID.hex()) == []
    assert task.record.state is TaskState.LEASED


def test_renewals_from_before_the_parking_are_not_answered() -> None:
    x = back()
    assert x.hear("y", renewal(20.0, 15.0)) == []
    assert x.hear("y", renewal(19.0, 19.0)) == []
    assert x.task(4).record.parked_ts == 20.0


def test_coming_back_takes_a_confirmation() -> None:
    x = back()
    answer = x.hear("y", renewal(30.0))  # it is parked there: it has no deadline
    assert answer == ["timer ask 30", "changed running", "RenewOk to y"]
    assert x.task(4).record.parked_ts == 20.0
    assert x.hear("y", renewal(31.0, 15.0)) == ["timer ask 30", "RenewOk to y"]  # a deadline from before the parking
    assert x.task(4).record.parked_ts == 20.0
    confirmed = x.hear("y", renewal(40.0, 30.0))
    assert confirmed == ["persist leased", "changed leased", "timer lease 65", "timer ask 30", "RenewOk to y"]
    assert x.task(4).record.parked_ts == 0.0
    assert "persist queued" in x.after(65).timer("lease", UID.hex())


@pytest.mark.parametrize("proof", ["NotStarted", "Return", "Died", "reboot", "forget"])
def test_a_parked_task_is_taken_back_on_proof(proof: str) -> None:
    x = back()
    x.meet("y")
    if proof == "reboot":
        did = x.meet("y", start=2, machine=2)
    elif proof == "forget":
        x.hear("y", messages.Leaving())
        did = x.when(events.ForgetRequested(5, "y"))
    else:
        did = x.hear("y", getattr(messages, proof)("x/4", UID, 3))
    assert "persist queued" in did
    assert x.task(4).record.parked_ts == 0.0


def test_a_node_that_only_its_tasks_are_known_of_can_be_forgotten() -> None:
    row = events.TaskRow(PARKED, spec())
    x = Given(peers=(), started=events.AgentStarted((row,), counter=4))
    assert "persist queued" in x.when(events.ForgetRequested(5, "y"))
    assert x.done(Answer).reply == {"node": "y", "was": None, "tasks": 1, "ended": 0}
    assert x.when(events.ForgetRequested(6, "y")) == ["refuse BadRequest"]


def test_the_word_of_another_database_is_no_proof_and_somebody_has_to_look() -> None:
    record = msgspec.structs.replace(PARKED, store="first")
    x = back(record)
    assert "persist held" in x.hear("y", messages.NotStarted("x/4", UID, 3, "", "second"))
    assert Says.STORE_LOST("y") in x.task(4).record.reason
    x = back(msgspec.structs.replace(record, parked_ts=0.0))
    assert x.hear("y", messages.Died("x/4", UID, 3, "", "second")) == []  # its lease ends it
    assert x.task(4).record.state is TaskState.LEASED


def test_a_machine_that_slept_goes_on_with_its_leases() -> None:
    x = away()
    task = x.task(2)
    x.when(events.MachineSleeping())
    assert task.record.parked_ts == 5.0
    assert x.hear("y", renewal(30.0, 5.0, task)) == []
    assert "Query to y" in x.after(5000).when(events.MachineWoke())
    assert "RenewOk to y" in x.hear("y", renewal(5000.0, 0.0, task))
    assert task.record.parked_ts == 5.0
    x.hear("y", renewal(5001.0, 5000.0, task))
    assert task.record.parked_ts == 0.0


# -- at the node that runs it ------------------------------------------------------------------------------------------


def park(ts: float, attempt: int = 1) -> messages.Park:
    return messages.Park((messages.Parking("h/1", UID, attempt, ts),))


def granted(ts: float) -> messages.RenewOk:
    return messages.RenewOk((messages.LeaseExtension(UID, 1, ts, 60.0),))


def test_a_park_takes_the_deadline_away_until_a_newer_answer() -> None:
    x = guest()
    ts = x.node.executor.by_uid[UID].ts
    assert x.hear("h", park(ts)) == ["SetLease"]  # as new as the COMMIT: said after it
    assert x.done(SetLease) == SetLease(KEY, 0.0, ts)
    assert x.after(500).timer("renew") == ["Renew to h", "timer renew 15"]
    assert x.sent(messages.Renew).renewals[0].deadline_ts == 0.0
    assert x.hear("h", granted(ts)) == []  # no newer than the PARK
    assert x.hear("h", granted(x.at_s)) == ["SetLease", "Renew to h"]  # its home waits for this
    assert x.sent(messages.Renew).renewals[0].deadline_ts == x.at_s
    assert x.done(SetLease) == SetLease(KEY, x.at_s + 60.0, x.at_s)


def test_a_park_older_than_an_answer_is_ignored() -> None:
    x = guest()
    ts = x.node.executor.by_uid[UID].ts
    x.after(10).hear("h", granted(x.at_s))
    assert x.hear("h", park(ts)) == []
    assert x.hear("z", park(x.at_s)) == []  # not its home
    assert x.hear("h", park(x.at_s, attempt=2)) == []
    assert x.hear("h", park(x.at_s)) == ["SetLease"]


def test_a_task_that_waits_is_parked_too_and_starts_without_a_deadline() -> None:
    x = Given(peers=("h",))
    x.submit()
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    assert x.hear("h", park(x.at_s)) == []
    assert x.after(500).timer("renew") == ["Renew to h", "timer renew 15"]  # not given back
    assert x.end(x.task(1).key)[-2:] == ["persist start floor=1", "spawn 1"]
    spawned = x.done(SpawnTask)
    assert (spawned.deadline_s, spawned.ts) == (0.0, x.at_s - 500)


def test_the_newest_ts_survives_the_agent_in_the_launcher() -> None:
    record = ExecutionRecord("h/1", UID, 1, "h", ExecutionState.START, spec(), 50.0, 60.0)
    started = events.AgentStarted(
        executions=(record,), floors=((UID, 1, FenceKind.STARTED, "h"),), running=((KEY, 5.0, 80.0),)
    )
    x = Given(peers=("h",), started=started)
    assert x.hear("h", park(70.0)) == []
    assert x.hear("h", granted(80.0)) == []
    assert x.hear("h", granted(81.0)) == ["SetLease"]
