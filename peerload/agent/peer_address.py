"""Addresses of peer links: `HOST:PORT`; of this machine alone where the agent has no cluster directory (rule J6)."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket

from peerload.model.errors import ConfigError

PORT_MAX = 0xFFFF
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that stand for any other machine (RFC 5737, 3849); nothing is ever sent there."""
LABEL_CHARACTERS_MAX = 63
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


def parse_address(key: str, text: str, *, loopback_only: bool) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT`; HOST may be a name. Raises ConfigError naming ``key``.

    loopback_only: another machine's is an error too, which says how to get a cluster directory.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
        raise ConfigError(key, f"{text[:100]!r} is not HOST:PORT", hint="for example 127.0.0.1:7117")
    if host == "localhost":
        host = "127.0.0.1"
    ip = _ip(host)
    if ip is None and not _is_name(host):
        raise ConfigError(key, f"{host[:100]!r} is no host", hint="for example 127.0.0.1:7117")
    if loopback_only and (ip is None or not ip.is_loopback):
        raise ConfigError(
            key,
            f"{host[:100]!r} is not a loopback address",
            why="without a cluster directory an agent meets those of its user on its own machine alone",
            hint="peerload cluster init DIR        then, here and with a copy of DIR elsewhere:  peerload up --cluster DIR …",
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets where the host has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def numeric(host: str) -> str:
    """The IP address of this host. Raises OSError if it has none."""
    if _ip(host) is not None:
        return host
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"no host name: {error}") from None
    return str(found[0][4][0])


def reachable(host: str) -> str:
    """Where others reach a socket bound to this IP address: itself; for "any", this machine's own address towards
    others. Raises OSError if it has none."""
    ip = _ip(host)
    if ip is None or not ip.is_unspecified:
        return host
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET  # noqa: PLR2004 -- IPv6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE[family == socket.AF_INET6], 9))  # asks the routing table; a datagram needs no more
        return str(probe.getsockname()[0])


def _is_name(host: str) -> bool:
    return _HOST.fullmatch(host) is not None and all(0 < len(one) <= LABEL_CHARACTERS_MAX for one in host.split("."))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
