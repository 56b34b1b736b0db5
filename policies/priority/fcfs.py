"""First come, first served, local and remote alike ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import PriorityClass


class Fcfs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order of arrival at this node decides.

    Good: fair between homes.
    Bad: remote tasks can keep a node's own tasks waiting.
    """

    def prefer(self, local_tasks: int, remote_tasks: int) -> PriorityClass:
        """Whichever arrived first."""
        del local_tasks, remote_tasks
        return "first"
