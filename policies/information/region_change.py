"""Load is broadcast when the load region changes ([RM]: state-change by region; the default over MQTT)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.resources import LoadReport


class RegionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node announces a new load region after it has been stable for a while: few messages, and searches start at
    suitable nodes. Reports select the nodes to probe; they never replace the offer. ``period_s``: time between further
    announcements (0: none).

    Good: searches start at suitable nodes, and a node with work is asked immediately.
    Bad: each change goes to every node.
    """

    reports_guide_probing = True
    watches: ClassVar[WatchedChange] = "region"

    period_s: Annotated[
        float, Meta(ge=0.0, le=86_400.0, description="seconds between further broadcasts, 0 = none")
    ] = 0.0

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce when the region, or whether there is a task to give, differs from the last announcement."""
        return told is None or told.region is not now.region or told.gives is not now.gives

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Ask nobody."""
        del before, now
        return False
