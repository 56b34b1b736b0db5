"""Two nodes pair, balance their loads and separate ([BF81], "A stable distributed scheduling algorithm")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    import random

    from peerload.model.resources import LoadReport
    from peerload.policy.api import NodeView


class Pairing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At random times, a node with at least ``asks_from`` tasks per slot asks another node to pair; a node that is
    already paired refuses. While their loads differ by ``difference`` tasks or more, waiting tasks of the richer
    node move.

    With ``asks_from`` = 0 idle nodes ask too, like the receivers of other policies.

    Good: no threshold to choose; loads are balanced at any level.
    Bad: new work waits for the next pairing; transfers must be quick.
    """

    rate: Annotated[float, Meta(gt=0.0, le=1000.0, description="times a node asks per mean run time")] = 0.5
    difference: Annotated[int, Meta(ge=1, le=1000, description="tasks by which loads differ when one moves")] = 2
    asks_from: Annotated[float, Meta(ge=0.0, le=1000.0, description="tasks per slot from which on a node asks")] = 2.0

    def partner(self, view: NodeView, rng: random.Random) -> str | None:
        """Choose any peer with equal probability."""
        if view.load_tasks < self.asks_from * view.slots or not view.peers:
            return None
        return view.peers[rng.randrange(len(view.peers))]

    def moves(self, richer: LoadReport, poorer: LoadReport) -> bool:
        """Compare n; between nodes of different sizes, the poorer node's n is scaled to the richer node's slots."""
        same_size = poorer.load_tasks * richer.slots / max(poorer.slots, 1)
        return richer.load_tasks - same_size >= self.difference
