"""What `invite` and `join` share: where this node's settings are, and its agent started again as a member."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from peerload.cli.agent_flags import default_state
from peerload.client import Client, user_socket_path
from peerload.model.errors import AgentUnavailable, PeerloadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PORT = 7117
"""Taken if it is free: one number to let through a firewall."""
BACK_WITHIN_S = 60.0
LOOK_EVERY_S = 0.05


def configured(given: dict[str, Any]) -> Any:  # noqa: ANN401 -- the agent's settings, which this room does not name
    """The settings that an agent started here would have."""
    from peerload.agent import settings

    defaults = {"state": default_state(), "socket": given.get("socket") or user_socket_path()}
    return settings.load(given, defaults, settings.environment_now())


def cluster_directory(named: str | None) -> Path:
    """Where the cluster of this machine belongs: as named, else this user's own place."""
    from peerload.agent import cluster

    return Path(os.path.abspath(named)) if named else cluster.own_directory(os.environ)  # noqa: PTH100 -- a link stays one


def listen_at(host: str) -> str:
    """`HOST:PORT` with the usual port, or 0 (any) if somebody has that."""
    from peerload.agent.peer_address import join_address

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((host, PORT))
            except OSError:
                return join_address(host, 0)
    return join_address(host, PORT)


def restart(socket_path: str | None, reason: str) -> dict[str, Any]:
    """Have the agent start again in its process → what it says of itself then. Raises PeerloadError."""
    with Client(socket_path) as client:
        before = client.call("info")
        client.call("restart", reason=reason)
    pause, deadline = threading.Event(), time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < deadline:
        pause.wait(LOOK_EVERY_S)
        try:
            with Client(socket_path) as client:
                info = client.call("info")
        except AgentUnavailable:
            if not _lives(before.get("pid")):
                break
            continue
        if info.get("boot") != before.get("boot"):
            return info
    log = os.path.join(str(before.get("state")), "agent.log")  # noqa: PTH118 -- text for people
    raise PeerloadError(
        "the agent did not come up again", why="it was stopped to start as a member", hint=f"its log:  {log}"
    )


def _lives(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
