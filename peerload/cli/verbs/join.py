"""`peerload invite` and `join TOKEN`: let another machine into the cluster; make this machine a member of the cluster that issued
the token.

Both verbs write files that belong to the agent. If that agent serves the whole machine, they switch to its user, which only root
can do. Root trusts no statement of an agent before it has switched to the agent's user. The kernel supplies that user with every
answer (SCM_CREDENTIALS). SO_PEERCRED would report the service manager if that holds the socket."""

from __future__ import annotations

import os
import shlex
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.cli.common import agent_process
from peerload.cli.common.options import NODE_NAME_LENGTH_MAX, NODE_NAME_SAYS, Options, is_node_name, whole
from peerload.client.connection import ANSWERS_WITHIN_S, AgentConnection, default_socket_path
from peerload.model.errors import BadRequest, PeerloadError, UsageError
from peerload.model.text import printable, times_text
from peerload.text.format import duration_text, print_json, print_result, say
from peerload.text.units import duration
from peerload.wire import frame

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping


MEETS_WITHIN_S = 30.0
BUILT_IN = "built-in"
"""The origin of settings at their defaults."""
LOOK_EVERY_S = 0.05
LINE_CHARS_MAX = 4096
"""Maximum length of the line from stdin; a token has about 150 characters."""
JOIN_JSON_KEYS = ("node", "cluster", "cluster_directory", "listen", "socket", "peers")


def join(words: list[str]) -> int:
    reader = Options(
        "join",
        "Make this machine a member of the cluster whose `peerload invite` printed TOKEN, and start its agent. An agent that\n"
        "runs here restarts as a member; its tasks go on. With - the token is read from stdin, as invite prints it, so that no\n"
        "other user of this machine sees it in the list of processes.",
    )
    reader.add_argument("token", nargs="+", metavar="TOKEN")
    reader.flag("--node NAME", help="name of this node (default: that of the agent or the tasks here, else the host's)")
    reader.flag("--listen HOST:PORT", help="address for the others (default: this machine's)")
    reader.flag("--cluster DIR", help="directory for the keys of the cluster (default: your own)")
    reader.flag("--state DIR", help="directory of tasks and outputs")
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
            hint=("" if place["mode"] == "system" else "peerload down  and then the same again; or  ")
            + f"peerload join --node {running['node']} …",
        )
    if running is None:
        _check_start(place["state"], place["socket"], {"node": node, "listen": flags.listen})
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
    info = agent_process.agent_info(place["socket"], ANSWERS_WITHIN_S) or info
    print_result(
        {key: info.get(key) for key in JOIN_JSON_KEYS}, _joined_lines(info, admitted, place), as_json=flags.json
    )
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
    info = agent_process.agent_info(flags.socket or default_socket_path(), ANSWERS_WITHIN_S)
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


def _is_connected(socket_path: str) -> bool:
    """True if the agent here is connected to another member. A node that is not, such as a revoked one, may join again."""
    with AgentConnection(socket_path) as client:
        return _sees_peer(client)


def _sees_peer(client: AgentConnection) -> bool:
    return any(node.get("state") == "alive" and not node.get("self") for node in client.call("nodes")["nodes"])


def _place(flags: Namespace, running: dict[str, Any] | None) -> dict[str, str]:
    """The paths of this node (state, socket, cluster directory) and its name."""
    given = {key: value for key in ("state", "socket", "cluster") if (value := getattr(flags, key))}
    settings = agent_process.located({key: value for key, value in given.items() if key != "cluster"})
    if running is not None:
        settings |= {"state": str(running["state"]), "socket": str(running["socket"])}
    found, origins = agent_process.configured_with_origins({key: settings[key] for key in ("state", "socket")})
    directory = cluster_directory(flags.cluster or found.cluster or None)
    if running is not None:
        node = str(running["node"])
    else:
        node = (origins["node"] == BUILT_IN and agent_process.node_of(settings["state"])) or found.node
    mode = str((running or {}).get("mode") or "")
    own = {"state": settings["state"], "socket": settings["socket"]}
    return own | {"cluster": str(directory), "node": node, "mode": mode}


