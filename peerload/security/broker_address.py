"""Where a broker is, and who we are to it."""

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
    """``text`` is for people and logs: it holds no password. ``tls``: whether the way to it is encrypted; there is no
    falling back from one to the other."""

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
        """From `mqtts://[user[:password]@]host[:port]`, or `mqtt://` for one that is reached without TLS. Raises
        ConfigError, never with the password in it."""
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
        if host and _is_of_one_link(host):
            why = "what it means depends on the machine that reads it"
            raise ConfigError("mqtt", "an address of one link alone", why=why, hint=_EXAMPLE_IPV6)
        if not host or port == 0 or parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise ConfigError("mqtt", "not a broker's address", hint=_EXAMPLE)
        user = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password else None
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{scheme}://{shown}:{port}", host, port, user, password, tls)

    def known_as(self, password_file: str) -> BrokerUrl:
        """The same with the user and password of a file, where this address names none. Raises ConfigError."""
        if not password_file or self.password is not None:
            return self
        user, password = read_password(Path(password_file))
        return self if self.user not in {None, user} else self._replace(user=user, password=password)


def _is_of_one_link(host: str) -> bool:
    """Whether it is an IPv6 address that means nothing without an interface of one machine."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return isinstance(ip, ipaddress.IPv6Address) and (ip.is_link_local or ip.scope_id is not None)


def read_password(path: Path) -> tuple[str, str]:
    """Who we are to a broker, of a file with one line `USER:PASSWORD` that nobody else can read. Raises ConfigError,
    never with anything of that line in it."""
    if not path.is_absolute():
        raise _unusable(path, "it is no whole path", "such as /etc/peerload/mqtt-password")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if path.is_symlink() else str(error.strerror)
        hint = "one line, USER:PASSWORD, in a file with mode 0600"
        if isinstance(error, PermissionError):
            hint = f"chown it to the user of this agent (uid {os.getuid()})"
        raise _unusable(path, why, hint) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unusable(path, "it is no file", "name a file with one line, USER:PASSWORD")
        if status.st_uid not in {0, os.getuid()}:
            raise _unusable(path, "it is somebody else's", f"chown it to the user of this agent (uid {os.getuid()})")
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
        raise _unusable(path, "it does not hold one line USER:PASSWORD", "write it anew, then: chmod 600 FILE")
    return user, password


def _unusable(path: Path, why: str, hint: str) -> ConfigError:
    return ConfigError("mqtt_password_file", f"{path} cannot be used", why=why, hint=hint)


def without_password(url: str) -> str:
    """A broker's address as it may be shown."""
    try:
        parts = urlsplit(url)
        if parts.password is None:
            return url
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))
    except ValueError:
        return "***"
