"""One threshold that follows the load of all nodes ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.model.resources import Thresholds
from peerload.policy.api import AcceptBelow, GiveAbove, ReceiveBelow, SendAt

if TYPE_CHECKING:
    from peerload.policy.api import NodeView


class DynamicThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """T = ``factor`` times the average load index, over this node and every unexpired report, but never below
    ``threshold_min``. Needs an information policy that announces. Any threshold may be set by hand.

    Good: balances loads at any level.
    Bad: wrong if reports are old, so it needs an information policy that announces; reads every report.
    """

    wants_reports = True
    stateless = True

    factor: Annotated[float, Meta(gt=0.0, le=1000.0, description="T as a multiple of the average load")] = 1.5
    threshold_min: Annotated[float, Meta(ge=1.0, le=1000.0, description="T is never below this, in tasks per slot")] = (
        1.0
    )
    send_at: SendAt | None = None
    accept_below: AcceptBelow | None = None
    receive_below: ReceiveBelow | None = None
    give_above: GiveAbove | None = None

    def thresholds(self, view: NodeView) -> Thresholds:
        """All four at T, unless set by hand."""
        threshold = max(self.factor * view.load_mean / view.load_unit, self.threshold_min)
        return Thresholds(
            send_at=threshold if self.send_at is None else self.send_at,
            accept_below=threshold if self.accept_below is None else self.accept_below,
            receive_below=threshold if self.receive_below is None else self.receive_below,
            give_above=threshold if self.give_above is None else self.give_above,
        )
