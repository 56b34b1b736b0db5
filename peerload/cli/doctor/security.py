"""Checks of `peerload doctor --security`: file modes, dates of certificate and keys, privileges of processes, and limits
that this machine does not enforce. Each failure or warning has a fix that the user can apply."""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import stat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import peerload
from peerload.cli.doctor.machine import AS_SERVICE, FAIL, OK, SKIP, WARN, Check, DoctorInput, Finding, needs_agent
from peerload.model.errors import ConfigError
from peerload.model.text import printable
from peerload.text.format import counted, duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

KEY_FILES = ("tls/node.pem", "joining.pem", "invites", "trust", "launcher/launcher.sock")
"""Files of the state directory that only its owner may access, including the socket that starts tasks."""
CLUSTER_FILES = ("cluster.toml", "ca.pem", "seal.key", "ca.key")
LAUNCHER_PLACES = {
    "--config": "/etc/peerload/peerload.toml",
    "--config-directory": "/etc/peerload/conf.d",
    "--directory": "/var/lib/peerload-launcher",
    "--sockets": "/run/peerload-launcher",
}
"""Default paths of the system launcher, by the flags that change them."""
PACKAGES = ("aiomqtt", "cryptography", "msgpack", "msgspec", "paho.mqtt", "psutil", "uvloop")
"""Libraries that the agent loads."""
GROUP = "peerload"
SEAL_AGE_S_MAX = 365 * 86_400.0
FILES_LOOKED_AT_MAX = 20_000
RENEW = "peerload down && peerload up        on a node without the CA's key, and if that does not help:  peerload join TOKEN"

INVITE = "on a member:  peerload invite        and here the command that it prints"


class Fault(NamedTuple):
    """A path that other users can access, and the fix."""

    says: str
    fix: str


def owner_of(facts: DoctorInput) -> int:
    """User of the agent, or of one that would be started."""
    return int(facts.security.get("user_id", facts.user_id))


def exposed(path: Path, owner: int, others: int = 0o077) -> Fault | None:
    """Fault of a path itself; None if only its owner has access, or it does not exist. others: mode bits that must not be
    set."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    quoted = shlex.quote(str(path))
    if stat.S_ISLNK(status.st_mode):
        return Fault(f"{path}: it is a link", f"replace the link by its target:  ls -l {quoted}")
    if status.st_uid not in (owner, 0):
        says = f"{path}: it belongs to another user (uid {status.st_uid})"
        return Fault(says, f"examine it, then as root:  chown {owner} {quoted}")
    if not status.st_mode & others:
        return None
    says = f"{path}: other users can {'change' if status.st_mode & others & 0o022 else 'read'} it"
    return Fault(says, f"chmod {'go=' if others & 0o055 else 'go-w'} {quoted}")


def replaceable(path: Path, owner: int) -> Fault | None:
    """Fault of the first parent directory in which another user may replace the path; None if there is none."""
    for above in Path(os.path.realpath(path)).parents:
        status, quoted = above.stat(), shlex.quote(str(above))
        if status.st_uid not in (owner, 0):
            says = f"{path}: {above} belongs to another user (uid {status.st_uid})"
            return Fault(says, f"move it elsewhere, or as root:  chown {owner} {quoted}")
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            return Fault(f"{path}: other users can replace it in {above}", f"chmod go-w {quoted}")
    return None


def agent(facts: DoctorInput) -> Finding:
    """Check that an agent runs that can be examined."""
    if not facts.info:
        return Finding(FAIL, str(facts.agent_error or "no agent is running here"), "peerload up")
    return Finding(OK, f"node {facts.info.get('node')} was examined, in {facts.security['mode']} mode")


# -- files -------------------------------------------------------------------------------------------------------------


def state(facts: DoctorInput) -> Finding:
    """Check the modes of the state directory and of the keys in it."""
    place, owner = facts.state, owner_of(facts)
    if place is None or not os.path.lexists(place):
        return Finding(SKIP, "no state directory yet")
    fault = exposed(place, owner) or replaceable(place, owner)
    for name in KEY_FILES:
        fault = fault or exposed(place / name, owner)
    if fault:
        return Finding(FAIL, *fault)
    return Finding(OK, f"only uid {owner} can use {place} and the keys in it")


def cluster_directory(facts: DoctorInput) -> Path | None:
    """Cluster directory of the running agent, or of one that would be started."""
    if named := facts.info.get("cluster_directory"):
        return Path(str(named))
    return facts.cluster.directory if facts.cluster is not None else None


def cluster(facts: DoctorInput) -> Finding:
    place, owner = cluster_directory(facts), owner_of(facts)
    if facts.cluster_error is not None and not facts.info:
        return Finding(FAIL, str(facts.cluster_error), facts.cluster_error.hint or "peerload cluster show")
    if place is None:
        return Finding(SKIP, "no cluster yet")
    for path in (place, *(place / name for name in CLUSTER_FILES)):
        if fault := exposed(path, owner):
            return Finding(FAIL, *fault)
    if fault := replaceable(place, owner):
        return Finding(FAIL, *fault)
    return Finding(OK, f"only uid {owner} can use {place}")


def ca_key(facts: DoctorInput) -> Finding:
    """Check that tasks of others cannot read the CA's key."""
    place = cluster_directory(facts)
    if place is None:
        return Finding(SKIP, "no cluster yet")
    if not (place / "ca.key").exists():
        return Finding(OK, "the CA's key is not on this node")
    if fault := exposed(place / "ca.key", owner_of(facts)):
        return Finding(FAIL, *fault)
    runs = facts.security.get("mode", "user") == "user" and facts.info.get("slots") != 0
    if runs and not facts.info.get("cluster_local", True):
        says = "the CA's key is here, and a task of any member may read it: tasks run as the key's owner"
        return Finding(WARN, says, "keep it on a node that runs no tasks:  peerload up --slots 0")
    return Finding(OK, "the CA's key is here, and only its owner can read it")


