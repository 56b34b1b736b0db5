"""Bootstrap: the addresses at which a member is looked for are dialled until somebody answers there, however long it
takes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from peerload.agent.peers.peer_table import backoff_s
from peerload.model.errors import LinkUnavailable
from peerload.security.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_log = logging.getLogger("peerload.peer")


class Bootstrap:
    """``own_address()``: where others dial this node, "" before it listens; ``reach(address)`` makes a link to whoever is
    there, or raises LinkUnavailable; ``spawn(work, name)`` has it done in the background; ``loopback_only``: other
    machines' addresses are refused."""

    def __init__(
        self,
        own_address: Callable[[], str],
        reach: Callable[[str], Awaitable[object]],
        spawn: Callable[[Coroutine[object, object, None], str], object],
        *,
        loopback_only: bool,
    ) -> None:
        self._own_address = own_address
        self._reach = reach
        self._spawn = spawn
        self._loopback_only = loopback_only
        self._ourselves: set[str] = set()
        self.sought: dict[str, str] = {}
        """Those at which no peer has answered yet, and why (empty: no word so far)."""

    def dial(self, address: str) -> None:
        """Find whoever is at this address; given up only if it turns out to be ourselves. Raises ConfigError if it is not
        `HOST:PORT`, or one that is refused."""
        parse_address("peer", address, loopback_only=self._loopback_only)
        if address not in self.sought and address not in self._ourselves and address != self._own_address():
            self.sought[address] = ""
            self._spawn(self._find(address), f"seed {address}")

    async def _find(self, address: str) -> None:
        failures = 0
        while True:
            try:
                await self._reach(address)
            except LinkUnavailable as error:
                if address == self._own_address() or "this agent itself" in error.why:
                    self._ourselves.add(address)
                    break
                self.sought[address] = error.why or error.what
                if failures == 0:
                    _log.warning("no peer at %s yet (%s); trying on", address, error.why)
                failures += 1
                await asyncio.sleep(backoff_s(failures))
            else:
                break
        self.sought.pop(address, None)
