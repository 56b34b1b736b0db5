"""A node that cannot start processes for want of something: nothing has started, nothing is lost, and it says so."""

from __future__ import annotations

import pytest

from peerload.core.work import HomePhase
from peerload.model import events, messages
from peerload.model.actions import Announce, PutFloor, SpawnTask
from peerload.model.resources import LoadReport
from peerload.model.task import FenceKind, Guarantee, TaskState
from tests.core.given import UID, Given, Placement, offer, spec
from tests.core.test_executor import KEY, commit

WORDS = "no more processes can be made"


def short(x: Given, key: str, words: str = WORDS) -> list[str]:
    return x.when(events.TaskLost(key, words, never_started=True, shortage=words))


def committed() -> Given:
    """An attempt of h is to start here."""
    x = Given(peers=("h",))
    x.hear("h", offer())
    assert spawned(x.hear("h", commit(x))) == 1
    return x


def spawned(did: list[str]) -> int:
    return sum(line.startswith("spawn") for line in did)


def announced(x: Given) -> list[messages.State]:
    said = [action.message for action in x.last if isinstance(action, Announce)]
    return [message for message in said if isinstance(message, messages.State)]


def started(x: Given, key: str) -> list[str]:
    return x.when(events.TaskStarted(key, 0.0))


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_a_task_that_could_not_be_started_is_queued_again_whatever_its_guarantee(guarantee: Guarantee) -> None:
    x = Given(peers=())
    x.submit(spec(guarantee=guarantee))
    task = x.task()
    assert "persist queued" in short(x, task.key)
    assert (task.record.state, task.record.losses, task.record.failures) == (TaskState.QUEUED, 0, 0)
    assert "spawn 2" in x.after(1).timer("shortage")  # the attempt that never started is burnt
    assert x.end(task.key)[0].startswith("persist done")


def test_nothing_else_is_tried_until_the_pause_is_over_and_then_one_task_at_a_time() -> None:
    x = Given(peers=(), slots=4)
    for _ in range(8):
        x.submit()
    first = x.task(1)
    assert spawned(short(x, first.key)) == 0
    assert spawned(short(x, x.task(2).key)) == 0  # it was on its way
    assert x.node.state.profile.trouble
    assert not x.node.state.takes_remote_tasks
    did = x.after(1).timer("shortage")
    assert spawned(did) == 1
    trial = x.done(SpawnTask).key
    assert "timer shortage 2" in short(x, trial)  # twice as long
    assert spawned(x.after(2).timer("shortage")) == 1
    trial = x.done(SpawnTask).key
    assert spawned(started(x, trial)) >= 1  # what fits
    assert not x.node.state.profile.trouble
    assert x.node.state.takes_remote_tasks


def test_a_pause_is_bounded_and_starts_over_when_the_shortage_has_really_been_over() -> None:
    x = Given(peers=())
    for _ in range(16):
        x.submit()
    key = x.task(1).key
    told = []
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        told.append(f"timer shortage {pause_s}" in short(x, key))
        x.after(pause_s).timer("shortage")
        key = x.done(SpawnTask).key
    assert all(told)

    def short_again_after(seconds: float) -> list[str]:
        started(x, key)
        assert not x.node.shortage.reason
        x.after(seconds).end(key)
        return short(x, x.done(SpawnTask).key)

    assert "timer shortage 60" in short_again_after(119)  # one has started, and soon none could again
    x.after(60).timer("shortage")
    key = x.done(SpawnTask).key
    assert "timer shortage 1" in short_again_after(121)


def test_a_process_that_was_on_its_way_when_another_could_not_be_started_proves_nothing() -> None:
    x = Given(peers=(), slots=2)
    for _ in range(3):
        x.submit()
    short(x, x.task(1).key)
    assert spawned(started(x, x.task(2).key)) == 0
    assert x.node.shortage.reason
    assert x.node.state.profile.trouble


def test_everybody_is_told_at_once_when_it_begins_and_when_it_is_over_and_not_between() -> None:
    x = Given()
    for _ in range(4):
        x.submit(spec(placement=Placement(local=True)))

    def troubles() -> list[bool]:
        return [bool(told.profile.trouble) for told in announced(x)]

    short(x, x.task(1).key)
    assert troubles() == [True]
    x.after(1).timer("shortage")
    assert True not in troubles()
    short(x, x.done(SpawnTask).key)
    assert troubles() == []
    x.after(2).timer("shortage")
    started(x, x.done(SpawnTask).key)
    assert troubles() == [False]


