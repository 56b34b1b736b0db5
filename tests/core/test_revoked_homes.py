"""Tasks of other homes that are ended here: their home is shut out of the cluster, or somebody on this machine wants it."""

from __future__ import annotations

import msgspec
import pytest

from peerload.core.work import RemotePhase
from peerload.model import events, messages
from peerload.model.actions import Answer, SendResult, SignalTask
from peerload.model.gossip import MemberStatus
from peerload.model.task import ExecutionRecord, ExecutionState, Exit, FenceKind
from tests.core.given import UID, WALL_S, Given, offer, spec
from tests.core.test_executor import KEY, commit, guest
from tests.wording import Says

REVOKED = events.NodeRevoked("h")
STARTED = ExecutionRecord("h/1", UID, 1, "h", ExecutionState.START, spec(), 90.0, 60.0)


FLOORS = ((UID, 1, FenceKind.STARTED, "h"),)
FORGOTTEN = events.ForgetRequested(5, "h")


def is_empty(x: Given) -> bool:
    return not x.node.executor.remote_tasks and not x.node.ledger.running


def shapes(x: Given) -> list[str]:
    return [x._shape(action) for action in x.last]


def waiting() -> Given:
    """A task of h waits here behind one of ours."""
    x = Given(peers=("h",))
    x.submit()
    x.hear("h", offer(only=True))
    x.hear("h", commit(x))
    return x


def restarted(revoked_at: float, **more: object) -> Given:
    started = events.AgentStarted(
        executions=(STARTED,),
        floors=FLOORS,
        running=((KEY, WALL_S, 90.0),),
        revoked=(("h", revoked_at),),
        **more,  # type: ignore[arg-type]
    )
    return Given(peers=(), started=started)


@pytest.mark.rule("J4")
def test_what_runs_is_killed_and_forgotten_durably_first() -> None:
    x = guest()
    assert x.when(REVOKED) == ["persist drop", "signal 9", "timer kill 10"]
    assert x.end(KEY)[-2:] == ["Died to h", "ForgetTask"]
    assert not x.node.executor.remote_tasks
    assert not x.node.ledger.running
    assert x.hear("h", messages.Query("h/1", UID, 1)) == ["Died to h"]


@pytest.mark.rule("J4")
def test_what_is_parked_is_killed_too() -> None:
    x = guest()
    x.hear("h", messages.Park((messages.Parking("h/1", UID, 1, 100.0),)))
    assert "signal 9" in x.when(REVOKED)


@pytest.mark.rule("J4")
@pytest.mark.parametrize("parked", [False, True])
def test_what_waits_never_starts(*, parked: bool) -> None:
    x = waiting()
    if parked:
        x.hear("h", messages.Park((messages.Parking("h/1", UID, 1, 100.0),)))
    assert x.when(REVOKED) == ["persist floor=1", "Return to h"]
    assert not any(name.startswith("spawn") for name in x.end(x.task(1).key))
    assert x.node.ledger.waiting == 0


@pytest.mark.rule("J4")
def test_room_that_was_kept_for_it_is_free_again() -> None:
    x = Given(peers=("h",))
    x.hear("h", offer())
    x.when(REVOKED)
    assert not x.node.executor.remote_tasks
    assert x.node.ledger.load_tasks == 0


def test_tasks_of_other_homes_go_on() -> None:
    x = guest()
    assert x.when(events.NodeRevoked("g")) == []
    assert x.node.executor.remote_tasks[KEY].phase is RemotePhase.HERE


@pytest.mark.rule("J4")
def test_a_result_that_a_revoked_home_will_never_take_is_dropped() -> None:
    x = guest()
    x.end(KEY)
    assert x.when(REVOKED) == ["clear result", "persist drop", "ForgetTask"]
    assert is_empty(x)
    assert x.timer("result", KEY) == []  # one that was on its way
    assert x.hear("h", messages.Query("h/1", UID, 1)) == ["Died to h"]  # the fence stays


def test_an_agent_that_starts_drops_results_from_before_the_revocation_alone() -> None:
    ended = msgspec.structs.replace(
        STARTED, state=ExecutionState.RESULT, exit=Exit(0, started_at=WALL_S, ended_at=WALL_S)
    )
    for revoked_at, is_dropped in ((WALL_S + 1.0, True), (WALL_S - 1.0, False)):
        x = Given(
            peers=(), started=events.AgentStarted(executions=(ended,), floors=FLOORS, revoked=(("h", revoked_at),))
        )
        assert is_empty(x) is is_dropped


