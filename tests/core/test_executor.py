"""The executor's side: reservations, durable promises, leases, results."""

from __future__ import annotations

import msgspec
import pytest

from peerload.core.handoff.executor import OFFERS_MAX
from peerload.core.work import RemotePhase
from peerload.model import events, messages
from peerload.model.actions import PutFloor, Send, SetLease, SpawnTask
from peerload.model.config import CoreConfig
from peerload.model.messages import Need
from peerload.model.resources import LoadReport
from peerload.model.task import ExecutionRecord, ExecutionState, Exit, FenceKind, execution_key
from tests.core.given import RECEIVER, UID, WALL_S, Given, ResourceRequest, offer, spec

KEY = f"{UID.hex()}-1"
STARTS = ["persist start floor=1", "spawn 1"]


def commit(x: Given, attempt: int = 1, home: str = "h") -> messages.Commit:
    accept = x.sent(messages.Accept)
    return messages.Commit(f"{home}/1", UID, attempt, accept.nonce, accept.ts, 60.0)


def guest(**given: object) -> Given:
    """An attempt of h runs here."""
    x = Given(peers=("h",), **given)  # type: ignore[arg-type]
    x.hear("h", offer())
    x.hear("h", commit(x))
    x.when(events.TaskStarted(KEY, 7.0))
    return x


def test_offer_reserves_commit_starts_result_is_repeated_until_acknowledged() -> None:
    x = Given(peers=("h",))
    did = x.hear("h", offer())
    assert did[:3] == ["clear inbound", "Accept to h", "timer reserved 1"]
    assert x.node.ledger.load_tasks == 1
    said = commit(x)
    assert x.hear("h", said) == ["clear reserved", "timer renew 15", *STARTS]
    assert x.hear("h", said) == ["Renew to h"]
    assert x.when(events.TaskStarted(KEY, 7.0)) == ["Renew to h"]
    assert x.end(KEY)[:3] == ["persist result", "result to h", "timer result 1"]
    assert x.timer("result", KEY) == ["result to h", "timer result 2"]
    assert x.hear("h", said) == ["result to h", "timer result 2"]
    assert x.hear("z", messages.ResultAck("h/1", UID, 1)) == []
    assert x.hear("h", messages.ResultAck("h/1", UID, 1)) == ["clear result", "persist drop", "ForgetTask"]
    assert x.hear("h", messages.ResultAck("h/1", UID, 1)) == []
    assert x.hear("h", offer()) == ["Decline to h"]  # the floor stays
    assert x.sent(messages.Decline).code == "floor"
    assert not x.node.executor.remote_tasks


def test_memory_of_tasks_on_their_way_and_of_those_that_wait_is_not_offered_again() -> None:
    x = Given(slots=8, peers=("h",), facts={"mem_bytes": 10 << 30})
    large, small = (Need(ResourceRequest(mem_bytes=size << 30)) for size in (6, 4))
    x.hear("h", offer(request=large.request))
    assert [x.node.sharing.admission.would_accept("h", one) for one in (large, small)] == [False, True]
    x.hear("h", commit(x))
    x.when(events.TaskStarted(KEY, 7.0))
    assert [x.node.sharing.admission.would_accept("h", one) for one in (large, small)] == [False, True]
    x.submit(spec(request=large.request))
    assert not x.node.sharing.admission.would_accept("h", small)
    assert x.node.sharing.admission.would_accept("h", Need(ResourceRequest()))
    x.end(KEY)  # what has waited runs
    assert x.node.sharing.admission.would_accept("h", small)
    assert not x.node.sharing.admission.would_accept("h", large)


def test_a_commit_without_its_reservation_is_refused_durably() -> None:
    x = Given(peers=("h",))
    unasked = messages.Commit("h/1", UID, 1, 5, 5.0, 60.0)
    assert x.hear("h", unasked) == ["persist floor=1", "NotStarted to h"]
    assert x.hear("h", unasked) == ["NotStarted to h"]
    assert x.hear("h", offer()) == ["Decline to h"]
    assert x.hear("h", offer(2))[1] == "Accept to h"


