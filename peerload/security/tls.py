"""What the links of one node are secured with: TLS 1.3, mutual, with certificates of the cluster's CA and no other.

Each node makes its own key and has its certificate under STATE/tls; it is made anew when two thirds of its life are
over: by the node itself where it has the CA's key, else by one that has (`agent/joining/renewal.py`). There is one way to prove
who one is, and none to do without (rules J3, S10).
"""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError
from peerload.security import certificates
from peerload.security.node_identity_file import write_private
from peerload.security.private_files import private_directory
from peerload.wire.join import PROTOCOL as JOIN_PROTOCOL

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from peerload.security.certificates import CertificateInfo
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.revocation import Trust

PROTOCOL = "peerload/1"
"""What the two ends agree to speak (ALPN)."""
FILE_BYTES_MAX = 64 << 10
NO_DATES = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the module ssl has no name for. Agents that share a machine share its clock:
one that was set must not part them."""
FILE = "node.pem"
"""This node's key and certificate, in STATE/tls."""
JOINED_FILE = "joining.pem"
"""The same, in STATE, from a `peerload join` until the agent's next start. Until the cluster has answered it is the key alone."""
RENEWAL_LOOK_S = 3600.0
"""How often it is looked whether the certificate is to be made anew."""
LOOKS_IN_A_LIFE = 12
"""… and for one that lasts less than a day, as often as this."""

_log = logging.getLogger("peerload.peer")

_FAULTS = {
    9: "its certificate is not valid yet; compare the clocks",
    10: "its certificate has expired; compare the clocks",
    18: "it is of another cluster",
    19: "it is of another cluster",
    20: "it is of another cluster",
    21: "it is of another cluster",
    7: "it is of another cluster",
}
"""OpenSSL's verification codes (X509_V_ERR_…) in words."""
_REASONS = {
    "TLSV1_ALERT_UNKNOWN_CA": "it says that we are of another cluster",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that our certificate has expired; compare the clocks",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses our certificate; compare the clocks",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses our certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it says that we are of another cluster",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not speak TLS 1.3",
}
OTHER_FAULT = "the TLS handshake failed"


