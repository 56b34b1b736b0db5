# ruff: noqa: PTH116
# os.stat, since pathlib would cost every command its quick start.
"""For verbs that write what belongs to the agent (its cluster, its certificate): where that agent is the machine's, they go on as its
user, in its places. Only root can."""

from __future__ import annotations

import os

from peerload.model.errors import PeerloadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def become_agents_user(info: Mapping[str, Any] | None, verb: str) -> None:
    """``info``: what the agent says of itself, None: none runs. Where it is that of all users, this process is its user's from
    here on, with its home, and never root's again. Raises PeerloadError for anybody but root and that user."""
    if info is None or info.get("mode") != "system":
        return
    state = str(info.get("state"))
    try:
        found = os.stat(state)
    except OSError as error:
        raise PeerloadError(f"{state} cannot be looked at", why=error.strerror or str(error)) from None
    if os.geteuid() not in (0, found.st_uid):
        what = f"only root can do this: {verb} is for the whole machine"
        raise PeerloadError(what, why="its agent serves all users", hint=f"sudo peerload {verb}")
    if os.geteuid() == 0 and found.st_uid != 0:
        try:
            os.setgroups([])
            os.setresgid(found.st_gid, found.st_gid, found.st_gid)
            os.setresuid(found.st_uid, found.st_uid, found.st_uid)
        except OSError as error:
            raise PeerloadError("this cannot go on as the agent's user", why=error.strerror or str(error)) from None
        os.umask(0o077)
        os.chdir("/")
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "PEERLOAD_CLUSTER", "PEERLOAD_STATE"):
        os.environ.pop(name, None)
    os.environ["HOME"] = state
    os.environ.setdefault("PEERLOAD_SOCKET", str(info.get("socket")))