def test_all_that_is_here_of_a_home_ends_when_an_operator_of_this_node_says_that_it_is_gone() -> None:
    x = guest()
    x.when(events.TaskFrozen(KEY, frozen=True))
    x.rumour("h", MemberStatus.DEAD)
    did = x.when(FORGOTTEN)
    assert did[did.index("persist drop") :] == ["persist drop", "signal 9", "timer kill 10", "answer"]
    assert x.done(Answer).reply["ended"] == 1
    assert "Died to h" in x.end(KEY)
    assert is_empty(x)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_result_is_dropped_for_good_then_also_if_the_agent_does_not_know_its_home(*, restarts: bool) -> None:
    x = guest()
    x.end(KEY)
    if restarts:
        ended = x.node.executor.remote_tasks[KEY].record(ExecutionState.RESULT)
        x = Given(peers=(), started=events.AgentStarted(executions=(ended,), floors=FLOORS))
    else:
        x.rumour("h", MemberStatus.DEAD)
    x.when(events.DrainRequested(6, "bye"))
    x.when(events.EmptyAwaited(7))
    assert {"clear result", "persist drop", "ForgetTask"} <= set(x.when(FORGOTTEN))
    answers = [(action.request, action.error) for action in x.last if isinstance(action, Answer)]
    assert answers == [(5, None), (7, None)]  # who waits for an empty node need not wait any more
    assert is_empty(x)
    assert not x.node.has_work


def test_what_others_say_of_a_home_ends_nothing_here_and_drops_no_result() -> None:
    for has_ended in (False, True):
        x = guest()
        if has_ended:
            x.end(KEY)
        x.rumour("h", MemberStatus.FORGOTTEN)
        assert not is_empty(x)
        x.when(FORGOTTEN)
        assert is_empty(x) is has_ended
        assert ("signal 9" in shapes(x)) is not has_ended


def test_a_home_that_is_there_is_not_forgotten_nor_its_tasks() -> None:
    x = guest()
    assert x.when(FORGOTTEN) == ["refuse BadRequest"]
    assert x.node.executor.remote_tasks[KEY].phase is RemotePhase.HERE


@pytest.mark.rule("J4")
def test_it_is_killed_again_where_the_launcher_did_not_hear_it() -> None:
    x = guest()
    x.when(REVOKED)
    x.when(events.LauncherLost())
    assert "signal 9" in x.when(events.LauncherReady(running=((KEY, 7.0, 100.0),)))


@pytest.mark.rule("J4")
def test_an_agent_that_starts_ends_what_it_had_forgotten() -> None:
    x = Given(peers=(), started=events.AgentStarted(running=((KEY, WALL_S, 90.0),), revoked=(("h", WALL_S),)))
    assert "signal 9" in x.started


@pytest.mark.rule("J4")
def test_an_agent_that_starts_ends_what_was_started_before_the_revocation() -> None:
    assert "signal 9" in restarted(WALL_S + 1.0).started


def test_tasks_of_who_was_let_in_anew_go_on_over_a_restart() -> None:
    x = restarted(WALL_S - 1.0)
    assert "signal 9" not in x.started
    assert x.node.executor.remote_tasks[KEY].phase is RemotePhase.HERE


def cancel(*tasks: str, force: bool = False) -> events.RemoteCancelRequested:
    return events.RemoteCancelRequested(7, tasks, 15, force, "ended on x by ann")


def test_what_runs_is_ended_by_somebody_here_which_is_its_result() -> None:
    x = guest()
    assert x.when(cancel("h/1")) == ["signal 15", "timer kill 10", "answer"]
    assert x.done(Answer).reply == {"cancelled": ["h/1"], "already_ended": []}
    assert x.timer("kill", KEY) == ["signal 9"]
    did = x.when(events.TaskEnded(KEY, Exit(143, 15, started_at=WALL_S, ended_at=WALL_S + 1.0)))
    assert did[:2] == ["persist result", "result to h"]
    assert x.done(SendResult).exit.reason == Says.ENDED_BY("x", "ann")
    x.when(cancel("h/1"))
    assert x.done(Answer).reply == {"cancelled": [], "already_ended": ["h/1"]}


def test_with_force_it_is_killed() -> None:
    x = guest()
    x.when(cancel("h/1", force=True))
    assert x.done(SignalTask).signal == 9


def test_what_waits_goes_home_when_somebody_here_wants_that() -> None:
    x = waiting()
    assert x.when(cancel("h/1")) == ["persist floor=1", "Return to h", "answer"]
    assert x.sent(messages.Return).reason == Says.ENDED_BY("x", "ann")


def test_an_array_is_all_its_members_here() -> None:
    x = Given(slots=3, peers=("h",))
    for number, name in enumerate(("h/1.1", "h/1.2", "h/11.1"), start=1):
        uid = bytes([number]) * 16
        x.hear("h", messages.Offer(name, uid, 1, spec(), 60.0))
        accept = x.sent(messages.Accept)
        x.hear("h", messages.Commit(name, uid, 1, accept.nonce, accept.ts, 60.0))
    x.when(cancel("h/1"))
    assert x.done(Answer).reply["cancelled"] == ["h/1.1", "h/1.2"]
