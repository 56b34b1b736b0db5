"""Files of a task come before its lease: an offer is accepted when they are there, and stands meanwhile."""

from __future__ import annotations

from typing import Any

from peerload.core.explain import holding_reason, uncollected_reason
from peerload.model import actions, events, messages
from peerload.model.resources import LoadReport, Placement
from peerload.model.task import EnvironmentLock, Exit, Staged, TaskFiles, TaskState
from tests.core.given import ACCEPTS, SENDER, UID, Given, spec
from tests.wording import Says

FILES = TaskFiles(bytes(32), 1000, 3)
KEY = f"{UID.hex()}-1"


def offered() -> Given:
    x = Given(peers=("h",))
    offer = messages.Offer("h/1", UID, 1, spec(files=FILES), 60.0)
    x.hear("h", offer)
    return x


def test_an_offer_is_accepted_when_the_files_are_here() -> None:
    x = offered()
    assert x.done(actions.StageFiles).key == KEY
    assert not any(isinstance(action, actions.Send) for action in x.last)
    x.after(50.0).when(events.FilesStaged(KEY))
    (accept,) = [action.message for action in x.last if isinstance(action, actions.Send)]
    assert isinstance(accept, messages.Accept)
    assert (accept.files, accept.ts) == (True, x.at_s)  # the lease begins now


def test_a_repeated_offer_starts_no_second_copy() -> None:
    x = offered()
    x.hear("h", messages.Offer("h/1", UID, 1, spec(files=FILES), 60.0))
    assert not any(isinstance(action, actions.StageFiles | actions.Send) for action in x.last)


def test_an_offer_whose_files_do_not_come_is_declined_and_its_room_free() -> None:
    x = offered()
    x.when(events.FilesStaged(KEY, "disk", "no room"))
    (decline,) = [action.message for action in x.last if isinstance(action, actions.Send)]
    assert isinstance(decline, messages.Decline)
    assert (decline.code, decline.reason) == ("disk", "no room")
    assert actions.ForgetTask(KEY, output=False) in x.last
    assert not x.node.executor.remote_tasks
    assert x.node.ledger.inbound == {}


def test_files_of_an_offer_that_was_withdrawn_go() -> None:
    x = offered()
    x.hear("h", messages.Revoke("h/1", UID, 1, 9))
    assert actions.ForgetTask(KEY, output=False) in x.last
    x.when(events.FilesStaged(KEY))
    assert x.last == [actions.ForgetTask(KEY, output=False)]


def offering() -> tuple[Given, str, bytes]:
    """A home whose task is offered to y."""
    x = Given(policies=SENDER)
    x.submit()
    x.submit(spec(files=FILES))
    task = x.task(2)
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    assert task.offered_to == "y"
    return x, task.task, task.uid


def test_the_offer_stands_while_files_are_on_their_way() -> None:
    x, name, uid = offering()
    assert x.after(4.0).hear("y", messages.Staging(name, uid, 1, 10, 1000)) == ["timer offer 5"]
    offer = x.node.home.tasks[uid].offering
    assert offer is not None
    assert offer.staging is not None
    assert (offer.staging.done_bytes, offer.staging.size_bytes) == (10, 1000)


def test_a_node_that_copies_for_nobody_is_told_to_stop() -> None:
    x, name, _ = offering()
    assert x.hear("y", messages.Staging("x/99", b"\x07" * 16, 1, 0, 0)) == ["Revoke to y"]
    assert name


def test_files_that_nobody_can_have_fail_the_task_and_name_the_reason() -> None:
    x, name, uid = offering()
    x.hear("y", messages.Decline(name, uid, 1, "staging", "src/a is damaged", ACCEPTS))
    (record,) = [
        row.record
        for action in x.last
        if isinstance(action, actions.Persist)
        for row in action.rows
        if isinstance(row, actions.PutTask)
    ]
    assert (record.state, record.reason) == (TaskState.FAILED, "staging: src/a is damaged")


