"""`peerload invite`: print the command by which another machine joins the cluster, and how to install peerload there."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from peerload import distribution
from peerload.cli.common.options import NODE_NAME_LENGTH_MAX, NODE_NAME_SAYS, Options, is_node_name, whole
from peerload.cli.verbs.join import become_agents_user
from peerload.client.connection import AgentConnection
from peerload.model.errors import BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import duration_text, print_json, say
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace

USES_MAX = 1000
TTL_S_MAX = 7 * 86_400.0
TTL_S = 900.0
JSON_KEYS = ("token", "command", "address", "cluster", "uses", "ends_at")


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "invite",
        "Print the command by which another machine joins this node's cluster. It contains a secret that is valid once, for\n"
        "15 minutes. If this node has no cluster of several machines, one is made first.",
    )
    reader.flag("--uses N", help="valid for N machines (default 1)", type=whole(1, USES_MAX), default=1)
    reader.flag("--ttl 15m", help="valid for this time (default 15m, at most 7d)", type=duration, default=TTL_S)
    reader.flag("--node NAME", help="valid only for a node of this name", default="")
    reader.switch("--issuer", help="the new member may invite others: it gets the key of the cluster's CA")
    reader.flag("--listen HOST:PORT", help="address of this node for the others, if a cluster is made now")
    reader.flag("--name NAME", help="name of the cluster, if one is made now")
    flags = reader.read(words)
    if flags.node and not is_node_name(flags.node):
        raise UsageError(f"invite: {flags.node!r} is not a valid node name", why=NODE_NAME_SAYS)
    if flags.ttl > TTL_S_MAX:
        raise UsageError("invite: --ttl is too long", why="at most 7d", hint="peerload invite --ttl 7d")
    with AgentConnection(flags.socket) as client:
        info = client.call("info")
    if info.get("cluster_local"):
        become_agents_user(info, "invite", flags.socket)
        _make_cluster(flags, info)
    elif flags.listen or flags.name:
        what = "invite: --listen and --name are for a node without a cluster"
        raise UsageError(what, why=f"this one is a member of {info.get('cluster')}", hint="peerload invite")
    with AgentConnection(flags.socket) as client:
        reply = client.call("invite", uses=flags.uses, ttl_s=flags.ttl, node=flags.node, issuer=flags.issuer)
    command = f"peerload join {reply['token']}"
    if flags.json:
        ways = [line.text for line in install_lines(command, is_system=info.get("mode") == "system")]
        print_json({**{key: reply.get(key) for key in JSON_KEYS}, "command": command, "install": ways})
        return 0
    _say_terms(flags, reply)
    if sys.stdout.isatty():  # else it is passed on to `peerload join -`
        _say_how_to_install(command, is_system=info.get("mode") == "system")
    sys.stdout.write(f"{printable(command)}\n")
    return 0


def _say_terms(flags: Namespace, reply: dict[str, Any]) -> None:
    times = "once" if flags.uses == 1 else f"{flags.uses} times"
    who = f" a node called {flags.node}" if flags.node else ""
    more = " It includes the right to invite others." if flags.issuer else ""
    say(
        f"type this on the other machine{who and ', as' + who}; valid {times} within {duration_text(flags.ttl)}, and secret.{more}"
    )
    if str(reply.get("address", "")).startswith(("127.", "[::1]")):
        say(
            f"it is valid on this machine only: this node listens at {reply['address']}",
            "for others:  peerload down ; peerload up --listen ADDRESS:PORT ; peerload invite",
        )


def _say_how_to_install(join: str, *, is_system: bool) -> None:
    """Say how to install peerload on the other machine."""
    ways = install_lines(join, is_system=is_system)
    if not ways:
        say("a machine without peerload needs it first: install it there as it was installed here")
        return
    where = "type this here, with its name for OTHER" if ways[0].is_typed_here else "type this there"
    say(f"for a machine without peerload, {where}:", "\n  or:  ".join(way.text for way in ways))


def _make_cluster(flags: Namespace, info: dict[str, Any]) -> None:
    """Make a cluster for several machines, with the agent here as its first member."""
    from peerload.cli.common.agent_process import restart
    from peerload.cli.verbs.join import cluster_directory, listen_at
    from peerload.security import cluster_dir, node_identity_file
    from peerload.security.address import parse_address, reachable_anywhere

    if flags.listen:
        listen = flags.listen
        parse_address("listen", listen, loopback_only=False)
    else:
        try:
            host = reachable_anywhere()
        except OSError:
            what = "this machine has no address that others could reach"
            raise BadRequest(what, hint="peerload invite --listen ADDRESS:PORT") from None
        listen = listen_at(host, str(info.get("listen")))
    directory, node = cluster_directory(None), str(info.get("node"))
    if os.path.lexists(directory):
        made = cluster_dir.read(directory)  # of an earlier try, or for an agent that was started before it was there
    else:
        name = flags.name or f"{node[: NODE_NAME_LENGTH_MAX - 5]}-{secrets.token_hex(2)}"
        made = cluster_dir.make(directory, name)
    node_identity_file.write(
        Path(str(info["state"])), node_identity_file.NodeIdentityFile(str(directory), node, listen)
    )
    say(f"made the cluster {made.name} in {directory}; the agent restarts as its first member, tasks go on")
    after = restart(flags.socket, "the first member of a cluster")
    if after.get("cluster_local"):
        raise BadRequest(
            "the agent here still has no cluster of several machines",
            why="its settings at the start say so",
            hint="peerload down ; peerload up ; peerload invite",
        )


PACKAGE = "peerload"
TREE = "tar -C {tree} --exclude=./.venv --exclude=./.git -cz . | ssh OTHER {there}"
"""Copies what `make setup` needs of a source tree to another machine."""
UNPACKED = "mkdir -p peerload && tar -xz -C peerload"
IN_TREE = UNPACKED + " && make -C peerload setup && peerload/.venv/bin/{join}"
AS_ROOT = " && ssh -t OTHER {there}"
"""A second connection, with a terminal: sudo may ask for a password."""
IN_WHEEL = "peerload-wheel/{release}.data/data/share/peerload/deploy/install"
"""The path of the script in an unpacked wheel."""
INSTALLERS = ("pipx install", "uv tool install")
IN_HOME = "~/.local/bin/{join}"
"""pipx and uv install commands there; it may not be on the PATH of a shell that ssh starts."""


class InstallLine(NamedTuple):
    """One line to type. is_typed_here: on this machine, with the name of the other one for OTHER."""

    text: str
    is_typed_here: bool


def install_lines(join: str, *, is_system: bool) -> list[InstallLine]:
    """The ways to install peerload on another machine and run ``join`` there; none if the origin of this peerload is not known.

    Installers record the origin of a distribution (`direct_url.json`, PEP 610). One from an index has no such file. A source tree or
    a file is on this machine only, so that line is typed here and copies it over ssh.
    """
    from importlib.metadata import Distribution, packages_distributions

    name = packages_distributions().get(PACKAGE, [""])[0]
    if not name:
        return []
    came_from = Distribution.from_name(name)
    told = came_from.read_text("direct_url.json")
    direct_url = json.loads(told) if told else {}
    release = f"{name}=={came_from.version}"
    return install_lines_for(join, release, direct_url, is_system=is_system, kept_wheel=distribution.kept_wheel())


def install_lines_for(
    join: str, release: str, direct_url: dict[str, object], *, is_system: bool, kept_wheel: str = ""
) -> list[InstallLine]:
    """The lines for a distribution of this release with this origin. kept_wheel: the file that it was installed from, if it is kept."""
    url = str(direct_url.get("url") or "")
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if kept_wheel and not os.path.exists(path):  # noqa: PTH110 -- as the rest of the package
        path = kept_wheel
    if path and os.path.isfile(os.path.join(path, "Makefile")):  # noqa: PTH113, PTH118 -- as the rest of the package
        there = UNPACKED if is_system else IN_TREE.format(join=join)
        text = TREE.format(tree=shlex.quote(path), there=shlex.quote(there))
        if is_system:
            text += AS_ROOT.format(there=shlex.quote(f"sudo peerload/deploy/install && sudo {join}"))
        return [InstallLine(text, is_typed_here=True)]
    if path and os.path.isfile(path):  # noqa: PTH113
        file = shlex.quote(os.path.basename(path))  # noqa: PTH119
        if is_system:
            unpacked = f"cat > {file} && python3 -m zipfile -e {file} peerload-wheel"
            script = shlex.quote(IN_WHEEL.format(release="-".join(os.path.basename(path).split("-")[:2])))  # noqa: PTH119
            installed = f"sudo sh {script} --from {file} && sudo {join}"
            text = f"ssh OTHER {shlex.quote(unpacked)} < {shlex.quote(path)}"
            return [InstallLine(text + AS_ROOT.format(there=shlex.quote(installed)), is_typed_here=True)]
        ways = [f"cat > {file} && {install} ./{file} && {IN_HOME.format(join=join)}" for install in INSTALLERS]
        return [InstallLine(f"ssh OTHER {shlex.quote(way)} < {shlex.quote(path)}", is_typed_here=True) for way in ways]
    if is_system or path or not (url or distribution.IS_REGISTERED):
        return []  # the service is made from a wheel or a source tree, and nobody knows where one is
    what = shlex.quote(_requirement(release, url, direct_url.get("vcs_info")))
    return [
        InstallLine(f"{install} {what} && {IN_HOME.format(join=join)}", is_typed_here=False) for install in INSTALLERS
    ]


def _requirement(release: str, url: str, vcs: object) -> str:
    """The argument of an installer: a release in an index, or a URL."""
    if isinstance(vcs, dict) and url:
        return f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return url or release
