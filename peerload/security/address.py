"""Network addresses: parsing of `HOST:PORT` (`[HOST]:PORT` for IPv6), resolution, and the addresses of this machine.

An agent without a cluster directory uses loopback addresses only (rule J6).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import re
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Executor

PORT_MAX = 0xFFFF
DISCARD_PORT = 9
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, 3849) for lookups in the routing table; no packets are sent there."""
LABEL_CHARACTERS_MAX = 63
PARSED_MAX = 256
"""Parsed addresses that are remembered."""
ANY = ("0.0.0.0", "::")  # noqa: S104 -- nothing is bound here
"""The unspecified addresses: every address of a machine."""
_PREFERENCES, _PUBLIC = 72, 2
"""IPV6_ADDR_PREFERENCES and IPV6_PREFER_SRC_PUBLIC of linux/in6.h; the module socket does not define them."""
IP_FREEBIND = 15
"""Socket option of linux/in.h for both families; the module socket does not define it."""
_EXAMPLES = "for example 127.0.0.1:7117, or [fd00::1]:7117"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


def parse_address(key: str, text: str, *, loopback_only: bool) -> tuple[str, int]:
    """Parse `HOST:PORT` or `[HOST]:PORT` → host and port for sockets (an IPv4-mapped IPv6 address becomes IPv4).
    HOST may be a name. Raises ConfigError for the setting ``key``.

    loopback_only: an address of another machine is an error too.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if isinstance(_ip(text), ipaddress.IPv6Address) or (":" in host and not is_bracketed and _ip(host) is not None):
        inside, number = (text, "7117") if _ip(host) is None or not port.isdigit() else (host, port)
        hint = f"for example [{inside[:100]}]:{number}"
        raise ConfigError(key, f"{text[:100]!r} is not HOST:PORT", why="an IPv6 address needs brackets", hint=hint)
    if isinstance(_ip(text), ipaddress.IPv4Address) or (key == "peer" and not text.isdigit() and _is_name(text)):
        raise ConfigError(
            key, f"{text[:100]!r} is not HOST:PORT", why="the port is missing", hint=f"for example {text[:100]}:7117"
        )
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
        raise ConfigError(key, f"{text[:100]!r} is not HOST:PORT", hint=_EXAMPLES)
    if host == "localhost":
        host = "127.0.0.1"
    ip = _ip(host)
    if ip is None and not _is_name(host):
        raise ConfigError(key, f"{host[:100]!r} is not a host name or address", hint=_EXAMPLES)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.is_link_local or ip.scope_id is not None:
            raise ConfigError(
                key,
                f"{host[:100]!r} is a link-local address",
                why="it means something different on each machine",
                hint="use a global address, or a unique local one (fd00::/8)",
            )
        host = str(ip.ipv4_mapped or ip)
        ip = ip.ipv4_mapped or ip
    if loopback_only and (ip is None or not ip.is_loopback):
        raise ConfigError(
            key,
            f"{host[:100]!r} is not a loopback address",
            why="without a cluster directory an agent connects only to agents of its user on this machine",
            hint="peerload invite  makes one, and prints what to type elsewhere",
        )
    return host, int(port)


NETWORK_BITS = 64
"""Host bits of an IPv6 address, which do not identify a client: a client can use all addresses of its network."""


def network_of(address: str) -> str:
    """Key of an address for rate limits: an IPv4 address, the network of an IPv6 address, or any other text unchanged."""
    ip = _ip(plain_host(address))
    return f"{int(ip) >> NETWORK_BITS:x}" if isinstance(ip, ipaddress.IPv6Address) else plain_host(address)


def join_address(host: str, port: int) -> str:
    """Format `HOST:PORT`, with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """The address of a socket's other end without the IPv6 mapping (`::ffff:192.0.2.7`) of IPv4 addresses."""
    ip = _ip(host) if ":" in host else None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped) if mapped is not None else host


def is_loopback(address: str) -> bool:
    """True if this is a numeric `HOST:PORT` of the loopback interface. Names are not resolved."""
    ip = _ip(plain_host(address.rpartition(":")[0].strip("[]")))
    return ip is not None and ip.is_loopback


class NetworkAbsence(NamedTuple):
    """Behaviour of a listener while the network is down. may_lack_address: it may listen at an address that this machine does
    not have yet; last_host: the host to publish for an unspecified address, "": that is an error."""

    may_lack_address: bool = False
    last_host: str = ""