def _check_start(state: str, socket_path: str, wanted: dict[str, str | None]) -> None:
    """Raise BadRequest if the agent would start with another name or address than it joins with. It would fail then, and the token
    would be used up."""
    config, origins = agent_process.configured_with_origins({"state": state, "socket": socket_path})
    for key, value in wanted.items():
        found, origin = getattr(config, key), origins[key]
        if value and value != found and origin != BUILT_IN and os.path.dirname(origin) != state:  # noqa: PTH120 -- as above
            hint = f"leave out --{key}, or change the setting there"
            raise BadRequest(f"the settings have {key} {found} ({origin})", why=f"not {value}", hint=hint)
    kept = agent_process.node_of(state)
    if kept not in ("", wanted["node"]):
        hint = f"go on as that node:  peerload join --node {kept} …        a new node:  --state DIR"
        raise BadRequest(
            f"the tasks in {state} are those of node {kept}", why=f"and {wanted['node']} is to join", hint=hint
        )


def _ask_to_join(
    token: Any,  # noqa: ANN401 -- the agent's own
    node: str,
    place: dict[str, str],
    flags: Namespace,
    own: str,
) -> Any:  # noqa: ANN401 -- as above
    """Request admission and store the result; the file that activates it is written last. own: the address of the agent that runs
    here, "" if none does."""
    from peerload.security import cluster_dir, invitations, node_identity_file, private_files, revocation, tls
    from peerload.security.certificates import KeyPair

    if flags.listen:
        _check_listen(flags.listen)
    state, directory = Path(place["state"]), Path(place["cluster"])
    agent_process.make_private(place["state"])
    private_files.private_directory(state)
    _check_free(directory, token)
    got = invitations.join_cluster(token, node, state, is_system=place["mode"] == "system")
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
        hint = "free some disk space, then try again: the token is still valid for this machine"
        raise PeerloadError("the keys of the cluster cannot be stored", why=str(error.strerror), hint=hint) from None
    return got


def _check_free(directory: Path, token: Any) -> None:  # noqa: ANN401 -- as above
    """Raise BadRequest if the directory belongs to another cluster."""
    from peerload.security import cluster_dir

    if os.path.lexists(directory) and cluster_dir.read(directory).fingerprint != token.fingerprint.hex():
        raise BadRequest(
            f"{directory} has another cluster",
            why="a machine is in one cluster at a time, and nothing is overwritten",
            hint=f"mv {shlex.quote(str(directory))} {shlex.quote(str(directory))}.old        or another place:  --cluster DIR",
        )


def _as_member(running: dict[str, Any] | None, place: dict[str, str]) -> dict[str, Any]:
    if running is not None:
        return agent_process.restart(place["socket"], "joined a cluster")
    return agent_process.start({key: place[key] for key in ("state", "socket")})


def _await_peer(socket_path: str) -> None:
    """Return when another member is alive; report a timeout."""
    pause, deadline = threading.Event(), time.monotonic() + MEETS_WITHIN_S
    with AgentConnection(socket_path) as client:
        while time.monotonic() < deadline:
            if _sees_peer(client):
                return
            pause.wait(LOOK_EVERY_S)
    say(
        f"this machine is a member, but no other member has answered within {MEETS_WITHIN_S:g} s",
        "perhaps a firewall is between them; see  peerload nodes",
    )


def _joined_lines(info: dict[str, Any], admitted: Any, place: dict[str, str]) -> list[str]:  # noqa: ANN401 -- as above
    own = "" if place["socket"] == default_socket_path() else f" --socket {shlex.quote(place['socket'])}"
    node, count = printable(str(info.get("node"))), int(info.get("peers") or 0) + 1
    return [
        f"{node} has joined {printable(admitted.welcome.name)}: {count} nodes known. Others reach it at {printable(str(info.get('listen')))}.",
        *(["  It may invite others."] if admitted.welcome.ca_key else []),
        *(f"Note:           {printable(notice)}" for notice in info.get("notices") or ()),
        f"Try:            peerload nodes{own}        peerload run{own} hostname",
        f"Leave it:       peerload leave{own}",
    ]


PORT = 7117
"""The default port, used if it is free, so that a firewall needs only one rule."""
PORT_TRIES_MAX = 20


