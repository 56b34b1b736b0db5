"""With whose rights the launcher touches the files of its agent: a launcher that runs as root must not open what the agent's
user could not. Used by the launcher alone."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Access(Protocol):
        """While one is entered, files are touched with those rights."""

        def __enter__(self) -> None:
            """From here on."""

        def __exit__(self, *_: object) -> None:
            """Until here."""


class OwnCredentials:
    """With its own: the launcher is the same user as its agent."""

    def __enter__(self) -> None:
        """From here on …"""

    def __exit__(self, *_: object) -> None:
        """… until here."""


class AgentCredentials:
    """With those of the agent's user, whose ids these are. While it lasts, whatever the agent names, a link to a file of
    root's too, opens as if the agent had opened it. May be nested."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self._depth = 0

    def __enter__(self) -> None:
        """From here on …"""
        self._depth += 1
        if self._depth == 1:
            os.setegid(self.gid)
            os.seteuid(self.uid)

    def __exit__(self, *_: object) -> None:
        """… until here."""
        self._depth -= 1
        if self._depth == 0:
            os.seteuid(0)
            os.setegid(0)
