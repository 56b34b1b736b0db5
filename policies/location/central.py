"""One server that all tasks pass through and all nodes report to: the baseline of every distributed policy ([RM])."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.policy.api import ANY_LOAD, Keep, Transfer

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.model.resources import LoadReport
    from peerload.policy.api import NodeView, Reply, TaskView


class Central(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The head node gives each task to the node with the fewest tasks per slot by its reports and the placements since then;
    ties are broken at random. ``queue``: with "nodes" tasks wait at the chosen node (join the shortest
    queue), with "head" at the head until a slot is free (one queue, first come, first served).

    Good: if messages are free, "head" is the optimum for unknown durations; the benchmark for distributed policies.
    Bad: every task costs the head several messages, and while it is down no task is placed.
    """

    places_all = True
    wants_reports = True

    queue: Annotated[Literal["nodes", "head"], Meta(description="where tasks wait: at the nodes, or at the head")] = (
        "nodes"
    )

    @cached_property
    def _placed(self) -> dict[str, tuple[LoadReport | None, int]]:
        """Tasks placed at each node since its report."""
        return {}

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Transfer | Keep:
        """Choose among the nodes that have not declined."""
        del task
        declined = {reply.node for reply in replies}
        least = float("inf")
        nearest: list[tuple[str, LoadReport | None, int]] = []
        for peer in view.peers:
            if peer in declined:
                continue
            known, profile = view.report(peer), view.profile(peer)
            report = known.report if known is not None else None
            told, since = self._placed.get(peer, (report, 0))
            is_current = (
                known is not None and known.age_s <= view.mean_s
            )  # otherwise placed tasks may have ended without a report
            placed = since if told is report and is_current else 0
            slots = max(profile.slots, 1) if profile is not None else 1
            load = ((report.load_tasks if report is not None else 0) + placed) / slots
            if load < least:
                least, nearest = load, []
            if load == least:
                nearest.append((peer, report, placed))
        if not nearest or (self.queue == "head" and least >= 1.0):
            return Keep("no node has a free slot" if nearest else "no other node takes it")
        peer, report, placed = nearest[rng.randrange(len(nearest))]
        self._placed[peer] = report, placed + 1
        return Transfer(peer, ANY_LOAD if self.queue == "nodes" else -1)
