"""The Unix socket for clients of this machine: its place, its permissions, and its connections (rules L1 and S11).

In user mode only the user may open it. In system mode it belongs to the agent's user and to the group of those who may
use the agent, in a directory where nobody else can create files. Every client is identified by its credentials as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.accounts.accounts import group_number
from peerload.agent.control.connection import LocalConnection
from peerload.agent.runtime import next_tick
from peerload.model.errors import ConfigError, PeerloadError, SlowDown

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Server
    from peerload.agent.control.quotas import Quotas
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.security_events import SecurityEvents
    from peerload.model.config import AgentConfig

log = logging.getLogger("peerload.agent")

CHECK_EVERY_S = 2.0
"""Interval of the check that the socket is still there."""
ADMIN_PLACES = 16
"""Connections reserved for root."""

USER_MODE, SYSTEM_MODE = 0o600, 0o660
_ACL_VERSION, _ACL_ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
"""POSIX ACL as the kernel takes it: a version, then kind, rights and id of each entry."""
_USER, _GROUP, _NAMED_GROUP, _MASK, _OTHER = 0x01, 0x04, 0x08, 0x10, 0x20


class LocalSocket:
    """The agent's socket and its connections. ``server`` carries out their requests."""

    def __init__(
        self,
        info: AgentInfo,
        server: Server,
        access: Authorization,
        quotas: Quotas,
        security: SecurityEvents,
        launcher: LauncherLink,
    ) -> None:
        self._info = info
        self._requests = server
        self._launcher = launcher
        self._access = access
        self._quotas = quotas
        self._security = security
        self._server: asyncio.AbstractServer | None = None
        self._place: tuple[int, int] | None = None
        self._is_closed = False
        self._keeps_name = False
        self._connections: set[LocalConnection] = set()

    async def start(self, handed_over: socket.socket | None = None) -> None:
        """Listen. ``handed_over``: a socket of the service manager, which keeps it when this agent stops. Raises ConfigError
        if a running agent has the path, or it cannot be used."""
        config = self._info.config
        self._keeps_name = handed_over is not None
        listener = listen(config) if handed_over is None else handed_over
        self._place = place(config.socket)
        if config.mode == "system" and config.admin_group != config.group:
            why = let_in(config.socket, config.admin_group)
            if why:
                log.warning(
                    "cannot admit the administrators' group to the control socket: group=%s path=%s error=%s",
                    config.admin_group,
                    config.socket,
                    why,
                )
        loop = asyncio.get_running_loop()
        if sys.version_info >= (3, 13):  # else it would unlink the path, also that of the service manager
            self._server = await loop.create_unix_server(self._connected, sock=listener, cleanup_socket=False)
        else:
            self._server = await loop.create_unix_server(self._connected, sock=listener)

    def _connected(self) -> LocalConnection:
        return LocalConnection(self._requests, self)

    async def watch(self) -> None:
        """Recreate the socket if it was removed, and have the launcher recreate its own, until cancelled. A runtime directory
        is removed at logout, and old files in /tmp may be. A socket of somebody else is left alone."""
        path, logged = self._info.config.socket, ""
        while True:
            await next_tick(CHECK_EVERY_S)
            self._launcher.look_for_socket()
            if self._is_closed:  # the agent stops, and has removed its socket
                return
            if self._keeps_name or place(path) == self._place:
                continue
            before = self._server
            try:
                await self.start()
            except ConfigError as error:
                if str(error) != logged:
                    logged = str(error)
                    log.error("cannot recreate the control socket: path=%s error=%s", path, error)  # noqa: TRY400
                continue
            if before is not None:
                before.close()
            logged = ""
            log.warning("the control socket was removed; recreated it: path=%s", path)

    def close(self) -> None:
        """Stop listening, and close all connections. Disconnect callbacks are dropped: the clients reconnect after the next
        start."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
            if not self._keeps_name and place(self._info.config.socket) == self._place:
                remove(self._info.config.socket)
        for connection in list(self._connections):
            for task in list(connection.tasks):
                task.cancel()
            connection.on_disconnect.clear()
            connection.hang_up()

    def admit(self, connection: LocalConnection) -> PeerloadError | None:
        """Decide whether to serve a new client → None, or the refusal."""
        try:
            connection.caller = caller = self._access.local(connection.uid)
        except PeerloadError as error:
            return error
        most = self._info.config.clients_max + (ADMIN_PLACES if self._access.is_system and connection.uid == 0 else 0)
        if len(self._connections) >= most:
            self._security.report("L3", f"uid {connection.uid}", "too many clients at a time")
            return SlowDown("too many clients", why=f"at most {most} at a time")
        refusal = self._quotas.connected(caller)
        if refusal is None:
            self._connections.add(connection)
        return refusal

    def disconnected(self, connection: LocalConnection) -> None:
        """A client has disconnected."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._quotas.disconnected(connection.caller)