class Credentials:
    """Who this node is to its peers. ``server`` and ``client`` are the two ends' contexts; a certificate that is made
    anew goes into both, and links that stand are not touched. ``trust`` knows which certificates were revoked.

    Raises ConfigError if the directory cannot be used, or this node has no certificate and cannot make one.
    """

    def __init__(
        self,
        cluster: ClusterDirectory,
        node: str,
        directory: Path,
        life: timedelta = certificates.NODE_LIFE,
        trust: Trust | None = None,
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.life = life
        self._trust = trust
        self.lets_in = cluster.is_issuer and not cluster.is_local
        """Whether newcomers are spoken to at all."""
        self._directory = directory
        self._path = directory / FILE
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, cluster)
        if self.lets_in:  # a newcomer has no certificate yet; `node_of` tells it from a member
            self.server.verify_mode = ssl.CERT_OPTIONAL
            self.server.set_alpn_protocols([PROTOCOL, JOIN_PROTOCOL])
        self.server.num_tickets = 0  # a session is proven anew each time
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, cluster)
        self.facts: CertificateInfo | None = None
        self.was_elsewhere = False
        """Whether the certificate that was there was of another cluster, or damaged."""
        self.renew_if_due()

    def __repr__(self) -> str:
        return f"Credentials({self.node!r} of {self.cluster.name!r})"

    @property
    def file(self) -> Path:
        """This node's key and certificate."""
        return self._path

    @property
    def certificate(self) -> bytes:
        """This node's own, as it is shown (DER)."""
        return certificates.der_of(self._path.read_bytes())

    def refuses(self, facts: CertificateInfo) -> bool:
        """True if this certificate was revoked."""
        return self._trust is not None and self._trust.refuses(facts)

    @property
    def is_revoked(self) -> bool:
        """True if this node's own certificate was revoked."""
        return self.facts is not None and self.refuses(self.facts)

    @property
    def check_every_s(self) -> float:
        """Interval at which the certificate's dates are to be checked."""
        assert self.facts is not None
        life_s = (self.facts.valid_until - self.facts.issued_at).total_seconds()
        return min(RENEWAL_LOOK_S, life_s / LOOKS_IN_A_LIFE)

    def is_due(self, now: datetime) -> bool:
        """Whether it is to be made anew."""
        return self.facts is None or not self._is_good(self.facts, now)

    def has_ended(self, now: datetime) -> bool:
        """Whether no peer takes it any more."""
        return not self.cluster.is_local and self.facts is not None and now >= self.facts.valid_until

    def renew_if_due(self, now: datetime | None = None) -> bool:
        """Make a new key and certificate if there is none, it is another's or of another CA, or two thirds of its life
        are over. Returns whether they were made; raises ConfigError. Without the CA's key the one that is there is used
        for as long as it is this node's."""
        now = now or datetime.now(UTC)
        kept = self.facts or self._brought() or self._kept()
        is_due = kept is None or not self._is_good(kept, now)
        if not self.cluster.is_issuer:
            if kept is None or kept.name != self.node:
                raise self._has_none(kept)
            is_due = False
        try:
            if is_due:
                private_directory(self._directory)
                pair = certificates.issue(self.cluster.authority, self.node, now, self.life)
                self._write(pair.key + pair.certificate)
                kept = certificates.node_facts(self.cluster.authority, pair.certificate)
            if self.facts != kept:
                self._use()
        except OSError as error:
            why = error.strerror or "it is damaged"
            raise ConfigError("state", f"{self._path} cannot be used", why=why, hint=f"rm {self._path}") from None
        self.facts = kept
        return is_due

    def set_life(self, life_s: float) -> None:
        """How long what is made from now on lasts."""
        self.life = timedelta(seconds=life_s)

    def read_again(self) -> bool:
        """Use what lies in the directory now, if it is this node's, of this cluster, and other than what was in use. → whether
        it was. Raises ConfigError, and what was in use stays, if it is neither; links that stand are not touched."""
        found = self._brought() or self._kept()
        if found is None or found.name != self.node:
            why = "it is missing, damaged, or of another cluster or node"
            raise ConfigError("state", f"{self._path} cannot be used", why=why, hint="put back the one that was there")
        if found == self.facts:
            return False
        try:
            self._use()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("state", f"{self._path} cannot be used", why=str(error)) from None
        self.facts = found
        return True

    def _has_none(self, kept: CertificateInfo | None) -> ConfigError:
        what = f"this node has no certificate of the cluster {self.cluster.name}"
        why = "and no key of its CA to make one with"
        if kept is not None:
            why = f"that in {self._path} is for a node called {kept.name}"
        return ConfigError(
            "cluster",
            what,
            why=why,
            hint=f"--node {kept.name}"
            if kept is not None
            else "where the cluster is:  peerload invite        and here what it prints",
        )

    def install(self, certificate: bytes) -> None:
        """Use a certificate (PEM) that was made anew elsewhere. Raises ValueError if it is not of this cluster, this node
        and this node's key, or not good now: others would take it as little; ConfigError if it cannot be kept."""
        found = certificates.node_facts(self.cluster.authority, certificate)
        if self.facts is None or (found.name, found.key) != (self.facts.name, self.facts.key):
            raise ValueError("a certificate for somebody else")
        now = datetime.now(UTC)
        if not found.valid_from <= now < found.valid_until:
            raise ValueError("it is not valid now; compare the clocks")
        if found.valid_until <= self.facts.valid_until and self.facts.valid_from <= now:
            return
        try:
            key = certificates.private_key_pem(self._path.read_bytes())
            self._write(key + certificate)
            self._use()
        except OSError as error:
            raise ConfigError("state", f"{self._path} cannot be written", why=str(error.strerror)) from None
        self.facts = found

    def _use(self) -> None:
        for context in (self.server, self.client):
            context.load_cert_chain(self._path)

    def _is_good(self, kept: CertificateInfo, now: datetime) -> bool:
        due_at = min(kept.due_at, kept.issued_at + self.life * certificates.RENEWED_AT)
        return kept.name == self.node and kept.valid_from <= now < due_at

    def _brought(self) -> CertificateInfo | None:
        """What `peerload join` has brought since the last start, if it has: it takes the place of what was there."""
        path = self._directory.parent / JOINED_FILE
        try:
            brought = path.read_bytes()
            found = certificates.node_facts(self.cluster.authority, brought)
            if found.name != self.node:
                return None
            private_directory(self._directory)
            self._write(brought)
            path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError("state", f"{path} cannot be used", why=str(error.strerror)) from None
        except ValueError:
            return None  # of another cluster, or a join that is not done yet
        return found

    def _kept(self) -> CertificateInfo | None:
        """What the certificate on disk says, if it can be used."""
        try:
            with self._path.open("rb") as file:
                return certificates.node_facts(self.cluster.authority, file.read(FILE_BYTES_MAX))
        except OSError:
            return None  # if it is more than missing, making it anew says so
        except ValueError:
            self.was_elsewhere = True
            _log.info("a new certificate is made: the one in %s is of another cluster, or damaged", self._path)
            return None

    def _write(self, data: bytes) -> None:
        """Key and certificate in one file, so that they are replaced together."""
        write_private(self._path, data)


def _context(protocol: int, cluster: ClusterDirectory) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # a peer is known by its node's name, which `node_of` reads, not by where it is
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if cluster.is_local:
        context.verify_flags |= NO_DATES
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.load_verify_locations(cadata=cluster.authority.certificate.decode())
    context.set_alpn_protocols([PROTOCOL])
    return context


def asks_to_join(transport: asyncio.BaseTransport) -> bool:
    """Whether the other end wants to be let in, and has shown no certificate."""
    session = transport.get_extra_info("ssl_object")
    return session is not None and session.selected_alpn_protocol() == JOIN_PROTOCOL


def shown_by(transport: asyncio.BaseTransport) -> bytes:
    """The certificate that the other end has proven to be its own (DER); empty if none."""
    session = transport.get_extra_info("ssl_object")
    return (session.getpeercert(binary_form=True) or b"") if session is not None else b""


def node_of(transport: asyncio.BaseTransport) -> str:
    """The node that the other end has proven to be; "" if it has proven nothing."""
    session = transport.get_extra_info("ssl_object")
    certificate = transport.get_extra_info("peercert")
    if session is None or session.selected_alpn_protocol() != PROTOCOL or not certificate:
        return ""
    match certificate.get("subjectAltName"):
        case (("DNS", node),):
            return str(node)
        case _:
            return ""


def tls_says(error: BaseException) -> str:
    """Why a link could not be secured, in words."""
    if isinstance(error, ssl.SSLError):  # made by a loop and not by OpenSSL, it lacks these
        code, reason = getattr(error, "verify_code", 0), getattr(error, "reason", None)
        if code:
            return _FAULTS.get(code, f"its certificate is refused (X509_V_ERR {code})")
        return _REASONS.get(reason or "", OTHER_FAULT)
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return "the handshake took too long"
    return "it went away during the handshake"
