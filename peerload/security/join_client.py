"""The newcomer's side of joining: know the cluster, prove the invitation, come back with a certificate.

It runs in the `peerload join` command, before there is an agent that belongs to anything. The cluster is recognised by the
hash in the token before a word is said that could be of use to anybody; then a connection that only a member of that very
cluster can have at its other end gets the proof, which is good there alone. The key never leaves this machine.
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
from peerload.security.address import parse_address, towards
from peerload.security.node_identity_file import write_private
from peerload.security.tls import JOINED_FILE, tls_says
from peerload.wire import join

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.wire.join import JoinWelcome
    from peerload.wire.token import Token

CONNECT_S = 5.0
ANSWERS_WITHIN_S = 15.0
_NOT_LET_IN = "the cluster does not let this machine in"
_NEW = "a new token, on a machine of the cluster:  peerload invite"


class Admission(NamedTuple):
    """What joining has brought. host: this machine's address towards the member that let it in; key: this node's (PEM);
    ca: the cluster's certificate (PEM)."""

    welcome: JoinWelcome
    key: bytes
    ca: bytes
    host: str
    address: str


def ask(token: Token, node: str, state: Path) -> Admission:
    """Be let in under this name; the key is kept in STATE meanwhile. Raises PeerloadError."""
    key = _key(state / JOINED_FILE)
    failures: list[str] = []
    for address in token.addresses:
        try:
            return _ask_at(address, token, node, key)
        except LinkUnavailable as error:
            failures.append(error.why or error.what)
    raise LinkUnavailable("", "the cluster cannot be reached", why="; ".join(failures))


def _key(path: Path) -> bytes:
    """This node's key: that of a join that broke off, else a new one, on disk before it is spoken of. So who was let in,
    and never heard so, is let in again."""
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
        ca = _said_who(link, address).ca
    try:
        der = certificates.der_of(ca)
    except ValueError:
        raise _impostor(address) from None
    if hashlib.sha256(der).digest() != token.fingerprint:
        raise _impostor(address)
    with _connection(address, _proven(ca)) as (link, host):
        shown = link.getpeercert(binary_form=True)
        who = _said_who(link, address)
        csr = certificates.request(key, node)
        said = join.transcript(shown or b"", who.nonce, token.id, node, csr)
        proof = join.proof_key(token.id, token.secret).sign(said)
        answer = _exchange(link, join.JoinRequest(token.id, node, csr, proof), address)
    if isinstance(answer, join.JoinRefused):
        raise _refusal(answer)
    if not isinstance(answer, join.JoinWelcome):
        raise LinkUnavailable("", "no answer", why=f"{address}: it says something that is no answer")
    _check(answer, ca, node, key)
    return Admission(answer, key, ca, host, address)


def _check(welcome: JoinWelcome, ca: bytes, node: str, key: bytes) -> None:
    """That it is a certificate of this cluster for this node and this key: only its CA can have made it."""
    try:
        facts = certificates.node_facts(certificates.KeyPair(ca, welcome.ca_key), welcome.certificate)
        named = certificates.ca_facts(certificates.KeyPair(ca, welcome.ca_key))
        ours = certificates.key_fingerprint(certificates.private_key(key).public_key())
    except ValueError as error:
        raise PeerloadError("the answer of the cluster cannot be believed", why=str(error), hint=_NEW) from None
    if (facts.name, facts.key, named.name) != (node, ours, welcome.cluster):
        raise PeerloadError("the answer of the cluster cannot be believed", why="it is for somebody else", hint=_NEW)


# -- TLS -----------------------------------------------------------------------------------------------------------------


def _unproven() -> ssl.SSLContext:
    """To ask who is there: nothing that is heard or said on such a connection needs to be true or secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([join.PROTOCOL])
    return context


def _proven(ca: bytes) -> ssl.SSLContext:
    """To a member of the cluster whose CA this is, and to nobody else."""
    context = _unproven()
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=ca.decode("ascii"))
    return context


def _own_address(link: ssl.SSLSocket) -> str:
    """This machine's own address on this link; of IPv6 one that lasts."""
    own, other = str(link.getsockname()[0]), str(link.getpeername()[0])
    with contextlib.suppress(OSError):
        return towards(other) if ":" in other else own
    return own


@contextlib.contextmanager
def _connection(address: str, context: ssl.SSLContext):  # type: ignore[no-untyped-def]  # noqa: ANN202 -- below
    """→ (the link, this machine's own address on it). Raises LinkUnavailable."""
    try:
        host, port = parse_address("join", address, loopback_only=False)
        with socket.create_connection((host, port), CONNECT_S) as plain:
            plain.settimeout(ANSWERS_WITHIN_S)
            with context.wrap_socket(plain) as link:
                if link.selected_alpn_protocol() != join.PROTOCOL:
                    raise LinkUnavailable("", "no answer", why=f"{address}: the node there lets nobody in")
                yield link, _own_address(link)
    except TimeoutError:
        raise LinkUnavailable("", "no answer", why=f"{address} does not answer") from None
    except ssl.SSLError as error:
        raise LinkUnavailable("", "no answer", why=f"{address}: {tls_says(error)}") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LinkUnavailable("", "no answer", why=f"{address}: {why}") from None
    except ConfigError as error:
        raise LinkUnavailable("", "no answer", why=error.says) from None


def _said_who(link: ssl.SSLSocket, address: str) -> join.JoinWho:
    answer = _exchange(link, join.JoinAsk(), address)
    if isinstance(answer, join.JoinRefused):
        raise _refusal(answer)
    if not isinstance(answer, join.JoinWho):
        raise LinkUnavailable("", "no answer", why=f"{address}: it says something that is no answer")
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
        why = f"{address} hung up; after ten refusals within a minute it hears nobody from here"
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
        f"{address} is not of the cluster of this token",
        why="its CA's certificate is another one; nothing was said to it",
        hint="is another cluster running there, or somebody in between?  " + _NEW,
    )


def _refusal(answer: join.JoinRefused) -> BadRequest:
    if answer.code == "token":
        why = "the token was used before, its time has ended, or it is not the cluster's"
        return BadRequest(_NOT_LET_IN, why=why, hint=_NEW)
    hint = "the same token with another name:  peerload join --node NAME TOKEN" if answer.code == "name" else _NEW
    return BadRequest(_NOT_LET_IN, why=answer.what or "it does not understand this one", hint=hint)
