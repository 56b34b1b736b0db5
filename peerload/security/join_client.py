"""Client of the join protocol: verifies the cluster, proves the invitation, and gets a certificate.

It runs in the `peerload join` command. The cluster is verified by the hash of its CA in the token before anything secret is
sent. The proof of the invitation is sent over a second connection, which only a member of that cluster can accept, and it is
valid for that connection only. The node's key never leaves this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.errors import BadRequest, ConfigError, LinkUnavailable, PeerloadError, ProtocolError
from peerload.security import certificates
from peerload.security.address import parse_address, source_address
from peerload.security.private_files import write_private
from peerload.security.tls import JOINED_FILE, tls_error_text
from peerload.wire import join

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.wire.join import JoinWelcome
    from peerload.wire.token import Token

CONNECT_S = 5.0
ANSWERS_WITHIN_S = 15.0
_NOT_LET_IN = "the cluster refuses this machine"
_NEW = "a new token, on a machine of the cluster:  peerload invite"


class Admission(NamedTuple):
    """Result of joining. host: this machine's address on the link to the member; address: that member's; key: this node's
    (PEM); ca: the cluster's certificate (PEM)."""

    welcome: JoinWelcome
    key: bytes
    ca: bytes
    host: str
    address: str


def join_cluster(token: Token, node: str, state: Path) -> Admission:
    """Join with this name; the key is kept in STATE meanwhile. Raises PeerloadError."""
    key = _key(state / JOINED_FILE)
    failures: list[str] = []
    for address in token.addresses:
        try:
            return _ask_at(address, token, node, key)
        except LinkUnavailable as error:
            failures.append(error.why or error.what)
    raise LinkUnavailable("", "the cluster cannot be reached", why="; ".join(failures))


def _key(path: Path) -> bytes:
    """This node's key: that of an interrupted join, else a new one, which is written before it is used. So a node whose
    answer was lost can join again."""
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


def _ask_at(address: str, token: Token, node: str, key: bytes) -> Admission:
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
        raise _refusal(answer)
    if not isinstance(answer, join.JoinWelcome):
        raise LinkUnavailable("", "no answer", why=f"{address}: unexpected message")
    _check(answer, ca, node, key)
    return Admission(answer, key, ca, host, address)


def _check(welcome: JoinWelcome, ca: bytes, node: str, key: bytes) -> None:
    """Check that the certificate is of this cluster, for this node and this key. Raises PeerloadError."""
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
    """TLS without verification, for the first question: nothing on such a connection is secret or trusted."""
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
        raise _refusal(answer)
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


def _refusal(answer: join.JoinRefused) -> BadRequest:
    if answer.code == "token":
        why = "the token was used before, has expired, or is of another cluster"
        return BadRequest(_NOT_LET_IN, why=why, hint=_NEW)
    hint = "the same token with another name:  peerload join --node NAME TOKEN" if answer.code == "name" else _NEW
    return BadRequest(_NOT_LET_IN, why=answer.what or "it does not understand the request", hint=hint)
