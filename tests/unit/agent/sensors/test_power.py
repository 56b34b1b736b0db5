"""Power of a node: what it tells of it without a sensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peerload.agent.sensors.power import rated_watts
from peerload.agent.views import node as views
from peerload.model.config import EnergySettings
from peerload.model.events import LoadSampled
from peerload.model.power import Quality, estimated_curve
from tests.core.given import Given


def zone(root: Path, number: str, name: str, **files: object) -> Path:
    """One zone of a powercap tree."""
    directory = root / number
    directory.mkdir(parents=True)
    for file, content in {"name": name, **files}.items():
        (directory / file).write_text(f"{content}\n")
    return directory


def test_rated_watts_are_those_of_the_packages(tmp_path: Path) -> None:
    settings = EnergySettings(powercap=str(tmp_path))
    assert rated_watts(settings) == 0.0
    zone(tmp_path, "intel-rapl:0", "package-0", constraint_0_max_power_uw=125_000_000)
    zone(tmp_path, "intel-rapl:1", "psys", constraint_0_max_power_uw=600_000_000)
    zone(tmp_path, "intel-rapl:2", "package-1", constraint_0_max_power_uw=125_000_000)
    zone(tmp_path, "intel-rapl:3", "package-2", constraint_0_max_power_uw="")
    (tmp_path / "intel-rapl:4").symlink_to("intel-rapl:0")
    assert rated_watts(settings) == 250.0


def test_watts_of_a_node_are_estimated_from_its_curve() -> None:
    x = Given()
    x.node.own_profile.change(power=estimated_curve(4, peak_w=100.0))
    x.node.handle(x.node.state.now, LoadSampled(4.0, 0.0, 0))
    own: dict[str, Any] = views.nodes(x.node)[0]
    assert (own["watts"], own["watts_quality"]) == (100.0, Quality.ESTIMATED)
    told: dict[str, Any] = views.power(x.node)
    assert (told["watts"], told["quality"], told["source"]) == (100.0, "estimated", "model")
    assert told["curve"]["threads"] == 4
