"""The principal: the identity behind a request."""

from __future__ import annotations

import msgspec


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Identity behind a request. who: the owner key of its tasks, "" = all tasks; user: displayed name; uid: on this
    machine, -1 = none; node: the node that forwarded the request, "" = this one."""

    who: str
    user: str = ""
    uid: int = -1
    is_admin: bool = False
    node: str = ""

    @property
    def counted_as(self) -> str:
        """Key of its quotas. Users of another node without an account here share one, since a node could invent users."""
        return f"{self.node}:" if self.node and self.uid < 0 else self.who

    @property
    def sees_all(self) -> bool:
        """True if it may see the tasks of others."""
        return self.is_admin or not self.who


NOBODY = Principal("nobody:")
"""The principal of a connection before authentication; it owns nothing."""
