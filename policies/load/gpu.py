"""Measured GPU utilization, for clusters in which all tasks request GPUs ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Utilization of the GPUs (0 … 1): for each the busy share of time, averaged over 5 s, or the used share of memory, whichever is
    larger. Requests for more GPUs than the node has add to it, beyond 1. A node without GPUs counts its tasks per
    slot.

    Good: sees foreign programs on the GPUs.
    Bad: lags seconds behind, so that nodes look idle just after they received work; ignores the cores.
    """

    def load(self, view: LoadView) -> float:
        """`gpu_load`; n / c on a node without GPUs."""
        return self.gpu_load(view) if view.gpus else view.load_tasks / max(view.slots, 1)

    def gpu_load(self, view: LoadView) -> float:
        """Busy share of the GPUs, plus the requested GPUs that exceed the node's number, per GPU."""
        gpus = max(view.gpus, 1)
        return min(view.gpus_busy / gpus, 1.0) + max(view.gpu_tasks - view.gpus, 0) / gpus
