"""Revocations and seal keys: the signed statements of the cluster's CA, kept in STATE/trust, and the keyring of this node.

Each statement is signed by the CA and self-contained. So any member may forward it, and none can forge, change or undo
it: the set only grows, except for obsolete statements. The encoding of statement and signature is not signed, but must be
canonical: otherwise one statement could be encoded in many ways."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from msgspec import Meta

from peerload.model.errors import BadRequest, ConfigError
from peerload.model.messages import SIGNED_MAX
from peerload.model.resources import NodeName
from peerload.security import certificates
from peerload.security.private_files import write_private
from peerload.wire.seal import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from peerload.security.certificates import CertificateInfo
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.wire.seal import Sealer

REVOCATIONS_MAX = SIGNED_MAX - 4
KEYS_KEPT_MAX = 2
"""Maximum number of stored seal keys, besides the first one in the cluster directory."""
FILE_BYTES_MAX = 1 << 20
SPREAD_S = 5.0
"""Delay before a new key is used for sealing; it opens messages immediately. After the delay all reachable members have it."""
FRESH_S = 60.0
"""A key older than this is used for sealing immediately."""
OVERLAP_S = 3600.0
"""Time for which the previous key still opens messages."""
OVERLAP_REVOKED_S = 30.0
"""Time for which the previous key still opens messages if the key was changed because a node was revoked."""
CLOCKS_S = 3600.0
"""Tolerance for clock differences between nodes with the CA's key and for the delay of a revocation between them: a revocation
covers certificates issued up to this time after it."""
READMIT_S = 1.0
"""A node that is admitted again gets a certificate dated this long after the time covered by its revocation."""
CLOCK_BACK_S_MAX = 60.0
"""Tolerance for the receipt time of a key. If it is further in the future, the clock was set back, and the
key counts as received long ago. A smaller difference only extends the life of the previous key."""
ENDS_AFTER_S = 2 * (certificates.NODE_LIFE + certificates.SKEW).total_seconds()
"""A revocation older than this is dropped: every certificate that it covers has expired."""
FINGERPRINTS_MAX = 8
DIGEST_BYTES = 16
_CONTEXT = b"peerload trust 1\0"

_log = logging.getLogger("peerload.trust")

Moment = Annotated[float, Meta(ge=0.0, le=1e12)]


class Revoked(msgspec.Struct, frozen=True, tag="revoked", array_like=True):
    """Revocation of a node: of its certificates issued until ``at`` (Unix s), and of certificates with any of these keys (SHA-256)."""

    cluster: str
    node: NodeName
    at: Moment
    keys: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=FINGERPRINTS_MAX)] = ()


class SealKey(msgspec.Struct, frozen=True, tag="seal", array_like=True):
    """A new seal key; the previous key opens messages for overlap_s more. The key with the highest number is current."""

    cluster: str
    number: Annotated[int, Meta(ge=1, le=1 << 40)]
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    at: Moment
    overlap_s: Annotated[float, Meta(ge=0.0, le=1e9)] = OVERLAP_S

    def __repr__(self) -> str:
        return f"SealKey({self.number})"


Statement = Revoked | SealKey


class _Signed(msgspec.Struct, frozen=True, array_like=True):
    body: Annotated[bytes, Meta(max_length=900)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


_signed = msgspec.msgpack.Decoder(_Signed)
_statements: msgspec.msgpack.Decoder[Statement] = msgspec.msgpack.Decoder(Statement)
_file = msgspec.msgpack.Decoder(tuple[tuple[bytes, float], ...])


class TrustStore:
    """Store of the statements of one agent. ``path``: its file. Raises ConfigError if the file cannot be read."""

    def __init__(self, cluster: ClusterDirectory, path: Path) -> None:
        self._cluster = cluster
        self._path = path
        self._ca = certificates.key_of(certificates.der_of(cluster.authority.certificate))
        self._known: dict[bytes, tuple[Statement, float]] = {}
        self._admitted: dict[str, str] = {}
        try:
            with path.open("rb") as file:
                kept = _file.decode(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            kept = ()
        except OSError as error:
            raise ConfigError("state", f"{path} cannot be read", why=str(error.strerror)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _log.warning("statements of the CA are damaged; other members will send them again: path=%s", path)
            kept = ()
        for raw, at in kept:
            statement = self._verified(raw)
            if statement is not None:  # otherwise it is from another cluster that this node belonged to before
                self._known[raw] = (statement, at)

    def read(self) -> TrustStore:
        """Read the file again. Raises ConfigError."""
        return TrustStore(self._cluster, self._path)

    # -- statements ---------------------------------------------------------------------------------------------------

    @property
    def signed(self) -> tuple[bytes, ...]:
        """All signed statements, for forwarding."""
        return tuple(sorted(self._known))

    @property
    def signed_revocations(self) -> tuple[bytes, ...]:
        """The signed revocations, the newest first, for forwarding."""
        found = [(statement.at, raw) for raw, (statement, _) in self._known.items() if isinstance(statement, Revoked)]
        return tuple(raw for _, raw in sorted(found, reverse=True))

    @property
    def digest(self) -> bytes:
        """Digest of all statements; empty if there is none."""
        return hashlib.sha256(b"".join(self.signed)).digest()[:DIGEST_BYTES] if self._known else b""

    @property
    def revocations(self) -> list[Revoked]:
        return [statement for statement, _ in self._known.values() if isinstance(statement, Revoked)]

    def refuses(self, facts: CertificateInfo) -> bool:
        return bool(self.refusal(facts))

    def refusal(self, facts: CertificateInfo) -> bytes:
        """A signed revocation of this certificate; empty if there is none."""
        return self._covering(facts.name, facts.key, facts.issued_at.timestamp())

    def covers(self, node: str, key: str, issued_at: float) -> bool:
        """True if a certificate for this name and key (SHA-256), issued at ``issued_at`` (Unix s), is revoked."""
        return bool(self._covering(node, key, issued_at))

    def _covering(self, node: str, key: str, issued_at: float) -> bytes:
        for raw, (statement, _) in self._known.items():
            if isinstance(statement, Revoked) and (
                key in statement.keys or (node == statement.node and issued_at <= statement.at)
            ):
                return raw
        return b""

    def was_revoked(self, node: str) -> bool:
        """True if a node of this name was revoked at any time; another node may have the name now."""
        return any(statement.node == node for statement in self.revocations)

    def admit(self, node: str, boot: str) -> None:
        """Record that this start of a node has proven, over a link, a certificate that is not revoked."""
        if self.was_revoked(node):
            self._admitted[node] = boot

    def withdraw(self, node: str) -> None:
        """Undo `admit`: the node was revoked again."""
        self._admitted.pop(node, None)

    def admits(self, node: str, boot: str) -> bool:
        """True if datagrams and broker messages of this start of a node are accepted. A seal proves only that a member has
        sent them, so for a name that was revoked they are accepted only after `admit`."""
        return not self.was_revoked(node) or self._admitted.get(node) == boot

    def is_out(self, node: str) -> bool:
        """True if the name was revoked and no start of it has been admitted since."""
        return self.was_revoked(node) and node not in self._admitted

    def revoked_at(self, node: str) -> float:
        """Time of the last revocation of this name (Unix s); 0: never."""
        return max((statement.at - CLOCKS_S for statement in self.revocations if statement.node == node), default=0.0)

    def revoked_nodes(self) -> tuple[tuple[str, float], ...]:
        """Each revoked node, with the time of its last revocation (Unix s)."""
        return tuple(
            (node, self.revoked_at(node)) for node in sorted({statement.node for statement in self.revocations})
        )

    def certified_at(self, node: str, now: datetime) -> datetime:
        """The date of a new certificate for this name: now, or later if a revocation covers now."""
        covered = self._covered(node)
        return max(now, datetime.fromtimestamp(covered + READMIT_S, UTC)) if covered else now

    def _covered(self, node: str) -> float:
        """Date until which certificates of this name are revoked (Unix s); 0: not revoked."""
        return max((statement.at for statement in self.revocations if statement.node == node), default=0.0)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _seals(self) -> list[tuple[SealKey, float]]:
        """Seal keys with the time of receipt, the newest first."""
        found = [(statement, at) for statement, at in self._known.values() if isinstance(statement, SealKey)]
        return sorted(found, key=lambda one: (one[0].number, one[0].key), reverse=True)

    def keys(self, now: float) -> tuple[bytes, ...]:
        """The keys that open messages; the first one is used for sealing."""
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
        return received_at + (SPREAD_S if received_at - key.at < FRESH_S else 0.0)

    def changes_at(self, now: float) -> float | None:
        """Time of the next change of `keys`; None if there is none."""
        seals = self._seals()
        if not seals:
            return None
        newest, at = seals[0]
        return min((t for t in (self._seals_from(newest, at), at + newest.overlap_s) if t > now), default=None)

    @property
    def newest_key(self) -> bytes:
        """The newest seal key, for newcomers: all members have it, or will have it soon."""
        return self._cluster.key if self.newest is None else self.newest.key

    @property
    def newest(self) -> SealKey | None:
        """The statement with the newest seal key; None: the key of the cluster directory is current."""
        seals = self._seals()
        return seals[0][0] if seals else None

    @property
    def number(self) -> int:
        """Number of the newest seal key; 0: the key of the cluster directory."""
        return 0 if self.newest is None else self.newest.number

    # -- new statements ------------------------------------------------------------------------------------------------

    def revoke(self, node: str, keys: Iterable[str], now: float, *, key: bytes = b"") -> bytes:
        """Revoke a node → the signed statement. ``key``: a new seal key. Both are written, or neither. Raises BadRequest if
        there are too many revocations; OSError if they cannot be written."""
        if sum(now - statement.at < ENDS_AFTER_S for statement in self.revocations) >= REVOCATIONS_MAX:
            why = f"at most {REVOCATIONS_MAX} within {ENDS_AFTER_S / 86_400:.0f} days"
            raise BadRequest("too many were revoked", why=why, hint="make a new cluster:  peerload cluster init DIR")
        at = max(now + CLOCKS_S, self._covered(node) + READMIT_S)  # covers a node that was admitted again since
        made = [self._sign(Revoked(self._cluster.id, node, at, tuple(keys)[:FINGERPRINTS_MAX]))]
        if key:
            made.append(self._sign(SealKey(self._cluster.id, self.number + 1, key, now, OVERLAP_REVOKED_S)))
        self.take(made, now)
        return made[0]

    def rotate(self, key: bytes, now: float, overlap_s: float) -> bytes:
        """Make a new seal key → the signed statement. Raises OSError if it cannot be written."""
        made = self._sign(SealKey(self._cluster.id, self.number + 1, key, now, overlap_s))
        self.take((made,), now)
        return made

    def _sign(self, statement: Statement) -> bytes:
        body = msgspec.msgpack.encode(statement)
        signature = certificates.private_key(self._cluster.authority.key).sign(_CONTEXT + body)
        return msgspec.msgpack.encode(_Signed(body, signature))

    def take(self, signed: Iterable[bytes], now: float) -> list[tuple[bytes, Statement]]:
        """Add statements → the new ones, after they are stored. Raises BadRequest if any is not signed by the CA
        (then none is added); OSError if they cannot be stored."""
        found: dict[bytes, tuple[Statement, float]] = {}
        for raw in signed:
            if raw in self._known:
                continue
            statement = self._verified(raw)
            if statement is None:
                raise BadRequest("not signed by this cluster's CA")
            found[raw] = (statement, now)
        known = self._known | found
        kept = self._worth_keeping(known, now)
        if kept != self._known:
            write_private(self._path, msgspec.msgpack.encode(tuple((raw, at) for raw, (_, at) in kept.items())))
            self._known = kept
        return [(raw, statement) for raw, (statement, _) in found.items() if raw in kept]

    @staticmethod
    def _worth_keeping(known: dict[bytes, tuple[Statement, float]], now: float) -> dict[bytes, tuple[Statement, float]]:
        """Drop revocations of certificates that have all expired, and keys that were replaced twice. Both this clock and
        the newest statement must show the expiry, so that a clock that is briefly ahead drops no revocation."""
        now = min(now, max((statement.at for statement, _ in known.values()), default=now))
        keys = [(statement.number, statement.key) for statement, _ in known.values() if isinstance(statement, SealKey)]
        newest = set(sorted(keys, reverse=True)[:KEYS_KEPT_MAX])
        return {
            raw: (statement, at)
            for raw, (statement, at) in known.items()
            if (
                (statement.number, statement.key) in newest
                if isinstance(statement, SealKey)
                else now - statement.at < ENDS_AFTER_S
            )
        }

    def _verified(self, raw: bytes) -> Statement | None:
        """The statement, if the CA has signed it; else None."""
        try:
            signed = _signed.decode(raw)
            if msgspec.msgpack.encode(signed) != raw:  # not canonical
                return None
            self._ca.verify(signed.signature, _CONTEXT + signed.body)
            statement = _statements.decode(signed.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidSignature):
            return None
        return statement if statement.cluster == self._cluster.id else None


def save(path: Path, signed: Iterable[bytes]) -> None:
    """Store the statements that a newcomer received, for the first start of its agent; they count as received long ago.
    Raises OSError."""
    write_private(path, msgspec.msgpack.encode(tuple((raw, 0.0) for raw in signed)))


TIMER_S_MAX = 86_400.0


class Keyring:
    """Keys for the sealers of one node. ``trust``: store of the keys."""

    def __init__(self, trust: TrustStore) -> None:
        self.trust = trust
        self._sealers: list[Sealer] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sealer: Sealer) -> Sealer:
        """Register a sealer, which uses the current keys from now on."""
        self._sealers.append(sealer)
        sealer.use(self.trust.keys(time.time()))
        return sealer

    def refresh(self) -> None:
        """Give all sealers the current keys, and schedule the next change."""
        now = time.time()
        for sealer in self._sealers:
            sealer.use(self.trust.keys(now))
        self.close()
        changes_at = self.trust.changes_at(now)
        if changes_at is not None:
            wait_s = min(max(changes_at - now, 0.0) + 0.01, TIMER_S_MAX)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.refresh)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