def test_an_older_nonce_is_refused() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer())
    old = commit(x)
    x.hear("h", offer())
    assert commit(x).nonce != old.nonce
    refused = ["clear reserved", "persist floor=1", "NotStarted to h"]
    assert x.hear("h", old) == refused
    assert not x.node.executor.remote_tasks


def test_a_reservation_ends() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer())
    late = commit(x)
    x.after(10).timer("reserved", KEY)
    assert x.node.ledger.load_tasks == 0
    assert "NotStarted to h" in x.hear("h", late)


@pytest.mark.parametrize(
    ("why", "message", "directory_here"),
    [
        ("room", offer(), True),
        ("cannot", offer(request=ResourceRequest(cpus=99.0)), True),
        ("directory", offer(directory=b"/data"), False),
    ],
)
def test_declines_say_why(why: str, message: messages.Offer, *, directory_here: bool) -> None:
    x = Given(peers=("h",))
    if why == "room":
        x.submit()
    assert x.hear("h", message, directory_here=directory_here) == ["Decline to h"]
    assert x.sent(messages.Decline).code == why


def test_a_file_system_that_does_not_answer_is_no_missing_directory() -> None:
    x = Given(peers=("h",))
    stalled = events.MessageReceived("h", offer(directory=b"/data"), directory_here=False, stalled="it hangs")
    assert x.when(stalled) == ["Decline to h"]
    assert (x.sent(messages.Decline).code, x.sent(messages.Decline).reason) == ("stalled", "it hangs")


def test_the_reason_of_a_decline_fits_its_message() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer(directory=b"/" + b"d" * 4000), directory_here=False)
    told = x.sent(messages.Decline)
    assert msgspec.convert(msgspec.to_builtins(told), messages.Decline) == told


@pytest.mark.rule("P2")
def test_guests_are_bounded() -> None:
    x = Given(slots=3, peers=("h",), config=CoreConfig(guests_max=1))
    x.hear("h", offer())
    other = messages.Offer("h/2", UID[::-1], 1, spec(), 60.0)
    assert x.hear("h", other) == ["Decline to h"]
    assert x.sent(messages.Decline).code == "busy"


def test_a_task_that_only_this_node_may_run_waits_here_and_is_renewed() -> None:
    x = Given(peers=("h",))
    x.submit()
    x.hear("h", offer(only=True))
    assert x.hear("h", commit(x)) == ["clear reserved", "timer renew 15"]
    assert x.after(15).timer("renew") == ["Renew to h", "timer renew 15"]
    assert x.sent(messages.Renew).renewals[0].started_at == 0.0
    granted = messages.RenewOk((messages.LeaseExtension(UID, 1, x.at_s, 60.0),))
    assert x.hear("h", granted) == []
    x.after(59)
    assert x.end(x.task(1).key)[-2:] == ["persist start floor=1", "spawn 1"]


def test_a_lease_that_ran_out_in_the_queue_is_returned() -> None:
    x = Given(peers=("h",))
    x.submit()
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    assert x.after(61).timer("renew") == ["persist floor=1", "Return to h"]
    assert x.node.ledger.waiting == 0


def test_room_that_comes_after_the_lease_ran_out_starts_nothing() -> None:
    x = Given(peers=("h",))
    x.submit()
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    did = x.after(60).end(x.task().key)  # before the timer by which it is given back
    assert "Return to h" in did
    assert "persist floor=1" in did
    assert not [action for action in x.last if isinstance(action, SpawnTask)]
    assert KEY not in x.node.executor.remote_tasks
    assert x.node.ledger.load_tasks == 0


def test_leases_count_from_when_they_were_asked_for() -> None:
    x = guest()
    granted = messages.RenewOk((messages.LeaseExtension(UID, 1, 110.0, 60.0),))
    assert x.after(20).hear("h", granted) == ["SetLease"]
    assert x.done(SetLease).deadline_s == 170.0
    assert x.hear("h", granted) == []
    assert x.hear("z", messages.RenewOk((messages.LeaseExtension(UID, 1, 119.0, 60.0),))) == []


def test_a_shorter_lease_is_renewed_sooner() -> None:
    x = Given(slots=2, peers=("h", "g"))
    x.hear("h", offer())
    x.hear("h", commit(x))
    short = messages.Offer("g/1", UID[::-1], 1, spec(), 4.0)
    x.hear("g", short)
    accept = x.sent(messages.Accept)
    did = x.hear("g", messages.Commit("g/1", UID[::-1], 1, accept.nonce, accept.ts, 4.0))
    assert "timer renew 1" in did