def check_socket(config: AgentConfig) -> None:
    """Raises ConfigError if `listen` would."""
    listen(config).close()
    remove(config.socket)


def listen(config: AgentConfig) -> socket.socket:
    """Create the socket. Raises ConfigError if a running agent has the path, or it cannot be used."""
    path, is_system = config.socket, config.mode == "system"
    try:
        if is_system:
            _check_directory(Path(path).parent)
        else:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _answers(path):
            raise ConfigError("socket", f"another agent answers at {path}", hint=f"peerload down --socket {path}")
        remove(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_umask = os.umask(0o777 & ~USER_MODE)
        try:
            listener.bind(path)
            if is_system:
                _give_to_group(path, config.group)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(old_umask)
    except OSError as error:
        raise ConfigError("socket", f"{path} cannot be used", why=str(error.strerror or error)) from None
    return listener


def place(path: str) -> tuple[int, int] | None:
    """Device and inode of the file at a path; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove(path: str) -> None:
    """Unlink a socket, if that is allowed."""
    with contextlib.suppress(OSError):
        Path(path).unlink(missing_ok=True)


def _check_directory(directory: Path) -> None:
    """Raises ConfigError for a directory in which others could create a socket, or that users cannot enter."""
    if not os.path.lexists(directory):
        directory.mkdir(mode=0o755, parents=True)
        directory.chmod(0o755)
    found = directory.lstat()
    why = ""
    if not stat.S_ISDIR(found.st_mode):
        why = "it is a link, or no directory"
    elif found.st_uid not in (0, os.getuid()):
        why = f"it belongs to uid {found.st_uid}, neither to root nor to the agent's user"
    elif found.st_mode & 0o022:
        why = f"others can change what is in it (mode {stat.S_IMODE(found.st_mode):o})"
    if why:
        hint = f"as root:  rm -r {directory} && install -d -m 755 -o peerload {directory}"
        raise ConfigError("socket", f"{directory} cannot be trusted", why=why, hint=hint)


def _give_to_group(path: str, group: str) -> None:
    """Let a group connect. Raises ConfigError if there is no such group or the agent is not in it; OSError."""
    number = group_number(group)
    if number is None:
        why = "there is no such group on this machine"
        raise ConfigError("group", f"{group!r} cannot be used", why=why, hint=f"as root:  groupadd --system {group}")
    try:
        os.chown(path, -1, number, follow_symlinks=False)
    except PermissionError:
        hint = f"as root:  usermod -aG {group} the agent's user"
        raise ConfigError("group", f"{group!r} cannot be used", why="the agent is not in it", hint=hint) from None
    Path(path).chmod(SYSTEM_MODE)
    found = Path(path).lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid() or found.st_gid != number:
        raise ConfigError("socket", f"{path} cannot be trusted", why="somebody has put something else there")


def let_in(path: str, group: str) -> str:
    """Let one more group connect, by an ACL entry → the error, "" if there is none. Only the owner and root can do it."""
    number = group_number(group)
    if number is None:
        return "there is no such group on this machine"
    nobody = 0xFFFFFFFF
    entries = (
        (_USER, 6, nobody),
        (_GROUP, 6, nobody),
        (_NAMED_GROUP, 6, number),
        (_MASK, 6, nobody),
        (_OTHER, 0, nobody),
    )
    value = _ACL_VERSION.pack(2) + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", value, follow_symlinks=False)
    except OSError as error:
        return str(error.strerror)
    return ""


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
