"""Out of GPU memory: no result, but the task again with more, durably before anybody is told that it was noted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peerload.model import events, messages, timers
from peerload.model.resources import MIB, Device, DeviceReading, GpuShare, ResourceRequest
from peerload.model.task import Exit, Guarantee, SubmitOptions, TaskRecord, TaskState, Usage, execution_key
from tests.core.given import ACCEPTS, SENDER, WALL_S, Given, spec
from tests.wording import Says

GIB = 1024 * MIB
WORDS = Says.OUT_OF_GPU_MEMORY("gpu2", 24.0, 24.0)


def card(number: int, gib: int, reserve: float = 0.0) -> Device:
    return Device(f"nvidia:GPU-{number}", index=number, mem_bytes=gib * GIB, grantable_bytes=int((gib - reserve) * GIB))


def request(gib: int = 24, **more: Any) -> ResourceRequest:
    return ResourceRequest(gpus=1, gpu_mem_bytes=gib * GIB, **more)


def out_of_memory(had_gib: float = 24.0, peak_gib: float = 24.0, words: str = WORDS) -> Exit:
    usage = Usage(gpu_memory_bytes_max=int(peak_gib * GIB), gpu_model="Fake")
    return Exit(
        1,
        reason=words,
        started_at=5.0,
        ended_at=6.0,
        usage=usage,
        out_of="gpu memory",
        had_bytes=int(had_gib * GIB),
        stderr_bytes=9,
    )


def away(asked: ResourceRequest, largest: int = 48, **changes: Any) -> Given:
    """Attempt 1 of x/1 is with y, whose GPU has 24 GiB; z has one of ``largest`` GiB."""
    x = Given(policies=SENDER, peers=(), slots=1)
    x.meet("y", gpus=1, devices=(card(0, 24),))
    x.meet("z", gpus=1, devices=(card(0, largest),))
    x.submit(spec(request=asked, **changes))
    return given_to(x, "y")


def given_to(x: Given, node: str) -> Given:
    task = x.task()
    for _ in range(4):
        for peer in ("y", "z"):
            if task.search is not None:
                x.hear(peer, messages.ProbeReply(task.search, accepts=peer == node, report=ACCEPTS))
    assert task.offered_to == node
    x.hear(node, messages.Accept(task.task, task.uid, task.record.attempt + 1, 77, 6.0))
    assert (task.record.state, task.record.node) == (TaskState.LEASED, node)
    return x


def test_it_is_queued_again_with_half_as_much_again_before_that_is_acknowledged() -> None:
    x = away(request())
    task = x.task()
    did = x.hear("y", messages.Result(task.task, task.uid, 1, out_of_memory()))
    assert did[:4] == ["changed running", "clear lease", "clear ask", "persist queued"]
    assert did[-1] == "ResultAck to y"
    record = task.record
    assert (record.gpu_mem_bytes, record.memory_retries, record.losses, record.gpu_alone) == (36 * GIB, 1, 0, False)
    assert record.reason == f"attempt 1 on y ran {WORDS}; {Says.MORE_MEMORY(36.0)}"
    assert task.spec.request.gpu_mem_bytes == 36 * GIB
    given_to(x, "z")
    assert x.sent(messages.Commit).attempt == 2


def test_its_result_said_again_is_acknowledged_and_dropped_whatever_has_become_of_the_task() -> None:
    x = away(request())
    task, said = x.task(), messages.Result(x.task().task, x.task().uid, 1, out_of_memory())
    x.hear("y", said)
    assert x.hear("y", said) == ["ResultAck to y"]
    given_to(x, "z")
    assert x.hear("y", said) == ["ResultAck to y"]
    assert (task.record.attempt, task.record.node, task.record.memory_retries) == (2, "z", 1)
    ended = messages.Result(task.task, task.uid, 2, Exit(0, started_at=7.0, ended_at=8.0), inline=True)
    assert x.hear("z", ended) == ["changed running", "KeepOutput"]
    assert x.hear("y", said) == ["ResultAck to y"]
    assert "persist done" in x.when(events.OutputArrived(task.uid, 2))
    assert x.hear("y", said) == ["persist usage x/1 1 y", "ResultAck to y"]  # which counts for cancelled tasks alone


def test_a_home_that_died_in_between_goes_on_from_what_was_durable() -> None:
    x = away(request())
    task, said = x.task(), messages.Result(x.task().task, x.task().uid, 1, out_of_memory())
    x.hear("y", said)
    row = events.TaskRow(task.record, spec(request=request()))
    again = Given(policies=SENDER, peers=(), started=events.AgentStarted(tasks=(row,), counter=1))
    assert again.task().spec.request.gpu_mem_bytes == 36 * GIB
    assert again.hear("y", said) == ["ResultAck to y"]


def test_after_a_restart_it_is_not_given_the_card_of_a_task_that_runs() -> None:
    wanted = spec(request=request(20, gpu_share=GpuShare.EXCLUSIVE))
    rows = tuple(
        events.TaskRow(
            TaskRecord(
                f"x/{number}",
                bytes([number]) * 16,
                TaskState.LEASED,
                WALL_S,
                attempt=1,
                node="x",
                devices=(f"nvidia:GPU-{number}",),
            ),
            wanted,
        )
        for number in (1, 2)
    )
    failed, runs = (execution_key(row.record.uid, 1) for row in rows)
    started = events.AgentStarted(
        rows, counter=2, running=((runs, WALL_S, 0.0),), ended=((failed, out_of_memory(20, 20)),)
    )
    has = {"gpus": 2, "devices": (card(1, 24), card(2, 48))}
    x = Given(peers=(), slots=8, facts=has, started=started)
    assert x.task().record.reason.startswith("attempt 1 on x ran")
    x.end(runs)
    assert x.task().devices == ("nvidia:GPU-2",)


def test_a_home_that_died_before_that_was_durable_hears_it_again() -> None:
    x = away(request(20))
    task = x.task()
    row = events.TaskRow(task.record, task.spec)
    again = Given(policies=SENDER, peers=(), started=events.AgentStarted(tasks=(row,), counter=1))
    again.meet("y", gpus=1, devices=(card(0, 24),))  # z is not met yet
    did = again.hear("y", messages.Result(task.task, task.uid, 1, out_of_memory(20, 20)))
    assert (did[3], did[-1]) == ("persist queued", "ResultAck to y")
    assert again.task().spec.request.gpu_mem_bytes == 24 * GIB


def failed_card() -> Exit:
    why = f"{Says.DEVICE_FAILED('GPU 0 (A10)')}: XID 79; exit code 1"
    return Exit(1, reason=why, started_at=5.0, ended_at=6.0, failed_device="GPU 0 (A10)")


def test_a_task_whose_card_failed_is_queued_again_as_a_loss_and_no_failure() -> None:
    x = away(request())
    task = x.task()
    did = x.hear("y", messages.Result(task.task, task.uid, 1, failed_card()))
    assert did[-1] == "ResultAck to y"
    record = task.record
    assert (record.state, record.losses, record.failures, record.memory_retries) == (TaskState.QUEUED, 1, 0, 0)
    assert f"attempt 1 on y: {Says.DEVICE_FAILED('GPU 0 (A10)')}" in record.reason
    assert task.spec.request.gpu_mem_bytes == request().gpu_mem_bytes


def test_a_failed_card_is_the_result_of_what_runs_once_or_was_lost_too_often() -> None:
    x = away(request(), guarantee=Guarantee.ONCE)
    task = x.task()
    x.hear("y", messages.Result(task.task, task.uid, 1, failed_card(), inline=True))
    x.when(events.OutputArrived(task.uid, 1))
    assert task.record.state is TaskState.FAILED
    x = away(request())
    task = x.task()
    for attempt in range(1, x.node.state.config.attempts_max):
        x.hear(task.record.node, messages.Result(task.task, task.uid, attempt, failed_card()))
        x.when(events.TimerExpired(timers.Rest(task.uid.hex())))
        given_to(x, "z")
    last = task.record.attempt
    x.hear("z", messages.Result(task.task, task.uid, last, failed_card(), inline=True))
    x.when(events.OutputArrived(task.uid, last))
    assert task.record.state is TaskState.FAILED
    assert Says.DEVICE_FAILED("GPU 0 (A10)") in task.record.reason


def test_twice_then_alone_then_it_has_failed_and_says_so() -> None:
    x = away(request(4, gpu_oom_retries=2))
    task = x.task()
    asked = []
    for attempt in range(1, 4):
        had = task.spec.request.gpu_mem_bytes / GIB
        x.hear(task.record.node, messages.Result(task.task, task.uid, attempt, out_of_memory(had, had)))
        asked.append((task.spec.request.gpu_mem_bytes / GIB, task.spec.request.gpu_share))
        given_to(x, "z")
    shares = [GpuShare.AUTO, GpuShare.AUTO, GpuShare.EXCLUSIVE]
    assert asked == [*zip((6.0, 9.0, 13.5), shares, strict=True)]
    assert x.task().record.memory_retries == 3
    last = out_of_memory(13.5, 13.5, Says.OUT_OF_GPU_MEMORY("gpu0", 13.5, 13.5))
    assert x.hear("z", messages.Result(task.task, task.uid, 4, last)) == ["changed running", "FetchOutput"]
    assert "persist failed" in x.when(events.OutputArrived(task.uid, 4))
    assert task.record.reason == f"{last.reason}; {Says.TRIED(4)}"
    assert task.record.exit == last


def test_not_more_than_some_node_has_and_no_more_when_it_had_that() -> None:
    x = away(request(), largest=30)
    task = x.task()
    x.hear("y", messages.Result(task.task, task.uid, 1, out_of_memory()))
    assert task.spec.request.gpu_mem_bytes == 30 * GIB
    given_to(x, "z")
    last = out_of_memory(30, 30, Says.OUT_OF_GPU_MEMORY("gpu0", 30.0, 30.0))
    x.hear("z", messages.Result(task.task, task.uid, 2, last))
    assert task.record.reason.endswith(Says.MORE_MEMORY_ALONE(30.0))
    given_to(x, "z")
    assert x.hear("z", messages.Result(task.task, task.uid, 3, last)) == ["changed running", "FetchOutput"]
    x.when(events.OutputArrived(task.uid, 3))
    assert task.record.reason == f"{last.reason}; {Says.TRIED(3)}"


@pytest.mark.parametrize(
    "changes", [{"guarantee": Guarantee.ONCE}, {"request": request(gpu_oom_retries=0)}, {"request": ResourceRequest()}]
)
def test_a_task_that_may_not_be_tried_again_has_failed(changes: dict[str, Any]) -> None:
    x = Given(policies=SENDER, peers=(), slots=0)
    x.meet("y", gpus=1, devices=(card(0, 24),))
    x.meet("z", gpus=1, devices=(card(0, 48),))
    x.submit(spec(**({"request": request()} | changes)))
    given_to(x, "y")
    task = x.task()
    assert x.hear("y", messages.Result(task.task, task.uid, 1, out_of_memory())) == ["changed running", "FetchOutput"]
    assert "persist failed" in x.when(events.OutputArrived(task.uid, 1))
    assert task.record.reason == WORDS


def test_what_others_have_taken_is_not_its_fault() -> None:
    x = away(request(12))
    task = x.task()
    x.hear("y", messages.Result(task.task, task.uid, 1, out_of_memory(0, 6)))
    assert (task.record.gpu_mem_bytes, task.record.memory_retries) == (0, 1)
    assert task.spec.request.gpu_mem_bytes == 12 * GIB
    assert task.record.reason.endswith(Says.SAME_MEMORY())


def test_an_attempt_that_was_given_up_leaves_no_result_when_it_ran_out_of_memory() -> None:
    x = away(request())
    task = x.task()
    x.after(65).timer("lease", task.uid.hex())
    assert task.record.state is TaskState.QUEUED
    assert x.hear("y", messages.Result(task.task, task.uid, 1, out_of_memory())) == ["ResultAck to y"]
    assert task.record.state is TaskState.QUEUED


def test_of_a_card_that_it_had_for_itself_there_is_no_more() -> None:
    x = away(ResourceRequest(gpus=1), largest=24)
    task = x.task()
    said = out_of_memory(25, 24)  # all of the card, more than a node promises of it
    assert x.hear("y", messages.Result(task.task, task.uid, 1, said)) == ["changed running", "FetchOutput"]
    x.when(events.OutputArrived(task.uid, 1))
    assert task.record.reason == f"{WORDS}; {Says.NO_MORE_MEMORY()}"


def test_a_home_that_does_not_know_yet_what_that_node_has_asks_for_the_same_again() -> None:
    x = away(request())
    task = x.task()
    x.hear("y", messages.Renew((messages.Renewal(task.task, task.uid, 1, 9.0, 8.0, 5.0),)))
    again = Given(
        policies=SENDER,
        peers=(),
        slots=1,
        started=events.AgentStarted((events.TaskRow(task.record, task.spec),), counter=1),
    )
    did = again.hear("y", messages.Result(task.task, task.uid, 1, out_of_memory()))
    assert "persist queued" in did
    record = again.task().record
    assert (record.gpu_mem_bytes, record.memory_retries, record.gpu_alone) == (24 * GIB, 1, False)


def test_an_attempt_here_that_is_sure_to_get_more_memory_is_taken_for_a_retry() -> None:
    """Nothing of it is kept, as of one of --retries."""
    x = Given(peers=(), slots=8, facts={"gpus": 1, "devices": (card(1, 48),)})
    x.when(events.DevicesFound((card(1, 48),)))
    x.when(events.DevicesSampled(x.at_s, (DeviceReading("nvidia:GPU-1"),)))
    x.submit(spec(request=request()))
    task, retries = x.task(), x.node.handoff.retries
    ended = out_of_memory()
    assert task.record.devices
    assert retries.repeats(task, ended)
    assert not retries.repeats(task, Exit(1))
    assert not retries.repeats(task, msgspec.structs.replace(ended, exit_code=124)), "its time limit is its result"
    for changed in ({"gpu_mem_bytes": 0}, {"gpu_share": GpuShare.EXCLUSIVE}):  # whether there is more is not sure
        spec_before = task.spec
        task.spec = msgspec.structs.replace(task.spec, request=msgspec.structs.replace(task.spec.request, **changed))
        assert not retries.repeats(task, ended)
        task.spec = spec_before
    x.when(events.TaskEnded(task.key, ended))
    assert (task.record.attempt, task.record.memory_retries) == (2, 1)


def test_an_attempt_whose_end_may_be_the_last_loss_with_a_card_is_not_taken_for_a_retry() -> None:
    """Its card is looked at after its outputs were collected, or left because it is tried again."""
    x = Given(peers=(), slots=8, facts={"gpus": 1, "devices": (card(1, 48),)})
    x.submit(spec(request=request()), terms=SubmitOptions(retries=9))
    task, retries = x.task(), x.node.handoff.retries
    assert retries.repeats(task, Exit(1))
    task.record = msgspec.structs.replace(task.record, losses=x.node.state.config.attempts_max - 1)
    assert not retries.repeats(task, Exit(1))
    assert retries.again(task, failed_card()), "it is its result"
