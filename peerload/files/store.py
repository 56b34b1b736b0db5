"""Content-addressed store of blocks, with a size limit: STATE/files.

Small blocks are rows of a SQLite database, which takes thousands of them at the price of a few files; larger ones are files
named by their digest. A block is verified whenever it is read. What no manifest in use needs may be removed, the manifest
that was used least recently first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.files.beneath import sync_file_system
from peerload.files.manifest import Root, decode, decode_root, digest_of
from peerload.model.errors import StagingFailed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

ROW_BYTES_MAX = 64 << 10
"""Larger blocks are files."""
UNUSED_S_MAX = 3600.0
"""Blocks that no manifest has are kept for so long: their manifest may be on its way."""
TARGET_SHARE = 0.9
"""A store that is full is emptied down to this share of its limit."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (digest BLOB PRIMARY KEY, size INTEGER NOT NULL, added_at REAL NOT NULL, data BLOB);
CREATE TABLE IF NOT EXISTS manifests (id BLOB PRIMARY KEY, size INTEGER NOT NULL, count INTEGER NOT NULL, used_at REAL NOT NULL);
"""


class NoRoom(StagingFailed):
    """The store, or its disk, has no room for more."""


class StoreUsage(NamedTuple):
    """Contents of a store. manifests: (id, bytes of its files, number of its files, when it was last used)."""

    size_bytes: int
    limit_bytes: int
    blocks: int
    manifests: list[tuple[bytes, int, int, float]]


class BlockStore:
    """The store in one directory. All calls may come from any thread, and block."""

    def __init__(self, directory: Path, limit_bytes: int, free_bytes_min: int = 0) -> None:
        """free_bytes_min: nothing is added that would leave less than this on the disk. Raises OSError."""
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._free_bytes_min = free_bytes_min
        self._lock = threading.RLock()
        self._syncing = threading.Lock()
        self._blocks = directory / "blocks"
        self._blocks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._database = self._opened()
        self._size_bytes = int(self._database.execute("SELECT coalesce(sum(size), 0) FROM blocks").fetchone()[0])
        self._is_dirty = False

    def _opened(self) -> sqlite3.Connection:
        path = self._directory / "index.db"
        for is_last in (False, True):
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=NORMAL")
                database.executescript(_SCHEMA)
            except sqlite3.DatabaseError:
                database.close()
                if is_last:
                    raise
                for name in ("index.db", "index.db-wal", "index.db-shm"):
                    (self._directory / name).unlink(missing_ok=True)
                shutil.rmtree(self._blocks)  # a cache: what is gone is fetched again, or refused by name
                self._blocks.mkdir(mode=0o700)
            else:
                return database
        raise AssertionError

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._blocks / name[:2] / name

    # -- blocks --------------------------------------------------------------------------------------------------------

    def missing(self, digests: Iterable[bytes]) -> list[bytes]:
        """Digests whose blocks are missing here, in their order."""
        with self._lock:
            known = "SELECT 1 FROM blocks WHERE digest = ?"
            return [digest for digest in dict.fromkeys(digests) if not self._execute(known, (digest,))]

    def put(self, blocks: Sequence[bytes], expected: Sequence[bytes] | None = None) -> list[bytes]:
        """Keep these blocks → their digests. Raises NoRoom, StagingFailed if they are not the ``expected`` ones, OSError."""
        digests = [digest_of(block) for block in blocks]
        if expected is not None and digests != list(expected):
            raise StagingFailed(
                "a block has another content", why="its content does not have the digest it should have"
            )
        with self._lock:
            wanted = set(self.missing(digests))
            size = sum(len(block) for digest, block in zip(digests, blocks, strict=True) if digest in wanted)
            if self._size_bytes + size > self._limit_bytes:
                raise NoRoom(
                    "the file cache is full",
                    why=f"{self._size_bytes} of {self._limit_bytes} bytes are in use",
                    hint="what is in it:  peerload files        a larger one:  cache of [files] in the settings",
                )
            self._check_disk(size)
            now = time.time()
            self._is_dirty = self._is_dirty or bool(wanted)
            self._database.execute("BEGIN")
            try:
                for digest, block in zip(digests, blocks, strict=True):
                    if digest not in wanted:
                        continue
                    wanted.discard(digest)
                    data = block if len(block) <= ROW_BYTES_MAX else None
                    if data is None:
                        self._write(digest, block)
                    row = (digest, len(block), now, data)
                    self._database.execute("INSERT INTO blocks VALUES (?, ?, ?, ?)", row)
                self._database.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise NoRoom("files of tasks cannot be kept", why=str(error)) from None
                raise
            self._size_bytes += size
        return digests

    def _check_disk(self, size: int) -> None:
        status = os.statvfs(self._directory)
        free = status.f_bavail * status.f_frsize
        if size and free - size < self._free_bytes_min:
            raise NoRoom(
                "the disk has no room for more files of tasks", why=f"{free} bytes are free", hint="peerload files --gc"
            )

    def _write(self, digest: bytes, block: bytes) -> None:
        path = self._path(digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            part.write_bytes(block)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def read(self, digest: bytes) -> bytes:
        """One block, verified. Raises StagingFailed if it is not here (any more), or damaged: then it is removed."""
        with self._lock:
            rows = self._execute("SELECT data FROM blocks WHERE digest = ?", (digest,))
        if not rows:
            raise StagingFailed("files of the task are not kept any more", why=f"block {digest.hex()[:16]} is gone")
        data: bytes | None = rows[0][0]
        if data is None:
            try:
                data = self._path(digest).read_bytes()
            except FileNotFoundError:
                data = b""
        if digest_of(data) != digest:
            self._drop([digest])
            with self._lock:
                self._execute("DELETE FROM manifests")  # which of them it belongs to is found out again
            raise StagingFailed("a file in the cache is damaged", why=f"block {digest.hex()[:16]} has another content")
        return data

    def _drop(self, digests: Iterable[bytes]) -> int:
        """→ the number of bytes that were removed."""
        gone = 0
        with self._lock:
            self._execute("BEGIN")
            try:
                for digest in digests:
                    for (size,) in self._execute("DELETE FROM blocks WHERE digest = ? RETURNING size", (digest,)):
                        gone += size
                        self._path(digest).unlink(missing_ok=True)
                self._execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise
            self._size_bytes -= gone
        return gone

    def _execute(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of one statement. Raises NoRoom if the database cannot be used now, StagingFailed if it is damaged."""
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            raise NoRoom("the cache of files cannot be used", why=str(error)) from None
        except sqlite3.Error as error:
            raise StagingFailed("the cache of files is damaged", why=str(error)) from None

    def sync(self) -> None:
        """Have all blocks on disk. Raises OSError."""
        with self._syncing:  # who comes meanwhile waits until its blocks are there, too
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
        """True if this manifest was complete here, and still is; it is used now."""
        with self._lock:
            used = "UPDATE manifests SET used_at = ? WHERE id = ? RETURNING id"
            return bool(self._execute(used, (time.time(), manifest)))

    def missing_of(self, manifest: bytes, ahead: int = 1 << 30) -> list[bytes]:
        """The blocks of a manifest that are not here: the root, else its parts, else those of its files. [] if it is
        complete, which is remembered. ahead: at most so many. Raises StagingFailed for a manifest that is not valid."""
        if self.missing([manifest]):
            return [manifest]
        root = decode_root(self.read(manifest))
        lacking = self.missing(root.parts) or self.missing(decode(manifest, self.read).blocks())
        if not lacking:
            self._note(manifest, root)
        return lacking[:ahead]

    def _note(self, manifest: bytes, root: Root) -> None:
        with self._lock:
            row = (manifest, root.size_bytes, root.files, time.time())
            self._execute("INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?)", row)

    # -- room ----------------------------------------------------------------------------------------------------------

    def needs_room(self, size_bytes: int) -> bool:
        """True if so much more does not fit."""
        return self._size_bytes + size_bytes > self._limit_bytes

    def collect(self, pinned: Collection[bytes], room_bytes: int = 0, *, everything: bool = False) -> int:
        """Remove what no manifest needs, and manifests that are not pinned, the least recently used first, until there is
        so much room (everything: all of them) → the number of bytes that were removed."""
        with self._lock:
            rows = self._execute("SELECT id FROM manifests ORDER BY used_at DESC")
            target = 0 if everything else max(int(self._limit_bytes * TARGET_SHARE) - room_bytes, 0)
            kept: set[bytes] = set()
            named: set[bytes] = set()
            size = 0
            for manifest in (*pinned, *(row[0] for row in rows if row[0] not in pinned)):
                needed = self._blocks_of(manifest)
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

    def _blocks_of(self, manifest: bytes) -> set[bytes]:
        """All blocks of a manifest, as far as it is here."""
        with contextlib.suppress(StagingFailed):
            root = decode_root(self.read(manifest))
            found = {manifest, *root.parts}
            with contextlib.suppress(StagingFailed):
                found.update(decode(manifest, self.read).blocks())
            return found
        return {manifest}

    def _sizes(self, digests: Iterable[bytes]) -> int:
        found = "SELECT size FROM blocks WHERE digest = ?"
        return sum(size for digest in digests for (size,) in self._execute(found, (digest,)))

    def usage(self) -> StoreUsage:
        """Contents of the store."""
        with self._lock:
            ((blocks,),) = self._execute("SELECT count(*) FROM blocks")
            rows = self._execute("SELECT id, size, count, used_at FROM manifests ORDER BY used_at DESC LIMIT 1000")
            return StoreUsage(self._size_bytes, self._limit_bytes, blocks, [(i, s, c, at) for i, s, c, at in rows])

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()
