"""Addresses of peer links: `HOST:PORT`, loopback alone until links are encrypted."""

from __future__ import annotations

import ipaddress

from peerload.model.errors import ConfigError


def parse_address(key: str, text: str) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT` of the loopback interface. Raises ConfigError naming ``key``."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:  # noqa: PLR2004
        raise ConfigError(key, f"{text[:100]!r} is not HOST:PORT", hint="for example 127.0.0.1:7117")
    return loopback(key, host), int(port)


def loopback(key: str, host: str) -> str:
    """The address of this host name if it is this machine's own; else ConfigError."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        why = "peers on other machines come with encryption"
        raise ConfigError(key, f"{host[:100]!r} is not a loopback address", why=why, hint="use 127.0.0.1")
    return host


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets where the host has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