@needs_agent
def settings(facts: DoctorInput) -> Finding:
    """Check that only the agent's user (in system mode: root) can change the settings and the files of the system
    launcher."""
    if facts.security["mode"] == "system":
        return _system_settings(facts)
    words, owner = facts.text(f"/proc/{facts.info['pid']}/cmdline").split("\0"), owner_of(facts)
    named = next((after for word, after in itertools.pairwise(words) if word == "--config"), None)
    try:
        paths = facts.settings_files(named)
    except ConfigError as error:
        return Finding(SKIP, str(error))
    for path in paths:
        if fault := exposed(path.resolve(), owner, 0o022) or replaceable(path, owner):
            return Finding(FAIL, *fault)
    return Finding(OK, f"only uid {owner} can change its settings ({counted(len(paths), 'file')})")


def _system_settings(facts: DoctorInput) -> Finding:
    words = facts.text(f"/proc/{facts.info.get('launcher_pid') or 0}/cmdline").split("\0")
    flags = {**LAUNCHER_PLACES, **{flag: word for flag, word in itertools.pairwise(words) if flag in LAUNCHER_PLACES}}
    places = {flag: Path(word) for flag, word in flags.items()}
    for path in (*places.values(), *sorted(places["--config-directory"].glob("*.toml"))):
        if fault := exposed(path, 0, 0o022) or (replaceable(path, 0) if path.exists() else None):
            return Finding(FAIL, *fault)
    if fault := exposed(places["--sockets"] / "launcher.sock", owner_of(facts)):
        return Finding(FAIL, *fault)
    return Finding(OK, f"only root can change {places['--config']} and the places of the launcher")


def socket(facts: DoctorInput) -> Finding:
    """Check that only the agent's user (in system mode: its group) can connect to the agent's socket or replace it."""
    path = Path(facts.socket)
    try:
        status = path.lstat()
    except OSError as error:
        return Finding(SKIP, f"{path}: {error.strerror}")
    owner, is_system, quoted = owner_of(facts), facts.security.get("mode") == "system", shlex.quote(str(path))
    if not stat.S_ISSOCK(status.st_mode):
        return Finding(FAIL, f"{path} is not a socket", "peerload up")
    if status.st_uid not in (owner, 0):
        return Finding(FAIL, f"{path} belongs to another user (uid {status.st_uid})", "peerload up --socket PATH")
    if status.st_mode & (0o007 if is_system else 0o077):
        return Finding(FAIL, f"other users can connect to {path}", f"chmod {'o=' if is_system else 'go='} {quoted}")
    group = next((str(one.get("value")) for one in facts.settings if one.get("key") == "group"), GROUP)
    if is_system and status.st_mode & 0o060 and status.st_gid not in (_group_id(group), owner):
        return Finding(FAIL, f"{path} does not belong to the group {group}", f"chgrp {group} {quoted}")
    if fault := replaceable(path, owner):
        return Finding(FAIL, *fault)
    return Finding(OK, f"only {f'the group {group}' if is_system else f'uid {owner}'} can use {path}")


