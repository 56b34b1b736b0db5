"""One threshold for everything ([RM]; T of [ELZ86])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.model.resources import Thresholds
from peerload.policy.api import THRESHOLD_MAX, AcceptBelow, GiveAbove, ReceiveBelow, SendAt

if TYPE_CHECKING:
    from peerload.policy.api import NodeView


class SingleThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node sends at n ≥ T, accepts and asks at n < T, gives at n > T. Any threshold may be set by hand.
    ``prefetch``: number of additional tasks that a node asks for, so that one is ready when a short task ends; with ``pipelined``
    at least as many as its slots finish during a handoff, so that its slots never wait for one.

    Good: simple, acts early.
    Bad: with slow transfers, a node near T may both send and ask.
    """

    steady = True
    threshold: Annotated[
        float, Meta(ge=0.0, le=THRESHOLD_MAX, description="T, in tasks per slot; sets all four thresholds")
    ] = 2.0
    send_at: SendAt | None = None
    accept_below: AcceptBelow | None = None
    receive_below: ReceiveBelow | None = None
    give_above: GiveAbove | None = None
    prefetch: Annotated[int, Meta(ge=0, le=1000, description="tasks asked for beyond the threshold, as a reserve")] = 0
    pipelined: Annotated[bool, Meta(description="as many more as the slots finish during a handoff")] = False

    def thresholds(self, view: NodeView) -> Thresholds:
        """All four at T, unless set by hand."""
        del view
        threshold = self.threshold
        return Thresholds(
            send_at=threshold if self.send_at is None else self.send_at,
            accept_below=threshold if self.accept_below is None else self.accept_below,
            receive_below=threshold if self.receive_below is None else self.receive_below,
            give_above=threshold if self.give_above is None else self.give_above,
            prefetch=self.prefetch,
            is_pipelined=self.pipelined,
        )
