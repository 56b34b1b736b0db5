"""Requested resources of the tasks, relative to the resources of the node ([RM]): for tasks of different width, and
nodes of different speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Demand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cores that running, waiting and inbound tasks request, and cores that foreign programs keep busy, per core of
    the node.

    Good: a task of eight cores counts as eight.
    Bad: relies on the users' requests.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """(Requested cores + foreign cores) / cores."""
        return (view.cpus_requested + view.cpus_foreign) / (view.cpus or 1.0)


class Weighted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`demand`, divided by the speed of the node: of two nodes that are equally full the faster one counts as less
    loaded.

    Good: of two nodes that are equally full the faster is preferred.
    Bad: speed is measured with one kind of work, which may differ from yours.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """(Requested cores + foreign cores) / (cores · speed)."""
        return Demand().load(view) / view.speed
