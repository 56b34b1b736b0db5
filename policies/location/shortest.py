"""Probe exactly L nodes, and choose the least loaded one if it would accept ([ELZ86], "shortest")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.policy.api import Keep, Probe, Transfer, draw_receiver, was_declined

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, Reply, TaskView


class Shortest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Uses every probe; slightly better than "threshold" if loads differ much. Ties go to the node probed first;
    with ``stop_at_zero`` an empty node ends the search.

    Good: a better choice if loads differ much.
    Bad: uses every probe; has the same weakness with bursts as ``threshold``.
    """

    probes: Annotated[int, Meta(ge=0, le=64, description="L: nodes asked in one search at most")] = 3
    stop_at_zero: Annotated[bool, Meta(description="an empty node ends the search at once")] = False

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Transfer | Keep:
        """Probe one node at a time until L are spent; then choose the least loaded one that accepts."""
        del task
        last: dict[str, Reply] = {reply.node: reply for reply in replies}  # a decline overrides the probe's reply
        idle = self.stop_at_zero and bool(replies) and _load(replies[-1]) == 0 and replies[-1].accepts
        if not idle and not was_declined(replies):
            peer = draw_receiver(view, replies, rng, self.probes)
            if peer is not None:
                return Probe((peer,))
        willing = [reply for reply in last.values() if reply.accepts]
        if not willing:
            return Keep(f"none of {len(last)} probed nodes accepts" if last else "no node to probe")
        return Transfer(min(willing, key=_load).node)


def _load(reply: Reply) -> float:
    return reply.report.load if reply.report is not None else float("inf")
