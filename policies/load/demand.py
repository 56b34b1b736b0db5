"""What the tasks ask for, beside what the node has ([RM]): for tasks of unequal width, and nodes of unequal speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Demand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cores that running, waiting and inbound tasks ask for, and those that foreign programs keep busy, per core of the
    node.

    Good: a task of eight cores weighs as eight.
    Bad: believes what users ask for.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """(Requested cores + foreign cores) / cores."""
        return (view.cpus_requested + view.cpus_foreign) / (view.cpus or 1.0)


class Weighted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same, divided by how fast the node works: of two nodes that are equally full the faster counts as less.

    Good: of two nodes that are equally full the faster is preferred.
    Bad: speed is measured on one kind of work, and yours may be of another.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """(Requested cores + foreign cores) / (cores · speed)."""
        return Demand().load(view) / view.speed
