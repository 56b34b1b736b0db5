"""What the cluster's CA has said since it was made: who is shut out, and which keys seal. STATE/trust keeps it.

Each word is signed by the CA and stands for itself, so any member may pass it on and none can forge, change or undo one:
the set only grows, until a word means nothing any more. Nothing is taken on trust from whoever brought it. What is not
signed is the wrapping of word and signature: it has one form, so that nobody can make many words of one.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from msgspec import Meta

from peerload.model.errors import BadRequest, ConfigError
from peerload.model.messages import SIGNED_MAX
from peerload.model.resources import NodeName
from peerload.security import certificates
from peerload.security.node_identity_file import write_private
from peerload.wire.seal import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from peerload.security.certificates import CertificateInfo
    from peerload.security.cluster_dir import ClusterDirectory

REVOCATIONS_MAX = SIGNED_MAX - 4
KEYS_KEPT_MAX = 2
"""Of the keys that came after the one in the cluster's directory."""
FILE_BYTES_MAX = 1 << 20
SPREAD_S = 5.0
"""A new key opens at once, and seals after this: by then all that can be reached have it."""
NEWS_S = 60.0
"""A key that was made so long ago is no news: it seals at once."""
OVERLAP_S = 3600.0
"""So long after a new key the one before it still opens."""
OVERLAP_REVOKED_S = 30.0
"""The same where the key is changed because somebody who has it was shut out."""
CLOCKS_S = 3600.0
"""By so much the clocks of two nodes with the CA's key may differ, or one of them hear late of a revocation: what it makes
meanwhile for who was shut out is covered, too. Who is let in anew gets a certificate that says it was made after that."""
LET_IN_S = 1.0
"""Who is let in anew has a certificate that says it was made so long after what is covered."""
CLOCK_BACK_S_MAX = 60.0
"""A key that came so much later than it is now says that the clock was set back: it counts as come long ago. What is less
than that only makes the key before it last so much longer."""
ENDS_AFTER_S = 2 * (certificates.NODE_LIFE + certificates.SKEW).total_seconds()
"""A revocation so old is dropped: every certificate that it was about has ended."""
FINGERPRINTS_MAX = 8
DIGEST_BYTES = 16
_CONTEXT = b"peerload trust 1\0"

_log = logging.getLogger("peerload.trust")

Moment = Annotated[float, Meta(ge=0.0, le=1e12)]


class Revoked(msgspec.Struct, frozen=True, tag="revoked", array_like=True):
    """No certificate of this node that was made up to ``at`` (Unix s) counts, nor any of these keys (SHA-256)."""

    cluster: str
    node: NodeName
    at: Moment
    keys: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=FINGERPRINTS_MAX)] = ()


class SealKey(msgspec.Struct, frozen=True, tag="seal", array_like=True):
    """From now on this key seals; the one before opens for overlap_s more. The greatest number counts."""

    cluster: str
    number: Annotated[int, Meta(ge=1, le=1 << 40)]
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    at: Moment
    overlap_s: Annotated[float, Meta(ge=0.0, le=1e9)] = OVERLAP_S

    def __repr__(self) -> str:
        return f"SealKey({self.number})"


Word = Revoked | SealKey


class _Signed(msgspec.Struct, frozen=True, array_like=True):
    body: Annotated[bytes, Meta(max_length=900)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


_signed = msgspec.msgpack.Decoder(_Signed)
_words: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)
_file = msgspec.msgpack.Decoder(tuple[tuple[bytes, float], ...])


