"""What an agent needs of its machine before it starts anything: one that cannot be up leaves no process behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.control import check_socket
from peerload.agent.mqtt import BrokerUrl
from peerload.agent.peer_address import parse_address
from peerload.agent.peer_listen import check_listening

if TYPE_CHECKING:
    from peerload.model.config import AgentConfig


def check_addresses(config: AgentConfig, *, loopback_only: bool) -> None:
    """That every address is one. Raises ConfigError naming the key.

    loopback_only: those of other machines are errors too, where the agent is of no cluster beyond its own.
    """
    for key, addresses in (("listen", (config.listen,)), ("peer", config.peer)):
        for address in addresses:
            parse_address(key, address, loopback_only=loopback_only)
    for url in config.mqtt:
        BrokerUrl.parse(url)


async def check_places(config: AgentConfig, *, loopback_only: bool) -> None:
    """That the places where clients and peers are to find it are free now. Raises ConfigError."""
    check_socket(config.socket)
    await check_listening(*parse_address("listen", config.listen, loopback_only=loopback_only))
