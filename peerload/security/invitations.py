"""Invitations: the open ones of this node, in STATE/invites, and the client that joins a cluster by one.

The file contains no secret, only the public key that is derived from a token's secret. A use is stored before it is
answered. A newcomer may repeat its use, with the same key and name, until the invitation expires, so that a lost answer
does not lock it out. When a node that has used an invitation is revoked, the invitation is closed, since that node knows its secret.

The client runs in the `peerload join` command. It verifies the cluster by the hash of its CA in the token before it sends any
secret. The proof of the invitation is sent over a second connection, which only a member of that cluster can accept, and is
valid only for that connection. The node's key never leaves this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from peerload.model.errors import BadRequest, ConfigError, LinkUnavailable, PeerloadError, ProtocolError
from peerload.security import certificates
from peerload.security.address import parse_address, source_address
from peerload.security.private_files import write_private
from peerload.security.tls import JOINED_FILE, tls_error_text
from peerload.wire import join
from peerload.wire.token import ID_BYTES, SECRET_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.security.revocation import TrustStore
    from peerload.wire.join import JoinWelcome
    from peerload.wire.token import Token


INVITES_MAX = 100
USES_MAX = 1000
FILE_BYTES_MAX = 1 << 20
CLOCK_BACK_S_MAX = 60.0
"""An invitation dated further than this in the future shows that the clock was set back. It counts as expired."""

_log = logging.getLogger("peerload.join")


class Objection(Protocol):
    """Objection to a name; see `Invitations.redeem`."""

    def __call__(self, node: str, at: float, /, *, is_meant: bool) -> str:
        """Reason why a newcomer may not have this name; empty if it may."""


class InvitationUse(msgspec.Struct, frozen=True):
    """An admitted newcomer: its name, the SHA-256 of its key, the time (Unix s), and the date of its certificate (Unix s), which
    is later than the time if the name was revoked before."""

    node: str
    key: str
    at: float
    issued_at: float = 0.0


class Invitation(msgspec.Struct, frozen=True):
    """An open invitation. key: the public key derived from the token's secret; uses: remaining number; node: the only allowed name,
    "" for any; issuer: newcomers also receive the CA's key."""

    id: bytes
    key: bytes
    made_at: float
    ends_at: float
    uses: Annotated[int, Meta(ge=0, le=USES_MAX)]
    node: str = ""
    issuer: bool = False
    used: tuple[InvitationUse, ...] = ()

    def is_open(self, now: float) -> bool:
        return self.made_at - CLOCK_BACK_S_MAX <= now < self.ends_at


