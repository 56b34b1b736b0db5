"""What `doctor --security` looks at on the disk: whose the keys, the state, the code and the logs are, and what is in them."""

from __future__ import annotations

import itertools
import os
import shlex
import stat
from pathlib import Path
from typing import NamedTuple

import peerload
from peerload.cli.doctor.facts import FAIL, OK, SKIP, WARN, DoctorInput, Finding, needs_agent
from peerload.model.text import printable
from peerload.text.format import counted, duration_text

KEY_FILES = ("tls/node.pem", "joining.pem", "invites", "trust", "launcher/launcher.sock")
"""In the state directory: each is its owner's alone, wherever that lies; also the socket by which tasks are started."""
CLUSTER_FILES = ("cluster.toml", "ca.pem", "seal.key", "ca.key")
LAUNCHER_PLACES = {
    "--config": "/etc/peerload/peerload.toml",
    "--config-directory": "/etc/peerload/conf.d",
    "--directory": "/var/lib/peerload-launcher",
    "--sockets": "/run/peerload-launcher",
}
"""What the launcher of all users believes and keeps, unless its flags say otherwise."""
SEAL_AGE_S_MAX = 365 * 86_400.0
KEY_BYTES_DIFFERENT_MIN = 8
"""A key that was drawn has more different bytes."""
FILES_LOOKED_AT_MAX = 20_000
PACKAGES = ("aiomqtt", "cryptography", "msgpack", "msgspec", "paho.mqtt", "psutil", "uvloop")
"""What an agent loads that is not its own."""
LOG_BYTES_MAX = 1 << 20
NAMED_MAX = 3
PLAIN_CONTROLS = "\n\t"


class Fault(NamedTuple):
    """Why a path is not its owner's alone, and what mends that."""

    says: str
    fix: str


def owner_of(facts: DoctorInput) -> int:
    """The user of the agent, or of one that would be started."""
    return int(facts.security.get("user_id", facts.user_id))


def exposed(path: Path, owner: int, others: int = 0o077) -> Fault | None:
    """Why this is not its owner's alone; None if it is, or is not there. others: the bits that are not to be set."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    quoted = shlex.quote(str(path))
    if stat.S_ISLNK(status.st_mode):
        return Fault(f"{path}: it is a link", f"put what it leads to in its place:  ls -l {quoted}")
    if status.st_uid not in (owner, 0):
        says = f"{path}: it is somebody else's (uid {status.st_uid})"
        return Fault(says, f"look at what is in it, then as root:  chown {owner} {quoted}")
    if not status.st_mode & others:
        return None
    says = f"{path}: others may {'change' if status.st_mode & others & 0o022 else 'read'} it"
    return Fault(says, f"chmod {'go=' if others & 0o055 else 'go-w'} {quoted}")


def replaceable(path: Path, owner: int) -> Fault | None:
    """The first directory above in which somebody else may put another in its place, and why; None if there is none."""
    for above in Path(os.path.realpath(path)).parents:
        status, quoted = above.stat(), shlex.quote(str(above))
        if status.st_uid not in (owner, 0):
            says = f"{path}: {above} is somebody else's (uid {status.st_uid})"
            return Fault(says, f"keep it elsewhere, or as root:  chown {owner} {quoted}")
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            return Fault(f"{path}: others may put another in its place in {above}", f"chmod go-w {quoted}")
    return None


def state(facts: DoctorInput) -> Finding:
    """The state directory and the keys in it."""
    place, owner = facts.state, owner_of(facts)
    if place is None or not os.path.lexists(place):
        return Finding(SKIP, "no state directory yet")
    fault = exposed(place, owner) or replaceable(place, owner)
    for name in KEY_FILES:
        fault = fault or exposed(place / name, owner)
    if fault:
        return Finding(FAIL, *fault)
    return Finding(OK, f"{place} and the keys in it are uid {owner}'s alone")


def cluster_directory(facts: DoctorInput) -> Path | None:
    """Of the agent that runs, or else of one that would be started."""
    if named := facts.info.get("cluster_directory"):
        return Path(str(named))
    return facts.cluster.directory if facts.cluster is not None else None


def cluster(facts: DoctorInput) -> Finding:
    """The cluster's directory."""
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
    return Finding(OK, f"{place} is uid {owner}'s alone")


