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
    """Ending of an agent. Where there is more than one, all are carried out, and the greatest says how it is reported."""

    RESTART = enum.auto()
    """The agent stops, and the same process starts it again."""
    STOP = enum.auto()
    """The agent stops; running tasks run on."""
    LEAVE = enum.auto()
    """The agent stops, and its next start knows no peer."""
    END_TASKS = enum.auto()
    """The agent ends its running tasks, and stops."""
    FAILED = enum.auto()
    """The agent decides nothing more: what was acknowledged is on disk, and going on could break a promise."""
    REFUSED = enum.auto()
    """The agent may not run here: it ends its tasks, and leaves without a message to anybody."""


class RunState:
    """The run state of one agent, from its start until it has stopped."""

    def __init__(self) -> None:
        self._endings: set[Ending] = set()
        self.refusal: PeerloadError | None = None
        """The error because of which this agent may not run here; `Daemon.run` raises it."""
        self._stopping = asyncio.Event()

    @property
    def ending(self) -> Ending | None:
        """The greatest of its endings; None while it runs."""
        return max(self._endings, default=None)

    @property
    def is_stopping(self) -> bool:
        """True once it has begun to stop."""
        return bool(self._endings)

    @property
    def has_failed(self) -> bool:
        """True once it decides nothing more."""
        return not self._endings.isdisjoint({Ending.FAILED, Ending.REFUSED})

    @property
    def ends_tasks(self) -> bool:
        """True if running tasks end with it, also where it fails meanwhile."""
        return not self._endings.isdisjoint({Ending.END_TASKS, Ending.REFUSED})

    @property
    def leaves(self) -> bool:
        """True if its next start is to know no peer."""
        return Ending.LEAVE in self._endings

    async def stopping(self) -> None:
        """Return when it begins to stop."""
        await self._stopping.wait()

    def stop(self, ending: Ending = Ending.STOP) -> None:
        """Begin to stop."""
        self._endings.add(ending)
        self._stopping.set()

    def fail(self, why: str) -> None:
        """Stop after something that must not be survived, and log why."""
        log.critical("%s; the agent stops", why)
        self.stop(Ending.FAILED)

    def refuse(self, error: PeerloadError) -> None:
        """Stop, since this agent may not run here at all."""
        self.refusal = error
        self.stop(Ending.REFUSED)
