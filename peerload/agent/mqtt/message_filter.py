"""Message filter: topics, which messages of a broker are believed, and publishers that flood. It does not use the MQTT library.

A broker can only delay messages. A message is dropped and counted unless it is sealed with the cluster's key for its topic,
by the node whose topic it is, not seen before, small, and advice (rule M2). Repeated messages change nothing, but they cost
every node time: a publisher that sends thousands a second that are not new is muted for a while, before its messages are
opened. The broker stays in use: with the rights of docs/mqtt.md a node publishes below its own name alone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from peerload.model import metrics, rules
from peerload.model.bounded import BoundedDict
from peerload.model.errors import NotAuthentic, ProtocolError, Replayed
from peerload.model.messages import ADVICE, BROADCAST, Envelope, Identity, State
from peerload.security.broker import ROOT
from peerload.wire import peer

if TYPE_CHECKING:
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.wire.seal import Sealer

WINDOW_S = 5.0
"""Messages are judged in windows of this length."""
FLOOD_MAX = 1000
"""Messages in one window that are a flood …"""
NEW_PART_MIN = 0.1
"""… if less than this part of them was new."""
MUTED_S = 60.0
PUBLISHERS_MAX = 1024
"""Publishers that are counted; the one that was silent for longest is forgotten first."""

_log = logging.getLogger("peerload.mqtt")


class _Publisher:
    """Messages of one publisher since ``began_s``."""

    __slots__ = ("began_s", "count", "muted_until_s", "new_count")

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.count = self.new_count = 0
        self.muted_until_s = 0.0

    @property
    def floods(self) -> bool:
        return self.count >= FLOOD_MAX and self.new_count < self.count * NEW_PART_MIN


class FloodFilter:
    """The publishers on one connection. Retained messages are not counted: they come again at each connection. Nor are those
    of this node, ``own``: the broker passes on to it what it sends to all, and nothing of that is new."""

    def __init__(self, security: SecurityEvents, own: str = "") -> None:
        self._security = security
        self._own = own
        self._publishers: BoundedDict[str, _Publisher] = BoundedDict(PUBLISHERS_MAX)

    def admits(self, name: str, now_s: float) -> bool:
        """Count a message. False if its publisher is muted."""
        if name == self._own:
            return True
        publisher = self._publishers[name] = self._publishers.get(name) or _Publisher(now_s)
        if now_s - publisher.began_s >= WINDOW_S:
            if publisher.floods:
                if now_s >= publisher.muted_until_s:
                    self._mute(name)
                publisher.muted_until_s = now_s + MUTED_S
            publisher.began_s, publisher.count, publisher.new_count = now_s, 0, 0
        publisher.count += 1
        return now_s >= publisher.muted_until_s

    def count_new(self, name: str) -> None:
        """The last message of this publisher was new."""
        if (publisher := self._publishers.get(name)) is not None:
            publisher.new_count += 1

    def _mute(self, name: str) -> None:
        self._security.counters[metrics.MQTT_PUBLISHERS_MUTED] += 1
        self._security.report(
            rules.PEERS_LIMITED, name, f"over MQTT: a flood; its messages are dropped for {MUTED_S:g} s"
        )
        _log.warning("publisher muted for a flood: node=%s muted_s=%g", name, MUTED_S)


RECEIVED_MAX = 4096
"""Messages that wait to be checked; the newest State of each node counts as one."""
SOURCES_MAX = 4096
"""Nodes whose newest State is remembered; the least recent is forgotten first."""
LEVELS_ABOVE = 4
"""Levels before the last one in a topic for all nodes: root, cluster, SITE and node."""
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
"""Security rule that each reason for dropping a message breaks. Other reasons break none."""
REPLAYED_MAX = 64
"""Replayed messages of one node within a minute that are no security event: brokers repeat some."""


class Topics:
    """The topics of one node: `peerload/<cluster>/main/<src>/state`, `…/<src>/ask` for requests to all nodes, and
    `…/<src>/to/<dst>`. A node publishes below its own name only."""

    def __init__(self, cluster: str, node: str) -> None:
        self.cluster = cluster
        self.node = node
        self.state = f"{ROOT}/{cluster}/{SITE}/{node}/state"
        self._to = f"{ROOT}/{cluster}/{SITE}/{node}/to/"
        self.json = f"{ROOT}/{cluster}/{SITE}/{node}/json/"
        self.ask = f"{ROOT}/{cluster}/{SITE}/{node}/ask"
        self.subscriptions = (
            f"{ROOT}/{cluster}/+/+/state",
            f"{ROOT}/{cluster}/+/+/ask",
            f"{ROOT}/{cluster}/+/+/to/{node}",
        )

    def to(self, dst: str) -> str:
        """The topic of messages for one node."""
        return self._to + dst

    @staticmethod
    def kind(topic: str) -> str:
        """`state`, `ask`, or "" for a topic of messages for one node."""
        *above, last = topic.split("/")
        return last if len(above) == LEVELS_ABOVE else ""

    @staticmethod
    def publisher(topic: str) -> str:
        """The node whose name is in the topic; empty if there is none."""
        above = topic.split("/", LEVELS_ABOVE)[:LEVELS_ABOVE]
        return above[-1] if len(above) == LEVELS_ABOVE else ""

    def source(self, topic: str) -> str | None:
        """The node that may publish on this topic; None if the topic is not for this node."""
        match topic.split("/"):
            case [root, cluster, _, src, "state" | "ask"] if root == ROOT and cluster == self.cluster:
                return src
            case [root, cluster, _, src, "to", dst] if root == ROOT and cluster == self.cluster and dst == self.node:
                return src
            case _:
                return None


class _Topical(Protocol):
    """Attributes of the library's messages that `Received` uses."""

    @property
    def topic(self) -> object: ...
    @property
    def payload(self) -> object: ...
    @property
    def retain(self) -> bool: ...


