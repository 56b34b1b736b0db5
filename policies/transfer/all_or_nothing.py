"""A node either has work or is idle ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.model.resources import Thresholds
from peerload.policy.api import AcceptBelow, GiveAbove, ReceiveBelow, SendAt

if TYPE_CHECKING:
    from peerload.policy.api import NodeView


class AllOrNothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One threshold at one task per slot: an idle node accepts, any other gives tasks that it cannot start. With
    ``processing_margin`` at two, so that no node is idle while its next task is transferred. Any threshold may be set
    explicitly.

    Good: no task waits because of a threshold while a node is idle.
    Bad: without the margin a node is idle while its next task is transferred.
    """

    steady = True
    processing_margin: Annotated[bool, Meta(description="fetch the next task before a slot is free")] = False
    send_at: SendAt | None = None
    accept_below: AcceptBelow | None = None
    receive_below: ReceiveBelow | None = None
    give_above: GiveAbove | None = None

    def thresholds(self, view: NodeView) -> Thresholds:
        """All four at 1, or 2, unless set by hand."""
        del view
        threshold = 2.0 if self.processing_margin else 1.0
        return Thresholds(
            send_at=threshold if self.send_at is None else self.send_at,
            accept_below=threshold if self.accept_below is None else self.accept_below,
            receive_below=threshold if self.receive_below is None else self.receive_below,
            give_above=threshold if self.give_above is None else self.give_above,
        )
