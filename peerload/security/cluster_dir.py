"""The cluster's directory: whoever has it is a member. Read and verified here, made here, nowhere else.

It holds the certificate of the cluster's own CA, the key that gossip and MQTT are sealed with, and the cluster's name and
id, in files that only their owner can read; and where the node may let others in, the CA's key. An agent for whom none is named or found uses one of
this user's own on this machine, made at first need; with that one it meets no other machine (rule J6).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.errors import BadRequest, ConfigError
from peerload.security import certificates
from peerload.security.certificates import KeyPair
from peerload.security.node_identity_file import write_private
from peerload.wire.seal import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_BYTES_MAX = 64 << 10
FACTS, CA, CA_KEY, SEAL_KEY = "cluster.toml", "ca.pem", "ca.key", "seal.key"
FILES = (FACTS, CA, SEAL_KEY)
"""Those that have to be there."""
SYSTEM_DIRECTORY = Path("/etc/peerload/cluster")
LOCAL_NAME = "local"
FORMAT = 1
ID_BYTES = 16
_NAME = re.compile(r"[a-z0-9-]{1,40}")


class ClusterDirectory(NamedTuple):
    """What a cluster's directory holds. ``is_local``: it never leaves this machine; ``fingerprint``: of its CA.
    ``authority``: the CA; its key is empty where this node cannot let others in."""

    directory: Path
    name: str
    id: str
    authority: KeyPair
    key: bytes
    valid_until: datetime
    fingerprint: str
    is_local: bool = False

    @property
    def is_issuer(self) -> bool:
        """Whether certificates can be made here."""
        return bool(self.authority.key)

    def __repr__(self) -> str:
        return f"Cluster({self.name!r} in {str(self.directory)!r})"


def find(named: str, environment: Mapping[str, str]) -> ClusterDirectory:
    """The cluster of an agent: the directory named, else this user's, else the system's if it is ours, else the local
    one. Raises ConfigError."""
    if named:
        directory = Path(named).expanduser()
        if not directory.is_absolute():
            what = f"{named[:100]!r} is not the whole path of a directory"
            raise ConfigError("cluster", what, hint="make one:  peerload cluster init DIR")
        return read(directory)
    own = own_directory(environment)
    if os.path.lexists(own):
        return read(own)
    if _is_ours(SYSTEM_DIRECTORY):
        return read(SYSTEM_DIRECTORY)
    home = Path(environment.get("HOME", "/"))
    base = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "peerload"
    return _local(base / "local-cluster")


def make(directory: Path, name: str) -> ClusterDirectory:
    """A new cluster in a directory that does not exist yet. Raises BadRequest, and leaves nothing then."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} cannot be a cluster's name", why="a-z, 0-9 and - alone, at most 40", hint="--name lab"
        )
    if os.path.lexists(directory):
        why = "it exists"
        hint = "name another directory: a key that is replaced shuts out every member"
        raise BadRequest(f"no cluster is made in {directory}", why=why, hint=hint)
    now = _now()
    cluster_id = secrets.token_hex(ID_BYTES)
    authority = certificates.make_ca(name, cluster_id, now)
    _lay_down(directory, name, cluster_id, authority, secrets.token_bytes(KEY_BYTES))
    return read(directory)


def install(directory: Path, name: str, cluster_id: str, authority: KeyPair, key: bytes) -> ClusterDirectory:
    """The directory of a cluster that this node was let into; its place is free, or that of the same cluster, to which
    the CA's key is added where that was given. Raises BadRequest or ConfigError, and changes nothing then."""
    if os.path.lexists(directory):
        found = read(directory)
        if found.authority.certificate != authority.certificate:
            raise BadRequest(
                f"{directory} is of another cluster ({found.name})",
                why="a machine is of one cluster at a time, and nothing is written over",
                hint=f"take it out first:  peerload leave ; mv {directory} {directory}.old        or name another place:  --cluster DIR",
            )
        if authority.key and not found.is_issuer:
            try:
                write_private(directory / CA_KEY, authority.key)  # whole, or not at all: a part would be damage
            except OSError as error:
                raise _unusable(directory, str(error.strerror)) from None
        return read(directory)
    _lay_down(directory, name, cluster_id, authority, key)
    return read(directory)


def _lay_down(directory: Path, name: str, cluster_id: str, authority: KeyPair, key: bytes) -> None:
    """Have all files appear at once. Raises BadRequest."""
    contents = {
        FACTS: f'format = {FORMAT}\nname = "{name}"\nid = "{cluster_id}"\n'.encode(),
        CA: authority.certificate,
        CA_KEY: authority.key,
        SEAL_KEY: key.hex().encode() + b"\n",
    }
    part: str | None = None
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent)  # with mode 0700
        for file_name, data in contents.items():
            if data:
                _write(Path(part, file_name), data)
        _sync(Path(part))
        Path(part).rename(directory)
        _sync(directory.parent)
    except OSError as error:
        raise BadRequest(f"no cluster is made in {directory}", why=str(error.strerror)) from None
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)  # gone by now if all went well


