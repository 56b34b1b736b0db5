"""No search: every task stays where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.policy.api import Keep

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.model.resources import LoadReport
    from peerload.policy.api import NodeView, Reply, TaskView


class NoSender(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender's side is off.

    Good: for comparison.
    Bad: a burst stays at its node, unless other nodes ask for tasks.
    """

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Keep:
        """Always keep."""
        del view, task, replies, rng
        return Keep("the preset has no sender-side location policy")


class NoReceiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's side is off.

    Good: for comparison.
    Bad: an idle node waits until a sender finds it.
    """

    retry_rate = 0.0
    retry_probes = 1

    def locate(self, view: NodeView, probes_max: int | None, replies: Sequence[Reply], rng: random.Random) -> Keep:
        """Ask nobody."""
        del view, probes_max, replies, rng
        return Keep("the preset has no receiver-side location policy")


class NoPairing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes do not pair.

    Good: for comparison.
    Bad: load differences remain, unless searches balance them.
    """

    rate = 0.0

    def partner(self, view: NodeView, rng: random.Random) -> str | None:
        """Ask nobody."""
        del view, rng
        return None

    def moves(self, richer: LoadReport, poorer: LoadReport) -> bool:
        """Move nothing."""
        del richer, poorer
        return False
