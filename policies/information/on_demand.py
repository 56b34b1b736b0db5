"""Load is asked for when it is needed, by broadcasting a request ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from peerload.model.load import Region
from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.load import LoadReport


class OnDemand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that leaves the normal region asks everybody, once. Only the useful answer (the overloaded if it has room,
    the underloaded if it has too much), each after a random pause, and stop when it has enough. Nobody takes an answer back, so it is believed for ``believed_s``
    (2 s) only.

    Good: quiet while loads are normal.
    Bad: at very low or very high load many ask and few can help.
    """

    reports_guide_probing = True
    believed_s = 2.0
    period_s = 0.0
    watches: ClassVar[WatchedChange] = "region"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Only that it is there."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """When the region is another one than before, and not the normal one."""
        return before is not None and before.region is not now.region and now.region is not Region.NORMAL


class BroadcastWhenIdle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver-initiated special case with threshold 1 ([RM]): a node asks everybody for work as soon as a slot is
    free, and takes a task of the first that answers. For presets with a receiver policy and ``receive_below`` = 1. Work
    that appears later is not heard of, so give that policy a ``retry_rate``.

    Good: an idle node finds work wherever it is, however few have it.
    Bad: at low load everybody is asked after nearly every task.
    """

    reports_guide_probing = False
    period_s = 0.0
    watches: ClassVar[WatchedChange] = "tasks"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Only that it is there."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """When a slot has become free."""
        return before is not None and now.load_tasks < min(now.slots, before.load_tasks)
