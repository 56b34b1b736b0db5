"""File operations of a task in a directory of its user: create a tree in a new directory, collect outputs, and place them among
the user's files. A user-mode agent does this itself; in system mode, `as_user.py` does it as the user.

Nothing outside the directory is touched (rule S5): each directory is opened below the target, no name contains a slash,
and no link is followed. A file gets its final name when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from peerload.files import manifest as manifests
from peerload.files import tree
from peerload.files.manifest import BLOCK_BYTES, NAME_BYTES_MAX, ZEROS, FileEntry, Manifest, digest_of
from peerload.files.tree import (
    DIRECTORY,
    KEPT_BESIDE,
    PART_PREFIX,
    DirfdCache,
    literal_directory,
    make_directories,
    make_directory,
    open_beneath,
    sync_file_system,
)
from peerload.model.errors import StagingFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


READ_BLOCKS, READ_BYTES = 2048, 2 << 20
"""Maximum total size of blocks that are read together."""
SMALL_BYTES, BATCH_BLOCKS = 128 << 10, 2048
"""Blocks of outputs up to this size are stored together, at most BATCH_BLOCKS of them."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ReadSome(Protocol):
    """Returns the first of these blocks, at least one, up to this many bytes in total."""

    def __call__(self, digests: Sequence[bytes], bytes_max: int, /) -> Sequence[bytes | memoryview]:
        raise NotImplementedError


def _contents(files: Iterable[FileEntry], read: ReadSome) -> Iterator[bytes | memoryview]:
    """The blocks of these files in order, without blocks of zeros."""
    wanted = [digest for entry in files for digest in entry.blocks if digest != ZEROS]
    at = 0
    while at < len(wanted):
        found = read(wanted[at : at + READ_BLOCKS], READ_BYTES)
        yield from found
        at += len(found)


def make_tree(
    directory: str | bytes | os.PathLike[str], manifest: Manifest, globs: Sequence[str], read: ReadSome
) -> None:
    """Create a tree in a new directory, and the directories named by the globs of outputs. Files keep their dates.
    Links are created last, so that no file is written through one. Raises StagingFailed, OSError, and the errors of ``read``."""
    base = os.open(directory, DIRECTORY | os.O_CLOEXEC)
    parents = DirfdCache(base)
    path = ""
    try:
        for path, mode in sorted(manifest.directories):
            make_directory(base, path, mode)
        for path in filter(None, map(literal_directory, globs)):
            os.close(make_directories(base, path))
        contents = _contents(manifest.files, read)
        for entry in manifest.files:
            path = entry.path
            _write(*parents.of(path), entry, contents, mtime_ns=entry.mtime_ns)
        for path, target in manifest.links:
            parent, name = parents.of(path)
            os.symlink(target, name, dir_fd=parent)
    except OSError as error:
        raise _cannot(path, error) from None
    finally:
        parents.close()
        os.close(base)