def ca_key(facts: DoctorInput) -> Finding:
    """Whether the CA's key lies where tasks of others run."""
    place = cluster_directory(facts)
    if place is None:
        return Finding(SKIP, "no cluster yet")
    try:
        (place / "ca.key").lstat()
    except FileNotFoundError:
        return Finding(OK, "the CA's key is not on this node")
    except OSError as error:
        return Finding(SKIP, f"{place} cannot be looked into: {error.strerror}; ask as its owner")
    if fault := exposed(place / "ca.key", owner_of(facts)):
        return Finding(FAIL, *fault)
    runs = facts.security.get("mode", "user") == "user" and facts.info.get("slots") != 0
    if runs and not facts.info.get("cluster_local", True):
        says = "the CA's key is here, and a task of any member may read it: tasks run as the key's owner"
        return Finding(WARN, says, "have it on a node that runs nothing for others:  peerload up --slots 0")
    return Finding(OK, "the CA's key is here, 0600")


@needs_agent
def policy(facts: DoctorInput) -> Finding:
    """Whether anybody but root (in user mode: the agent's user) can say as whom tasks run and what the agent believes, or
    gets at what the launcher of all users keeps."""
    if facts.security["mode"] != "system":
        return _own_settings(facts)
    words = facts.text(f"/proc/{facts.info.get('launcher_pid') or 0}/cmdline").split("\0")
    given = {**LAUNCHER_PLACES, **{flag: word for flag, word in itertools.pairwise(words) if flag in LAUNCHER_PLACES}}
    config = Path(given["--config"])
    drop_ins = sorted(Path(given["--config-directory"]).glob("*.toml"))
    for path in (
        config,
        Path(given["--config-directory"]),
        *drop_ins,
        *map(Path, (given["--directory"], given["--sockets"])),
    ):
        if fault := exposed(path, 0, 0o022) or (replaceable(path, 0) if path.exists() else None):
            return Finding(FAIL, *fault)
    if fault := exposed(Path(given["--sockets"]) / "launcher.sock", owner_of(facts)):
        return Finding(FAIL, *fault)
    return Finding(OK, f"only root can change {config} and the places of the launcher")


def _own_settings(facts: DoctorInput) -> Finding:
    from peerload.model.errors import ConfigError

    words = facts.text(f"/proc/{facts.info['pid']}/cmdline").split("\0")
    named = next((after for word, after in itertools.pairwise(words) if word == "--config"), None)
    try:
        paths = facts.settings_files(named)
    except ConfigError as error:
        return Finding(SKIP, str(error))
    for path in paths:
        if fault := exposed(path.resolve(), owner_of(facts), 0o022) or replaceable(path, owner_of(facts)):
            return Finding(FAIL, *fault)
    return Finding(OK, f"its settings ({counted(len(paths), 'file')}) can be changed by its user alone")


@needs_agent
def invitations(facts: DoctorInput) -> Finding:
    """Whether what is kept of invitations lets anybody in."""
    place = facts.state
    fault = exposed(place / "invites", owner_of(facts)) if place is not None else None
    if fault:
        return Finding(FAIL, *fault)
    number = int(facts.security.get("invitations", 0))
    return Finding(OK, f"{counted(number, 'invitation')} open here; no secret of them is kept")


@needs_agent
def revocations(facts: DoctorInput) -> Finding:
    """Whether this node was shut out, and who else is."""
    if facts.checkup.get("revoked"):
        return Finding(FAIL, "this node was shut out of the cluster", "where the cluster is:  peerload invite")
    shut_out = facts.info.get("revoked") or []
    return Finding(OK, f"{counted(len(shut_out), 'node')} shut out, and this one is not")


@needs_agent
def seal_key(facts: DoctorInput) -> Finding:
    """How old the key of gossip and MQTT is, and whether anybody drew it."""
    place = cluster_directory(facts)
    key = _text(place / "seal.key").strip() if place is not None else ""
    if key and len(set(bytes.fromhex(key))) < KEY_BYTES_DIFFERENT_MIN:
        return Finding(FAIL, "the key of gossip and MQTT was made up, not drawn", "peerload cluster rotate")
    since = facts.security.get("sealed_since") or _made_at(place)
    if since is None:
        return Finding(SKIP, "how old the key is cannot be told")
    age_s = facts.now - float(since)
    if age_s > SEAL_AGE_S_MAX:
        says = f"the key of gossip and MQTT is {duration_text(age_s)} old"
        return Finding(WARN, says, "on a node with the CA's key:  peerload cluster rotate")
    return Finding(OK, f"key {facts.security.get('seal_number', 0)} seals, {duration_text(max(age_s, 0.0))} old")


def _made_at(place: Path | None) -> float | None:
    try:
        return (place / "seal.key").stat().st_mtime if place is not None else None
    except OSError:
        return None


