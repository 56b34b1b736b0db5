"""The MQTT bus: publishes and receives advice over a broker, reconnects, and decides which messages of a broker are accepted. No
other file uses aiomqtt.

It needs MQTT 3.1.1 and QoS 0 only. Only the tasks of this file wait for the broker: publishing is a bounded queue, and a
caller that gets False uses the peer link instead.

A broker can only delay messages. A message is dropped and counted unless it is advice, small, not seen before, and sealed with
the cluster's key for its topic by the node that the topic names (rule M2). Repeated messages have no effect, but cost
every node time: a publisher of thousands of repeated messages a second is muted for a while, before its messages are
opened. The broker stays in use: with the rights of docs/mqtt.md a node publishes only below its own name.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import aiomqtt
import msgspec
import paho.mqtt.client as mqtt

from peerload.agent.peers.connection import backoff_s
from peerload.agent.runtime import coalesced_s, next_tick
from peerload.model import metrics, rules
from peerload.model.bounded import BoundedDict
from peerload.model.errors import ConfigError, NotAuthentic, ProtocolError, Replayed
from peerload.model.messages import ADVICE, BROADCAST, Envelope, Identity, Message, State
from peerload.security.address import open_tcp
from peerload.security.broker import ROOT, BrokerUrl, SecuredBroker, broker_error_text, secured
from peerload.wire import peer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from paho.mqtt.reasoncodes import ReasonCode

    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.model.config import AgentConfig
    from peerload.security.broker import BrokerTls
    from peerload.wire.seal import Sealer

_log = logging.getLogger("peerload.mqtt")

WINDOW_S = 5.0
"""Length of the windows in which messages are counted."""
FLOOD_MAX = 1000
"""Number of messages in one window that counts as a flood, subject to NEW_PART_MIN."""
NEW_PART_MIN = 0.1
"""Minimum share of new messages in a window; with less, it is a flood."""
MUTED_S = 60.0
PUBLISHERS_MAX = 1024
"""Maximum number of publishers that are counted; the least recent one is forgotten first."""


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
    """Mutes publishers of too many repeated messages. Retained messages are not counted: the broker sends them at each
    connection. Nor are those of this node, ``own``: the broker returns its own broadcasts, which are never new."""

    def __init__(self, security: SecurityEvents, own: str = "") -> None:
        self._security = security
        self._own = own
        self._publishers: BoundedDict[str, _Publisher] = BoundedDict(PUBLISHERS_MAX)

    def admits(self, name: str, now_s: float) -> bool:
        """Count a message. → False if its publisher is muted."""
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
        if (publisher := self._publishers.get(name)) is not None:
            publisher.new_count += 1

    def _mute(self, name: str) -> None:
        self._security.counters[metrics.MQTT_PUBLISHERS_MUTED] += 1
        self._security.report(
            rules.PEERS_LIMITED, name, f"over MQTT: a flood; its messages are dropped for {MUTED_S:g} s"
        )
        _log.warning("publisher muted for a flood: node=%s muted_s=%g", name, MUTED_S)


RECEIVED_MAX = 4096
"""Maximum number of unchecked messages; the newest State of each node counts as one."""
SOURCES_MAX = 4096
"""Maximum number of nodes whose newest State is remembered; the least recent is forgotten first."""
LEVELS_ABOVE = 4
"""Number of levels before the last one in a topic for all nodes: root, cluster, SITE and node."""
SITE = "main"
"""The level between cluster and node in every topic that is published."""
BROKEN_RULES = {
    "malformed": rules.FRAMES_BOUNDED,
    "not_advice": rules.BROKER_ADVISES,
    "not_authentic": rules.BROKER_AUTHENTIC,
    "not_broadcast": rules.BROKER_AUTHENTIC,
    "wrong_recipient": rules.BROKER_AUTHENTIC,
    "other_cluster": rules.BROKER_AUTHENTIC,
    "replayed": rules.REPEATS_HARMLESS,
    "too_large": rules.FRAMES_BOUNDED,
    "wrong_sender": rules.BROKER_AUTHENTIC,
    "wrong_topic": rules.BROKER_AUTHENTIC,
}
"""Security rule that each reason for dropping a message breaks. Other reasons break none."""
REPLAYED_MAX = 64
"""Number of replayed messages of one node within a minute that are no security event: brokers repeat some."""


class Topics:
    """Topics of one node: `peerload/<cluster>/main/<src>/state`, `…/<src>/ask` for requests to all nodes, and
    `…/<src>/to/<dst>`. A node publishes only below its own name."""

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


class Received(asyncio.Queue[aiomqtt.Message]):
    """A bounded queue that keeps only the newest State of each node. Putting never waits and never raises: a message that
    is too large, or for which there is no space, is dropped and counted."""

    def __init__(self, counters: Counter[str], floods: FloodFilter, maxsize: int = RECEIVED_MAX) -> None:
        super().__init__(maxsize)
        self._counters = counters
        self._floods = floods

    def _init(self, maxsize: int) -> None:  # noqa: ARG002 -- the signature is the base class's
        self._queue: OrderedDict[object, aiomqtt.Message] = OrderedDict()  # the base class uses its length
        self._count = 0

    def _get(self) -> aiomqtt.Message:
        return self._queue.popitem(last=False)[1]

    def _put(self, item: aiomqtt.Message) -> None:
        self._count += 1
        topic = str(item.topic)
        self._queue[topic if Topics.kind(topic) == "state" else self._count] = item

    def put_nowait(self, item: aiomqtt.Message) -> None:
        """Queue a message; it replaces an older State of the same node."""
        if not item.retain and not self._floods.admits(Topics.publisher(str(item.topic)), time.monotonic()):
            count_dropped(self._counters, "publisher_muted")
            return
        if len(item.payload) > peer.MQTT_BYTES_MAX:
            count_dropped(self._counters, "too_large")
        elif str(item.topic) in self._queue:
            self._put(item)
        elif self.full():
            count_dropped(self._counters, "queue_full")
        else:
            super().put_nowait(item)


def count_dropped(counters: Counter[str], reason: str) -> None:
    counters[metrics.labelled(metrics.MQTT_MESSAGES_DROPPED, reason=reason)] += 1


class BusOwner(Protocol):
    """Receiver of messages from the broker."""

    def from_bus(self, envelope: Envelope, /, *, retained: bool) -> None:
        """Process advice of another node."""

    def bus_changed(self, *, connected: bool) -> None:
        """The broker has become reachable or unreachable."""

    def copy_reported(self, other: Identity, /) -> None:
        """A message claims to come from an agent with this node's name and database."""


