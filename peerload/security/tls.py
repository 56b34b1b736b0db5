"""TLS of the links of one node: version 1.3, mutual, with certificates of the cluster's CA only (rules J3, S10).

Each node generates its own key and stores its certificate in STATE/tls. The certificate is renewed after two thirds of its
lifetime: by the node itself if it has the CA's key, else by a node that has it (agent/joining.py).
"""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError
from peerload.security import certificates
from peerload.security.private_files import private_directory, write_private
from peerload.wire.join import PROTOCOL as JOIN_PROTOCOL

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from peerload.security.certificates import CertificateInfo
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.revocation import TrustStore

PROTOCOL = "peerload/1"
"""ALPN protocol of the links."""
FILE_BYTES_MAX = 64 << 10
NO_DATES = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the module ssl does not define. Agents of one machine share its clock, and must
stay connected when the clock is changed."""
FILE = "node.pem"
"""This node's key and certificate, in STATE/tls."""
JOINED_FILE = "joining.pem"
"""Key and certificate in STATE, from `peerload join` until the agent's next start; only the key until the cluster has answered."""
CHECK_EVERY_S_MAX = 3600.0
"""Longest interval between checks whether the certificate needs renewal …"""
CHECKS_PER_LIFE = 12
"""… and minimum number of checks within the lifetime of a short-lived one."""

_log = logging.getLogger("peerload.peer")

_VERIFY_ERRORS = {
    9: "its certificate is not valid yet; compare the clocks",
    10: "its certificate has expired; compare the clocks",
    **dict.fromkeys((7, 18, 19, 20, 21), "it is of another cluster"),
}
"""Text of OpenSSL's verification errors (X509_V_ERR_…)."""
_TLS_ERRORS = {
    "TLSV1_ALERT_UNKNOWN_CA": "it says that this node is of another cluster",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that this node's certificate has expired; compare the clocks",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses this node's certificate; compare the clocks",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses this node's certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it says that this node is of another cluster",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not speak TLS 1.3",
}
HANDSHAKE_FAILED = "the TLS handshake failed"