def test_an_accept_without_the_files_is_no_accept() -> None:
    x, name, uid = offering()
    x.hear("y", messages.Accept(name, uid, 1, 5, 7.0))
    assert x.node.home.tasks[uid].record.state is TaskState.QUEUED


def test_a_success_whose_outputs_cannot_be_placed_is_none() -> None:
    x, name, uid = offering()
    x.hear("y", messages.Accept(name, uid, 1, 5, 7.0, files=True))
    ended = Exit(0, staged=Staged(outputs=b"\x01" * 32))
    x.hear("y", messages.Result(name, uid, 1, ended, inline=True))
    keep = x.done(actions.KeepOutput)
    assert (keep.node, keep.files) == ("y", b"\x01" * 32)
    x.when(events.OutputArrived(uid, 1, unplaced="out/a: no space"))
    (record,) = [
        row.record
        for action in x.last
        if isinstance(action, actions.Persist)
        for row in action.rows
        if isinstance(row, actions.PutTask)
    ]
    assert record.state is TaskState.FAILED
    assert record.exit is not None
    assert record.exit.exit_code == 125
    assert record.reason.startswith("staging: out/a")


LOCK = EnvironmentLock(bytes(32), "uv", "uv.lock")
BUILT = spec(lock=LOCK, placement=Placement(builder="uv"))


def told(x: Given, node: str, code: str) -> list[str]:
    """What a home does when this node declines the task."""
    task = x.task()
    return x.hear(node, messages.Decline(task.task, task.uid, 1, code, "no wheel", ACCEPTS))


def test_a_task_whose_environment_cannot_be_built_goes_elsewhere_until_nobody_is_left() -> None:
    x = Given(policies=SENDER, peers=())
    x.meet("y", builders=("uv",))
    x.meet("z", builders=("pip", "uv"))
    x.meet("w", builders=("pip",))
    x.submit(BUILT)
    tried = []
    while "x/1" in x.node.home.by_id:
        node = x.task().offered_to
        if not node:
            for peer in ("y", "z"):
                x.hear(peer, messages.ProbeReply(1, accepts=True, report=ACCEPTS))
            continue
        tried.append(node)
        told(x, node, "environment")
    assert sorted(tried) == ["y", "z"]
    record = x.done(actions.TaskChanged).record
    assert (record.state, record.reason) == (TaskState.FAILED, "environment: no wheel")


def test_why_says_where_an_environment_is_being_built() -> None:
    x, name, uid = offering()
    x.hear("y", messages.Staging(name, uid, 1, builds=True))
    assert holding_reason(x.node.home.tasks[uid]) == Says.BUILDING("y")
    x.hear("y", messages.Staging(name, uid, 1, 5 << 20, 10 << 20))
    assert holding_reason(x.node.home.tasks[uid]) == Says.STAGING("y", 5.0, 10.0)


def test_a_task_whose_environment_cannot_be_built_at_home_goes_elsewhere() -> None:
    x = Given(policies=SENDER, peers=(), facts={"builders": ("uv",)})
    x.meet("y", builders=("uv",))
    x.submit(BUILT)
    failed = Exit(125, reason="environment: no wheel", not_built=True)
    key = x.task().key
    x.when(events.TaskEnded(key, failed))
    assert x.task().record.state is TaskState.QUEUED
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    assert x.task().offered_to == "y"
    x.hear("y", messages.Decline("x/1", x.task().uid, 2, "environment", "no wheel either", ACCEPTS))
    assert x.done(actions.TaskChanged).record.state is TaskState.FAILED
    x.submit(BUILT)  # y has failed with this lock lately: nobody is left
    x.when(events.TaskEnded(x.task(2).key, failed))
    assert x.done(actions.TaskChanged).record.reason == "environment: no wheel"


