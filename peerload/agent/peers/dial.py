"""How a known node is dialled, in the background: where it was last heard of, and not again at once after it failed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from peerload.model.errors import LinkUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.peers.peer_table import PeerEntry
    from peerload.model.messages import Identity


class Dialer:
    """Links that we make. open_: (address, node) → a connection whose other end has introduced itself; give_up: (peer,
    why) it cannot be reached; whereabouts: what gossip has heard of a node."""

    def __init__(
        self,
        open_: Callable[[str, str], Coroutine[object, object, PeerConnection]],
        spawn: Callable[[Coroutine[object, object, None], str], object],
        give_up: Callable[[PeerEntry, str], None],
        whereabouts: Callable[[str], Identity | None],
    ) -> None:
        self._open = open_
        self._spawn = spawn
        self._give_up = give_up
        self._whereabouts = whereabouts

    def dial(self, peer: PeerEntry) -> None:
        """Make a link in the background; within the pause after a failure, fail at once."""
        if (newest := self._whereabouts(peer.node)) is not None:
            peer.learn(newest)  # gossip may have heard of a later start, or of one never linked to
        now_s = asyncio.get_running_loop().time()
        if peer.identity is None or not peer.identity.address:
            self._give_up(peer, "its address is not known")
        elif now_s < peer.not_before_s:
            self._give_up(peer, "it could not be reached a moment ago")
        else:
            peer.is_dialled = True
            self._spawn(self._reach(peer, peer.identity.address), f"dial {peer.node}")

    async def _reach(self, peer: PeerEntry, address: str) -> None:
        reason = ""
        try:
            connection = await self._open(address, peer.node)
            if connection.hello is not None and connection.hello.identity.node != peer.node:
                reason = f"{connection.hello.identity.node} answers at {address}"
            else:
                peer.was_reached(address)
        except LinkUnavailable as error:
            reason = error.why or error.what
            peer.tried_s = asyncio.get_running_loop().time()
            peer.was_not_reached(address, reason)
        finally:
            peer.is_dialled = False
        if not peer.links:
            peer.failed(asyncio.get_running_loop().time())
            self._give_up(peer, reason or "the link broke at once")
