"""What `invite` and `join` share: where this node's settings are, and its agent started again as a member."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from peerload.text.format import say

PORT = 7117
"""Taken if it is free: one number to let through a firewall."""
PORT_TRIES_MAX = 20


def cluster_directory(named: str | None) -> Path:
    """Where the cluster of this machine belongs: as named, else this user's own place."""
    from peerload.security import cluster_dir

    return Path(os.path.abspath(named)) if named else cluster_dir.own_directory(os.environ)  # noqa: PTH100 -- a link stays one


def listen_at(host: str, own: str = "") -> str:
    """`HOST:PORT` with the usual port; with one that is free now, and is told of, where another program has that. own: where the
    agent that runs here, and is to start again, listens. Raises ConfigError."""
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
                f"another program has port {PORT} of {host}: this node listens at {listen} from now on",
                "let that port through firewalls, or choose one:  --listen ADDRESS:PORT",
            )
            return listen
    raise ConfigError("listen", f"cannot listen at {host}", why=why, hint="choose a place:  --listen ADDRESS:PORT")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(host: str, port: int) -> bool:
    """Whether an agent could listen there, by TCP and by UDP. Connections of before that have not died away are in nobody's
    way, as little as they are in the agent's."""
    with socket.socket(_family(host)) as stream, socket.socket(_family(host), socket.SOCK_DGRAM) as datagrams:
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stream.bind((host, port))
            datagrams.bind((host, port))
        except OSError:
            return False
    return True
