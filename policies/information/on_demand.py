"""Load is requested when it is needed, by broadcast ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from peerload.model.resources import Region
from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.resources import LoadReport


class OnDemand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that leaves the normal region asks all nodes, once. Only useful nodes answer (overloaded ones if it
    has free slots, underloaded ones if it has too many tasks), each after a random pause, until it has enough
    answers. No node withdraws an answer, so an answer is valid only for ``believed_s`` (2 s).

    Good: no messages while loads are normal.
    Bad: at very low or very high load many nodes ask and few can help.
    """

    reports_guide_probing = True
    believed_s = 2.0
    period_s = 0.0
    watches: ClassVar[WatchedChange] = "region"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce only the start of the node."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Ask when the region has changed to one that is not normal."""
        return before is not None and before.region is not now.region and now.region is not Region.NORMAL


class BroadcastWhenIdle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver-initiated special case with threshold 1 ([RM]): a node asks all nodes for work as soon as a slot
    is free, and takes a task from the first one that answers. For presets with a receiver policy and ``receive_below`` =
    1. It does not notice work that arrives later, so give that policy a ``retry_rate``.

    Good: an idle node finds work on any node, even if few have some.
    Bad: at low load all nodes are asked after nearly every task.
    """

    reports_guide_probing = False
    period_s = 0.0
    watches: ClassVar[WatchedChange] = "tasks"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce only the start of the node."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Ask when a slot has become free."""
        return before is not None and now.load_tasks < min(now.slots, before.load_tasks)
