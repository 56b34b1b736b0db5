"""The UDP socket of gossip, on the same port number as the peer link: sealed datagrams in and out, and nothing decided.

A datagram that does not open, or is malformed, is dropped and counted; one that cannot be sent is counted: to whoever
waits for an answer it is as good as lost. Nothing here waits for anything.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from peerload.agent.security_events import untold
from peerload.model import rules
from peerload.model.errors import ConfigError, NotAuthentic, ProtocolError, Replayed
from peerload.model.gossip import DATAGRAM_BYTES_MAX
from peerload.security.address import ANY, join_address, looked_up, plain_host

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from peerload.agent.security_events import Tell
    from peerload.wire.seal import Sealer

BATCH_MAX = 64
"""Datagrams read before others have their turn; the rest stays with the kernel until the next turn."""
BUFFER_BYTES = 1 << 20
"""Asked of the kernel for what arrives while the agent is busy; it may give less (net.core.rmem_max)."""
REPEATED_MAX = 64
"""Datagrams of one address that come again within a minute and are not worth an event: networks double and delay some."""
NAMES_MAX = 1000
"""Host names whose address is remembered."""
LOOKUPS_MAX = 3
"""Looked up at a time, a thread each of the few that all share: names that nobody answers for hold up nothing else. What finds
no place is looked up when something is sent there again."""
NAME_S = 60.0
"""How long a host name's address is believed."""

LAG_TICK_S = 0.5
"""The loop's lateness is looked at so often: a stall is told too short by at most this."""

_log = logging.getLogger("peerload.gossip")

Said = TypeVar("Said")
Heard = TypeVar("Heard")
SocketAddress = tuple[str, int] | tuple[str, int, int, int]


