"""What is believed of what a broker hands over: each node on its own topics alone."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.mqtt import AdviceFilter, Topics
from peerload.model.messages import Envelope, Identity, ProbeReply, State
from peerload.model.resources import LoadReport, Profile
from peerload.wire import peer
from peerload.wire.seal import KEY_BYTES, Sealer
from tests.each import each
from tests.support import security_events

CLUSTER = "lab"
REPLY = ProbeReply(1, accepts=True, report=LoadReport())
HERS = Topics(CLUSTER, "n2")


def _sealer(node: str) -> Sealer:
    return Sealer(bytes(KEY_BYTES), "id", node, f"{node}-boot", purpose="mqtt")


@pytest.mark.rule("M1")
@each("topic", [HERS.to("me"), HERS.state])
def test_a_member_may_not_speak_below_the_name_of_another(topic: str) -> None:
    """Sealed by n3 for that very topic and signed as n3: nothing but the topic is wrong."""
    counters: Counter[str] = Counter()
    me = Identity("me", "me-boot", "m", "s", 1)
    security = security_events(counters)
    ours = AdviceFilter(Topics(CLUSTER, "me"), me, _sealer("me"), security)
    for number, node in enumerate(("n3", "n2"), start=1):
        told = Identity(node, f"{node}-boot", "m", "s", 1)
        body = State(told, Profile(node, 1, 1.0), LoadReport()) if topic == HERS.state else REPLY
        envelope = Envelope(v=1, cluster=CLUSTER, src=node, src_boot=told.boot, seq=number, body=body, dst="me")
        believed = ours.accept(topic, _sealer(node).seal(peer.encode(envelope), topic.encode()))
        assert (believed is not None) == (node == "n2")
    assert counters['mqtt_messages_dropped_total{reason="wrong_sender"}'] == 1
    assert list(security._culprits) == [("M1", "n2")]


def test_an_agent_with_a_copy_of_our_database_is_noticed_and_our_own_words_are_not() -> None:
    me = Identity("me", "me-boot", "m", "s", 5)
    found: list[str] = []
    topics = Topics(CLUSTER, "me")
    counters: Counter[str] = Counter()
    observer: Any = SimpleNamespace(copy_reported=lambda other: found.append(other.boot))
    ours = AdviceFilter(topics, me, _sealer("me"), security_events(counters), observer)

    def hear(boot: str, store: str, incarnation: int) -> None:
        told = Identity("me", boot, "m", store, incarnation, "h:1")
        body = State(told, Profile("me", 1, 1.0), LoadReport())
        envelope = Envelope(v=1, cluster=CLUSTER, src="me", src_boot=boot, seq=1, body=body)
        sealer = Sealer(bytes(KEY_BYTES), "id", "me", boot, purpose="mqtt")
        assert ours.accept(topics.state, sealer.seal(peer.encode(envelope), topics.state.encode())) is None

    hear("me-boot", "s", 5)
    hear("an earlier start", "s", 4)
    hear("another database", "t", 5)
    assert found == []
    hear("a copy", "s", 5)
    assert found == ["a copy"]
    assert ours.accept(topics.state, b"not sealed") is None
    assert not counters
