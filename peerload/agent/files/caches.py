"""The file caches of an agent: one, or, where it serves all users of a machine, one for each user.

Users share nothing: whoever named a digest could else have a block of another, or learn that another has it. Together they
have the limit of the settings, and none more than its share.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from typing import TYPE_CHECKING

from peerload.agent.files.transfer import THREADS, FileTransfer
from peerload.agent.runtime import Workers
from peerload.files.store import BlockStore, NoRoom

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from peerload.agent.peers.links import PeerLinks

SHARE_MAX = 0.5
"""Bound on the share of one user."""
USERS_MAX = 1024
"""Bound on the users whose files are kept at a time."""
WORKS_MAX = 4
"""Bound on the processes that work with files as one user at a time."""


class FileCache:
    """The blocks of one user's files, and their transfer. placing: held while outputs are placed, so that of two tasks with the
    same output the second finds that of the first; turns: of processes that work as this user."""

    def __init__(self, caches: FileCaches, store: BlockStore, links: PeerLinks, counters: Counter[str]) -> None:
        self._caches = caches
        self.store = store
        self.transfer = FileTransfer(store, links, self._make_room, counters, caches.threads)
        self.placing = asyncio.Lock()
        self.turns = asyncio.Semaphore(WORKS_MAX)

    def _make_room(self, size_bytes: int) -> None:
        """Make room for so many bytes; where it is too full for that, at the cost of what other users do not need."""
        others = self._caches.all() if self.store.needs_room(size_bytes) else ()
        for cache in (*(cache for cache in others if cache is not self), self):
            cache.store.collect(self._caches.pinned, size_bytes)

    async def keep(self, blocks: Sequence[bytes]) -> None:
        """Keep blocks. Raises StagingFailed, OSError."""
        size = sum(map(len, blocks))
        if self.store.needs_room(size):
            self._caches.pin()
            await self.transfer.in_thread(self._make_room, size)
        await self.transfer.in_thread(self.store.put, blocks)

    def is_complete(self, manifest: bytes) -> bool:
        """True if a manifest and all its blocks are here. Raises StagingFailed for one that is not valid."""
        return self.store.has(manifest) or not self.store.missing_of(manifest)


class _UserStore(BlockStore):
    """The store of one user among others."""

    others_bytes: Callable[[BlockStore], int] | None = None

    @property
    def limit_bytes(self) -> int:
        others = self.others_bytes(self) if self.others_bytes is not None else 0
        return max(min(int(self._limit_bytes * SHARE_MAX), self._limit_bytes - others), 0)


class FileCaches:
    """The caches, by the owner key of their user; without users there is one. in_use: the manifests that tasks need."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        free_bytes_min: int,
        links: PeerLinks,
        counters: Counter[str],
        in_use: Callable[[], set[bytes]],
        *,
        has_users: bool,
    ) -> None:
        self._directory = directory
        self.limit_bytes = limit_bytes
        self._limits = limit_bytes, free_bytes_min
        self._links = links
        self._counters = counters
        self._in_use = in_use
        self.pinned: frozenset[bytes] = frozenset()
        self._has_users = has_users
        self.threads = Workers(THREADS), Workers(THREADS)
        self._caches: dict[str, FileCache] = {}
        if not has_users:
            self._caches[""] = FileCache(self, BlockStore(directory, *self._limits), links, counters)
        for path in directory.glob("users/*"):
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

    @property
    def size_bytes(self) -> int:
        """The size of all blocks."""
        return sum(cache.store.size_bytes for cache in self.all())

    async def in_slow_thread(self, function: Callable[[], object]) -> None:
        """Call a function that may take minutes, in a thread for such."""
        await asyncio.get_running_loop().run_in_executor(self.threads[1], function)

    def all(self) -> Sequence[FileCache]:
        """All of them."""
        return list(self._caches.values())

    def _open_user(self, name: str) -> None:
        store = _UserStore(self._directory / "users" / name, *self._limits)
        store.others_bytes = lambda own: sum(cache.store.size_bytes for cache in self.all() if cache.store is not own)
        self._caches[name] = FileCache(self, store, self._links, self._counters)

    def pin(self) -> None:
        """Note which manifests are in use. From the loop's thread."""
        self.pinned = frozenset(self._in_use().union(*(cache.transfer.under_way for cache in self.all())))

    async def close(self) -> None:
        """Close all."""
        for cache in self.all():
            await cache.transfer.close()
            cache.store.close()
