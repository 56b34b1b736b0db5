"""Cluster directory: the keys and certificates that make a node a member of a cluster. This module reads, verifies and creates it.

It contains the certificate of the cluster's CA, the seal key of gossip and MQTT, and the cluster's name and id, in files that
only their owner can read; on nodes that admit others, also the CA's key. An agent without a configured directory uses a
local directory of its user on this machine, and connects to no other machine with it (rule J6).
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.errors import BadRequest, ConfigError
from peerload.security import certificates
from peerload.security.certificates import KeyPair
from peerload.security.private_files import make_directory, write_private
from peerload.wire.seal import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_BYTES_MAX = 64 << 10
FACTS, CA, CA_KEY, SEAL_KEY = "cluster.toml", "ca.pem", "ca.key", "seal.key"
FILES = (FACTS, CA, SEAL_KEY)
"""The required files."""
SYSTEM_DIRECTORY = Path("/etc/peerload/cluster")
LOCAL_NAME = "local"
FORMAT = 1
ID_BYTES = 16
_NAME = re.compile(r"[a-z0-9-]{1,40}")


class ClusterDirectory(NamedTuple):
    """Content of a cluster directory. ``is_local``: the cluster exists only on this machine. ``fingerprint``: of the CA's
    certificate. ``authority``: the CA; its key is empty if this node cannot issue certificates."""

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
        """True if this node has the CA's key and can issue certificates."""
        return bool(self.authority.key)

    def __repr__(self) -> str:
        return f"Cluster({self.name!r} in {str(self.directory)!r})"


def find(named: str, environment: Mapping[str, str]) -> ClusterDirectory:
    """The cluster of an agent: the configured directory, else this user's directory, else the system's if this user owns
    it, else the local one. Raises ConfigError."""
    if named:
        directory = Path(named).expanduser()
        if not directory.is_absolute():
            what = f"{named[:100]!r} is not an absolute path"
            raise ConfigError("cluster", what, hint="make one:  peerload cluster init DIR")
        return read(directory)
    own = own_directory(environment)
    if os.path.lexists(own):
        return read(own)
    if is_ours(SYSTEM_DIRECTORY):
        return read(SYSTEM_DIRECTORY)
    home = Path(environment.get("HOME", "/"))
    base = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "peerload"
    return _local(base / "local-cluster")


