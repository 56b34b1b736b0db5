"""A report of a peer's load as it was heard: by itself, or as others tell it."""

from __future__ import annotations

import msgspec

from peerload.model.load import LoadReport

AHEAD_MAX = 1000
"""Bound on reports that others tell of a node: they are no further ahead of the node's own word than this many reports, or it is not true."""


class HeardReport(msgspec.Struct, frozen=True, gc=False):
    """A report and the boot time when it came; by_itself: from the node that it is about."""

    report: LoadReport
    at_s: float
    by_itself: bool = True

    def gives_way_to(self, other: HeardReport, incarnation: int) -> bool:
        """True if the other is to be believed instead: the newest (incarnation, sequence), but nothing that others tell
        keeps the node's own word out for long. incarnation: that of the run that is believed in now."""
        mine, its = self.report, other.report
        if (its.incarnation, its.sequence) > (mine.incarnation, mine.sequence):
            return True
        if self.by_itself or not other.by_itself or its.incarnation != incarnation:
            return False
        return mine.incarnation > its.incarnation or mine.sequence > its.sequence + AHEAD_MAX
