"""Power sensors of the host: what the kernel and a command of the administrator tell of watts and joules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.sensors.own_use import read_text_of

if TYPE_CHECKING:
    from peerload.model.config import EnergySettings


def rated_watts(settings: EnergySettings) -> float:
    """Sum of the long-term power limits of the processor packages; 0 = not known."""
    found = {
        zone.resolve(): read_text_of(zone / "constraint_0_max_power_uw")
        for zone in Path(settings.powercap).glob("intel-rapl:*")
        if read_text_of(zone / "name").startswith("package")
    }
    return sum(int(text) for text in found.values() if text.isdecimal()) / 1e6
