"""An agent follows its machine's address where joining has chosen it, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent.peers import addresses, links
from peerload.agent.peers.links import check_listening
from peerload.agent.peers.membership import AddressFile, GossipSocket
from peerload.agent.runtime import Ending, RunState
from peerload.agent.views.agent import PeerLinksView
from peerload.config.loader import ENVIRONMENT, FLAG
from peerload.model.config import AgentConfig
from peerload.model.errors import ConfigError
from peerload.security import node_identity_file
from peerload.security.address import is_absent, parse_address
from peerload.wire.seal import Sealer
from tests.each import each
from tests.support import own_loopback, security_events

if TYPE_CHECKING:
    from pathlib import Path

ELSEWHERE = "192.0.2.7:7117"
"""An address that this machine does not have."""
HERE = "127.0.0.1:7117"


def config(state: Path, listen: str, *peers: str) -> AgentConfig:
    return AgentConfig(node="n1", state=str(state), socket=str(state / "sock"), listen=listen, peer=peers)


def origins(state: Path) -> dict[str, str]:
    return {"listen": str(state / node_identity_file.NAME)}


@each(
    ("listen", "gone"),
    [
        (ELSEWHERE, True),
        (HERE, False),
        ("0.0.0.0:0", False),
        ("[::]:1", False),
        ("[::1]:7117", False),
        ("[2001:db8::7]:7117", True),
        ("somewhere.example:7117", False),
    ],
)
def test_whether_an_address_is_gone(listen: str, gone: bool) -> None:
    assert is_absent(listen) is gone


def test_for_want_of_descriptors_no_address_is_called_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_words: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", short)
    assert not is_absent(ELSEWHERE)


def test_the_way_to_the_members_gives_the_new_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_identity_file.write(
        tmp_path, node_identity_file.NodeIdentityFile("/c", "n1", ELSEWHERE, ("198.51.100.9:7117",))
    )
    monkeypatch.setattr(addresses, "_towards", lambda host: "198.51.100.2" if host == "198.51.100.9" else "")
    monkeypatch.setattr(addresses, "_free", lambda _host, port: port)
    before = config(tmp_path, ELSEWHERE, "198.51.100.9:7117")
    assert addresses.with_current_addresses(before, origins(tmp_path)).listen == "198.51.100.2:7117"
    kept = node_identity_file.read(tmp_path)
    assert kept is not None
    assert kept.listen == "198.51.100.2:7117"


@each("writable", [True, False])
def test_the_next_start_listens_where_the_watch_has_moved_it(
    *, writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The members that the watch knows are not known to the next start, which would restart again and again."""
    checks = 0

    async def tick(_every_s: float) -> None:
        nonlocal checks
        checks += 1
        if checks > 3 * addresses.GONE_FOR:
            raise asyncio.CancelledError

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    node_identity_file.write(tmp_path, node_identity_file.NodeIdentityFile("/c", "n1", ELSEWHERE))
    monkeypatch.setattr(addresses, "next_tick", tick)
    monkeypatch.setattr(addresses, "_towards", {"198.51.100.9": "198.51.100.2"}.get)
    monkeypatch.setattr(addresses, "_free", lambda _host, port: port)
    if not writable:
        monkeypatch.setattr(node_identity_file, "write_private", refuse)
    run, own = RunState(), SimpleNamespace(address=ELSEWHERE)
    info: Any = SimpleNamespace(config=config(tmp_path, ELSEWHERE), origins=origins(tmp_path), identity=own)
    local: Any = SimpleNamespace(peer_addresses=lambda: ["198.51.100.9:7117"])
    events: Any = SimpleNamespace(record=lambda *_, **__: None)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(addresses.AddressWatch(info, local, run, events).run())
    kept = node_identity_file.read(tmp_path)
    assert kept is not None
    assert (run.ending is Ending.RESTART, kept.listen) == (writable, "198.51.100.2:7117" if writable else ELSEWHERE)
    assert caplog.text.count("cannot save") == (not writable)
    if writable:
        assert addresses.with_current_addresses(config(tmp_path, kept.listen), origins(tmp_path)).listen == kept.listen