def test_the_end_of_a_task_may_give_back_what_was_missing() -> None:
    x = Given(peers=(), slots=2)
    for _ in range(4):
        x.submit()
    started(x, x.task(1).key)
    short(x, x.task(2).key)
    assert spawned(x.end(x.task(1).key)) == 1


def test_room_on_the_disk_may_be_what_was_missing() -> None:
    x = Given(peers=(), slots=2)
    for _ in range(3):
        x.submit()
    short(x, x.task(1).key)
    assert spawned(x.when(events.DiskRoomChanged(has_room=True))) == 1


def test_a_trial_that_ends_without_a_process_is_followed_by_another() -> None:
    x = Given(peers=(), slots=2)
    for _ in range(4):
        x.submit()
    short(x, x.task(1).key)
    x.after(1).timer("shortage")
    assert spawned(x.end(x.done(SpawnTask).key, 127)) == 1
    assert x.node.shortage.reason


def test_a_guest_that_could_not_be_started_is_refused_for_good_before_its_home_hears_of_it() -> None:
    x = committed()
    short(x, KEY)
    (floor,) = (row for row in _rows(x) if isinstance(row, PutFloor))
    assert (floor.uid, floor.floor, floor.kind) == (UID, 1, FenceKind.REFUSED)
    said = x.sent(messages.NotStarted)
    assert (said.uid, said.attempt, said.reason) == (UID, 1, WORDS)
    assert x.hear("h", offer()) == ["Decline to h"]
    assert x.sent(messages.Decline).code == "floor"
    assert x.hear("h", messages.Offer("h/2", bytes([2]) * 16, 1, spec(), 60.0, only=True)) == ["Decline to h"]
    assert WORDS in x.sent(messages.Decline).reason


def test_guests_that_wait_go_home_and_others_are_taken_again_after_the_pause() -> None:
    x = committed()
    second = bytes([2]) * 16
    x.hear("h", messages.Offer("h/2", second, 1, spec(), 60.0, only=True))
    accept = x.sent(messages.Accept)
    x.hear("h", messages.Commit("h/2", second, 1, accept.nonce, accept.ts, 60.0))
    assert "Return to h" in short(x, KEY)
    third = messages.Offer("h/3", bytes([3]) * 16, 1, spec(), 60.0, only=True)
    assert x.hear("h", third) == ["Decline to h"]
    x.after(1).timer("shortage")
    assert "Accept to h" in x.hear("h", third)


def test_own_tasks_that_wait_look_for_a_place_elsewhere_and_come_back() -> None:
    x = Given()
    x.submit()
    x.submit()
    x.submit(spec(placement=Placement(local=True)))
    short(x, x.task(1).key)
    stranded = x.node.home.stranded
    assert x.task(2).uid in stranded
    assert x.task(3).uid not in stranded
    x.after(1).timer("shortage")
    assert not stranded


def test_a_task_of_a_short_node_is_offered_to_another() -> None:
    x = Given()
    x.submit()
    x.submit()
    assert "Offer to y" in short(x, x.task(1).key)  # the only node there is to choose


def test_a_task_that_finds_no_place_is_looked_for_one_in_each_pause_until_it_starts_somewhere() -> None:
    x = Given()
    x.submit()
    task = x.task()
    for tried in range(1, 6):
        assert "Offer to y" in short(x, task.key) or tried > 1
        if task.phase is HomePhase.RESTING:
            rest_s = min(2.0 ** (tried - 2), 60.0)
            x.after(rest_s).timer("rest", task.uid.hex())
            pause_s = 2.0 ** (tried - 1) - rest_s
        else:
            pause_s = 1.0
        assert task.uid in x.node.home.stranded
        decline = messages.Decline(task.task, task.uid, task.record.attempt + 1, "room", "full", LoadReport())
        x.hear("y", decline)
        assert f"spawn {tried + 1}" in x.after(pause_s).timer("shortage")
    x.when(events.TaskStarted(task.key, 0.0))
    assert task.record.attempt == 6
    assert not x.node.shortage.reason


def _rows(x: Given) -> list[object]:
    return [row for action in x.last for row in getattr(action, "rows", ())]
