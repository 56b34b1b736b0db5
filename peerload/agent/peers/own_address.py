"""This machine's own address, when it changes: a laptop that is carried elsewhere, a lease of DHCP that was not renewed, a
tunnel that was made anew.

Where `peerload join` or `invite` has chosen the address to listen at, another is chosen when this machine does not have it
any more, and the agent starts again in its process; tasks run on. An address that was named by a flag, a variable or
a file is left alone: whoever names one may mean that one only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.run_state import Ending
from peerload.model.errors import ConfigError
from peerload.security import node_identity_file
from peerload.security.address import join_address, parse_address, reachable, towards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from peerload.agent.parts import Parts
    from peerload.model.config import AgentConfig

LOOK_EVERY_S = 3.0
GONE_FOR = 2
"""Looks in a row that have to agree: an address may be away for a moment while its interface is set up anew."""

_log = logging.getLogger("peerload.peer")


def followed(config: AgentConfig, origins: Mapping[str, str]) -> AgentConfig:
    """The same settings, with an address of this machine to listen at where the one that joining has chosen is gone."""
    address = _moved(config, origins, config.peer)
    if not address:
        return config
    _log.warning("this machine's address is not %s any more; peers reach it at %s now", config.listen, address)
    _keep(config, address)
    return msgspec.structs.replace(config, listen=address)


async def watch(parts: Parts) -> None:
    """Have the agent start again when its address has changed."""
    config, warned, seen = parts.config, False, 0
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        others = [peer.identity.address for peer in parts.node.membership if peer.identity.address]
        address = _moved(config, parts.origins, [*others, *config.peer]) or _seen_otherwise(parts)
        seen = seen + 1 if address else 0
        if seen >= GONE_FOR and not parts.run.is_stopping:
            why = f"its address was {parts.identity.address} and is {address}"
            _log.warning("the agent starts again: %s", why)
            parts.journal.happened("agent", "restarting", reason=why)
            parts.run.stop(Ending.RESTART)
            return
        if not warned and not address and is_gone(config.listen):
            warned = True
            _log.warning("%s is no address of this machine any more: nobody reaches this node there", config.listen)


def is_gone(listen: str) -> bool:
    """Whether this is a `HOST:PORT` of numbers that no interface of this machine has."""
    ip = _ip(listen)
    if ip is None or ip.is_unspecified:
        return False
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET  # noqa: PLR2004 -- IPv6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return True
    return False


def _moved(config: AgentConfig, origins: Mapping[str, str], others: Iterable[str]) -> str:
    """Where to listen now, if the address that joining has chosen is gone and there is another; else empty."""
    if Path(origins.get("listen", "")).name != node_identity_file.NAME or not is_gone(config.listen):
        return ""
    ip, port = _ip(config.listen), config.listen.rpartition(":")[2]
    hosts = [host for other in others if (host := _ip(other)) is not None and host.version == ip.version] if ip else []
    for host in hosts:
        if (found := _towards(str(host))) and not ipaddress.ip_address(found).is_loopback:
            return join_address(found, _free(found, int(port)))
    return ""


def _seen_otherwise(parts: Parts) -> str:
    """Where one that listens at every address is found now, if that is not what it tells; else empty."""
    ip, told = _ip(parts.config.listen), parts.identity.address
    if ip is None or not ip.is_unspecified or parts.config.advertise:
        return ""
    try:
        now = join_address(reachable(str(ip)), int(told.rpartition(":")[2]))
    except OSError:
        return ""  # no network at all: it may be back with the same address
    return now if now != told else ""


def _towards(host: str) -> str:
    """This machine's own address towards that one; empty if it has none."""
    try:
        return towards(host)
    except OSError:
        return ""


def _free(host: str, port: int) -> int:
    """This port if nobody has it there, else 0: any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                return 0
    return port


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(parse_address("listen", address, loopback_only=False)[0])
    except (ValueError, ConfigError):
        return None


def _keep(config: AgentConfig, address: str) -> None:
    """The next start begins there."""
    try:
        found = node_identity_file.read(Path(config.state))
        if found is not None:
            node_identity_file.write(Path(config.state), found._replace(listen=address))
    except (OSError, ConfigError) as error:
        _log.warning("where this node listens now cannot be kept: %s", error)