def test_many_leases_of_one_home_are_all_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.model.messages.RENEWALS_MAX", 2)
    x = Given(slots=5, peers=("h",))
    for number in range(5):
        uid = bytes([number]) * 16
        x.hear("h", messages.Offer(f"h/{number}", uid, 1, spec(), 60.0))
        accept = x.sent(messages.Accept)
        x.hear("h", messages.Commit(f"h/{number}", uid, 1, accept.nonce, accept.ts, 60.0))
    assert x.after(15).timer("renew") == ["Renew to h"] * 3 + ["timer renew 15"]


def test_every_query_is_answered() -> None:
    query = messages.Query("h/1", UID, 1)
    x = Given(peers=("h",))
    assert x.hear("h", query) == ["persist floor=1", "NotStarted to h"]
    x = Given(peers=("h",))
    x.hear("h", offer())
    assert x.hear("h", query) == ["Accept to h", "timer reserved 2"]  # who asks has granted it: the COMMIT was lost
    x.after(10).timer("reserved", KEY)
    assert x.hear("h", query) == ["persist floor=1", "NotStarted to h"]
    assert x.hear("h", query) == ["NotStarted to h"]  # again, if that was lost
    assert not x.node.executor.remote_tasks
    x = guest()
    assert x.hear("h", query) == ["Renew to h"]
    x.end(KEY)
    assert x.hear("h", query) == ["result to h", "timer result 1"]
    x.hear("h", messages.ResultAck("h/1", UID, 1))
    assert x.hear("h", query) == ["Died to h"]


def test_a_start_that_comes_with_its_end_is_told_by_the_result_alone() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer())
    x.hear("h", commit(x))
    did = x.when(events.TaskEnded(KEY, Exit(0, started_at=WALL_S, ended_at=WALL_S + 1.0), with_start=True))
    assert did[:2] == ["persist result", "result to h"]
    assert "Renew to h" not in did
    assert [note.state for note in x.notes] == ["running", "ended"]


def test_what_was_given_back_is_said_not_to_have_started() -> None:
    x = Given(peers=("h",))
    x.submit()
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    assert "Return to h" in x.hear("h", messages.Revoke("h/1", UID, 1, 9, "cancelled"))
    query = messages.Query("h/1", UID, 1)
    assert x.hear("h", query) == ["NotStarted to h"]
    x = Given(peers=("h",), started=events.AgentStarted(floors=((UID, 1, FenceKind.STARTED, "h"),)))
    assert x.hear("h", query) == ["Died to h"]
    x = Given(peers=("h",), started=events.AgentStarted(floors=((UID, 1, FenceKind.REFUSED, "h"),)))
    assert x.hear("h", query) == ["NotStarted to h"]  # durable: an agent's restart does not forget which it was


def test_revoke_in_every_phase() -> None:
    revoke = messages.Revoke("h/1", UID, 1, 9, "cancelled")
    x = Given(peers=("h",))
    assert x.hear("h", revoke) == []
    x.hear("h", offer())
    x.hear("h", revoke)
    assert not x.node.executor.remote_tasks
    x = Given(peers=("h",))
    x.submit()
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    assert x.hear("h", revoke) == ["persist floor=1", "Return to h"]
    x = guest()
    assert x.hear("z", revoke) == []
    assert x.hear("h", revoke) == ["signal 9", "timer kill 10"]
    assert x.hear("h", messages.Signal("h/1", UID, 1, 10)) == ["signal 10"]
    assert x.timer("kill", KEY) == ["signal 9"]
    assert x.end(KEY, 137)[:2] == ["persist result", "result to h"]


def test_an_attempt_whose_launcher_died_has_died() -> None:
    x = guest()
    assert x.when(events.LauncherReady())[:2] == ["persist drop", "Died to h"]
    assert x.node.ledger.load_tasks == 0


