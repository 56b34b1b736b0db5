"""How often a task may be placed away from its home by choice ([RM]: uncontrolled, controlled, irrevocable)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Controlled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most ``limit`` migrations: processor thrashing stays bounded.

    Good: a wrong move can be put right, and wandering has an end.
    Bad: more moves cost messages.
    """

    limit: Annotated[int, Meta(ge=0, le=1000, description="times a task may be moved by choice")] = 4

    @property
    def migrations_max(self) -> int | None:
        """The limit."""
        return self.limit


class Irrevocable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Once placed elsewhere a task stays there: controlled with n = 1.

    Good: a task cannot wander.
    Bad: the one move may have been the wrong one.
    """

    @property
    def migrations_max(self) -> int | None:
        """One."""
        return 1


class Uncontrolled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No limit: a task may go on to a better place each time, and wander where loads hover around a threshold.

    Good: a task always goes where it is better.
    Bad: tasks wander where loads hover around a threshold.
    """

    @property
    def migrations_max(self) -> int | None:
        """None."""
        return None