def make(directory: Path, name: str) -> ClusterDirectory:
    """Create a cluster in a directory that does not exist yet. Raises BadRequest and then leaves no files."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} cannot be a cluster's name", why="only a-z, 0-9 and -, at most 40", hint="--name lab"
        )
    if os.path.lexists(directory):
        why = "it exists"
        hint = "name another directory: replacing the key would lock out every member"
        raise BadRequest(f"no cluster was created in {directory}", why=why, hint=hint)
    now = _now()
    cluster_id = secrets.token_hex(ID_BYTES)
    authority = certificates.make_ca(name, cluster_id, now)
    _make_directory(directory, name, cluster_id, authority, secrets.token_bytes(KEY_BYTES))
    return read(directory)


def install(directory: Path, name: str, cluster_id: str, authority: KeyPair, key: bytes) -> ClusterDirectory:
    """Create the directory of a cluster that this node has joined. If it exists for the same cluster, only add the CA's key,
    if given. Raises BadRequest or ConfigError and then changes nothing."""
    if os.path.lexists(directory):
        found = read(directory)
        if found.authority.certificate != authority.certificate:
            raise BadRequest(
                f"{directory} is of another cluster ({found.name})",
                why="a machine belongs to one cluster at a time, and nothing is overwritten",
                hint=f"leave that cluster first:  peerload leave ; mv {directory} {directory}.old        or name another place:  --cluster DIR",
            )
        if authority.key and not found.is_issuer:
            try:
                write_private(directory / CA_KEY, authority.key)  # atomic, since a partial key would be fatal
            except OSError as error:
                raise _unusable(directory, str(error.strerror)) from None
        return read(directory)
    _make_directory(directory, name, cluster_id, authority, key)
    return read(directory)


def _make_directory(directory: Path, name: str, cluster_id: str, authority: KeyPair, key: bytes) -> None:
    contents = {
        FACTS: f'format = {FORMAT}\nname = "{name}"\nid = "{cluster_id}"\n'.encode(),
        CA: authority.certificate,
        CA_KEY: authority.key,
        SEAL_KEY: key.hex().encode() + b"\n",
    }
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_directory(directory, {file: data for file, data in contents.items() if data})
    except OSError as error:
        raise BadRequest(f"no cluster was created in {directory}", why=str(error.strerror)) from None


def read(directory: Path, *, is_local: bool = False) -> ClusterDirectory:
    """Read a cluster directory, and check owner, modes, links, and the consistency of its files. Raises ConfigError."""
    files = _read_files(directory)
    try:
        facts = tomllib.loads(files[FACTS].decode())
        name, cluster_id, kind = str(facts["name"]), str(facts["id"]), facts["format"]
        key = bytes.fromhex(files[SEAL_KEY].decode())
        authority = KeyPair(files[CA], files.get(CA_KEY, b""))
        certified = certificates.ca_info(authority)
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(directory, f"it is damaged ({type(error).__name__})", _COPY_ANEW) from None
    if kind != FORMAT:
        raise _unusable(directory, f"it has format {kind!r}", "it was made by a newer peerload: upgrade this one")
    if certified.name != cluster_id or len(key) != KEY_BYTES or not _NAME.fullmatch(name):
        raise _unusable(directory, "its files do not match each other", _COPY_ANEW)
    if not is_local:  # the nodes of a local cluster share one clock, which may be wrong
        _check_clock(directory, certified)
    return ClusterDirectory(
        directory, name, cluster_id, authority, key, certified.valid_until, certified.fingerprint, is_local
    )


def own_directory(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HOME", "/"))
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "peerload" / "cluster"


_COPY_ANEW = "copy the whole directory again from another member"


def is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _local(directory: Path) -> ClusterDirectory:
    """The local cluster of this user, which its first agent creates."""
    if not os.path.lexists(directory):
        try:
            make(directory, LOCAL_NAME)
        except BadRequest as error:
            if not os.path.lexists(directory):  # otherwise another agent has just created it
                hint = "set HOME, or XDG_STATE_HOME, to a directory of yours"
                raise ConfigError("cluster", error.what, why=error.why, hint=hint) from None
    return read(directory, is_local=True)


def _check_clock(directory: Path, certified: certificates.CertificateInfo) -> None:
    now = _now()
    if certified.valid_from <= now <= certified.valid_until:
        return
    why = f"from {certified.valid_from:%Y-%m-%d} until {certified.valid_until:%Y-%m-%d}, and here it is {now:%Y-%m-%d}"
    hint = (
        "set this machine's clock"
        if now < certified.valid_from
        else "set this machine's clock; if it is right, make a new cluster:  peerload cluster init DIR"
    )
    raise ConfigError("cluster", f"the certificate of {directory} is not valid now", why=why, hint=hint)


def _now() -> datetime:
    return datetime.now(UTC)


def _unusable(path: Path, why: str, hint: str = "") -> ConfigError:
    return ConfigError("cluster", f"{path} cannot be used", why=why, hint=hint)


def _read_files(directory: Path) -> dict[str, bytes]:
    """Read each file of the directory without following links. Raises ConfigError."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _unusable(directory, "it does not exist", f"make it:  peerload cluster init {directory}") from None
    except OSError as error:
        why = (
            "it is a symbolic link, or not a directory"
            if directory.is_symlink() or directory.exists()
            else str(error.strerror)
        )
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
        # O_NONBLOCK: the path may be a pipe without a writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
    except FileNotFoundError:
        raise _unusable(path, "it does not exist", _COPY_ANEW) from None
    except OSError as error:
        raise _unusable(path, "it is a symbolic link" if path.is_symlink() else str(error.strerror)) from None
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
    """Check that only the owner can read and change a path: its content is trusted, and any reader could act as a member."""
    if not (stat.S_ISDIR if is_directory else stat.S_ISREG)(status.st_mode):
        raise _unusable(path, "it is not a directory" if is_directory else "it is not a regular file")
    if status.st_uid != os.getuid():
        raise _unusable(path, "it belongs to another user", f"chown it to the user of this agent (uid {os.getuid()})")
    if status.st_mode & 0o077:
        raise _unusable(path, "others may read or change it", f"chmod -R go= {path if is_directory else path.parent}")