@pytest.mark.parametrize("found", ["running", "ended", "died", "result"])
def test_a_restart_adopts_what_is_there(found: str) -> None:
    state = ExecutionState.RESULT if found == "result" else ExecutionState.START
    exit_ = Exit(0)
    record = ExecutionRecord("h/1", UID, 1, "h", state, spec(), 50.0, 60.0, exit_ if found == "result" else None)
    x = Given(
        peers=(),
        started=events.AgentStarted(
            executions=(record,),
            floors=((UID, 1, FenceKind.STARTED, "h"),),
            running=((KEY, 5.0, 50.0),) if found == "running" else (),
            ended=((KEY, exit_),) if found == "ended" else (),
        ),
    )
    expected = {
        "running": ["Renew to h", "timer renew 15"],
        "ended": ["persist result", "result to h", "timer result 1"],
        "died": ["persist drop", "Died to h", "ForgetTask"],
        "result": ["result to h", "timer result 1"],
    }
    told = {"running": ["Renew to h"], "died": []}.get(found, ["result to h", "timer result 1"])
    assert x.started == [*expected[found], "timer floors 3600", "Announce"]
    assert x.meet("h") == told
    assert x.hear("h", offer()) == [*told, "Decline to h"]
    assert x.sent(messages.Decline).code == "floor"


def test_a_stale_reservation_makes_way_for_the_next_attempt() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer(1))
    assert "Accept to h" in x.hear("h", offer(2))
    assert [guest.attempt for guest in x.node.executor.remote_tasks.values()] == [2]
    assert x.hear("h", offer(1)) == ["Decline to h"]
    assert x.node.ledger.load_tasks == 1  # its room is still kept


def test_give_promises_a_waiting_task_and_offers_it() -> None:
    x = Given(peers=("y",))
    x.submit()
    x.submit()
    y = x.node.membership.get("y")
    assert y is not None
    request = messages.GiveRequest(4, LoadReport(sequence=2), y.profile)
    assert x.hear("y", request) == ["GiveReply to y", "Offer to y", "timer offer 5"]
    assert x.sent(messages.GiveReply).task == "x/2"
    assert x.hear("y", request) == ["GiveReply to y"]  # nothing left to give
    assert x.sent(messages.GiveReply).task == ""
    assert x.hear("z", request) == ["GiveReply to z"]  # never met


def test_give_promises_as_many_as_are_wanted_while_that_evens_out_the_loads() -> None:
    x = Given(peers=("y",))
    for _ in range(8):
        x.submit()
    y = x.node.membership.get("y")
    assert y is not None
    x.hear("y", messages.GiveRequest(4, LoadReport(sequence=2), y.profile, most=3))
    offered = [one.message.task for one in x.last if isinstance(one, Send) and isinstance(one.message, messages.Offer)]
    assert offered == ["x/2", "x/3", "x/4"]
    assert x.sent(messages.GiveReply).others == (x.task(3).uid, x.task(4).uid)
    x = Given(peers=("y",))
    for _ in range(8):
        x.submit()
    x.hear("y", messages.GiveRequest(4, LoadReport(load_tasks=2, sequence=2), y.profile, most=64))
    assert len(x.sent(messages.GiveReply).others) == 2, "then there are 5 here and 5 there"


def test_a_waiting_guest_is_returned_with_a_suggestion() -> None:
    x = Given(peers=("h", "y"))
    x.submit()
    x.hear("h", messages.Offer("h/1", UID, 1, spec(), 60.0, 0, 4, only=True))
    x.hear("h", commit(x))
    y = x.node.membership.get("y")
    assert y is not None
    did = x.hear("y", messages.GiveRequest(4, LoadReport(sequence=2), y.profile))
    assert did == ["GiveReply to y", "persist floor=1", "Return to h"]
    assert x.sent(messages.Return).to == "y"


def test_a_promise_counts_as_load_until_it_comes_or_not() -> None:
    x = Given(peers=("y",), policies=RECEIVER)
    x.submit()
    key = x.task().key
    did = x.end(key)
    assert did[-2:] == ["GiveRequest to y", "timer probe 0.25"]
    assert x.hear("y", messages.GiveReply(1, LoadReport(), "y/3", UID)) == [
        "clear probe", "decided y/3", "timer inbound 2",
    ]  # fmt: skip
    assert x.node.ledger.load_tasks == 1
    assert x.hear("y", messages.Offer("y/3", UID, 1, spec(), 60.0))[:2] == ["clear inbound", "Accept to y"]
    x.timer("inbound", UID.hex())
    assert x.node.ledger.load_tasks == 1
    x.after(10).timer("reserved", KEY)
    assert x.node.ledger.load_tasks == 0


