"""Measured CPU utilization: sees foreign programs too, but lags behind and saturates ([Kunz91] ranks it below
tasks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Cpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Busy share of the cores (0 … 1), sampled every second, averaged over 5 s, in whole percent. Tasks without a slot
    add to it, beyond 1, since a busy share cannot exceed 1. Use it with thresholds below 1, such as a
    double threshold of 0.5 and 0.9.

    Good: sees foreign programs.
    Bad: lags seconds behind, so that nodes look idle just after they were given work.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """Busy share, plus the tasks beyond the slots per slot."""
        busy = view.cpus_busy / view.cpus if view.cpus else 0.0
        beyond = max(view.load_tasks - view.slots, 0) / max(view.slots, 1)
        return round(min(busy, 1.0), 2) + beyond  # rounded, since an average comes near 1 but never reaches it
