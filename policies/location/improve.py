"""Probe L nodes and move a task to a less loaded one, even if that is also loaded ([ELZ86], with the difference as
the test)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.policy.api import ANY_LOAD, Keep, Probe, Transfer, draw_receiver, was_declined

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.model.resources import LoadReport
    from peerload.policy.api import NodeView, Reply, TaskView


class Improve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spends every probe; the least loaded node gets the task if its n + ``delta`` is at most this node's. So a
    queue spreads even if no node is idle. Between nodes of different sizes, n is scaled to their slots.

    Good: a queue spreads even if no node is idle.
    Bad: spends every probe; a task may be moved for little.
    """

    probes: Annotated[int, Meta(ge=0, le=64, description="L: nodes asked in one search at most")] = 2
    delta: Annotated[int, Meta(ge=1, le=1000, description="tasks by which another node must be better")] = 2

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Transfer | Keep:
        """Probe one node at a time until L are spent; then choose the least loaded one, if that is an improvement."""
        del task
        peer = None if was_declined(replies) else draw_receiver(view, replies, rng, self.probes)
        return Probe((peer,)) if peer is not None else better(view, replies, self.delta)


class IdleFirst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first node that accepts gets the task, as in "threshold"; if none does, the least loaded of those probed,
    as in "improve". With thresholds of 1, a task goes to an idle node if one is found, and to a shorter queue
    otherwise.

    Good: finds idle nodes with few probes, and a shorter queue if no node is idle.
    Bad: a task may move several times.
    """

    probes: Annotated[int, Meta(ge=0, le=64, description="L: nodes asked in one search at most")] = 2
    delta: Annotated[int, Meta(ge=1, le=1000, description="tasks by which another node must be better")] = 2

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Transfer | Keep:
        """Probe one node at a time; the first that accepts gets the task."""
        del task
        if replies and replies[-1].accepts:
            return Transfer(replies[-1].node)
        peer = draw_receiver(view, replies, rng, self.probes)
        return Probe((peer,)) if peer is not None else better(view, replies, self.delta)


def better(view: NodeView, replies: Sequence[Reply], delta: int) -> Transfer | Keep:
    """Choose the least loaded of the nodes that answered and have not declined, the first one of equals. It accepts
    only if it is still as large an improvement."""
    last = {reply.node: reply for reply in replies}  # a decline overrides the probe's reply
    answered = [(reply.report, node) for node, reply in last.items() if reply.report is not None]
    if not answered:
        return Keep("no node to probe" if not replies else f"none of {len(last)} probed nodes answered or accepted")
    report, node = min(answered, key=lambda pair: _per_slot(pair[0]))
    load_tasks_max = min(view.load_tasks * report.slots // max(view.slots, 1) - delta, ANY_LOAD)
    if report.load_tasks > load_tasks_max:
        return Keep(f"none of {len(last)} probed nodes is less loaded by at least {delta}")
    return Transfer(node, load_tasks_max)


def _per_slot(report: LoadReport) -> float:
    return report.load_tasks / max(report.slots, 1)
