"""Receiver's side: a node below its threshold asks others for a waiting task ([RM], [SK90])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.policy.api import Keep, Probe, draw_donor

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, Reply


class PollPeers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a task has ended, the node probes up to L nodes; the first one with a movable task gives it. Costs nothing
    at high load and drains bursts; at low load most probes find nothing.

    Good: nearly free at high load, drains bursts.
    Bad: at low load most probes find nothing, and a node asks only when a task has ended there, on a report, or
    (with ``retry_rate``) by a timer.
    """

    probes: Annotated[int, Meta(ge=0, le=64, description="L: nodes asked in one search at most")] = 3
    retry_rate: Annotated[float, Meta(ge=0.0, le=1000.0, description="extra searches per mean run time; 0: none")] = 0.0
    retry_probes: Annotated[int, Meta(ge=1, le=64, description="nodes asked in such an extra search")] = 1

    def locate(
        self, view: NodeView, probes_max: int | None, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Keep:
        """Probe one node at a time."""
        peer = draw_donor(view, replies, rng, self.probes if probes_max is None else probes_max)
        if peer is not None:
            return Probe((peer,))
        return Keep(f"none of {len(replies)} probed nodes gives a task" if replies else "no node to probe")