class Trust:
    """Of one agent. ``path``: of its file. Raises ConfigError if that cannot be read."""

    def __init__(self, cluster: ClusterDirectory, path: Path) -> None:
        self._cluster = cluster
        self._path = path
        self._ca = certificates.ca_key_of(cluster.authority)
        self._held: dict[bytes, tuple[Word, float]] = {}
        self._admitted: dict[str, str] = {}
        try:
            with path.open("rb") as file:
                kept = _file.decode(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            kept = ()
        except OSError as error:
            raise ConfigError("state", f"{path} cannot be read", why=str(error.strerror)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _log.warning("%s is damaged; other members are asked for what was in it", path)
            kept = ()
        for raw, at in kept:
            word = self._verified(raw)
            if word is not None:  # else another cluster's: this node was of that one before
                self._held[raw] = (word, at)

    def read(self) -> Trust:
        """What the file says now. Raises ConfigError."""
        return Trust(self._cluster, self._path)

    # -- what is held --------------------------------------------------------------------------------------------------

    @property
    def signed(self) -> tuple[bytes, ...]:
        """All of it, as it is passed on."""
        return tuple(sorted(self._held))

    @property
    def signed_revocations(self) -> tuple[bytes, ...]:
        """Those of it that shut somebody out, the newest first."""
        found = [(word.at, raw) for raw, (word, _) in self._held.items() if isinstance(word, Revoked)]
        return tuple(raw for _, raw in sorted(found, reverse=True))

    @property
    def digest(self) -> bytes:
        """Differs if anything does; empty if there is nothing."""
        return hashlib.sha256(b"".join(self.signed)).digest()[:DIGEST_BYTES] if self._held else b""

    @property
    def revocations(self) -> list[Revoked]:
        """Who is shut out."""
        return [word for word, _ in self._held.values() if isinstance(word, Revoked)]

    def refuses(self, facts: CertificateInfo) -> bool:
        """Whether this certificate was revoked."""
        return any(
            facts.key in word.keys or (facts.name == word.node and facts.issued_at.timestamp() <= word.at)
            for word in self.revocations
        )

    def was_revoked(self, node: str) -> bool:
        """Whether anybody of that name was ever shut out, though another may be called so now."""
        return any(word.node == node for word in self.revocations)

    def admit(self, node: str, boot: str) -> None:
        """Note that this start of a node has proven, over a link, a certificate that counts."""
        if self.was_revoked(node):
            self._admitted[node] = boot

    def withdraw(self, node: str) -> None:
        """Take back what `admit` has noted: the node was revoked again."""
        self._admitted.pop(node, None)

    def admits(self, node: str, boot: str) -> bool:
        """True if datagrams and broker messages of this start of a node count. A seal proves only that a member has sent
        them: of a name that was revoked they count after `admit` alone."""
        return not self.was_revoked(node) or self._admitted.get(node) == boot

    def is_out(self, node: str) -> bool:
        """True if the name was revoked, and no start of it was admitted since."""
        return self.was_revoked(node) and node not in self._admitted

    def revoked_at(self, node: str) -> float:
        """When anybody of that name was last shut out (Unix s); 0: never."""
        return max((word.at - CLOCKS_S for word in self.revocations if word.node == node), default=0.0)

    def revoked_nodes(self) -> tuple[tuple[str, float], ...]:
        """Each node that was ever shut out, and when it last was (Unix s)."""
        return tuple((node, self.revoked_at(node)) for node in sorted({word.node for word in self.revocations}))

    def certified_at(self, node: str, now: datetime) -> datetime:
        """When a certificate for who is called so says that it was made: now, or when none of those that were revoked can
        have been."""
        covered = self._covered(node)
        return max(now, datetime.fromtimestamp(covered + LET_IN_S, UTC)) if covered else now

    def _covered(self, node: str) -> float:
        """Certificates of that name that were made up to then (Unix s) do not count; 0: all do."""
        return max((word.at for word in self.revocations if word.node == node), default=0.0)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _seals(self) -> list[tuple[SealKey, float]]:
        """The newest first."""
        found = [(word, at) for word, at in self._held.values() if isinstance(word, SealKey)]
        return sorted(found, key=lambda one: (one[0].number, one[0].key), reverse=True)

    def keys(self, now: float) -> tuple[bytes, ...]:
        """With which is opened what others have sealed; the first is the one to seal with."""
        seals = self._seals()
        if not seals:
            return (self._cluster.key,)
        (newest, at), *rest = seals
        before = rest[0][0].key if rest else self._cluster.key
        if now >= at + newest.overlap_s or now < at - CLOCK_BACK_S_MAX or before == newest.key:
            return (newest.key,)
        return (newest.key, before) if now >= self._seals_from(newest, at) else (before, newest.key)

    @staticmethod
    def _seals_from(key: SealKey, received_at: float) -> float:
        return received_at + (SPREAD_S if received_at - key.at < NEWS_S else 0.0)

    def changes_at(self, now: float) -> float | None:
        """When `keys` will be others than now; None if never."""
        seals = self._seals()
        if not seals:
            return None
        newest, at = seals[0]
        return min((t for t in (self._seals_from(newest, at), at + newest.overlap_s) if t > now), default=None)

    @property
    def newest_key(self) -> bytes:
        """What a newcomer seals with: all members have it, or are about to."""
        seals = self._seals()
        return seals[0][0].key if seals else self._cluster.key

    @property
    def newest(self) -> SealKey | None:
        """The word by which it came; None: it is the one that the cluster was made with."""
        seals = self._seals()
        return seals[0][0] if seals else None

    @property
    def number(self) -> int:
        """Of the newest key; 0: the one that the cluster was made with."""
        seals = self._seals()
        return seals[0][0].number if seals else 0

    @property
    def sealed_since(self) -> float | None:
        """When the newest key was made (Unix s); None: with the cluster."""
        seals = self._seals()
        return seals[0][0].at if seals else None

    # -- what is new ---------------------------------------------------------------------------------------------------

    def revoke(self, node: str, keys: Iterable[str], now: float, *, key: bytes = b"") -> bytes:
        """Shut a node out → the signed word; ``key``: to seal with from now on. Both are on disk, or neither is. Raises
        BadRequest if there are too many; OSError if it cannot be kept."""
        if sum(now - word.at < ENDS_AFTER_S for word in self.revocations) >= REVOCATIONS_MAX:
            why = f"at most {REVOCATIONS_MAX} within {ENDS_AFTER_S / 86_400:.0f} days"
            raise BadRequest("too many were revoked", why=why, hint="make a new cluster:  peerload cluster init DIR")
        at = max(now + CLOCKS_S, self._covered(node) + LET_IN_S)  # also who was let in anew since
        made = [self._said(Revoked(self._cluster.id, node, at, tuple(keys)[:FINGERPRINTS_MAX]))]
        if key:
            made.append(self._said(SealKey(self._cluster.id, self.number + 1, key, now, OVERLAP_REVOKED_S)))
        self.take(made, now)
        return made[0]

    def rotate(self, key: bytes, now: float, overlap_s: float) -> bytes:
        """A new key to seal with → the signed word. Raises OSError if it cannot be kept."""
        made = self._said(SealKey(self._cluster.id, self.number + 1, key, now, overlap_s))
        self.take((made,), now)
        return made

    def _said(self, word: Word) -> bytes:
        body = msgspec.msgpack.encode(word)
        signature = certificates.private_key(self._cluster.authority.key).sign(_CONTEXT + body)
        return msgspec.msgpack.encode(_Signed(body, signature))

    def take(self, signed: Iterable[bytes], now: float) -> list[tuple[bytes, Word]]:
        """What of this is new, when it is on disk. Raises BadRequest if anything is not signed by the CA (nothing of it
        is taken then); OSError if it cannot be kept."""
        found: dict[bytes, tuple[Word, float]] = {}
        for raw in signed:
            if raw in self._held:
                continue
            word = self._verified(raw)
            if word is None:
                raise BadRequest("not a word of this cluster's CA")
            found[raw] = (word, now)
        held = self._held | found
        kept = self._worth_keeping(held, now)
        if kept != self._held:
            write_private(self._path, msgspec.msgpack.encode(tuple((raw, at) for raw, (_, at) in kept.items())))
            self._held = kept
        return [(raw, word) for raw, (word, _) in found.items() if raw in kept]

    @staticmethod
    def _worth_keeping(held: dict[bytes, tuple[Word, float]], now: float) -> dict[bytes, tuple[Word, float]]:
        """Without revocations of certificates that have all ended, and keys that were replaced twice. By this clock and by
        that of the newest word: where one of them is a year ahead for a moment, nobody is let in again by that."""
        now = min(now, max((word.at for word, _ in held.values()), default=now))
        keys = [(word.number, word.key) for word, _ in held.values() if isinstance(word, SealKey)]
        newest = set(sorted(keys, reverse=True)[:KEYS_KEPT_MAX])
        return {
            raw: (word, at)
            for raw, (word, at) in held.items()
            if ((word.number, word.key) in newest if isinstance(word, SealKey) else now - word.at < ENDS_AFTER_S)
        }

    def _verified(self, raw: bytes) -> Word | None:
        """What the CA has said; None if it has not."""
        try:
            signed = _signed.decode(raw)
            if msgspec.msgpack.encode(signed) != raw:  # else one word could be put into any number of wrappings
                return None
            self._ca.verify(signed.signature, _CONTEXT + signed.body)
            word = _words.decode(signed.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidSignature):
            return None
        return word if word.cluster == self._cluster.id else None


def keep(path: Path, signed: Iterable[bytes]) -> None:
    """What a newcomer was told, for its agent's first start: it counts from long ago. Raises OSError."""
    write_private(path, msgspec.msgpack.encode(tuple((raw, 0.0) for raw in signed)))
