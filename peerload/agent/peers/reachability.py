"""Reachability: by which way a peer is reached where not both can dial each other, behind address translation or a
firewall that lets out only.

A link serves both ways, whoever made it; so it is kept where the other end could not make it again, and made again at
once where only this end can. A stream that cannot be dialled is asked for over the link: the other end dials back, and says
in its introduction the number it was asked under. Whether a peer that has come to us can be dialled is tried once, and it
is told if not: how else should a node know what it looks like from outside?

Two that neither can dial have no way to each other: nothing but gossip, by way of others, tells them that both are there.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.errors import LinkUnavailable
from peerload.model.messages import DialBack, NotDialled
from peerload.security.address import is_loopback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping

    from peerload.agent.peers.connection import Owner, PeerConnection
    from peerload.agent.peers.peer_table import PeerEntry
    from peerload.model.messages import Hello, Identity, Message

CHECK_S = 2.0
"""So long, and up to twice as long, after a peer has come to us it is tried whether it can be dialled."""
CHECK_AGAIN_S = 300.0
"""One that could not be is tried again so often, as long as it is linked."""
LOOK_EVERY_S = 5.0
"""A node that some cannot dial looks so often whether there is a link to each member that never came to it …"""
DIALS_A_LOOK_MAX = 16
"""… and makes so many at a time."""
TRY_AGAIN_S = 60.0
"""A member that it cannot dial either it tries again so often."""
BACK_WITHIN_S = 6.0
"""Who was asked to dial back has come within this, or does not."""
ASKED_MAX = 256
"""Streams that others were asked to make."""
DIALLED_BACK_MAX = 64
"""Streams that are being made because one node asks, at a time."""
NOT_BACK_AGAIN_S = 1.0
"""Where somebody could not be dialled back just now it is not tried again for so long: nobody has us knock at the doors of third ones."""
STAGGER_S = 0.3
STAGGER_REACHED_S = 2.0
"""The other way is begun too after so long, the latter where this one has worked before."""


class _Asked(NamedTuple):
    """A stream that ``node`` was asked to make; ``make()``: who it is for."""

    node: str
    make: Callable[[], Owner]
    came: asyncio.Future[PeerConnection]


class Reachability:
    """``peers``: by name; ``open_(address, node, owner, back)`` makes a stream, or raises LinkUnavailable; ``serve()``: who serves
    the streams that others ask for, ``knock(node)``: who opens one only to see whether it can be; ``send(node,
    message)`` over a link; ``connect(identity)`` makes one; ``spawn(work, name)`` in the background."""

    def __init__(
        self,
        *,
        peers: Mapping[str, PeerEntry],
        open_: Callable[[str, str, Owner, int], Awaitable[PeerConnection]],
        serve: Callable[[], Owner],
        knock: Callable[[str], Owner],
        send: Callable[[str, Message], None],
        connect: Callable[[Identity], None],
        spawn: Callable[[Coroutine[object, object, None], str], object],
        counters: Counter[str],
    ) -> None:
        self._peers = peers
        self._open = open_
        self._serve = serve
        self._knock = knock
        self._send = send
        self._connect = connect
        self._spawn = spawn
        self._counters = counters
        self._asked: dict[int, _Asked] = {}
        self._dialling: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.members: Callable[[], Iterable[Identity]] = tuple
        """The members that are alive, as far as is known."""

    def start(self) -> None:
        """Look from time to time."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    # -- who reaches whom ----------------------------------------------------------------------------------------------

    @staticmethod
    def came(peer: PeerEntry) -> None:
        """It has made a connection to us, of whatever kind: so it can."""
        peer.came_in, peer.cannot_reach_us = True, ""

    def met(self, peer: PeerEntry, connection: PeerConnection) -> None:
        """A link to it was made, by this end or by the other."""
        address = peer.address
        if not connection.dialled and address and peer.reached != address and not is_loopback(connection.address):
            pause_s = CHECK_S * random.uniform(1.0, 2.0)  # noqa: S311 -- jitter, not a secret
            asyncio.get_running_loop().call_later(pause_s, self._check, peer)

    def can_do_without(self, link: PeerConnection) -> bool:
        """Whether either end could make another link if this one were closed."""
        peer = self._peers.get(link.hello.identity.node) if link.hello is not None else None
        if peer is None or is_loopback(link.address):
            return True
        if link.dialled:
            return peer.came_in or not link.hello.dials_back if link.hello is not None else True
        return bool(peer.reached) and peer.reached == peer.address

    def way(self, node: str) -> tuple[str, str]:
        """By which way the two are linked → `both` may dial, as far as is known; only `ours` or only `theirs` leads to the other; or
        `none`; and why not by the other."""
        peer = self._peers.get(node)
        if peer is None:
            return "both", ""
        if peer.unreached:
            return ("theirs" if peer.links else "none"), peer.unreached
        return ("ours", peer.cannot_reach_us) if peer.cannot_reach_us else ("both", "")

    def dials_back(self, node: str) -> bool:
        """Whether a peer that is linked makes streams when it is asked to."""
        peer = self._peers.get(node)
        return peer is not None and self._dials_back(peer)

    def lost(self, peer: PeerEntry) -> None:
        """The last link to it is gone: if it cannot make another, this end does, soon."""
        if peer.cannot_reach_us:
            peer.tried_s = 0.0
            asyncio.get_running_loop().call_later(STAGGER_S, self._make_links)

    def _check(self, peer: PeerEntry) -> None:
        if not self._is_over and peer.links and peer.address and peer.reached != peer.address and not peer.is_checked:
            peer.is_checked = True
            self._spawn(self._try(peer, peer.address), f"knock at {peer.node}")

    async def _try(self, peer: PeerEntry, address: str) -> None:
        """Whether it can be dialled; if not, it is told."""
        try:
            connection = await self._dial(peer, address, lambda: self._knock(peer.node))
            connection.close("only to see whether it can be reached")
        except LinkUnavailable as error:
            link = peer.link
            if link is not None and link.hello is not None and link.hello.dials_back:
                self._counters["peers told that they cannot be dialled"] += 1
                self._send(peer.node, NotDialled(0, error.kind))
        finally:
            peer.is_checked = False

    def _look(self) -> None:
        self.start()
        now_s = asyncio.get_running_loop().time()
        for peer in self._peers.values():
            if peer.unreached and peer.links and now_s - peer.tried_s > CHECK_AGAIN_S:
                self._check(peer)
        self._make_links()

    def _make_links(self) -> None:
        """A node that some cannot dial is no use to them without a link: it makes one to each that never came to it."""
        if self._is_over or not any(peer.cannot_reach_us for peer in self._peers.values()):
            return
        now_s, left = asyncio.get_running_loop().time(), DIALS_A_LOOK_MAX
        for identity in self.members():
            peer = self._peers.get(identity.node)
            if peer is not None:
                is_near = peer.came_in and not peer.cannot_reach_us
                pause_s = TRY_AGAIN_S if peer.unreached and not peer.cannot_reach_us else 0.0
                if peer.links or peer.is_dialled or is_near or now_s < max(peer.not_before_s, peer.tried_s + pause_s):
                    continue
            self._counters["peer links made for others"] += 1
            self._connect(identity)
            left -= 1
            if not left:
                return

    # -- streams -------------------------------------------------------------------------------------------------------

    async def open(self, address: str, node: str, make: Callable[[], Owner]) -> PeerConnection:
        """A stream to this node, dialled or dialled back, whichever comes first. Raises LinkUnavailable."""
        peer = self._peers.get(node)
        if peer is None:
            return await self._open(address, node, make(), 0)
        if is_loopback(address) or not self._dials_back(peer):
            return await self._dial(peer, address, make)

        def direct() -> Coroutine[object, object, PeerConnection]:
            return self._dial(peer, address, make)

        def back() -> Coroutine[object, object, PeerConnection]:
            return self._ask_back(peer, make)

        if peer.unreached:
            return await first_of(back, direct, BACK_WITHIN_S)
        return await first_of(direct, back, STAGGER_REACHED_S if peer.reached == address else STAGGER_S)

    @staticmethod
    def _dials_back(peer: PeerEntry) -> bool:
        return any(link.hello is not None and link.hello.dials_back for link in peer.links if not link.is_closed)

    async def _dial(self, peer: PeerEntry, address: str, make: Callable[[], Owner]) -> PeerConnection:
        peer.tried_s = asyncio.get_running_loop().time()
        try:
            connection = await self._open(address, peer.node, make(), 0)
        except LinkUnavailable as error:
            peer.was_not_reached(address, error.why or error.what)
            raise
        peer.was_reached(address)
        return connection

    async def _ask_back(self, peer: PeerEntry, make: Callable[[], Owner]) -> PeerConnection:
        """Have it dial us. Raises LinkUnavailable."""
        what = f"no link to {peer.node}"
        if len(self._asked) >= ASKED_MAX:
            raise LinkUnavailable(peer.node, what, why=f"{ASKED_MAX} streams were asked for and have not come")
        number = secrets.randbits(62) or 1
        came: asyncio.Future[PeerConnection] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(peer.node, make, came)
        self._counters["streams asked for over a link"] += 1
        self._send(peer.node, DialBack(number))
        try:
            async with asyncio.timeout(BACK_WITHIN_S):
                return await came
        except TimeoutError:
            why = f"it was asked over its link to dial back, and has not within {BACK_WITHIN_S:g} s"
            raise LinkUnavailable(peer.node, what, why=why) from None
        except asyncio.CancelledError:
            if came.done() and not came.cancelled() and came.exception() is None:
                came.result().abort("no longer wanted")
            raise
        finally:
            del self._asked[number]

    def came_back(self, connection: PeerConnection, hello: Hello) -> bool:
        """A peer has dialled back: the stream goes to whoever asked for it. False if nobody did."""
        asked = self._asked.get(hello.back)
        if asked is None or asked.node != hello.identity.node or asked.came.done():
            connection.reason = "a stream that nobody asked for"
            return False
        connection.owner = asked.make()
        asked.came.set_result(connection)
        return True

    def received(self, node: str, message: DialBack | NotDialled) -> None:
        """What a peer says of it over its link."""
        peer = self._peers.get(node)
        if peer is None:
            return
        if isinstance(message, DialBack):
            if self._dialling[node] >= DIALLED_BACK_MAX:
                self._counters["streams refused to dial back"] += 1
                self._send(node, NotDialled(message.number, f"{DIALLED_BACK_MAX} streams are being made already"))
                return
            self._dialling[node] += 1
            self._spawn(self._dial_back(peer, message.number), f"dial {node} back")
        elif message.number == 0:
            is_news = not peer.cannot_reach_us
            peer.came_in, peer.cannot_reach_us = False, message.why or "it could not dial this node"
            if is_news:
                self._make_links()
        elif (asked := self._asked.get(message.number)) is not None and asked.node == node and not asked.came.done():
            why = f"it cannot dial this node: {message.why}"
            asked.came.set_exception(LinkUnavailable(node, f"no link to {node}", why=why))

    async def _dial_back(self, peer: PeerEntry, number: int) -> None:
        """Make the stream that it asks for: at the address where a link of ours has found it, else where it says it is, unless
        that is this machine, and it is not."""
        ours = [link.address for link in peer.links if link.dialled and not link.is_closed]
        address, loop = ours[-1] if ours else peer.address, asyncio.get_running_loop()
        try:
            if not ours and is_loopback(address) and not any(is_loopback(link.address) for link in peer.links):
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", why=f"{address} is this machine")  # noqa: TRY301
            failed_at, failed_s, kind = peer.not_back
            if failed_at == address and loop.time() < failed_s + NOT_BACK_AGAIN_S:
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", kind=kind)  # noqa: TRY301
            try:
                connection = await self._open(address, peer.node, self._serve(), number)
            except LinkUnavailable as error:
                peer.not_back = address, loop.time(), error.kind
                raise
            if connection.hello is None or connection.hello.identity.node != peer.node:
                connection.abort("somebody else answers there")
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", why="somebody else answers there")  # noqa: TRY301
        except LinkUnavailable as error:
            self._send(peer.node, NotDialled(number, error.kind))
        finally:
            self._dialling[peer.node] -= 1
            if not self._dialling[peer.node]:
                del self._dialling[peer.node]


async def first_of(
    first: Callable[[], Coroutine[object, object, PeerConnection]],
    second: Callable[[], Coroutine[object, object, PeerConnection]],
    after_s: float,
) -> PeerConnection:
    """The connection that comes first of two; the second is begun when the first has failed, or after a while. Raises what the
    last of them does."""
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
            task.add_done_callback(lambda done: _not_needed(done, chosen))


def _not_needed(task: asyncio.Future[PeerConnection], chosen: PeerConnection | None) -> None:
    """The one that came too late is closed."""
    if not task.cancelled() and task.exception() is None and task.result() is not chosen:
        task.result().abort("another way was quicker")
