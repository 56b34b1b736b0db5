"""Guests whose lease has run out hold room: who waits behind them goes home, and a task of this home may take it (R5)."""

from __future__ import annotations

from peerload.model import actions, events, messages
from peerload.model.resources import Placement, ResourceRequest
from peerload.model.task import ExecutionRecord, ExecutionState, FenceKind, Guarantee
from tests.core.given import UID, Given, offer, spec
from tests.core.test_executor import KEY, commit, guest
from tests.wording import Says

KEPT_S = 60.0


def freeze(x: Given, key: str = KEY) -> list[str]:
    return x.when(events.TaskFrozen(key, frozen=True))


def other(number: int, home: str = "h", **changes: object) -> messages.Offer:
    return messages.Offer(f"{home}/{number}", bytes([number] * 16), 1, spec(**changes), 60.0)


def take(x: Given, number: int, home: str = "h", **changes: object) -> list[str]:
    x.hear(home, other(number, home, **changes))
    accept = x.sent(messages.Accept)
    return x.hear(home, messages.Commit(accept.task, accept.uid, 1, accept.nonce, accept.ts, 60.0))


def test_who_waits_behind_frozen_tasks_alone_goes_home() -> None:
    x = guest(policies={"transfer": {"threshold": 3.0}})
    take(x, 9)
    did = freeze(x)
    assert "Return to h" in did
    assert x.sent(messages.Return).reason.startswith(Says.ALL_FROZEN())
    x.hear("h", other(8))
    assert x.sent(messages.Decline).code == "room"
    assert not x.node.sharing.report().accepts
    x.when(events.TaskFrozen(KEY, frozen=False))
    assert "Accept to h" in x.hear("h", other(8))


def test_who_waits_behind_a_task_that_runs_stays() -> None:
    x = guest(slots=2, policies={"transfer": {"threshold": 3.0}})
    take(x, 9)
    take(x, 8)
    assert "Return to h" not in freeze(x)
    assert x.node.sharing.report().accepts


def test_a_task_of_this_home_takes_the_room_when_that_was_kept_for_long_enough() -> None:
    x = guest()
    x.submit()
    freeze(x)
    assert "EvictTask" not in x.after(KEPT_S - 1).timer("probe", "0")
    assert "EvictTask" in x.after(1).timer("frozen", KEY)
    assert x.done(actions.EvictTask) == actions.EvictTask(KEY, "h was silent, and a task of x needed its room")
    assert [note.state for note in x.notes] == ["evicted"]
    assert "EvictTask" not in x.timer("frozen", KEY)
    did = x.when(events.TaskLost(KEY, "h was silent", never_started=False))
    assert "Died to h" in did
    assert "spawn 1" in did


def test_one_that_was_thawed_keeps_its_room() -> None:
    x = guest()
    x.submit()
    freeze(x)
    assert "clear frozen" in x.after(30).when(events.TaskFrozen(KEY, frozen=False))
    assert "EvictTask" not in x.after(31).timer("frozen", KEY)


def test_nothing_is_ended_for_who_could_not_start_all_the_same() -> None:
    x = guest(slots=4)
    take(x, 9, request=ResourceRequest(cpus=3.0))
    freeze(x)
    x.submit(spec(request=ResourceRequest(cpus=2.0)))
    assert "EvictTask" not in x.after(KEPT_S).timer("frozen", KEY)


def test_those_that_may_run_once_only_are_the_last_to_go() -> None:
    x = Given(slots=2, peers=("h",))
    x.hear("h", offer(guarantee=Guarantee.ONCE))
    x.hear("h", commit(x))
    take(x, 9)
    freeze(x)
    freeze(x.after(1), f"{'09' * 16}-1")
    x.submit()
    x.submit()
    x.after(KEPT_S).timer("frozen", KEY)
    assert x.done(actions.EvictTask).key == f"{'09' * 16}-1"
    x.when(events.TaskLost(f"{'09' * 16}-1", "it was silent", never_started=False))
    assert x.done(actions.EvictTask).key == KEY


def test_the_next_agent_learns_from_the_launcher_what_is_frozen() -> None:
    record = ExecutionRecord("h/1", UID, 1, "h", ExecutionState.START, spec(), 50.0, 60.0)
    x = Given(
        peers=("h",),
        started=events.AgentStarted(
            executions=(record,), floors=((UID, 1, FenceKind.STARTED, "h"),), running=((KEY, 5.0, 80.0),), frozen=(KEY,)
        ),
    )
    assert f"timer frozen {KEPT_S:g}" in x.started
    x.submit()
    assert "EvictTask" in x.after(KEPT_S).timer("frozen", KEY)


def test_one_frozen_task_does_not_close_a_node_that_has_room_beside_it() -> None:
    x = guest(slots=4)
    freeze(x)
    assert x.node.sharing.report().accepts
    assert "Accept to i" in x.hear("i", other(8, "i", request=ResourceRequest(cpus=3.0)))
    x.hear("i", other(7, "i", request=ResourceRequest(cpus=4.0)))
    assert x.sent(messages.Decline).code == "room"


def test_nothing_is_ended_where_nothing_starts() -> None:
    x = guest()
    freeze(x)
    x.when(events.DrainRequested(3, "repair"))
    x.submit(spec(placement=Placement(local=True)))
    assert "EvictTask" not in x.after(KEPT_S).timer("frozen", KEY)
    x = guest()
    freeze(x)
    x.when(events.LauncherSilent(is_silent=True))
    x.submit()
    assert "EvictTask" not in x.after(KEPT_S).timer("frozen", KEY)


def test_who_waits_for_something_else_does_not_stand_before_those_that_need_the_room() -> None:
    x = Given(slots=2, peers=("h",))
    x.hear("h", offer())
    x.hear("h", commit(x))
    x.submit()
    freeze(x)
    x.submit(spec(request=ResourceRequest(cpus=2.0)))  # a task of this home runs, too
    x.submit()
    assert "EvictTask" in x.after(KEPT_S).timer("frozen", KEY)
    assert x.notes[-1].reason == Says.ROOM_NEEDED("x/3")


def test_who_can_go_nowhere_else_finds_room_the_next_time() -> None:
    x = guest()
    freeze(x)
    assert "EvictTask" not in x.after(KEPT_S - 1).hear("i", other(8, "i"))
    assert "EvictTask" in x.after(1).hear("i", other(8, "i"))
    assert x.sent(messages.Decline).code == "room"
    assert x.done(actions.EvictTask).key == KEY
    x.when(events.TaskLost(KEY, "h was silent", never_started=False))
    assert "Accept to i" in x.hear("i", other(8, "i"))


def test_nothing_is_ended_for_who_could_never_run_here() -> None:
    x = guest()
    freeze(x)
    assert "EvictTask" not in x.after(KEPT_S).hear("i", other(8, "i", request=ResourceRequest(cpus=64.0)))
    assert x.sent(messages.Decline).code == "cannot"
