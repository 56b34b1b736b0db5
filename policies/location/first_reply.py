"""All nodes are asked by broadcast, and the first to accept gets the task ([RM]: sender-initiated by broadcasting)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.policy.api import Broadcast, Transfer

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.policy.api import NodeView, Reply, TaskView


class FirstReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request goes to all nodes; those that accept answer after a random pause, until the asking node has
    enough.

    Good: finds room on any node.
    Bad: every node reads each request.
    """

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Broadcast | Transfer:
        """Choose the first node that accepts and has not declined since."""
        del view, task, rng
        last = {reply.node: reply for reply in replies}
        return next((Transfer(reply.node) for reply in last.values() if reply.accepts), Broadcast())
