"""The principal: who asks something of an agent."""

from __future__ import annotations

import msgspec


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Who asks. who: whose tasks are its own, as `owner_key` has it, "" = whosever; user: its name, for people; uid: at
    this machine, -1 = none; node: where its request was sent on, "" = here."""

    who: str
    user: str = ""
    uid: int = -1
    is_admin: bool = False
    node: str = ""

    @property
    def counted_as(self) -> str:
        """Whose quotas count. A node is not believed to have as many users as it says: those that are nobody here share one."""
        return f"{self.node}:" if self.node and self.uid < 0 else self.who

    @property
    def sees_all(self) -> bool:
        """Whether tasks of others are there for it."""
        return self.is_admin or not self.who


NOBODY = Principal("nobody:")
"""Until it is known who asks: the owner of nothing."""
