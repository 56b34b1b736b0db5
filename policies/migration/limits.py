"""Limit on how often a task may be placed away from its home by choice ([RM]: uncontrolled, controlled,
irrevocable)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Controlled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task migrates at most ``limit`` times, which bounds processor thrashing.

    Good: a wrong move can be corrected, and moving has an end.
    Bad: more moves cost messages.
    """

    limit: Annotated[int, Meta(ge=0, le=1000, description="times a task may be moved by choice")] = 4

    @property
    def migrations_max(self) -> int | None:
        """The limit."""
        return self.limit


class Irrevocable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task that was placed elsewhere stays there: controlled with n = 1.

    Good: a task cannot wander.
    Bad: the one move may have been wrong.
    """

    @property
    def migrations_max(self) -> int | None:
        """One."""
        return 1


class Uncontrolled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of migrations has no limit: a task may move on to a better node each time.

    Good: a task always goes where it is better.
    Bad: tasks wander if loads are near a threshold.
    """

    @property
    def migrations_max(self) -> int | None:
        """None: no limit."""
        return None
