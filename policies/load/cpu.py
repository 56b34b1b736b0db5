"""Measured CPU utilization. Sees foreign programs too, but lags behind and saturates ([Kunz91] ranks it below tasks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Cpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The busy share of the cores (0 … 1), sampled every second and averaged over 5 s; above 1, the waiting tasks
    decide, since a machine cannot be busier than busy.

    Good: sees foreign programs.
    Bad: lags seconds behind, so that nodes look idle just after they were given work.
    """

    def load(self, view: LoadView) -> float:
        """Busy share, plus the tasks beyond the slots per slot."""
        busy = view.cpus_busy / view.cpus if view.cpus else 0.0
        beyond = max(view.load_tasks - view.slots, 0) / max(view.slots, 1)
        return min(busy, 1.0) + beyond
