"""Nothing is told; peers are probed one by one at the moment of need ([RM], [ELZ86])."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.load import LoadReport


class Poll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No broadcasts at all: the fewest messages at low load; the freshest facts, a round trip late.

    Good: no messages without need.
    Bad: each search starts blind.
    """

    reports_guide_probing = False
    period_s = 0.0
    watches: ClassVar[WatchedChange] = "nothing"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Only that it is there."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del before, now
        return False


class PollWhenIdle(Poll, frozen=True, forbid_unknown_fields=True):
    """The receiver-initiated special case with threshold 1 ([RM]): a node tells nothing and, when a slot is free, polls
    others one by one for a task. For presets with the receiver policy ``poll`` and ``receive_below`` = 1.

    Good: the plainest work stealing; nothing is said while everybody is busy.
    Bad: a node that stays idle hears of new work only by its retries.
    """
