"""What each load estimation and the selections by size say, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from peerload.model.resources import Placement, ResourceRequest
from peerload.policy.api import TaskView
from peerload.policy.preset import IdleNode
from peerload.policy.registry import policy_class


class Running:
    def __init__(self, used_s: float, durations: Sequence[float] = ()) -> None:
        self.used_s, self.durations = used_s, durations


class View(IdleNode):
    """Two slots; what is not said is nothing."""

    slots = 2
    cpus = 4.0

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


def load(name: str, **facts: Any) -> float:
    policy: Any = msgspec.convert({}, policy_class("load", name))
    value = policy.load(View(**facts))
    assert isinstance(value, float)
    return value


SEEN = (1.0, 2.0, 6.0)


@pytest.mark.parametrize(
    ("name", "facts", "expected"),
    [
        ("tasks", {"load_tasks": 3}, 1.5),
        ("cpu", {"cpus_busy": 3.0, "load_tasks": 3}, 0.75 + 0.5),
        ("composite", {"load_tasks": 3}, 1.5),
        ("composite", {"load_tasks": 3, "cpus_foreign": 2.0}, 2.0),
        ("composite", {"cpus_foreign": 9.0, "cpus": 0.0}, 0.0),
        ("gpu", {"load_tasks": 3}, 1.5),
        ("gpu", {"gpus": 4, "gpus_busy": 3.0, "load_tasks": 3}, 0.75),
        ("gpu", {"gpus": 2, "gpus_busy": 2.0, "gpu_tasks": 5}, 2.5),
        ("demand", {"cpus_requested": 10.0}, 2.5),
        ("demand", {"cpus_requested": 0.0, "cpus": 0.0, "slots": 0}, 0.0),
        ("weighted", {"cpus_requested": 10.0, "speed": 0.5}, 5.0),
        ("weighted", {"cpus_requested": 10.0, "speed": 2.5}, 1.0),
        ("memoryless", {"load_tasks": 5, "mean_s": 4.0}, 10.0),
        ("memoryless", {"load_tasks": 5, "mean_s": 4.0, "running": [Running(99.0)]}, 10.0),
        ("past-repeats", {"running": [Running(7.0), Running(1.0)], "waiting_s": 4.0}, 6.0),
        ("past-repeats", {"running": [Running(0.0, SEEN)]}, 0.0),
        ("distribution", {"running": [Running(0.0, SEEN)], "waiting_s": 5.0}, (3.0 + 5.0) / 2),
        ("distribution", {"running": [Running(1.0, SEEN)]}, (4.0 - 1.0) / 2),
        ("distribution", {"running": [Running(2.5, SEEN), Running(0.5, [1.0])]}, (3.5 + 0.5) / 2),
        ("distribution", {"running": [Running(6.0, SEEN)]}, 6.0 / 2),
        ("distribution", {"running": [Running(6.0)], "mean_s": 3.0}, 3.0 / 2),
        ("distribution", {}, 0.0),
        ("memoryless", {"slots": 0}, 0.0),
        ("past-repeats", {"slots": 0, "waiting_s": 3.0}, 3.0),
    ],
)
def test_load(name: str, facts: dict[str, Any], expected: float) -> None:
    assert load(name, **facts) == pytest.approx(expected)


def test_a_task_that_has_run_for_long_tells_the_three_apart() -> None:
    """Most runs take 1 s, one in ten takes 100 s; this one has run for 10 s."""
    facts = {"load_tasks": 1, "slots": 1, "mean_s": 10.9, "running": [Running(10.0, [1.0] * 9 + [100.0])]}
    guesses = [load(name, **facts) for name in ("memoryless", "past-repeats", "distribution")]
    assert guesses == pytest.approx([10.9, 10.0, 90.0])


class Waiting:
    def __init__(self, *tasks: tuple[float, int]) -> None:
        self.looked_at = 0
        self._tasks = [
            TaskView(f"x/{number}", ResourceRequest(), Placement(), 0, 1.0, expected_s, moved_bytes)
            for number, (expected_s, moved_bytes) in enumerate(tasks, 1)
        ]

    def oldest_first(self) -> Iterator[TaskView]:
        for task in self._tasks:
            self.looked_at += 1
            yield task

    def newest_first(self) -> Iterator[TaskView]:
        return reversed(self._tasks)


def selected(name: str, waiting: Waiting, **parameters: Any) -> str:
    policy: Any = msgspec.convert(parameters, policy_class("selection", name))
    task = policy.select(waiting)
    return "" if task is None else str(task.task)


def test_selection_by_size() -> None:
    waiting = Waiting((0.0, 50), (3.0, 40), (9.0, 90), (9.0, 40))
    assert selected("smallest", waiting) == "x/2"
    assert selected("longest", waiting) == "x/3"
    assert selected("longest", Waiting((0.0, 5), (0.0, 5))) == "x/1"
    assert selected("longest", Waiting()) == selected("smallest", Waiting()) == ""


@pytest.mark.parametrize("name", ["smallest", "longest"])
def test_a_long_queue_is_looked_at_no_further_than_that(name: str) -> None:
    waiting = Waiting(*[(float(number), 5000 - number) for number in range(5000)])
    assert selected(name, waiting) == "x/200"
    assert waiting.looked_at == 200
    assert selected(name, waiting, looked_at_max=10) == "x/10"


@pytest.mark.parametrize(
    ("name", "facts", "expected"),
    [
        ("composite", {"gpus": 4, "gpu_tasks": 2, "gpus_foreign": 1.0, "load_tasks": 9}, 0.75),
        ("composite", {}, 0.0),
        ("gpu", {"gpus": 4, "gpus_busy": 1.0, "gpu_tasks": 6}, 0.75),
    ],
)
def test_the_load_of_gpus(name: str, facts: dict[str, Any], expected: float) -> None:
    policy: Any = msgspec.convert({}, policy_class("load", name))
    assert policy.gpu_load(View(**facts)) == expected
