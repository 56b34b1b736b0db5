"""The mixed trace, in short: every scheduler keeps to what the machines have, and load sharing pays."""

from __future__ import annotations

import pytest

from tests.gpu.device_model import DeviceArrival
from tests.gpu.mixed import GPU_KINDS, NODES, mixed, profiles
from tests.gpu.rack import Outcome, Rack, Wrong
from tests.gpu.schedulers import by_agents, central_first_fit, fifo_per_node

TASKS = 120


@pytest.fixture(scope="module")
def trace() -> list[DeviceArrival]:
    return mixed(TASKS, seed=1)


@pytest.fixture(scope="module")
def adaptive(trace: list[DeviceArrival]) -> Outcome:
    return by_agents("adaptive", trace, seed=1)


def test_the_trace_is_what_it_says(trace: list[DeviceArrival]) -> None:
    assert sum(count for _, count, *_ in NODES) == 16
    assert len({model for _, _, _, model, _ in NODES}) == 2
    assert len(trace) == TASKS
    assert sum(one.gpus > 0 for one in trace) == round(0.4 * TASKS)
    assert [one.at_s for one in trace] == sorted(one.at_s for one in trace)
    assert {kind.request.gpus for kind in GPU_KINDS} == {1, 2, 4}
    assert mixed(TASKS, seed=1) == trace != mixed(TASKS, seed=2)


def test_every_task_ran_once_and_within_limits(trace: list[DeviceArrival], adaptive: Outcome) -> None:
    """The witness raises at the first task that starts twice, or where its cores, cards or memory are not."""
    assert adaptive.tasks == len(trace)
    assert fifo_per_node(trace).tasks == len(trace)
    assert central_first_fit(trace).tasks == len(trace)


def test_sharing_pays(trace: list[DeviceArrival], adaptive: Outcome) -> None:
    fifo = fifo_per_node(trace)
    assert adaptive.mean_wait_s <= fifo.mean_wait_s
    assert adaptive.makespan_s <= fifo.makespan_s
    assert adaptive.transfers > 0 == fifo.transfers


@pytest.mark.long
def test_a_play_is_repeatable(trace: list[DeviceArrival], adaptive: Outcome) -> None:
    assert by_agents("adaptive", trace, seed=1) == adaptive


def test_the_central_one_leaves_no_gpu_idle(trace: list[DeviceArrival]) -> None:
    assert central_first_fit(trace).idle_while_waiting == 0


def test_the_witness_sees_what_is_wrong(trace: list[DeviceArrival]) -> None:
    task = next(one for one in trace if one.command == "train-whole")
    card = "nvidia:GPU-3-0"
    rack = Rack(profiles())
    for number in (1, 2):
        rack.comes(number, task)
    rack.begins(task.at_s, 1, task, "n3", [card])
    with pytest.raises(Wrong, match="was not waiting"):
        rack.begins(task.at_s, 1, task, "n3", [card])
    with pytest.raises(Wrong, match="may be given"):
        rack.begins(task.at_s, 2, task, "n3", [card])
    with pytest.raises(Wrong, match="run at the end"):
        rack.outcome()
    with pytest.raises(Wrong, match="did not run"):
        rack.ends(task.at_s + 1, 7)