def _group_id(name: str) -> int:
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return -1


def code(facts: DoctorInput) -> Finding:
    """Check that no other user can change the code that the agent runs: peerload and its libraries."""
    from importlib.util import find_spec

    specs = (find_spec(name) for name in PACKAGES)
    libraries = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    owner, looked_at = owner_of(facts), 0
    for top in (Path(peerload.__file__).parent, *libraries):
        for directory, _, files in os.walk(top):
            for path in (Path(directory), *(Path(directory, name) for name in files if name.endswith((".py", ".so")))):
                looked_at += 1
                if fault := exposed(Path(os.path.realpath(path)), owner, 0o022):
                    return Finding(FAIL, *fault)
            if looked_at > FILES_LOOKED_AT_MAX:
                break
        if fault := replaceable(top, owner):
            return Finding(FAIL, fault.says, "install peerload where only you can write")
    return Finding(OK, f"only their owner can change the {counted(looked_at, 'file')} of peerload and its libraries")


# -- dates -------------------------------------------------------------------------------------------------------------


def certificate(facts: DoctorInput) -> Finding:
    """Check that the node's certificate can be read, is valid, and was renewed in time. A running agent does not notice
    that the file is damaged, but the next one will not start."""
    told = facts.security.get("certificate") or {}
    path = facts.state / "tls/node.pem" if facts.state is not None else None
    is_local = facts.info.get("cluster_local", facts.cluster is None or facts.cluster.is_local)
    if is_local or path is None or not (told or path.exists()):
        return Finding(SKIP, "no cluster: no certificate is needed")
    from peerload.security.certificates import valid_until

    try:
        kept_until = valid_until(path.read_bytes()).timestamp()
    except PermissionError:
        kept_until = math.inf
    except (OSError, ValueError):
        makes_its_own = facts.cluster is not None and facts.cluster.is_issuer
        fix = facts.restarts if makes_its_own else INVITE
        return Finding(FAIL, f"its certificate cannot be read from {path}", fix)
    ends_at = facts.checkup.get("certificate_until") or told.get("valid_until") or kept_until
    if ends_at <= facts.now:
        return Finding(FAIL, "its certificate has expired", RENEW)
    says = f"its certificate expires in {duration_text(ends_at - facts.now)}"
    if facts.now > told.get("due_at", ends_at):
        return Finding(WARN, f"{says} and should have been renewed", "start a node that has the CA's key")
    return Finding(OK, says)


@needs_agent
def gossip_key(facts: DoctorInput) -> Finding:
    """Check that the key of gossip and MQTT is not older than a year."""
    place = cluster_directory(facts)
    since = facts.security.get("sealed_since")
    if not since and place is not None and (place / "seal.key").exists():
        since = (place / "seal.key").stat().st_mtime
    if not since:
        return Finding(SKIP, "the age of the key is unknown")
    says = f"the key of gossip and MQTT is {duration_text(max(facts.now - float(since), 0.0))} old"
    if facts.now - float(since) > SEAL_AGE_S_MAX:
        return Finding(WARN, says, "on a node with the CA's key:  peerload cluster rotate")
    return Finding(OK, says)


# -- rights, and what is not enforced ----------------------------------------------------------------------------------


