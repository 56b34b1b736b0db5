"""What may come in from a broker: bounded, checked, each message once. Knows no MQTT library.

A broker is trusted with nothing but time: whatever it hands over is dropped and counted unless it is sealed with the
cluster's key for this topic, by the node whose topic it is, not seen before, small, and advice (rule M2).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from peerload.model import metrics, rules
from peerload.model.errors import NotAuthentic, ProtocolError, Replayed
from peerload.model.messages import ADVICE, BROADCAST, Envelope, Identity, State
from peerload.security.broker_address import ROOT
from peerload.wire import peer

if TYPE_CHECKING:
    from peerload.agent.mqtt.flood_filter import FloodFilter
    from peerload.agent.security_events import SecurityEvents
    from peerload.wire.seal import Sealer

RECEIVED_MAX = 4096
"""Messages waiting to be looked at; the newest State of each node counts as one."""
SOURCES_MAX = 4096
"""Nodes whose newest State is remembered; the one not heard of for longest is forgotten first."""
LEVELS_ABOVE = 4
"""Of a topic for everybody: root, cluster, SITE and node."""
SITE = "main"
"""The level between cluster and node in every topic that is published."""
BROKEN_RULES = {
    "malformed": rules.FRAMES_BOUNDED,
    "not advice": rules.BROKER_ADVISES,
    "not authentic": rules.BROKER_AUTHENTIC,
    "not for all": rules.BROKER_AUTHENTIC,
    "not for us": rules.BROKER_AUTHENTIC,
    "other cluster": rules.BROKER_AUTHENTIC,
    "replayed": rules.REPEATS_HARMLESS,
    "too large": rules.FRAMES_BOUNDED,
    "wrong source": rules.BROKER_AUTHENTIC,
    "wrong topic": rules.BROKER_AUTHENTIC,
}
"""Why a message is not believed: which rule of security somebody has broken; of the others, perhaps nobody has."""
REPEATED_MAX = 64
"""Messages of one node that come again within a minute and are not worth an event: brokers repeat some."""


class Topics:
    """The topics of one node: `peerload/<cluster>/main/<src>/state`, `…/<src>/ask` for requests to everybody, and
    `…/<src>/to/<dst>`. A node writes below its own name alone."""

    def __init__(self, cluster: str, node: str) -> None:
        self.cluster = cluster
        self.node = node
        self.state = f"{ROOT}/{cluster}/{SITE}/{node}/state"
        self._to = f"{ROOT}/{cluster}/{SITE}/{node}/to/"
        self.ask = f"{ROOT}/{cluster}/{SITE}/{node}/ask"
        self.subscriptions = (
            f"{ROOT}/{cluster}/+/+/state",
            f"{ROOT}/{cluster}/+/+/ask",
            f"{ROOT}/{cluster}/+/+/to/{node}",
        )

    def to(self, dst: str) -> str:
        """Where a message for one node is published."""
        return self._to + dst

    @staticmethod
    def kind(topic: str) -> str:
        """`state`, `ask`, or "" for one that is for a node, whatever that is called."""
        *above, last = topic.split("/")
        return last if len(above) == LEVELS_ABOVE else ""

    @staticmethod
    def publisher(topic: str) -> str:
        """The node below whose name it is; "" if it is below none."""
        above = topic.split("/", LEVELS_ABOVE)[:LEVELS_ABOVE]
        return above[-1] if len(above) == LEVELS_ABOVE else ""

    def source(self, topic: str) -> str | None:
        """The node that may publish on this topic; None if the topic is no concern of ours."""
        match topic.split("/"):
            case [root, cluster, _, src, "state" | "ask"] if root == ROOT and cluster == self.cluster:
                return src
            case [root, cluster, _, src, "to", dst] if root == ROOT and cluster == self.cluster and dst == self.node:
                return src
            case _:
                return None


class _Topical(Protocol):
    """What the inbox needs to know of a message of the library."""

    @property
    def topic(self) -> object: ...
    @property
    def payload(self) -> object: ...
    @property
    def retain(self) -> bool: ...


MessageT = TypeVar("MessageT", bound=_Topical)


class Received(asyncio.Queue[MessageT], Generic[MessageT]):
    """A bounded queue that keeps only the newest State of each node. Putting never waits and never raises.

    What is too large, or does not fit, is dropped and counted.
    """

    def __init__(self, counters: Counter[str], floods: FloodFilter, maxsize: int = RECEIVED_MAX) -> None:
        super().__init__(maxsize)
        self._counters = counters
        self._floods = floods

    def _init(self, maxsize: int) -> None:  # noqa: ARG002 -- the signature is the base class's
        self._queue: OrderedDict[object, MessageT] = OrderedDict()  # the base class asks it for its length
        self._count = 0

    def _get(self) -> MessageT:
        return self._queue.popitem(last=False)[1]

    def _put(self, item: MessageT) -> None:
        self._count += 1
        topic = str(item.topic)
        self._queue[topic if Topics.kind(topic) == "state" else self._count] = item

    def put_nowait(self, item: MessageT) -> None:
        """Keep a message, in the place of an older State of the same node if there is one."""
        if not item.retain and not self._floods.admits(Topics.publisher(str(item.topic)), time.monotonic()):
            dropped(self._counters, "its publisher floods")
            return
        size = len(item.payload) if isinstance(item.payload, bytes | bytearray) else 0
        if size > peer.MQTT_BYTES_MAX:
            dropped(self._counters, "too large")
        elif str(item.topic) in self._queue:
            self._put(item)
        elif self.full():
            dropped(self._counters, "queue full")
        else:
            super().put_nowait(item)


def dropped(counters: Counter[str], why: str) -> None:
    """Count one message that was not believed."""
    counters[metrics.labelled(metrics.MQTT_MESSAGES_DROPPED, reason=why)] += 1


class CopyObserver(Protocol):
    """Hears of copies of this agent."""

    def copy_reported(self, other: Identity, /) -> None:
        """A message claims to come from an agent with this node's name and database."""


