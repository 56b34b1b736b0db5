"""One threshold for everything ([RM]; T of [ELZ86])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.model.load import Marks

if TYPE_CHECKING:
    from peerload.policy.api import NodeView


class SingleThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node sends at n ≥ T, accepts and asks at n < T, gives at n > T. Good and simple; with slow transfers a node
    near T both sends and asks. Any mark may be set by hand."""

    threshold: float = 2.0
    send_at: float | None = None
    accept_below: float | None = None
    receive_below: float | None = None
    give_above: float | None = None

    def marks(self, view: NodeView) -> Marks:
        """All four at T, unless set by hand."""
        del view
        chosen = (self.send_at, self.accept_below, self.receive_below, self.give_above)
        return Marks(*(self.threshold if mark is None else mark for mark in chosen))
