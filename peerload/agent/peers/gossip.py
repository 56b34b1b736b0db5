"""The UDP socket of gossip, on the same port number as the peer links: sends and receives sealed datagrams.

A datagram that cannot be opened or decoded is dropped and counted. One that cannot be sent is counted: to the protocol it
is lost. Nothing here waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from peerload.model import metrics, rules
from peerload.model.bounded import BoundedDict
from peerload.model.errors import ConfigError, NotAuthentic, ProtocolError, Replayed
from peerload.model.gossip import DATAGRAM_BYTES_MAX
from peerload.security.address import ANY, join_address, plain_host, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.wire.seal import Sealer

BATCH_MAX = 64
"""Datagrams read in one turn of the loop; the rest stays in the kernel until the next turn."""
BUFFER_BYTES = 1 << 20
"""Size of the kernel's receive buffer, if it allows so much (net.core.rmem_max)."""
REPLAYED_MAX = 64
"""Replayed datagrams of one address within a minute that are no security event: networks duplicate and delay some."""
NAMES_MAX = 1000
"""Host names whose address is cached."""
LOOKUPS_MAX = 3
"""Concurrent lookups, a thread each of the shared pool, so that names without an answer block nothing else. A name beyond
that is looked up when something is sent there again."""
NAME_S = 60.0
"""Life of a cached address of a host name."""

_log = logging.getLogger("peerload.gossip")

Sent = TypeVar("Sent")
Received = TypeVar("Received")
SocketAddress = tuple[str, int] | tuple[str, int, int, int]


class GossipSocket(Generic[Sent, Received]):
    """The gossip socket of one agent: `start`, `send`, `close`.

    encode, decode: messages to bytes and back (decode raises ProtocolError, whatever the bytes are). deliver: called with
    (node, its boot id, source `HOST:PORT`, messages) of each datagram. loopback_only: nothing is sent to another machine.
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
    ) -> None:
        self._security = security
        self._sealer = sealer
        self._encode = encode
        self._decode = decode
        self._deliver = deliver
        self._counters = security.counters
        self._loopback_only = loopback_only
        self._socket: socket.socket | None = None
        self._is_both = False
        self._names: BoundedDict[str, tuple[str | None, float]] = BoundedDict(NAMES_MAX)
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._has_logged = False

    # -- for the agent -------------------------------------------------------------------------------------------------

    def start(self, host: str, port: int) -> int:
        """Open the socket at this numeric address → its port, which the kernel chooses for 0. Raises ConfigError if the
        port is in use."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            if family == socket.AF_INET6:
                self._is_both = host == ANY[1]  # "any" includes IPv4, as for the peer links
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not self._is_both)
            made.bind((host, port))
        except OSError as error:
            made.close()
            why = error.strerror or str(error)
            raise ConfigError("listen", f"cannot receive datagrams at {join_address(host, port)}", why=why) from None
        self._socket = made
        asyncio.get_running_loop().add_reader(made.fileno(), self._readable)
        chosen: int = made.getsockname()[1]
        return chosen

    def send(self, node: str, address: str, messages: Sent) -> None:
        """Seal a datagram for this node and send it to `HOST:PORT`. A host name is looked up first; datagrams are dropped
        until then."""
        made = self._socket
        where = self._numeric(address) if made is not None else None
        if made is None or where is None:
            self._counters[metrics.labelled(metrics.GOSSIP_DATAGRAMS_UNSENT, reason="no address")] += 1
            return
        datagram = self._sealer.seal(self._encode(messages), node.encode())
        if len(datagram) > DATAGRAM_BYTES_MAX:
            self._counters[metrics.labelled(metrics.GOSSIP_DATAGRAMS_UNSENT, reason="too large")] += 1
            return
        try:
            made.sendto(datagram, where)
        except (OSError, OverflowError) as error:
            self._not_sent(address, error)
            return
        self._counters[metrics.GOSSIP_DATAGRAMS_SENT] += 1
        self._counters[metrics.GOSSIP_BYTES_SENT] += len(datagram)

    def close(self) -> None:
        """Close the socket."""
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
            self._drop("too large", rules.FRAMES_BOUNDED, host, "a datagram too large")
            return
        node = ""
        try:
            node, boot, plaintext = self._sealer.open(datagram, self._sealer.node.encode())
            messages = self._decode(plaintext)
        except NotAuthentic:
            self._drop("not authentic", "J5", host, "a datagram that is not of this cluster, or for another node")
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
            _log.warning("cannot send a datagram; further errors are only counted: address=%s error=%s", address, error)

    def _numeric(self, address: str) -> SocketAddress | None:
        """The address in the form of the socket's family; None if it is not known (yet), or of another family."""
        host, _, port_text = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port_text.isascii() or not port_text.isdigit():
            return None
        port = int(port_text)
        try:
            found = ipaddress.ip_address(host)
        except ValueError:
            known = self._resolved(host)
            if known is None:
                return None
            found = ipaddress.ip_address(known)
        if self._loopback_only and not found.is_loopback:
            return None
        assert self._socket is not None
        is_ours = (found.version == 6) == (self._socket.family == socket.AF_INET6)  # noqa: PLR2004 -- IPv6
        if self._is_both and not is_ours:
            return f"::ffff:{found}", port
        return (str(found), port) if is_ours else None

    def _resolved(self, host: str) -> str | None:
        """The cached address of a host name; it is looked up in the background."""
        loop = asyncio.get_running_loop()
        known, until_s = self._names.get(host, (None, 0.0))
        if loop.time() >= until_s and host not in self._lookups and len(self._lookups) < LOOKUPS_MAX:
            lookup = loop.create_task(self._resolve(host), name=f"resolve {host}")
            self._lookups[host] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(host, None))
        return known

    async def _resolve(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        family = socket.AF_UNSPEC if self._socket is None or self._is_both else self._socket.family
        found: str | None = None
        try:
            answers = await resolve(host, None, socket.SOCK_DGRAM, family)
            found = str(answers[0][4][0])
        except (OSError, ValueError):  # ValueError: not a host name
            self._counters[metrics.GOSSIP_NAMES_UNRESOLVED] += 1
            found = self._names.get(host, (None, 0.0))[0]  # the last known address is better than none
        self._names[host] = (found, loop.time() + NAME_S)


class LagWatch:
    """Reports when the event loop did not run for longer than ``lag_s``: the machine was asleep, the process was stopped, or
    the loop was busy. ``lagged`` is called with the duration in s.

    It watches for ``span_s`` after each datagram: a node without peers does not wake up for it, nor does one that has
    datagrams more often. A stall is reported too short by at most ``span_s``."""

    def __init__(self, lag_s: float, span_s: float, lagged: Callable[[float], None]) -> None:
        self._lag_s = lag_s
        self._span_s = span_s
        self._lagged = lagged
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Report a stall now, if there was one: before the input that has piled up meanwhile is handled."""
        late_s = _boot_s() - self._due_s
        if late_s > self._lag_s and self._handle is not None:
            self.close()
            self._lagged(late_s)

    def watch(self) -> None:
        """Watch for ``span_s`` from now on."""
        self.close()
        self._due_s = _boot_s() + self._span_s
        self._handle = asyncio.get_running_loop().call_later(self._span_s, self._over)

    def _over(self) -> None:
        self.check()
        self._handle = None

    def close(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _boot_s() -> float:
    """CLOCK_BOOTTIME, which includes the time that the machine was asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