def _cannot(path: str, error: OSError) -> StagingFailed | OSError:
    """The error for a file: OSError for errors of the disk or of this process, else StagingFailed. Both name the file."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
        return OSError(error.errno, f"{path}: {error.strerror}")
    words = {errno.ELOOP: "its path contains a symbolic link", errno.EXDEV: "its path leads outside"}
    return StagingFailed(f"{path} cannot be written", why=words.get(error.errno or 0, str(error.strerror)))


def _write(
    parent: int, name: str, entry: FileEntry, contents: Iterator[bytes | memoryview], *, mtime_ns: int = 0
) -> None:
    """Write a file. mtime_ns: its date; 0: now."""
    fd = os.open(name, CREATE, 0o600, dir_fd=parent)
    try:
        for digest, size in zip(entry.blocks, entry.block_sizes, strict=True):
            data = b"" if digest == ZEROS else next(contents)
            if size != (len(data) or BLOCK_BYTES):
                raise StagingFailed(
                    f"{entry.path} cannot be staged", why="a block of it has another size than announced"
                )
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if not data:
                os.lseek(fd, BLOCK_BYTES, os.SEEK_CUR)
        if entry.blocks[-1:] == (ZEROS,):
            os.ftruncate(fd, entry.size_bytes)
        os.fchmod(fd, entry.mode)
        if mtime_ns:
            os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)


class OutputMerge:
    """Merge of the outputs of one task into the directory of its user.

    A file or link at home is replaced if it is unchanged since the submission (``before``) or since this task wrote it (``own``:
    digests by path). A file that was changed since stays, and the task's file is stored next to it as ``name.peerload-<id>``.
    """

    def __init__(self, directory: bytes, before: Manifest, own: dict[str, bytes], *, since: float, mark: str) -> None:
        """since: date of the submission (Unix s); mark: the id of the task, for the names ``name.peerload-<id>``."""
        self._directory = directory
        self._before = {entry.path: entry for entry in before.files}
        self._links_before = dict(before.links)
        self._own = own
        self._since = since
        self._mark = KEPT_BESIDE + mark.rpartition("/")[2]
        self.conflicts: list[str] = []

    def place(self, manifest: Manifest, read: ReadSome) -> None:
        """Place all files, links and directories durably. One that cannot be placed does not prevent the others. A removed
        user directory is created again, since no other copy of the outputs exists. Raises StagingFailed, which names
        the first failure, OSError, and the errors of ``read``."""
        shown = self._directory.decode("utf-8", "backslashreplace")
        try:
            os.makedirs(self._directory, exist_ok=True)  # noqa: PTH103 -- bytes
            base = os.open(self._directory, DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StagingFailed(f"outputs cannot be written to {shown}", why=str(error.strerror)) from None
        parents = DirfdCache(base)
        failures: list[StagingFailed] = []
        outputs: Iterator[tuple[str, Callable[[], None]]] = itertools.chain(
            (
                (path, functools.partial(make_directory, base, path, mode))
                for path, mode in sorted(manifest.directories)
            ),
            ((entry.path, functools.partial(self._place_file, parents, entry, read)) for entry in manifest.files),
            ((path, functools.partial(self._place_link, parents, path, target)) for path, target in manifest.links),
        )
        try:
            for path, place in outputs:
                try:
                    place()
                except OSError as error:
                    failure = _cannot(path, error)
                    if isinstance(failure, OSError):
                        raise failure from None
                    failures.append(failure)
            sync_file_system(base)
        finally:
            parents.close()
            os.close(base)
        if failures:
            raise failures[0]

    def _place_file(self, parents: DirfdCache, entry: FileEntry, read: ReadSome) -> None:
        parent, name = parents.of(entry.path)
        found = _status(parent, name)
        target = name
        if found is not None:
            is_file = stat.S_ISREG(found.st_mode)
            is_same = is_file and found.st_size == entry.size_bytes and _digests(parent, name, entry) == entry.blocks
            is_done = is_same and found.st_mode & 0o777 == entry.mode
            is_changed = not is_done and (not is_file or self._was_changed(parent, name, entry.path, found))
            if is_done or (is_same and is_changed):
                self._own[entry.path] = digest_of(b"".join(entry.blocks))
                return
            if is_changed:
                self.conflicts.append(entry.path)
                target = self._beside(name)
        self._put(parent, target, lambda part: _write(parent, part, entry, _contents([entry], read)))
        if target == name:
            self._own[entry.path] = digest_of(b"".join(entry.blocks))

    def _beside(self, name: str) -> str:
        """The name of an output that is stored next to another file, cut to the maximum length of a name."""
        return name.encode()[: NAME_BYTES_MAX - len(self._mark)].decode(errors="ignore") + self._mark

    def _put(self, parent: int, name: str, write: Callable[[str], None]) -> None:
        """Let ``write`` complete a file or link under a temporary name, then rename it."""
        part = PART_PREFIX + self._mark.removeprefix(KEPT_BESIDE)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=parent)  # left by an interrupted agent
        try:
            write(part)
            os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=parent)
            raise

    def _was_changed(self, parent: int, name: str, path: str, found: os.stat_result) -> bool:
        """True if another program has changed this file since the submission."""
        own, before = self._own.get(path), self._before.get(path)
        if own is not None and digest_of(b"".join(_digests(parent, name))) == own:
            return False
        if before is not None:
            same = (found.st_size, found.st_mtime_ns) == (before.size_bytes, before.mtime_ns)
            return not same and _digests(parent, name, before) != before.blocks
        return found.st_mtime >= self._since

    def _place_link(self, parents: DirfdCache, path: str, target: str) -> None:
        parent, name = parents.of(path)
        found, place, there = _status(parent, name), name, ""
        if found is not None:
            there = os.readlink(name, dir_fd=parent) if stat.S_ISLNK(found.st_mode) else ""
            is_known = there == self._links_before.get(path) or digest_of(os.fsencode(there)) == self._own.get(path)
            if there != target and not (there and is_known):
                self.conflicts.append(path)
                place = self._beside(name)
        if there != target:
            self._put(parent, place, lambda part: os.symlink(target, part, dir_fd=parent))
        if place == name:
            self._own[path] = digest_of(target.encode())


def _status(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _digests(parent: int, name: str, like: FileEntry | None = None) -> tuple[bytes, ...]:
    """The digests of the blocks of a file; holes are not read. like: an entry whose block sizes are used, as far as they reach."""
    fd = open_beneath(parent, name, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0) as file:
        if like is None or not like.sizes:
            cut = tree.cut_file(fd, os.fstat(fd), by_content=False)
            return tuple(itertools.chain.from_iterable((digest_of(block),) * times for block, times in cut))
        found = []
        sizes = itertools.chain(like.sizes, itertools.repeat(BLOCK_BYTES))
        while data := file.read(next(sizes)):
            found.append(digest_of(data))
        return tuple(found)


class BlockAccess(Protocol):
    """Access to the blocks of one user's files, with the methods of `BlockStore`."""

    def read(self, digest: bytes, /) -> bytes:
        raise NotImplementedError

    def read_some(self, digests: Sequence[bytes], bytes_max: int, /) -> Sequence[bytes | memoryview]:
        """The first of these blocks, at least one, up to this many bytes together."""
        raise NotImplementedError

    def put(self, blocks: Sequence[bytes], /) -> list[bytes]:
        raise NotImplementedError


