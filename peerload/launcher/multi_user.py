"""The interface between the launcher and its service for all users of a machine (system/service.py), where that runs as root.

The launcher decides nothing about users, and works without the service for one user. Used for annotations alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import select
    import socket
    from collections.abc import Callable

    from peerload.launcher.containment import Units
    from peerload.launcher.fs_credentials import AgentCredentials
    from peerload.launcher.protocol import LauncherEvent, Request, SpawnRequest, UserRequest


class MultiUser(Protocol):
    """What the launcher asks of the service. sockets: the directory of the launcher's socket. access: the rights of the agent's
    user. unenforced: sentences about what cannot be enforced."""

    sockets: str
    access: AgentCredentials
    unenforced: tuple[str, ...]

    def open(
        self, epoll: select.epoll, events: list[LauncherEvent], units: Units, root_name: str, own_children: set[int]
    ) -> None:
        """The launcher runs. events: where it gathers what the agent is told. root_name: of the cgroups of its units.
        own_children: pids of children that are no tasks, to be kept up to date."""

    def close(self) -> None:
        """No task is left."""

    def admits(self, connection: socket.socket) -> bool:
        """Whether the agent is at the other end."""

    def deferring(self, carry_out: Callable[[Request], None]) -> Callable[[Request], None]:
        """``carry_out``, but for requests that have to wait for the account database: those are carried out later."""

    def carry_out(self, request: UserRequest) -> None:
        """Do it as a user. Raises LauncherProtocolError."""

    def admit(self, request: SpawnRequest) -> SpawnRequest:
        """Decide which account a task runs as → the request with that account's limits. Raises SpawnRefused."""

    def check_inside(self, key: str, inside: str) -> None:
        """Raises SpawnRefused unless this attempt may run inside of that one."""

    def spawn(self, request: SpawnRequest, reads: int | str) -> int:
        """The process of an admitted task → its pid. Raises CannotStart, or OSError for what is in SHORTAGES."""

    def said(self, pid: int) -> tuple[int, str] | None:
        """Why this process, which has ended, never was its command: exit code and reason; None if it was."""

    def release(self, key: str) -> None:
        """Nothing of this attempt is left."""

    def ready(self, masks: dict[int, int]) -> None:
        """What epoll said of children, and what is due."""

    def dues_s(self) -> list[float]:
        """When `ready` has something to do, by the monotonic clock."""