class AdviceFilter:
    """Filter of received payloads: decides which are accepted. The sealer rejects replays."""

    def __init__(
        self,
        topics: Topics,
        identity: Identity,
        sealer: Sealer,
        security: SecurityEvents,
        owner: BusOwner | None = None,
    ) -> None:
        self._security = security
        self._owner = owner
        self._topics = topics
        self._identity = identity
        self._sealer = sealer
        self._states: BoundedDict[str, tuple[int, str, int]] = BoundedDict(SOURCES_MAX)

    def accept(self, topic: str, payload: bytes) -> Envelope | None:
        """Open a payload → its envelope; None if it is rejected, which is counted. Raises nothing."""
        src = self._topics.source(topic)
        if not payload:
            return None  # a node has removed its State
        if src == self._identity.node:
            self._check_copy(topic, payload)
            return None
        envelope: Envelope | None = None
        try:
            if src is None:
                why = "wrong_topic"
            elif len(payload) > peer.MQTT_BYTES_MAX:
                why = "too_large"
            else:
                sealed_by, sealed_boot, plain = self._sealer.open(payload, topic.encode())
                envelope = peer.decode(plain)
                claimed = (envelope.src, envelope.src_boot)
                is_own = claimed == (sealed_by, sealed_boot)
                why = self._objection(src, topic, envelope) if is_own else "wrong_sender"
        except NotAuthentic:
            why = "not_authentic"
        except Replayed:
            why = "replayed"
        except ProtocolError:
            why = "malformed"
        if why:
            count_dropped(self._security.counters, why)
            if (rule := BROKEN_RULES.get(why)) is not None:
                tolerated = REPLAYED_MAX if why == "replayed" else 0
                self._security.report(
                    rule, src or "the broker", f"over MQTT: {metrics.label_text(why)}", tolerated=tolerated
                )
            return None
        return envelope

    def _check_copy(self, topic: str, payload: bytes) -> None:
        """Report a copy of this agent: another start with the same name and database, whose State arrived on this node's
        topic. An earlier start of this agent has a smaller incarnation."""
        if self._owner is None or self._topics.kind(topic) != "state" or len(payload) > peer.MQTT_BYTES_MAX:
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
            self._owner.copy_reported(other)

    def _objection(self, src: str, topic: str, envelope: Envelope) -> str:
        """Reason why this envelope is rejected; empty if it is accepted."""
        is_state = self._topics.kind(topic) == "state"
        is_for_all = is_state or self._topics.kind(topic) == "ask"
        if envelope.cluster != self._topics.cluster:
            return "other_cluster"
        if envelope.src != src:
            return "wrong_sender"
        if not isinstance(envelope.body, ADVICE) or (is_state and not isinstance(envelope.body, State)):
            return "not_advice"
        if is_for_all and not isinstance(envelope.body, BROADCAST):
            return "not_broadcast"
        if not is_for_all and (
            envelope.dst != self._identity.node or envelope.dst_boot not in {"", self._identity.boot}
        ):
            return "wrong_recipient"
        if isinstance(envelope.body, State):
            identity = envelope.body.identity
            if identity.node != src or identity.boot != envelope.src_boot or envelope.body.profile.node != src:
                return "wrong_sender"
            if not self._is_newest(envelope, identity):
                return "outdated"
        return ""

    def _is_newest(self, envelope: Envelope, identity: Identity) -> bool:
        """True if this State is newer than the last one of its node: from a later start, or later in the same start."""
        known = self._states.get(envelope.src)
        if known is not None:
            incarnation, boot, seq = known
            if identity.incarnation < incarnation or (identity.boot == boot and envelope.seq <= seq):
                return False
        self._states[envelope.src] = (identity.incarnation, identity.boot, envelope.seq)
        return True


