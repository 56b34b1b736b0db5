"""Two thresholds with a neutral zone between them ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.model.resources import Thresholds
from peerload.policy.api import THRESHOLD_MAX, AcceptBelow, GiveAbove, ReceiveBelow, SendAt

if TYPE_CHECKING:
    from peerload.policy.api import NodeView


class DoubleThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node accepts and asks below ``low``, sends and gives from ``high``; between them it does neither, which
    saves messages if loads vary around one value. Any threshold may be set by hand.

    Good: no messages between the two.
    Bad: a node between the two accepts nothing although it may be the least loaded.
    """

    steady = True
    low: Annotated[
        float, Meta(ge=0.0, le=THRESHOLD_MAX, description="accept others' tasks below this many tasks per slot")
    ] = 1.0
    high: Annotated[
        float, Meta(ge=0.0, le=THRESHOLD_MAX, description="send tasks away from this many tasks per slot on")
    ] = 2.0
    send_at: SendAt | None = None
    accept_below: AcceptBelow | None = None
    receive_below: ReceiveBelow | None = None
    give_above: GiveAbove | None = None

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")

    def thresholds(self, view: NodeView) -> Thresholds:
        """low: accept_below, receive_below; high: send_at, give_above; unless set by hand."""
        del view
        return Thresholds(
            send_at=self.high if self.send_at is None else self.send_at,
            accept_below=self.low if self.accept_below is None else self.accept_below,
            receive_below=self.low if self.receive_below is None else self.receive_below,
            give_above=self.high if self.give_above is None else self.give_above,
        )
