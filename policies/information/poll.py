"""Nothing is told; peers are probed one by one at the moment of need ([RM], [ELZ86])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.model.load import LoadReport


class Poll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No broadcasts at all: the fewest messages at low load; the freshest facts, a round trip late.

    Good: no messages without need.
    Bad: each search starts blind.
    """

    reports_guide_probing = False
    period_s = 0.0

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Only that it is there."""
        del now
        return told is None

    def asks(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del told, now
        return False