class GossipSocket(Generic[Said, Heard]):
    """One agent's socket. `start` opens it, `send` says something to an address, `close` ends it.

    encode, decode: messages and their bytes (decode raises ProtocolError, whatever the bytes are); deliver: called from
    the loop's thread with (node, its boot id, the `HOST:PORT` it came from, messages) of each datagram that opened; counters: what was counted; loopback_only: nothing is
    sent to another machine; broken: (rule, who, what), what was refused.
    """

    def __init__(
        self,
        sealer: Sealer,
        encode: Callable[[Said], bytes],
        decode: Callable[[bytes], Heard],
        deliver: Callable[[str, str, str, Heard], None],
        counters: Counter[str],
        *,
        loopback_only: bool = False,
        broken: Tell = untold,
    ) -> None:
        self._broken = broken
        self._sealer = sealer
        self._encode = encode
        self._decode = decode
        self._deliver = deliver
        self._counters = counters
        self._loopback_only = loopback_only
        self._socket: socket.socket | None = None
        self._is_both = False
        self._names: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._has_complained = False

    # -- for the agent -------------------------------------------------------------------------------------------------

    def start(self, host: str, port: int) -> int:
        """Open it at this numeric address → its port, which the kernel chooses for 0. Raises ConfigError if somebody has
        the port already."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            if family == socket.AF_INET6:
                self._is_both = host == ANY[1]  # "any" is IPv4's too, as with the peer links
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

    def send(self, node: str, address: str, messages: Said) -> None:
        """Seal and send to this node at `HOST:PORT`; no other can open it. A host name is looked up first, and what is to
        be sent until then is dropped."""
        made = self._socket
        where = self._numeric(address) if made is not None else None
        if made is None or where is None:
            self._counters["gossip not sent"] += 1
            return
        datagram = self._sealer.seal(self._encode(messages), node.encode())
        if len(datagram) > DATAGRAM_BYTES_MAX:
            self._counters["gossip not sent: too large"] += 1
            return
        try:
            made.sendto(datagram, where)
        except (OSError, OverflowError) as error:
            self._not_sent(address, error)
            return
        self._counters["gossip sent"] += 1
        self._counters["gossip sent bytes"] += len(datagram)

    def close(self) -> None:
        """Receive and send nothing any more."""
        made, self._socket = self._socket, None
        if made is not None:
            asyncio.get_running_loop().remove_reader(made.fileno())
            made.close()
        for lookup in self._lookups.values():
            lookup.cancel()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(BATCH_MAX):
            made = self._socket  # whoever is told may close it
            if made is None:
                return
            try:
                datagram, (host, port, *_) = made.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except BlockingIOError:
                return
            except OSError:
                self._counters["gossip receive errors"] += 1
                return
            self._received(datagram, plain_host(host), port)

    def _received(self, datagram: bytes, host: str, port: int) -> None:
        self._counters["gossip received"] += 1
        self._counters["gossip received bytes"] += len(datagram)
        if len(datagram) > DATAGRAM_BYTES_MAX:
            self._counters["gossip dropped: too large"] += 1
            self._broken(rules.FRAMES_BOUNDED, host, "a datagram too large")
            return
        node = ""
        try:
            node, boot, plaintext = self._sealer.open(datagram, self._sealer.node.encode())
            messages = self._decode(plaintext)
        except NotAuthentic:
            self._counters["gossip dropped: not of this cluster, or for another node"] += 1
            self._broken("J5", host, "a datagram that is not of this cluster, or for another node")
        except Replayed:
            self._counters["gossip dropped: replayed"] += 1
            self._broken(rules.REPEATS_HARMLESS, host, "datagrams that have come before", tolerated=REPEATED_MAX)
        except ProtocolError as error:
            self._counters["gossip dropped: malformed"] += 1
            self._broken(rules.FRAMES_BOUNDED, node or host, str(error))
        else:
            self._deliver(node, boot, join_address(host, port), messages)

    # -- sending -------------------------------------------------------------------------------------------------------

    def _not_sent(self, address: str, error: Exception) -> None:
        self._counters["gossip send errors"] += 1
        if not self._has_complained and not isinstance(error, BlockingIOError):
            self._has_complained = True
            _log.warning("a datagram for %s could not be sent (%s); further ones are only counted", address, error)

    def _numeric(self, address: str) -> SocketAddress | None:
        """Where to send to, in the form of our socket's family; None if it is not known (yet), or of the other family."""
        host, _, port_text = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port_text.isascii() or not port_text.isdigit():
            return None
        port = int(port_text)
        try:
            found = ipaddress.ip_address(host)
        except ValueError:
            looked_up = self._looked_up(host)
            if looked_up is None:
                return None
            found = ipaddress.ip_address(looked_up)
        if self._loopback_only and not found.is_loopback:
            return None
        assert self._socket is not None
        is_ours = (found.version == 6) == (self._socket.family == socket.AF_INET6)  # noqa: PLR2004 -- IPv6
        if self._is_both and not is_ours:
            return f"::ffff:{found}", port
        return (str(found), port) if is_ours else None

    def _looked_up(self, host: str) -> str | None:
        """The address of a host name as far as it is known; the answer is looked for in the background."""
        loop = asyncio.get_running_loop()
        known, until_s = self._names.get(host, (None, 0.0))
        if loop.time() >= until_s and host not in self._lookups and len(self._lookups) < LOOKUPS_MAX:
            lookup = loop.create_task(self._look_up(host), name=f"look up {host}")
            self._lookups[host] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(host, None))
        return known

    async def _look_up(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        family = socket.AF_UNSPEC if self._socket is None or self._is_both else self._socket.family
        found: str | None = None
        try:
            answers = await looked_up(host, None, socket.SOCK_DGRAM, family)
            found = str(answers[0][4][0])
        except (OSError, ValueError):  # ValueError: no host name at all
            self._counters["gossip names not found"] += 1
            found = self._names.get(host, (None, 0.0))[0]  # the last one known is better than none
        self._names.pop(host, None)
        self._names[host] = (found, loop.time() + NAME_S)
        if len(self._names) > NAMES_MAX:
            self._names.popitem(last=False)


class LagWatch:
    """Notices that the agent did not run for longer than ``lag_s`` when it should have, and calls ``lagged`` with how long
    that was, in s: its machine was asleep, it was stopped, or its own loop was busy."""

    def __init__(self, lag_s: float, lagged: Callable[[float], None]) -> None:
        self._lag_s = lag_s
        self._lagged = lagged
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin."""
        self._due_s = _boot_s() + LAG_TICK_S
        self._handle = asyncio.get_running_loop().call_later(LAG_TICK_S, self._tick)

    def _tick(self) -> None:
        self.look()
        self.close()
        self.start()

    def look(self) -> None:
        """Tell of a stall now, if there was one: before what has piled up meanwhile is handled."""
        late_s = _boot_s() - self._due_s
        if late_s > self._lag_s and self._handle is not None:
            self.close()
            self.start()
            self._lagged(late_s)

    def close(self) -> None:
        """End."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _boot_s() -> float:
    """CLOCK_BOOTTIME, which counts the time that the machine was asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
