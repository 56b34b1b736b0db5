"""The number of tasks: the best load index in the comparison of [Kunz91], and the cheapest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Tasks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """n per slot: running, waiting and inbound tasks, and the slots that foreign programs occupy, divided by the
    slots of the node.

    Good: exact about tasks, without delay.
    Bad: foreign load is measured, so it is seconds old.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """n / c."""
        return view.load_tasks / max(view.slots, 1)
