"""The policy that docs/policies.md shows as an example loads and plays."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from peerload.model.load import LoadReport
from peerload.policy.api import Keep, KnownReport, Reply, Transfer
from peerload.policy.preset import PolicySet
from peerload.policy.registry import load_preset
from peerload.sim.engine import Simulation
from peerload.sim.workload import burst

PAGE = Path(__file__).resolve().parents[2] / "docs/policies.md"
LINES_MAX = 30


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def preset(tmp_path: Path) -> PolicySet:
    """As a reader would have it: two files beside each other."""
    (tmp_path / "mine.py").write_text(block("python"), encoding="utf-8")
    toml = block("toml")
    assert "/path/to/mine.py:" in toml
    (tmp_path / "mine.toml").write_text(toml.replace("/path/to", str(tmp_path)), encoding="utf-8")
    return load_preset(str(tmp_path / "mine.toml"))


class View:
    """As much of a node's view as the example looks at."""

    def __init__(self, reports: dict[str, tuple[float, float, bool]]) -> None:
        self.peers = sorted(reports)
        self._reports = reports

    def report(self, node: str) -> KnownReport:
        load, age_s, accepts = self._reports[node]
        return KnownReport(LoadReport(load=load, accepts=accepts), age_s)


def test_it_is_short() -> None:
    assert len(block("python").splitlines()) <= LINES_MAX


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
    assert report.counts.get("policy errors", 0) == 0
