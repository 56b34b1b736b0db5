"""Where peers were last reached and where this agent listened, kept across restarts.

An agent that was killed finds its peers again, and they find it at the port it had, although nobody was told a port on
the command line. It is advice: a file that is lost or wrong costs time, never a task.
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


class _Kept(msgspec.Struct, frozen=True):
    """What the file holds."""

    listen: str = ""
    peers: tuple[Identity, ...] = ()


class Addresses:
    """``listen``: HOST:PORT of the last start, "" if there was none; ``peers``: by name, those that can be dialled."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = _read(path)
        self.listen = kept.listen
        self.peers = {identity.node: identity for identity in kept.peers}

    def port_of(self, host: str) -> int:
        """The port of the last start on this host; 0 if there was none."""
        last_host, _, port = self.listen.rpartition(":")
        is_port = port.isascii() and port.isdigit() and len(port) <= len(str(PORT_MAX)) and int(port) <= PORT_MAX
        return int(port) if last_host.strip("[]") == host and is_port else 0

    def keep_listen(self, address: str) -> None:
        """Where this agent listens now."""
        if address != self.listen:
            self.listen = address
            self._write()

    def keep_only(self, identities: Sequence[Identity]) -> None:
        """These are the peers, and where they can be dialled; if they are too many, the last of them."""
        peers = {identity.node: identity for identity in identities[-PEERS_KEPT_MAX:]}
        if peers != self.peers:
            self.peers = peers
            self._write()

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        try:
            with open(part, "wb", opener=_private) as file:
                file.write(msgspec.msgpack.encode(_Kept(self.listen, tuple(self.peers.values()))))
            part.chmod(PRIVATE)  # it may be a leftover
            part.replace(self._path)
        except OSError as error:
            log.warning("addresses of peers cannot be kept: %s", error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE)


def _read(path: Path) -> _Kept:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > FILE_BYTES_MAX:
                return _Kept()
            return msgspec.msgpack.decode(file.read(), type=_Kept)
    except FileNotFoundError:
        return _Kept()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("addresses of peers are forgotten: %s", error)
        return _Kept()
