"""Addresses of peers: what can be dialled, and what is refused in words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest
import uvloop

from peerload.agent.peer_address import numeric, parse_address
from peerload.agent.peer_connection import PeerConnection, dial
from peerload.model.errors import ConfigError, LinkUnavailable
from peerload.model.messages import Identity
from tests.support import credentials_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.peer_connection import Owner

LABEL = "a" * 63


@pytest.mark.parametrize("host", [LABEL, f"{LABEL}.{LABEL}", "a.b", "a_b-c.d", "10.0.0.1", "::1"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    assert parse_address("peer", f"[{host}]:7117", loopback_only=False) == (host, 7117)


@pytest.mark.parametrize("host", ["a..b", f"{LABEL}a", f"{LABEL}a.x", ".a", "a.", "-a", "a b", "ü", f"{LABEL}." * 4])
def test_what_no_host_can_be_called_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address("peer", f"{host}:7117", loopback_only=False)
    assert caught.value.key == "peer"


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_dialling_what_no_host_can_be_called_is_a_link_that_is_not_there(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        identity = Identity("x", "boot", "machine", "store")
        with pytest.raises(LinkUnavailable):
            await dial(
                "a..b:7117",
                "y",
                credentials_of("x"),
                lambda: PeerConnection(cast("Owner", None), "default", identity, dialled=True),
            )
        with pytest.raises(OSError, match=r"no host name|not known"):
            await numeric("a..b")

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(test())