def cluster_directory(named: str | None) -> Path:
    """The directory of this machine's cluster: the given one, else this user's own."""
    from peerload.security import cluster_dir

    return Path(os.path.abspath(named)) if named else cluster_dir.own_directory(os.environ)  # noqa: PTH100 -- symbolic links are kept


def _check_listen(address: str) -> None:
    """Check an address from the command line, since the agent would wait for one that this machine lacks. Raises ConfigError."""
    from peerload.model.errors import ConfigError
    from peerload.security.address import is_absent, parse_address

    parse_address("listen", address, loopback_only=False)
    if is_absent(address):
        what = f"this machine does not have the address {address}"
        raise ConfigError("listen", what, hint="name an address of this machine that others reach")


def listen_at(host: str, own: str = "") -> str:
    """`HOST:PORT` with the default port, or with a free one, which is reported, if another program uses that. own: the address of the
    agent that runs here and is about to restart. Raises ConfigError."""
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
    """True if an agent could listen there by TCP and UDP. Connections in TIME_WAIT are ignored, as by the agent."""
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
    """Switch permanently to the user of the agent, with its home, if the agent serves all users. ``info``: its answer at that socket,
    None if none runs. Raises PeerloadError for users other than root and that user, and for root if the agent is another user's own."""
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
            why = "root does not write files to a path that another user's agent chose"
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
        found = Path(state).stat()
    except OSError as error:
        raise PeerloadError(f"{state} cannot be read", why=error.strerror or str(error)) from None
    if found.st_uid != uid:
        why = f"it belongs to {_name_of(found.st_uid)}, and the agent runs as {_name_of(uid)}"
        raise PeerloadError(f"the agent reports its state in {state}", why=why, hint="peerload doctor --security")
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
    raise PeerloadError(f"the user of the agent at {path} is not known", why="the kernel does not report it")


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


USES_MAX = 1000
TTL_S_MAX = 7 * 86_400.0
TTL_S = 900.0
INVITE_JSON_KEYS = ("token", "command", "address", "cluster", "uses", "ends_at")


def invite(words: list[str]) -> int:
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
        print_json({**{key: reply.get(key) for key in INVITE_JSON_KEYS}, "command": command, "install": ways})
        return 0
    _say_terms(flags, reply, is_system=info.get("mode") == "system")
    if sys.stdout.isatty():  # else it is passed on to `peerload join -`
        _say_how_to_install(command, is_system=info.get("mode") == "system")
    sys.stdout.write(f"{printable(command)}\n")
    return 0


def _say_terms(flags: Namespace, reply: dict[str, Any], *, is_system: bool) -> None:
    from peerload.security.invitations import start_with

    times = times_text(flags.uses)
    who = f" a node called {flags.node}" if flags.node else ""
    more = " It includes the right to invite others." if flags.issuer else ""
    say(
        f"type this on the other machine{who and ', as' + who}; valid {times} within {duration_text(flags.ttl)}, and secret.{more}"
    )
    if str(reply.get("address", "")).startswith(("127.", "[::1]")):
        say(
            f"it is valid on this machine only: this node listens at {reply['address']}",
            f"for others:  {'' if is_system else 'peerload down ; '}{start_with('listen', 'ADDRESS:PORT', is_system=is_system)} ; peerload invite",
        )


def _say_how_to_install(join: str, *, is_system: bool) -> None:
    ways = install_lines(join, is_system=is_system)
    if not ways:
        say("a machine without peerload needs it first: install it there as it was installed here")
        return
    where = "type this here, with its name for OTHER" if ways[0].is_typed_here else "type this there"
    say(f"for a machine without peerload, {where}:", "\n  or:  ".join(way.text for way in ways))