def test_a_task_not_built_at_home_fails_when_the_only_other_node_lacks_its_directory() -> None:
    x = Given(policies=SENDER, peers=(), facts={"builders": ("uv",)})
    x.meet("y", builders=("uv",))
    x.submit(BUILT)
    x.when(events.TaskEnded(x.task().key, Exit(125, reason="environment: no wheel", not_built=True)))
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    x.hear("y", messages.Decline("x/1", x.task().uid, 2, "directory", "no such directory", ACCEPTS))
    record = x.done(actions.TaskChanged).record
    assert (record.state, record.reason) == (TaskState.FAILED, "environment: no wheel")


def test_a_node_whose_cache_has_no_room_for_the_files_is_not_asked_for_a_while_and_named() -> None:
    x, _, _ = offering()
    told = messages.Decline("x/2", x.task(2).uid, 1, "cache", "the file cache is full", ACCEPTS)
    x.hear("y", told)
    no_room = "no room in its cache or on its disk for the task's files"
    assert x.node.membership.why_declines("y", x.task(2).spec) == no_room
    assert x.node.membership.why_declines("y", spec()) == ""
    assert x.task(2).offered_to == ""


def test_a_task_whose_outputs_are_on_their_way_says_how_much_of_them_is_here() -> None:
    x, name, uid = offering()
    x.hear("y", messages.Accept(name, uid, 1, 5, 7.0, files=True))
    staged = Staged(outputs=b"\x01" * 32, out_bytes=64 << 20)
    x.hear("y", messages.Result(name, uid, 1, Exit(0, staged=staged), inline=True))
    assert uncollected_reason(x.node.home.tasks[uid]) == ""
    x.when(events.OutputComing(uid, 1, 16 << 20))
    assert uncollected_reason(x.node.home.tasks[uid]).endswith("16 of 64 MiB")
    x.when(events.OutputComing(uid, 2, 32 << 20))  # of another attempt
    assert uncollected_reason(x.node.home.tasks[uid]).endswith("16 of 64 MiB")
    x.when(events.OutputArrived(uid, 1, "no source"))
    assert uncollected_reason(x.node.home.tasks[uid]).endswith("no source")


def test_an_executor_that_is_lost_before_its_outputs_came_home_has_the_task_run_again() -> None:
    x, name, uid = offering()
    x.hear("y", messages.Accept(name, uid, 1, 5, 7.0, "y-machine-1", files=True))
    x.hear("y", messages.Result(name, uid, 1, Exit(0, staged=Staged(outputs=b"\x01" * 32)), inline=True))
    x.when(events.OutputArrived(uid, 1, "no source"))
    assert x.node.home.tasks[uid].record.state is TaskState.LEASED
    x.meet("y", start=2, machine=2)  # its machine was started anew: nothing is left there
    record = x.node.home.tasks[uid].record
    assert (record.state, record.attempt) == (TaskState.QUEUED, 1)


# -- who has the files ------------------------------------------------------------------------------------------------------

LARGE = TaskFiles(b"\x05" * 32, 1 << 30, 3)
FULL = LoadReport(1, 1, incarnation=1, sequence=2)


def sent(x: Given) -> tuple[str, Any]:
    """The one message of this step, and to whom."""
    (found,) = [(action.dst, action.message) for action in x.last if isinstance(action, actions.Send)]
    return found


def placed_at(x: Given, node: str, search: int, report: LoadReport) -> messages.Offer:
    """The task of this search is offered to this node, which accepts: all others that are asked before have no room."""
    while sent(x)[0] != node:
        x.hear(sent(x)[0], messages.ProbeReply(search, accepts=False, report=FULL))
    x.hear(node, messages.ProbeReply(search, accepts=True, report=report))
    to, offer = sent(x)
    assert (to, type(offer)) == (node, messages.Offer)
    x.hear(node, messages.Accept(offer.task, offer.uid, 1, 5, 7.0, files=True))
    found: messages.Offer = offer
    return found


def home_with_a_holder(files: TaskFiles) -> Given:
    """A home with a task of its own, whose next task with files has gone to z; now there is another."""
    x = Given(peers=("w", "y", "z"), policies=SENDER)
    x.submit()
    x.submit(spec(files=files))
    placed_at(x, "z", 1, ACCEPTS)
    x.submit(spec(files=files))
    return x


