"""The interface between the launcher and its service for all users of a machine (system/service.py), which runs as
root.

The launcher decides nothing about users, and works without the service for one user. Used for annotations alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import select
    import socket
    from collections.abc import Callable, Collection

    from peerload.launcher.containment import Units
    from peerload.launcher.powercap import Powercap
    from peerload.launcher.process import AgentCredentials
    from peerload.launcher.protocol import LauncherEvent, Request, SpawnRequest, UserRequest


class MultiUser(Protocol):
    """The service for all users, as the launcher uses it. sockets: directory of the launcher's socket. access: credentials of the
    agent's user. powercap: the energy counters of the machine. unenforced: sentences about what cannot be enforced."""

    sockets: str
    access: AgentCredentials
    powercap: Powercap
    unenforced: tuple[str, ...]
    enforces_cores: bool

    def open(
        self,
        epoll: select.epoll,
        events: list[LauncherEvent],
        units: Units,
        root_name: str,
        own_children: set[int],
        kept: Collection[str],
    ) -> None:
        """Begin. events: collects what the agent is told. root_name: of the cgroups of the units. own_children: pids of
        children that are no tasks, to be kept up to date. kept: ended attempts that the agent has not forgotten."""

    def close(self) -> None:
        """Clean up; no task is left."""

    def admits(self, connection: socket.socket) -> bool:
        """True if the agent is at the other end."""

    def deferring(self, carry_out: Callable[[Request], None]) -> Callable[[Request], None]:
        """``carry_out``, but requests that have to wait for the account database are carried out later."""

    def carry_out(self, request: UserRequest) -> None:
        """Do what is requested as a user. Raises LauncherProtocolError."""

    def admit(self, request: SpawnRequest) -> SpawnRequest:
        """Decide which account a task runs as → the request with that account's limits. Raises SpawnRefused."""

    def check_inside(self, key: str, inside: str) -> None:
        """Raises SpawnRefused unless this attempt may run inside of that one."""

    def spawn(self, request: SpawnRequest, reads: int | str) -> int:
        """Start the process of an admitted task → its pid. Raises CannotStart, or OSError for what is in SHORTAGES."""

    def failure_of(self, pid: int) -> tuple[int, str] | None:
        """Exit code and reason of a process that has ended before it was its command; None if it was."""

    def release(self, key: str) -> None:
        """Release what an attempt had; nothing of it is left."""

    def forget(self, key: str) -> None:
        """Release the directory of an attempt with files, which the agent needs no longer."""

    def ready(self, masks: dict[int, int]) -> None:
        """Handle what epoll reported of children, and what is due."""

    def due_at_s(self) -> list[float]:
        """When `ready` has something to do, by the monotonic clock."""
