"""Load is broadcast at fixed times, or at each arrival and departure ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.resources import LoadReport


class Periodic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node announces its load every ``period_s``, whether it has changed or not ([Mit00]: what old reports do).

    Good: costs the same at any load.
    Bad: reports are up to a period old, and old reports send herds of tasks to one node.
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

    Good: the newest reports that are possible.
    Bad: two broadcasts a task, which every node reads: for a handful of nodes.
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
    """A node announces when it, or one of its GPUs, becomes full, and when there is room again, at most once in
    tell_s_min (50 ms).

    Good: a home hears at once of room for the tasks that wait there.
    Bad: between the two, reports are as old as the last announcement or probe.
    """

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Announce when n has reached the slots, or is below them again; the same of each GPU."""
        return told is None or _room(told) != _room(now)


def _room(report: LoadReport) -> tuple[bool, int]:
    return report.accepts, sum(device.free_slots > 0 for device in report.devices)