MessageT = TypeVar("MessageT", bound=_Topical)


class Received(asyncio.Queue[MessageT], Generic[MessageT]):
    """A bounded queue that keeps only the newest State of each node. Putting never waits and never raises: a message that
    is too large, or does not fit, is dropped and counted."""

    def __init__(self, counters: Counter[str], floods: FloodFilter, maxsize: int = RECEIVED_MAX) -> None:
        super().__init__(maxsize)
        self._counters = counters
        self._floods = floods

    def _init(self, maxsize: int) -> None:  # noqa: ARG002 -- the signature is the base class's
        self._queue: OrderedDict[object, MessageT] = OrderedDict()  # the base class uses its length
        self._count = 0

    def _get(self) -> MessageT:
        return self._queue.popitem(last=False)[1]

    def _put(self, item: MessageT) -> None:
        self._count += 1
        topic = str(item.topic)
        self._queue[topic if Topics.kind(topic) == "state" else self._count] = item

    def put_nowait(self, item: MessageT) -> None:
        """Queue a message; it replaces an older State of the same node."""
        if not item.retain and not self._floods.admits(Topics.publisher(str(item.topic)), time.monotonic()):
            count_dropped(self._counters, "its publisher floods")
            return
        size = len(item.payload) if isinstance(item.payload, bytes | bytearray) else 0
        if size > peer.MQTT_BYTES_MAX:
            count_dropped(self._counters, "too large")
        elif str(item.topic) in self._queue:
            self._put(item)
        elif self.full():
            count_dropped(self._counters, "queue full")
        else:
            super().put_nowait(item)


def count_dropped(counters: Counter[str], why: str) -> None:
    """Count a message that was dropped."""
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
        self._states: BoundedDict[str, tuple[int, str, int]] = BoundedDict(SOURCES_MAX)

    def accept(self, topic: str, payload: bytes) -> Envelope | None:
        """Open a payload → its envelope; None, counted, if it is not believed. Raises nothing."""
        src = self._topics.source(topic)
        if not payload:
            return None  # a node has removed its State
        if src == self._identity.node:
            self._check_copy(topic, payload)
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
                claimed = (envelope.src, envelope.src_boot)
                is_own = claimed == (sealed_by, sealed_boot)
                why = self._objection(src, topic, envelope) if is_own else "wrong source"
        except NotAuthentic:
            why = "not authentic"
        except Replayed:
            why = "replayed"
        except ProtocolError:
            why = "malformed"
        if why:
            count_dropped(self._security.counters, why)
            if (rule := BROKEN_RULES.get(why)) is not None:
                tolerated = REPLAYED_MAX if why == "replayed" else 0
                self._security.report(rule, src or "the broker", f"over MQTT: {why}", tolerated=tolerated)
            return None
        return envelope

    def _check_copy(self, topic: str, payload: bytes) -> None:
        """Report a copy of this agent: another start with the same name and database, whose State came on this node's
        topic. An earlier start of this agent has a smaller incarnation."""
        if self._observer is None or self._topics.kind(topic) != "state" or len(payload) > peer.MQTT_BYTES_MAX:
            return
        try:
            sealed_by, sealed_boot, plain = self._sealer.open(payload, topic.encode())
            body = peer.decode(plain).body
        except (NotAuthentic, Replayed, ProtocolError):
            return
        ours = self._identity
        if sealed_by != ours.node or sealed_boot == ours.boot or not isinstance(body, State):
            return
        other = body.identity
        if (other.node, other.boot, other.store) == (ours.node, sealed_boot, ours.store) and (
            other.incarnation >= ours.incarnation
        ):
            self._observer.copy_reported(other)

    def _objection(self, src: str, topic: str, envelope: Envelope) -> str:
        """Reason why this envelope is not believed; empty if it is."""
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
            identity = envelope.body.identity
            if identity.node != src or identity.boot != envelope.src_boot or envelope.body.profile.node != src:
                return "wrong source"
            if not self._is_newest(envelope, identity):
                return "old"
        return ""

    def _is_newest(self, envelope: Envelope, identity: Identity) -> bool:
        """True if this State is newer than the last of its node: of a later start, or later in the same one."""
        known = self._states.get(envelope.src)
        if known is not None:
            incarnation, boot, seq = known
            if identity.incarnation < incarnation or (identity.boot == boot and envelope.seq <= seq):
                return False
        self._states[envelope.src] = (identity.incarnation, identity.boot, envelope.seq)
        return True
