"""What travels where a broker or a datagram carries it says how things are, and never that anything be done (rule M2).

The tables are closed: whoever adds a message has to say here what it is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, get_args

import pytest

from peerload.agent.mqtt import AdviceFilter, Topics
from peerload.model import actions, events, gossip, messages
from peerload.model.gossip import Load, MembershipUpdate, MemberStatus
from peerload.model.messages import Envelope, Identity, Message, State
from peerload.model.resources import Profile, Region
from peerload.wire import peer
from peerload.wire.seal import KEY_BYTES, Sealer
from tests.core.given import Given
from tests.core.test_roles import executor, home, seen
from tests.each import each
from tests.support import security_events
from tests.wire.test_peer_codec import SAMPLES

pytestmark = [pytest.mark.rule("M2")]

OVER_MQTT = {
    "state", "state-request", "enough", "state-answer", "probe", "probe-reply", "give-request", "give-reply", "footprint",
    "pair-request", "pair-reply", "unpair",
}  # fmt: skip
"""How loaded somebody is, whether it would take or give a task, and no more: the task itself is offered over a link."""
BY_DATAGRAM = {
    gossip.GossipPing: "are you there",
    gossip.GossipAck: "I am",
    gossip.GossipPingRequest: "is somebody there",
    gossip.GossipNack: "it does not answer me",
    gossip.MembershipUpdate: "what is said of a node",
    gossip.Load: "how loaded a node is",
}
COMMANDING = (
    actions.SpawnTask,
    actions.SignalTask,
    actions.EvictTask,
    actions.ForgetTask,
    actions.SetLease,
    actions.SendResult,
    actions.TaskChanged,
    actions.MembersCancelled,
    actions.StageFiles,
    actions.KeepOutput,
    actions.FetchOutput,
)
ABOUT_TASKS = (
    actions.PutTask,
    actions.PutMembers,
    actions.PutSubmission,
    actions.PutExecution,
    actions.DropExecution,
    actions.PutFloor,
)


def tag(message: Message) -> str:
    return str(message.__struct_config__.tag)


def test_the_tables_have_every_message() -> None:
    assert {str(kind.__struct_config__.tag) for kind in get_args(messages.Advice)} == OVER_MQTT
    assert set(messages.ADVICE) == set(get_args(messages.Advice))
    assert set(BY_DATAGRAM) == set(get_args(gossip.GossipMessage))
    assert not set(messages.ADVICE) & {
        *get_args(messages.Ownership),
        *messages.STREAMED,
        *get_args(messages.Membership),
    }


@each("message", SAMPLES)
def test_over_mqtt_advice_is_believed_and_nothing_else(message: Message) -> None:
    """Sealed by a member, on its own topics, to this node: as well as it can be done."""
    key = bytes(KEY_BYTES)
    counters: Counter[str] = Counter()
    me = Identity("me", "my-boot", "m", "s", 1)
    ours = AdviceFilter(
        Topics("lab", "me"), me, Sealer(key, "id", "me", "my-boot", purpose="mqtt"), security_events(counters)
    )
    theirs, sealer = Topics("lab", "n2"), Sealer(key, "id", "n2", "boot", purpose="mqtt")
    taken = {}
    body = message
    if isinstance(message, State):
        told = Identity("n2", "boot", "m", "s", 1)
        body = State(told, Profile("n2", 1, 1.0), message.report)
    for number, topic in enumerate((theirs.state, theirs.ask, theirs.to("me"), theirs.to("other"), f"{theirs.state}d")):
        envelope = Envelope(v=1, cluster="lab", src="n2", src_boot="boot", seq=number, body=body, dst="me")
        plain = peer.encode(envelope)
        if len(plain) > peer.MQTT_BYTES_MAX:
            return  # it does not fit, whatever it is
        taken[topic.rpartition("n2/")[2]] = ours.accept(topic, sealer.seal(plain, topic.encode())) is not None
    is_for_all = isinstance(message, messages.BROADCAST)
    assert taken == {
        "state": isinstance(message, State),
        "ask": is_for_all,
        "to/me": tag(message) in OVER_MQTT,
        "to/other": False,
        "stated": False,
    }


@pytest.mark.parametrize("name", ["state", "ask", "to"])
def test_a_node_may_be_called_as_a_topic_is(name: str) -> None:
    key = bytes(KEY_BYTES)
    me = Identity(name, "my-boot", "m", "s", 1)
    ours = AdviceFilter(
        Topics("lab", name), me, Sealer(key, "id", name, "my-boot", purpose="mqtt"), security_events(Counter())
    )
    sealer, topic = Sealer(key, "id", "n2", "boot", purpose="mqtt"), Topics("lab", "n2").to(name)
    envelope = Envelope(v=1, cluster="lab", src="n2", src_boot="boot", seq=1, body=messages.Unpair(1), dst=name)
    assert ours.accept(topic, sealer.seal(peer.encode(envelope), topic.encode())) is not None


def heard_by_datagram(about: str) -> list[Any]:
    """One of each kind and shape."""
    who = ("boot-9", "machine-9", "store-9")
    rumours = [MembershipUpdate(about, *who, 9, 3, standing, "127.0.0.1:9") for standing in MemberStatus]
    load = Load(
        about, 1, 9, 0, 9, 0, 0, 0, 0.0, Region.UNDERLOADED, accepts=True, gives=True, cpus_busy=0.0, mem_used_bytes=0
    )
    questions = [gossip.GossipPing(1, "x"), gossip.GossipAck(1), gossip.GossipPingRequest(1, about, "y:1")]
    return [*rumours, load, *questions, gossip.GossipNack(1)]


def given(where: str) -> Given:
    """A node with a task of its own elsewhere, or one that it runs for another."""
    return home(where)[0] if where in ("away", "unknown") else executor(where)[0]


ASKS = (messages.Query, messages.Renew)
"""Word of a node that is back is a reason to ask it, over the link, where it has to prove who it is."""


def held(x: Given) -> Any:
    """The tasks, attempts and floors, but for when something is said again."""
    tasks, guests, floors, *rest, _ = seen(x)  # who is usable may well change
    return tasks, {key: {**guest, "repeat_s": ""} for key, guest in guests.items()}, floors, *rest


@each("where, about", itertools.product(["away", "unknown", "running", "reserved"], ["y", "h", "x", "nobody"]))
def test_by_datagram_nothing_is_started_ended_or_moved(about: str, where: str) -> None:
    for message in heard_by_datagram(about):
        x = given(where)
        before = held(x)
        x.when(events.GossipReceived("z", "z-boot-1", (message,)))
        assert held(x) == before, message
        for action in x.last:
            assert not isinstance(action, COMMANDING), (message, action)
            assert not any(isinstance(row, ABOUT_TASKS) for row in getattr(action, "rows", ())), (message, action)
            if isinstance(action, actions.Send) and not isinstance(action.message, ASKS):
                assert not isinstance(action.message, get_args(messages.Ownership)), (message, action)
