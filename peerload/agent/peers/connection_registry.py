"""Registry of all connections between agents: how one is made, and which are cut since their other end is shut out.

What is said over them is their owner's: `links.py`, `peers/streams.py`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from peerload.agent.peers.connection import Owner, PeerConnection, dial
from peerload.security.certificates import proven_facts

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from datetime import datetime

    from peerload.model.messages import Identity
    from peerload.security.tls import Credentials


class ConnectionRegistry:
    """Those of one node. tls: how we prove who we are, and to whom; identity: ours by now."""

    def __init__(self, tls: Credentials, identity: Callable[[], Identity], counters: Counter[str]) -> None:
        self._tls = tls
        self._cluster = tls.cluster.name
        self._identity = identity
        self._counters = counters
        self._made: weakref.WeakSet[PeerConnection] = weakref.WeakSet()
        """All there are, streams that were dialled too, whoever has them by now."""

    def make(self, owner: Owner, *, dialled: bool, stream: bool = False, back: int = 0) -> PeerConnection:
        """One that ``owner`` has; it does not go anywhere yet."""
        made = PeerConnection(owner, self._cluster, self._identity(), dialled=dialled, stream=stream, back=back)
        made.is_shut_out = self._is_revoked
        self._made.add(made)
        return made

    async def open(
        self, address: str, who: str, owner: Owner, *, stream: bool = False, back: int = 0
    ) -> PeerConnection:
        """A connection whose other end has introduced itself. Raises LinkUnavailable."""
        return await dial(address, who, self._tls, lambda: self.make(owner, dialled=True, stream=stream, back=back))

    def cut_revoked(self) -> None:
        """Close every link whose other end was shut out since."""
        for connection in [one for one in self._made if self._is_in(one) and self._is_revoked(one)]:
            connection.close("its certificate was revoked")

    def cut_ended(self, now: datetime) -> None:
        """Close every link whose other end was let in by a certificate that has ended since: if it has another one, it
        is back at once. A cluster that never leaves this machine looks at no date."""
        if self._tls.cluster.is_local:
            return
        for connection in [one for one in self._made if self._is_in(one)]:
            if proven_facts(connection.certificate).valid_until <= now:
                self._counters["peer links cut: the certificate has ended"] += 1
                connection.close("its certificate has ended")

    @staticmethod
    def _is_in(connection: PeerConnection) -> bool:
        return bool(connection.certified) and not connection.is_closed

    def _is_revoked(self, connection: PeerConnection) -> bool:
        try:
            return self._tls.refuses(proven_facts(connection.certificate))
        except ValueError:
            return True  # not as this cluster's CA makes them
