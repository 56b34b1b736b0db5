"""Placement without a probe: random ([ELZ86], "random"), or by known reports ([Mit00] analyses the cost)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.policy.api import ANY_LOAD, Keep, Transfer

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, Reply, TaskView


class Random(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task goes to any other node, which applies the same test to it and may pass it on, until the migration
    limit. At high load most tasks move from one full node to another.

    Good: costs no probe, and is better than nothing.
    Bad: at high load tasks move from one full node to another.
    """

    passes_on: Annotated[bool, Meta(description="a full node passes the task on, until its limit")] = True

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Transfer | Keep:
        """Choose one of the nodes that have not declined."""
        del task
        declined = {reply.node for reply in replies}
        left = [peer for peer in view.peers if peer not in declined]
        return Transfer(left[rng.randrange(len(left))], ANY_LOAD) if left else Keep("no other node takes it")


class LeastKnown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task goes to the accepting node with the least load in the known reports; ties are broken at
    random. Reports older than ``age_s_max`` do not count.

    Good: no probe, and a good choice while reports are recent.
    Bad: old reports send many tasks to one node at a time, which declines most of them.
    """

    wants_reports = True

    age_s_max: Annotated[float, Meta(gt=0.0, le=1e9, description="older reports do not count, in seconds")] = 10.0

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Transfer | Keep:
        """Choose the best of the nodes that have not declined."""
        del task
        declined = {reply.node for reply in replies}
        known = view.reports(self.age_s_max, "accepts")
        fresh = [(report.load, peer) for peer, report in known if peer not in declined]
        if not fresh:
            return Keep("no fresh report says that there is room")
        least = min(load for load, _ in fresh)
        nearest = [peer for load, peer in fresh if load == least]
        return Transfer(nearest[rng.randrange(len(nearest))])
