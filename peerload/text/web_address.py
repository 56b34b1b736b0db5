"""Address of the web server, for the server and for the check of its settings."""

from __future__ import annotations

import contextlib
import ipaddress

from peerload.model.errors import ConfigError

PORT_DEFAULT = 7118
PORT_MAX = 0xFFFF


def web_address(listen: str, certificate: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ConfigError, also for another host than loopback without a certificate."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
        hint = f"127.0.0.1:{PORT_DEFAULT}, or the path of a socket"
        raise ConfigError("web.listen", f"{listen!r} is not an address", hint=hint)
    host = host.strip("[]")
    if not _is_loopback(host) and not certificate:
        raise ConfigError(
            "web.listen",
            f"{listen} is not loopback",
            why="only this machine is served without TLS",
            hint="give a certificate:  --tls-cert FILE --tls-key FILE        or tunnel:  ssh -L 7118:127.0.0.1:7118 HOST",
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
