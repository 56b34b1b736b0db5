"""Transfer of task output: followed here, served to the home of a task, fetched from the node that runs it; and backpressure.

There is one mechanism. A follower reads the files of a task in this node's spool. While the task runs elsewhere, a
*mirror* writes the output of that node into the same files. So `run`, `logs -f` and the recording of a result all read
the same files, and a mirror that was started for a follower serves the result, too.

A task whose output is followed waits for a reader that is far behind, as it would with a pipe. Its output goes into files
of limited size, so a task that is faster than its reader would lose the middle of its output. Therefore, while
the client that ran it in the foreground is more than FAR_BYTES behind, its processes are stopped (SIGSTOP). They continue (SIGCONT)
when the client is within NEAR_BYTES. For a task that runs elsewhere, its output is fetched only as fast as it is read
here, and its node stops it in the same way. A task that gets a signal from its user is no longer stopped.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Protocol

from peerload.agent.output.spool import FOLLOWED_S_MAX, Follower
from peerload.agent.store.disk_space import cannot_write
from peerload.core.work import RemotePhase
from peerload.model import metrics
from peerload.model.bounded import BoundedDict
from peerload.model.errors import PeerloadError
from peerload.model.messages import OutputChunk, OutputEnd, OutputRequest
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence

    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.links import PeerLinks
    from peerload.core.node import Node
    from peerload.model.actions import FetchOutput
    from peerload.model.events import Running
    from peerload.model.task import ExecutionRecord, Exit


FAR_BYTES = 32 << 20
NEAR_BYTES = 16 << 20
"""High and low mark: a task waits for a reader of either stream that is more than the first behind, until it is
within the second. The output before the stop takes effect comes on top; the sum is less than what is kept
for a reader (FOLLOWED_BYTES_MAX, halved)."""
LOOK_EVERY_S = 0.005
"""Minimum interval between two checks of growing files."""
RETURN_S_MAX = 90.0
"""Maximum time that a task waits for a home that has stopped reading: by then, a `run` and its home have given up."""
HARMLESS = frozenset((signal.SIGWINCH, signal.SIGCONT, signal.SIGURG, signal.SIGTSTP, signal.SIGSTOP))
"""Signals that do not ask a process to end."""


class AwaitedReader:
    """A reader that a task waits for, and the number of bytes of each stream that it has read. is_awaited: the task waits
    for it regardless of other readers."""

    __slots__ = ("is_awaited", "read")

    def __init__(self, stdout_from: int, stderr_from: int, *, is_awaited: bool = False) -> None:
        self.is_awaited = is_awaited
        self.read = [stdout_from, stderr_from]


class _Held:
    """State of an attempt that waits for its readers."""

    __slots__ = ("changed", "is_free", "is_stopped", "readers", "room")

    def __init__(self) -> None:
        self.readers: list[AwaitedReader] = []
        self.changed = asyncio.Event()
        self.room = asyncio.Event()
        self.is_stopped = False
        self.is_free = False


class SignalSender(Protocol):
    """Sends signals to the processes of attempts: the launcher."""

    def signal(self, key: str, number: int, /) -> None:
        """Send a signal to the processes of an attempt that runs here; do nothing for other attempts."""


class OutputBackpressure:
    """The attempts of one agent that wait for readers, by execution key."""

    def __init__(self, spool: Spool, launcher: SignalSender) -> None:
        self._spool = spool
        self._launcher = launcher
        self._held: dict[str, _Held] = {}

    @contextlib.asynccontextmanager
    async def reader(
        self, key: str, stdout_from: int, stderr_from: int, *, runs_here: bool, is_awaited: bool = False
    ) -> AsyncIterator[AwaitedReader]:
        """Context manager in which the task waits for this reader; the task continues when the last reader has left.
        All awaited readers count. Without any, only the foremost reader counts, so that a mere observer does not
        stop the output of another."""
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
        """Record that a reader of this attempt has read more."""
        held = self._held.get(key)
        if held is not None and (held.is_stopped or not held.room.is_set()) and self._behind(key, held) <= NEAR_BYTES:
            self._go_on(key, held)

    def signalled(self, key: str, number: int) -> None:
        """Release the attempt, because its user has sent it a signal, which a stopped process would not handle."""
        if number not in HARMLESS:
            self.release(key)

    def release(self, key: str) -> None:
        held = self._held.get(key)
        if held is not None:
            held.is_free = True
            self._go_on(key, held)

    def adopt(self, keys: Iterable[str]) -> None:
        """Continue these attempts, which were running before this agent started: the earlier agent may have stopped
        them."""
        for key in keys:
            if max(self._spool.sizes(key)) > NEAR_BYTES:
                self._launcher.signal(key, signal.SIGCONT)

    async def room(self, key: str) -> None:
        """Return when more output of this attempt, which runs elsewhere, may be fetched."""
        while (held := self._held.get(key)) is not None and not held.is_free and self._behind(key, held) > FAR_BYTES:
            held.room.clear()
            await held.room.wait()

    async def _watch(self, key: str, held: _Held) -> None:
        """Stop the task when it is too far ahead of its readers."""
        with self._spool.watched(key, held.changed.set):
            while not held.is_free:
                held.changed.clear()
                if not held.is_stopped and self._behind(key, held) > FAR_BYTES:
                    held.is_stopped = True
                    self._launcher.signal(key, signal.SIGSTOP)
                await held.changed.wait()
                await asyncio.sleep(LOOK_EVERY_S)

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
            self._launcher.signal(key, signal.SIGCONT)


log = logging.getLogger("peerload.output")

ENDS_KEPT_MAX = 4096
"""Maximum number of ended attempts whose sizes are remembered for late followers."""
CUT_EVERY_BYTES = 16 << 20
"""Number of fetched bytes after which a copy is cut to its limit."""
COPY_AGAIN_S = 5.0
"""Delay before an interrupted copy is resumed while the task runs."""
SILENCE_S_MAX = 30.0
"""Maximum time without progress of an output on its way home, after which the copy is abandoned. The result is sent again,
and its output is requested again from the same offset."""


class TaskOutputs:
    """The followers and mirrors of one agent, by execution key."""

    def __init__(
        self, spool: Spool, node: Node, links: PeerLinks, launcher: SignalSender, counters: collections.Counter[str]
    ) -> None:
        """links: to the nodes that output is fetched from; launcher: stops and continues attempts that run here."""
        self._spool = spool
        self._links = links
        self._counters = counters
        self.backpressure = OutputBackpressure(spool, launcher)
        self._node = node
        self._followers: dict[str, set[Follower]] = {}
        self._mirrors: dict[str, asyncio.Task[OutputEnd]] = {}
        self._ends: BoundedDict[str, tuple[int, int]] = BoundedDict(ENDS_KEPT_MAX)
        self.served: collections.Counter[str] = collections.Counter()
        """Attempts here whose outputs their homes are reading → number of readers."""
        self._work: set[asyncio.Task[None]] = set()
        self._waits: dict[str, asyncio.Task[None]] = {}
        """Waits of attempts here for homes that have stopped reading: one for each, also if a home reconnects often."""
        self._is_closed = False

    def adopt(self, running: Running, executions: Iterable[ExecutionRecord]) -> None:
        """Take over the attempts that ran before this agent started. Those ``executions`` that a `run` of another home may read
        wait for that home as after a broken connection: it will request the output again."""
        keys = [run[0] for run in running]
        self.backpressure.adopt(keys)
        alive = set(keys)
        for record in executions:
            key = execution_key(record.uid, record.attempt)
            if key in alive and record.spec.followed and record.spec.terminal is None:
                self._hold(key, *self._spool.sizes(key))

    # -- followers -----------------------------------------------------------------------------------------------------

    async def follow_paced(
        self, key: str, stdout_from: int, stderr_from: int, *, runs_here: bool, is_awaited: bool = False
    ) -> AsyncGenerator[tuple[int, int, bytes], None]:
        """Follow as `follow` does, while the task waits for this reader (is_awaited: see
        `OutputBackpressure.reader`). A piece counts as read when the next one is requested."""
        async with (
            self.backpressure.reader(
                key, stdout_from, stderr_from, runs_here=runs_here, is_awaited=is_awaited
            ) as reader,
            contextlib.aclosing(self.follow(key, stdout_from, stderr_from)) as pieces,
        ):
            async for stream, offset, data in pieces:
                yield stream, offset, data
                reader.read[stream - 1] = offset + len(data)
                self.backpressure.moved(key)

    async def follow(
        self, key: str, stdout_from: int = 0, stderr_from: int = 0, *, end: tuple[int, int] | None = None
    ) -> AsyncGenerator[tuple[int, int, bytes], None]:
        """Yield (stream, offset, data) of an attempt's files here, up to the sizes ``end``; without ``end``, as they grow,
        until the attempt has ended and everything was read."""
        follower = Follower(self._spool, key, stdout_from, stderr_from)
        self._followers.setdefault(key, set()).add(follower)
        try:
            if end is not None:
                follower.end(*end)
            elif key in self._ends:
                follower.end(*self._ends[key])
            async for piece in follower:
                yield piece
        finally:
            follower.close()
            left = self._followers.get(key)
            if left is not None:
                left.discard(follower)
                if not left:
                    del self._followers[key]

    def ended(self, key: str, stdout_bytes: int, stderr_bytes: int) -> None:
        """Set the final sizes of the output of an attempt."""
        self.backpressure.release(key)
        self._ends[key] = (stdout_bytes, stderr_bytes)
        for follower in self._followers.get(key, ()):
            follower.end(stdout_bytes, stderr_bytes)

    def attempts_ended(self, ended: Sequence[tuple[str, Exit]]) -> None:
        for key, exit_ in ended:
            self.ended(key, exit_.stdout_bytes, exit_.stderr_bytes)

    def remote_attempts_gone(self) -> None:
        """End the outputs of attempts of other homes that are gone without an end of their own (they were lost or given
        back)."""
        remotes = self._node.executor.remote_tasks
        for key in [key for key in self.served if key not in remotes and key not in self._ends]:
            self.ended(key, *self._spool.sizes(key))

    # -- to its home ---------------------------------------------------------------------------------------------------

    async def serve_output(self, src: str, request: OutputRequest) -> AsyncIterator[OutputChunk | OutputEnd]:
        """The output of a remote task, for its home alone. Without OutputEnd, this agent is short of descriptors or
        memory: the home asks again."""
        key = execution_key(request.uid, request.attempt)
        remote = self._node.executor.remote_tasks.get(key)
        if remote is None or remote.home != src or remote.phase is RemotePhase.RESERVED:
            yield OutputEnd(gone=True)
            return
        if remote.exit is not None:
            self._ends.setdefault(key, (remote.exit.stdout_bytes, remote.exit.stderr_bytes))
        end = None if request.follow else self._spool.sizes(key)
        sent, is_paced = [request.stdout_from, request.stderr_from], request.follow and request.paced
        self.served[key] += 1
        try:
            followed = (
                self.follow_paced(key, request.stdout_from, request.stderr_from, runs_here=True)
                if is_paced
                else self.follow(key, request.stdout_from, request.stderr_from, end=end)
            )
            async with contextlib.aclosing(followed) as pieces:
                async for stream, offset, data in pieces:
                    yield OutputChunk(stream, offset, data)
                    sent[stream - 1] = offset + len(data)
            yield OutputEnd(*(end or self._ends.get(key, (0, 0))))
        except OSError as error:
            log.warning("cannot serve output: task=%s error=%s", request.task, error)
        finally:
            self.served[key] -= 1
            if not self.served[key]:
                del self.served[key]
            if is_paced and key not in self._ends and not self._is_closed:
                self._hold(key, *sent)

    def _hold(self, key: str, stdout_from: int, stderr_from: int) -> None:
        """Make an attempt wait for its home."""
        if key in self._waits:
            self._waits[key].cancel()
        self._waits[key] = self._start(self._wait_for_home(key, stdout_from, stderr_from))

    async def _wait_for_home(self, key: str, stdout_from: int, stderr_from: int) -> None:
        """Make an attempt wait for its home, which has read up to these offsets and is expected to continue."""
        try:
            async with self.backpressure.reader(key, stdout_from, stderr_from, runs_here=True):
                await asyncio.sleep(RETURN_S_MAX)
        finally:
            if self._waits.get(key) is asyncio.current_task():
                del self._waits[key]

    # -- from elsewhere ------------------------------------------------------------------------------------------------

    def mirror(
        self, node: str, task: str, uid: bytes, attempt: int, key: str, *, paced: bool = False
    ) -> asyncio.Task[OutputEnd]:
        """Copy the output of an attempt on another node into this spool as it arrives; at most one copy at a time.
        paced: the task waits for its reader here."""
        running = self._mirrors.get(key)
        if running is None or (running.done() and (running.cancelled() or running.exception() is not None)):
            running = asyncio.get_running_loop().create_task(self._mirror(node, task, uid, attempt, key, paced=paced))
            self._mirrors[key] = running
            running.add_done_callback(lambda done: self._mirror_done(key, done))
        return running

    async def keep_mirrored(
        self, node: str, task: str, uid: bytes, attempt: int, key: str, *, paced: bool, runs: Callable[[], bool]
    ) -> None:
        """Copy the output as `mirror` does until the copy is complete; resume an interrupted copy while the task ``runs``."""
        while True:
            copy = self.mirror(node, task, uid, attempt, key, paced=paced)
            await asyncio.wait({copy})
            if not copy.cancelled() and copy.exception() is None:
                return
            await asyncio.sleep(COPY_AGAIN_S)
            if not runs():
                return

    def _mirror_done(self, key: str, done: asyncio.Task[OutputEnd]) -> None:
        if self._mirrors.get(key) is done:
            del self._mirrors[key]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.info("cannot fetch output: key=%s error=%s", key, error)

    async def copy_now(self, node: str, task: str, uid: bytes, attempt: int, key: str) -> None:
        """Fetch the output so far, unless a mirror already copies it."""
        if key not in self._mirrors:
            await self._mirror(node, task, uid, attempt, key, follow=False)

    async def _mirror(
        self, node: str, task: str, uid: bytes, attempt: int, key: str, *, follow: bool = True, paced: bool = False
    ) -> OutputEnd:
        spool = self._spool
        request = OutputRequest(task, uid, attempt, *spool.sizes(key), follow=follow, paced=paced)
        known = self._node.home.tasks.get(uid)
        bytes_max = spool.bytes_max(followed=known is not None and known.spec.followed)
        uncut_bytes = 0
        async for piece in self._links.fetch_output(node, request):
            if isinstance(piece, OutputEnd):
                if piece.gone:
                    raise PeerloadError(f"{node} has no output of {task} (any more)")
                return piece
            await asyncio.to_thread(spool.write_at, key, piece.stream, piece.offset, piece.data)
            uncut_bytes += len(piece.data)
            if uncut_bytes >= CUT_EVERY_BYTES:
                uncut_bytes = 0
                await asyncio.to_thread(spool.cut, key, bytes_max)
            await self.backpressure.room(key)
        raise PeerloadError(f"the copy of the output of {task} was interrupted", why=f"{node} closed the connection")

    async def bring_home(self, action: FetchOutput) -> tuple[str, tuple[int, int]]:
        """Fetch all available output from the node, durably → an error or "", at the latest SILENCE_S_MAX after the last
        piece; and the number of missing bytes of stdout and stderr."""
        self.backpressure.release(action.key)  # the end of a task must not wait for its readers
        try:
            mirror = self.mirror(action.node, action.task, action.uid, action.attempt, action.key)
            await self._arrival(mirror, action)
            await asyncio.to_thread(self._spool.sync, action.key)
        except TimeoutError as error:
            return str(error), (0, 0)
        except OSError as error:
            return cannot_write(error), (0, 0)
        except PeerloadError as error:
            return str(error), (0, 0)
        sizes = self._spool.sizes(action.key)
        here = min(sizes[0], action.stdout_bytes), min(sizes[1], action.stderr_bytes)
        self.ended(action.key, *here)
        missing = action.stdout_bytes - here[0], action.stderr_bytes - here[1]
        if any(missing):
            self._counters[metrics.OUTPUTS_UNREADABLE] += 1
        return "", missing

    async def _arrival(self, mirror: asyncio.Task[OutputEnd], action: FetchOutput) -> None:
        """Return when the copy is complete. Raises the errors of the copy, or PeerloadError if no more data arrives."""
        here = self._spool.sizes(action.key)
        while not (await asyncio.wait({mirror}, timeout=SILENCE_S_MAX))[0]:
            before, here = here, self._spool.sizes(action.key)
            if here == before:
                mirror.cancel()
                await asyncio.wait({mirror})
                why = f"no data for {SILENCE_S_MAX:g} s"
                raise PeerloadError(f"the copy of the output of {action.task} was interrupted", why=why)
        if mirror.cancelled():
            raise PeerloadError(f"the copy of the output of {action.task} was interrupted", why="the copy was stopped")
        mirror.result()

    async def cut(self, key: str) -> None:
        """Cut the output of an ended attempt to its limit, when it is no longer being read."""
        if not self.is_busy(key):
            await asyncio.to_thread(self._spool.cut, key)

    def cut_soon(self, key: str) -> None:
        """Cut the output in the background, even if the caller is cancelled."""
        self._start(self.cut(key))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def cut_old(self, now_s: float) -> None:
        """Cut the output of all ended attempts that was kept in full for longer than FOLLOWED_S_MAX. now_s: the trusted
        date."""
        for key in await asyncio.to_thread(self._spool.large, now_s - FOLLOWED_S_MAX):
            if not self._node.knows(key):
                await self.cut(key)

    def is_busy(self, key: str) -> bool:
        """True if a client follows the files of this attempt, or they are being fetched."""
        return key in self._followers or key in self._mirrors

    async def close(self) -> None:
        """End all copies and waits. Tasks no longer wait for homes after this, since no agent could continue them."""
        self._is_closed = True
        work = [*self._mirrors.values(), *self._work]
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
