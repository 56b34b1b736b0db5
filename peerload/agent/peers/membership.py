"""The agent's side of membership: listening, the UDP socket of gossip, and the members of the last start.

The core decides which members are alive. This file has the ports (links and gossip share one number), the watch for stalls of the
agent itself, and the address file. With this file, a killed agent finds its peers again after any time, and they find
it at its last port, even if no port was configured. The file is a hint: its loss costs time, but never a task.

A datagram that cannot be opened or decoded is dropped and counted. One that cannot be sent is counted, and is lost for the
protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import socket
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec

from peerload.agent.runtime import now
from peerload.config.loader import BUILT_IN, ENVIRONMENT, FLAG
from peerload.core.membership.peers import PeerState
from peerload.model import events, metrics, rules
from peerload.model.bounded import BoundedDict
from peerload.model.errors import ConfigError, NotAuthentic, ProtocolError, Replayed
from peerload.model.gossip import DATAGRAM_BYTES_MAX, MembershipUpdate
from peerload.model.messages import Identity
from peerload.model.resources import Profile
from peerload.security.address import (
    ANY,
    IP_FREEBIND,
    PORT_MAX,
    NetworkAbsence,
    is_loopback,
    join_address,
    parse_address,
    plain_host,
    resolve,
    resolve_one,
)
from peerload.security.private_files import write_private
from peerload.wire import peer as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from peerload.agent.peers.links import LinkOwner, PeerLinks
    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.runtime import AgentInfo, EventSink, Inbox
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.core.node import Node
    from peerload.model.actions import SendGossip
    from peerload.model.messages import Hello
    from peerload.security.revocation import TrustStore
    from peerload.wire.peer import Datagram
    from peerload.wire.seal import Sealer


ADDRESS_FILE = "addresses"
PORT_TRIES_MAX = 20
"""Number of attempts to find a port that is free for TCP and UDP, if no port is configured."""
SOURCE_S = 30.0
"""Time for which the source address of a node's last datagram is used instead of the address in its identity: behind address
translation the two differ, and the translation expires without traffic."""
WRITE_S = 1.0
"""Delay of writing the address file after a change: a kill loses only the changes since then."""
FACTS_MAX = 1000


class PeerFacts(msgspec.Struct):
    """Facts about one peer; all but the source of its last datagram are only for `peerload doctor`.

    met_s: time of its first link or message (monotonic); datagram_s: time of its last datagram, None: never; address, boot: source
    and start of the peer for that datagram; clock_base_s: the date in its last Hello, minus this node's boot clock, None: unknown.
    """

    met_s: float = msgspec.field(default_factory=time.monotonic)
    datagram_s: float | None = None
    address: str = ""
    boot: str = ""
    clock_base_s: float | None = None

    def clock_ahead_s(self) -> float | None:
        """Lead of the peer's clock, if it has run evenly since its last Hello; a step of this node's clock counts."""
        at = now()
        return self.clock_base_s + at.boot_s - at.wall_s if self.clock_base_s is not None else None


class Members:
    """Listens for links and gossip, sends datagrams, and keeps the addresses of members."""

    def __init__(
        self,
        info: AgentInfo,
        local: LocalNode,
        node: Node,
        links: PeerLinks,
        trust: TrustStore,
        inbox: Inbox,
        security: SecurityEvents,
    ) -> None:
        self._info = info
        self._local = local
        self._node = node
        self._links = links
        self._trust = trust
        self._inbox = inbox
        self._security = security
        self._file = AddressFile(Path(info.config.state) / ADDRESS_FILE, local.cluster.id)
        self._socket = GossipSocket(
            local.sealer("gossip"),
            wire.encode_datagram,
            wire.decode_datagram,
            self._received,
            security,
            loopback_only=local.cluster.is_local,
            lookups=links.lookups,
        )
        preset = node.state.config.gossip
        self._lag = LagWatch(preset.lag_s, 1.1 * preset.probe_s, inbox)  # a healthy node probes once within probe_s
        self._write_timer: asyncio.TimerHandle | None = None
        self._facts: BoundedDict[str, PeerFacts] = BoundedDict(FACTS_MAX)

    @property
    def known(self) -> tuple[Identity, ...]:
        return tuple(self._file.peers.values())

    @property
    def kept(self) -> AddressFile:
        return self._file

    @property
    def listens_at(self) -> str:
        """The `HOST:PORT` where this node listens; the published address may differ."""
        return self._file.listen

    async def listen(self, owner: LinkOwner) -> str:
        """Open both ports → the `HOST:PORT` that peers can dial. owner: receiver of the links' messages. If no port is configured,
        that of the last start is tried first, because peers may dial it. Raises ConfigError."""
        listen = self._info.config.listen
        host, port = parse_address("listen", listen, loopback_only=self._local.cluster.is_local)
        try:
            ip = await resolve_one(host)
        except OSError as error:
            raise ConfigError("listen", f"{host!r} has no address", why=str(error)) from None
        last = self._file.port_of(host)
        tries = [port] if port else [*([last] if last else []), *[0] * PORT_TRIES_MAX]
        for number, wanted in enumerate(tries, start=1):
            try:
                address = await self._listen_at(owner, ip, wanted)
            except ConfigError:
                if number == len(tries):
                    raise
            else:
                self._file.set_listen(address)
                for identity in self.known:
                    self._links.learn(identity)  # they may have tasks of this node, or this node tasks of theirs
                return address
        raise AssertionError("there is always a last try")

    async def _listen_at(self, owner: LinkOwner, ip: str, wanted: int) -> str:
        without = self._file.network_absence(self._info.origins)
        port = self._socket.start(ip, wanted, may_lack_address=without.may_lack_address)
        try:
            return await self._links.start(owner, ip, port, self._info.config.advertise, without)
        except ConfigError:
            self._socket.close()
            raise

    def send(self, action: SendGossip) -> None:
        self._lag.watch()
        self._socket.send(action.node, self._source_of(action.node) or action.address, action.messages)

    def _source_of(self, node: str) -> str:
        """The source address of the last datagram of this start of a node, if it is recent; otherwise empty."""
        facts = self._facts.get(node)
        if facts is None or facts.datagram_s is None or time.monotonic() - facts.datagram_s > SOURCE_S:
            return ""
        identity = self._local.identity_of(node)
        return facts.address if identity is not None and identity.boot == facts.boot else ""

    def close(self, *, forget: bool = False) -> None:
        """Close the gossip socket. ``forget``: the next start must know no member."""
        self._lag.close()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_addresses()
        if forget:
            self._file.set_peers(())
        self._socket.close()

    def _received(self, node: str, boot: str, address: str, datagram: Datagram) -> None:
        self._lag.check()
        self._lag.watch()
        if not self._trust.admits(node, boot):
            reason = metrics.labelled(metrics.GOSSIP_DATAGRAMS_DROPPED, reason="revoked_node")
            self._security.counters[reason] += 1
            self._security.report("J4", node, "a datagram, though it was revoked")
            return
        facts = self._facts_of(node)
        facts.datagram_s, facts.address, facts.boot = time.monotonic(), address, boot
        if MembershipUpdate in map(type, datagram.messages):
            self.changed()
        if datagram.skipped:
            self._security.counters[metrics.GOSSIP_MESSAGES_UNKNOWN] += datagram.skipped
        self._inbox.put(
            events.GossipReceived(node, boot, datagram.messages, address, datagram.protocol_min, datagram.protocol_max)
        )

    # -- the address file ----------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Schedule a write of the address file, because members have changed."""
        if self._write_timer is None:
            self._write_timer = asyncio.get_running_loop().call_later(WRITE_S, self._write_addresses)

    def _write_addresses(self) -> None:
        """Store the members that have not left and are not revoked, and members of earlier starts that were not met yet."""
        self._write_timer = None
        membership = self._node.membership
        met = {peer.identity.node: peer for peer in membership}
        present = [peer.identity for peer in met.values() if peer.state is not PeerState.LEFT and not peer.is_shut_out]
        unmet = [identity for node, identity in membership.gossip.anti_entropy.known.items() if node not in met]
        asleep = tuple(peer.profile for peer in met.values() if peer.state is PeerState.ASLEEP and peer.knows_profile)
        at = now()
        gone = {
            member.rumour: at.wall_s - (at.boot_s - member.since_s)
            for member in membership.gossip.shared.members.values()
            if member.is_gone
        }
        self._file.set_peers([one for one in (*unmet, *present) if one.address], membership.waking.took_s, asleep, gone)

    # -- facts for users -----------------------------------------------------------------------------------------------

    def met(self, hello: Hello) -> None:
        self.changed()
        facts = self._facts_of(hello.identity.node)
        if hello.wall_at:
            facts.clock_base_s = hello.wall_at - now().boot_s

    def facts_of(self, node: str) -> PeerFacts | None:
        return self._facts.get(node)

    def _facts_of(self, node: str) -> PeerFacts:
        found = self._facts.get(node)
        if found is None:
            found = self._facts[node] = PeerFacts()
        return found


