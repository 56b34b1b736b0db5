# ruff: noqa: PTH116
# os.path, since pathlib would cost every command its quick start.
"""Parts that `invite` and `join` share: the cluster directory, a free address, and the user of the agent.

Both verbs write files that belong to the agent. If that agent serves the whole machine, they continue as its user; only root can.
Root trusts nothing that an agent says of itself before it has become the agent's user. The kernel names that user with every
answer (SCM_CREDENTIALS), even if the service manager holds the socket, which SO_PEERCRED would name.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.client.connection import ANSWERS_WITHIN_S, default_socket_path
from peerload.model.errors import PeerloadError
from peerload.text.format import say
from peerload.wire import frame

if TYPE_CHECKING:
    from collections.abc import Mapping

PORT = 7117
"""The usual port, taken if it is free: one number to open in a firewall."""
PORT_TRIES_MAX = 20


def cluster_directory(named: str | None) -> Path:
    """The directory of this machine's cluster: as named, else this user's own."""
    from peerload.security import cluster_dir

    return Path(os.path.abspath(named)) if named else cluster_dir.own_directory(os.environ)  # noqa: PTH100 -- symbolic links are kept


def listen_at(host: str, own: str = "") -> str:
    """`HOST:PORT` with the usual port, or with a free one, which is said, if another program has that. own: the address of the agent
    that runs here and is about to restart. Raises ConfigError."""
    from peerload.model.errors import ConfigError
    from peerload.security.address import join_address

    usual = join_address(host, PORT)
    if own == usual or _is_free(host, PORT):
        return usual
    why = "no port is free for TCP and for UDP"
    for _ in range(PORT_TRIES_MAX):
        with socket.socket(_family(host)) as probe:
            try:
                probe.bind((host, 0))
            except OSError as error:
                why = str(error.strerror)
                break
            port = int(probe.getsockname()[1])
        if _is_free(host, port):
            listen = join_address(host, port)
            say(
                f"another program uses port {PORT} of {host}: this node listens at {listen} from now on",
                "open that port in firewalls, or choose one:  --listen ADDRESS:PORT",
            )
            return listen
    raise ConfigError("listen", f"cannot listen at {host}", why=why, hint="choose an address:  --listen ADDRESS:PORT")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(host: str, port: int) -> bool:
    """Whether an agent could listen there by TCP and UDP. Old connections in TIME_WAIT do not matter, as they do not to the agent."""
    with socket.socket(_family(host)) as stream, socket.socket(_family(host), socket.SOCK_DGRAM) as datagrams:
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stream.bind((host, port))
            datagrams.bind((host, port))
        except OSError:
            return False
    return True


_CREDENTIALS = struct.Struct("@3i")
"""The sender of a message: pid, uid, gid (`struct ucred`)."""


def become_agents_user(info: Mapping[str, Any] | None, verb: str, socket_path: str | None = None) -> None:
    """Become the user of the agent for good, with its home, if the agent serves all users. ``info``: its answer at that socket, None
    if none runs. Raises PeerloadError for anyone but root and that user, and for root if the agent is another user's own."""
    is_system = info is not None and info.get("mode") == "system"
    if info is None or not (is_system or os.geteuid() == 0):
        return
    path = os.path.abspath(socket_path or default_socket_path())  # noqa: PTH100 -- as above
    uid, gid = _who_answers(path)
    if os.geteuid() not in (0, uid):
        what = f"only root can do this: {verb} changes the whole machine"
        raise PeerloadError(what, why="its agent serves all users", hint=f"sudo peerload {verb}")
    if not is_system:
        if uid:
            name = _name_of(uid)
            why = "root writes no files at the word of another user's agent"
            raise PeerloadError(f"the agent at {path} is {name}'s own", why=why, hint=f"sudo -u {name} peerload {verb}")
        return
    if os.geteuid() == 0 and uid != 0:
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            raise PeerloadError("cannot become the agent's user", why=error.strerror or str(error)) from None
        os.umask(0o077)
        os.chdir("/")
    state = str(info.get("state"))
    try:
        found = os.stat(state)
    except OSError as error:
        raise PeerloadError(f"{state} cannot be read", why=error.strerror or str(error)) from None
    if found.st_uid != uid:
        why = f"it belongs to {_name_of(found.st_uid)}, and the agent runs as {_name_of(uid)}"
        raise PeerloadError(f"the agent says that its state is in {state}", why=why, hint="peerload doctor --security")
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "PEERLOAD_CLUSTER", "PEERLOAD_STATE"):
        os.environ.pop(name, None)
    os.environ["HOME"] = state
    os.environ["PEERLOAD_SOCKET"] = path


def _who_answers(path: str) -> tuple[int, int]:
    """The user and group of the process that answers at this socket. Raises PeerloadError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        link.settimeout(ANSWERS_WITHIN_S)
        try:
            link.connect(path)
            link.sendall(frame.pack({"id": 1, "verb": "info"}))
            _, told, _, _ = link.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError as error:
            raise PeerloadError(f"the agent at {path} does not answer", why=error.strerror or str(error)) from None
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, uid, gid = _CREDENTIALS.unpack(data)
            return uid, gid
    raise PeerloadError(f"the user of the agent at {path} is not known", why="the kernel does not say")


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
