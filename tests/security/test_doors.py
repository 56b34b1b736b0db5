"""Strangers and members that were shut out get no message of any kind to a node, whatever they say (rules J3, J4, P3)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from peerload.security import certificates
from tests.integration.broker_fixtures import loop_thread  # noqa: F401 -- a fixture
from tests.integration.test_peer_link import LinkNode, Nodes, Stranger, nodes  # noqa: F401 -- fixtures
from tests.integration.test_peer_tls import context_of, said_to
from tests.support import cluster_of, credentials_of, total, wait_until
from tests.wire.test_peer_codec import SAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.security.certificates import CertificateInfo

pytestmark = pytest.mark.rule("P3", "J3", "J4")
AT_ONCE, STEP = 8, 4
"""So many kinds are said over one connection, to half of them after an introduction; the next begins so many later."""


@pytest.mark.parametrize("who", ["a stranger", "a member of another cluster", "a member that was shut out"])
def test_nothing_of_any_kind_gets_in(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:  # noqa: F811 -- a fixture
    cluster = None if who == "a stranger" else cluster_of("another" if "another" in who else "default")
    pair = certificates.issue(cluster.authority, "stranger", datetime.now(UTC)) if cluster is not None else None
    tls = credentials_of("a")
    a = nodes("a", tls=tls)
    frames = Stranger(a)  # only to make frames
    frames.close()
    context = context_of(pair, tmp_path)
    monkeypatch.setattr(tls, "refuses", _refuses_the_stranger)
    began = range(0, len(SAMPLES), STEP)
    for number, first in enumerate(began, 1):
        said = [*SAMPLES[first:], *SAMPLES[:first]][:AT_ONCE]
        with_hello = [frames.hello()] if number % 2 == 0 else []
        raw = [*with_hello, *(frames.frame(message) for message in said)]
        assert said_to(a, context, *raw) == b"", said[0]
        await_dropped(a, number)
    assert a.heard == []
    assert a.met == []
    assert a.counters["peer_messages_received_total"] == 0


def await_dropped(node: LinkNode, connections: int) -> None:
    wait_until(lambda: total(node.counters, "peer_frames_dropped_total") >= connections, what="it is counted")


def _refuses_the_stranger(facts: CertificateInfo) -> bool:
    return facts.name == "stranger"