BATCH_MAX = 64
"""Maximum number of datagrams read in one turn of the loop; the rest stays in the kernel until the next turn."""
BUFFER_BYTES = 1 << 20
"""Size of the kernel's receive buffer, if net.core.rmem_max allows it."""
REPLAYED_MAX = 64
"""Number of replayed datagrams of one address within a minute that are no security event: networks duplicate and delay some."""
NAMES_MAX = 1000
"""Maximum number of host names whose address is cached."""
LOOKUPS_MAX = 3
"""Maximum number of concurrent lookups, with a thread each, so that names without an answer block nothing else. A further name is
looked up with the next datagram to it."""
LOOKUP_THREADS = LOOKUPS_MAX + 1
"""Number of threads for lookups: one more than gossip uses, for links and brokers."""
NAME_S = 60.0
"""Lifetime of a cached address of a host name."""

_gossip_log = logging.getLogger("peerload.gossip")

Sent = TypeVar("Sent")
Received = TypeVar("Received")
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
SocketAddress = tuple[str, int] | tuple[str, int, int, int]


class GossipSocket(Generic[Sent, Received]):
    """The gossip socket of one agent: `start`, `send`, `close`.

    encode, decode: messages to bytes and back (decode raises only ProtocolError). deliver: called with
    (node, its boot id, source `HOST:PORT`, messages) of each datagram. loopback_only: nothing is sent to another machine.
    lookups: threads for the lookup of host names, None: the default threads.
    """

    def __init__(
        self,
        sealer: Sealer,
        encode: Callable[[Sent], bytes],
        decode: Callable[[bytes], Received],
        deliver: Callable[[str, str, str, Received], None],
        security: SecurityEvents,
        *,
        loopback_only: bool = False,
        lookups: Executor | None = None,
    ) -> None:
        self._threads = lookups
        self._security = security
        self._sealer = sealer
        self._encode = encode
        self._decode = decode
        self._deliver = deliver
        self._counters = security.counters
        self._loopback_only = loopback_only
        self._socket: socket.socket | None = None
        self._is_both = self._is_inet6 = False
        self._names: BoundedDict[str, tuple[IPAddress | None, float]] = BoundedDict(NAMES_MAX)
        self._numbers: BoundedDict[str, SocketAddress] = BoundedDict(NAMES_MAX)
        """Numeric addresses in the form for the socket."""
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._has_logged = False

    # -- for the agent -------------------------------------------------------------------------------------------------

    def start(self, host: str, port: int, *, may_lack_address: bool = False) -> int:
        """Open the socket at this numeric address → its port, which the kernel chooses for 0. Raises ConfigError if the
        port is in use, or this machine does not have the address and may not lack it."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            if family == socket.AF_INET6:
                self._is_both = host == ANY[1]  # "any" includes IPv4, as for the peer links
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not self._is_both)
            if may_lack_address:
                made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            made.bind((host, port))
        except OSError as error:
            made.close()
            why = error.strerror or str(error)
            raise ConfigError("listen", f"cannot receive datagrams at {join_address(host, port)}", why=why) from None
        self._socket, self._is_inet6 = made, family == socket.AF_INET6
        asyncio.get_running_loop().add_reader(made.fileno(), self._readable)
        chosen: int = made.getsockname()[1]
        return chosen

    def send(self, node: str, address: str, messages: Sent) -> None:
        """Seal a datagram for this node and send it to `HOST:PORT`. A host name is looked up first; until then, datagrams are
        dropped."""
        made = self._socket
        where = (self._numbers.get(address) or self._numeric(address)) if made is not None else None
        if made is None or where is None:
            self._counters[metrics.labelled(metrics.GOSSIP_DATAGRAMS_UNSENT, reason="no_address")] += 1
            return
        datagram = self._sealer.seal(self._encode(messages), node.encode())
        if len(datagram) > DATAGRAM_BYTES_MAX:
            self._counters[metrics.labelled(metrics.GOSSIP_DATAGRAMS_UNSENT, reason="too_large")] += 1
            return
        try:
            made.sendto(datagram, where)
        except (OSError, OverflowError) as error:
            self._not_sent(address, error)
            return
        self._counters[metrics.GOSSIP_DATAGRAMS_SENT] += 1
        self._counters[metrics.GOSSIP_BYTES_SENT] += len(datagram)

    def close(self) -> None:
        made, self._socket = self._socket, None
        if made is not None:
            asyncio.get_running_loop().remove_reader(made.fileno())
            made.close()
        for lookup in self._lookups.values():
            lookup.cancel()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(BATCH_MAX):
            made = self._socket  # a callback may close it
            if made is None:
                return
            try:
                datagram, (host, port, *_) = made.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except BlockingIOError:
                return
            except OSError:
                self._counters[metrics.GOSSIP_RECEIVE_ERRORS] += 1
                return
            self._received(datagram, plain_host(host), port)

    def _received(self, datagram: bytes, host: str, port: int) -> None:
        self._counters[metrics.GOSSIP_DATAGRAMS_RECEIVED] += 1
        self._counters[metrics.GOSSIP_BYTES_RECEIVED] += len(datagram)
        if len(datagram) > DATAGRAM_BYTES_MAX:
            self._drop("too_large", rules.FRAMES_BOUNDED, host, "a datagram too large")
            return
        node = ""
        try:
            node, boot, plaintext = self._sealer.open(datagram, self._sealer.node.encode())
            messages = self._decode(plaintext)
        except NotAuthentic:
            self._drop("not_authentic", "J5", host, "a datagram that is not of this cluster, or for another node")
        except Replayed:
            self._drop("replayed", rules.REPEATS_HARMLESS, host, "replayed datagrams", tolerated=REPLAYED_MAX)
        except ProtocolError as error:
            self._drop("malformed", rules.FRAMES_BOUNDED, node or host, str(error))
        else:
            self._deliver(node, boot, join_address(host, port), messages)

    def _drop(self, reason: str, rule: str, who: str, what: str, *, tolerated: int = 0) -> None:
        self._counters[metrics.labelled(metrics.GOSSIP_DATAGRAMS_DROPPED, reason=reason)] += 1
        self._security.report(rule, who, what, tolerated=tolerated)

    # -- sending -------------------------------------------------------------------------------------------------------

    def _not_sent(self, address: str, error: Exception) -> None:
        self._counters[metrics.GOSSIP_SEND_ERRORS] += 1
        if not self._has_logged and not isinstance(error, BlockingIOError):
            self._has_logged = True
            _gossip_log.warning(
                "cannot send a datagram; further errors are only counted: address=%s error=%s", address, error
            )

    def _numeric(self, address: str) -> SocketAddress | None:
        """The address in the form of the socket's family; None if it is unknown (yet), or of another family."""
        host, _, port_text = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port_text.isascii() or not port_text.isdigit():
            return None
        port = int(port_text)
        found = self._resolved(host)
        if found is None or (self._loopback_only and not found.is_loopback):
            return None
        is_ours = (found.version == 6) == self._is_inet6  # noqa: PLR2004 -- IPv6
        if not is_ours and not self._is_both:
            return None
        where = (str(found) if is_ours else f"::ffff:{found}"), port
        if self._names[host][1] == math.inf:
            self._numbers[address] = where
        return where

    def _resolved(self, host: str) -> IPAddress | None:
        """The cached address of a host name, or a numeric address. Starts a lookup in the background if needed."""
        loop = asyncio.get_running_loop()
        known, until_s = self._names.get(host, (None, 0.0))
        if known is None and not until_s:
            with contextlib.suppress(ValueError):
                known, until_s = self._names[host] = ipaddress.ip_address(host), math.inf
        if loop.time() >= until_s and host not in self._lookups and len(self._lookups) < LOOKUPS_MAX:
            lookup = loop.create_task(self._resolve(host), name=f"resolve {host}")
            self._lookups[host] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(host, None))
        return known

    async def _resolve(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        family = socket.AF_UNSPEC if self._socket is None or self._is_both else self._socket.family
        found: IPAddress | None = None
        try:
            answers = await resolve(host, None, socket.SOCK_DGRAM, family, self._threads)
            found = ipaddress.ip_address(answers[0][4][0])
        except (OSError, ValueError):  # ValueError: not a host name
            self._counters[metrics.GOSSIP_NAMES_UNRESOLVED] += 1
            found = self._names.get(host, (None, 0.0))[0]  # the last known address is better than none
        self._names[host] = (found, loop.time() + NAME_S)


SAME_MOMENT_S = 0.01
"""Time in which a second call of `watch` changes nothing."""


class LagWatch:
    """Reports when the event loop did not run for longer than ``lag_s``: the machine was asleep, the process was stopped, or
    the loop was busy.

    It watches for ``span_s`` after each datagram, so that it causes no wake-up on a node without peers or
    with more frequent datagrams. The reported length of a stall may be too short by up to ``span_s``."""

    def __init__(self, lag_s: float, span_s: float, inbox: EventSink) -> None:
        self._lag_s = lag_s
        self._span_s = span_s
        self._inbox = inbox
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Report a stall if there was one. Call it before the accumulated input is handled."""
        late_s = _boot_s() - self._due_s
        if late_s > self._lag_s and self._handle is not None:
            self.close()
            self._inbox.put(events.LoopLagged(late_s))

    def watch(self) -> None:
        """Watch for ``span_s`` from now. Keep a watch of the same moment: most datagrams come in pairs."""
        due_s = _boot_s() + self._span_s
        if self._handle is not None and 0 <= due_s - self._due_s < SAME_MOMENT_S:
            return
        self.close()
        self._due_s = due_s
        self._handle = asyncio.get_running_loop().call_later(self._span_s, self._over)

    def _over(self) -> None:
        self.check()
        self._handle = None

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _boot_s() -> float:
    """CLOCK_BOOTTIME, which includes the time that the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_log = logging.getLogger("peerload.peer")

FILE_BYTES_MAX = 1 << 20
PEERS_KEPT_MAX = 1000
ASLEEP_KEPT_MAX = 64
"""Maximum number of sleeping members whose profile is kept."""
GONE_KEPT_MAX = 1000
"""Maximum number of stored members that left or were forgotten, the latest ones."""
NO_TIMES: Mapping[Any, float] = MappingProxyType({})


class _Content(msgspec.Struct, frozen=True):
    listen: str = ""
    peers: tuple[Identity, ...] = ()
    wake_s: dict[str, Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]] = {}
    asleep: tuple[Profile, ...] = ()
    gone: tuple[tuple[MembershipUpdate, float], ...] = ()
    cluster: str = ""


