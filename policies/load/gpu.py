"""Measured GPU utilization, for clusters whose tasks all want GPUs ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Utilization of the GPUs (0 … 1): of each the share of time, averaged over 5 s, or of memory, whichever is
    larger. Above 1, the GPUs asked for beyond those of the node count. A node without GPUs counts its tasks per
    slot.

    Good: sees foreign programs on the GPUs.
    Bad: lags seconds behind, so that nodes look idle just after they were given work; blind to the cores.
    """

    def load(self, view: LoadView) -> float:
        """`gpu_load`; n / c on a node without GPUs."""
        return self.gpu_load(view) if view.gpus else view.load_tasks / max(view.slots, 1)

    def gpu_load(self, view: LoadView) -> float:
        """Busy share of the GPUs, plus the GPUs asked for beyond them, per GPU."""
        gpus = max(view.gpus, 1)
        return min(view.gpus_busy / gpus, 1.0) + max(view.gpu_tasks - view.gpus, 0) / gpus