def make(directory: bytes, blocks: BlockAccess, manifest: bytes, globs: Sequence[str]) -> None:
    """Create the working directory of a task, and replace remains of an earlier attempt. Raises StagingFailed, OSError."""
    make_anew(directory, blocks, manifests.decode(manifest, blocks.read), globs)


def make_anew(directory: bytes, blocks: BlockAccess, manifest: Manifest, globs: Sequence[str]) -> None:
    """`make` for a manifest that is already decoded."""
    _empty(directory)
    make_tree(directory, manifest, globs, blocks.read_some)


def _empty(directory: bytes) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)  # noqa: PTH108 -- bytes


def collect(directory: bytes, blocks: BlockAccess, manifest: bytes, globs: Sequence[str], needs_all: bool) -> bytes:
    """Store the new or changed files of a working directory → the id of their manifest, b"" if there are none. Raises
    StagingFailed, OSError."""
    before = manifests.decode(manifest, blocks.read)
    base = os.open(directory, DIRECTORY | os.O_CLOEXEC)
    batch = _Batch(blocks)
    try:
        after = tree.changed(base, before, globs, batch.take, needs_all=needs_all)
    finally:
        os.close(base)
    batch.put()
    if after == Manifest():
        return b""
    id_, own = manifests.encode(after)
    blocks.put(own)
    return id_


class _Batch:
    """Small blocks that are stored together, since each call of the store costs a file and a transaction."""

    def __init__(self, blocks: BlockAccess) -> None:
        self._access = blocks
        self._waiting: list[bytes] = []
        self._bytes = 0

    def take(self, block: bytes) -> bytes:
        """Store a block (a small one with the next batch) → its digest."""
        if len(block) > SMALL_BYTES:
            return self._access.put([block])[0]
        self._waiting.append(block)
        self._bytes += len(block)
        if self._bytes > READ_BYTES or len(self._waiting) >= BATCH_BLOCKS:
            self.put()
        return digest_of(block)

    def put(self) -> None:
        """Store the pending blocks."""
        if self._waiting:
            self._access.put(self._waiting)
            self._waiting, self._bytes = [], 0


def place(
    directory: bytes,
    blocks: BlockAccess,
    before: bytes,
    outputs: bytes,
    globs: Sequence[str],
    returns_changes: bool,
    own: dict[str, bytes],
    since: float,
    mark: str,
) -> tuple[list[str], dict[str, bytes]]:
    """Place the outputs of a task among its user's files → the paths of outputs stored next to another file, and all that this task
    has placed so far (``own`` of `OutputMerge`). Raises StagingFailed, also for an output that was not requested, OSError."""
    after, wanted = manifests.decode(outputs, blocks.read), tree.matcher(globs) if globs else None
    for path in (*(entry.path for entry in after.files), *(path for path, _ in (*after.links, *after.directories))):
        if not (globs or returns_changes) or not tree.is_output(path, wanted):
            raise StagingFailed("outputs cannot be written", why=f"{path} was not requested")
    try:
        known = manifests.decode(before, blocks.read)
    except StagingFailed:  # no longer stored: then no file at home counts as unchanged
        known = Manifest()
    merge = OutputMerge(directory, known, own, since=since, mark=mark)
    merge.place(after, blocks.read_some)
    return merge.conflicts, own


def prepare(directory: bytes, blocks: BlockAccess, manifest: bytes, modules: dict[str, str]) -> None:
    """Create the directory of an environment: its lock in ``lock``, and links to these modules of the node in ``client``. Raises
    StagingFailed, OSError."""
    _empty(directory)
    there = Path(os.fsdecode(directory))
    for name in ("lock", "client"):
        (there / name).mkdir(mode=0o700)
    make(bytes(there / "lock"), blocks, manifest, ())
    for name, place in modules.items():
        (there / "client" / name).symlink_to(place)


def measure(directory: bytes, blocks: BlockAccess) -> tuple[int, bytes]:
    """The size of all files in a directory, and its absolute path."""
    del blocks
    walk = os.walk(directory)
    size = sum(os.lstat(os.path.join(above, name)).st_size for above, _, names in walk for name in names)  # noqa: PTH118
    return size, os.path.abspath(directory)  # noqa: PTH100 -- as above


WORK: dict[str, Callable[..., Any]] = {
    "make": make,
    "collect": collect,
    "place": place,
    "prepare": prepare,
    "measure": measure,
}
