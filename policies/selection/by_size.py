"""Transfer of the waiting task that is cheapest to move, or for which a move pays most ([RM])."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from peerload.policy.api import TaskView, WaitingView

LookedAtMax = Annotated[int, Meta(description="waiting tasks that are compared", ge=1, le=100_000)]


class Smallest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task with the fewest bytes to transfer is moved, of the ``looked_at_max`` tasks that have waited longest; the
    oldest of equals.

    Good: suits slow networks.
    Bad: bytes do not predict the duration of a task; large tasks are never moved.
    """

    looked_at_max: LookedAtMax = 200

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The smallest movable task."""
        tasks = islice(waiting.oldest_first(), self.looked_at_max)
        return min(tasks, key=lambda task: task.moved_bytes, default=None)


class Longest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task with the longest expected time is moved, of the ``looked_at_max`` tasks that have waited longest; the
    oldest of equals. Commands without history come last.

    Good: the cost of a move is relatively lowest for a long task.
    Bad: without history it behaves like ``oldest``.
    """

    looked_at_max: LookedAtMax = 200

    def select(self, waiting: WaitingView) -> TaskView | None:
        """The movable task that is expected to run longest."""
        tasks = islice(waiting.oldest_first(), self.looked_at_max)
        return max(tasks, key=lambda task: task.expected_s, default=None)
