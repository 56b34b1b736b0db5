"""Addresses of peer links: `HOST:PORT`, or `[HOST]:PORT` for IPv6; of this machine alone where the agent has no cluster
directory (rule J6)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import re
import socket
from typing import Any

import psutil

from peerload.model.errors import ConfigError

PORT_MAX = 0xFFFF
DISCARD_PORT = 9
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that stand for any other machine (RFC 5737, 3849); nothing is ever sent there."""
LABEL_CHARACTERS_MAX = 63
ANY = ("0.0.0.0", "::")  # noqa: S104 -- nothing is bound here
"""What stands for every address of a machine."""
_PREFERENCES, _PUBLIC = 72, 2
"""IPV6_ADDR_PREFERENCES and IPV6_PREFER_SRC_PUBLIC of linux/in6.h, which the module socket has no names for."""
_EXAMPLES = "for example 127.0.0.1:7117, or [fd00::1]:7117"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


def parse_address(key: str, text: str, *, loopback_only: bool) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT`; HOST may be a name, and an IPv6 address has the brackets → HOST as sockets take it (an
    IPv4 address that is written as IPv6 is IPv4). Raises ConfigError naming ``key``.

    loopback_only: another machine's is an error too, which says how to get a cluster directory.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if _ip(text) is not None or (":" in host and not is_bracketed and _ip(host) is not None):
        inside, number = (text, "7117") if _ip(host) is None or not port.isdigit() else (host, port)
        hint = f"for example [{inside[:100]}]:{number}"
        raise ConfigError(key, f"{text[:100]!r} is not HOST:PORT", why="an IPv6 address wants brackets", hint=hint)
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
        raise ConfigError(key, f"{text[:100]!r} is not HOST:PORT", hint=_EXAMPLES)
    if host == "localhost":
        host = "127.0.0.1"
    ip = _ip(host)
    if ip is None and not _is_name(host):
        raise ConfigError(key, f"{host[:100]!r} is no host", hint=_EXAMPLES)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.is_link_local or ip.scope_id is not None:
            raise ConfigError(
                key,
                f"{host[:100]!r} is an address of one link alone",
                why="what it means depends on the machine that reads it",
                hint="name one that means the same everywhere: a global one, or a unique local one (fd00::/8)",
            )
        host = str(ip.ipv4_mapped or ip)
        ip = ip.ipv4_mapped or ip
    if loopback_only and (ip is None or not ip.is_loopback):
        raise ConfigError(
            key,
            f"{host[:100]!r} is not a loopback address",
            why="without a cluster directory an agent meets those of its user on its own machine alone",
            hint="peerload invite  makes one, and prints what to type elsewhere",
        )
    return host, int(port)


NETWORK_BITS = 64
"""Bits of an IPv6 address that do not identify a client: whoever has one address of a network has all of them."""


def network_of(address: str) -> str:
    """What counts as one address in limits: an IPv4 address, the network of an IPv6 address, or any other text itself."""
    ip = _ip(plain_host(address))
    return f"{int(ip) >> NETWORK_BITS:x}" if isinstance(ip, ipaddress.IPv6Address) else plain_host(address)


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets where the host has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """What a socket calls the other end, as people and settings do: IPv4 by its own name, although a socket for both kinds
    says it in IPv6's (`::ffff:192.0.2.7`)."""
    ip = _ip(host) if ":" in host else None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped) if mapped is not None else host


def is_loopback(address: str) -> bool:
    """Whether this `HOST:PORT` of numbers is on this machine. A name is not looked up: no."""
    ip = _ip(plain_host(address.rpartition(":")[0].strip("[]")))
    return ip is not None and ip.is_loopback


async def numeric(host: str) -> str:
    """The IP address of this host. Raises OSError if it has none."""
    if _ip(host) is not None:
        return host
    try:
        found = await looked_up(host, 0, socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"no host name: {error}") from None
    return str(found[0][4][0])


async def looked_up(
    host: str, port: int | None, kind: socket.SocketKind, family: int = socket.AF_UNSPEC
) -> list[tuple[Any, ...]]:
    """What `socket.getaddrinfo` says, asked in a worker unless ``host`` is a number. Not by the event loop's own: that
    makes threads when it is first used, and ends the process if it cannot. Raises OSError, UnicodeError."""
    if _ip(plain_host(host)) is not None:
        return socket.getaddrinfo(host, port, family, kind, flags=socket.AI_NUMERICHOST)
    return await asyncio.to_thread(socket.getaddrinfo, host, port, family, kind)


async def connected(host: str, port: int) -> socket.socket:
    """A TCP connection to the first address of this host that takes one; it does not block. Raises OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    last = OSError("the name has no address")
    for family, kind, proto, _, address in await looked_up(host, port, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise last


def reachable(host: str) -> str:
    """Where others reach a socket bound to this IP address: itself; for "any", this machine's own address towards
    others, or where it knows no way to all of them the only one it has. Raises OSError if it has none, or several."""
    ip = _ip(host)
    if ip is None or not ip.is_unspecified:
        return host
    family = socket.AF_INET6 if isinstance(ip, ipaddress.IPv6Address) else socket.AF_INET
    try:
        found = towards(ELSEWHERE[family == socket.AF_INET6])
    except OSError:
        if (only := _only_address(family)) is not None:
            return only
        raise
    if ":" in found and ipaddress.IPv6Address(found).is_link_local:
        raise OSError(errno.EADDRNOTAVAIL, "no address but for one link")
    return found


def reachable_anywhere() -> str:
    """This machine's own address towards others: of IPv4, or where it has none of IPv6. Raises OSError if it has neither."""
    try:
        return reachable(ANY[0])
    except OSError:
        return reachable(ANY[1])


def reachable_by_both(listen: str, port: int) -> tuple[str, ...]:
    """Where a node that listens at every address of both kinds is reached by each: `HOST:PORT`; nothing for any other."""
    found = []
    for host in ANY if listen.startswith("[::]:") else ():
        with contextlib.suppress(OSError):
            found.append(join_address(reachable(host), port))
    return tuple(found)


def towards(host: str) -> str:
    """This machine's own address towards that IP address; of IPv6 one that lasts, not one made up for a day (RFC 8981).
    Raises OSError if it knows no way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # a kernel without it chooses as it likes
                probe.setsockopt(socket.IPPROTO_IPV6, _PREFERENCES, _PUBLIC)
        probe.connect((host, DISCARD_PORT))  # asks the routing table; a datagram needs no more
        return str(probe.getsockname()[0])


def _only_address(family: int) -> str | None:
    """The address of a machine on a network without a gateway, such as two machines and a cable; None if that is not one."""
    told = [one.address for named in psutil.net_if_addrs().values() for one in named if one.family == family]
    usable = [ip for ip in map(_ip, told) if ip is not None and not ip.is_loopback and not ip.is_link_local]
    return str(usable[0]) if len(usable) == 1 else None


def _is_name(host: str) -> bool:
    return _HOST.fullmatch(host) is not None and all(0 < len(one) <= LABEL_CHARACTERS_MAX for one in host.split("."))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
