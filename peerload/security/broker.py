"""Brokers: their addresses, credentials, TLS connections, and the files of a Mosquitto that serves a
cluster by TLS.

The broker's certificate must match its name or address and be signed by a CA of the cluster, of a file, or of the
system. There is no fallback without TLS. Nodes present their own certificate to a broker that requests one. Such a broker
identifies each node by its name."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from peerload.model.errors import BadRequest, ConfigError
from peerload.security import certificates
from peerload.security.private_files import make_directory

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from peerload.security.cluster_dir import ClusterDirectory


PORT, TLS_PORT = 1883, 8883
ROOT = "peerload"
"""The first level of every topic."""
PASSWORD_BYTES_MAX = 4096
_EXAMPLE = "for example mqtts://broker.lab:8883"
_EXAMPLE_IPV6 = "for example mqtts://[fd00::5]:8883"


class BrokerUrl(NamedTuple):
    """Address of a broker. ``text``: for messages and logs, without the password. ``tls``: True for mqtts://; there is no fallback."""

    text: str
    host: str
    port: int
    user: str | None
    password: str | None
    tls: bool = False

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, url: str) -> BrokerUrl:
        """Parse `mqtts://[user[:password]@]host[:port]`, or `mqtt://` for a broker without TLS. Raises ConfigError, which
        never contains the password."""
        scheme = url.partition("://")[0]
        if scheme not in {"mqtt", "mqtts"}:
            raise ConfigError("mqtt", "a broker's address starts with mqtts:// or mqtt://", hint=_EXAMPLE)
        tls = scheme == "mqtts"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, (TLS_PORT if tls else PORT) if parts.port is None else parts.port
        except ValueError:
            wants_brackets = url.partition("://")[2].rpartition("@")[2].count(":") > 1
            hint = _EXAMPLE_IPV6 if wants_brackets else _EXAMPLE
            raise ConfigError("mqtt", "not a broker's address", hint=hint) from None
        if host and _is_link_local(host):
            why = "it means something different on each machine"
            raise ConfigError("mqtt", "a link-local address", why=why, hint=_EXAMPLE_IPV6)
        if not host or port == 0 or parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise ConfigError("mqtt", "not a broker's address", hint=_EXAMPLE)
        if not _can_be_looked_up(host):
            raise ConfigError("mqtt", "not a broker's address", why="that is not a host name", hint=_EXAMPLE)
        user = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password else None
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{scheme}://{shown}:{port}", host, port, user, password, tls)

    def known_as(self, password_file: str) -> BrokerUrl:
        """This address, with the user and password of a file if it has none itself. Raises ConfigError."""
        if not password_file or self.password is not None:
            return self
        user, password = read_password(Path(password_file))
        return self if self.user not in {None, user} else self._replace(user=user, password=password)


def _can_be_looked_up(host: str) -> bool:
    """False for a name with an empty or too long label, for which getaddrinfo raises UnicodeError."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _is_link_local(host: str) -> bool:
    """True if this is an IPv6 address that is valid on one link only."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return isinstance(ip, ipaddress.IPv6Address) and (ip.is_link_local or ip.scope_id is not None)


def read_password(path: Path) -> tuple[str, str]:
    """User and password from a private file with one line `USER:PASSWORD`. Raises ConfigError, which
    never contains any part of that line."""
    if not path.is_absolute():
        raise _unusable(path, "it is not an absolute path", "such as /etc/peerload/mqtt-password")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else str(error.strerror)
        hint = "one line, USER:PASSWORD, in a file with mode 0600"
        if isinstance(error, PermissionError):
            hint = f"chown it to the user of this agent (uid {os.getuid()})"
        raise _unusable(path, why, hint) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unusable(path, "it is not a regular file", "name a file with one line, USER:PASSWORD")
        if status.st_uid not in {0, os.getuid()}:
            raise _unusable(
                path, "it belongs to another user", f"chown it to the user of this agent (uid {os.getuid()})"
            )
        if status.st_mode & 0o077:
            raise _unusable(path, "others may read or change it", f"chmod 600 {path}")
        raw = os.read(descriptor, PASSWORD_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    try:
        user, colon, password = raw.decode().removesuffix("\n").partition(":")
    except UnicodeDecodeError:
        user = colon = password = ""
    if (
        not user
        or not colon
        or not password
        or "\n" in password
        or "\0" in user + password
        or len(raw) > PASSWORD_BYTES_MAX
    ):
        raise _unusable(
            path, "it does not contain one line USER:PASSWORD", "write one line USER:PASSWORD, then: chmod 600 FILE"
        )
    return user, password


def _unusable(path: Path, why: str, hint: str) -> ConfigError:
    return ConfigError("mqtt_password_file", f"{path} cannot be used", why=why, hint=hint)


def without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.password is None:
            return url
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))
    except ValueError:
        return "***"


