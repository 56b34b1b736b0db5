"""How what the CA has said takes effect: whom a member asks for a certificate, and what those who can make them do with what they hear."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent.joining import CertificateRenewal, TrustDistribution
from peerload.core.membership.peers import PeerState
from peerload.model import events, messages
from peerload.security.revocation import OVERLAP_REVOKED_S, OVERLAP_S, SPREAD_S, Keyring, SealKey, TrustStore
from tests.support import cluster_of, security_events

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def peer(node: str, *, issuer: bool = False) -> SimpleNamespace:
    profile = SimpleNamespace(issuer=issuer)
    return SimpleNamespace(identity=SimpleNamespace(node=node), profile=profile, state=PeerState.ALIVE)


def _links(sent: list[tuple[str, messages.Message]]) -> Any:
    return SimpleNamespace(
        send=lambda node, message: sent.append((node, message)),
        certificate_of=lambda _node: b"",
        connections=SimpleNamespace(close_revoked=lambda: None),
    )


EVENTS: Any = SimpleNamespace(record=lambda *_words, **_more: None)


def link_of(
    tmp_path: Path, *peers: SimpleNamespace, put: Callable[[Any], None] = lambda _event: None
) -> tuple[TrustDistribution, list[tuple[str, messages.Message]]]:
    """Of a node that knows these, and what it sends to whom."""
    sent: list[tuple[str, messages.Message]] = []
    local: Any = SimpleNamespace(
        identity=SimpleNamespace(node="ws1"),
        cluster=cluster_of(),
        reachable_peers=lambda: [one.identity.node for one in peers],
    )
    tls: Any = SimpleNamespace(is_revoked=False)
    keyring = Keyring(TrustStore(cluster_of(), tmp_path / "trust"))
    inbox: Any = SimpleNamespace(put=put)
    return TrustDistribution(local, keyring, tls, _links(sent), EVENTS, inbox, security_events(Counter())), sent


def renewal_of(*peers: SimpleNamespace) -> tuple[CertificateRenewal, list[tuple[str, messages.Message]]]:
    """The same of its certificate."""
    sent: list[tuple[str, messages.Message]] = []
    node: Any = SimpleNamespace(membership=list(peers))
    nothing = cast("Any", None)
    return CertificateRenewal(nothing, nothing, _links(sent), node, EVENTS, Counter()), sent


@pytest.mark.rule("J1")
def test_who_is_told_that_nobody_can_renew_its_certificate_asks_all_the_same() -> None:
    """What a member can do is told by others, too, who may lie."""
    link, sent = renewal_of(peer("ws2"), peer("ws3", issuer=True))
    link.request()
    assert sent == [("ws3", messages.CertificateRequest())]
    link, sent = renewal_of(peer("ws2"), peer("ws3"))
    link.request()
    assert sorted(node for node, _ in sent) == ["ws2", "ws3"]
    link, sent = renewal_of()
    link.request()
    assert sent == []


@pytest.mark.rule("J5")
def test_who_is_shut_out_where_the_newest_key_was_not_known_does_not_keep_it(tmp_path: Path) -> None:
    """Two nodes with the CA's key, without a way to each other: one changes keys, the other shuts somebody out."""

    async def run() -> None:
        (tmp_path / "other").mkdir()
        other = TrustStore(cluster_of(), tmp_path / "other" / "trust")
        link, sent = link_of(tmp_path, peer("ws2", issuer=True), peer("ws3"))
        link.rotate()
        link.rotate()
        known_s = time.time()
        other.revoke("ws3", [], known_s, key=b"k" * 32)
        before = link.trust.newest
        sent.clear()
        link.received("ws2", messages.Trust(other.signed))
        newest = link.trust.newest
        assert isinstance(newest, SealKey)
        assert newest != before
        assert newest.overlap_s == OVERLAP_REVOKED_S
        told = {node for node, message in sent if isinstance(message, messages.Trust) and len(message.signed)}
        assert "ws2" in told
        words = [raw for node, message in sent if node == "ws3" for raw in cast("messages.Trust", message).signed]
        assert set(words) <= set(link.trust.signed_revocations), "no key"
        other.take(link.trust.signed, known_s)
        assert other.newest == newest
        link.received("ws2", messages.Trust(other.signed))
        assert link.trust.newest == newest, "once"
        link._keyring.close()

    asyncio.run(run())


