"""`peerload join TOKEN`: make this machine a member of the cluster that made the token."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.cli.common.agent_flags import configured, located, make_private
from peerload.cli.common.joining import become_agents_user
from peerload.cli.common.options import NODE_NAME_SAYS, Options, is_node_name
from peerload.client.connection import Client, default_socket_path
from peerload.model.errors import AgentUnavailable, BadRequest, PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text.format import print_json, say

if TYPE_CHECKING:
    from argparse import Namespace

MEETS_WITHIN_S = 30.0
LOOK_EVERY_S = 0.05
LINE_CHARS_MAX = 4096
"""Bound of the line from stdin; a token has about 150 characters."""
JSON_KEYS = ("node", "cluster", "cluster_directory", "listen", "socket", "peers")


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "join",
        "Make this machine a member of the cluster whose `peerload invite` printed TOKEN, and start its agent. An agent that\n"
        "runs here restarts as a member; its tasks go on. With - the token is read from stdin, as invite prints it, so that no\n"
        "other user of this machine sees it in the list of processes.",
    )
    reader.add_argument("token", nargs="+", metavar="TOKEN")
    reader.flag("--node", metavar="NAME", help="name of this node (default: that of the agent here, else the host's)")
    reader.flag("--listen", metavar="HOST:PORT", help="address for the others (default: this machine's)")
    reader.flag("--cluster", metavar="DIR", help="directory for the keys of the cluster (default: your own)")
    reader.flag("--state", metavar="DIR", help="directory of tasks and outputs")
    flags = reader.read(words)
    flags.token = token_words(flags.token)
    from peerload.wire.token import parse

    token = parse("".join(flags.token))
    if flags.node is not None and not is_node_name(flags.node):
        raise UsageError(f"join: {flags.node!r} is not a valid node name", why=NODE_NAME_SAYS)
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
        and _is_connected(place["socket"])
    ):
        raise BadRequest(
            f"this machine is a member of {running.get('cluster')} already: {node}",
            why="nothing was done, and the token was not sent",
            hint="the other members:  peerload nodes        leave it:  peerload leave",
        )
    admitted = _ask_to_join(token, node, place, flags, str((running or {}).get("listen") or ""))
    info = _as_member(running, place)
    _await_peer(place["socket"])
    info = _info(place["socket"]) or info
    if flags.json:
        print_json({key: info.get(key) for key in JSON_KEYS})
    else:
        sys.stdout.write(_joined_text(info, admitted, place))
    return 0


def token_words(given: list[str]) -> list[str]:
    """The words of the token; for `-` the last word of the line on stdin, which may be the whole output of `invite`."""
    if given != ["-"]:
        return given
    line = sys.stdin.readline(LINE_CHARS_MAX).split()
    if not line:
        raise UsageError("join: no token on stdin", hint="ssh ws1 peerload invite | peerload join -")
    return line[-1:]


def _running(flags: Namespace) -> dict[str, Any] | None:
    """The answer of the agent that runs here to `info`; None if no agent runs."""
    info = _info(flags.socket or default_socket_path())
    if info is not None and not info.get("cluster_local") and not flags.cluster:
        from peerload.wire.token import parse

        fingerprint = str(info.get("cluster_fingerprint", ""))
        if fingerprint != parse("".join(flags.token)).fingerprint.hex():
            raise BadRequest(
                f"this node ({info.get('node')}) is in another cluster: {info.get('cluster')}",
                why=f"its directory is {info.get('cluster_directory')}",
                hint="leave it first:  peerload leave        and move that directory away",
            )
    return info


def _info(socket_path: str) -> dict[str, Any] | None:
    try:
        with Client(socket_path) as client:
            return client.call("info")
    except AgentUnavailable:
        return None


def _is_connected(socket_path: str) -> bool:
    """Whether the agent here is connected to another member; a node that was revoked, or was away for too long, may join again."""
    with Client(socket_path) as client:
        return _sees_peer(client)


def _sees_peer(client: Client) -> bool:
    return any(node.get("state") == "alive" and not node.get("self") for node in client.call("nodes")["nodes"])


def _place(flags: Namespace, running: dict[str, Any] | None) -> dict[str, str]:
    """The places of this node: state, socket, cluster directory; and its name."""
    from peerload.cli.common.joining import cluster_directory

    given = {key: value for key in ("state", "socket", "cluster") if (value := getattr(flags, key))}
    settings = located({key: value for key, value in given.items() if key != "cluster"})
    if running is not None:
        settings |= {"state": str(running["state"]), "socket": str(running["socket"])}
    found = configured({key: settings[key] for key in ("state", "socket")})
    directory = cluster_directory(flags.cluster or found.cluster or None)
    node = str(running["node"]) if running is not None else found.node
    return {"state": settings["state"], "socket": settings["socket"], "cluster": str(directory), "node": node}


def _ask_to_join(
    token: Any,  # noqa: ANN401 -- the agent's own
    node: str,
    place: dict[str, str],
    flags: Namespace,
    own: str,
) -> Any:  # noqa: ANN401 -- as above
    """Ask to join and store the result; the file that makes it effective is written last. own: the address of the agent that runs
    here, "" if none does."""
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
        hint = "make room, then try again: the token is still valid for this machine"
        raise PeerloadError("the keys of the cluster cannot be stored", why=str(error.strerror), hint=hint) from None
    return got


def _check_free(directory: Path, token: Any) -> None:  # noqa: ANN401 -- as above
    """Raise BadRequest if the directory has another cluster."""
    import os

    from peerload.security import cluster_dir

    if os.path.lexists(directory) and cluster_dir.read(directory).fingerprint != token.fingerprint.hex():
        raise BadRequest(
            f"{directory} has another cluster",
            why="a machine is in one cluster at a time, and nothing is overwritten",
            hint=f"mv {shlex.quote(str(directory))} {shlex.quote(str(directory))}.old        or another place:  --cluster DIR",
        )


def _as_member(running: dict[str, Any] | None, place: dict[str, str]) -> dict[str, Any]:
    """Start or restart the agent → its answer to `info`."""
    if running is not None:
        from peerload.cli.common.agent_process import restart

        return restart(place["socket"], "joined a cluster")
    from peerload.cli.common.agent_process import start

    return start({key: place[key] for key in ("state", "socket")})


def _await_peer(socket_path: str) -> None:
    """Return when another member is alive; say if none is in time."""
    pause, deadline = threading.Event(), time.monotonic() + MEETS_WITHIN_S
    with Client(socket_path) as client:
        while time.monotonic() < deadline:
            if _sees_peer(client):
                return
            pause.wait(LOOK_EVERY_S)
    say(
        f"this machine is a member, but no other member has answered within {MEETS_WITHIN_S:g} s",
        "perhaps a firewall is between them; see  peerload nodes",
    )


def _joined_text(info: dict[str, Any], admitted: Any, place: dict[str, str]) -> str:  # noqa: ANN401 -- as above
    own = "" if place["socket"] == default_socket_path() else f" --socket {shlex.quote(place['socket'])}"
    node, count = printable(str(info.get("node"))), int(info.get("peers") or 0) + 1
    issuer = "  It may invite others.\n" if admitted.welcome.ca_key else ""
    return (
        f"{node} has joined {printable(admitted.welcome.name)}: {count} nodes known. Others reach it at {printable(str(info.get('listen')))}.\n"
        f"{issuer}"
        f"Try:            peerload nodes{own}        peerload run{own} hostname\n"
        f"Leave it:       peerload leave{own}\n"
    )
