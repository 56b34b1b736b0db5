"""Broadcast when the load region changes ([RM]: state-change by region; the default over MQTT)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from peerload.model.load import LoadReport
    from peerload.policy.api import Watch


class RegionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Few messages (a region is left only after it has held for a while) and searches that start in the right place;
    reports choose whom to probe, they never replace the offer. ``period_s``: told again this often, besides (0: not)."""

    reports_guide_probing: bool = True
    period_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 0.0

    @property
    def watches(self) -> Watch:
        """Regions, once they have held."""
        return "region"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """When the region differs from the one told last."""
        return told is None or told.region is not now.region

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del before, now
        return False