SYSTEM = "system"
"""Value of the setting `mqtt_ca`: the CAs of the system."""
_VERIFY_ERRORS = {
    9: "its certificate is not valid yet; compare the clocks",
    10: "its certificate has expired",
    18: "its certificate is self-signed",
    19: "its certificate was issued by a CA that is not trusted (mqtt_ca)",
    20: "its certificate was issued by a CA that is not trusted (mqtt_ca)",
    21: "its certificate was issued by a CA that is not trusted (mqtt_ca)",
    62: "its certificate is for another name than its address",
    64: "its certificate is for another address",
}
"""Text of OpenSSL's verification errors (X509_V_ERR_…)."""
_TLS_ERRORS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate, and this node has none",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refuses this node, perhaps because it shows no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the CA of this node's certificate",
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
    """A socket that stores the TLS error with which the other end closed it, because the library does not report it."""

    error: ssl.SSLError | None = None
    on_error: Callable[[], None] | None = None

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive as a socket does; a TLS error is stored in ``error``."""
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
    file with certificate and key of this node, None: no client certificate."""

    def __init__(self, ca: str, cluster_ca: bytes, certificate: Path | None) -> None:
        self._ca = ca
        self._cluster_ca = cluster_ca
        self._certificate = certificate

    def context(self) -> ssl.SSLContext:
        """A TLS context with the current certificate: a renewed one applies to the next connection. Raises ConfigError."""
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
        except (OSError, ValueError) as error:  # ValueError: an empty file
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


# -- the files of a Mosquitto ------------------------------------------------------------------------------------------

MOSQUITTO_PLACE = "/etc/mosquitto/peerload"
"""The directory of the files on the broker's machine."""
HOSTS_MAX = 16
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*", re.ASCII)
_HOST_LENGTH_MAX = 253

MOSQUITTO_ACL = """\
# Access rights for a Mosquitto that identifies clients by their certificates (use_identity_as_username): %u is the node's
# name. A node writes only below its own name, and reads messages for all nodes or for itself.
pattern write peerload/+/+/%u/#
pattern read peerload/+/+/+/state
pattern read peerload/+/+/+/ask
pattern read peerload/+/+/+/to/%u
pattern read $SYS/broker/version

# A revoked node can no longer decrypt messages, and its own are ignored. To deny it all topics too:
#   user NODE
#   topic deny #
# then: systemctl reload mosquitto
"""
MOSQUITTO_CONFIGURATION = f"""\
# Mosquitto (2.0 or newer) for peerload's load announcements, by TLS. It accepts only nodes of the cluster, identified by their
# certificates. Each writes only below its own name (mosquitto.acl). The broker carries only advice: without it, nodes
# communicate directly, and no durable data is lost.
#
# `peerload cluster broker-certificate DIR --host NAME` creates all files listed here. Mosquitto reads them as its own user.
listener 8883
cafile {MOSQUITTO_PLACE}/ca.pem
certfile {MOSQUITTO_PLACE}/broker.pem
keyfile {MOSQUITTO_PLACE}/broker.key
tls_version tlsv1.3
require_certificate true
use_identity_as_username true
allow_anonymous false
acl_file {MOSQUITTO_PLACE}/mosquitto.acl

# Without this, a small message may wait 40 ms for the acknowledgement of the previous one.
set_tcp_nodelay true

# A new node receives the retained states of all others together: keep this above the number of nodes. Excess messages are dropped.
max_queued_messages 10000
max_inflight_messages 100

# peerload's messages have at most 4 KiB, so larger ones are not from it.
max_packet_size 16384

# Memory limit: a frozen subscriber fills only its own queue.
memory_limit 268435456

# A node that ends without disconnecting is noticed after one and a half times its keep-alive.
max_keepalive 120
"""


def make_mosquitto_files(cluster: ClusterDirectory, directory: Path, hosts: Sequence[str], now: datetime) -> datetime:
    """Create ``directory`` with ca.pem, broker.pem, broker.key, mosquitto.acl and mosquitto.conf → the end of the
    certificate's validity. hosts: names and addresses by which nodes reach the broker. Raises BadRequest and then leaves
    no files."""
    for host in hosts:
        if not _is_host(host):
            raise BadRequest(f"{host[:100]!r} is not a host name or address", hint="--host broker.lab")
    if not 0 < len(hosts) <= HOSTS_MAX:
        raise BadRequest(f"name 1 to {HOSTS_MAX} hosts by which nodes reach the broker", hint="--host broker.lab")
    if os.path.lexists(directory):
        raise BadRequest(f"{directory} exists", why="nothing is overwritten", hint="name another directory")
    pair = certificates.certify_broker(cluster.authority, hosts, now)
    contents = {
        "ca.pem": cluster.authority.certificate,
        "broker.pem": pair.certificate,
        "broker.key": pair.key,
        "mosquitto.acl": MOSQUITTO_ACL.encode(),
        "mosquitto.conf": MOSQUITTO_CONFIGURATION.encode(),
    }
    try:
        make_directory(directory, contents)
    except OSError as error:
        raise BadRequest(f"{directory} cannot be made", why=str(error.strerror)) from None
    return certificates.valid_until(pair.certificate)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= _HOST_LENGTH_MAX and _HOST.fullmatch(text) is not None
    return True
