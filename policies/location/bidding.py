"""Contract net: nodes bid for a task ([RM], [Smi80])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.policy.api import Broadcast, Keep, Probe, Reply, Transfer, draw_receiver

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, TaskView


class Bidding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The home announces a task to up to ``bidders`` nodes at once, or with ``broadcast`` to all until so many have bid; each
    that accepts bids, and the cheapest is awarded the task. It is asked to confirm and may refuse by then; then the next.
    Without a bid the task stays.

    ``price`` is the bid specification: ``completion``, when the task would have ended there (the expected rest of what
    runs there, the expected durations of what waits, and the task's own, by the node's speed); ``load``, the load index;
    ``constant``, none: of equal bids the first counts.

    Good: one round trip for all; by ``completion`` the price knows how long this task and those before it take there.
    Bad: every bidder costs a message, and two homes may want the same one, which refuses the second.
    """

    bidders: Annotated[int, Meta(ge=0, le=64, description="bids taken for one task at most")] = 3
    price: Annotated[
        Literal["completion", "load", "constant"], Meta(description="what a node bids: the cheapest gets the task")
    ] = "completion"
    broadcast: Annotated[bool, Meta(description="the task is announced to all nodes, not to some drawn by chance")] = (
        False
    )

    @property
    def wants_bids(self) -> bool:
        """True if bidders tell the expected completion."""
        return self.price == "completion"

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Broadcast | Transfer | Keep:
        """Send all requests at once; then offer the task to the cheapest bidders, one after the other."""
        del task
        last = {reply.node: reply for reply in replies}  # a refusal overrides the bid
        bids = [reply for reply in last.values() if reply.accepts]
        best = Transfer(min(bids, key=self._price).node) if bids else None
        if self.broadcast and len(replies) < self.bidders:
            return Broadcast(otherwise=best)
        if not replies:
            bidders = () if self.broadcast else _bidders(view, rng, self.bidders)
            return Probe(bidders) if bidders else Keep("no node to ask for a bid")
        return best or Keep(f"no bid of {len(last)} nodes stands")

    def _price(self, bid: Reply) -> float:
        match self.price:
            case "completion":
                return bid.price_s
            case "load":
                return bid.report.load if bid.report is not None else float("inf")
            case "constant":
                return 0.0


def _bidders(view: NodeView, rng: random.Random, bidders: int) -> tuple[str, ...]:
    """Draw different nodes, as probes are drawn."""
    drawn: list[Reply] = []
    while len(drawn) < bidders and (peer := draw_receiver(view, drawn, rng, bidders)) is not None:
        drawn.append(Reply(peer, accepts=False))
    return tuple(reply.node for reply in drawn)
