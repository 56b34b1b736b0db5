"""Which waiting task goes: the newest (its wait so far is the shortest) or the oldest ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import TaskView, WaitingView


class Newest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last arrival: it would have waited longest, and nobody is overtaken at home."""

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The newest movable task."""
        return next(waiting.newest_first(), None)


class Oldest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first arrival: first come, first served across nodes; the same mean response, shorter tails."""

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The oldest movable task."""
        return next(waiting.oldest_first(), None)
