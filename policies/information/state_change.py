"""Everything is broadcast: at fixed times, or at each arrival and departure ([RM])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from peerload.model.load import LoadReport
    from peerload.policy.api import Watch


class Periodic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every node tells its load every ``period_s``, whether it has changed or not. Costs the same at any load. What is
    known is up to a period old, and old reports herd many tasks to one node: from a period of three mean service times
    on, at load 0.9, that is worse than no sharing ([Mit00]; docs/policies.md has our figures)."""

    period_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 1.0
    reports_guide_probing: bool = True

    @property
    def watches(self) -> Watch:
        """The clock alone."""
        return "nothing"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """At the start; then the period does."""
        del now
        return told is None

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del before, now
        return False


class StateChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Told at every arrival and departure: the freshest reports that can be had, for two broadcasts a task, each of which
    every node has to read. For a handful of nodes and tasks that are not short; the agent tells no more often than
    tell_s_min."""

    reports_guide_probing: bool = True
    period_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 0.0

    @property
    def watches(self) -> Watch:
        """n."""
        return "tasks"

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """When n differs from the one told last."""
        return told is None or told.load_tasks != now.load_tasks

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Never."""
        del before, now
        return False
