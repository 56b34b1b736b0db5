"""Sealing: encryption and authentication of messages that travel where others may read and write (datagrams, a broker).

Only holders of the cluster's key can seal and open, and each sealed message is accepted once (rule J5). A sealed
message is

    version (1 byte, 1) · length and bytes of src · length and bytes of src_boot · counter (8 bytes) · ciphertext and tag

with ChaCha20-Poly1305 (RFC 8439). Each start of each sender has a separate key: HKDF-SHA256 (RFC 5869) over the
cluster's key, salted with the cluster's id, for (purpose, src, src_boot). So the counter alone is the nonce: it
never repeats under one key, because boot ids are never reused. While a key is being changed, two keys open
(`Sealer.use`); both are tried. The header and the caller's ``aad`` are authenticated, too: the topic, or the name of
the receiving node, so that a message is invalid anywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from peerload.model.bounded import BoundedDict
from peerload.model.errors import NotAuthentic, Replayed

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 1
KEY_BYTES = 32
TAG_BYTES = 16
COUNTER_BYTES = 8
NONCE_BYTES = 12
NAME_BYTES_MAX = 40
BOOT_BYTES_MAX = 64
WINDOW_MESSAGES = 4096
"""A message this far behind the newest of its sender counts as replayed."""
SENDERS_MAX = 4096
"""Starts of agents whose counters are remembered; the longest silent one is forgotten first. An old message of a
forgotten start opens again, so the content must show its age."""


class _Sender:
    """Start of one sender: its names, its keys, and which of its last WINDOW_MESSAGES counters were seen (bit i: newest - i)."""

    __slots__ = ("boot", "ciphers", "newest", "node", "seen")

    def __init__(self, names: bytes) -> None:
        """names: the header before the counter. Raises NotAuthentic."""
        src, boot = names[2 : 2 + names[1]], names[3 + names[1] :]
        if not 0 < len(src) <= NAME_BYTES_MAX or not 0 < len(boot) <= BOOT_BYTES_MAX:
            raise NotAuthentic("not a sealed message", why="its header is malformed")
        try:
            self.node, self.boot = src.decode(), boot.decode()
        except UnicodeDecodeError:
            raise NotAuthentic("not a sealed message", why="its sender has no name") from None
        self.ciphers: dict[bytes, ChaCha20Poly1305] = {}
        self.newest = -1
        self.seen = 0

    def is_new(self, counter: int) -> bool:
        """True if this counter was not seen yet, and is inside the window."""
        behind = self.newest - counter
        return behind < 0 or (behind < WINDOW_MESSAGES and not self.seen >> behind & 1)

    def add(self, counter: int) -> None:
        ahead = counter - self.newest
        if ahead > 0:
            self.seen = (self.seen << ahead) & ((1 << WINDOW_MESSAGES) - 1) if ahead < WINDOW_MESSAGES else 0
            self.newest = counter
            ahead = 0
        self.seen |= 1 << -ahead


class Sealer:
    """Sealer for one start of one node, and opener of messages that other nodes of the cluster sealed for the same
    purpose.

    key: KEY_BYTES random bytes, the cluster's; cluster: its id; node, boot: the sender; purpose: messages of one
    purpose do not open as another's. There must be one sealer for each purpose in a start of an agent: two would use
    the same counters under the same key.
    """

    def __init__(self, key: bytes, cluster: str, node: str, boot: str, *, purpose: str = "gossip") -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; it has {KEY_BYTES}")
        if not 0 < len(node.encode()) <= NAME_BYTES_MAX or not 0 < len(boot.encode()) <= BOOT_BYTES_MAX:
            raise ValueError(f"{node!r} of {boot!r} cannot be a sender")
        self._keys: tuple[bytes, ...] = (key,)
        self._salt = cluster.encode()
        self._purpose = purpose.encode()
        self._counter = 0
        self._own = (node, boot)
        self._header = bytes((VERSION,)) + _prefixed(node.encode()) + _prefixed(boot.encode())
        self._cipher = self._derived(key, node, boot)
        self._senders: BoundedDict[bytes, _Sender] = BoundedDict(SENDERS_MAX)
        """By the header before the counter in their messages."""

    def __repr__(self) -> str:
        return f"Sealer(node={self._own[0]!r}, purpose={self._purpose.decode()!r})"

    @property
    def node(self) -> str:
        return self._own[0]

    def use(self, keys: Sequence[bytes]) -> None:
        """Seal with the first of these keys, and open with all of them. The counter continues across keys."""
        if tuple(keys) == self._keys:
            return
        self._keys = tuple(keys)
        self._cipher = self._derived(keys[0], *self._own)
        for sender in self._senders.values():
            sender.ciphers = {key: cipher for key, cipher in sender.ciphers.items() if key in self._keys}

    def seal(self, plaintext: bytes, aad: bytes = b"") -> bytes:
        """Seal a message. ``aad`` is not sent: the receiver must have the same."""
        counter = self._counter.to_bytes(COUNTER_BYTES, "big")
        self._counter += 1
        header = self._header + counter
        return header + self._cipher.encrypt(_nonce(counter), plaintext, header + aad)

    def open(self, datagram: bytes, aad: bytes = b"") -> tuple[str, str, bytes]:
        """→ (src, src_boot, plaintext), once for each sealed message.

        Raises NotAuthentic for any invalid bytes; Replayed if it was opened before, is too old to check, or is our own.
        """
        names_bytes = _names_bytes(datagram)
        names, counter = datagram[:names_bytes], datagram[names_bytes : names_bytes + COUNTER_BYTES]
        if names == self._header:
            raise Replayed("our own sealed message came back")
        known = self._senders.get(names)
        sender = known or _Sender(names)
        number = int.from_bytes(counter, "big")
        if not sender.is_new(number):
            raise Replayed("a sealed message came twice or late")
        sealed, header = datagram[names_bytes + COUNTER_BYTES :], names + counter + aad
        for key in self._keys:
            cipher = sender.ciphers.get(key) or self._derived(key, sender.node, sender.boot)
            try:
                plaintext = cipher.decrypt(_nonce(counter), sealed, header)
            except InvalidTag:
                continue
            sender.ciphers[key] = cipher
            break
        else:
            raise NotAuthentic("a sealed message does not open", why="another key, or it was changed")
        sender.add(number)  # only now: a forged counter must not block later ones
        if known is None:
            self._senders[names] = sender
        else:
            self._senders.move_to_end(names)
        return sender.node, sender.boot, plaintext

    def _derived(self, key: bytes, node: str, boot: str) -> ChaCha20Poly1305:
        parts = self._purpose, node.encode(), boot.encode()
        info = b"peerload seal" + bytes((VERSION,)) + b"".join(map(_prefixed, parts))
        return ChaCha20Poly1305(HKDF(SHA256(), KEY_BYTES, self._salt, info).derive(key))


def _prefixed(part: bytes) -> bytes:
    return bytes((len(part),)) + part


def _nonce(counter: bytes) -> bytes:
    return counter.rjust(NONCE_BYTES, b"\0")


def _names_bytes(datagram: bytes) -> int:
    """The bytes before the counter: version and names. Raises NotAuthentic."""
    if not datagram or datagram[0] != VERSION:
        raise NotAuthentic("not a sealed message", why=f"it is not of version {VERSION}")
    try:
        boot_place = 2 + datagram[1]
        names_bytes = boot_place + 1 + datagram[boot_place]
    except IndexError:
        raise NotAuthentic("not a sealed message", why="it is cut off") from None
    if len(datagram) < names_bytes + COUNTER_BYTES + TAG_BYTES:
        raise NotAuthentic("not a sealed message", why="it is cut off")
    return names_bytes
