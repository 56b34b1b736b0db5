"""The number of tasks: the best load index of those compared in [Kunz91], and the cheapest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Tasks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """n per slot: running, waiting and inbound tasks divided by the slots of the node.

    Good: needs no measuring, and is right at once.
    Bad: blind to programs that are not tasks.
    """

    def load(self, view: LoadView) -> float:
        """n / c."""
        return view.load_tasks / max(view.slots, 1)
