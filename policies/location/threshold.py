"""Probe up to L nodes, and choose the first that stays below its threshold ([ELZ86], "threshold")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.policy.api import Keep, Probe, Transfer, draw_receiver

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, Reply, TaskView


class Threshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nearly as good as "shortest" with fewer probes [ELZ86]. Alone it cannot spread a burst that arrives at one node
    faster than tasks end: when the others are full, the rest stays.

    Good: few probes, nearly as good as ``shortest``.
    Bad: alone it does not spread a burst at one node: when the others are full, the rest stays.
    """

    probes: Annotated[int, Meta(ge=0, le=64, description="L: nodes asked in one search at most")] = 3

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Transfer | Keep:
        """Probe one node at a time; the first that accepts gets the task."""
        del task
        if replies and replies[-1].accepts:
            return Transfer(replies[-1].node)
        peer = draw_receiver(view, replies, rng, self.probes)
        if peer is not None:
            return Probe((peer,))
        asked = len({reply.node for reply in replies})
        return Keep(f"none of {asked} probed nodes accepts" if asked else "no node to probe")