def test_none_asks_the_next_and_nobody_is_asked_twice() -> None:
    x = Given(peers=("y", "z"), policies=RECEIVER)
    x.submit()
    x.end(x.task().key)
    first = x.node.sharing._searches._open[1].pending
    (asked,) = first
    other = "z" if asked == "y" else "y"
    did = x.hear(asked, messages.GiveReply(1, LoadReport()))
    assert did[:3] == ["clear probe", f"GiveRequest to {other}", "timer probe 0.25"]
    assert x.hear(other, messages.GiveReply(1, LoadReport())) == ["clear probe"]


def test_floor_rows_hold_the_highest_attempt() -> None:
    x = Given(peers=("h",))
    x.hear("h", messages.Query("h/1", UID, 4))
    assert [row.floor for act in x.last if hasattr(act, "rows") for row in act.rows if isinstance(row, PutFloor)] == [4]
    assert x.hear("h", messages.Query("h/1", UID, 3)) == ["Died to h"]


def test_a_guests_phase_follows_its_durable_state() -> None:
    x = guest()
    assert x.node.executor.remote_tasks[KEY].phase is RemotePhase.HERE
    x.end(KEY)
    assert x.node.executor.remote_tasks[KEY].phase is RemotePhase.ENDED


@pytest.mark.rule("P2")
def test_so_many_offers_of_one_peer_are_outstanding_and_no_more() -> None:
    x = Given(slots=4000, peers=("h", "i"))

    def offered(home: str, number: int) -> list[str]:
        return x.hear(home, messages.Offer(f"{home}/{number}", number.to_bytes(16, "big"), 1, spec(), 60.0, only=True))

    for number in range(OFFERS_MAX):
        assert "Accept to h" in offered("h", number)
    assert offered("h", OFFERS_MAX) == ["Decline to h"]
    assert x.sent(messages.Decline).code == "busy"
    assert [note.state for note in x.notes if note.what == "security"] == ["P2"]
    assert "Accept to i" in offered("i", 1 << 20), "another home is none the worse"
    x.after(CoreConfig().reservation_s + 1.0).timer("reserved", execution_key(bytes(16), 1))
    assert "Accept to h" in offered("h", OFFERS_MAX + 1), "there is room again"


# -- priorities --------------------------------------------------------------------------------------------------------


def waiting(x: Given, number: int) -> bytes:
    """Another guest of h that waits here → its uid."""
    uid = bytes([number]) * 16
    x.hear("h", messages.Offer(f"h/{number}", uid, 1, spec(), 60.0, only=True))
    accept = x.sent(messages.Accept)
    x.hear("h", messages.Commit(f"h/{number}", uid, 1, accept.nonce, accept.ts, 60.0))
    assert x.node.executor.by_uid[uid].phase is RemotePhase.WAITING
    return uid


def wants(uid: bytes, priority: int, attempt: int = 1) -> messages.RenewOk:
    return messages.RenewOk((messages.LeaseExtension(uid, attempt, 0.0, 60.0, priority),))


def test_what_waits_here_goes_by_the_priority_that_its_user_wants_by_now() -> None:
    x = guest(slots=1)
    second, third = waiting(x, 2), waiting(x, 3)
    deadline_s = x.node.executor.by_uid[third].deadline_s
    assert x.hear("h", wants(third, 9)) == []
    x.hear("h", wants(second, 99, attempt=2))  # not of this attempt
    x.hear("z", wants(second, 99))  # not from its home
    assert x.node.executor.by_uid[third].deadline_s == deadline_s  # nothing was renewed
    x.end(KEY)
    assert x.node.executor.by_uid[third].phase is RemotePhase.HERE
    assert x.node.executor.by_uid[second].phase is RemotePhase.WAITING
    x.hear("h", wants(third, 3))
    assert x.node.executor.by_uid[third].spec.priority == 9  # it has started
