"""Identity of a directory among machines: the same for all that have it from the same file server, or on the same disk."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

NETWORK_TYPES = frozenset(
    [
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "davfs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.moosefs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
    ]
)
"""File systems whose source names the same files on every machine. 9p and virtiofs do not: each host gives its names."""
_LOCAL = re.compile(rb"[\w.-]*@?(localhost|127\.|\[?::1)")
_ESCAPE = re.compile(rb"\\([0-7]{3})")


def identity_of(directory: bytes) -> str:
    """A digest that is the same where the directory is the same; "" if that cannot be told. It may block in a dead mount."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return identity_in(table, boot, os.path.realpath(directory))
    except OSError:
        return ""


def identity_in(table: bytes, boot: bytes, path: bytes) -> str:
    """As `identity_of`, for a path without links. table: /proc/self/mountinfo; boot: id of this boot of the machine."""
    found: tuple[int, bytes, list[bytes], bytes] | None = None
    for line in table.splitlines():
        mount, _, source = line.partition(b" - ")
        fields, kind = mount.split(b" "), source.split(b" ")
        if len(fields) < 5 or len(kind) < 2:  # noqa: PLR2004 -- proc(5)
            continue
        point = _plain(fields[4]).rstrip(b"/")
        inside = path == point or path.startswith(point + b"/")
        if inside and (found is None or len(point) >= found[0]):  # of two at one place the later one is above
            found = len(point), fields[2], kind, _plain(fields[3]).rstrip(b"/") + path[len(point) :].rstrip(b"/")
    if found is None:
        return ""
    _, device, (kind_of, name, *_), below = found
    if kind_of.decode("latin-1") in NETWORK_TYPES and not _LOCAL.match(name):
        place = [b"network", _plain(name).rstrip(b"/") + below]
    else:
        place = [b"local", boot.strip(), device, below]
    return hashlib.sha256(b"\0".join(place)).hexdigest()[:32]


def _plain(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda octal: bytes([int(octal[1], 8)]), field)