class InvitationRefused(Exception):
    """A newcomer is refused. ``code``: as in `JoinRefused`; ``why``: for this node's events; ``what``: for the newcomer,
    which receives details only after it has proven its invitation."""

    def __init__(self, code: str, why: str, what: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.what = what


class Invitations:
    """The invitations in the file ``path``. trust: store of revocations. Raises ConfigError if the file cannot be read."""

    def __init__(self, path: Path, trust: TrustStore) -> None:
        self._path = path
        self._trust = trust
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
            _log.warning("invitations are damaged; the open ones are invalid, invite again: path=%s", path)
        self._invites = {invite.id: invite for invite in kept[:INVITES_MAX]}

    def make(
        self, now: float, *, life_s: float, uses: int, node: str = "", issuer: bool = False
    ) -> tuple[bytes, bytes]:
        """Make an invitation → (id, secret). Raises BadRequest if there are too many; OSError if it cannot be written."""
        self._invites = {key: invite for key, invite in self._invites.items() if invite.is_open(now)}
        if len(self._invites) >= INVITES_MAX:
            raise BadRequest(
                "too many invitations are open", why=f"at most {INVITES_MAX}", hint="wait until some expire"
            )
        token_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        key = join.proof_key(token_id, secret).public_key().public_bytes_raw()
        self._save(Invitation(token_id, key, now, now + life_s, uses, node, issuer))
        return token_id, secret

    def redeem(
        self, request: join.JoinRequest, certificate: bytes, nonce: bytes, now: float, objection: Objection
    ) -> tuple[Invitation, Ed25519PublicKey]:
        """Use an invitation → (the invitation, the key to certify), after the use is stored.

        certificate, nonce: sent by this node over this connection. objection(name, at, is_meant): reason why a newcomer may not
        have this name, "" if it may; at: when a newcomer last got it (Unix s), 0 if not known; is_meant: the invitation is for
        this name only. Raises InvitationRefused; OSError if the use cannot be stored (then it does not count).
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
        issued_at = self._trust.certified_at(request.node, datetime.fromtimestamp(now, UTC)).timestamp()
        use = InvitationUse(request.node, certificates.key_fingerprint(key), now, issued_at)
        if any(self._trust.covers(one.node, one.key, one.issued_at) for one in (*invite.used, use)):
            raise InvitationRefused("token", "a node that has used its token, or its own key, was revoked")
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
                "name", f"{request.node}: {why_not}", f"the name {request.node} cannot be used: {why_not}"
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


# -- the client that joins ---------------------------------------------------------------------------------------------

CONNECT_S = 5.0
ANSWERS_WITHIN_S = 15.0
_NOT_LET_IN = "the cluster refuses this machine"
_NEW = "a new token, on a machine of the cluster:  peerload invite"


class Admission(NamedTuple):
    """Result of joining. host: this machine's address on the link to the member; address: the member's address; key: this node's
    key (PEM); ca: the cluster's certificate (PEM)."""

    welcome: JoinWelcome
    key: bytes
    ca: bytes
    host: str
    address: str


def start_with(setting: str, value: str, *, is_system: bool) -> str:
    """The commands that start the agent of a user, or of all users, with another setting."""
    if not is_system:
        return f"peerload up --{setting} {value}"
    words = f'["{value}"]' if setting == "peer" else f'"{value}"'
    return f"write  {setting} = {words}  into /etc/peerload/peerload.toml, then  sudo systemctl restart peerload"


def join_cluster(token: Token, node: str, state: Path, *, is_system: bool = False) -> Admission:
    """Join with this name. The key is stored in STATE first. is_system: for the agent of all users. Raises
    PeerloadError."""
    key = _key(state / JOINED_FILE)
    failures: list[str] = []
    for address in token.addresses:
        try:
            return _ask_at(address, token, node, key, is_system=is_system)
        except LinkUnavailable as error:
            failures.append(error.why or error.what)
    raise LinkUnavailable("", "the cluster cannot be reached", why="; ".join(failures))


def _key(path: Path) -> bytes:
    """Key of this node: the key of an interrupted join, else a new one. It is stored before its use, so that a node can
    join again after a lost answer."""
    try:
        found = certificates.private_key_pem(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        path.unlink(missing_ok=True)
    else:
        return found
    made = certificates.new_key()
    try:
        write_private(path, made)
    except OSError as error:
        raise ConfigError("state", f"{path} cannot be written", why=str(error.strerror)) from None
    return made


def _ask_at(address: str, token: Token, node: str, key: bytes, *, is_system: bool) -> Admission:
    with _connection(address, _unproven()) as (link, _):
        ca = _identify(link, address).ca
    try:
        der = certificates.der_of(ca)
    except ValueError:
        raise _impostor(address) from None
    if hashlib.sha256(der).digest() != token.fingerprint:
        raise _impostor(address)
    with _connection(address, _proven(ca)) as (link, host):
        shown = link.getpeercert(binary_form=True)
        who = _identify(link, address)
        csr = certificates.request(key, node)
        transcript = join.transcript(shown or b"", who.nonce, token.id, node, csr)
        proof = join.proof_key(token.id, token.secret).sign(transcript)
        answer = _exchange(link, join.JoinRequest(token.id, node, csr, proof), address)
    if isinstance(answer, join.JoinRefused):
        raise _refusal(answer, address, is_system=is_system)
    if not isinstance(answer, join.JoinWelcome):
        raise LinkUnavailable("", "no answer", why=f"{address}: unexpected message")
    _check(answer, ca, node, key)
    return Admission(answer, key, ca, host, address)


def _check(welcome: JoinWelcome, ca: bytes, node: str, key: bytes) -> None:
    """Check that the certificate is from this cluster, for this node and this key. Raises PeerloadError."""
    try:
        facts = certificates.verified_info(certificates.KeyPair(ca, welcome.ca_key), welcome.certificate)
        named = certificates.ca_info(certificates.KeyPair(ca, welcome.ca_key))
        ours = certificates.key_fingerprint(certificates.private_key(key).public_key())
    except ValueError as error:
        raise PeerloadError("the answer of the cluster is not valid", why=str(error), hint=_NEW) from None
    if (facts.name, facts.key, named.name) != (node, ours, welcome.cluster):
        raise PeerloadError(
            "the answer of the cluster is not valid", why="it is for another node, key or cluster", hint=_NEW
        )


# -- TLS -----------------------------------------------------------------------------------------------------------------


def _unproven() -> ssl.SSLContext:
    """TLS without verification, for the first request: data on such a connection is neither secret nor trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([join.PROTOCOL])
    return context


def _proven(ca: bytes) -> ssl.SSLContext:
    """TLS to members of the cluster with this CA only."""
    context = _unproven()
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=ca.decode("ascii"))
    return context


def _own_address(link: ssl.SSLSocket) -> str:
    """This machine's address on this link; for IPv6 not a temporary one."""
    own, other = str(link.getsockname()[0]), str(link.getpeername()[0])
    with contextlib.suppress(OSError):
        return source_address(other) if ":" in other else own
    return own


@contextlib.contextmanager
def _connection(address: str, context: ssl.SSLContext):  # type: ignore[no-untyped-def]  # noqa: ANN202 -- below
    """Connect → (the link, this machine's address on it). Raises LinkUnavailable."""
    try:
        host, port = parse_address("join", address, loopback_only=False)
        with socket.create_connection((host, port), CONNECT_S) as plain:
            plain.settimeout(ANSWERS_WITHIN_S)
            with context.wrap_socket(plain) as link:
                if link.selected_alpn_protocol() != join.PROTOCOL:
                    raise LinkUnavailable("", "no answer", why=f"{address}: the node there cannot admit machines")
                yield link, _own_address(link)
    except TimeoutError:
        raise LinkUnavailable("", "no answer", why=f"{address} does not answer") from None
    except ssl.SSLError as error:
        raise LinkUnavailable("", "no answer", why=f"{address}: {tls_error_text(error)}") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LinkUnavailable("", "no answer", why=f"{address}: {why}") from None
    except ConfigError as error:
        raise LinkUnavailable("", "no answer", why=error.says) from None


def _identify(link: ssl.SSLSocket, address: str) -> join.JoinWho:
    answer = _exchange(link, join.JoinAsk(), address)
    if isinstance(answer, join.JoinRefused):
        raise _refusal(answer, address)
    if not isinstance(answer, join.JoinWho):
        raise LinkUnavailable("", "no answer", why=f"{address}: unexpected message")
    return answer


def _exchange(link: ssl.SSLSocket, message: join.FromNewcomer, address: str) -> join.FromNode:
    try:
        link.sendall(join.encode(message))
        size = int.from_bytes(_read(link, 4), "big")
        if size > join.FRAME_BYTES_MAX:
            raise LinkUnavailable("", "no answer", why=f"{address}: a frame too large")
        return join.decode_node(_read(link, size))
    except ProtocolError as error:
        raise LinkUnavailable("", "no answer", why=f"{address}: {error}") from None
    except EOFError:
        why = f"{address} closed the connection; after ten refusals within a minute it refuses this address for a while"
        raise LinkUnavailable("", "no answer", why=why) from None


def _read(link: ssl.SSLSocket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _impostor(address: str) -> BadRequest:
    return BadRequest(
        f"{address} does not belong to the token's cluster",
        why="it has the certificate of another CA; nothing was sent to it",
        hint="another cluster may run there, or the connection is intercepted;  " + _NEW,
    )


def _refusal(answer: join.JoinRefused, address: str, *, is_system: bool = False) -> BadRequest:
    if answer.code == "token":
        why = "the token was used before, has expired, is of another cluster, or was used by a node that is revoked"
        return BadRequest(_NOT_LET_IN, why=why, hint=_NEW)
    hint = _NEW
    if answer.code == "name":
        again = start_with("peer", address, is_system=is_system)
        hint = f"if this machine is that member:  {'' if is_system else 'peerload down ; '}{again}"
        hint += "        the same token with another name:  peerload join --node NAME TOKEN"
    return BadRequest(_NOT_LET_IN, why=answer.what or "it does not understand the request", hint=hint)
