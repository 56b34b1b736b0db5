"""Tasks, and the share of the cores that foreign programs keep busy, not rounded to slots ([Kunz91], [RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Composite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks per slot plus the share of the cores that foreign programs keep busy; for tasks that request GPUs, the
    same for GPUs.

    Good: exact about tasks without delay, and sees even half a core of foreign load.
    Bad: foreign load is measured, so it is seconds old, and the index follows each change of it.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """Tasks / c + foreign cores / cores."""
        foreign = view.cpus_foreign / view.cpus if view.cpus else 0.0
        return max(view.load_tasks - view.foreign_slots, 0) / max(view.slots, 1) + min(foreign, 1.0)

    def gpu_load(self, view: LoadView) -> float:
        """(GPUs asked for + foreign GPUs) / GPUs."""
        return (view.gpu_tasks + view.gpus_foreign) / max(view.gpus, 1)
