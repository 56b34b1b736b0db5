"""What is remembered of peers for people alone: whether datagrams arrive from them, and how far their clocks are off.

Nothing is decided by it; `peerload doctor` asks for it.
"""

from __future__ import annotations

import time
from collections import OrderedDict

PEERS_MAX = 1000
"""Of so many peers; one more, and what is oldest is forgotten."""


class PeerFact:
    """met_s: when its link was first made (monotonic); datagram_s: when its last datagram came, None: never;
    clock_ahead_s: how far its clock was ahead of ours when it last introduced itself, None: not told."""

    __slots__ = ("clock_ahead_s", "datagram_s", "met_s")

    def __init__(self) -> None:
        self.met_s = time.monotonic()
        self.datagram_s: float | None = None
        self.clock_ahead_s: float | None = None


class PeerFacts:
    """By the peer's name."""

    def __init__(self) -> None:
        self._facts: OrderedDict[str, PeerFact] = OrderedDict()

    def of(self, node: str) -> PeerFact | None:
        """What is known of this peer."""
        return self._facts.get(node)

    def met(self, node: str, wall_at: float) -> None:
        """It introduced itself over a link, a moment ago by its clock (0: it did not say)."""
        fact = self._fact(node)
        if wall_at:
            fact.clock_ahead_s = wall_at - time.time()

    def datagram(self, node: str) -> None:
        """One of its datagrams arrived."""
        self._fact(node).datagram_s = time.monotonic()

    def _fact(self, node: str) -> PeerFact:
        found = self._facts.get(node)
        if found is None:
            if len(self._facts) >= PEERS_MAX:
                self._facts.popitem(last=False)
            found = self._facts[node] = PeerFact()
        return found
