"""Tasks, and the share of the cores that foreign programs keep busy, not rounded to slots ([Kunz91], [RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Composite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks per slot plus the share of the cores that programs keep busy which are no tasks; for tasks that ask for GPUs
    the GPUs likewise.

    Good: right at once about tasks, and sees half a core of foreign load.
    Bad: what is foreign is measured, and so seconds old; follows each change of it.
    """

    steady = True

    def load(self, view: LoadView) -> float:
        """Tasks / c + foreign cores / cores."""
        foreign = view.cpus_foreign / view.cpus if view.cpus else 0.0
        return max(view.load_tasks - view.foreign_slots, 0) / max(view.slots, 1) + min(foreign, 1.0)

    def gpu_load(self, view: LoadView) -> float:
        """(GPUs asked for + foreign GPUs) / GPUs."""
        return (view.gpu_tasks + view.gpus_foreign) / max(view.gpus, 1)