def _make_cluster(flags: Namespace, info: dict[str, Any]) -> None:
    """Create a cluster for several machines, with the agent here as its first member."""
    from peerload.security import cluster_dir, node_identity_file
    from peerload.security.address import reachable_anywhere

    if flags.listen:
        listen = flags.listen
        _check_listen(listen)
    else:
        try:
            host = reachable_anywhere()
        except OSError:
            what = "this machine has no address that others could reach"
            raise BadRequest(what, hint="peerload invite --listen ADDRESS:PORT") from None
        listen = listen_at(host, str(info.get("listen")))
    directory, node = cluster_directory(None), str(info.get("node"))
    if os.path.lexists(directory):
        made = cluster_dir.read(directory)  # from an earlier attempt, or created after the agent was started
    else:
        name = flags.name or f"{node[: NODE_NAME_LENGTH_MAX - 5]}-{os.urandom(2).hex()}"
        made = cluster_dir.make(directory, name)
    node_identity_file.write(
        Path(str(info["state"])), node_identity_file.NodeIdentityFile(str(directory), node, listen)
    )
    with AgentConnection(flags.socket) as client:
        nodes = client.call("nodes")["nodes"]
    others = [str(one["node"]) for one in nodes if one["state"] == "alive" and not one["self"]]
    say(f"made the cluster {made.name} in {directory}; the agent restarts as its first member, tasks go on")
    if others:
        say(
            f"no members of it yet: {printable(', '.join(others))}, on this machine",
            f"for each:  peerload down --socket PATH ; peerload up --node NAME --state DIR --socket PATH --peer {listen}",
        )
    after = agent_process.restart(flags.socket, "the first member of a cluster")
    if after.get("cluster_local"):
        raise BadRequest(
            "the agent here still has no cluster of several machines",
            why="its settings at the start say so",
            hint="peerload down ; peerload up ; peerload invite",
        )


PACKAGE = "peerload"
TREE = "tar -C {tree} --exclude=./.venv --exclude=./.git -cz . | ssh OTHER {there}"
"""Command that copies the parts of a source tree that `make setup` needs to another machine."""
UNPACKED = "mkdir -p peerload && tar -xz -C peerload"
IN_TREE = UNPACKED + " && make -C peerload setup && peerload/.venv/bin/{join}"
AS_ROOT = " && ssh -t OTHER {there}"
"""Prefix of a second connection, with a terminal, since sudo may ask for a password."""
IN_WHEEL = "peerload-wheel/{release}.data/data/share/peerload/deploy/install"
"""The path of the script in an unpacked wheel."""
INSTALLERS = ("pipx install", "uv tool install")
IN_HOME = "~/.local/bin/{join}"
"""The directory where pipx and uv install commands. It may not be on the PATH of a shell that ssh starts."""


class InstallLine(NamedTuple):
    """Command line for the user. is_typed_here: to type on this machine, with the other machine's name in place of OTHER."""

    text: str
    is_typed_here: bool


def install_lines(join: str, *, is_system: bool) -> list[InstallLine]:
    """The ways to install peerload on another machine and run ``join`` there; none if the origin of this peerload is not known.

    Installers record the origin of a distribution (`direct_url.json`, PEP 610), except for one from a package index. A source
    tree or a wheel file exists only on this machine, so its line is typed here and copies it over ssh.
    """
    import json
    from importlib.metadata import Distribution, packages_distributions

    from peerload.distribution import kept_wheel

    name = packages_distributions().get(PACKAGE, [""])[0]
    if not name:
        return []
    came_from = Distribution.from_name(name)
    told = came_from.read_text("direct_url.json")
    direct_url = json.loads(told) if told else {}
    release = f"{name}=={came_from.version}"
    return install_lines_for(join, release, direct_url, is_system=is_system, kept_wheel=kept_wheel())


def install_lines_for(
    join: str, release: str, direct_url: dict[str, object], *, is_system: bool, kept_wheel: str = ""
) -> list[InstallLine]:
    """The lines for a distribution of this release with this origin. kept_wheel: the file it was installed from, if it still exists."""
    from urllib.parse import unquote, urlsplit

    from peerload.distribution import IS_REGISTERED

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
    if is_system or path or not (url or IS_REGISTERED):
        return []  # the service needs a wheel or a source tree, and the path of one is not known
    what = shlex.quote(_requirement(release, url, direct_url.get("vcs_info")))
    return [
        InstallLine(f"{install} {what} && {IN_HOME.format(join=join)}", is_typed_here=False) for install in INSTALLERS
    ]


def _requirement(release: str, url: str, vcs: object) -> str:
    """The argument of an installer: a release in an index, or a URL."""
    if isinstance(vcs, dict) and url:
        return f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return url or release
