"""Snapshot of a user's files. The user's own process reads them, and sends the agent the blocks that it lacks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgpack

from peerload.files import tree
from peerload.files.manifest import FILES_MAX, FileEntry, Manifest, digest_of, encode
from peerload.files.tree import DIRECTORY, DirfdCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

BATCH_BYTES = 3 << 20
"""Maximum size of the blocks that are sent at a time; a frame is limited to 4 MiB."""
BATCH_BLOCKS = 2048
FORMAT = 3
"""Format version of the cache of digests."""
KNOWN_MAX = 256
"""Maximum number of directories with cached digests."""
UNSURE_NS = 2_000_000_000
"""A file changed less than this before it was read may have been changed again within the same tick of the clock."""


class Ask(Protocol):
    """Sends a `files` request → the reply. Raises PeerloadError."""

    def __call__(self, **fields: object) -> dict[str, Any]:
        raise NotImplementedError


class Snapshot(NamedTuple):
    """A tree stored by the agent. id: of its manifest; sent_bytes: bytes that the agent lacked before."""

    id: bytes
    manifest: Manifest
    sent_bytes: int


class _Sender:
    """Sends missing blocks to the agent in batches. Each request also asks which blocks of the next batch are missing, while
    the batch after that is read."""

    def __init__(self, ask: Ask, progress: Callable[[int], None]) -> None:
        self._ask = ask
        self._progress = progress
        self._blocks: dict[bytes, bytes] = {}
        self._size = 0
        self._wanted: list[bytes] = []
        """The blocks of the batch before that the agent lacks."""
        self._under_way: threading.Thread | None = None
        self._error: BaseException | None = None
        self.sent_bytes = 0
        self.sent: set[bytes] = set()

    def take(self, block: bytes) -> bytes:
        digest = digest_of(block)
        if digest not in self._blocks and digest not in self.sent:
            if self._size + len(block) > BATCH_BYTES or len(self._blocks) >= BATCH_BLOCKS:
                self._send()
            self._blocks[digest] = block
            self._size += len(block)
        return digest

    def lacking(self, digests: list[bytes]) -> list[bytes]:
        return list(self._ask(have=digests)["missing"])

    def _send(self) -> None:
        """Send the missing blocks of the previous batch, and ask about this one. Raises PeerloadError, also for an earlier batch."""
        self._await_kept()
        blocks, self._blocks, self._size = self._blocks, {}, 0
        self.sent.update(blocks)
        if blocks or self._wanted:
            self._under_way = threading.Thread(target=self._exchange, args=(blocks,), daemon=True)
            self._under_way.start()

    def _exchange(self, blocks: dict[bytes, bytes]) -> None:
        try:
            missing = self._ask(blocks=self._wanted, have=list(blocks))["missing"]
            self.sent_bytes += sum(map(len, self._wanted))
            self._wanted = [blocks[digest] for digest in missing]
        except BaseException as error:  # noqa: BLE001 -- raised by `_await_kept`
            self._error = error

    def _await_kept(self) -> None:
        """Wait until the agent has stored what was sent. Raises PeerloadError."""
        if self._under_way is not None:
            self._under_way.join()
            self._under_way = None
            if self._error is not None:
                raise self._error
            self._progress(self.sent_bytes)

    def flush(self) -> None:
        """Send all remaining blocks to the agent. Raises PeerloadError."""
        self._send()
        self._send()
        self._await_kept()


def look(directory: bytes, paths: Sequence[str], *, everything: bool, files_max: int = FILES_MAX) -> list[tree.Found]:
    """Files that would be sent: these paths below the directory, or with ``everything`` all except ignored files.
    Raises StagingFailed, OSError."""
    base = os.open(directory, DIRECTORY | os.O_CLOEXEC)
    try:
        found = tree.bounded(tree.scan(base, rules=tree.Rules(tree.IGNORE_FILES)), files_max) if everything else []
        named = {item.path: item for item in found}
        named.update((item.path, item) for item in tree.bounded(tree.scan(base, sorted(set(paths)))))
    finally:
        os.close(base)
    chosen = tree.bounded(named[path] for path in sorted(named))
    tree.check_size(chosen)
    return chosen


def take(
    directory: bytes, found: Sequence[tree.Found], ask: Ask, progress: Callable[[int], None] = lambda _: None
) -> Snapshot:
    """Read these files and store them in the agent. ``ask`` sends a `files` request. Files unchanged since the last
    time are not read again, unless the agent lacks them. Raises PeerloadError, OSError."""
    known = _Known(directory)
    sender = _Sender(ask, progress)
    base = os.open(directory, DIRECTORY | os.O_CLOEXEC)
    try:
        manifest = _read(base, found, known, sender)
        id_, own = encode(manifest)
        if not ask(manifest=id_)["complete"]:
            seen = [digest for digest in manifest.blocks() if digest not in sender.sent]
            lacking: set[bytes] = set()
            for at in range(0, len(seen), BATCH_BLOCKS):
                lacking.update(sender.lacking(seen[at : at + BATCH_BLOCKS]))
            if lacking:
                known.forget(entry.path for entry in manifest.files if not lacking.isdisjoint(entry.blocks))
                manifest = _read(base, found, known, sender)
                id_, own = encode(manifest)
            for block in own:
                sender.take(block)
            sender.flush()
    finally:
        os.close(base)
    known.write(manifest)
    return Snapshot(id_, manifest, sender.sent_bytes)


def _read(base: int, found: Iterable[tree.Found], known: _Known, sender: _Sender) -> Manifest:
    files: list[FileEntry] = []
    links: list[tuple[str, str]] = []
    directories: list[tuple[str, int]] = []
    parents = DirfdCache(base, makes=False)
    for item in found:
        if item.status is None:
            directories.append((item.path, item.mode))
        elif item.target:
            links.append((item.path, item.target))
        elif (entry := known.entry(item.path, item.status)) is not None:
            files.append(entry)
        else:
            try:
                entry, status = tree.read_file(parents, item.path, sender.take, by_content=True)
            except FileNotFoundError:
                if item.is_named:
                    raise tree.vanished(item.path) from None
                continue  # as if the tree had been listed a moment later
            known.note(entry, status)
            files.append(entry)
    parents.close()
    sender.flush()
    return Manifest(tuple(files), tuple(links), tuple(directories))


class _Known:
    """Cache of the digests of one directory's files: $XDG_CACHE_HOME/peerload/files. Without it, all files are
    read again."""

    def __init__(self, directory: bytes) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 -- bytes and quick
        self._path = f"{cache}/peerload/files/{hashlib.sha256(os.path.realpath(directory)).hexdigest()[:32]}"
        self._began_ns = time.time_ns()
        self._has_changed = False
        self._files: dict[str, tuple[Any, ...]] = {}
        with contextlib.suppress(OSError, ValueError, msgpack.UnpackException):
            with open(self._path, "rb") as file:  # noqa: PTH123 -- quick
                raw = msgpack.unpackb(file.read(), use_list=False)
            if isinstance(raw, dict) and raw.get("format") == FORMAT:
                self._files = raw["files"]

    def entry(self, path: str, status: tree.FileStatus) -> FileEntry | None:
        found = self._files.get(path)
        if found is None or found[0] != tree.identity_of(status):
            return None
        return FileEntry(path, status.st_mode & 0o777, status.st_size, status.st_mtime_ns, found[1], found[2])

    def note(self, entry: FileEntry, status: os.stat_result) -> None:
        self._has_changed = True
        if max(status.st_mtime_ns, status.st_ctime_ns) < self._began_ns - UNSURE_NS:
            self._files[entry.path] = tree.identity_of(status), entry.blocks, entry.sizes

    def forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._files.pop(path, None)

    def write(self, manifest: Manifest) -> None:
        if not self._has_changed:
            return
        paths = {entry.path for entry in manifest.files}
        body = {"format": FORMAT, "files": {path: value for path, value in self._files.items() if path in paths}}
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120 -- quick
            part = f"{self._path}.{os.getpid()}"
            with open(part, "wb") as file:  # noqa: PTH123 -- quick
                file.write(msgpack.packb(body))
            os.replace(part, self._path)  # noqa: PTH105 -- quick
            with os.scandir(os.path.dirname(self._path)) as entries:  # noqa: PTH120 -- quick
                written = [(entry.stat().st_mtime_ns, entry.path) for entry in entries]
            for _, path in sorted(written)[:-KNOWN_MAX]:
                os.unlink(path)  # noqa: PTH108 -- quick
