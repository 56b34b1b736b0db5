"""No announcements: peers are probed one by one at the moment of need ([RM], [ELZ86])."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.resources import LoadReport


class Poll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load is never broadcast: the fewest messages at low load, and current data, since each search requests it.

    Good: no messages without need.
    Bad: each search starts without any knowledge.
    """

    reports_guide_probing = False
    period_s = 0.0
    watches: ClassVar[WatchedChange] = "nothing"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce only the start of the node."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Ask nobody."""
        del before, now
        return False


class PollWhenIdle(Poll, frozen=True, forbid_unknown_fields=True):
    """The receiver-initiated special case with threshold 1 ([RM]): a node announces nothing and, when a slot is
    free, polls others one by one for a task. For presets with the receiver policy ``poll`` and ``receive_below`` =
    1.

    Good: the simplest work stealing; no messages while all nodes are busy.
    Bad: a node that stays idle learns of new work only by its retries.
    """
