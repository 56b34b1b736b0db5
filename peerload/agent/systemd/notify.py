"""The service manager (systemd) that started this agent, if any: notifications, and the socket it has passed.

The protocol is a few datagrams (sd_notify(3)) and variables (sd_listen_fds(3)). The variables are taken out of the
environment, so that no child process takes them for its own.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

log = logging.getLogger("peerload.agent")

FIRST_FD = 3
FDS_MAX = 16
AGENT_FD = "agent"
"""Name of the socket in its unit (FileDescriptorName=)."""
STATUS_CHARS_MAX = 200
WATCHDOG_S_MIN = 0.2
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class ServiceManager:
    """environment: of this process; VARIABLES are removed from it. watchdog_s: interval of the watchdog, 0 = none.
    Raises ConfigError if the passed socket cannot be used."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        found = {name: environment.pop(name, "") for name in VARIABLES}
        self._address = _address(found["NOTIFY_SOCKET"])
        self.watchdog_s = _watchdog_s(found["WATCHDOG_USEC"], found["WATCHDOG_PID"])
        self._listener = _passed_socket(found["LISTEN_FDS"], found["LISTEN_PID"], found["LISTEN_FDNAMES"])

    @property
    def is_there(self) -> bool:
        """True if a service manager is there."""
        return self._address is not None

    def listener(self, path: str) -> socket.socket | None:
        """The passed socket, checked at each use; None if there is none. Raises ConfigError."""
        if self._listener is None:
            return None
        check_passed_socket(self._listener, path)
        return self._listener.dup()

    # -- what it is found -----------------------------------------------------------------------------------------------

    def ready(self, status: str) -> None:
        """Report that the agent serves."""
        self._notify("READY=1", _status(status))

    def status(self, status: str) -> None:
        """Report a status line."""
        self._notify(_status(status))

    def alive(self, status: str) -> None:
        """Send the watchdog's keep-alive."""
        self._notify("WATCHDOG=1", _status(status))

    def reloading(self) -> None:
        """Report that settings are reloaded; `ready` ends it."""
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify("RELOADING=1", f"MONOTONIC_USEC={usec}")

    def stopping(self) -> None:
        """Report that the agent stops as ordered."""
        self._notify("STOPPING=1", _status("stopping"))

    def _notify(self, *lines: str) -> None:
        """Send one datagram. An unreachable service manager is only logged: it has its own timeouts."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(self._address)
                sock.sendall("\n".join(lines).encode())
        except OSError as error:
            log.warning("cannot notify the service manager: message=%s error=%s", lines[0], error.strerror or error)


def _status(words: str) -> str:
    """A status line of printable characters."""
    plain = "".join(c if c.isprintable() else "?" for c in words)
    return f"STATUS={plain[:STATUS_CHARS_MAX]}"


def _address(found: str) -> str | None:
    """The address of the notification socket: a path, or an abstract name, which begins with @; None if it is neither."""
    if found.startswith("@") and len(found) > 1:
        return "\0" + found[1:]
    return found if found.startswith("/") else None


def _watchdog_s(usec: str, pid: str) -> float:
    """The watchdog's interval; 0 if none is set, or it is for another process."""
    if not usec.isascii() or not usec.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return max(int(usec[:18]) / 1e6, WATCHDOG_S_MIN) if int(usec[:18]) else 0.0


# -- the socket that was handed over -----------------------------------------------------------------------------------


def _passed_socket(count: str, pid: str, names: str) -> socket.socket | None:
    """The passed socket named AGENT_FD, or the only one. Others are closed. Raises ConfigError."""
    if pid != str(os.getpid()) or not count.isascii() or not count.isdigit() or not 0 < int(count[:9]) <= FDS_MAX:
        return None
    fds = list(range(FIRST_FD, FIRST_FD + int(count)))
    called = (names.split(":") + [""] * len(fds))[: len(fds)] if names else [""] * len(fds)
    wanted = [fd for fd, name in zip(fds, called, strict=True) if name == AGENT_FD] or fds[: len(fds) == 1]
    for fd in fds:
        os.set_inheritable(fd, False)
        if fd not in wanted[:1]:
            os.close(fd)
    if not wanted:
        raise _unusable(f"of the {len(fds)} files handed over none is called {AGENT_FD!r}")
    if not stat.S_ISSOCK(os.fstat(wanted[0]).st_mode):
        os.close(wanted[0])
        raise _unusable("what was handed over is no socket")
    return socket.socket(fileno=wanted[0])


def check_passed_socket(listener: socket.socket, path: str) -> None:
    """Raises ConfigError unless this is a listening Unix stream socket at ``path``, and only root or we can write to it
    or replace it."""
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM:
        raise _unusable("it is no Unix stream socket")
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise _unusable("it does not listen")
    name = listener.getsockname()
    if name != path:
        raise _unusable(f"it is at {name!r}, and the setting says {path}", hint="--socket")
    try:
        status, above = Path(path).lstat(), Path(path).parent.stat()
    except OSError as error:
        raise _unusable(f"{path}: {error.strerror}") from None
    ours = (0, os.getuid())
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid not in ours or status.st_mode & 0o002:
        raise _unusable(f"{path} is not ours alone, or open to everybody", hint="SocketUser=peerload SocketMode=0660")
    if above.st_uid not in ours or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise _unusable(f"others may replace {path}", hint=f"chmod 755 {Path(path).parent}")


def _unusable(why: str, hint: str = "") -> ConfigError:
    what = "the socket that the service manager has handed over cannot be used"
    return ConfigError("socket", what, why=why, hint=hint or "systemctl cat peerload.socket")
