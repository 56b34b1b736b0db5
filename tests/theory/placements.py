"""Placements of the reference model that no node plays by choice: they draw from all nodes, the home among them.

A policy never names its own node, so the home's part of the draw is made here: where the home is drawn and is as good as
the best, the task stays. ``looks`` counts the draws of the home, which the reference counts as probes, and ``probed`` those of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from peerload.policy.api import ANY_LOAD, Keep, Probe, Transfer

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, Reply, TaskView

STAY = Keep("the home is as good as any of those drawn")


class JoinShortest(msgspec.Struct):
    """`jsqd` [Mit01]: ``probes`` nodes out of all, drawn uniformly; the least loaded gets the task, the first of equals."""

    probes: int
    looks: ClassVar[int] = 0
    probed: ClassVar[int] = 0

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Transfer | Keep:
        """All probes at once; fewer replies than were to be drawn say that the home was one of them."""
        del task
        drawn = min(self.probes, len(view.peers) + 1)
        if not replies:
            has_home = rng.random() * (len(view.peers) + 1) < drawn
            others = rng.sample(view.peers, drawn - has_home)
            type(self).looks += has_home  # of the class, since each node has an instance of its own
            type(self).probed += len(others)
            return Probe(tuple(others)) if others else STAY
        loads = [(reply.report.load_tasks, reply.node) for reply in replies if reply.report is not None]
        least = min(load for load, _ in loads)
        best = [node for load, node in loads if load == least]
        if len(replies) < drawn and view.load_tasks <= least:
            equals = 1 + (len(best) if view.load_tasks == least else 0)
            if rng.random() * equals < 1:  # it was drawn first of them
                return STAY
        return Transfer(best[0], ANY_LOAD)


class LeastOnBoard(msgspec.Struct):
    """`board-min` and `board-d` [Mit00]: the least load published last, of all nodes (``draws`` = 0) or of so many drawn
    uniformly; equals by chance. Nothing is probed, and nobody corrects the board in between."""

    draws: int = 0

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Transfer | Keep:
        """At once."""
        del task, replies
        everybody = [*view.peers, view.node]
        drawn = everybody if not self.draws else rng.sample(everybody, min(self.draws, len(everybody)))
        published = [(told.report.load_tasks, node) for node in drawn if (told := view.report(node)) is not None]
        least = min(load for load, _ in published)
        best = [node for load, node in published if load == least]
        chosen = best[rng.randrange(len(best))]
        return STAY if chosen == view.node else Transfer(chosen, ANY_LOAD)
