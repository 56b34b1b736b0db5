"""The policies that docs/policies.md shows as examples load and play."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from peerload.model.resources import LoadReport
from peerload.policy.api import Keep, Reply, Transfer
from peerload.policy.preset import PolicySet
from peerload.policy.registry import load_preset
from peerload.sim.queueing_model import Arrival, CompletedTask, QueueingModel, profiles_of
from tests.chaos.engine.engine import Simulation
from tests.workloads import burst

PAGE = Path(__file__).resolve().parents[2] / "docs/policies.md"
LINES_MAX = 30
FILES = ("mine.py", "jiq.py")
"""What each example is called, in the order of the page."""


def block(language: str, number: int) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == len(FILES)
    return str(found[number])


def loaded(number: int, tmp_path: Path) -> PolicySet:
    """As a reader would have it: two files beside each other."""
    file = FILES[number]
    (tmp_path / file).write_text(block("python", number), encoding="utf-8")
    toml = block("toml", number)
    assert f"/path/to/{file}:" in toml
    (tmp_path / "mine.toml").write_text(toml.replace("/path/to", str(tmp_path)), encoding="utf-8")
    return load_preset(str(tmp_path / "mine.toml"))


@pytest.fixture
def preset(tmp_path: Path) -> PolicySet:
    return loaded(0, tmp_path)


class View:
    """As much of a node's view as the example looks at."""

    def __init__(self, reports: dict[str, tuple[float, float, bool]]) -> None:
        self.peers = sorted(reports)
        self._reports = reports

    def reports(self, age_s_max: float) -> list[tuple[str, LoadReport]]:
        told = [
            (node, LoadReport(load=load, accepts=accepts), age) for node, (load, age, accepts) in self._reports.items()
        ]
        return [(node, report) for node, report, age_s in told if age_s <= age_s_max]


def test_it_is_short() -> None:
    assert len(block("python", 0).splitlines()) <= LINES_MAX


def test_it_takes_the_least_loaded_of_the_fresh_reports(preset: PolicySet) -> None:
    view = View({"a": (0.5, 1.0, True), "b": (0.2, 1.0, True), "c": (0.0, 6.0, True), "d": (0.1, 1.0, False)})
    rng = random.Random(1)
    assert preset.sender.locate(view, None, (), rng) == Transfer("b")  # type: ignore[arg-type]
    declined = [Reply("b", accepts=False)]
    assert preset.sender.locate(view, None, declined, rng) == Transfer("a")  # type: ignore[arg-type]
    declined.append(Reply("a", accepts=False))
    assert isinstance(preset.sender.locate(view, None, declined, rng), Keep)  # type: ignore[arg-type]


def test_it_shares_a_burst(preset: PolicySet) -> None:
    report = Simulation(preset, nodes=3, slots=2, seed=1).run(burst("n1", 30, 1.0))
    assert report.ended == report.tasks == 30
    assert report.transfers > 0
    assert report.counts.get("policy_errors_total", 0) == 0


def test_join_idle_queue_sends_to_nodes_that_have_told_this_one_alone_that_they_are_idle(tmp_path: Path) -> None:
    """20 nodes at load 0.7, message for message: who becomes idle tells one node, and no task asks anybody first."""
    cluster, ended = _played(loaded(1, tmp_path))
    counts = cluster.counts()
    assert counts.get("policy_errors_total", 0) == 0
    assert counts["announcements_to_one_total"] > TASKS / 4
    assert counts.get("sender_probes_total", 0) == counts.get("receiver_probes_total", 0) == 0
    transfers = sum(task.node != task.home for task in ended)
    assert transfers > TASKS / 8
    alone = _played(load_preset("none"))[1]
    assert sum(task.response_s for task in ended) < 0.7 * sum(task.response_s for task in alone)


TASKS = 2000


def _played(preset: PolicySet) -> tuple[QueueingModel, list[CompletedTask]]:
    ended: list[CompletedTask] = []
    cluster = QueueingModel(preset, profiles_of([1] * 20), seed=1, ended=ended.append)
    rng = random.Random(1)
    at_s = 0.0
    arrivals = []
    for _ in range(TASKS):
        at_s += rng.expovariate(20 * 0.7)
        arrivals.append(Arrival(at_s, f"n{rng.randint(1, 20)}", rng.expovariate(1.0)))
    cluster.run(iter(arrivals), tasks=TASKS)
    cluster.drain()
    assert len(ended) == TASKS
    return cluster, ended
