"""Credentials for access to the agent's files: a launcher that runs as root must not open what the agent's user could
not. Used by the launcher alone."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Access(Protocol):
        """A context manager: files are accessed with these credentials while it is entered."""

        def __enter__(self) -> None:
            """Take on the credentials."""

        def __exit__(self, *_: object) -> None:
            """Give them up."""


class OwnCredentials:
    """The launcher's own credentials, where it is the same user as its agent."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class AgentCredentials:
    """The credentials of the agent's user. While they are entered, whatever the agent names, even a link to a file of
    root, opens as if the agent had opened it. Can be nested."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self._depth = 0

    def __enter__(self) -> None:
        """Take on the credentials."""
        self._depth += 1
        if self._depth == 1:
            os.setegid(self.gid)
            os.seteuid(self.uid)

    def __exit__(self, *_: object) -> None:
        """Give them up."""
        self._depth -= 1
        if self._depth == 0:
            os.seteuid(0)
            os.setegid(0)
