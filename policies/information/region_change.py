"""Broadcast when the load region changes ([RM]: state-change by region; the default over MQTT)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.model.load import LoadReport


class RegionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Few messages (a region is left only after it has held for a while) and searches that start in the right place;
    reports choose whom to probe, they never replace the offer."""

    reports_guide_probing: bool = True
    period_s: float = 0.0

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """When the region differs from the one told last, or whether there is a task to give."""
        return told is None or told.region is not now.region or told.gives is not now.gives

    def asks(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del told, now
        return False
