"""Reachability: connections between nodes of which only one can dial the other (address translation, firewalls).

A link serves both directions, whoever made it. It is kept where the other end could not make it again, and made again at
once where only this end can. A stream that cannot be dialled is requested over the link: the other end dials back and names
the number of the request in its Hello. After a peer has dialled this node, this node checks once whether it can dial the
peer, and reports a failure to it: no node knows by itself what it looks like from outside.

Two nodes that cannot dial each other in either direction have no link; they know of each other by gossip alone.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.peers.streams import StreamReader
from peerload.model import metrics
from peerload.model.errors import LinkUnavailable
from peerload.model.messages import DialBack, NotDialled
from peerload.security.address import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from peerload.agent.peers.connection import ConnectionRegistry, Links, Owner, PeerConnection
    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.peers.peer_table import PeerEntry, PeerTable
    from peerload.model.messages import Hello

CHECK_S = 2.0
"""Delay of the check whether a peer that has dialled this node can be dialled; jitter makes it up to twice as long."""
CHECK_AGAIN_S = 300.0
"""Interval of further checks of a linked peer that cannot be dialled."""
CHECK_EVERY_S = 5.0
"""Interval at which a node that some peers cannot dial looks for members without a link …"""
DIALS_PER_CHECK_MAX = 16
"""… and how many of them it dials at a time."""
TRY_AGAIN_S = 60.0
"""Interval of its dials of a member that it cannot reach either."""
DIAL_BACK_S = 6.0
"""Timeout of a requested dial back."""
REQUESTED_MAX = 256
"""Streams requested of other nodes at a time."""
DIAL_BACKS_MAX = 64
"""Dial backs to one node at a time."""
DIAL_BACK_AGAIN_S = 1.0
"""Pause after a failed dial back, so that no peer can use this node to dial third ones."""
STAGGER_S = 0.3
STAGGER_REACHED_S = 2.0
"""Head start of one direction before the other is tried, too; the second where the first direction has worked before."""


class _RequestedStream(NamedTuple):
    """A stream that ``node`` was asked to open; ``make()``: its owner."""

    node: str
    make: Callable[[], Owner]
    opened: asyncio.Future[PeerConnection]


class Reachability:
    """Which peers can be dialled from here, and the streams to those that cannot."""

    def __init__(
        self,
        local: LocalNode,
        links: Links,
        table: PeerTable,
        connections: ConnectionRegistry,
        counters: Counter[str],
    ) -> None:
        self._local = local
        self._links = links
        self._table = table
        self._connections = connections
        self._counters = counters
        self._requested: dict[int, _RequestedStream] = {}
        self._dial_backs: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Start the periodic checks."""
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check_all)

    def stop(self) -> None:
        """Stop the checks."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    # -- who can dial whom ---------------------------------------------------------------------------------------------

    @staticmethod
    def dialled_by(peer: PeerEntry) -> None:
        """Note that the peer has dialled this node."""
        peer.has_dialled_us, peer.cannot_reach_us = True, ""

    def link_made(self, peer: PeerEntry, connection: PeerConnection) -> None:
        """Plan the check of a peer that has made a link."""
        address = peer.address
        if not connection.dialled and address and peer.reached != address and not is_loopback(connection.address):
            pause_s = CHECK_S * random.uniform(1.0, 2.0)  # noqa: S311 -- jitter, not a secret
            asyncio.get_running_loop().call_later(pause_s, self._check, peer)

    def is_replaceable(self, link: PeerConnection) -> bool:
        """True if either end could make another link if this one were closed."""
        peer = self._table.get(link.hello.identity.node) if link.hello is not None else None
        if peer is None or is_loopback(link.address):
            return True
        if link.dialled:
            return peer.has_dialled_us or not link.hello.dials_back if link.hello is not None else True
        return bool(peer.reached) and peer.reached == peer.address

    def route(self, node: str) -> tuple[str, str]:
        """Directions that can be dialled: `both`, as far as is known, `ours`, `theirs` or `none`; and the error of the
        other direction."""
        peer = self._table.get(node)
        if peer is None:
            return "both", ""
        if peer.unreached:
            return ("theirs" if peer.links else "none"), peer.unreached
        return ("ours", peer.cannot_reach_us) if peer.cannot_reach_us else ("both", "")

    def dials_back(self, node: str) -> bool:
        """True if a linked peer opens streams on request."""
        peer = self._table.get(node)
        return peer is not None and _dials_back(peer)

    def link_lost(self, peer: PeerEntry) -> None:
        """The last link to a peer is lost: if the peer cannot make another, this node does."""
        if peer.cannot_reach_us:
            peer.dialled_s = 0.0
            asyncio.get_running_loop().call_later(STAGGER_S, self._make_links)

    def _check(self, peer: PeerEntry) -> None:
        if (
            not self._is_stopped
            and peer.links
            and peer.address
            and peer.reached != peer.address
            and not peer.is_checked
        ):
            peer.is_checked = True
            self._links.spawn(self._check_dial(peer, peer.address), f"check {peer.node}")

    async def _check_dial(self, peer: PeerEntry, address: str) -> None:
        """Dial a peer, and report a failure to it."""
        try:
            connection = await self._dial(peer, address, lambda: StreamReader(self._local, peer.node, ()))
            connection.close("only to see whether it can be reached")
        except LinkUnavailable as error:
            link = peer.link
            if link is not None and link.hello is not None and link.hello.dials_back:
                self._counters[metrics.PEER_UNREACHABLE_NOTICES] += 1
                self._links.send(peer.node, NotDialled(0, error.kind))
        finally:
            peer.is_checked = False

    def _check_all(self) -> None:
        self.start()
        now_s = asyncio.get_running_loop().time()
        for peer in self._table.entries.values():
            if peer.unreached and peer.links and now_s - peer.dialled_s > CHECK_AGAIN_S:
                self._check(peer)
        self._make_links()

    def _make_links(self) -> None:
        """If some peer cannot dial this node, make a link to each member that has never dialled it."""
        if self._is_stopped or not any(peer.cannot_reach_us for peer in self._table.entries.values()):
            return
        now_s, left = asyncio.get_running_loop().time(), DIALS_PER_CHECK_MAX
        for identity in self._local.alive_peers():
            peer = self._table.get(identity.node)
            if peer is not None:
                can_dial_us = peer.has_dialled_us and not peer.cannot_reach_us
                pause_s = TRY_AGAIN_S if peer.unreached and not peer.cannot_reach_us else 0.0
                is_too_early = now_s < max(peer.not_before_s, peer.dialled_s + pause_s)
                if peer.links or peer.is_dialled or can_dial_us or is_too_early:
                    continue
            self._counters[metrics.PEER_LINKS_DIALED_BACK] += 1
            self._links.connect(identity)
            left -= 1
            if not left:
                return

    # -- streams -------------------------------------------------------------------------------------------------------

    async def open(self, address: str, node: str, make: Callable[[], Owner]) -> PeerConnection:
        """Open a stream to this node, by dialling or by a dial back, whichever comes first. Raises LinkUnavailable."""
        peer = self._table.get(node)
        if peer is None:
            return await self._connections.open(address, node, make(), stream=True)
        if is_loopback(address) or not _dials_back(peer):
            return await self._dial(peer, address, make)

        def direct() -> Coroutine[object, object, PeerConnection]:
            return self._dial(peer, address, make)

        def back() -> Coroutine[object, object, PeerConnection]:
            return self._request(peer, make)

        if peer.unreached:
            return await first_of(back, direct, DIAL_BACK_S)
        return await first_of(direct, back, STAGGER_REACHED_S if peer.reached == address else STAGGER_S)

    async def _dial(self, peer: PeerEntry, address: str, make: Callable[[], Owner]) -> PeerConnection:
        peer.dialled_s = asyncio.get_running_loop().time()
        try:
            connection = await self._connections.open(address, peer.node, make(), stream=True)
        except LinkUnavailable as error:
            peer.dial_failed(address, error.why or error.what)
            raise
        peer.dial_succeeded(address)
        return connection

    async def _request(self, peer: PeerEntry, make: Callable[[], Owner]) -> PeerConnection:
        """Ask the peer to dial back. Raises LinkUnavailable."""
        what = f"no link to {peer.node}"
        if len(self._requested) >= REQUESTED_MAX:
            raise LinkUnavailable(peer.node, what, why=f"{REQUESTED_MAX} requested streams have not come yet")
        number = secrets.randbits(62) or 1
        opened: asyncio.Future[PeerConnection] = asyncio.get_running_loop().create_future()
        self._requested[number] = _RequestedStream(peer.node, make, opened)
        self._counters[metrics.PEER_STREAMS_REQUESTED] += 1
        self._links.send(peer.node, DialBack(number))
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                return await opened
        except TimeoutError:
            why = f"it was asked over its link to dial back, and has not within {DIAL_BACK_S:g} s"
            raise LinkUnavailable(peer.node, what, why=why) from None
        except asyncio.CancelledError:
            if opened.done() and not opened.cancelled() and opened.exception() is None:
                opened.result().abort("no longer wanted")
            raise
        finally:
            del self._requested[number]

    def stream_opened(self, connection: PeerConnection, hello: Hello) -> bool:
        """Hand over a stream that a peer has opened by request. False if it was not requested."""
        requested = self._requested.get(hello.back)
        if requested is None or requested.node != hello.identity.node or requested.opened.done():
            connection.reason = "a stream that nobody asked for"
            return False
        connection.owner = requested.make()
        requested.opened.set_result(connection)
        return True

    def received(self, node: str, message: DialBack | NotDialled) -> None:
        """Handle a request to dial back, or the report that this node cannot be dialled."""
        peer = self._table.get(node)
        if peer is None:
            return
        if isinstance(message, DialBack):
            if self._dial_backs[node] >= DIAL_BACKS_MAX:
                self._counters[metrics.PEER_STREAMS_REFUSED] += 1
                self._links.send(node, NotDialled(message.number, f"{DIAL_BACKS_MAX} streams are being made already"))
                return
            self._dial_backs[node] += 1
            self._links.spawn(self._dial_back(peer, message.number), f"dial {node} back")
        elif message.number == 0:
            is_news = not peer.cannot_reach_us
            peer.has_dialled_us, peer.cannot_reach_us = False, message.why or "it could not dial this node"
            if is_news:
                self._make_links()
        else:
            requested = self._requested.get(message.number)
            if requested is not None and requested.node == node and not requested.opened.done():
                why = f"it cannot dial this node: {message.why}"
                requested.opened.set_exception(LinkUnavailable(node, f"no link to {node}", why=why))

    async def _dial_back(self, peer: PeerEntry, number: int) -> None:
        """Open the stream that a peer requests: at the address of this node's link to it, else at its own account. A
        loopback address of a peer on another machine is not dialled."""
        dialled = [link.address for link in peer.links if link.dialled and not link.is_closed]
        address, loop = dialled[-1] if dialled else peer.address, asyncio.get_running_loop()
        try:
            if not dialled and is_loopback(address) and not any(is_loopback(link.address) for link in peer.links):
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", why=f"{address} is this machine")  # noqa: TRY301
            failed_at, failed_s, kind = peer.dial_back_failure
            if failed_at == address and loop.time() < failed_s + DIAL_BACK_AGAIN_S:
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", kind=kind)  # noqa: TRY301
            try:
                connection = await self._connections.open(address, peer.node, self._links, stream=True, back=number)
            except LinkUnavailable as error:
                peer.dial_back_failure = address, loop.time(), error.kind
                raise
            if connection.hello is None or connection.hello.identity.node != peer.node:
                connection.abort("somebody else answers there")
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", why="somebody else answers there")  # noqa: TRY301
        except LinkUnavailable as error:
            self._links.send(peer.node, NotDialled(number, error.kind))
        finally:
            self._dial_backs[peer.node] -= 1
            if not self._dial_backs[peer.node]:
                del self._dial_backs[peer.node]


def _dials_back(peer: PeerEntry) -> bool:
    return any(link.hello is not None and link.hello.dials_back for link in peer.links if not link.is_closed)


async def first_of(
    first: Callable[[], Coroutine[object, object, PeerConnection]],
    second: Callable[[], Coroutine[object, object, PeerConnection]],
    after_s: float,
) -> PeerConnection:
    """The first of two connections. The second is begun when the first has failed, or after ``after_s``. Raises the error of
    the last one."""
    tasks = [asyncio.ensure_future(first())]
    chosen: PeerConnection | None = None
    try:
        await asyncio.wait(tasks, timeout=after_s)
        if not tasks[0].done() or tasks[0].exception() is not None:
            tasks.append(asyncio.ensure_future(second()))
        waiting = set(tasks)
        while waiting and chosen is None:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            chosen = next((task.result() for task in tasks if task in done and task.exception() is None), None)
        if chosen is None:
            raise next(error for task in reversed(tasks) if (error := task.exception()) is not None)
        return chosen
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(lambda done: _close_late(done, chosen))


def _close_late(task: asyncio.Future[PeerConnection], chosen: PeerConnection | None) -> None:
    """Close the connection that came second."""
    if not task.cancelled() and task.exception() is None and task.result() is not chosen:
        task.result().abort("another way was quicker")
