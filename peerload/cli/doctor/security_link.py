"""What `doctor --security` finds out at the node's own address: as somebody who does not belong, it asks to be let in."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from peerload.cli.doctor.facts import FAIL, OK, SKIP, WARN, DoctorInput, Finding, needs_agent
from peerload.cli.doctor.security_files import cluster_directory
from peerload.security import certificates
from peerload.security.tls import NO_DATES, PROTOCOL
from peerload.text.format import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CLOSED_WITHIN_S = 5.0
"""A stranger's connection is to be closed by then …"""
LATE_S = 2.0
"""… or a little later on a busy machine."""
CONNECT_S_MAX = 3.0
NO_ANSWER_S = 0.5
"""A datagram that is answered at all is answered by then."""
LIFE_S_MAX = 92 * 86_400.0
EXPIRED = 10
"""X509_V_ERR_CERT_HAS_EXPIRED."""
TLS_ALERT, TLS_RECORD_BYTES_MAX = 21, 16 << 10
RENEW = "peerload down && peerload up        on a node without the CA's key, and if that does not help:  peerload join TOKEN"
REPORT = "stop it (peerload down), and please report it: what starts programs must let nobody in"


def address_of(facts: DoctorInput) -> tuple[str, int]:
    """Where the agent listens."""
    host, _, port = str(facts.info["listen"]).rpartition(":")
    return host.strip("[]"), int(port)


def _connected(facts: DoctorInput) -> socket.socket:
    return socket.create_connection(address_of(facts), timeout=CONNECT_S_MAX)


def _answered(connection: socket.socket, within_s: float) -> bytes | None:
    """What comes until the other end closes; None if it does not in time."""
    deadline_s, told = time.monotonic() + within_s, b""
    while len(told) < TLS_RECORD_BYTES_MAX:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        connection.settimeout(left_s)
        try:
            data = connection.recv(4096)
        except TimeoutError:
            return None
        except OSError:
            return told  # it was closed on us
        if not data:
            return told
        told += data
    return told


@needs_agent
def plain_is_closed(facts: DoctorInput) -> Finding:
    """Whether somebody who speaks no TLS is told anything."""
    with _connected(facts) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        told = _answered(connection, CLOSED_WITHIN_S + LATE_S)
    if told is None:
        return Finding(FAIL, f"a connection without TLS is open after {CLOSED_WITHIN_S:g} s", REPORT)
    if told and told[0] != TLS_ALERT:
        return Finding(FAIL, "a connection without TLS is answered", REPORT)
    return Finding(OK, "without TLS nothing is answered")


@needs_agent
def silence_is_closed(facts: DoctorInput) -> Finding:
    """Whether somebody who says nothing can stay."""
    began_s = time.monotonic()
    with _connected(facts) as connection:
        told = _answered(connection, CLOSED_WITHIN_S + LATE_S)
    took_s = time.monotonic() - began_s
    if told is None:
        return Finding(FAIL, f"a connection that says nothing is open after {CLOSED_WITHIN_S:g} s", REPORT)
    return Finding(OK, f"who says nothing is closed on after {took_s:.1f} s")


def _context(facts: DoctorInput) -> ssl.SSLContext:
    """Of a client who believes the cluster's CA and has nothing to show."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols([PROTOCOL])
    place = cluster_directory(facts)
    assert place is not None  # an agent has one
    if facts.info.get("cluster_local"):
        context.verify_flags |= NO_DATES
    context.load_verify_locations(cafile=str(place / "ca.pem"))
    return context


def _let_in(facts: DoctorInput, context: ssl.SSLContext) -> str:
    """How far a client gets: "" if no farther than it should, else how far. Raises SSLError if it is told so."""
    with _connected(facts) as plain, context.wrap_socket(plain, do_handshake_on_connect=False) as secured:
        secured.settimeout(CLOSED_WITHIN_S + LATE_S)
        try:
            secured.do_handshake()
            told = secured.recv(4096)
        except TimeoutError:
            return f"is neither let in nor closed on within {CLOSED_WITHIN_S:g} s"
        except ConnectionError:
            return ""
        return f"is spoken to ({len(told)} bytes)" if told else ""


def _refused(facts: DoctorInput, context: ssl.SSLContext, who: str, *, only_for: tuple[str, ...] = ()) -> Finding:
    """only_for: the words of OpenSSL by which a refusal of the other end is known, where our own may refuse, too."""
    try:
        how_far = _let_in(facts, context)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == EXPIRED:
            return Finding(SKIP, f"{who} cannot be tried: this node's certificate has expired")
        return Finding(FAIL, "what listens there shows no certificate of this cluster", "who is it?  ss -ltnp")
    except ssl.SSLError as error:
        if only_for and (error.reason or "") not in only_for:
            return Finding(SKIP, f"{who} cannot be tried here ({error.reason})")
        return Finding(OK, f"{who} is refused")
    if how_far:
        return Finding(FAIL, f"{who} {how_far}", REPORT)
    return Finding(OK, f"{who} is refused")


def _readable(look: Callable[[DoctorInput], Finding]) -> Callable[[DoctorInput], Finding]:
    """A check that needs the certificate of the CA."""

    def looked(facts: DoctorInput) -> Finding:
        place = cluster_directory(facts)
        if place is None or not os.access(place / "ca.pem", os.R_OK):
            return Finding(SKIP, "the cluster's directory cannot be read: ask as its owner")
        return look(facts)

    return needs_agent(looked)


@_readable
def old_tls_is_refused(facts: DoctorInput) -> Finding:
    """Whether anything before TLS 1.3 is spoken."""
    context = _context(facts)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    reasons = ("TLSV1_ALERT_PROTOCOL_VERSION", "SSLV3_ALERT_HANDSHAKE_FAILURE", "UNEXPECTED_EOF_WHILE_READING")
    return _refused(facts, context, "TLS 1.2", only_for=reasons)


@_readable
def nobody_is_refused(facts: DoctorInput) -> Finding:
    """Whether somebody without a certificate is spoken to."""
    return _refused(facts, _context(facts), "who shows no certificate")


@_readable
def a_stranger_is_refused(facts: DoctorInput) -> Finding:
    """Whether a certificate of another CA, in this node's own name, opens anything."""
    context = _context(facts)
    now = datetime.now(UTC)
    other = certificates.make_ca("stranger", "00" * 16, now)
    pair = certificates.issue(other, str(facts.info.get("node")), now)
    with tempfile.TemporaryDirectory(prefix="peerload-doctor-") as place:  # with mode 0700, and it opens nothing
        path = Path(place, "pair.pem")
        path.write_bytes(pair.key + pair.certificate)
        context.load_cert_chain(path)
    return _refused(facts, context, "a certificate of another CA")


