"""Everything is broadcast: at fixed times, or at each arrival and departure ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from peerload.policy.api import WatchedChange

if TYPE_CHECKING:
    from peerload.model.load import LoadReport


class Periodic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every node tells its load every ``period_s``, whether it has changed or not ([Mit00]: what old reports do).

    Good: costs the same at any load.
    Bad: what is known is up to a period old, and old reports herd many tasks to one node.
    """

    reports_guide_probing = True

    period_s: Annotated[float, Meta(ge=0.001, le=86_400.0, description="seconds between broadcasts")] = 1.0

    watches: ClassVar[WatchedChange] = "nothing"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """At the start; then the period does."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del before, now
        return False


class StateChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Told at every arrival and departure; no more often than each tell_s_min (50 ms).

    Good: the freshest reports there can be.
    Bad: two broadcasts a task, which every node reads: for a handful of nodes.
    """

    reports_guide_probing = True

    period_s: Annotated[float, Meta(ge=0.0, le=86_400.0, description="seconds between further ones, 0 = none")] = 0.0

    watches: ClassVar[WatchedChange] = "tasks"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """When n differs from the one told last."""
        return told is None or told.load_tasks != now.load_tasks

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del before, now
        return False
