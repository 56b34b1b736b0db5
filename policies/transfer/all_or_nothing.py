"""A node has work or it has none ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from peerload.model.load import Marks

if TYPE_CHECKING:
    from peerload.policy.api import NodeView


class AllOrNothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One threshold at one task per slot: whoever is idle takes, whoever is not gives what it cannot start. With
    ``processing_margin`` at two, so that no node idles while its next task travels. Any mark may be set by hand."""

    steady: ClassVar[bool] = True
    processing_margin: bool = False
    send_at: float | None = None
    accept_below: float | None = None
    receive_below: float | None = None
    give_above: float | None = None

    def marks(self, view: NodeView) -> Marks:
        """All four at 1, or 2, unless set by hand."""
        del view
        threshold = 2.0 if self.processing_margin else 1.0
        chosen = (self.send_at, self.accept_below, self.receive_below, self.give_above)
        return Marks(*(threshold if mark is None else mark for mark in chosen))
