"""Transfer of the newest waiting task (its wait so far is the shortest) or of the oldest ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import TaskView, WaitingView


class Newest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last arrival is moved: it would have waited longest, and the order at home stays the same.

    Good: the order at home stays the same.
    Bad: long tails; early tasks continue to wait.
    """

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The newest movable task."""
        return next(waiting.newest_first(), None)


class Oldest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first arrival is moved: first come, first served across nodes; the same mean response, shorter tails.

    Good: first come, first served across nodes.
    Bad: the next task in line at home leaves, and with a slow transfer it starts later than if it had stayed.
    """

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The oldest movable task."""
        return next(waiting.oldest_first(), None)
