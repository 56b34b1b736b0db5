"""Addresses of peers: what can be dialled, and what is refused in words."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import uvloop

from peerload.agent.peers.connection import ConnectionRegistry
from peerload.agent.runtime import Workers
from peerload.model.errors import ConfigError, LinkUnavailable
from peerload.security.address import is_loopback, join_address, parse_address, plain_host, resolve_one
from tests.conftest import require_program
from tests.each import each
from tests.support import PATIENCE_S, credentials_of
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.peers.connection import Owner

LABEL = "a" * 63


@each("host", [LABEL, f"{LABEL}.{LABEL}", "a.b", "a_b-c.d", "10.0.0.1", "::1"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    assert parse_address("peer", f"[{host}]:7117", loopback_only=False) == (host, 7117)


@each("host", ["10.0.0.1", "0.0.0.0", "ws2", "ws2.example.org", "localhost"])
def test_a_host_without_a_port_is_told_with_one(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address("peer", host, loopback_only=False)
    assert str(caught.value.hint).endswith(f" {host}:7117")
    assert "IPv6" not in str(caught.value)


@each("host", ["a..b", f"{LABEL}a", f"{LABEL}a.x", ".a", "a.", "-a", "a b", "ü", f"{LABEL}." * 4])
def test_what_no_host_can_be_called_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address("peer", f"{host}:7117", loopback_only=False)
    assert caught.value.key == "peer"


@each(
    ("text", "host"),
    [
        ("[fd00::1]:7117", "fd00::1"),
        ("[FD00:0:0::0001]:7117", "fd00::1"),
        ("[::]:7117", "::"),
        ("[::ffff:192.0.2.7]:7117", "192.0.2.7"),
        ("192.0.2.7:7117", "192.0.2.7"),
    ],
)
def test_an_address_has_one_way_to_be_written_inside(text: str, host: str) -> None:
    assert parse_address("peer", text, loopback_only=False) == (host, 7117)
    assert parse_address("peer", join_address(host, 7117), loopback_only=False) == (host, 7117)


@each(
    ("text", "hint"),
    [
        ("fd00::1:7117", "[fd00::1]:7117"),
        ("fd00::1", "[fd00::1]:7117"),
        ("::1", "[::1]:7117"),
        (":::7117", "[::]:7117"),
        ("2001:db8:0:0:0:0:0:1", "[2001:db8:0:0:0:0:0:1]:7117"),
    ],
)
def test_ipv6_without_brackets_is_not_guessed_at(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="not HOST:PORT") as caught:
        parse_address("listen", text, loopback_only=False)
    assert caught.value.hint == f"for example {hint}"


@each("text", ["[fd00::1:7117", "fd00::1]:7117", "[fd00::1]", "[]:7117", "[fd00::1]:", "[[::1]]:1"])
def test_half_a_bracket_is_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address("listen", text, loopback_only=False)


@each("host", ["fe80::1", "fe80::1%eth0", "fd00::1%eth0"])
def test_an_address_of_one_link_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="link-local address") as caught:
        parse_address("listen", f"[{host}]:7117", loopback_only=False)
    assert "fd00::/8" in caught.value.hint


@pytest.mark.rule("J6")
def test_loopback_is_loopback_however_it_is_written() -> None:
    for address in ("127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "127.3.2.1:1"):
        assert is_loopback(address), address
        parse_address("listen", address, loopback_only=True)
    for address in ("192.0.2.7:1", "[fd00::1]:1", "[::ffff:192.0.2.7]:1", "[::]:1", "name:1", ""):
        assert not is_loopback(address), address
    for address in ("[fd00::1]:1", "[::ffff:192.0.2.7]:1", "[::]:1"):
        with pytest.raises(ConfigError, match=Says.NOT_LOOPBACK()):
            parse_address("listen", address, loopback_only=True)


def test_what_a_socket_for_both_kinds_tells_of_the_other_end() -> None:
    assert plain_host("::ffff:192.0.2.7") == "192.0.2.7"
    assert [plain_host(host) for host in ("fd00::1", "192.0.2.7", "name")] == ["fd00::1", "192.0.2.7", "name"]


@each("make", [uvloop.new_event_loop])
def test_dialling_what_no_host_can_be_called_is_a_link_that_is_not_there(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        registry = ConnectionRegistry(credentials_of("x"), cast("Any", None), Counter())
        with pytest.raises(LinkUnavailable):
            await registry.open("a..b:7117", "y", cast("Owner", None))
        with pytest.raises(OSError, match=r"a\.\.b|name"):
            await resolve_one("a..b")

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(test())


def test_names_without_an_answer_hold_up_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hang(*_: object) -> list[object]:
        asked.set()
        answer.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    async def test() -> None:
        workers, lookups = Workers(1), Workers(1)
        asyncio.get_running_loop().set_default_executor(cast("Any", workers))
        registry = ConnectionRegistry(credentials_of("x"), cast("Any", None), Counter(), lookups)
        dials = [
            asyncio.ensure_future(registry.open(f"n{number}.example:7117", "y", cast("Owner", None)))
            for number in range(4)
        ]
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.to_thread(asked.wait)
        finally:
            answer.set()
            for dial in dials:
                with pytest.raises(LinkUnavailable):
                    await dial
            lookups.shutdown()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the agent's own, which takes any executor
        runner.run(test())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a network of its own")
@each(
    ("addresses", "told"),
    [
        ((), "none"),
        (("10.9.8.7",), "10.9.8.7"),
        (("10.9.8.7", "10.9.9.7"), "none"),
        (("fd00:9::7",), "fd00:9::7"),
        (("fd00:9::7", "10.9.9.7"), "10.9.9.7"),
    ],
)
def test_two_machines_and_a_cable(addresses: tuple[str, ...], told: str) -> None:
    """A network without a way to anywhere else: the only address is the one that is meant."""
    program = Path(require_program("ip", "iproute2"))
    lines = [f"{program} link set lo up"]
    for number, address in enumerate(addresses):
        made = f"{program} link add cable{number} type veth peer name far{number}"
        lines += [
            made,
            f"{program} link set cable{number} up",
            f"{program} addr add {address}/{64 if ':' in address else 24} dev cable{number}",
        ]
    ask = "from peerload.security.address import reachable_anywhere\ntry: print(reachable_anywhere())\nexcept OSError: print('none')"
    script = " && ".join([*lines, shlex.join([sys.executable, "-c", ask])])
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == told, done.stderr
