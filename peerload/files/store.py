"""Content-addressed store of blocks, with a size limit: STATE/files.

Blocks that arrive together are written into one immutable file, a *pack*; an SQLite database stores the position of each.
So thousands of small files become a few large ones. A block is verified whenever it is read. Blocks that no manifest in use needs
may be removed, least recently used manifest first: empty packs are deleted, and holes are punched into the others.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from peerload.files.manifest import Manifest, Root, decode, decode_root, digest_of
from peerload.files.tree import punch_hole, sync_file_system
from peerload.model.bounded import BoundedDict
from peerload.model.errors import StagingFailed, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

log = logging.getLogger("peerload.files")

DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""SQLite errors of a damaged index, or one with other columns. Other errors may be temporary, and must not delete files of tasks."""
PRIMARY_CODE = 0xFF
UNUSED_S_MAX = 3600.0
"""Blocks that belong to no manifest are kept for this long, since their manifest may still arrive."""
TARGET_SHARE = 0.9
"""A full store is reduced to this share of its limit."""
AT_FIRST, AT_A_TIME = 8, 256
"""Number of blocks that one statement finds or adds. Reads start with a few, since large blocks soon reach the byte limit."""
BUFFER_BYTES = 128 << 10
FRESH_S, FRESH_MAX = 60.0, 8192
"""Time for which a pack that this process wrote from verified blocks counts as verified, unless its file was touched;
and the maximum number of such packs to remember."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (digest BLOB PRIMARY KEY, size INTEGER NOT NULL, added_at REAL NOT NULL, pack INTEGER NOT NULL, start INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blocks_of_pack ON blocks (pack);
CREATE TABLE IF NOT EXISTS manifests (id BLOB PRIMARY KEY, size INTEGER NOT NULL, count INTEGER NOT NULL, used_at REAL NOT NULL);
"""


class NoRoom(StagingFailed):
    """The store or its disk is full."""


class Damaged(StagingFailed):
    """A block does not match its digest. It is not stored, and may be fetched from another node."""


class StoreUsage(NamedTuple):
    """Contents of a store. manifests: (id, bytes of its files, number of its files, time of last use)."""

    size_bytes: int
    limit_bytes: int
    blocks: int
    manifests: list[tuple[bytes, int, int, float]]


