"""Blocks of files: the caches of an agent, served to other nodes, and fetched from them. A node fetches a file once, however many
tasks wait for it.

They are sent over streams, as outputs are (`peers/streams.py`). Each block is verified before it is stored, so an interrupted
copy continues with the missing blocks. Any member that has the blocks is a valid source: one that is lost, does not
have them or sends other data is replaced. Separate threads access the disk and compute digests, and at most PIECES_MAX pieces
become ready in one turn of the event loop, however many nodes are served: so gossip and leases are not delayed.

There is one cache or, where the agent serves all users of a machine, one for each user. Users share nothing: otherwise a user could
get a block of another by its digest, or find out that another user has it. Together they have the limit of the settings, and each
has at most its share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import shutil
import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from peerload.agent.runtime import Workers, trim_memory
from peerload.files.manifest import BLOCK_BYTES, decode_root
from peerload.files.store import BlockStore, Damaged, NoRoom
from peerload.model import metrics
from peerload.model.errors import LinkUnavailable, PeerloadError, StagingFailed
from peerload.model.messages import BLOCKS_MAX, WHY_LENGTH_MAX, Blocks, BlocksEnd, BlocksRequest
from peerload.wire.peer import DATA_BYTES_MAX

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.streams import RequestStream
    from peerload.files.manifest import Manifest


log = logging.getLogger("peerload.files")

P = ParamSpec("P")
R = TypeVar("R")

PIECE_BYTES = DATA_BYTES_MAX - BLOCK_BYTES - (64 << 10)
"""Size up to which blocks are sent together: with one more block and the headers, a frame is never too large. Smaller
pieces cost more: each needs a pack, a transaction and two changes of threads at both ends."""
PIECES_MAX = 2
"""Maximum number of pieces that are read for other nodes at a time."""
THREADS = 2
"""Number of threads that read, write and verify blocks; as many others fill, read and remove whole directories."""
SLOW_END_S = 2.0
"""Maximum time that a stopping agent waits for the slow threads, which may need minutes: the next agent starts over."""
FETCHES_MAX = 2
"""Maximum number of concurrent fetches of input manifests, and the same for outputs; others wait."""
SOURCES_MAX = 2
"""Maximum number of nodes from which one manifest is fetched at a time."""
BLOCKS_MIN = 64
"""Minimum number of blocks requested from one node: fewer are not worth another connection."""
ROOM_EVERY_BYTES = 256 << 20
"""Number of bytes after which outputs that exceed the cache search it for space again: each search reads its index."""
SILENCE_S_MAX = 30.0
"""Maximum time without progress, after which the copy is abandoned."""
RECENT_PIECES = 1
"""Number of last pieces of a fetch that stay in memory until written to the working directory; older ones are read again."""
TAKE_S_MAX = 0.1
"""Maximum time that a piece waits until the working directory has taken the previous one out of memory."""
TRIM_AFTER_S = 1.0
"""Delay before freed buffers are returned to the machine; until then, the C library keeps their memory for each thread."""
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
"""First and longest pause before an unreachable node is tried again; each pause doubles."""


class Fetch:
    """Transfer of one manifest. sources: nodes that may have it, the best first; done_bytes: received so far; size_bytes: of all
    files, 0 = unknown; is_counted: an attempt has counted it as its own; outputs: destination of blocks of outputs; begun: done
    when the manifest is here and the blocks of its files are being fetched, and cancelled if there are none."""

    def __init__(self, manifest: bytes) -> None:
        self.manifest = manifest
        self.is_counted = False
        self.outputs: OutputBlocks | None = None
        self.done_bytes = self.size_bytes = 0
        self.sources: list[str] = []
        self.tasks: list[bytes] = []
        """Tasks that wait for it: a node in system mode sends the files of a task only to the nodes that have the task."""
        self.distrusted: set[str] = set()
        """Nodes that have sent a wrong block. They have to verify blocks before sending; after a second wrong one they
        are dropped."""
        self.streams: dict[str, RequestStream] = {}
        """The open stream to each node, for the next request."""
        self.decoded: list[Manifest] = []
        """The manifest, when it is here; decoded only once."""
        self.work: asyncio.Task[None] | None = None
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_read = False
        """True if a working directory is made while the blocks arrive."""
        self._recent: deque[dict[bytes, memoryview]] = deque(maxlen=RECENT_PIECES)
        self._next: bytes | None = None
        """The block that the working directory needs next; None: one that it has not requested yet."""
        self._taken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lacking: set[bytes] = set()
        self._news = threading.Condition()
        self._is_over = False

    def request(self, node: str, digests: Sequence[bytes]) -> BlocksRequest:
        task = self.tasks[-1] if self.tasks else b""
        return BlocksRequest(tuple(digests), verify=node in self.distrusted, task=task, manifest=self.manifest)

    def begin(self, digests: Sequence[bytes]) -> None:
        self._lacking = set(digests)
        if not self.begun.done():
            self.begun.set_result(None)

    def blocks_stored(self, digests: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Record that these blocks are in the store, which has verified them. For a thread."""
        with self._news:
            if self.is_read:
                self._recent.append(dict(zip(digests, blocks, strict=True)))
            self._lacking.difference_update(digests)
            self._news.notify_all()

    def take_recent(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Remove the first of these blocks from memory, as far as they are there → the blocks. All blocks of a piece are taken
        together: its memory is freed when the last one is. For a thread."""
        found: list[memoryview] = []
        with self._news:
            for digest in digests:
                piece = next((piece for piece in self._recent if digest in piece), None)
                if piece is None:
                    break
                found.append(piece.pop(digest))
            if found and not self._is_over:  # else the loop may be closed
                self._loop.call_soon_threadsafe(self._taken.set)
        return found

    def needs_next(self, digests: Sequence[bytes]) -> None:
        """Record which blocks the working directory needs next, as far as it knows. For a thread."""
        self._next = digests[0] if digests else None

    async def recent_taken(self) -> None:
        """If the working directory is about to take the oldest piece, wait a moment until there is memory for another: without that
        the oldest would have to be read again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKE_S_MAX):
                while self._is_oldest_next():
                    self._taken.clear()
                    await self._taken.wait()

    def _is_oldest_next(self) -> bool:
        with self._news:
            if len(self._recent) < RECENT_PIECES or self._is_over:
                return False
            return self._next in self._recent[0] if self._next is not None else bool(self._recent[0])

    def read_over(self) -> None:
        """Record that no working directory is being made any more, so that no blocks stay in memory for it."""
        with self._news:
            self.is_read = False
            self._recent.clear()
        self._taken.set()

    def over(self) -> None:
        """End the transfer: no more blocks will arrive."""
        for stream in self.streams.values():
            stream.close("nothing more is wanted")
        self.begun.cancel()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def here(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """The first of these blocks that are here; waits for the first one until the fetch ends. For a thread."""
        with self._news:
            self._news.wait_for(lambda: self._is_over or digests[0] not in self._lacking)
            if self._is_over:
                return digests
            return list(itertools.takewhile(lambda digest: digest not in self._lacking, digests))


class OutputBlocks:
    """The blocks of one cache while outputs arrive in it. The limit of the cache does not apply to them, since they exist nowhere
    else: unneeded blocks are removed for them, and after that only the disk limits them."""

    def __init__(self, store: BlockStore, make_room: Callable[[int], None], coming: set[bytes] | None = None) -> None:
        """coming: the digests of its blocks, see `BlockStore.coming`; None: none is kept, since the collection can be repeated."""
        self._store, self._make_room, self._coming = store, make_room, coming
        self._next_bytes = 0
        self.read, self.read_some = store.read, store.read_some

    def put(self, blocks: Sequence[bytes | memoryview], expected: Sequence[bytes] | None = None) -> list[bytes]:
        """As `BlockStore.put`."""
        size = sum(map(len, blocks))
        if self._store.size_bytes >= self._next_bytes and self._store.needs_room(size):
            self._make_room(size)
            self._next_bytes = self._store.size_bytes + ROOM_EVERY_BYTES
        return self._store.put(blocks, expected, beyond_limit=True, coming=self._coming)


class FileTransfer:
    """The transfers of one agent. make_room: makes room for this many bytes in the store."""

    def __init__(
        self,
        store: BlockStore,
        links: PeerLinks,
        make_room: Callable[[int], None],
        counters: Counter[str],
        threads: tuple[Workers, Workers] | None = None,
    ) -> None:
        """threads: pools for fast and slow work, shared with other transfers; None: its own."""
        self._store = store
        self._counters = counters
        self._links = links
        self._make_room = make_room
        self._fetches: dict[bytes, Fetch] = {}
        self._inputs, self._outputs = asyncio.Semaphore(FETCHES_MAX), asyncio.Semaphore(FETCHES_MAX)
        self._served = asyncio.Semaphore(PIECES_MAX)
        self._threads, self._slow_threads = threads or (Workers(THREADS), Workers(THREADS, SLOW_END_S))
        self._trim_timer: asyncio.TimerHandle | None = None

    def trim_later(self) -> None:
        """Return the memory of buffers to the machine, soon after their last use."""
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        loop = asyncio.get_running_loop()
        self._trim_timer = loop.call_later(TRIM_AFTER_S, loop.run_in_executor, self._slow_threads, trim_memory)

    @property
    def under_way(self) -> set[bytes]:
        """The manifests that are being fetched."""
        return set(self._fetches)

    async def in_thread(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that blocks for a moment, in a thread for files, so that the agent's other threads are never all
        busy with files."""
        work = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def in_slow_thread(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that may take minutes, in a thread of the pool for slow work, so that transfers of blocks
        continue."""
        work = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._slow_threads, work)

    # -- to other nodes ------------------------------------------------------------------------------------------------

    async def serve(self, _: str, request: BlocksRequest) -> AsyncIterator[Blocks | BlocksEnd]:
        """Serve the blocks that a member requests. Ends without BlocksEnd if they cannot be read now."""
        left = request.digests
        try:
            while left:
                async with self._served:
                    blocks = await self.in_thread(self._store.read_some, left, PIECE_BYTES, verified=request.verify)
                left = left[len(blocks) :]
                self._counters[metrics.FILES_SERVED_BYTES] += sum(map(len, blocks))
                piece = [Blocks(tuple(map(memoryview, blocks)))]
                del blocks
                yield piece.pop()  # keeps no reference while it is sent and the next one is read
            yield BlocksEnd()
        except StagingFailed as error:
            yield BlocksEnd(str(error)[:WHY_LENGTH_MAX])
        except OSError as error:
            log.warning("cannot read a block: error=%s", error)
        finally:
            self.trim_later()

    # -- from other nodes ----------------------------------------------------------------------------------------------

    def fetch(self, manifest: bytes, sources: Sequence[str], task: bytes, *, is_output: bool = False) -> Fetch:
        """Fetch a manifest and all its blocks from these nodes, the best first. If a fetch is under way, they become
        further sources of it. Its work raises StagingFailed for a permanent failure, PeerloadError or OSError for a
        temporary one."""
        known = self._fetches.get(manifest)
        if known is None:
            known = self._fetches[manifest] = Fetch(manifest)
            known.outputs = OutputBlocks(self._store, self._make_room) if is_output else None
            known.work = asyncio.get_running_loop().create_task(
                self._fetch(known, manifest, self._outputs if is_output else self._inputs)
            )
            known.work.add_done_callback(lambda work: self._done(manifest, work))
        known.sources += [node for node in sources if node not in known.sources]
        known.tasks.append(task)
        return known

    def _done(self, manifest: bytes, work: asyncio.Task[None]) -> None:
        self._fetches.pop(manifest).over()
        self.trim_later()
        if not work.cancelled() and (error := work.exception()) is not None:
            log.info("cannot fetch files: manifest=%s error=%s", manifest.hex()[:16], error)

    async def _fetch(self, fetch: Fetch, manifest: bytes, turn: asyncio.Semaphore) -> None:
        wait_s, silent_s = RETRY_S_MIN, 0.0
        async with turn:
            while lacking := await self.in_thread(self._store.missing_of, manifest, fetch.decoded):
                if lacking != [manifest]:
                    root = decode_root(await self.in_thread(self._store.read, manifest))
                    if not fetch.size_bytes:
                        fetch.size_bytes = root.size_bytes
                        await self.in_thread(self._make_room, fetch.size_bytes)
                    if lacking[0] not in root.parts:
                        fetch.begin(lacking)
                before = fetch.done_bytes
                error = await self._fetch_from_all(fetch, lacking)
                if error is None:
                    continue
                if isinstance(error, StagingFailed):
                    if not fetch.sources:
                        raise error
                    continue
                silent_s += SILENCE_S_MAX if isinstance(error, TimeoutError) else wait_s
                if fetch.done_bytes > before:
                    silent_s = 0.0
                if silent_s >= SILENCE_S_MAX:
                    why = str(error) or f"no data for {SILENCE_S_MAX:g} s"
                    raise PeerloadError(f"files cannot be fetched from {', '.join(fetch.sources)}", why=why)
                await asyncio.sleep(wait_s)
                wait_s = RETRY_S_MIN if fetch.done_bytes > before else min(wait_s * 2, RETRY_S_MAX)

    async def _fetch_from_all(self, fetch: Fetch, digests: list[bytes]) -> Exception | None:
        """Fetch the available blocks, many of them from several nodes at a time → the reason why some are missing;
        preferably a temporary one."""
        size = min(max(len(digests) // (2 * len(fetch.sources)), BLOCKS_MIN), BLOCKS_MAX)
        parts = [digests[at : at + size] for at in range(0, len(digests), size)][::-1]
        idle = fetch.sources[::-1]
        errors: list[Exception] = []

        async def work() -> None:
            part: list[bytes] = []
            while idle and (parts or part):
                node = idle.pop()
                try:
                    while part or parts:
                        part = part or parts.pop()
                        following = parts[-1:] if len(works) == 1 else []  # otherwise another node may fetch it
                        await self._fetch_blocks(fetch, node, part, *following)
                        part = []
                except NoRoom:
                    raise
                except (StagingFailed, LinkUnavailable, ConnectionError, TimeoutError) as error:
                    fetch.sources.remove(node)
                    if not isinstance(error, StagingFailed):
                        fetch.sources.append(node)  # its blocks are requested again after the other nodes were tried
                    errors.append(error)
                    part = await self.in_thread(self._store.missing, part)

        works = [asyncio.ensure_future(work()) for _ in range(min(SOURCES_MAX, len(fetch.sources)))]
        try:
            await asyncio.gather(*works)
        finally:
            for one in works:
                one.cancel()
        return min(errors, key=lambda error: isinstance(error, StagingFailed), default=None)

    async def _fetch_blocks(
        self, fetch: Fetch, node: str, digests: Sequence[bytes], following: Sequence[bytes] = ()
    ) -> None:
        """Fetch these blocks from a node. following: the blocks that are fetched from it after these."""
        request = fetch.request(node, digests)
        further = fetch.request(node, following) if following else None
        pieces = self._links.fetch_blocks(node, request, fetch.streams, further)
        at = 0
        try:
            while True:
                async with asyncio.timeout(SILENCE_S_MAX):
                    piece = await anext(pieces)
                if isinstance(piece, BlocksEnd):
                    if piece.why:
                        raise StagingFailed(f"{node} does not have files of the task", why=piece.why)
                    if at < len(digests):
                        raise StagingFailed(f"{node} has sent {at} of {len(digests)} blocks")
                    return
                wanted = digests[at : at + len(piece.blocks)]
                if len(wanted) < len(piece.blocks):
                    raise StagingFailed(f"{node} has sent more blocks than were requested")
                if not await self.in_thread(self._keep, wanted, piece.blocks, fetch.outputs):
                    log.warning("a node has sent a wrong block: node=%s", node)
                    self._counters[metrics.FILES_WRONG] += 1
                    if node in fetch.distrusted:
                        raise StagingFailed(f"{node} has sent files that were not requested")
                    fetch.distrusted.add(node)
                    return  # missing blocks are requested again
                at += len(wanted)
                await fetch.recent_taken()
                fetch.blocks_stored(wanted, piece.blocks)
                size = sum(map(len, piece.blocks))
                fetch.done_bytes += size
                self._counters[metrics.FILES_FETCHED_BYTES] += size
                del piece  # its buffer can be used for the next one
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    def _keep(self, wanted: Sequence[bytes], blocks: Sequence[memoryview], outputs: OutputBlocks | None) -> bool:
        """Store received blocks → False if they are not the wanted ones. Raises StagingFailed, OSError."""
        size = sum(map(len, blocks))
        if outputs is None and self._store.needs_room(size):
            self._make_room(size)
        try:
            (outputs or self._store).put(blocks, wanted)
        except Damaged:
            return False
        return True

    async def close(self) -> None:
        """Stop all fetches; the next agent continues with the missing blocks."""
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        work = [fetch.work for fetch in self._fetches.values() if fetch.work is not None]
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for threads in (self._threads, self._slow_threads):
            threads.shutdown()


SHARE_MAX = 0.5
"""Maximum share of one user."""
USERS_MAX = 1024
"""Maximum number of users whose files are kept."""
WORKS_MAX = 4
"""Maximum number of processes that work with files as one user."""


class FileCache:
    """The blocks of one user's files, and their transfer. placing: a lock for each mount point while outputs are placed there, so
    that the second of two tasks with the same output finds that of the first; turns: limit of processes that work as this user."""

    def __init__(self, caches: FileCaches, store: BlockStore, links: PeerLinks, counters: Counter[str]) -> None:
        self._caches = caches
        self.store = store
        self.transfer = FileTransfer(store, links, self._make_room, counters, caches.threads)
        self.placing: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.turns = asyncio.Semaphore(WORKS_MAX)

    def check_disk(self, size_bytes: int) -> None:
        """Check that this many bytes may be written beside the cache; unneeded blocks are removed for that. For a
        thread. Raises NoRoom."""
        try:
            self.store.check_disk(size_bytes)
        except NoRoom:
            self._make_room(size_bytes)
            self.store.check_disk(size_bytes)

    def _make_room(self, size_bytes: int) -> None:
        """Make room for this many bytes; if necessary, unneeded blocks of other users are removed."""
        if self._caches.keeps_all:
            return
        others = self._caches.all() if self.store.needs_room(size_bytes) else ()
        for cache in (*(cache for cache in others if cache is not self), self):
            cache.store.collect(self._caches.in_use, size_bytes)

    @contextlib.contextmanager
    def for_outputs(self) -> Iterator[OutputBlocks]:
        """The blocks during the collection of one attempt's outputs; none of these is removed meanwhile."""
        self._caches.pin()
        with self.store.coming() as coming:
            yield OutputBlocks(self.store, self._make_room, coming)

    async def keep(self, blocks: Sequence[bytes | memoryview]) -> None:
        """Keep blocks. Raises StagingFailed, OSError."""
        size = sum(map(len, blocks))
        if self.store.needs_room(size):
            self._caches.pin()
            await self.transfer.in_thread(self._make_room, size)
        await self.transfer.in_thread(self.store.put, blocks)
        self.transfer.trim_later()

    def is_complete(self, manifest: bytes) -> bool:
        """True if a manifest and all its blocks are here. Raises StagingFailed for one that is not valid."""
        return self.store.has(manifest) or not self.store.missing_of(manifest)


class FileCacheSettings(NamedTuple):
    """Place and limits of the caches of one agent. free_bytes_min: free space on the disk that they leave; has_users: there is one
    cache for each user of the machine."""

    directory: Path
    limit_bytes: int
    free_bytes_min: int
    has_users: bool
    counters: Counter[str]


class FileCaches:
    """The caches, by the owner key of their user; without users there is one. in_use: the manifests that tasks need."""

    def __init__(self, settings: FileCacheSettings, links: PeerLinks, in_use: Callable[[], set[bytes]]) -> None:
        self._directory, self.limit_bytes, self._free_bytes_min, self._has_users, self._counters = settings
        self._links = links
        self._in_use = in_use
        self._pinned: frozenset[bytes] = frozenset()
        self.keeps_all = False
        """True while the manifests in use are unknown; nothing is removed then."""
        self.threads = Workers(THREADS), Workers(THREADS, SLOW_END_S)
        self._caches: dict[str, FileCache] = {}
        if not self._has_users:
            store = BlockStore(self._directory, self.limit_bytes, self._free_bytes_min)
            self._caches[""] = FileCache(self, store, links, self._counters)
        for path in self._directory.glob("users/*"):
            self._open_user(path.name)
            if not self._caches[path.name].store.size_bytes:
                self._caches.pop(path.name).store.close()
                shutil.rmtree(path, ignore_errors=True)

    def of(self, who: str) -> FileCache:
        """The cache of a user. Raises NoRoom."""
        name = who if who.isdecimal() else hashlib.sha256(who.encode()).hexdigest()[:32]
        name = name if self._has_users else ""
        if name not in self._caches:
            if len(self._caches) >= USERS_MAX:
                raise NoRoom("the file cache has no room for another user", why=f"{USERS_MAX} have files there")
            self._open_user(name)
        return self._caches[name]

    def with_blocks(self, manifest: bytes, digests: Sequence[bytes]) -> FileCache | None:
        """The cache of a user who has a whole manifest, if it names all these blocks. For a thread."""
        for cache in self.all():
            if cache.store.has(manifest):
                return cache if cache.store.blocks_of(manifest).issuperset(digests) else None
        return None

    @property
    def size_bytes(self) -> int:
        return sum(cache.store.size_bytes for cache in self.all())

    async def in_slow_thread(self, function: Callable[[], R]) -> R:
        """Call a function that may take minutes, in a thread of the pool for slow work."""
        return await asyncio.get_running_loop().run_in_executor(self.threads[1], function)

    def all(self) -> Sequence[FileCache]:
        return list(self._caches.values())

    def _open_user(self, name: str) -> None:
        def limit_bytes() -> int:
            others = sum(cache.store.size_bytes for key, cache in self._caches.items() if key != name)
            return max(min(int(self.limit_bytes * SHARE_MAX), self.limit_bytes - others), 0)

        store = BlockStore(self._directory / "users" / name, limit_bytes, self._free_bytes_min)
        self._caches[name] = FileCache(self, store, self._links, self._counters)

    def make_room(self, size_bytes: int) -> None:
        """Remove files that no task needs, to make room for this many bytes. For a thread."""
        if not self.keeps_all:
            for cache in self.all():
                cache.store.collect(self.in_use, size_bytes)

    def pin(self) -> None:
        """Record the manifests that are in use. For the loop's thread."""
        self._pinned = frozenset(self._in_use().union(*(cache.transfer.under_way for cache in self.all())))

    def in_use(self) -> frozenset[bytes]:
        """The recorded manifests. For any thread."""
        return self._pinned

    def pin_also(self, *manifests: bytes) -> None:
        """Record that these manifests are in use from now on."""
        self._pinned = self._pinned.union(manifests)

    async def close(self) -> None:
        for cache in self.all():
            await cache.transfer.close()
            cache.store.close()
