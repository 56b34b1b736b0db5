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
    """The home announces a task to up to ``bidders`` nodes in parallel, or with ``broadcast`` to all, until as many have bid. Each
    node that accepts bids, and the cheapest is offered the task. If it refuses by then, the next one gets the offer.
    Without a bid the task stays.

    ``price`` is the bid specification: ``completion``, the expected end of the task there (the remaining time of running
    tasks, the durations of waiting ones, and the duration of this task, at the node's speed); ``load``, the load index;
    ``constant``, the same for all: of equal bids the first one wins.

    Good: one round trip for all; with ``completion`` the price includes the duration of this task and of earlier ones there.
    Bad: every bidder costs a message, and two homes may choose the same node, which refuses the second.
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
        """True if bids include the expected completion."""
        return self.price == "completion"

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Broadcast | Transfer | Keep:
        """Send all requests in parallel; then offer the task to the cheapest bidders, one after another."""
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
    """Draw distinct nodes in the same way as for probes."""
    drawn: list[Reply] = []
    while len(drawn) < bidders and (peer := draw_receiver(view, drawn, rng, bidders)) is not None:
        drawn.append(Reply(peer, accepts=False))
    return tuple(reply.node for reply in drawn)
