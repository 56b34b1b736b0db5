"""What the links of one node are secured with: TLS 1.3, mutual, with certificates of the cluster's CA and no other.

Each node makes its own key and has its certificate under STATE/tls; it is made anew when two thirds of its life are
over. There is one way to prove who one is, and none to do without (rules J3, S10).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from peerload.agent import certificates
from peerload.agent.machine import private_directory
from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.agent.certificates import Facts
    from peerload.agent.cluster import Cluster

PROTOCOL = "peerload/1"
"""What the two ends agree to speak (ALPN)."""
FILE_BYTES_MAX = 64 << 10
NO_DATES = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the module ssl has no name for. Agents that share a machine share its clock:
one that was set must not part them."""
RENEWAL_LOOK_S = 3600.0
"""How often it is looked whether the certificate is to be made anew."""

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
    anew goes into both, and links that stand are not touched.

    Raises ConfigError if the directory cannot be used.
    """

    def __init__(self, cluster: Cluster, node: str, directory: Path) -> None:
        self.cluster = cluster
        self.node = node
        self._directory = directory
        self._path = directory / "node.pem"
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, cluster)
        self.server.num_tickets = 0  # a session is proven anew each time
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, cluster)
        self.facts: Facts | None = None
        self.renew_if_due()

    def __repr__(self) -> str:
        return f"Credentials({self.node!r} of {self.cluster.name!r})"

    async def keep_valid(self) -> None:
        """Make it anew whenever that is due, for as long as the agent runs."""
        while True:
            await asyncio.sleep(RENEWAL_LOOK_S)
            try:
                if self.renew_if_due():
                    _log.info("this node has a new certificate")
            except ConfigError as error:
                _log.error("this node's certificate is not made anew: %s", error)

    def renew_if_due(self, now: datetime | None = None) -> bool:
        """Make a new key and certificate if there is none, it is another's or of another CA, or two thirds of its life
        are over. Returns whether they were made; raises ConfigError."""
        now = now or datetime.now(UTC)
        kept = self.facts or self._kept()
        is_due = kept is None or not self._is_good(kept, now)
        try:
            if is_due:
                private_directory(self._directory)
                pair = certificates.issue(self.cluster.authority, self.node, now)
                self._write(pair.key + pair.certificate)
                kept = certificates.node_facts(self.cluster.authority, pair.certificate)
            if self.facts != kept:
                for context in (self.server, self.client):
                    context.load_cert_chain(self._path)
        except OSError as error:
            why = error.strerror or "it is damaged"
            raise ConfigError("state", f"{self._path} cannot be used", why=why, hint=f"rm {self._path}") from None
        self.facts = kept
        return is_due

    def _is_good(self, kept: Facts, now: datetime) -> bool:
        made_at = kept.valid_from + certificates.SKEW
        due_at = min(made_at + certificates.RENEWED_AFTER, kept.valid_until)
        return kept.name == self.node and kept.valid_from <= now < due_at

    def _kept(self) -> Facts | None:
        """What the certificate on disk says, if it can be used."""
        try:
            with self._path.open("rb") as file:
                return certificates.node_facts(self.cluster.authority, file.read(FILE_BYTES_MAX))
        except OSError:
            return None  # if it is more than missing, making it anew says so
        except ValueError:
            _log.info("a new certificate is made: the one in %s is of another cluster, or damaged", self._path)
            return None

    def _write(self, data: bytes) -> None:
        """Key and certificate in one file, so that they are replaced together."""
        part = self._path.with_suffix(".part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        part.replace(self._path)


def _context(protocol: int, cluster: Cluster) -> ssl.SSLContext:
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