class Credentials:
    """Key and certificate of this node, and the TLS contexts of both ends (``server``, ``client``). A new certificate is loaded
    into both contexts; existing links are not affected. ``trust``: store of revocations.

    Raises ConfigError if the directory cannot be used, or this node has no certificate and cannot make one.
    """

    def __init__(
        self,
        cluster: ClusterDirectory,
        node: str,
        directory: Path,
        life: timedelta = certificates.NODE_LIFE,
        trust: TrustStore | None = None,
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.life = life
        self._trust = trust
        self.serves_joins = cluster.is_issuer and not cluster.is_local
        """True if this node serves newcomers."""
        self._directory = directory
        self._path = directory / FILE
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, cluster)
        if self.serves_joins:  # a newcomer has no certificate yet; `node_of` distinguishes it from a member
            self.server.verify_mode = ssl.CERT_OPTIONAL
            self.server.set_alpn_protocols([PROTOCOL, JOIN_PROTOCOL])
        self.server.num_tickets = 0  # no session is resumed
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, cluster)
        self.facts: CertificateInfo | None = None
        self.was_of_other_cluster = False
        """True if the old certificate was from another cluster, or damaged."""
        self.renew_if_due()

    def __repr__(self) -> str:
        return f"Credentials({self.node!r} of {self.cluster.name!r})"

    @property
    def file(self) -> Path:
        return self._path

    @property
    def certificate(self) -> bytes:
        return certificates.der_of(self._path.read_bytes())

    def refuses(self, facts: CertificateInfo) -> bool:
        return self._trust is not None and self._trust.refuses(facts)

    def refusal(self, certificate: bytes) -> bytes:
        """A signed revocation of this certificate (DER); empty if there is none. Raises ValueError."""
        return self._trust.refusal(certificates.proven_info(certificate)) if self._trust is not None else b""

    @property
    def is_revoked(self) -> bool:
        return self.facts is not None and self.refuses(self.facts)

    @property
    def check_every_s(self) -> float:
        assert self.facts is not None
        life_s = (self.facts.valid_until - self.facts.issued_at).total_seconds()
        return min(CHECK_EVERY_S_MAX, life_s / CHECKS_PER_LIFE)

    def is_due(self, now: datetime) -> bool:
        return self.facts is None or not self._is_good(self.facts, now)

    def has_ended(self, now: datetime) -> bool:
        return not self.cluster.is_local and self.facts is not None and now >= self.facts.valid_until

    def renew_if_due(self, now: datetime | None = None) -> bool:
        """Create a key and certificate if there is none for this node and CA, or after two thirds of its lifetime
        → True if they were created. Raises ConfigError. Without the CA's key the existing certificate of this node is
        used."""
        now = now or datetime.now(UTC)
        kept = self.facts or self._from_join() or self._on_disk()
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
                kept = certificates.verified_info(self.cluster.authority, pair.certificate)
            if self.facts != kept:
                self._use()
        except OSError as error:
            why = error.strerror or "it is damaged"
            raise ConfigError("state", f"{self._path} cannot be used", why=why, hint=f"rm {self._path}") from None
        self.facts = kept
        return is_due

    def set_life(self, life_s: float) -> None:
        self.life = timedelta(seconds=life_s)

    def read_again(self) -> bool:
        """Use the certificate that is in the directory now → True if it has changed. Raises ConfigError, and
        keeps the old one, if it is not for this node and cluster."""
        found = self._from_join() or self._on_disk()
        if found is None or found.name != self.node:
            why = "it is missing, damaged, or of another cluster or node"
            raise ConfigError("state", f"{self._path} cannot be used", why=why, hint="restore the previous file")
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
        why = "and it does not have the key of the CA to make one"
        if kept is not None:
            why = f"the one in {self._path} is for a node called {kept.name}"
        return ConfigError(
            "cluster",
            what,
            why=why,
            hint=f"--node {kept.name}"
            if kept is not None
            else "on a member:  peerload invite        and here the command that it prints",
        )

    def install(self, certificate: bytes) -> None:
        """Use a certificate (PEM) issued by another node. Raises ValueError if it is not for this cluster, node and key,
        or not valid now; ConfigError if it cannot be stored."""
        found = certificates.verified_info(self.cluster.authority, certificate)
        if self.facts is None or (found.name, found.key) != (self.facts.name, self.facts.key):
            raise ValueError("a certificate for another node or key")
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

    def _from_join(self) -> CertificateInfo | None:
        """The certificate stored by `peerload join` since the last start, if any, which replaces the old one."""
        path = self._directory.parent / JOINED_FILE
        try:
            joined = path.read_bytes()
            found = certificates.verified_info(self.cluster.authority, joined)
            if found.name != self.node:
                return None
            private_directory(self._directory)
            self._write(joined)
            path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError("state", f"{path} cannot be used", why=str(error.strerror)) from None
        except ValueError:
            return None  # from another cluster, or from an incomplete join
        return found

    def _on_disk(self) -> CertificateInfo | None:
        """The certificate on disk, if it can be used."""
        try:
            with self._path.open("rb") as file:
                return certificates.verified_info(self.cluster.authority, file.read(FILE_BYTES_MAX))
        except OSError:
            return None  # other errors are reported when a new one is written
        except ValueError:
            self.was_of_other_cluster = True
            _log.info("certificate is of another cluster or damaged; making a new one: path=%s", self._path)
            return None

    def _write(self, data: bytes) -> None:
        """Write key and certificate into one file, so that they are replaced together."""
        write_private(self._path, data)


def _context(protocol: int, cluster: ClusterDirectory) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # `node_of` reads the name of the node; its address does not matter
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
    """True if the client requests to join (ALPN), without a certificate."""
    session = transport.get_extra_info("ssl_object")
    return session is not None and session.selected_alpn_protocol() == JOIN_PROTOCOL


def peer_certificate(transport: asyncio.BaseTransport) -> bytes:
    """The certificate of the other end (DER); empty if it has none."""
    session = transport.get_extra_info("ssl_object")
    return (session.getpeercert(binary_form=True) or b"") if session is not None else b""


def node_of(transport: asyncio.BaseTransport) -> str:
    """The node named by the certificate of the other end; empty without a node's certificate."""
    session = transport.get_extra_info("ssl_object")
    certificate = transport.get_extra_info("peercert")
    if session is None or session.selected_alpn_protocol() != PROTOCOL or not certificate:
        return ""
    match certificate.get("subjectAltName"):
        case (("DNS", node),):
            return str(node)
        case _:
            return ""


def tls_error_text(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):  # those made by an event loop lack these attributes
        code, reason = getattr(error, "verify_code", 0), getattr(error, "reason", None)
        if code:
            return _VERIFY_ERRORS.get(code, f"its certificate is refused (X509_V_ERR {code})")
        return _TLS_ERRORS.get(reason or "", HANDSHAKE_FAILED)
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return "the handshake took too long"
    return "it disconnected during the handshake"
