"""The open invitations of this node, in STATE/invites.

The file has no secret: only the public half of the key that is derived from a token's secret. A use is written before it is
answered. A newcomer may repeat its use, with the same key and name, until the invitation expires: an answer that was lost
locks nobody out.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from peerload.model.errors import BadRequest, ConfigError
from peerload.security import certificates
from peerload.security.private_files import write_private
from peerload.wire import join
from peerload.wire.token import ID_BYTES, SECRET_BYTES

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Protocol

    class Objection(Protocol):
        """Objection to a name; see `Invitations.redeem`."""

        def __call__(self, node: str, at: float, /, *, is_meant: bool) -> str:
            """Reason why no newcomer may have this name; empty if one may."""


INVITES_MAX = 100
"""Open invitations at a time."""
USES_MAX = 1000
FILE_BYTES_MAX = 1 << 20
CLOCK_BACK_S_MAX = 60.0
"""An invitation made so much later than now shows that the clock was set back: it counts as expired."""

_log = logging.getLogger("peerload.join")


class InvitationUse(msgspec.Struct, frozen=True):
    """An admitted newcomer: its name, the SHA-256 of its key, and the time (Unix s)."""

    node: str
    key: str
    at: float


class Invitation(msgspec.Struct, frozen=True):
    """key: the public key derived from the token's secret; uses: how many are left; node: the only name it is for, "" for
    any; issuer: newcomers get the CA's key, too."""

    id: bytes
    key: bytes
    made_at: float
    ends_at: float
    uses: Annotated[int, Meta(ge=0, le=USES_MAX)]
    node: str = ""
    issuer: bool = False
    used: tuple[InvitationUse, ...] = ()

    def is_open(self, now: float) -> bool:
        """True if the invitation has not expired."""
        return self.made_at - CLOCK_BACK_S_MAX <= now < self.ends_at


class InvitationRefused(Exception):
    """A newcomer is refused. ``code`` as in `JoinRefused`; ``why`` is for this node's events, ``what`` for the newcomer,
    which gets details only after it has proven that it is invited."""

    def __init__(self, code: str, why: str, what: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.what = what


class Invitations:
    """The invitations in the file ``path``. Raises ConfigError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._invites: dict[bytes, Invitation] = {}
        self._nobody = Ed25519PrivateKey.generate().public_key()
        """Key for the check of an unknown token, so that its answer takes the same time."""
        try:
            with path.open("rb") as file:
                kept = msgspec.msgpack.decode(file.read(FILE_BYTES_MAX), type=tuple[Invitation, ...])
        except FileNotFoundError:
            kept = ()
        except OSError as error:
            raise ConfigError("state", f"{path} cannot be read", why=str(error.strerror)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            kept = ()
            _log.warning("invitations are damaged, open ones are void; invite again: path=%s", path)
        self._invites = {invite.id: invite for invite in kept[:INVITES_MAX]}

    def make(
        self, now: float, *, life_s: float, uses: int, node: str = "", issuer: bool = False
    ) -> tuple[bytes, bytes]:
        """Make an invitation → (id, secret). Raises BadRequest if there are too many; OSError if it cannot be written."""
        self._drop_expired(now)
        if len(self._invites) >= INVITES_MAX:
            raise BadRequest(
                "too many invitations are open", why=f"at most {INVITES_MAX}", hint="wait until some expire"
            )
        token_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        key = join.proof_key(token_id, secret).public_key().public_bytes_raw()
        self._save(Invitation(token_id, key, now, now + life_s, uses, node, issuer))
        return token_id, secret

    def redeem(
        self,
        request: join.JoinRequest,
        certificate: bytes,
        nonce: bytes,
        now: float,
        objection: Objection,
    ) -> tuple[Invitation, Ed25519PublicKey]:
        """Use an invitation → (the invitation, the key to certify), once the use is written.

        certificate, nonce: what this node has sent over this connection. objection(name, at, is_meant): why no newcomer may
        have this name, "" if one may; at: when one last got it (Unix s), 0 if not known; is_meant: the invitation is for
        this name only. Raises InvitationRefused; OSError if the use cannot be written (then it does not count).
        """
        invite = self._invites.get(request.token)
        known = Ed25519PublicKey.from_public_bytes(invite.key) if invite is not None else self._nobody
        transcript = join.transcript(certificate, nonce, request.token, request.node, request.csr)
        try:
            known.verify(request.proof, transcript)
        except InvalidSignature:
            why = "its proof is wrong" if invite is not None else "its token is not known"
            raise InvitationRefused("token", why) from None
        assert invite is not None
        if not invite.is_open(now):
            raise InvitationRefused("token", "its token has expired")
        try:
            key = certificates.requested_key(request.csr)
        except ValueError as error:
            raise InvitationRefused("request", str(error), "the certificate request cannot be used") from None
        use = InvitationUse(request.node, certificates.key_fingerprint(key), now)
        if any((one.node, one.key) == (use.node, use.key) for one in invite.used):
            return invite, key
        if invite.uses <= 0:
            raise InvitationRefused("token", "its token was used before")
        if invite.node and invite.node != request.node:
            raise InvitationRefused(
                "name", f"its token is for {invite.node}", f"this token is for a node called {invite.node}"
            )
        uses = (one.at for other in self._invites.values() for one in other.used if one.node == request.node)
        if why_not := objection(request.node, max(uses, default=0.0), is_meant=bool(invite.node)):
            raise InvitationRefused(
                "name", f"{request.node}: {why_not}", f"no node can be called {request.node}: {why_not}"
            )
        self._save(msgspec.structs.replace(invite, uses=invite.uses - 1, used=(*invite.used, use)))
        return invite, key

    def _save(self, invite: Invitation) -> None:
        before = self._invites.get(invite.id)
        self._invites[invite.id] = invite
        try:
            write_private(self._path, msgspec.msgpack.encode(tuple(self._invites.values())))
        except OSError:
            if before is None:
                del self._invites[invite.id]
            else:
                self._invites[invite.id] = before
            raise

    def _drop_expired(self, now: float) -> None:
        self._invites = {key: invite for key, invite in self._invites.items() if invite.is_open(now)}
