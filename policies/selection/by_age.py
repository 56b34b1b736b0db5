"""Which waiting task goes: the newest (its wait so far is the shortest) or the oldest ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import TaskView, WaitingView


class Newest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last arrival: it would have waited longest, and nobody is overtaken at home.

    Good: nobody's turn at home is touched.
    Bad: long tails; early tasks wait on.
    """

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The newest movable task."""
        return next(waiting.newest_first(), None)


class Oldest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first arrival: first come, first served across nodes; the same mean response, shorter tails.

    Good: first come, first served across nodes.
    Bad: at home the next in line leaves, and with a slow transfer it starts later than if it had stayed.
    """

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The oldest movable task."""
        return next(waiting.oldest_first(), None)