NOT_WITHOUT = NetworkAbsence()
"""For a listener that requires its network."""


async def resolve_one(host: str) -> str:
    """The first IP address of this host. Raises OSError if it has none."""
    if _ip(host) is not None:
        return host
    try:
        found = await resolve(host, 0, socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"not a host name: {error}") from None
    return str(found[0][4][0])


async def resolve(
    host: str,
    port: int | None,
    kind: socket.SocketKind,
    family: int = socket.AF_UNSPEC,
    lookups: Executor | None = None,
) -> list[tuple[Any, ...]]:
    """`socket.getaddrinfo`, in a thread of ``lookups`` (None: a worker thread) unless ``host`` is numeric. The event loop's own
    version is not used: it starts threads at its first use, and ends the process if it cannot. Raises OSError, UnicodeError."""
    if _ip(plain_host(host)) is not None:
        return socket.getaddrinfo(host, port, family, kind, flags=socket.AI_NUMERICHOST)
    look_up = functools.partial(socket.getaddrinfo, host, port, family, kind)
    return await asyncio.get_running_loop().run_in_executor(lookups, look_up)


async def open_tcp(host: str, port: int, lookups: Executor | None = None) -> socket.socket:
    """A non-blocking TCP connection to the first address of this host that accepts one. lookups: as for `resolve`. Raises
    OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    last = OSError("the name has no address")
    for family, kind, proto, _, address in await resolve(host, port, socket.SOCK_STREAM, lookups=lookups):
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
    """The address at which others reach a socket bound to this IP address. For an unspecified address that is the source
    address of the default route, or without one the only address of the machine. Raises OSError if there is none, or
    more than one."""
    ip = _ip(host)
    if ip is None or not ip.is_unspecified:
        return host
    family = socket.AF_INET6 if isinstance(ip, ipaddress.IPv6Address) else socket.AF_INET
    try:
        found = source_address(ELSEWHERE[family == socket.AF_INET6])
    except OSError:
        if (only := _only_address(family)) is not None:
            return only
        raise
    if ":" in found and ipaddress.IPv6Address(found).is_link_local:
        raise OSError(errno.EADDRNOTAVAIL, "only a link-local address")
    return found


def reachable_anywhere() -> str:
    """The address at which others reach this machine: IPv4, else IPv6. Raises OSError if it has neither."""
    try:
        return reachable(ANY[0])
    except OSError:
        return reachable(ANY[1])


def reachable_by_both(listen: str, port: int) -> tuple[str, ...]:
    """`HOST:PORT` for IPv4 and for IPv6 of a node that listens at `[::]`; empty for any other."""
    found = []
    for host in ANY if listen.startswith("[::]:") else ():
        with contextlib.suppress(OSError):
            found.append(join_address(reachable(host), port))
    return tuple(found)


def source_address(host: str) -> str:
    """The source address of packets to this IP address; for IPv6 not a temporary address (RFC 8981). Raises OSError without a
    route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # not supported by every kernel
                probe.setsockopt(socket.IPPROTO_IPV6, _PREFERENCES, _PUBLIC)
        probe.connect((host, DISCARD_PORT))  # only queries the routing table
        return str(probe.getsockname()[0])


def is_absent(listen: str) -> bool:
    """True if this is a numeric `HOST:PORT` that no interface of this machine has."""
    ip = _ip(listen.rpartition(":")[0].strip("[]"))
    if ip is None or ip.is_unspecified:
        return False
    family = socket.AF_INET6 if isinstance(ip, ipaddress.IPv6Address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError as error:
        return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return False


def _only_address(family: int) -> str | None:
    """The address of a machine on a network without a gateway; None unless there is exactly one."""
    import psutil  # noqa: PLC0415 -- costs memory, and few nodes need it

    addresses = [one.address for named in psutil.net_if_addrs().values() for one in named if one.family == family]
    usable = [ip for ip in map(_ip, addresses) if ip is not None and not ip.is_loopback and not ip.is_link_local]
    return str(usable[0]) if len(usable) == 1 else None


def _is_name(host: str) -> bool:
    return _HOST.fullmatch(host) is not None and all(0 < len(one) <= LABEL_CHARACTERS_MAX for one in host.split("."))


@functools.lru_cache(PARSED_MAX)
def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
