"""Preflight checks: an agent that cannot serve on this machine ends before it starts a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.control.local_socket import check_socket
from peerload.agent.peers.listener import check_listening
from peerload.security.address import parse_address
from peerload.security.broker import BrokerUrl, check_ca

if TYPE_CHECKING:
    from peerload.agent.systemd.notify import ServiceManager
    from peerload.model.config import AgentConfig


def check_addresses(config: AgentConfig, *, loopback_only: bool) -> None:
    """Check that every address is valid. Raises ConfigError naming the key.

    loopback_only: addresses of other machines are errors too, since the agent has no cluster beyond its machine.
    """
    told = (config.advertise,) if config.advertise else ()
    for key, addresses in (("listen", (config.listen,)), ("advertise", told), ("peer", config.peer)):
        for address in addresses:
            parse_address(key, address, loopback_only=loopback_only)
    for url in config.mqtt:
        BrokerUrl.parse(url).known_as(config.mqtt_password_file)
    if config.mqtt:
        check_ca(config.mqtt_ca)


async def check_places(config: AgentConfig, manager: ServiceManager, *, loopback_only: bool) -> None:
    """Check that the places where clients and peers connect are free. Raises ConfigError."""
    handed_over = manager.listener(config.socket)
    if handed_over is not None:
        handed_over.close()
    else:
        check_socket(config)
    await check_listening(*parse_address("listen", config.listen, loopback_only=loopback_only))
