"""Changes of this node's address. Imported before the agent is (agent/main.py).

A machine may get another address by a move to another network or a new DHCP lease. If `peerload join` or `invite` chose the
address to listen at, another one is chosen when the machine no longer has it, and the agent restarts in its
process; tasks continue. An address from a flag, a variable or a file is never changed.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.runtime import Ending, next_tick
from peerload.model.errors import ConfigError
from peerload.security import node_identity_file
from peerload.security.address import is_absent, join_address, parse_address, reachable, source_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.runtime import AgentInfo, RunState
    from peerload.agent.store.write_ahead import EventLog
    from peerload.model.config import AgentConfig

CHECK_EVERY_S = 4.0
PARSED_MAX = 64
GONE_FOR = 2
"""Number of successive checks that have to agree: an address is missing for a moment while its interface is configured."""

_log = logging.getLogger("peerload.peer")


def with_current_addresses(config: AgentConfig, origins: Mapping[str, str]) -> AgentConfig:
    """The settings, with another address of this machine if the one that joining chose is gone."""
    address = _moved(config, origins, config.peer)
    if not address:
        return config
    _log.warning("listen address changed: old=%s new=%s", config.listen, address)
    if why := _save(config, address):
        _log.warning("cannot save the listen address: address=%s error=%s", address, why)
    return msgspec.structs.replace(config, listen=address)


@dataclass(eq=False, repr=False)
class AddressWatch:
    """Restarts the agent when the address of this machine has changed."""

    _info: AgentInfo
    _local: LocalNode
    _run: RunState
    _events: EventLog

    async def run(self) -> None:
        """Check until the agent restarts."""
        config, warned, seen = self._info.config, False, 0
        while True:
            await next_tick(CHECK_EVERY_S)
            others = [address for address in self._local.peer_addresses() if address]
            moved = _moved(config, self._info.origins, [*others, *config.peer])
            address = moved or self._new_own_address()
            seen = seen + 1 if address else 0
            if seen >= GONE_FOR and not self._run.is_stopping:
                if moved and (why := _save(config, moved)):  # the next start knows fewer members, and might not find it
                    if not warned:
                        _log.warning("cannot save the listen address: address=%s error=%s", moved, why)
                    warned = True
                    continue
                old = self._info.identity.address
                _log.warning("restarting: listen address changed: old=%s new=%s", old, address)
                self._events.record("agent", "restarting", reason=f"its address was {old} and is {address}")
                self._run.stop(Ending.RESTART)
                return
            if not warned and not address and is_absent(config.listen):
                warned = True
                _log.warning(
                    "listen address is gone from this machine; no peer can reach this node: address=%s", config.listen
                )

    def _new_own_address(self) -> str:
        """The current address of a node that listens at every address, if it differs from the published one; otherwise
        empty."""
        config, published = self._info.config, self._info.identity.address
        ip = _ip(config.listen)
        if ip is None or not ip.is_unspecified or config.advertise:
            return ""
        try:
            found = join_address(reachable(str(ip)), int(published.rpartition(":")[2]))
        except OSError:
            return ""  # no network: it may return with the same address
        return found if found != published else ""


def _moved(config: AgentConfig, origins: Mapping[str, str], others: Iterable[str]) -> str:
    """The new address to listen at if the one that joining chose is gone and there is another; otherwise empty."""
    if origins.get("listen", "").rpartition("/")[2] != node_identity_file.NAME or not is_absent(config.listen):
        return ""
    ip, port = _ip(config.listen), config.listen.rpartition(":")[2]
    hosts = [host for other in others if (host := _ip(other)) is not None and host.version == ip.version] if ip else []
    for host in hosts:
        if (found := _towards(str(host))) and not ipaddress.ip_address(found).is_loopback:
            return join_address(found, _free(found, int(port)))
    return ""


def _towards(host: str) -> str:
    """The source address of packets to this host; empty without a route."""
    try:
        return source_address(host)
    except OSError:
        return ""


def _free(host: str, port: int) -> int:
    """``port`` if it is free at ``host``, otherwise 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                return 0
    return port


@functools.lru_cache(PARSED_MAX)
def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(parse_address("listen", address, loopback_only=False)[0])
    except (ValueError, ConfigError):
        return None


def _save(config: AgentConfig, address: str) -> str:
    """Save the address for the next start → the reason why this failed, or ""."""
    try:
        found = node_identity_file.read(Path(config.state))
        if found is not None:
            node_identity_file.write(Path(config.state), found._replace(listen=address))
    except (OSError, ConfigError) as error:
        return str(error)
    return ""