@needs_agent
def alone_stays_alone(facts: DoctorInput) -> Finding:
    """Whether a node without a cluster can be reached from elsewhere."""
    host = str(facts.info.get("listen", "")).rpartition(":")[0].strip("[]")
    if not facts.info.get("cluster_local"):
        return Finding(OK, f"the cluster {facts.info.get('cluster')} has a key of its own")
    if host.startswith("127.") or host in ("::1", "localhost"):
        return Finding(OK, "no cluster: the agent speaks to this machine alone")
    return Finding(FAIL, f"no cluster, and it listens at {host}", "peerload down; peerload up")


@needs_agent
def spool(facts: DoctorInput) -> Finding:
    """Whether only plain files lie where output of tasks is kept."""
    top = facts.state / "spool" if facts.state is not None else None
    if top is None or not top.is_dir():
        return Finding(SKIP, "no output is kept yet")
    looked_at = 0
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            looked_at += 1
            if looked_at > FILES_LOOKED_AT_MAX:
                return Finding(OK, f"the first {FILES_LOOKED_AT_MAX} files of {top} are plain")
            try:
                status = Path(directory, name).lstat()
            except OSError:
                continue  # it went meanwhile
            odd = not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))
            if odd or status.st_mode & (stat.S_ISUID | stat.S_ISGID) or (status.st_nlink > 1 and name in files):
                says = f"{directory}/{name} is no plain file of its own (a link, a device, or set-uid)"
                return Finding(FAIL, says, f"ls -l {shlex.quote(f'{directory}/{name}')}        rm it")
    return Finding(OK, f"{counted(looked_at, 'plain file')} in {top}")


def log_is_plain(facts: DoctorInput) -> Finding:
    """Whether anything in the log could move a terminal's cursor."""
    told = _log(facts)
    if not told:
        return Finding(SKIP, "the agent has no log of its own here")
    odd = sorted({character for character in told if not character.isprintable() and character not in PLAIN_CONTROLS})
    if odd:
        says = f"the log holds {', '.join(printable(one) for one in odd[:NAMED_MAX])} as they are"
        return Finding(FAIL, says, "look at it with:  cat -v        and please report it")
    return Finding(OK, f"{counted(told.count(chr(10)), 'line')} of the log hold text alone")


def secrets_in_logs(facts: DoctorInput) -> Finding:
    """Whether a key or a token was written down."""
    told = _log(facts)
    if not told:
        return Finding(SKIP, "the agent has no log of its own here")
    found = [what for what, secret in secrets(facts).items() if secret in told]
    if found:
        return Finding(FAIL, f"the log holds {found[0]}", f"change it, then:  rm {facts.state}/agent.log*")
    return Finding(OK, "no key and no token is in the log")


def secrets(facts: DoctorInput) -> dict[str, str]:
    """What must not be found anywhere, by what it is."""
    found = {"a key": "PRIVATE KEY-----", "a token": "plj1-"}
    place = cluster_directory(facts)
    if place is not None and (seal := _text(place / "seal.key").strip()):
        found["the key of gossip and MQTT"] = seal
    return found


def _log(facts: DoctorInput) -> str:
    """The end of the agent's and of the launcher's log."""
    if facts.state is None:
        return ""
    return "".join(_text(facts.state / name, LOG_BYTES_MAX) for name in ("agent.log", "launcher/launcher.log"))


def _text(path: Path, bytes_max: int = 1 << 16) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - bytes_max))
            return file.read(bytes_max).decode("utf-8", "replace")
    except OSError:
        return ""


def code(facts: DoctorInput) -> Finding:
    """Whether somebody else can change what the agent runs: peerload, or what it stands on."""
    owner, looked_at = owner_of(facts), 0
    for top in (Path(peerload.__file__).parent, *_stood_on()):
        for directory, _, files in os.walk(top):
            for path in (Path(directory), *(Path(directory, name) for name in files if name.endswith((".py", ".so")))):
                real = Path(os.path.realpath(path))
                looked_at += 1
                if fault := exposed(real, owner, 0o022):
                    return Finding(FAIL, *fault)
            if looked_at > FILES_LOOKED_AT_MAX:
                break
        if fault := replaceable(top, owner):
            return Finding(FAIL, fault.says, "install peerload where only you can write")
    says = f"{counted(looked_at, 'file')} of peerload and what it stands on can be changed by their owner alone"
    return Finding(OK, says)


def _stood_on() -> list[Path]:
    """Where the packages lie that the agent loads."""
    from importlib.util import find_spec

    found = (find_spec(name) for name in PACKAGES)
    return [Path(spec.origin).parent for spec in found if spec is not None and spec.origin]
