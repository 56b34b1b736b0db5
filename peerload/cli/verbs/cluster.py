"""`peerload cluster`, `leave`, `forget` and `revoke`: create or show a cluster, change its key, remove nodes."""

from __future__ import annotations

import contextlib
import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.cli.common.agent_process import SYSTEM_STATE, await_end, configured, watch
from peerload.cli.common.command import check_node_names
from peerload.cli.common.options import NODE_NAME_CHARACTERS, NODE_NAME_LENGTH_MAX, Options
from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, duration_text, print_json, print_lines, print_result, say

if TYPE_CHECKING:
    from argparse import Namespace

    from peerload.security.cluster_dir import ClusterDirectory


EXAMPLE_PORT = 7117
TLS_PORT = 8883
SOMEWHERE = "ADDRESS"


def cluster(words: list[str]) -> int:
    reader = Options(
        "cluster",
        "init DIR: make a cluster: its own certificate authority and keys, in a new directory. A machine with a copy of it\n"
        "is a member. show [DIR]: which cluster an agent started here belongs to. rotate: change the key that seals gossip and\n"
        "MQTT, at all members; the old one opens for another hour. broker-certificate DIR: make the files that a\n"
        "Mosquitto needs to serve the cluster by TLS. To let a machine in:  peerload invite, then peerload join.",
        usage="[show [DIR] | init DIR [--name NAME] | rotate | broker-certificate DIR --host NAME …]",
    )
    reader.add_argument("what", nargs="?", default="show", metavar="show | init | rotate | broker-certificate")
    reader.add_argument("directory", nargs="*", metavar="DIR")
    reader.flag("--name NAME", help="init: the cluster's name (default: as the directory is called)")
    reader.flag("--host NAME", help="broker-certificate: by which nodes reach it (repeatable)", action="append")
    flags = reader.read(words)
    if flags.what not in ("init", "show", "rotate", "broker-certificate"):
        hint = "there are:  peerload cluster init DIR | show | rotate | broker-certificate DIR"
        if flags.what in ("invite", "join", "leave", "forget", "revoke"):
            hint = f"it is a verb of its own:  peerload {flags.what}"
        raise UsageError(f"cluster: unknown action: {flags.what!r}", hint=hint)
    if flags.what == "rotate":
        return _rotate(flags)
    if flags.host and flags.what != "broker-certificate":
        raise UsageError(f"cluster {flags.what} takes no --host", hint="what it takes:  peerload cluster --help")
    if len(flags.directory) > 1 or (flags.what != "show" and not flags.directory):
        raise UsageError(f"cluster {flags.what} takes one directory", hint="what it takes:  peerload cluster --help")
    if flags.what != "init" and flags.name is not None:
        raise UsageError(f"cluster {flags.what} takes no --name", hint="what it takes:  peerload cluster --help")
    if flags.what == "broker-certificate":
        place = Path(os.path.abspath(flags.directory[0]))  # noqa: PTH100 -- symbolic links are kept, and refused
        return make_files(place, flags, _configured())
    return _init(flags) if flags.what == "init" else _show(flags)


def _init(flags: Namespace) -> int:
    from peerload.security import cluster_dir
    from peerload.security.address import join_address, reachable_anywhere

    directory = Path(os.path.abspath(flags.directory[0]))  # noqa: PTH100 -- symbolic links are kept, and refused
    made = cluster_dir.make(directory, _default_name(directory) if flags.name is None else flags.name)
    try:
        address = reachable_anywhere()
    except OSError:
        address = SOMEWHERE
    first = printable(join_address(address, EXAMPLE_PORT))
    place = printable(shlex.quote(str(directory)))
    copy = printable(shlex.quote(directory.name))
    lines = (
        f"cluster {made.name} made in {place}. A machine with a copy of it is a member: keep it secret.",
        f"Start here:       peerload up --cluster {place} --listen {first}",
        f"Add a machine:    scp -rp {place} OTHER:        and there, with its own address:",
        f"                  peerload up --cluster ~/{copy} --listen {SOMEWHERE}:{EXAMPLE_PORT} --peer {first}",
    )
    print_result(_facts(made), lines, as_json=flags.json)
    return 0


def _rotate(flags: Namespace) -> int:
    if flags.directory or flags.name is not None:
        raise UsageError("cluster rotate takes no arguments", hint="what it takes:  peerload cluster --help")
    with AgentConnection(flags.socket) as client:
        reply = client.call("rotate")
    text = (
        f"gossip and MQTT are sealed with a new key (number {reply.get('number')});"
        f" {counted(int(reply.get('told') or 0), 'other member')} informed, the others receive it when they return."
        f" The old one opens for {duration_text(reply.get('overlap_s'))} more."
    )
    print_result({key: reply.get(key) for key in ("number", "told", "overlap_s")}, [text], as_json=flags.json)
    return 0