def _shown(facts: DoctorInput) -> bytes:
    """The certificate that the agent shows (DER); the CA's name is believed by what TLS verifies. Raises OSError."""
    with _connected(facts) as plain, _context(facts).wrap_socket(plain) as secured:
        return secured.getpeercert(binary_form=True) or b""


@needs_agent
def certificate(facts: DoctorInput) -> Finding:
    """Whether the certificate that this node shows is the cluster's, valid, and made anew in time. That it has expired the
    agent says itself, also to whoever cannot read the cluster's directory."""
    ends_at = facts.checkup.get("certificate_until") or facts.now + 1
    if not facts.info.get("cluster_local") and ends_at <= facts.now:
        return Finding(FAIL, "its certificate has expired", RENEW)
    return _shown_certificate(facts)


@_readable
def _shown_certificate(facts: DoctorInput) -> Finding:
    try:
        shown = certificates.proven_facts(_shown(facts))
    except ssl.SSLCertVerificationError as error:
        return Finding(FAIL, f"the certificate it shows is refused: {error.verify_message}", RENEW)
    except ValueError:
        return Finding(FAIL, "the certificate it shows is no node's", RENEW)
    left_s = shown.valid_until.timestamp() - facts.now
    is_local = bool(facts.info.get("cluster_local"))
    if shown.name != facts.info.get("node"):
        return Finding(FAIL, f"the certificate it shows is for {shown.name}", RENEW)
    if left_s <= 0 and not is_local:
        return Finding(FAIL, "its certificate has expired", RENEW)
    if (shown.valid_until - shown.issued_at).total_seconds() > LIFE_S_MAX:
        return Finding(FAIL, "its certificate is made for more than 90 days", RENEW)
    says = f"its certificate is valid for {duration_text(max(left_s, 0.0))} more"
    if facts.now > shown.due_at.timestamp() and not is_local:
        return Finding(WARN, f"{says}, and should have been made anew by now", "is a node with the CA's key there?")
    return Finding(OK, says)


@_readable
def certificate_says_node(facts: DoctorInput) -> Finding:
    """Whether the certificate says that its holder is one node, and nothing else."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        found = x509.load_der_x509_certificate(_shown(facts))
    except ssl.SSLCertVerificationError as error:
        return Finding(FAIL, f"the certificate it shows is refused: {error.verify_message}", RENEW)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uses = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    is_ca = found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    allowed = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    if is_ca or len(list(names)) != 1 or set(uses) != allowed:
        return Finding(FAIL, "its certificate says more than which node it is", RENEW)
    return Finding(OK, f"its certificate names {facts.info.get('node')}, and can make no others")


@needs_agent
def datagrams_unanswered(facts: DoctorInput) -> Finding:
    """Whether a datagram that nobody sealed is answered."""
    host, port = address_of(facts)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.settimeout(NO_ANSWER_S)
        probe.sendto(b"peerload doctor", (host, port))
        try:
            told = probe.recv(2048)
        except (TimeoutError, ConnectionError):
            return Finding(OK, "a datagram that was not sealed is not answered")
    return Finding(FAIL, f"a datagram that was not sealed is answered ({len(told)} bytes)", REPORT)
