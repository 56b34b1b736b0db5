"""Load is broadcast at fixed times, or at each arrival and departure ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.resources import LoadReport


class Periodic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node announces its load every ``period_s``, even if unchanged ([Mit00] describes the effect of old reports).

    Good: costs the same at any load.
    Bad: reports are up to a period old, and old reports send many tasks to one node at a time.
    """

    reports_guide_probing = True

    period_s: Annotated[float, Meta(ge=0.001, le=86_400.0, description="seconds between broadcasts")] = 1.0

    watches: ClassVar[WatchedChange] = "nothing"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce the start of the node; the period does the rest."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Ask nobody."""
        del before, now
        return False


class StateChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node announces its load at every arrival and departure, at most once in tell_s_min (50 ms).

    Good: the most recent reports that are possible.
    Bad: two broadcasts for each task, which every node reads: only for a handful of nodes.
    """

    reports_guide_probing = True

    period_s: Annotated[float, Meta(ge=0.0, le=86_400.0, description="seconds between further ones, 0 = none")] = 0.0

    watches: ClassVar[WatchedChange] = "tasks"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce when n differs from the last announcement."""
        return told is None or told.load_tasks != now.load_tasks

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Ask nobody."""
        del before, now
        return False


class RoomChange(StateChange, frozen=True, forbid_unknown_fields=True):
    """A node announces when it, or one of its GPUs, becomes full, and when it has room again, at most once in
    tell_s_min (50 ms).

    Good: a home learns immediately of room for its waiting tasks.
    Bad: in between, reports are as old as the last announcement or probe.
    """

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce when n reaches the number of slots, or falls below it again; the same for each GPU."""
        return told is None or _room(told) != _room(now)


def _room(report: LoadReport) -> tuple[bool, int]:
    return report.accepts, sum(device.free_slots > 0 for device in report.devices)