def _show(flags: Namespace) -> int:
    from peerload.security import cluster_dir

    named = Path(os.path.abspath(flags.directory[0])) if flags.directory else None  # noqa: PTH100 -- as above
    found = _configured() if named is None else cluster_dir.read(named)
    facts = _facts(found)
    if not flags.directory:
        facts["agent"] = _in_use(flags.socket)
    if flags.json:
        print_json(facts)
        return 0
    where = (
        "only agents of this user on this machine"
        if found.is_local
        else "machines that joined by peerload invite, or have a copy of this directory"
        if found.is_issuer
        else "machines invited by a node that has the key of the cluster's CA"
    )
    rows = (
        ("cluster", found.name),
        ("id", found.id),
        ("directory", str(found.directory)),
        ("members", where),
        ("certificate", f"sha256:{found.fingerprint}"),
        ("valid until", f"{found.valid_until:%Y-%m-%d}"),
    )
    print_lines(f"{name:12} {printable(text)}" for name, text in rows)
    if not flags.directory:
        _say_in_use(facts["agent"], found.id)
    return 0


def _configured() -> ClusterDirectory:
    """The cluster directory of an agent started here now."""
    from peerload.security import cluster_dir

    return cluster_dir.find(configured({}).cluster, os.environ)


def _in_use(socket: str | None) -> dict[str, Any] | None:
    """The cluster of the agent that runs here; None if no agent runs."""
    try:
        with AgentConnection(socket) as client:
            info = client.call("info")
    except AgentUnavailable:
        return None
    told = {"node": "node", "name": "cluster", "id": "cluster_id", "directory": "cluster_directory"}
    return {key: info.get(name) for key, name in told.items()}


def _say_in_use(agent: dict[str, Any] | None, shown_id: str) -> None:
    if agent is None:
        return
    if agent["id"] == shown_id:
        say(f"the agent that runs here ({agent['node']}) uses it")
        return
    directory = str(agent["directory"])
    user = _other_owner(directory)
    say(
        f"the agent that runs here ({agent['node']}) uses another one: {agent['name']} in {directory}",
        f"details:  {user}peerload cluster show{'' if user else f' {shlex.quote(directory)}'}",
    )


def _other_owner(directory: str) -> str:
    """The words before a command about a cluster directory that belongs to another user, such as the service's, since
    nobody else may use it, root included; "" if it is ours."""
    import pwd

    uid = owner_of(Path(directory))
    if uid == os.getuid():
        return ""
    try:
        return f"sudo -Hu {pwd.getpwuid(uid).pw_name} "
    except KeyError:  # a user without a name
        return f"sudo -Hu '#{uid}' "


def owner_of(path: Path) -> int:
    """The uid of the owner of a path, or of the first directory above it that this user can see."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_uid
    return 0


def _facts(found: ClusterDirectory) -> dict[str, Any]:
    return {
        "name": found.name,
        "id": found.id,
        "directory": str(found.directory),
        "local": found.is_local,
        "certificate_sha256": found.fingerprint,
        "valid_until": found.valid_until.timestamp(),
    }


def _default_name(directory: Path) -> str:
    """The name of the directory, reduced to the characters of a cluster's name."""
    name = "".join(letter if letter in NODE_NAME_CHARACTERS else "-" for letter in directory.name.lower())
    return name.strip("-")[:NODE_NAME_LENGTH_MAX] or "cluster"


