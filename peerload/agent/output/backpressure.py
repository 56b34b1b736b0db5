"""Backpressure of a reader on its task: a task that somebody reads as it writes waits for a reader that is far behind,
as a pipe would make it wait.

Its output goes into files of which only so much is kept, so a writer faster than its reader would lose the middle of what it
wrote. So while whoever ran it in the foreground is more than FAR_BYTES behind, its processes are stopped (SIGSTOP), and go on
(SIGCONT) when it is within NEAR_BYTES. A task that runs elsewhere is held back there: its output is taken over no faster than
it is read here, and its node stops it in the same way. Who is told of a signal of its user is not held back any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from peerload.agent.output.inotify import Inotify

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from peerload.agent.output.spool import Spool

FAR_BYTES = 32 << 20
NEAR_BYTES = 16 << 20
"""High and low mark: a task waits for a reader of either stream that is more than the first behind, until it is
within the second. What the task writes before it is stopped comes on top; together that is less than what is kept
for a reader (FOLLOWED_BYTES_MAX, halved)."""
LOOK_EVERY_S = 0.005
"""Shortest interval between two looks at the files while they grow."""
HARMLESS = frozenset((signal.SIGWINCH, signal.SIGCONT, signal.SIGURG, signal.SIGTSTP, signal.SIGSTOP))
"""Signals that do not ask a process to end."""


class AwaitedReader:
    """One reader that a task waits for, and how much of each stream it has read. is_awaited: the task waits for it
    whoever else reads."""

    __slots__ = ("is_awaited", "read")

    def __init__(self, stdout_from: int, stderr_from: int, *, is_awaited: bool = False) -> None:
        self.is_awaited = is_awaited
        self.read = [stdout_from, stderr_from]


class _Held:
    """One attempt with readers that it waits for."""

    __slots__ = ("changed", "is_free", "is_stopped", "readers", "room")

    def __init__(self) -> None:
        self.readers: list[AwaitedReader] = []
        self.changed = asyncio.Event()
        self.room = asyncio.Event()
        self.is_stopped = False
        self.is_free = False


class OutputBackpressure:
    """The attempts of one agent with readers that they wait for, by execution key. ``signal(key, number)`` reaches
    the processes of an attempt that runs here and does nothing for others."""

    def __init__(self, spool: Spool, send: Callable[[str, int], None]) -> None:
        self._spool = spool
        self._send = send
        self._held: dict[str, _Held] = {}

    @contextlib.asynccontextmanager
    async def reader(
        self, key: str, stdout_from: int, stderr_from: int, *, runs_here: bool, is_awaited: bool = False
    ) -> AsyncIterator[AwaitedReader]:
        """Within this context the task waits for this reader; it goes on when the last reader has left. All awaited
        readers count. Without one, the foremost reader counts, so that nobody who only looks on stops what another
        reads."""
        reader = AwaitedReader(stdout_from, stderr_from, is_awaited=is_awaited)
        held = self._held.setdefault(key, _Held())
        held.readers.append(reader)
        watch = asyncio.get_running_loop().create_task(self._watch(key, held)) if runs_here else None
        try:
            yield reader
        finally:
            held.readers.remove(reader)
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            if not held.readers:
                self._go_on(key, held)
                self._held.pop(key, None)

    def moved(self, key: str) -> None:
        """A reader of this attempt has read on."""
        held = self._held.get(key)
        if held is not None and (held.is_stopped or not held.room.is_set()) and self._behind(key, held) <= NEAR_BYTES:
            self._go_on(key, held)

    def signalled(self, key: str, number: int) -> None:
        """Release the attempt, because its user has sent it a signal, which a stopped process would not take."""
        if number not in HARMLESS:
            self.let_go(key)

    def let_go(self, key: str) -> None:
        """Hold the attempt back no longer."""
        held = self._held.get(key)
        if held is not None:
            held.is_free = True
            self._go_on(key, held)

    def adopt(self, keys: Iterable[str]) -> None:
        """Continue these attempts, which run since before this agent was started: the agent before it may have
        stopped them."""
        for key in keys:
            if max(self._spool.sizes(key)) > NEAR_BYTES:
                self._send(key, signal.SIGCONT)

    async def room(self, key: str) -> None:
        """Return when more of the output of this attempt, which runs elsewhere, may come here."""
        while (held := self._held.get(key)) is not None and not held.is_free and self._behind(key, held) > FAR_BYTES:
            held.room.clear()
            await held.room.wait()

    async def _watch(self, key: str, held: _Held) -> None:
        """Stop the task as soon as it is too far ahead."""
        if self._spool.inotify is None:
            self._spool.inotify = Inotify(asyncio.get_running_loop(), self._spool.directory)
        inotify, names = self._spool.inotify, {path.name for path in self._spool.paths(key)}
        inotify.add(names, held.changed.set)
        try:
            while not held.is_free:
                held.changed.clear()
                if not held.is_stopped and self._behind(key, held) > FAR_BYTES:
                    held.is_stopped = True
                    self._send(key, signal.SIGSTOP)
                await held.changed.wait()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            inotify.remove(names, held.changed.set)

    def _behind(self, key: str, held: _Held) -> int:
        """Lag, in bytes, of the slowest awaited reader, or else of the foremost reader of all."""
        sizes = self._spool.sizes(key)
        behind = [
            (reader.is_awaited, max(size - read for size, read in zip(sizes, reader.read, strict=True)))
            for reader in held.readers
        ]
        awaited = [size for is_awaited, size in behind if is_awaited]
        return max(awaited) if awaited else min((size for _, size in behind), default=0)

    def _go_on(self, key: str, held: _Held) -> None:
        held.room.set()
        if held.is_stopped:
            held.is_stopped = False
            self._send(key, signal.SIGCONT)
