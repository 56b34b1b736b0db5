"""The socket that clients of this machine connect to: where it may be, and who may open it (rules L1 and S11).

In user mode it is the user's alone. In system mode it belongs to the agent's user and to the group that may use the agent,
in a directory in which nobody else can put anything. What the file's mode lets through is asked who it is all the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.accounts.accounts import group_number
from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from peerload.model.config import AgentConfig

USER_MODE, SYSTEM_MODE = 0o600, 0o660
_ACL_VERSION, _ACL_ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
"""Of an access control list as the kernel takes it: the version, and for each entry its kind, its rights and who it is for."""
_USER, _GROUP, _NAMED_GROUP, _MASK, _OTHER = 0x01, 0x04, 0x08, 0x10, 0x20


def check_socket(config: AgentConfig) -> None:
    """Raises ConfigError if `listen` could not listen there now."""
    listen(config).close()
    remove(config.socket)


def listen(config: AgentConfig) -> socket.socket:
    """The socket for clients. Raises ConfigError if its place is taken by a living agent or cannot be used."""
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
    """Device and inode of the socket at a path, which tell it from one made there later; None if nothing is there."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove(path: str) -> None:
    """Take a socket's name away; where that is not allowed it stays, and nobody answers there."""
    with contextlib.suppress(OSError):
        Path(path).unlink(missing_ok=True)


def _check_directory(directory: Path) -> None:
    """Raises ConfigError for one in which others could put a socket of their own, or that users cannot enter."""
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
    """Raises ConfigError if there is no such group, or we may not; OSError."""
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
    """Let the members of one more group connect, by an entry in the access control list of the socket → why that cannot be
    done, "" if it is. Only the socket's owner and root can."""
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
