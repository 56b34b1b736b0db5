"""Price feed: the price file of the settings, read at the start and again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.runtime import next_tick
from peerload.config.loader import load_prices
from peerload.model.errors import ConfigError
from peerload.model.events import PricesRead

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.store.write_ahead import EventLog

log = logging.getLogger("peerload.agent")

LOOK_EVERY_S = 10.0


class PriceFeed:
    """Puts the prices of one file, again when it has changed. A file that cannot be used leaves those in force."""

    def __init__(self, path: str, put: Callable[[PricesRead], None], event_log: EventLog) -> None:
        """path: "" = there is none."""
        self._path = Path(path)
        self._is_given = bool(path)
        self._put = put
        self._event_log = event_log
        self._seen: object = ()

    async def run(self) -> None:
        """Look every LOOK_EVERY_S, for ever."""
        while self._is_given:
            await self.look()
            await next_tick(LOOK_EVERY_S)

    async def look(self) -> None:
        """Read the file if it is another than before."""
        try:
            facts = self._path.stat()
            seen: object = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        except OSError as error:
            seen = error.errno
        if seen == self._seen:
            return
        self._seen = seen
        try:
            prices = await asyncio.to_thread(load_prices, self._path)
        except ConfigError as error:
            log.warning("price file refused: error=%s", error)
            self._event_log.record("energy", "prices refused", reason=f"{error}{error.why and f' ({error.why})'}")
            return
        self._event_log.record("energy", "prices read", reason=f"{len(prices) - 2} rows of {self._path}")
        self._put(PricesRead(prices))
