"""Address file: the addresses of members and of this node, kept across restarts.

An agent that was killed finds its peers again, and they find it at its last port, although no port was configured. The file
is a hint: one that is lost or wrong costs time, never a task.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

from peerload.model.messages import Identity
from peerload.security.address import PORT_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger("peerload.peer")

FILE_BYTES_MAX = 1 << 20
PEERS_KEPT_MAX = 1000
PRIVATE = 0o600


class _Content(msgspec.Struct, frozen=True):
    listen: str = ""
    peers: tuple[Identity, ...] = ()


class AddressFile:
    """``listen``: HOST:PORT of the last start, "" if there was none; ``peers``: by name, those with an address."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = _read(path)
        self.listen = content.listen
        self.peers = {identity.node: identity for identity in content.peers}

    def port_of(self, host: str) -> int:
        """The port of the last start at this host; 0 if there was none."""
        last_host, _, port = self.listen.rpartition(":")
        is_port = port.isascii() and port.isdigit() and len(port) <= len(str(PORT_MAX)) and int(port) <= PORT_MAX
        return int(port) if last_host.strip("[]") == host and is_port else 0

    def set_listen(self, address: str) -> None:
        """Keep the address of this node."""
        if address != self.listen:
            self.listen = address
            self._write()

    def set_peers(self, identities: Sequence[Identity]) -> None:
        """Keep these peers, at most the last PEERS_KEPT_MAX."""
        peers = {identity.node: identity for identity in identities[-PEERS_KEPT_MAX:]}
        if peers != self.peers:
            self.peers = peers
            self._write()

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        try:
            with open(part, "wb", opener=_private) as file:
                file.write(msgspec.msgpack.encode(_Content(self.listen, tuple(self.peers.values()))))
            part.chmod(PRIVATE)  # it may be a leftover
            part.replace(self._path)
        except OSError as error:
            log.warning("cannot write the address file: path=%s error=%s", self._path, error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE)


def _read(path: Path) -> _Content:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > FILE_BYTES_MAX:
                return _Content()
            return msgspec.msgpack.decode(file.read(), type=_Content)
    except FileNotFoundError:
        return _Content()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("cannot read the address file; its addresses are lost: path=%s error=%s", path, error)
        return _Content()
