"""Two thresholds with a quiet zone between them ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from peerload.model.load import Marks

if TYPE_CHECKING:
    from peerload.policy.api import NodeView


class DoubleThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node accepts and asks below ``low``, sends and gives from ``high``; between them it neither seeks nor gives,
    which saves messages when loads hover around one value. Any mark may be set by hand."""

    steady: ClassVar[bool] = True
    low: float = 1.0
    high: float = 2.0
    send_at: float | None = None
    accept_below: float | None = None
    receive_below: float | None = None
    give_above: float | None = None

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} lies above high = {self.high:g}")

    def marks(self, view: NodeView) -> Marks:
        """low: accept_below, receive_below; high: send_at, give_above; unless set by hand."""
        del view
        return Marks(
            send_at=self.high if self.send_at is None else self.send_at,
            accept_below=self.low if self.accept_below is None else self.accept_below,
            receive_below=self.low if self.receive_below is None else self.receive_below,
            give_above=self.high if self.give_above is None else self.give_above,
        )
