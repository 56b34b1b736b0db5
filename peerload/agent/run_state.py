"""The run state of an agent: whether it runs, and how it ends."""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.model.errors import PeerloadError

log = logging.getLogger("peerload.agent")


class Ending(enum.IntEnum):
    """How an agent ends. Where there is more than one reason, the greatest decides."""

    RESTART = enum.auto()
    """It stops, and the same process starts it again."""
    STOP = enum.auto()
    """It stops; running tasks run on."""
    LEAVE = enum.auto()
    """It stops, and its next start knows no peer."""
    END_TASKS = enum.auto()
    """It ends its running tasks, and stops."""
    FAILED = enum.auto()
    """It decides nothing more: what was acknowledged is on disk, and going on could break a promise."""
    REFUSED = enum.auto()
    """It may not run here at all: it ends its tasks, and leaves without a message to anybody."""


class RunState:
    """Of one agent, from its start until it has stopped."""

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.refusal: PeerloadError | None = None
        """Why this agent may not run here at all; `Daemon.run` raises it."""
        self._stopping = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether it has begun to stop."""
        return self.ending is not None

    @property
    def has_failed(self) -> bool:
        """Whether it decides nothing more."""
        return self.ending in {Ending.FAILED, Ending.REFUSED}

    @property
    def ends_tasks(self) -> bool:
        """Whether running tasks end with it."""
        return self.ending in {Ending.END_TASKS, Ending.REFUSED}

    async def stopping(self) -> None:
        """Return when it begins to stop."""
        await self._stopping.wait()

    def stop(self, ending: Ending = Ending.STOP) -> None:
        """Begin to stop."""
        self.ending = max(self.ending or ending, ending)
        self._stopping.set()

    def fail(self, why: str) -> None:
        """Stop after something that must not be survived, and log why."""
        log.critical("%s; the agent stops", why)
        self.stop(Ending.FAILED)

    def refuse(self, error: PeerloadError) -> None:
        """Stop, since this agent may not run here at all."""
        self.refusal = error
        self.stop(Ending.REFUSED)
