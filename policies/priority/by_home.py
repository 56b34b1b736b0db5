"""Priority between local tasks (at their home) and remote ones, non-preemptive, first come first served in each class ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import PriorityClass


class Selfish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Local tasks first: the owner of a node notices little of remote tasks, which wait long on a busy node.

    Good: the owner of a node waits less; the mean over all stays the same.
    Bad: remote tasks wait correspondingly longer.
    """

    def prefer(self, local_tasks: int, remote_tasks: int) -> PriorityClass:
        """Local."""
        del local_tasks, remote_tasks
        return "local"


class Altruistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Remote tasks first: a moved task waits less; the owner of the node waits behind remote tasks.

    Good: a moved task waits less; the mean over all stays the same.
    Bad: the owner waits correspondingly longer.
    """

    def prefer(self, local_tasks: int, remote_tasks: int) -> PriorityClass:
        """Remote."""
        del local_tasks, remote_tasks
        return "remote"


class Intermediate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The larger class first: local while the node's local tasks are at least as many as its remote ones.

    Good: the larger class waits less; the mean over all stays the same.
    Bad: the smaller class waits correspondingly longer.
    """

    def prefer(self, local_tasks: int, remote_tasks: int) -> PriorityClass:
        """Local, or remote where those are more."""
        return "local" if local_tasks >= remote_tasks else "remote"