def make_files(directory: Path, flags: Namespace, cluster: ClusterDirectory) -> int:
    """Create the files for a Mosquitto broker with TLS for the cluster, in a new directory. flags: `host` and `json` of the command
    line. Raises BadRequest."""
    from peerload.security import broker

    if cluster.is_local:
        why, hint = "this node has no cluster of several machines", "make one:  peerload invite"
        agent = _in_use(flags.socket)
        if agent is not None and (user := _other_owner(str(agent["directory"]))):
            why = "the agent that runs here is another user's"
            named = "".join(f" --host {shlex.quote(host)}" for host in flags.host or ())
            hint = f"{user}peerload cluster broker-certificate {SYSTEM_STATE}/{shlex.quote(directory.name)}{named}"
        raise BadRequest("no certificate was made for a broker", why=why, hint=hint)
    if not cluster.is_issuer:
        raise BadRequest(
            "no certificate was made for a broker",
            why="this node does not have the key of the cluster's CA",
            hint="run it where the cluster was made; which nodes have the key:  peerload invite",
        )
    hosts: list[str] = flags.host or []
    valid_until = broker.make_mosquitto_files(cluster, directory, hosts, datetime.now(UTC))
    url = f"mqtts://{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:{TLS_PORT}"
    place, there = printable(shlex.quote(str(directory))), broker.MOSQUITTO_PLACE
    lines = (
        (
            f"{place} has the files for a Mosquitto at {printable(', '.join(hosts))}, valid until {valid_until:%Y-%m-%d}. "
            "broker.key is a secret."
        ),
        f"On its machine:   sudo install -d -o mosquitto -m 700 {there} ; sudo install -o mosquitto -m 400 {place}/* {there}",
        f"                  sudo ln -s {there}/mosquitto.conf /etc/mosquitto/conf.d/peerload.conf ; sudo systemctl restart mosquitto",
        f'On every node:    mqtt = ["{printable(url)}"]  in its configuration, or  --mqtt {printable(url)}',
    )
    told = {"directory": str(directory), "hosts": hosts, "valid_until": valid_until.timestamp()}
    print_result(told, lines, as_json=flags.json)
    return 0


def leave(words: list[str]) -> int:
    reader = Options(
        "leave",
        "Take this node out of its cluster: the others are informed, my agent stops and forgets the other nodes.\n"
        "Refused while it has tasks of others or unfinished ones of its own; the refusal says what would happen to them.",
    )
    reader.switch(
        "--force", help="leave anyway; my running tasks go on, those of other nodes are frozen and run elsewhere"
    )
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        info = client.call("info")
        process = watch(info.get("pid"))
        peers = client.call("checkup")["peers"]
        member = next((peer["address"] for peer in peers if peer["state"] == "alive"), "HOST:PORT")
        try:
            for what in client.call("leave", force=flags.force).get("left_behind", ()):
                say(what)
        except AgentUnavailable:
            if process is None:
                raise  # without its process, its end cannot be detected
    if process is not None:
        await_end(process, f"the agent (pid {info['pid']})")
    from peerload.security.invitations import start_with

    again = start_with("peer", printable(member), is_system=info.get("mode") == "system")
    text = f"{printable(info.get('node', ''))} has left; its agent stopped.  Join again:  {again}"
    print_result({"node": info.get("node"), "pid": info.get("pid")}, [text], as_json=flags.json)
    return 0


def forget(words: list[str]) -> int:
    reader = Options(
        "forget",
        "Declare that a node is gone for good: every node drops it from its list and stops looking for it.\n"
        "Only for a node that is dead or has left. My tasks there that must not run twice are given up. Where this is typed, its\n"
        "own tasks end, and results that it has not taken are dropped, so be sure; on other nodes they go on.",
    )
    reader.add_argument("node", metavar="NODE")
    flags = reader.read(words)
    check_node_names("forget", [flags.node])
    with AgentConnection(flags.socket) as client:
        reply = client.call("forget", node=flags.node)
    was = f"it was {printable(reply['was'])}" if reply.get("was") else "it was not met since this agent's start"
    ended = int(reply.get("ended") or 0)
    told = f"; {counted(ended, 'task')} of its own ended here" if ended else ""
    text = f"{printable(reply.get('node', ''))} is forgotten; {was}{told}"
    print_result({"node": reply.get("node"), "was": reply.get("was"), "ended": ended}, [text], as_json=flags.json)
    return 0


def revoke(words: list[str]) -> int:
    reader = Options(
        "revoke",
        "Shut a node out: its certificate is revoked everywhere, its connections are closed, and the key that it knew is changed.\n"
        "For a machine that was lost or stolen. It can come back only by a new invitation.",
    )
    reader.add_argument("node", metavar="NODE")
    reader.switch("--force", help="even if no node of that name is known here")
    flags = reader.read(words)
    check_node_names("revoke", [flags.node])
    with AgentConnection(flags.socket) as client:
        reply = client.call("revoke", node=flags.node, force=flags.force)
    node, others = printable(str(reply.get("node"))), counted(int(reply.get("told") or 0), "other member")
    text = f"{node} is shut out; {others} informed, the others learn it when they return"
    print_result({key: reply.get(key) for key in ("node", "was", "told", "was_issuer")}, [text], as_json=flags.json)
    if reply.get("was_issuer") and not flags.json:
        say(
            f"{node} has the key of the cluster's CA: it can issue itself another certificate",
            "shut it out for good with a new cluster:  peerload cluster init DIR",
        )
    return 0
