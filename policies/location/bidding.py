"""Nodes bid for a task ([RM], after the contract net of [Smi80])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.policy.api import Keep, Probe, Reply, Transfer
from peerload.policy.draw import draw_receiver

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, TaskView


class Bidding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Up to ``bidders`` nodes are asked at once; each that accepts answers with a price, the time at which the task would
    have ended there. The cheapest is asked to confirm and may refuse by then; then the next. Without a bid the task
    stays.

    A price is the expected rest of what runs there, the expected durations of what waits, and the task's own, by the
    node's speed.

    Good: one round trip for all; the price knows how long this task and those before it take there.
    Bad: every bidder costs a message, and two homes may want the same one, which refuses the second.
    """

    wants_bids = True

    bidders: Annotated[int, Meta(ge=0, le=64, description="nodes asked for a bid at most")] = 3

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Transfer | Keep:
        """All requests at once; then the cheapest bids, one after the other."""
        del task
        if not replies:
            bidders = _bidders(view, rng, self.bidders)
            return Probe(bidders) if bidders else Keep("no node to ask for a bid")
        last = {reply.node: reply for reply in replies}  # a refusal overrides the bid
        bids = [reply for reply in last.values() if reply.accepts]
        if not bids:
            return Keep(f"no bid of {len(last)} nodes stands")
        return Transfer(min(bids, key=_price).node)


def _bidders(view: NodeView, rng: random.Random, bidders: int) -> tuple[str, ...]:
    """Different ones, drawn as probes are."""
    drawn: list[Reply] = []
    while len(drawn) < bidders and (peer := draw_receiver(view, drawn, rng, bidders)) is not None:
        drawn.append(Reply(peer, accepts=False))
    return tuple(reply.node for reply in drawn)


def _price(reply: Reply) -> float:
    return reply.price_s
