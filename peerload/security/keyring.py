"""Keyring: gives every sealer of this node the seal keys in force, when they change and when their time comes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.security.revocation import Trust
    from peerload.wire.seal import Sealer

TIMER_S_MAX = 86_400.0


class Keyring:
    """The sealers of one node. ``trust`` knows the keys."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self._sealers: list[Sealer] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sealer: Sealer) -> Sealer:
        """Have a sealer use the keys in force from now on."""
        self._sealers.append(sealer)
        sealer.use(self.trust.keys(time.time()))
        return sealer

    def refresh(self) -> None:
        """Use the keys in force, and plan their next change."""
        now = time.time()
        for sealer in self._sealers:
            sealer.use(self.trust.keys(now))
        self.close()
        changes_at = self.trust.changes_at(now)
        if changes_at is not None:
            wait_s = min(max(changes_at - now, 0.0) + 0.01, TIMER_S_MAX)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.refresh)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
