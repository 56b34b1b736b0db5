"""`peerload join TOKEN`: make this machine a member of the cluster that the token is of."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from pathlib import Path

from peerload.cli.common.agent_flags import configured, located, make_private
from peerload.cli.common.joining import become_agents_user
from peerload.cli.common.options import NODE_NAME_SAYS, Options, is_node_name
from peerload.client.connection import Client, default_socket_path
from peerload.model.errors import AgentUnavailable, BadRequest, PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text.format import print_json, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

MEETS_WITHIN_S = 30.0
LOOK_EVERY_S = 0.05
LINE_CHARS_MAX = 4096
"""Of what is read from stdin; a token has some 150."""
JSON_KEYS = ("node", "cluster", "cluster_directory", "listen", "socket", "peers")


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "join",
        "Make this machine a member of the cluster that has printed TOKEN (`peerload invite`), and start its agent.\n"
        "An agent that runs here starts again as a member; its tasks run on. With - the token is read from stdin, as\n"
        "invite prints it, so that no other user of this machine sees it in the list of processes.",
    )
    reader.add_argument("token", nargs="+", metavar="TOKEN")
    reader.flag(
        "--node", metavar="NAME", help="this node's name (default: as the agent here is called, else the host's)"
    )
    reader.flag("--listen", metavar="HOST:PORT", help="where the others find it (default: this machine's address)")
    reader.flag("--cluster", metavar="DIR", help="where to keep what makes it a member (default: your own place)")
    reader.flag("--state", metavar="DIR", help="where tasks and outputs are kept")
    flags = reader.read(words)
    flags.token = words_of(flags.token)
    from peerload.wire.token import parse

    token = parse("".join(flags.token))
    if flags.node is not None and not is_node_name(flags.node):
        raise UsageError(f"join: {flags.node!r} cannot be a node's name", why=NODE_NAME_SAYS)
    running = _running(flags)
    become_agents_user(running, "join TOKEN", flags.socket)
    place = _place(flags, running)
    node = flags.node or token.node or place["node"]
    if running is not None and node != running["node"]:
        raise BadRequest(
            f"the agent that runs here is called {running['node']}",
            why=f"and {node} is to join",
            hint=f"peerload down  and then the same again; or  peerload join --node {running['node']} …",
        )
    if (
        running is not None
        and running.get("cluster_fingerprint") == token.fingerprint.hex()
        and _is_in(place["socket"])
    ):
        raise BadRequest(
            f"this machine is a member of {running.get('cluster')} already: {node}",
            why="nothing was done, and the token was not shown to anybody",
            hint="the other members:  peerload nodes        out again:  peerload leave",
        )
    admitted = _admitted(token, node, place, flags, str((running or {}).get("listen") or ""))
    info = _as_member(running, place)
    _await_peer(place["socket"])
    info = _info(place["socket"]) or info
    if flags.json:
        print_json({key: info.get(key) for key in JSON_KEYS})
    else:
        sys.stdout.write(_told(info, admitted, place))
    return 0


def words_of(given: list[str]) -> list[str]:
    """The words of the token; for `-` the last of the line that comes on stdin, which may be all that `invite` prints."""
    if given != ["-"]:
        return given
    line = sys.stdin.readline(LINE_CHARS_MAX).split()
    if not line:
        raise UsageError("join: there is no token on stdin", hint="ssh ws1 peerload invite | peerload join -")
    return line[-1:]


def _running(flags: Namespace) -> dict[str, Any] | None:
    """What the agent says of itself that runs here; None if none does."""
    info = _info(flags.socket or default_socket_path())
    if info is not None and not info.get("cluster_local") and not flags.cluster:
        from peerload.wire.token import parse

        fingerprint = str(info.get("cluster_fingerprint", ""))
        if fingerprint != parse("".join(flags.token)).fingerprint.hex():
            raise BadRequest(
                f"this node ({info.get('node')}) is of another cluster: {info.get('cluster')}",
                why=f"it is kept in {info.get('cluster_directory')}",
                hint="take it out first:  peerload leave        and move that directory away",
            )
    return info


def _info(socket_path: str) -> dict[str, Any] | None:
    try:
        with Client(socket_path) as client:
            return client.call("info")
    except AgentUnavailable:
        return None


def _is_in(socket_path: str) -> bool:
    """Whether the agent here speaks to another member: one that was shut out, or was away for too long, may be invited anew."""
    with Client(socket_path) as client:
        return _meets(client)


def _meets(client: Client) -> bool:
    return any(node.get("state") == "alive" and not node.get("self") for node in client.call("nodes")["nodes"])


def _place(flags: Namespace, running: dict[str, Any] | None) -> dict[str, str]:
    """Where everything of this node is."""
    from peerload.cli.common.joining import cluster_directory

    given = {key: value for key in ("state", "socket", "cluster") if (value := getattr(flags, key))}
    settings = located({key: value for key, value in given.items() if key != "cluster"})
    if running is not None:
        settings |= {"state": str(running["state"]), "socket": str(running["socket"])}
    found = configured({key: settings[key] for key in ("state", "socket")})
    directory = cluster_directory(flags.cluster or found.cluster or None)
    node = str(running["node"]) if running is not None else found.node
    return {"state": settings["state"], "socket": settings["socket"], "cluster": str(directory), "node": node}


def _admitted(
    token: Any,  # noqa: ANN401 -- the agent's own
    node: str,
    place: dict[str, str],
    flags: Namespace,
    own: str,
) -> Any:  # noqa: ANN401 -- as above
    """Be let in, and keep what that has brought: first what can be made anew, last the word that it counts. own: where the
    agent that runs here listens, "" if none does."""
    from peerload.cli.common.joining import listen_at
    from peerload.security import cluster_dir, join_client, node_identity_file, private_files, revocation, tls
    from peerload.security.address import parse_address
    from peerload.security.certificates import KeyPair

    if flags.listen:
        parse_address("listen", flags.listen, loopback_only=False)
    state, directory = Path(place["state"]), Path(place["cluster"])
    make_private(place["state"])
    private_files.private_directory(state)
    _check_free(directory, token)
    got = join_client.join_cluster(token, node, state)
    welcome = got.welcome
    try:
        cluster_dir.install(directory, welcome.name, welcome.cluster, KeyPair(got.ca, welcome.ca_key), welcome.seal_key)
        if welcome.trust:
            revocation.save(state / "trust", welcome.trust)
        private_files.write_private(state / tls.JOINED_FILE, got.key + welcome.certificate)
        peers = tuple(dict.fromkeys((got.address, *welcome.peers)))
        listen = flags.listen or listen_at(got.host, own)
        node_identity_file.write(state, node_identity_file.NodeIdentityFile(str(directory), node, listen, peers))
    except OSError as error:
        hint = "make room, then the same again: the token is still good for this machine"
        raise PeerloadError(
            "what makes this machine a member cannot be kept", why=str(error.strerror), hint=hint
        ) from None
    return got


def _check_free(directory: Path, token: Any) -> None:  # noqa: ANN401 -- as above
    """Before anything is asked: that no other cluster is kept there."""
    import os

    from peerload.security import cluster_dir

    if os.path.lexists(directory) and cluster_dir.read(directory).fingerprint != token.fingerprint.hex():
        raise BadRequest(
            f"{directory} is of another cluster",
            why="a machine is of one cluster at a time, and nothing is written over",
            hint=f"mv {shlex.quote(str(directory))} {shlex.quote(str(directory))}.old        or another place:  --cluster DIR",
        )


def _as_member(running: dict[str, Any] | None, place: dict[str, str]) -> dict[str, Any]:
    """The agent, started or started again."""
    if running is not None:
        from peerload.cli.common.agent_process import restart

        return restart(place["socket"], "joined a cluster")
    from peerload.cli.common.agent_process import start

    return start({key: place[key] for key in ("state", "socket")})


def _await_peer(socket_path: str) -> None:
    """Return when a member is seen alive; else say that none was."""
    pause, deadline = threading.Event(), time.monotonic() + MEETS_WITHIN_S
    with Client(socket_path) as client:
        while time.monotonic() < deadline:
            if _meets(client):
                return
            pause.wait(LOOK_EVERY_S)
    say(
        f"this machine is a member, but no other one has answered within {MEETS_WITHIN_S:g} s",
        "is a firewall between them?  peerload nodes",
    )


def _told(info: dict[str, Any], admitted: Any, place: dict[str, str]) -> str:  # noqa: ANN401 -- as above
    own = "" if place["socket"] == default_socket_path() else f" --socket {shlex.quote(place['socket'])}"
    node, count = printable(str(info.get("node"))), int(info.get("peers") or 0) + 1
    issuer = "  It may let others in.\n" if admitted.welcome.ca_key else ""
    return (
        f"{node} has joined {printable(admitted.welcome.name)}: {count} nodes known. Others reach it at {printable(str(info.get('listen')))}.\n"
        f"{issuer}"
        f"Try:            peerload nodes{own}        peerload run{own} hostname\n"
        f"Out again:      peerload leave{own}\n"
    )