class AdviceFilter:
    """Decides for each payload whether it is believed. The sealer sees to it that each counts once."""

    def __init__(
        self,
        topics: Topics,
        identity: Identity,
        sealer: Sealer,
        security: SecurityEvents,
        observer: CopyObserver | None = None,
    ) -> None:
        self._security = security
        self._observer = observer
        self._topics = topics
        self._identity = identity
        self._sealer = sealer
        self._states: OrderedDict[str, tuple[int, str, int]] = OrderedDict()

    def accept(self, topic: str, payload: bytes) -> Envelope | None:
        """The envelope in this payload if it is to be believed; else None, and it is counted. Raises nothing."""
        src = self._topics.source(topic)
        if not payload:
            return None  # a node took its State away
        if src == self._identity.node:
            self._own_word(topic, payload)
            return None
        envelope: Envelope | None = None
        try:
            if src is None:
                why = "wrong topic"
            elif len(payload) > peer.MQTT_BYTES_MAX:
                why = "too large"
            else:
                sealed_by, sealed_boot, plain = self._sealer.open(payload, topic.encode())
                envelope = peer.decode(plain)
                told = (envelope.src, envelope.src_boot)
                is_own = told == (sealed_by, sealed_boot)
                why = self._objection(src, topic, envelope) if is_own else "wrong source"
        except NotAuthentic:
            why = "not authentic"
        except Replayed:
            why = "replayed"
        except ProtocolError:
            why = "malformed"
        if why:
            dropped(self._security.counters, why)
            if (rule := BROKEN_RULES.get(why)) is not None:
                tolerated = REPEATED_MAX if why == "replayed" else 0
                self._security.tell(rule, src or "the broker", f"over MQTT: {why}", tolerated=tolerated)
            return None
        return envelope

    def _own_word(self, topic: str, payload: bytes) -> None:
        """Our own words come back; but an agent with a copy of our database says the same under the same name. What an earlier
        start of ours has said has a smaller incarnation."""
        if self._observer is None or self._topics.kind(topic) != "state" or len(payload) > peer.MQTT_BYTES_MAX:
            return
        try:
            sealed_by, sealed_boot, plain = self._sealer.open(payload, topic.encode())
            told = peer.decode(plain).body
        except (NotAuthentic, Replayed, ProtocolError):
            return
        ours = self._identity
        if sealed_by != ours.node or sealed_boot == ours.boot or not isinstance(told, State):
            return
        other = told.identity
        if (other.node, other.boot, other.store) == (ours.node, sealed_boot, ours.store) and (
            other.incarnation >= ours.incarnation
        ):
            self._observer.copy_reported(other)

    def _objection(self, src: str, topic: str, envelope: Envelope) -> str:
        """Why this envelope is not to be believed; "" if it is."""
        is_state = self._topics.kind(topic) == "state"
        is_for_all = is_state or self._topics.kind(topic) == "ask"
        if envelope.cluster != self._topics.cluster:
            return "other cluster"
        if envelope.src != src:
            return "wrong source"
        if not isinstance(envelope.body, ADVICE) or (is_state and not isinstance(envelope.body, State)):
            return "not advice"
        if is_for_all and not isinstance(envelope.body, BROADCAST):
            return "not for all"
        if not is_for_all and (
            envelope.dst != self._identity.node or envelope.dst_boot not in {"", self._identity.boot}
        ):
            return "not for us"
        if isinstance(envelope.body, State):
            told = envelope.body.identity
            if told.node != src or told.boot != envelope.src_boot or envelope.body.profile.node != src:
                return "wrong source"
            if not self._is_newest(envelope, told):
                return "old"
        return ""

    def _is_newest(self, envelope: Envelope, told: Identity) -> bool:
        """Whether this State is newer than the last of its node: a later start, or the same one speaking on."""
        known = self._states.get(envelope.src)
        if known is not None:
            incarnation, boot, seq = known
            if told.incarnation < incarnation or (told.boot == boot and envelope.seq <= seq):
                return False
        self._states[envelope.src] = (told.incarnation, told.boot, envelope.seq)
        self._states.move_to_end(envelope.src)
        if len(self._states) > SOURCES_MAX:
            self._states.popitem(last=False)
        return True