CONNECT_S = 5.0
"""Timeout of connection and subscription."""
KEEPALIVE_S = 10
"""Keep-alive interval; a silent broker is noticed within twice this time."""
MISC_EVERY_S = 2.0
"""Interval of checks of the keep-alive."""
CLOSE_S = 1.0
STEADY_S = 5.0
"""Duration of a connection, in s, after which the backoff starts again with the shortest pause."""
OUTGOING_MAX = 1000
"""Maximum number of messages that wait to be written; this node's newest State has a separate slot."""
REMOVALS_MAX = 500
"""Maximum number of topic removals that were not sent over any connection yet."""
UNWRITTEN_MAX = 64
"""Maximum number of messages in the library that are not written to the socket yet."""
REFUSED = 0x80
"""Lowest return code of a SUBACK that is a refusal (MQTT 3.1.1, 3.9.3)."""


class _Client(aiomqtt.Client):
    """A connection over an already connected socket, so that the library neither blocks nor needs a thread.

    The library's own calls use `asyncio.wait_for`, which in Python 3.11 can swallow a cancellation; these methods do not.
    """

    def __init__(
        self,
        url: BrokerUrl,
        identifier: str,
        queue: Callable[..., Received],
        will: aiomqtt.Will | None = None,
    ) -> None:
        quiet = logging.Logger("peerload.mqtt.library", logging.CRITICAL + 1)  # noqa: LOG001 -- it logs each retry
        super().__init__(
            url.host,
            url.port,
            username=url.user,
            password=url.password,
            logger=quiet,
            identifier=identifier,
            queue_type=cast("type[asyncio.Queue[aiomqtt.Message]]", queue),
            protocol=aiomqtt.ProtocolVersion.V311,
            clean_session=True,
            will=will,
            timeout=CONNECT_S,
            keepalive=KEEPALIVE_S,
            max_queued_incoming_messages=RECEIVED_MAX,
            max_queued_outgoing_messages=OUTGOING_MAX,
        )
        self._unwritten = 0
        self._written = asyncio.Event()

    async def connect(self, sock: socket.socket) -> None:
        """Send CONNECT over ``sock``, and wait for the answer. Raises MqttError."""
        vars(self._client)["_create_socket_connection"] = lambda: sock
        self._client_connect()
        broken = asyncio.Event()
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(asyncio.shield(self._connected))
        ]  # the library reads its exception later
        if isinstance(sock, SecuredBroker):  # refusals of certificates arrive only now, unseen by the library
            sock.on_error = broken.set
            waits.append(asyncio.get_running_loop().create_task(broken.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if broken.is_set():
                raise aiomqtt.MqttError("TLS failed")
            await waits[0]
        finally:
            for wait in waits:
                if not wait.cancel() and not wait.cancelled():
                    wait.exception()  # already reported

    async def _misc_loop(self) -> None:
        """Send keep-alives. The library would wake up each second for this."""
        while self._client.loop_misc() == mqtt.MQTT_ERR_SUCCESS:
            await next_tick(MISC_EVERY_S)

    async def subscribe_all(self, topics: Sequence[str]) -> bool:
        """Subscribe with QoS 0 → True if the broker grants all topics. Raises MqttError."""
        code, mid = self._client.subscribe([(topic, 0) for topic in topics])
        if code != mqtt.MQTT_ERR_SUCCESS or mid is None:
            raise aiomqtt.MqttCodeError(code, "could not subscribe")
        granted: asyncio.Future[tuple[int, ...] | list[ReasonCode]] = asyncio.get_running_loop().create_future()
        with self._pending_call(mid, granted, self._pending_subscribes):
            return all((code if isinstance(code, int) else code.value) < REFUSED for code in await granted)

    async def write(self, topic: str, payload: bytes, *, retain: bool) -> None:
        """Queue a message for the socket, and wait while the queue is long. Raises MqttError."""
        code = self._client.publish(topic, payload, 0, retain).rc
        if code != mqtt.MQTT_ERR_SUCCESS:
            raise aiomqtt.MqttCodeError(code, "could not publish")
        self._unwritten += 1
        if self._unwritten >= UNWRITTEN_MAX:
            await self.flush()

    async def flush(self) -> None:
        """Wait until every message is written. Raises TimeoutError if the broker accepts none for CONNECT_S."""
        while self._unwritten:
            self._written.clear()
            async with asyncio.timeout(CONNECT_S):
                await self._written.wait()

    def _on_publish(self, *_: object) -> None:
        self._unwritten -= 1
        self._written.set()

    # The library allows calls from any thread, and so watches a socket only in the next turn of the loop. By then the socket may be
    # closed, and its descriptor reused. Here everything happens in the loop's thread, immediately.

    def _on_socket_open(self, client: mqtt.Client, userdata: object, sock: Any) -> None:  # noqa: ANN401, ARG002 -- the signature of the base class
        self._loop.add_reader(sock.fileno(), self._readable)
        self._misc_task = self._loop.create_task(self._misc_loop())

    def _on_socket_register_write(self, client: mqtt.Client, userdata: object, sock: Any) -> None:  # noqa: ANN401, ARG002
        try:
            self._loop.add_writer(sock.fileno(), self._writable)
        except (RuntimeError, OSError) as error:  # raised by uvloop for a failed socket: its broker was killed
            self._broke(aiomqtt.MqttError(f"its socket is closed: {error}"))

    def _on_socket_unregister_write(self, client: mqtt.Client, userdata: object, sock: Any) -> None:  # noqa: ANN401, ARG002
        if sock.fileno() >= 0:
            with contextlib.suppress(RuntimeError):  # as above
                self._loop.remove_writer(sock.fileno())

    def _on_socket_close(self, client: mqtt.Client, userdata: object, sock: Any) -> None:  # noqa: ANN401, ARG002
        if sock.fileno() >= 0:
            with contextlib.suppress(RuntimeError):  # as above
                self._loop.remove_reader(sock.fileno())
        if self._misc_task is not None:
            self._misc_task.cancel()

    def _readable(self) -> None:
        try:
            self._client.loop_read()
            while (
                (sock := self._client.socket()) is not None and isinstance(sock, SecuredBroker) and sock.pending() > 0
            ):
                self._client.loop_read()  # poll does not report decrypted data
        except Exception as error:  # noqa: BLE001 -- any error ends this connection
            self._broke(error)

    def _writable(self) -> None:
        try:
            self._client.loop_write()
        except Exception as error:  # noqa: BLE001 -- as above
            self._broke(error)

    def _broke(self, error: Exception) -> None:
        if not self._disconnected.done():
            self._disconnected.set_exception(error)

    async def disconnect(self) -> None:
        """Send DISCONNECT if connected, and always close the socket. Raises no error of the library."""
        try:
            if self._connected.done() and not self._disconnected.done():
                self._client.disconnect()
                await asyncio.wait([self._disconnected], timeout=CLOSE_S)
        finally:
            self._client._sock_close()  # noqa: SLF001 -- after a failure the library leaves it open and watched
            if self._misc_task is not None:
                self._misc_task.cancel()
            for future in (self._connected, self._disconnected):
                if future.done() and not future.cancelled():
                    future.exception()  # already reported; avoids "exception was never retrieved"


class _Outgoing(NamedTuple):
    topic: str
    payload: bytes
    retain: bool
    tag: str


class MqttBus:
    """The connection to a broker: publishes and receives advice. `run` in a task; everything else from the same loop.

    tls: for brokers at mqtts://. lookups: threads for the lookup of host names, None: the default threads.
    """

    def __init__(
        self,
        config: AgentConfig,
        local: LocalNode,
        owner: BusOwner,
        security: SecurityEvents,
        tls: BrokerTls | None = None,
        lookups: Executor | None = None,
    ) -> None:
        self._lookups = lookups
        self._urls = [BrokerUrl.parse(url) for url in config.mqtt]
        if not self._urls:
            raise ConfigError("mqtt", "no broker is named")
        self._config = config
        self._local = local
        self._owner = owner
        self._tls = tls
        identity = local.identity
        self._topics = Topics(local.cluster.name, identity.node)
        self._sealer = local.sealer("mqtt")
        self._filter = AdviceFilter(self._topics, identity, self._sealer, security, owner)
        self._identifier = f"{identity.node}-{identity.boot[:8]}"
        self._counters = security.counters
        self._outgoing: deque[_Outgoing] = deque()
        self._own_state: _Outgoing | None = None
        self._work = asyncio.Event()
        self._client: _Client | None = None
        self._url: BrokerUrl | None = None
        self._worker: asyncio.Task[None] | None = None
        self._unavailable_logged = False
        self._floods = FloodFilter(security, identity.node)
        self._shown: set[str] = set()
        """Topics for other systems that are retained."""
        self._removals: BoundedDict[str, _Outgoing] = BoundedDict(REMOVALS_MAX)
        """Removals of such topics, until they are written to a connection."""
        self.is_echoed = False
        """True if the broker in use distributes this node's messages: its own State was received back."""
        self.unavailable_because = "it has not answered yet"
        """Error of the last attempt; empty while a broker is in use."""

    @property
    def connected(self) -> bool:
        """True if a broker has granted the subscriptions, and the connection still works."""
        return self._client is not None

    @property
    def url(self) -> str | None:
        """The broker in use, without user and password; None if there is none."""
        return self._url.text if self._client is not None and self._url is not None else None

    # -- publishing ------------------------------------------------------------------------------------------------------

    def publish_state(self, state: State) -> bool:
        """Publish a State, retained; it replaces a waiting one. → False without a broker."""
        if self._client is None:
            return False
        payload = self._seal(self._topics.state, self._local.envelopes.make(state))
        if payload is None:
            return False
        self._own_state = _Outgoing(self._topics.state, payload, True, "state")
        self._work.set()
        return True

    @property
    def connects(self) -> int:
        return self._counters[metrics.MQTT_CONNECTS]

    def publish_json(self, name: str, payload: bytes) -> bool:
        """Publish for other systems, retained, unsealed; b"" removes the topic, over the next connection if this one breaks.
        → False if it was not queued."""
        if self._client is None or len(self._outgoing) >= OUTGOING_MAX:
            return False
        topic = self._topics.json + name
        outgoing = _Outgoing(topic, payload, True, "json")
        if payload:
            self._shown.add(topic)
            self._removals.pop(topic, None)
        else:
            self._shown.discard(topic)
            self._removals[topic] = outgoing
        self._outgoing.append(outgoing)
        self._work.set()
        return True

    def send(self, dst: str, dst_boot: str, message: Message) -> bool:
        """Publish advice for one node; never waits. → False if not queued (no broker, queue full, too large, not advice)."""
        return isinstance(message, ADVICE) and self._queue(self._topics.to(dst), message, dst, dst_boot)

    def broadcast(self, message: Message) -> bool:
        return isinstance(message, BROADCAST) and self._queue(self._topics.ask, message, "", "")

    def _queue(self, topic: str, message: Message, dst: str, dst_boot: str) -> bool:
        if self._client is None:
            return False
        if len(self._outgoing) >= OUTGOING_MAX:
            self._counters[metrics.labelled(metrics.MQTT_MESSAGES_REFUSED, reason="queue_full")] += 1
            return False
        payload = self._seal(topic, self._local.envelopes.make(message, dst, dst_boot))
        if payload is None:
            return False
        tag = str(message.__struct_config__.tag)
        self._outgoing.append(_Outgoing(topic, payload, False, tag))
        self._work.set()
        return True

    def _seal(self, topic: str, envelope: Envelope) -> bytes | None:
        """Seal an envelope for this topic → None if it is too large."""
        payload = self._sealer.seal(peer.encode(envelope), topic.encode())
        if len(payload) > peer.MQTT_BYTES_MAX:
            self._counters[metrics.labelled(metrics.MQTT_MESSAGES_REFUSED, reason="too_large")] += 1
            return None
        return payload

    # -- the connection ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a connection until `close`."""
        async with asyncio.TaskGroup() as group:
            self._worker = group.create_task(self._reconnect(), name="mqtt")

    async def close(self) -> None:
        """Remove the retained State, disconnect and stop; takes at most about two seconds."""
        if self._client is not None:
            self._outgoing.clear()
            self._own_state = None
            with contextlib.suppress(aiomqtt.MqttError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._client.write(self._topics.state, b"", retain=True)
                    for topic in (*self._shown, *self._removals):
                        await self._client.write(topic, self._offline(topic), retain=True)
                    await self._client.flush()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])

    def _offline(self, topic: str) -> bytes:
        """The last payload at a topic for other systems: empty for tasks, "offline" for the node."""
        gone = {"v": 1, "node": self._topics.node, "state": "offline"}
        return msgspec.json.encode(gone) if topic == f"{self._topics.json}node" else b""

    async def _reconnect(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        turn = 0
        while True:
            url = self._urls[turn % len(self._urls)]
            began_at = loop.time()
            reason = await self._serve(url)
            if loop.time() - began_at >= CONNECT_S + STEADY_S:
                failures = 0
            else:
                turn += 1
            self.unavailable_because = f"{url.text}: {reason}"
            if not self._unavailable_logged:
                _log.warning("no broker; advice goes over peer links: url=%s error=%s", url.text, reason)
                self._unavailable_logged = True
            await asyncio.sleep(backoff_s(failures))
            failures += 1

    async def _serve(self, url: BrokerUrl) -> str:
        """Use this broker as long as it answers → the reason why the connection ended."""
        queue: Callable[..., Received] = functools.partial(Received, self._counters, self._floods)
        try:
            topic = f"{self._topics.json}node"
            is_shown = self._config.mqtt_publish_state
            will = aiomqtt.Will(topic, self._offline(topic), 0, retain=True) if is_shown else None
            client = _Client(url.known_as(self._config.mqtt_password_file), self._identifier, queue, will)
        except ConfigError as error:
            return str(error)
        reason = "it closed the connection"
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                sock = await self._dial(url)
                await client.connect(sock)
                if not await client.subscribe_all(self._topics.subscriptions):
                    return "it refuses the subscriptions"
            self._opened(client, url)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive(client), name="mqtt receive")
                group.create_task(self._publish(client), name="mqtt publish")
                group.create_task(self._republish_state(), name="mqtt state")
        except* (aiomqtt.MqttError, OSError, UnicodeError, ConfigError) as errors:
            reason = _reason(errors)  # TimeoutError is an OSError
            if isinstance(sock, SecuredBroker) and sock.error is not None:
                reason = broker_error_text(sock.error)  # the library knows only that the connection ended
        finally:
            self._closed()
            await client.disconnect()
        return reason

    async def _dial(self, url: BrokerUrl) -> socket.socket:
        """Connect a socket, with TLS if the address requires it. Raises OSError or ConfigError."""
        sock = await open_tcp(url.host, url.port, self._lookups)
        if not url.tls:
            return sock
        if self._tls is None:
            sock.close()
            raise ConfigError("mqtt", "this node has no certificate for brokers with TLS")
        return await secured(sock, url, self._tls)

    def _opened(self, client: _Client, url: BrokerUrl) -> None:
        self._client, self._url = client, url
        self.is_echoed = False
        self._unavailable_logged = False
        self.unavailable_because = ""
        self._counters[metrics.MQTT_CONNECTS] += 1
        _log.info("connected to broker: url=%s", url.text)
        self._outgoing.extend(self._removals.values())
        self.publish_state(self._local.state())
        self._owner.bus_changed(connected=True)

    def _closed(self) -> None:
        if self._client is None:
            return
        self._client = self._url = None
        self._outgoing.clear()
        self._own_state = None
        self._owner.bus_changed(connected=False)

    async def _receive(self, client: _Client) -> None:
        async for message in client.messages:
            topic = str(message.topic)
            if message.payload and topic == self._topics.state:
                self.is_echoed = True
            envelope = self._filter.accept(topic, message.payload)
            if envelope is not None:
                if not message.retain:
                    self._floods.count_new(envelope.src)
                self._counters[
                    metrics.labelled(metrics.MQTT_MESSAGES_RECEIVED, type=str(envelope.body.__struct_config__.tag))
                ] += 1
                self._owner.from_bus(envelope, retained=message.retain)

    async def _publish(self, client: _Client) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            removals = []
            while (outgoing := self._next()) is not None:
                await client.write(outgoing.topic, outgoing.payload, retain=outgoing.retain)
                self._counters[metrics.labelled(metrics.MQTT_MESSAGES_PUBLISHED, type=outgoing.tag)] += 1
                if self._removals.get(outgoing.topic) is outgoing:
                    removals.append(outgoing)
            if removals:
                await client.flush()
            for removal in removals:
                if self._removals.get(removal.topic) is removal:
                    del self._removals[removal.topic]

    def _next(self) -> _Outgoing | None:
        state, self._own_state = self._own_state, None
        if state is not None:
            return state
        return self._outgoing.popleft() if self._outgoing else None

    async def _republish_state(self) -> None:
        """Publish the State again periodically: a broker's memory is not durable."""
        while True:
            await asyncio.sleep(coalesced_s(self._config.mqtt_state_every_s))
            self.publish_state(self._local.state())


def _reason(errors: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    return broker_error_text(error) or str(error) or type(error).__name__