def test_a_node_that_has_the_files_is_asked_first_and_named_with_the_seconds_that_it_saves() -> None:
    x = home_with_a_holder(LARGE)
    assert sent(x)[0] == "z"
    assert placed_at(x, "z", 2, ACCEPTS).sources == ()
    assert x.done(actions.Decided).reason == Says.HAS_FILES("z", 21.5)


def test_a_node_with_the_files_where_the_task_would_wait_longer_than_they_travel_is_not_preferred() -> None:
    x = home_with_a_holder(LARGE)
    placed_at(x, "z", 2, LoadReport(100, 1, accepts=True, incarnation=1, sequence=3))  # the policy's choice: it accepts
    assert x.done(actions.Decided).reason == Says.TAKES("z")


def test_a_node_that_has_the_files_and_no_room_is_a_source_for_the_one_that_has_room() -> None:
    x = home_with_a_holder(LARGE)
    x.hear("z", messages.ProbeReply(2, accepts=False, report=FULL))
    other = sent(x)[0]
    assert placed_at(x, other, 2, ACCEPTS).sources == ("z",)


def test_nobody_is_preferred_for_small_files() -> None:
    x = Given(peers=("w", "y", "z"), policies=SENDER)
    x.submit()
    drawn = []
    for search in (1, 2, 3):
        x.submit(spec(files=FILES))
        drawn.append(sent(x)[0])
        placed_at(x, "z", search, ACCEPTS)
    assert set(drawn) != {"z"}


def test_an_executor_fetches_from_the_sources_that_it_is_told_but_not_from_itself() -> None:
    x = Given(peers=("h",))
    x.hear("h", messages.Offer("h/1", UID, 1, spec(files=FILES), 60.0, sources=("y", "x", "h")))
    assert x.done(actions.StageFiles).sources == ("y",)


def asked_by_a_holder(files: TaskFiles) -> Given:
    """A home that y has taken a task with these files from, where a plain task and another with them wait; y asks for work."""
    x = Given(peers=("y",))
    x.submit()
    x.submit(spec(files=files))
    y = x.node.membership.get("y")
    assert y is not None
    x.hear("y", messages.GiveRequest(4, LoadReport(sequence=2), y.profile))
    offer = x.sent(messages.Offer)
    x.hear("y", messages.Accept(offer.task, offer.uid, 1, 5, 7.0, files=True))
    x.submit()
    x.submit(spec(files=files))
    x.hear("y", messages.GiveRequest(5, LoadReport(sequence=3), y.profile))
    return x


def test_a_node_that_asks_for_work_gets_a_task_whose_files_it_has() -> None:
    x = asked_by_a_holder(LARGE)
    assert x.sent(messages.GiveReply).task == x.sent(messages.Offer).task == "x/4"
    decided = x.done(actions.Decided)
    assert (decided.task, decided.choice) == ("x/4", "y")
    assert decided.reason == Says.ROOM_AND_FILES("y", 21.5)


def test_small_files_give_no_task_to_a_node_that_asks_before_its_turn() -> None:
    assert asked_by_a_holder(FILES).sent(messages.GiveReply).task == "x/3"


def test_output_files_that_wait_for_room_keep_the_slot_and_no_time_limit_ends_them() -> None:
    x = Given(peers=())
    x.submit(spec(files=FILES, time_limit_s=3.0))
    x.submit(spec())
    key = x.task().key
    x.when(events.TaskStarted(key, 1_000_100.0))
    x.when(events.OutputWaits(key, "the disk is full"))
    assert uncollected_reason(x.task()).endswith("the disk is full")
    assert x.after(4).timer("limit", key) == []
    assert x.task(2).record.state is TaskState.QUEUED
    x.when(events.TaskEnded(key, Exit(0)))
    record = next(action.record for action in x.last if isinstance(action, actions.TaskChanged))
    assert (record.task, record.state) == ("x/1", TaskState.DONE)
    assert x.task(2).record.state is TaskState.LEASED
