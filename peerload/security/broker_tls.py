"""TLS connections to a broker.

The broker's certificate has to match its name or address and a CA: that of the cluster, those of a file, or those of the
system. There is no fallback without TLS. Nodes show their own certificate to a broker that asks for one, which then knows
each by its name.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from peerload.security.broker_address import BrokerUrl

SYSTEM = "system"
"""Value of the setting `mqtt_ca`: the CAs of the system."""
_VERIFY_ERRORS = {
    9: "its certificate is not valid yet; compare the clocks",
    10: "its certificate has expired",
    18: "its certificate is self-signed",
    19: "its certificate is of a CA that is not trusted (mqtt_ca)",
    20: "its certificate is of a CA that is not trusted (mqtt_ca)",
    21: "its certificate is of a CA that is not trusted (mqtt_ca)",
    62: "its certificate is for another name than its address",
    64: "its certificate is for another address",
}
"""Text of OpenSSL's verification errors (X509_V_ERR_…)."""
_TLS_ERRORS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate, and this node has none",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refuses this node, perhaps for want of a certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it says that this node's certificate is of a CA that it does not trust",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that this node's certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it says that this node's certificate was revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses this node's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses this node's certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it does not speak a safe version of TLS",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not speak a safe version of TLS",
}


class SecuredBroker(ssl.SSLSocket):
    """A socket that keeps the TLS error with which the other end closed it, because the library does not report it."""

    error: ssl.SSLError | None = None
    on_error: Callable[[], None] | None = None

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive as a socket does; an error of TLS stays in ``error``."""
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self.error = error
            if self.on_error is not None:
                self.on_error()
            raise

    def do_handshake(self, block: bool = False) -> None:
        """Do the TLS handshake; close the socket on failure, which not every caller does."""
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError:
            self.close()
            raise


class BrokerTls:
    """TLS settings for brokers. ca: the setting `mqtt_ca`, "" for the cluster's CA; cluster_ca: that CA (PEM); certificate:
    file with certificate and key of this node, None: it shows none."""

    def __init__(self, ca: str, cluster_ca: bytes, certificate: Path | None) -> None:
        self._ca = ca
        self._cluster_ca = cluster_ca
        self._certificate = certificate

    def context(self) -> ssl.SSLContext:
        """A TLS context with the current certificate: a renewed one is used from the next connection on. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # with verification, by name, too
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.sslsocket_class = SecuredBroker
        hint = f"the absolute path of the file of the CA that signed the broker's certificate, or {SYSTEM}"
        if self._ca not in {"", SYSTEM} and not Path(self._ca).is_absolute():
            raise ConfigError("mqtt_ca", f"{self._ca!r} cannot be used", why="it is not an absolute path", hint=hint)
        try:
            if self._ca == SYSTEM:
                context.load_default_certs(ssl.Purpose.SERVER_AUTH)
            elif self._ca:
                context.load_verify_locations(cafile=self._ca)
            else:
                context.load_verify_locations(cadata=self._cluster_ca.decode())
        except (OSError, ValueError) as error:  # ValueError: there is nothing in it
            is_read = isinstance(error, ssl.SSLError | ValueError)
            why = "it holds no certificate" if is_read else str(getattr(error, "strerror", error))
            what = self._ca or "the certificate of the cluster's CA"
            raise ConfigError("mqtt_ca", f"{what} cannot be used", why=why, hint=hint) from None
        if self._certificate is not None:
            try:
                context.load_cert_chain(self._certificate)
            except OSError as error:
                why = error.strerror or "it is damaged"
                raise ConfigError("state", f"the certificate {self._certificate} cannot be used", why=why) from None
        return context


def check_ca(ca: str) -> None:
    """Check that the setting `mqtt_ca` can be used. Raises ConfigError."""
    if ca:
        BrokerTls(ca, b"", None).context()


async def secured(sock: socket.socket, url: BrokerUrl, tls: BrokerTls) -> SecuredBroker:
    """Do the TLS handshake on a connection, and verify the broker. Closes it, and raises OSError or ConfigError, on
    failure."""
    try:
        wrapped = tls.context().wrap_socket(sock, server_hostname=url.host, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    assert isinstance(wrapped, SecuredBroker)
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                await _ready(loop.add_reader, loop.remove_reader, wrapped.fileno())
            except ssl.SSLWantWriteError:
                await _ready(loop.add_writer, loop.remove_writer, wrapped.fileno())
            else:
                return wrapped
    except BaseException:
        wrapped.close()
        raise


async def _ready(add: Callable[..., Any], remove: Callable[[int], Any], descriptor: int) -> None:
    """Wait until the socket is ready."""
    event = asyncio.Event()
    add(descriptor, event.set)
    try:
        await event.wait()
    finally:
        remove(descriptor)


def broker_valid_until(sock: object) -> float | None:
    """Expiry of the certificate of the other end of a socket (Unix s); None without TLS."""
    shown = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"]))) if shown else None


def broker_error_text(error: BaseException) -> str:
    """Text of a TLS error of a broker connection; empty for other errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFY_ERRORS.get(error.verify_code, f"its certificate is refused (X509_V_ERR {error.verify_code})")
    if isinstance(error, ssl.SSLEOFError):
        return "it disconnected during the TLS handshake"
    if isinstance(error, ssl.SSLError):
        return _TLS_ERRORS.get(error.reason or "", "TLS failed" + (f" ({error.reason})" if error.reason else ""))
    return ""