def read(directory: Path, *, is_local: bool = False) -> ClusterDirectory:
    """A cluster's directory, verified: its owner, its modes, no links, and that its parts belong together. Raises
    ConfigError."""
    files = _read_files(directory)
    try:
        facts = tomllib.loads(files[FACTS].decode())
        name, cluster_id, kind = str(facts["name"]), str(facts["id"]), facts["format"]
        key = bytes.fromhex(files[SEAL_KEY].decode())
        authority = KeyPair(files[CA], files.get(CA_KEY, b""))
        certified = certificates.ca_facts(authority)
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(directory, f"it is damaged ({type(error).__name__})", _COPY_ANEW) from None
    if kind != FORMAT:
        raise _unusable(directory, f"it is of format {kind!r}", "a newer peerload has made it: upgrade this one")
    if certified.name != cluster_id or len(key) != KEY_BYTES or not _NAME.fullmatch(name):
        raise _unusable(directory, "its files do not belong together", _COPY_ANEW)
    if not is_local:  # there all have the same clock, which may be wrong, and nothing of it leaves the machine
        _check_clock(directory, certified)
    return ClusterDirectory(
        directory, name, cluster_id, authority, key, certified.valid_until, certified.fingerprint, is_local
    )


def own_directory(environment: Mapping[str, str]) -> Path:
    """Where the cluster of this user lies on this machine, if there is one beyond it."""
    home = Path(environment.get("HOME", "/"))
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "peerload" / "cluster"


_COPY_ANEW = "copy the whole directory again from another member"


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _local(directory: Path) -> ClusterDirectory:
    """This user's own cluster on this machine, made by whichever agent comes first."""
    if not os.path.lexists(directory):
        try:
            make(directory, LOCAL_NAME)
        except BadRequest as error:
            if not os.path.lexists(directory):  # else another agent has made it at the same moment
                hint = "have HOME, or XDG_STATE_HOME, name a directory of yours"
                raise ConfigError("cluster", error.what, why=error.why, hint=hint) from None
    return read(directory, is_local=True)


def _check_clock(directory: Path, certified: certificates.CertificateInfo) -> None:
    now = _now()
    if certified.valid_from <= now <= certified.valid_until:
        return
    why = f"from {certified.valid_from:%Y-%m-%d} until {certified.valid_until:%Y-%m-%d}, and here it is {now:%Y-%m-%d}"
    hint = (
        "set this machine's clock" if now < certified.valid_from else "make a new cluster:  peerload cluster init DIR"
    )
    raise ConfigError("cluster", f"the certificate of {directory} is not valid now", why=why, hint=hint)


def _now() -> datetime:
    return datetime.now(UTC)


def _unusable(path: Path, why: str, hint: str = "") -> ConfigError:
    return ConfigError("cluster", f"{path} cannot be used", why=why, hint=hint)


def _read_files(directory: Path) -> dict[str, bytes]:
    """Each file of the directory, opened in a way that follows no link. Raises ConfigError."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _unusable(directory, "it does not exist", f"make it:  peerload cluster init {directory}") from None
    except OSError as error:
        why = "it is a link, or no directory" if directory.is_symlink() or directory.exists() else str(error.strerror)
        raise _unusable(directory, why, "name the directory itself") from None
    try:
        _check_private(directory, os.fstat(handle), is_directory=True)
        there = (*FILES, *([CA_KEY] if os.path.lexists(directory / CA_KEY) else []))
        return {name: _read_file(directory, name, handle) for name in there}
    finally:
        os.close(handle)


def _read_file(directory: Path, name: str, handle: int) -> bytes:
    path = directory / name
    try:
        # Not waiting for whoever would write into a pipe that lies there.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
    except FileNotFoundError:
        raise _unusable(path, "it does not exist", _COPY_ANEW) from None
    except OSError as error:
        raise _unusable(path, "it is a link" if path.is_symlink() else str(error.strerror)) from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_private(path, status, is_directory=False)
        if status.st_size > FILE_BYTES_MAX:
            raise _unusable(path, "it is too large", _COPY_ANEW)
        try:
            return file.read(FILE_BYTES_MAX)
        except OSError as error:
            raise _unusable(path, str(error.strerror)) from None


def _check_private(path: Path, status: os.stat_result, *, is_directory: bool) -> None:
    """What lies there is believed, and whoever reads it is a member: so it is its owner's alone."""
    if not (stat.S_ISDIR if is_directory else stat.S_ISREG)(status.st_mode):
        raise _unusable(path, "it is no directory" if is_directory else "it is no file")
    if status.st_uid != os.getuid():
        raise _unusable(path, "it is somebody else's", f"chown it to the user of this agent (uid {os.getuid()})")
    if status.st_mode & 0o077:
        raise _unusable(path, "others may read or change it", f"chmod -R go= {path if is_directory else path.parent}")


def _sync(directory: Path) -> None:
    """Have the names in it on disk: a copy elsewhere must not outlive the original."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