class BlockStore:
    """The store in one directory. All calls may come from any thread, and block."""

    def __init__(self, directory: Path, limit_bytes: int | Callable[[], int], free_bytes_min: int = 0) -> None:
        """limit_bytes: a function if it depends on other stores; free_bytes_min: free disk space that must remain after
        adding blocks. Raises OSError, StoreError."""
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._free_bytes_min = free_bytes_min
        self._lock = threading.RLock()
        self._syncing = threading.Lock()
        self._blocks = directory / "blocks"
        self._blocks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._database = self._opened()
        self._size_bytes = int(self._database.execute("SELECT coalesce(sum(size), 0) FROM blocks").fetchone()[0])
        self._pack = self._remove_unnamed()
        self._is_dirty = True
        """True if blocks may not be on disk, also after an earlier agent that ended before it had synced them."""
        self._fresh: BoundedDict[int, tuple[float, int]] = BoundedDict(FRESH_MAX)
        self._coming: list[set[bytes]] = []

    def _opened(self) -> sqlite3.Connection:
        path = self._directory / "index.db"
        for is_last in (False, True):
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=NORMAL")
                database.executescript(_SCHEMA)
                database.execute("SELECT digest, size, added_at, pack, start FROM blocks LIMIT 1")
            except sqlite3.DatabaseError as error:
                database.close()
                if is_last or error.sqlite_errorcode & PRIMARY_CODE not in DAMAGE:
                    raise StoreError("the cache of files cannot be opened", why=f"{path}: {error}") from None
                log.warning(
                    "the index of the file cache is damaged; starting an empty one: path=%s error=%s", path, error
                )
                for name in ("index.db", "index.db-wal", "index.db-shm"):
                    (self._directory / name).unlink(missing_ok=True)
            else:
                return database
        raise AssertionError

    def _remove_unnamed(self) -> int:
        """Remove packs that the database does not list, after a new database or a killed agent → the last number."""
        named = {pack for (pack,) in self._database.execute("SELECT DISTINCT pack FROM blocks")}
        for path in self._blocks.glob("*/*"):
            if not path.name.isdecimal() or int(path.name) not in named:
                path.unlink(missing_ok=True)
        return max(named, default=0)

    def _path(self, pack: int) -> Path:
        return self._blocks / f"{pack % 256:02x}" / str(pack)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def missing(self, digests: Iterable[bytes]) -> list[bytes]:
        """The digests of missing blocks, in order."""
        wanted = dict.fromkeys(digests)
        with self._lock:
            for (digest,) in self._find("digest", list(wanted)):
                del wanted[digest]
        return list(wanted)

    def _find(self, columns: str, digests: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
        """The rows of the blocks that are stored, in no particular order."""
        for at in range(0, len(digests), AT_A_TIME):
            some = digests[at : at + AT_A_TIME]
            marks = ",".join("?" * len(some))
            yield from self._execute(f"SELECT {columns} FROM blocks WHERE digest IN ({marks})", some)  # noqa: S608 -- marks

    def put(
        self,
        blocks: Sequence[bytes | memoryview],
        expected: Sequence[bytes] | None = None,
        *,
        beyond_limit: bool = False,
        coming: set[bytes] | None = None,
    ) -> list[bytes]:
        """Store blocks → their digests. beyond_limit: only the disk bounds them; coming: the outputs (`coming`) that they
        join. Raises NoRoom, Damaged if they are not
        the ``expected`` ones, OSError."""
        digests = [digest_of(block) for block in blocks]
        if expected is not None and digests != list(expected):
            raise Damaged("a block has another content", why="its content does not have the digest it should have")
        with self._lock:
            if coming is not None:
                coming.update(digests)
            wanted = set(self.missing(digests))
            new = {digest: block for digest, block in zip(digests, blocks, strict=True) if digest in wanted}
            size = sum(map(len, new.values()))
            if not new:
                return digests
            self.check_disk(size)
            if not beyond_limit and self.needs_room(size):
                raise NoRoom(
                    "the file cache is full",
                    why=f"{self._size_bytes} of {self.limit_bytes} bytes are in use, and {size} more are wanted",
                    hint="what is in it:  peerload files        a larger one:  cache of [files] in the settings",
                )
            self._size_bytes += size
            self._pack += 1
            pack = self._pack
        path = self._path(pack)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("wb", buffering=BUFFER_BYTES) as file:
                file.writelines(new.values())
                file.flush()
                changed_ns = os.fstat(file.fileno()).st_ctime_ns
            self._name(pack, new, changed_ns)
        except BaseException:
            with self._lock:
                self._size_bytes -= size
            path.unlink(missing_ok=True)
            raise
        return digests

    def _name(self, pack: int, new: dict[bytes, bytes | memoryview], changed_ns: int) -> None:
        """Record in the database the blocks of a pack that was just written."""
        rows, start, now = [], 0, time.time()
        for digest, block in new.items():
            rows.append((digest, len(block), now, pack, start))
            start += len(block)
        with self._lock:
            self._execute("BEGIN")
            try:
                # another thread may have added some of them first: then the pack has a gap
                named = sum(self._insert(rows[at : at + AT_A_TIME]) for at in range(0, len(rows), AT_A_TIME))
                self._database.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise NoRoom("files of tasks cannot be stored", why=str(error)) from None
                raise
            self._fresh[pack] = time.monotonic() + FRESH_S, changed_ns
            self._is_dirty = True  # only now, since a sync that started before may have missed them
            if named < len(rows):
                self._size_bytes -= start - sum(
                    size for (size,) in self._execute("SELECT size FROM blocks WHERE pack = ?", (pack,))
                )
                self._tidy(pack, [])

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> int:
        """Insert these blocks → the number of new ones. One statement for all of them, since each statement releases the
        interpreter lock."""
        statement = f"INSERT OR IGNORE INTO blocks VALUES {','.join(['(?, ?, ?, ?, ?)'] * len(rows))}"  # noqa: S608 -- marks
        return self._database.execute(statement, list(itertools.chain.from_iterable(rows))).rowcount

    def check_disk(self, size_bytes: int) -> None:
        """Check that ``size_bytes`` more leave enough free space on the disk. Raises NoRoom."""
        if (free := self._free_bytes()) < size_bytes:
            why = f"{max(free, 0)} bytes are free beyond the reserve of {self._free_bytes_min}"
            raise NoRoom("the disk is too full for more files of tasks", why=why, hint="peerload files --gc")

    def _free_bytes(self) -> int:
        """Number of bytes that may still be written to the disk; negative if it is already too full."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize - self._free_bytes_min

    def read(self, digest: bytes) -> bytes:
        """Read and verify a block. Raises the errors of `read_some`."""
        return self.read_some([digest])[0]

    def read_some(self, digests: Sequence[bytes], bytes_max: int = 1 << 62, *, verified: bool = True) -> list[bytes]:
        """The first of these blocks, at least one, up to ``bytes_max`` bytes in total. verified: False if the caller verifies them.
        Raises StagingFailed if one is missing or damaged; a damaged one is removed."""
        found: list[bytes] = []
        opened, fd, is_fresh = 0, -1, False
        try:
            at, count = 0, AT_FIRST
            while at < len(digests):
                some = digests[at : at + count]
                at, count = at + count, min(count * 2, AT_A_TIME)
                with self._lock:
                    rows = {digest: place for digest, *place in self._find("digest, pack, start, size", some)}
                for digest in some:
                    if digest not in rows:
                        why = f"block {digest.hex()[:16]} was removed"
                        raise StagingFailed("files of the task are no longer stored", why=why)
                    pack, start, size = rows[digest]
                    if pack != opened:
                        if fd >= 0:
                            os.close(fd)
                        opened, fd = pack, self._open(pack)
                        is_fresh = fd >= 0 and self._is_fresh(pack, os.fstat(fd))
                    data = os.pread(fd, size, start) if fd >= 0 else b""
                    if len(data) != size or (verified and not is_fresh and digest_of(data) != digest):
                        self._damaged(digest)
                    found.append(data)
                    bytes_max -= size
                    if bytes_max <= 0:
                        return found
        finally:
            if fd >= 0:
                os.close(fd)
        return found

    def _is_fresh(self, pack: int, status: os.stat_result) -> bool:
        until_s, changed_ns = self._fresh.get(pack, (0.0, 0))
        return time.monotonic() < until_s and status.st_ctime_ns == changed_ns

    def _open(self, pack: int) -> int:
        try:
            return os.open(self._path(pack), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1

    def _damaged(self, digest: bytes) -> NoReturn:
        self._drop([digest])
        with self._lock:
            self._execute("DELETE FROM manifests")  # their completeness must be checked again
        raise Damaged("a file in the cache is damaged", why=f"block {digest.hex()[:16]} has another content")

    def _drop(self, digests: Iterable[bytes]) -> int:
        """Remove blocks → the number of bytes removed."""
        gaps: dict[int, list[tuple[int, int]]] = {}
        gone = 0
        with self._lock:
            self._execute("BEGIN")
            try:
                for digest in digests:
                    removed = self._execute(
                        "DELETE FROM blocks WHERE digest = ? RETURNING pack, start, size", (digest,)
                    )
                    for pack, start, size in removed:
                        gaps.setdefault(pack, []).append((start, size))
                        gone += size
                self._execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise
            self._size_bytes -= gone
            for pack, holes in gaps.items():
                self._tidy(pack, holes)
        return gone

    def _tidy(self, pack: int, holes: Iterable[tuple[int, int]]) -> None:
        """Free the disk space of removed blocks of a pack: the whole file if no block is left."""
        if not self._execute("SELECT 1 FROM blocks WHERE pack = ? LIMIT 1", (pack,)):
            self._path(pack).unlink(missing_ok=True)
            return
        with contextlib.suppress(OSError):  # already deleted, or no support for holes: freed when the pack is empty
            fd = os.open(self._path(pack), os.O_WRONLY | os.O_CLOEXEC)
            try:
                for start, size in holes:
                    punch_hole(fd, start, size)
            finally:
                os.close(fd)

    def _execute(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of one statement. Raises NoRoom if the database cannot be used: the task may run elsewhere."""
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise NoRoom("the cache of files cannot be used", why=str(error)) from None

    def sync(self) -> None:
        """Sync all blocks to the disk. Raises OSError."""
        with self._syncing:  # a concurrent caller waits until its blocks are on disk too
            with self._lock:
                if not self._is_dirty:
                    return
                self._is_dirty = False
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sync_file_system(directory)
            except OSError:
                self._is_dirty = True
                raise
            finally:
                os.close(directory)

    # -- manifests -----------------------------------------------------------------------------------------------------

    def has(self, manifest: bytes) -> bool:
        """True if this manifest was complete here and still is. Updates its time of last use."""
        with self._lock:
            used = "UPDATE manifests SET used_at = ? WHERE id = ? RETURNING id"
            return bool(self._execute(used, (time.time(), manifest)))

    def missing_of(self, manifest: bytes, decoded: list[Manifest] | None = None) -> list[bytes]:
        """The missing blocks of a manifest: the root, else its parts, else the blocks of its files. [] if it is
        complete, which is recorded. decoded: receives the manifest, for the next call; [] while parts are missing. Raises
        StagingFailed for a manifest that is not valid."""
        if self.missing([manifest]):
            return [manifest]
        root = decode_root(self.read(manifest))
        if lacking := self.missing(root.parts):
            return lacking
        decoded = decoded if decoded is not None else []
        if not decoded:
            decoded.append(decode(manifest, self.read))
        if not (lacking := self.missing(decoded[0].blocks())):
            self._note(manifest, root)
        return lacking

    def _note(self, manifest: bytes, root: Root) -> None:
        with self._lock:
            row = (manifest, root.size_bytes, root.files, time.time())
            self._execute("INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?)", row)

    # -- capacity ------------------------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int:
        """The current size limit."""
        return self._limit_bytes if isinstance(self._limit_bytes, int) else self._limit_bytes()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def needs_room(self, size_bytes: int) -> bool:
        """True if ``size_bytes`` more exceed the limit or the disk."""
        return self._size_bytes + size_bytes > self.limit_bytes or self._free_bytes() < size_bytes

    def collect(self, in_use: Callable[[], Collection[bytes]], room_bytes: int = 0, *, everything: bool = False) -> int:
        """Remove blocks without a manifest, and unpinned manifests, least recently used first, until ``room_bytes`` are
        free (everything: all of them) → the number of removed bytes. in_use: returns the pinned manifests. It is
        called under the lock, since until then a request may find a manifest (`has`) and pin it."""
        with self._lock:
            pinned = in_use()
            rows = self._execute("SELECT id FROM manifests ORDER BY used_at DESC")
            limit = min(self.limit_bytes, self._size_bytes + self._free_bytes())
            target = 0 if everything else max(int(limit * TARGET_SHARE) - room_bytes, 0)
            kept: set[bytes] = set().union(*self._coming)
            named: set[bytes] = set()
            size = self._sizes(kept)
            for manifest in (*pinned, *(row[0] for row in rows if row[0] not in pinned)):
                needed = self.blocks_of(manifest)
                named |= needed
                needed -= kept
                more = self._sizes(needed)
                if manifest in pinned or size + more <= target:
                    kept |= needed
                    size += more
                else:
                    self._execute("DELETE FROM manifests WHERE id = ?", (manifest,))
            orphans_until = time.time() - (0.0 if everything else UNUSED_S_MAX)
            found = self._execute("SELECT digest, added_at FROM blocks")
            gone = [
                digest
                for digest, added_at in found
                if digest not in kept and (digest in named or added_at < orphans_until)
            ]
            return self._drop(gone)

    @contextlib.contextmanager
    def coming(self) -> Iterator[set[bytes]]:
        """Context with a set of digests for outputs that are arriving. Their blocks are not removed until its end, even if they were
        stored before."""
        digests: set[bytes] = set()
        with self._lock:
            self._coming.append(digests)
        try:
            yield digests
        finally:
            with self._lock:
                self._coming = [other for other in self._coming if other is not digests]

    def drop_damaged(self, manifest: bytes) -> None:
        """Remove all damaged blocks of a manifest, as far as the manifest can be read."""
        for digest in self.blocks_of(manifest):
            with contextlib.suppress(StagingFailed):
                self.read(digest)

    def blocks_of(self, manifest: bytes) -> set[bytes]:
        """All known blocks of a manifest, which may be incomplete."""
        with contextlib.suppress(StagingFailed):
            root = decode_root(self.read(manifest))
            found = {manifest, *root.parts}
            with contextlib.suppress(StagingFailed):
                found.update(decode(manifest, self.read).blocks())
            return found
        return {manifest}

    def _sizes(self, digests: Iterable[bytes]) -> int:
        return sum(size for (size,) in self._find("size", list(digests)))

    def usage(self) -> StoreUsage:
        with self._lock:
            ((blocks,),) = self._execute("SELECT count(*) FROM blocks")
            rows = self._execute("SELECT id, size, count, used_at FROM manifests ORDER BY used_at DESC LIMIT 1000")
            return StoreUsage(self._size_bytes, self.limit_bytes, blocks, [(i, s, c, at) for i, s, c, at in rows])

    def close(self) -> None:
        with self._lock:
            self._database.close()