@needs_agent
def users(facts: DoctorInput) -> Finding:
    """Check the users as whom tasks of others run here."""
    uid = owner_of(facts)
    if facts.security["mode"] == "system":
        if uid == 0:
            return Finding(FAIL, "the agent runs as root", "start it by its unit:  systemctl start peerload")
        administrators = facts.security.get("administrators") or {}
        names = printable(", ".join(map(str, administrators.get("named") or ())))
        fix = "map them to accounts that may do nothing special"
        if administrators.get("may_be"):
            says = "users of other nodes may be administrators here, and so may their nodes (map_administrators = true)"
            return Finding(WARN, says + (f": {names}" if names else ""), fix)
        if names:
            return Finding(WARN, f"users maps to administrators: {names}; nothing runs as them for other nodes", fix)
        return Finding(OK, f"the agent is uid {uid}; the launcher chooses the account of each task, never root")
    alone = facts.info.get("cluster_local")
    if uid == 0 and not alone:
        says = "the agent runs as root, in user mode: members of the cluster may run anything here as root"
        return Finding(WARN, says, "run it as a user of its own, or for everyone:  sudo peerload service install")
    who = "only agents of this user and machine" if alone else f"every member of {facts.info.get('cluster')}"
    return Finding(OK, f"tasks run as the agent's own user (uid {uid}); {who} may submit them")


@needs_agent
def hardening(facts: DoctorInput) -> Finding:
    """Check that the agent of a service can gain no rights, and that its memory is not written to a file."""
    if facts.security["mode"] != "system":
        return Finding(SKIP, "user mode: the agent has the rights of its user, and so have its tasks")
    lines = facts.text(f"/proc/{facts.info['pid']}/status").splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if status.get("NoNewPrivs") != "1" or int(status.get("CapEff", "0"), 16):
        return Finding(FAIL, "the agent could gain rights", "start it by its unit:  systemctl start peerload")
    limit = re.search(r"^Max core file size\s+(\S+)", facts.text(f"/proc/{facts.info['pid']}/limits"), re.MULTILINE)
    if limit is not None and limit[1] != "0":
        return Finding(FAIL, "a crash would write the agent's memory to a file", "LimitCORE=0 in the unit")
    return Finding(OK, "the agent has no capabilities and can gain none; its memory is not written to files")


@needs_agent
def enforcement(facts: DoctorInput) -> Finding:
    """List limits of tasks that this machine does not enforce."""
    told = facts.checkup["launcher"]
    if told["unenforced"]:
        return Finding(WARN, f"not enforced here: {'; '.join(told['unenforced'])}", AS_SERVICE)
    return Finding(
        OK, f"tasks are contained by {told['units']}, their memory is limited by {told['memory'] or 'nothing'}"
    )


def broker(facts: DoctorInput) -> Finding:
    """Check that the connection to each broker is encrypted. `peerload doctor` tries who may publish there."""
    told = (facts.checkup.get("broker") or {}).get("urls") or []
    urls = list(dict.fromkeys([*(facts.config.mqtt if facts.config is not None else ()), *told]))
    if not urls:
        return Finding(SKIP, "no broker is configured")
    plain = [url for url in urls if not url.startswith("mqtts://")]
    if not plain:
        return Finding(OK, "all connections to brokers use TLS")
    where = urlsplit(plain[0]).netloc.rpartition("@")[2] or "the broker"
    host = urlsplit(plain[0]).hostname or ""
    if host.startswith("127.") or host in ("localhost", "::1"):
        return Finding(OK, f"{where} is on this machine")
    says = f"the connection to {where} is not encrypted: user, password, topics and times can be read on the way"
    return Finding(FAIL, says, "use  mqtts://HOST        see docs/mqtt.md")


def permitted(look: Callable[[DoctorInput], Finding]) -> Callable[[DoctorInput], Finding]:
    """Skip a check if this user may not read a file that it needs."""

    def looked(facts: DoctorInput) -> Finding:
        try:
            return look(facts)
        except PermissionError as error:
            return Finding(SKIP, f"{error.filename or 'it'} cannot be read: run doctor as its owner, or root")

    return looked


CHECKS = (
    Check("agent", agent),
    Check("state", permitted(state)),
    Check("cluster", permitted(cluster)),
    Check("CA key", permitted(ca_key)),
    Check("settings", permitted(settings)),
    Check("socket", permitted(socket)),
    Check("code", permitted(code)),
    Check("certificate", certificate),
    Check("gossip key", permitted(gossip_key)),
    Check("users", users),
    Check("hardening", hardening),
    Check("enforcement", enforcement),
    Check("broker", broker),
)
