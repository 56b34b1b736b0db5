"""`peerload cluster`: make the directory that makes nodes members of one cluster, and say which one is used here.

It sees the agent's own reading of that directory, so that what is said here is what an agent will find.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from peerload.cli.main import UsageError
from peerload.cli.options import Options
from peerload.cli.text import print_json, printable, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from peerload.agent.cluster import Cluster

EXAMPLE_PORT = 7117
SOMEWHERE = "ADDRESS"
NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789-"
NAME_LENGTH_MAX = 40


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "cluster",
        "init DIR: make a cluster: its own certificate authority and keys, in a new directory. Whoever has a copy of it is\n"
        "a member. show [DIR]: which cluster an agent started here belongs to.",
        usage="[show [DIR] | init DIR [--name NAME]]",
    )
    reader.add_argument("what", nargs="?", default="show", metavar="show | init")
    reader.add_argument("directory", nargs="*", metavar="DIR")
    reader.flag("--name", metavar="NAME", help="init: the cluster's name (default: as the directory is called)")
    flags = reader.read(words)
    if flags.what not in ("init", "show"):
        raise UsageError(f"cluster: no such word: {flags.what!r}", hint="there are:  peerload cluster init DIR | show")
    if len(flags.directory) > 1 or (flags.what == "init" and not flags.directory):
        raise UsageError(f"cluster {flags.what} takes one directory", hint="what it takes:  peerload cluster --help")
    if flags.what == "show" and flags.name is not None:
        raise UsageError("cluster show takes no --name", hint="what it takes:  peerload cluster --help")
    return _init(flags) if flags.what == "init" else _show(flags)


def _init(flags: Namespace) -> int:
    from peerload.agent import cluster
    from peerload.agent.peer_address import reachable

    directory = Path(os.path.abspath(flags.directory[0]))  # noqa: PTH100 -- a link stays one: it is refused
    made = cluster.make(directory, _default_name(directory) if flags.name is None else flags.name)
    if flags.json:
        print_json(_facts(made))
        return 0
    try:
        address = reachable("0.0.0.0")  # noqa: S104 -- nothing is bound: this machine's address towards others is meant
    except OSError:
        address = SOMEWHERE
    place = printable(shlex.quote(str(directory)))
    copy = printable(shlex.quote(directory.name))
    sys.stdout.write(
        f"cluster {made.name} made in {place}. Whoever has a copy of it is a member: keep it as a secret.\n"
        f"Start here:       peerload up --cluster {place} --listen {address}:{EXAMPLE_PORT}\n"
        f"Add a machine:    scp -rp {place} OTHER:        and there, with its own address:\n"
        f"                  peerload up --cluster ~/{copy} --listen {SOMEWHERE}:{EXAMPLE_PORT} --peer {address}:{EXAMPLE_PORT}\n"
    )
    return 0


def _show(flags: Namespace) -> int:
    from peerload.agent import cluster, settings
    from peerload.cli.agent_flags import default_state
    from peerload.client import user_socket_path

    if flags.directory:
        found = cluster.read(Path(os.path.abspath(flags.directory[0])))  # noqa: PTH100 -- as above
    else:
        defaults = {"state": default_state(), "socket": user_socket_path()}
        configured = settings.load({}, defaults, dict(os.environ))
        found = cluster.find(configured.cluster, os.environ)
    facts = _facts(found)
    if not flags.directory:
        facts["agent"] = _in_use(flags.socket)
    if flags.json:
        print_json(facts)
        return 0
    where = (
        "agents of this user on this machine alone" if found.is_local else "every machine with a copy of the directory"
    )
    rows = (
        ("cluster", found.name),
        ("id", found.id),
        ("directory", str(found.directory)),
        ("members", where),
        ("certificate", f"sha256:{found.fingerprint}"),
        ("valid until", f"{found.valid_until:%Y-%m-%d}"),
    )
    sys.stdout.write("".join(f"{name:12} {printable(text)}\n" for name, text in rows))
    if not flags.directory:
        _say_in_use(facts["agent"], found.id)
    return 0


def _in_use(socket: str | None) -> dict[str, Any] | None:
    """The cluster of the agent that runs here; None if none does."""
    from peerload.client import Client
    from peerload.model.errors import AgentUnavailable

    try:
        with Client(socket) as client:
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
    say(
        f"the agent that runs here ({agent['node']}) uses another one: {agent['name']} in {agent['directory']}",
        f"more of that:  peerload cluster show {shlex.quote(str(agent['directory']))}",
    )


def _facts(found: Cluster) -> dict[str, Any]:
    """What may be told to anybody: never a key."""
    return {
        "name": found.name,
        "id": found.id,
        "directory": str(found.directory),
        "local": found.is_local,
        "certificate_sha256": found.fingerprint,
        "valid_until": found.valid_until.timestamp(),
    }


def _default_name(directory: Path) -> str:
    """The directory's name, in the characters that a cluster's name may have."""
    name = "".join(letter if letter in NAME_CHARACTERS else "-" for letter in directory.name.lower())
    return name.strip("-")[:NAME_LENGTH_MAX] or "cluster"
