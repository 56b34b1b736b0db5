"""Broker addresses, and the user and password for a broker."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from peerload.model.errors import ConfigError

PORT, TLS_PORT = 1883, 8883
ROOT = "peerload"
"""The first level of every topic."""
PASSWORD_BYTES_MAX = 4096
_EXAMPLE = "for example mqtts://broker.lab:8883"
_EXAMPLE_IPV6 = "for example mqtts://[fd00::5]:8883"


class BrokerUrl(NamedTuple):
    """``text`` is for people and logs: it has no password. ``tls``: True for mqtts://; there is no fallback."""

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
        user = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password else None
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{scheme}://{shown}:{port}", host, port, user, password, tls)

    def known_as(self, password_file: str) -> BrokerUrl:
        """The same address with the user and password of a file, if it has none itself. Raises ConfigError."""
        if not password_file or self.password is not None:
            return self
        user, password = read_password(Path(password_file))
        return self if self.user not in {None, user} else self._replace(user=user, password=password)


def _is_link_local(host: str) -> bool:
    """True if this is an IPv6 address that is valid on one link only."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return isinstance(ip, ipaddress.IPv6Address) and (ip.is_link_local or ip.scope_id is not None)


def read_password(path: Path) -> tuple[str, str]:
    """User and password from a file with one line `USER:PASSWORD` that nobody else can read. Raises ConfigError, which
    never contains anything of that line."""
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
            path, "it does not hold one line USER:PASSWORD", "write one line USER:PASSWORD, then: chmod 600 FILE"
        )
    return user, password


def _unusable(path: Path, why: str, hint: str) -> ConfigError:
    return ConfigError("mqtt_password_file", f"{path} cannot be used", why=why, hint=hint)


def without_password(url: str) -> str:
    """The address of a broker without its password."""
    try:
        parts = urlsplit(url)
        if parts.password is None:
            return url
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))
    except ValueError:
        return "***"