def test_it_stays_with_the_kind_of_address_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, members = "[2001:db8::7]:7117", ("198.51.100.9:7117", "[2001:db8:1::9]:7117")
    node_identity_file.write(tmp_path, node_identity_file.NodeIdentityFile("/c", "n1", gone, members))
    monkeypatch.setattr(addresses, "_towards", lambda host: {"2001:db8:1::9": "2001:db8:1::2"}.get(host, "192.0.2.1"))
    monkeypatch.setattr(addresses, "_free", lambda _host, port: port)
    assert (
        addresses.with_current_addresses(config(tmp_path, gone, *members), origins(tmp_path)).listen
        == "[2001:db8:1::2]:7117"
    )


def test_a_port_that_somebody_has_is_not_insisted_on() -> None:
    own = own_loopback()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((own, 0))
        port = other.getsockname()[1]
        assert addresses._free(own, port) == 0
    assert addresses._free(own, port) == port


def test_loopback_is_no_way_to_a_member(tmp_path: Path) -> None:
    before = config(tmp_path, ELSEWHERE, "127.0.0.1:7118")
    assert addresses.with_current_addresses(before, origins(tmp_path)).listen == ELSEWHERE


@each("listen", [ELSEWHERE, "[2001:db8::7]:7117"])
def test_a_network_that_comes_later_is_waited_for(listen: str, tmp_path: Path) -> None:
    """A laptop that resumes before its Wi-Fi is up: its agent listens at the address that it will have."""
    host, port = parse_address("listen", listen, loopback_only=False)

    async def listens() -> None:
        waits = AddressFile(tmp_path / "none").network_absence(origins(tmp_path))
        await check_listening(host, port, waits)
        gossip: GossipSocket[bytes, bytes] = GossipSocket(
            Sealer(bytes(32), "c", "n1", "boot", purpose="gossip"),
            bytes,
            bytes,
            lambda *_: None,
            security_events(Counter()),
        )
        gossip.start(host, port, may_lack_address=waits.may_lack_address)
        gossip.close()
        for place in (FLAG, ENVIRONMENT):
            typed = AddressFile(tmp_path / "none").network_absence({"listen": place})
            with pytest.raises(ConfigError):
                await check_listening(host, port, typed)
            with pytest.raises(ConfigError):
                gossip.start(host, port, may_lack_address=typed.may_lack_address)

    asyncio.run(listens())


def test_without_a_network_the_last_address_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_host: str) -> str:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(links, "reachable", unreachable)
    kept = AddressFile(tmp_path / "addresses")
    for last, family, published in (
        ("", "0.0.0.0", None),
        ("127.0.0.1:7117", "0.0.0.0", None),
        ("198.51.100.9:7117", "::", None),
        ("198.51.100.9:7117", "0.0.0.0", "198.51.100.9"),
        ("[2001:db8::9]:7117", "::", "2001:db8::9"),
    ):
        kept.set_listen(last)
        without = kept.network_absence({"listen": FLAG})
        if published is None:
            with pytest.raises(ConfigError):
                asyncio.run(links.check_listening(family, 0, without))
        else:
            asyncio.run(links.check_listening(family, 0, without))
            assert links._published(family, without) == published


@each(("published", "absent"), [(ELSEWHERE, True), (HERE, False)])
def test_doctor_is_told_if_the_published_address_is_gone(published: str, *, absent: bool, tmp_path: Path) -> None:
    """One that listens at every address publishes the last one while there is no network."""
    info = cast("Any", SimpleNamespace(config=config(tmp_path, "0.0.0.0:7117"), refused_by=()))
    linked = cast("Any", SimpleNamespace(linked=list, name_clashes={}))
    view = PeerLinksView(info, linked, cast("Any", SimpleNamespace(listens_at=published)), None, cast("Any", None))
    assert view.checkup(())["listen_absent"] is absent


def test_an_address_that_somebody_named_is_left_alone(tmp_path: Path) -> None:
    for place in ("flag", "environment", str(tmp_path / "config.toml")):
        before = config(tmp_path, ELSEWHERE, "198.51.100.9:7117")
        assert addresses.with_current_addresses(before, {"listen": place}) is before
    here = config(tmp_path, HERE, "198.51.100.9:7117")
    assert addresses.with_current_addresses(here, origins(tmp_path)) is here