class AddressFile:
    """The file of addresses. ``listen``: HOST:PORT of the last start, "" if there was none; ``peers``: addresses by name;
    ``wake_s``: time that woken members took to wake; ``asleep``: profiles of sleeping members, which no other node may know;
    ``gone``: members that left or were forgotten, and the time (Unix s). cluster: the id of their cluster. The members of the
    previous cluster are kept in a second file until this node is in that cluster again."""

    def __init__(self, path: Path, cluster: str = "") -> None:
        self._path = path
        self._cluster = cluster
        content = _read_addresses(path)
        is_other = bool(cluster) and content.cluster not in ("", cluster)
        self.listen = content.listen
        if is_other:
            before = path.with_name(f"{path.name}.before")
            content = _read_addresses(before)
            if content.cluster != cluster:
                content = _Content()
            with contextlib.suppress(OSError):  # the disk is full: `_write` logs it
                path.replace(before)
        self.peers = {identity.node: identity for identity in content.peers}
        self.wake_s = content.wake_s
        self.asleep = content.asleep
        self.gone = dict(content.gone)
        if is_other:
            self._write()

    def gone_since(self, wall_s: float) -> tuple[MembershipUpdate, ...]:
        """The members that left or were forgotten, each with the time since then at this date (Unix s)."""
        return tuple(msgspec.structs.replace(one, age_s=max(wall_s - at, 0.0)) for one, at in self.gone.items())

    def port_of(self, host: str) -> int:
        """The port of the last start at this host; 0 if there was none."""
        last_host, _, port = self.listen.rpartition(":")
        is_port = port.isascii() and port.isdigit() and len(port) <= len(str(PORT_MAX)) and int(port) <= PORT_MAX
        return int(port) if last_host.strip("[]") == host and is_port else 0

    def network_absence(self, origins: Mapping[str, str]) -> NetworkAbsence:
        """Behaviour without a network: the agent waits for an address from a file, but not for one from the command line."""
        host = self.listen.rpartition(":")[0].strip("[]")
        is_typed = origins.get("listen", FLAG) in (FLAG, ENVIRONMENT, BUILT_IN)
        return NetworkAbsence(not is_typed, "" if is_loopback(self.listen) else host)

    def set_listen(self, address: str) -> None:
        if address != self.listen:
            self.listen = address
            self._write()

    def set_peers(
        self,
        identities: Sequence[Identity],
        wake_s: Mapping[str, float] = NO_TIMES,
        asleep: tuple[Profile, ...] = (),
        gone: Mapping[MembershipUpdate, float] = NO_TIMES,
    ) -> None:
        """Store these peers (the last PEERS_KEPT_MAX), the times they took to wake, the sleeping ones, and the gone
        ones."""
        peers = {identity.node: identity for identity in identities[-PEERS_KEPT_MAX:]}
        times = {node: took_s for node, took_s in wake_s.items() if node in peers}
        sleepers = tuple(profile for profile in asleep if profile.node in peers)[:ASLEEP_KEPT_MAX]
        last = sorted(gone, key=lambda one: (gone[one], one.node))[-GONE_KEPT_MAX:]
        graves = {one: self.gone.get(one, gone[one]) for one in last}  # ignore a change of only the date
        if (peers, times, sleepers, graves) != (self.peers, self.wake_s, self.asleep, self.gone):
            self.peers, self.wake_s, self.asleep, self.gone = peers, times, sleepers, graves
            self._write()

    def _write(self) -> None:
        try:
            content = _Content(
                self.listen,
                tuple(self.peers.values()),
                self.wake_s,
                self.asleep,
                tuple(self.gone.items()),
                self._cluster,
            )
            write_private(self._path, msgspec.msgpack.encode(content), is_durable=False)
        except OSError as error:
            _log.warning("cannot write the address file: path=%s error=%s", self._path, error.strerror)


def _read_addresses(path: Path) -> _Content:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > FILE_BYTES_MAX:
                return _Content()
            return msgspec.msgpack.decode(file.read(), type=_Content)
    except FileNotFoundError:
        return _Content()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        _log.warning("cannot read the address file; its addresses are lost: path=%s error=%s", path, error)
        return _Content()