@pytest.mark.rule("J5")
def test_nodes_with_the_cas_key_make_one_key_anew_and_not_each_its_own(tmp_path: Path) -> None:
    """What each says reaches the others in the order in which it was said."""

    async def run() -> None:
        names = [f"ws{number}" for number in range(1, 7)]
        links: dict[str, TrustDistribution] = {}
        said: dict[str, list[tuple[str, messages.Message]]] = {}
        for name in names:
            (tmp_path / name).mkdir()
            others = [peer(other, issuer=True) for other in names if other != name]
            links[name], said[name] = link_of(tmp_path / name, *others)
        links["ws1"].rotate()
        links["ws1"].rotate()

        def deliver() -> None:
            while any(said.values()):
                for src, words in said.items():
                    if words:
                        node, message = words.pop(0)
                        links[node].received(src, cast("messages.Trust", message))

        deliver()
        (tmp_path / "away").mkdir()
        away = TrustStore(cluster_of(), tmp_path / "away" / "trust")
        links["ws2"].received("ws9", messages.Trust((away.revoke("ws8", [], time.time()),)))
        deliver()
        assert {link.trust.number for link in links.values()} == {3}
        assert len({link.trust.signed for link in links.values()}) == 1
        assert (
            sum(isinstance(word, SealKey) and word.number == 3 for word, _ in links["ws1"].trust._known.values()) == 1
        )
        for link in links.values():
            link._keyring.close()

    asyncio.run(run())


@pytest.mark.rule("J4")
def test_who_was_let_in_anew_is_told_new_keys_also_while_no_link_stands(tmp_path: Path) -> None:
    async def run() -> None:
        link, sent = link_of(tmp_path, peer("ws3"))
        link.revoke("ws3")
        sent.clear()
        link.rotate()
        assert sent == [], "who is shut out is told no key"
        link.met(cast("Any", SimpleNamespace(identity=SimpleNamespace(node="ws3", boot="b"), trust=link.trust.digest)))
        link.rotate()
        assert [node for node, _ in sent] == ["ws3"]
        sent.clear()
        link.revoke("ws3")
        assert [raw for _, message in sent for raw in cast("messages.Trust", message).signed] == [
            raw for raw in link.trust.signed_revocations if raw in cast("messages.Trust", sent[0][1]).signed
        ]
        link.rotate()
        assert len(sent) == 1, "it is shut out again"
        link._keyring.close()

    asyncio.run(run())


@pytest.mark.rule("J4")
def test_the_core_is_told_to_end_the_tasks_of_who_is_shut_out_and_not_of_who_is_in_again(tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "other").mkdir()
        told: list[Any] = []
        other = TrustStore(cluster_of(), tmp_path / "other" / "trust")
        link, _ = link_of(tmp_path, put=told.append)
        link.received("ws2", messages.Trust((other.revoke("ws3", [], time.time()),)))
        assert told == [events.NodeRevoked("ws3")]
        assert [node for node, _ in link.trust.revoked_nodes()] == ["ws3"]
        link._is_refused = lambda node: not node  # type: ignore[method-assign] # it shows a certificate that counts
        link.received("ws2", messages.Trust((other.revoke("ws3", [], time.time()),)))
        assert len(told) == 1
        link._keyring.close()

    asyncio.run(run())


@pytest.mark.rule("J5")
def test_keys_that_two_nodes_make_at_the_same_time_are_one_soon(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    one, two = (TrustStore(cluster_of(), tmp_path / name / "trust") for name in ("1", "2"))
    said = one.rotate(b"a" * 32, 1e9, OVERLAP_S), two.rotate(b"b" * 32, 1e9, OVERLAP_S)
    for known in (one, two):
        known.take(said, 1e9 + 1)
    assert one.signed == two.signed
    assert one.keys(1e9 + 1)[0] in two.keys(1e9 + 1), "what one seals meanwhile the other opens"
    assert one.keys(1e9 + 2 * SPREAD_S) == two.keys(1e9 + 2 * SPREAD_S) == (b"b" * 32, b"a" * 32)
