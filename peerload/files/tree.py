"""Trees of files on disk: selection of the files to stage, and their content as blocks.

A tree is first listed, by names and sizes only, so that files that cannot be staged are refused before anything is read.
Then each file is opened below its directory by `openat2`, which follows no link and cannot leave the directory (rule
S5), even if the file was replaced by a link meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.files.manifest import (
    BLOCK_BYTES,
    DEPTH_MAX,
    DIRECTORY_MODE,
    FILES_MAX,
    NAME_BYTES_MAX,
    FileEntry,
    Manifest,
    link_objection,
    objection,
)
from peerload.model.errors import StagingFailed
from peerload.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pathspec import GitIgnoreSpec


SYS_OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x02, 0x04, 0x08
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_HOW_BYTES = 24
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_CLOSED = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EXDEV}
"""Errors of listing a directory without permission, or one that was replaced by something else meanwhile."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc: Any = ctypes.CDLL(None, use_errno=True)


def open_beneath(directory: int, path: str, flags: int) -> int:
    """Open ``path`` below an open directory. Raises OSError: ELOOP for a link in the path, EXDEV for a path that leads outside."""
    how = _How(flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    while True:
        fd = int(_libc.syscall(SYS_OPENAT2, directory, os.fsencode(path), ctypes.byref(how), _HOW_BYTES))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number in {errno.ENOSYS, errno.EPERM}:  # before Linux 5.6 (RHEL 8), and in old container runtimes
            return _open_stepwise(directory, path, flags)
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


def _open_stepwise(directory: int, path: str, flags: int) -> int:
    """`open_beneath` for systems without `openat2`: opens one name after another, none of them a link. Raises OSError."""
    *above, name = path.split("/")
    if ".." in (*above, name) or "" in above:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    opened = [directory]
    try:
        for one in above:
            opened.append(_open_no_link(opened[-1], one, os.O_PATH | os.O_DIRECTORY))
        return _open_no_link(opened[-1], name, flags)
    finally:
        for fd in opened[1:]:
            os.close(fd)


def _open_no_link(directory: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def make_directories(directory: int, path: str, mode: int = 0o777) -> int:
    """Open a directory below another; "" is the directory itself. Missing directories are created. Raises OSError."""
    try:
        return open_beneath(directory, path or ".", DIRECTORY)
    except FileNotFoundError:
        above, _, name = path.rpartition("/")
        parent = make_directories(directory, above, mode)
        try:
            with contextlib.suppress(FileExistsError):  # created meanwhile
                os.mkdir(name, mode, dir_fd=parent)
            return open_beneath(parent, name, DIRECTORY)
        finally:
            os.close(parent)


def make_directory(directory: int, path: str, mode: int) -> None:
    """Create a directory with these permissions below another, unless it exists. Raises OSError."""
    above, _, name = path.rpartition("/")
    parent = make_directories(directory, above)
    try:
        is_new = True
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            is_new = False
        fd = open_beneath(parent, name, DIRECTORY)
        try:
            if is_new:
                os.fchmod(fd, mode)
        finally:
            os.close(fd)
    finally:
        os.close(parent)


class DirfdCache:
    """Cache of one directory descriptor. The directory of the last file below ``base`` stays open, since files are sorted and
    the next one is mostly in the same directory. makes: create missing directories."""

    def __init__(self, base: int, *, makes: bool = True) -> None:
        self._base = base
        self._makes = makes
        self._path: str | None = None
        self._fd = -1

    def of(self, path: str) -> tuple[int, str]:
        """The open directory of this file, and its name there. Raises OSError."""
        above, _, name = path.rpartition("/")
        if above != self._path:
            self.close()
            self._fd = (
                make_directories(self._base, above)
                if self._makes
                else open_beneath(self._base, above or ".", DIRECTORY)
            )
            self._path = above
        return self._fd, name

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


def punch_hole(fd: int, start: int, size: int) -> None:
    """Free the disk space of a part of a file. Raises OSError if the file system does not support that."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) < 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def sync_file_system(directory: int) -> None:
    """Sync the file system of this directory. Raises OSError."""
    if _libc.syncfs(directory) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


IGNORE_FILES = (".gitignore", ".peerloadignore")
NEVER = frozenset({".git", ".hg", ".svn"})
"""Version-control directories, which are never part of a snapshot."""
BYTES_MAX = 1 << 40
"""Maximum number of files sent along with one task, or returned by it."""
CUT_BY_CONTENT_BYTES_MIN = 8 << 20
READ_TRIES = 3
"""Number of attempts to read a file that changes meanwhile."""
PART_PREFIX, KEPT_BESIDE = ".peerload-part-", ".peerload-"
ENTRIES_MAX = 4 * FILES_MAX
"""Maximum number of entries of one directory, including ignored ones."""
_SKIPS = "to leave it out, name it in .peerloadignore"
_OTHERS = "name what may travel, or give it another name:  --in PATH"


class FileStatus(NamedTuple):
    """File status: the fields of an `os.stat_result` that a snapshot needs, in a fifth of its memory, since a tree may have a hundred
    thousand files."""

    st_size: int
    st_mode: int
    st_mtime_ns: int
    st_ctime_ns: int
    st_ino: int


class Found(NamedTuple):
    """Entry of a tree. target: of a link, "" for a file; status: None for a directory that is empty or has other permissions (mode)
    than DIRECTORY_MODE; is_named: the user named this entry itself."""

    path: str
    status: FileStatus | None
    target: str = ""
    is_named: bool = False
    mode: int = 0


class Rules:
    """The ignore files of a directory and its parents, the deepest first: (length of its path, an expression that matches
    the union of its patterns, its patterns)."""

    def __init__(
        self, names: Sequence[str], above: tuple[tuple[int, re.Pattern[str], GitIgnoreSpec], ...] = ()
    ) -> None:
        self._names = names
        self._specs = above

    def within(self, directory: int, path: str, names: Iterable[str]) -> Rules:
        """The rules in this directory, whose entries are ``names``. Raises StagingFailed, OSError."""
        lines: list[str] = []
        for name in self._names:
            if name in names:
                lines += _ignore_lines(directory, f"{path}/{name}" if path else name, name)
        if not lines:
            return self
        from pathspec import GitIgnoreSpec  # noqa: PLC0415 -- most trees have none

        spec = GitIgnoreSpec.from_lines(lines)
        words = [re.sub(r"\(\?P<\w+>", "(?:", one.regex.pattern) for one in spec.patterns if one.regex is not None]
        any_of = re.compile("|".join(f"(?:{word})" for word in words) or r"(?!)")
        return Rules(self._names, ((len(path) + 1 if path else 0, any_of, spec), *self._specs))

    def ignore(self, path: str, *, is_directory: bool) -> bool:
        """True if this entry is ignored."""
        shown = f"{path}/" if is_directory else path
        for skipped, any_of, spec in self._specs:
            below = shown[skipped:]
            if any_of.search(below) and (verdict := spec.check_file(below).include) is not None:
                return verdict
        return False


def _ignore_lines(directory: int, path: str, name: str) -> list[str]:
    """The lines of an ignore file. Raises StagingFailed if it is a link, a FIFO or the like, and OSError."""
    try:
        fd = open_beneath(directory, name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StagingFailed(f"{path} cannot be read", why="it is a link") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StagingFailed(f"{path} cannot be read", why="it is not a file")
    with os.fdopen(fd, "r", errors="replace") as file:
        return file.read().splitlines()


def scan(
    base: int,
    starts: Iterable[str] = ("",),
    rules: Rules | None = None,
    pattern: Globs | None = None,
    *,
    skips: bool = False,
) -> Iterator[Found]:
    """The files, links and directories (`Found`) of ``starts`` below an open directory, sorted by name; "" means all of it.
    pattern: the paths to include, None = all. Raises OSError, and StagingFailed for an included entry that cannot be staged, unless
    such entries are skipped (skips)."""
    for start in starts:
        if not start:
            yield from _scan_directory(base, "", rules, pattern, skips=skips)
            continue
        _check_name(start, _OTHERS)
        try:
            fd = open_beneath(base, start, os.O_PATH | os.O_NOFOLLOW)
        except OSError as error:
            why = "its path contains a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
            raise StagingFailed(f"{start} cannot be staged", why=why, hint=_OTHERS) from None
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                yield from _scan_directory(fd, start, None, pattern, skips=skips)
            else:
                yield _found(start, status, fd, "", _OTHERS)._replace(is_named=True)
        finally:
            os.close(fd)


def _scan_directory(
    above: int, path: str, rules: Rules | None, pattern: Globs | None, *, skips: bool
) -> Iterator[Found]:
    fd, hint = open_beneath(above, ".", DIRECTORY), _SKIPS if rules is not None else _OTHERS
    try:
        prefix = f"{path}/" if path else ""
        entries, is_empty = _entries(fd, prefix, pattern)
        rules = rules.within(fd, path, _names(entries, files_only=skips)) if rules is not None else None
        for entry in entries:
            name = entry.name
            below = prefix + name
            is_directory = entry.is_dir(follow_symlinks=False)
            if _is_ignored(name, below, rules, is_directory=is_directory):
                continue
            is_empty = False
            is_deep = below.count("/") >= DEPTH_MAX
            if is_deep and is_directory and pattern is not None and not pattern.reach(below):
                continue
            try:
                if pattern is None or not is_directory or is_deep:
                    _check_name(below, hint)
                if is_directory:
                    yield from _scan_inner(fd, below, rules, pattern, skips=skips)
                else:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)  # DirEntry.stat would keep it in memory
                    yield _found(below, status, fd, name, hint)
            except FileNotFoundError:  # deleted meanwhile, as if the tree had been listed a moment later
                continue
            except StagingFailed:
                if not skips:
                    raise
        mode = os.fstat(fd).st_mode & 0o777 | 0o700
        if path and (is_empty or mode != DIRECTORY_MODE):
            yield Found(path, None, mode=mode)
    finally:
        os.close(fd)


def _scan_inner(above: int, path: str, rules: Rules | None, pattern: Globs | None, *, skips: bool) -> Iterator[Found]:
    try:
        inner = open_beneath(above, path.rpartition("/")[2], DIRECTORY)
    except OSError as error:
        if error.errno not in _CLOSED:
            raise
        if pattern is not None and not pattern.reach(path):
            return
        raise StagingFailed(f"{path} cannot be read", why=str(error.strerror)) from None
    try:
        yield from _scan_directory(inner, path, rules, pattern, skips=skips)
    finally:
        os.close(inner)


def _entries(fd: int, prefix: str, pattern: Globs | None) -> tuple[list[os.DirEntry[str]], bool]:
    """Entries of an open directory, sorted by name: its directories and the files that match the pattern; and True if it has
    no other entries. Raises StagingFailed if there are more than ENTRIES_MAX."""
    found, is_all = [], True
    with os.scandir(fd) as entries:
        for entry in entries:
            if pattern is None or entry.is_dir(follow_symlinks=False) or pattern.match(prefix + entry.name):
                found.append(entry)
            else:
                is_all = is_all and entry.name.startswith(PART_PREFIX)
            if len(found) > ENTRIES_MAX:
                raise _too_many(FILES_MAX)
    return sorted(found, key=lambda entry: entry.name), is_all


def _names(entries: Iterable[os.DirEntry[str]], *, files_only: bool) -> set[str]:
    return {entry.name for entry in entries if not files_only or entry.is_file(follow_symlinks=False)}


def _is_ignored(name: str, path: str, rules: Rules | None, *, is_directory: bool) -> bool:
    if name.startswith(PART_PREFIX) or rules is None:
        return name.startswith(PART_PREFIX)
    return (name in NEVER and is_directory) or rules.ignore(path, is_directory=is_directory)


def _found(path: str, status: os.stat_result, directory: int, name: str, hint: str) -> Found:
    kept = FileStatus(status.st_size, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    if stat.S_ISREG(status.st_mode):
        return Found(path, kept)
    if not stat.S_ISLNK(status.st_mode):
        raise StagingFailed(f"{path} cannot be staged", why="it is neither a file nor a directory", hint=hint)
    target = os.readlink(name, dir_fd=directory)
    if why := link_objection(path, target):
        raise StagingFailed(f"{path} cannot be staged", why=why, hint=hint)
    return Found(path, kept, target)


def _check_name(path: str, hint: str) -> None:
    if why := objection(path):
        shown = path if len(path) <= NAME_BYTES_MAX else f"{path[:NAME_BYTES_MAX]}…"
        raise StagingFailed(f"{printable(shown)} cannot be staged", why=why, hint=hint)


def vanished(path: str) -> StagingFailed:
    """The error for a file that was deleted meanwhile."""
    return StagingFailed(f"{path} cannot be staged", why="it has vanished meanwhile")


def bounded(found: Iterable[Found], files_max: int = FILES_MAX) -> list[Found]:
    """The entries as a list. Raises StagingFailed as soon as there are too many."""
    all_ = list(itertools.islice(found, files_max + 1))
    if len(all_) > files_max:
        raise _too_many(files_max)
    return all_


def _too_many(files_max: int) -> StagingFailed:
    why = f"there are more than {files_max} files"
    return StagingFailed("too many files to be staged", why=why, hint="leave some out:  .peerloadignore")


def check_size(found: Sequence[Found], bytes_max: int = BYTES_MAX) -> None:
    """Raises StagingFailed, with the names of the largest files, if the total size is too large."""
    total = sum(item.status.st_size for item in found if item.status is not None)
    if total > bytes_max:
        named = ", ".join(f"{item.path} ({item.status.st_size} bytes)" for item in largest(found) if item.status)
        why = f"the files have {total} bytes; at most {bytes_max} are allowed. The largest: {named}"
        raise StagingFailed("too much to be staged", why=why, hint="leave some out:  .peerloadignore")


def largest(found: Iterable[Found], count: int = 3) -> list[Found]:
    """The largest files, in descending order."""
    files = [item for item in found if item.status is not None and not item.target]
    return sorted(files, key=lambda item: (-item.status.st_size if item.status else 0, item.path))[:count]


def read_file(
    parents: DirfdCache, path: str, take: Callable[[bytes], bytes], *, by_content: bool = False
) -> tuple[FileEntry, os.stat_result]:
    """Read one file → its entry, and its status at that time. ``take(block)`` returns the digest of a block. by_content: cut a large
    file at positions that depend on its content, so that most blocks survive a change in its middle. Raises StagingFailed if the
    file keeps changing while it is read; FileNotFoundError."""
    for _ in range(READ_TRIES):
        try:
            parent, name = parents.of(path)
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
                raise  # may be temporary
            why = "a link has taken its place" if error.errno == errno.ELOOP else str(error.strerror)
            raise StagingFailed(f"{path} cannot be read", why=why, hint=_SKIPS) from None
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                raise StagingFailed(f"{path} cannot be read", why="it is not a file any more", hint=_SKIPS)
            cut, size = [], 0
            for block, times in cut_file(fd, before, by_content=by_content):
                cut += [(take(block), len(block))] * times
                size += len(block) * times
            if size == before.st_size and identity_of(os.fstat(fd)) == identity_of(before):
                mode, mtime_ns = before.st_mode & 0o777, before.st_mtime_ns
                blocks, sizes = zip(*cut, strict=True) if cut else ((), ())
                is_even = sizes[:-1].count(BLOCK_BYTES) == len(sizes[:-1])
                return FileEntry(path, mode, size, mtime_ns, blocks, () if is_even else sizes), before
        finally:
            os.close(fd)
    raise StagingFailed(f"{path} cannot be staged", why="it changes while it is read", hint=_SKIPS)


def cut_file(fd: int, status: os.stat_result, *, by_content: bool) -> Iterator[tuple[bytes, int]]:
    """The blocks of a file, each with a repeat count: a hole is one block of zeros, repeated, and is not read."""
    at = 0
    if by_content and status.st_size >= CUT_BY_CONTENT_BYTES_MIN and status.st_blocks * 512 >= status.st_size:
        for block in _cut_by_content(fd):
            yield block, 1
            at += len(block)
            if at > status.st_size:  # the file grows
                return
    while at < status.st_size:
        if (holes := _blocks_without_data(fd, at, status)) > 0:
            yield bytes(BLOCK_BYTES), holes
            at = os.lseek(fd, holes * BLOCK_BYTES, os.SEEK_CUR)
        elif data := _block(fd, min(status.st_size - at, BLOCK_BYTES)):
            yield data, 1
            at += len(data)
        else:
            return


def _cut_by_content(fd: int) -> Iterator[bytes]:
    """The blocks of a file by FastCDC [XZJ+20]; none if the compiled library is missing, since plain Python takes minutes."""
    try:
        from pyfastcdc.cy import FastCDC  # noqa: PLC0415 -- for large files alone
    except ImportError:
        return
    cutter = FastCDC(BLOCK_BYTES // 2, min_size=BLOCK_BYTES // 4, max_size=BLOCK_BYTES)
    with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
        for chunk in cutter.cut_stream(file):
            yield bytes(chunk.data)


def _blocks_without_data(fd: int, at: int, status: os.stat_result) -> int:
    """The number of whole blocks from ``at`` on that are a hole of a sparse file. Does not change the file position."""
    if status.st_blocks * 512 >= status.st_size or at + BLOCK_BYTES > status.st_size:
        return 0
    try:
        data = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            return 0
        data = status.st_size  # no data until the end
    os.lseek(fd, at, os.SEEK_SET)
    return (data - at) // BLOCK_BYTES


def _block(fd: int, size: int) -> bytes:
    data = os.read(fd, size)
    while 0 < len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def identity_of(status: os.stat_result | FileStatus) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class Globs(NamedTuple):
    """Globs of paths, with the syntax of `matcher`."""

    globs: tuple[str, ...]
    pattern: re.Pattern[str]

    def match(self, path: str) -> bool:
        """True if one of them matches this path or one of its parent directories."""
        return self.pattern.match(path) is not None

    def reach(self, directory: str) -> bool:
        """True if one of them may match an entry of this directory."""
        names = directory.split("/")
        return any(_reaches(glob.rstrip("/").split("/"), names) for glob in self.globs)


def _reaches(parts: Sequence[str], names: Sequence[str]) -> bool:
    for part, name in zip(parts, names, strict=False):
        if "**" in part:
            return True
        if not matcher([part]).match(name):
            return False
    return True


def is_output(path: str, wanted: Globs | None) -> bool:
    """True if `changed` may return this path for these globs; None: for all changes."""
    names = path.split("/")
    if any(name.startswith(PART_PREFIX) for name in names):
        return False
    return wanted.match(path) if wanted is not None else not NEVER.intersection(names[:-1])


def matcher(globs: Sequence[str]) -> Globs:
    """The pattern of paths that match one of these globs or are in a directory that does. ``*`` and ``?`` match
    within a name, ``**`` across names."""
    return Globs(tuple(globs), re.compile(f"(?:{'|'.join(map(_expression, globs))})(?:/.*)?\\Z"))


def _expression(glob: str) -> str:
    """The expression for a glob. Text between two stars is matched at its first position without backtracking (``(?>…)``): a later
    position would not let the second star match more. So the time is at most quadratic in the path, for any number of stars."""
    across = {"**/": "(?:.*?/)??", "**": ".*?"}
    groups, within = [""], ""
    for part in re.split(r"((?<![^/])\*\*/|\*\*|\*|\?|\[!?[^\]]+\])", glob.rstrip("/")):
        if part == "*" or part in across:
            groups[-1] += f"(?>[^/]*?{within[1:]})" if within.startswith("*") else within
            within = "*" if part == "*" else ""
            if part in across:
                groups.append(across[part])
        else:
            within += "[^/]" if part == "?" else _character_class(part) or re.escape(part)
    groups[-1] += f"[^/]*{within[1:]}" if within.startswith("*") else within
    return "".join(f"(?>{group})" for group in groups[:-1]) + groups[-1]


def _character_class(part: str) -> str:
    """The expression for ``[a-z]`` or ``[!a-z]`` of a glob; "" for other text, and for a range that has no characters."""
    match = re.match(r"\[(!?)([^\]]+)\]\Z", part)
    if match is None:
        return ""
    word = f"[{'^/' if match[1] else ''}" + re.sub(r"([\\\[^&~|])", r"\\\1", match[2]) + "]"
    with contextlib.suppress(re.error):
        re.compile(word)
        return word
    return ""


def literal_directory(glob: str) -> str:
    """The directory before the first special character of a glob: ``out`` for ``out/*.png``."""
    plain = re.split(r"[*?\[]", glob, maxsplit=1)[0]
    return plain.rpartition("/")[0]


def _read_output(
    parents: DirfdCache, path: str, take: Callable[[bytes], bytes], *, needs_all: bool
) -> FileEntry | None:
    """Read a file → its entry; None if it is unreadable and optional. Raises StagingFailed, and the errors of ``take``."""
    is_refused = False

    def taken(block: bytes) -> bytes:
        nonlocal is_refused
        is_refused = True
        digest = take(block)
        is_refused = False
        return digest

    try:
        return read_file(parents, path, taken)[0]
    except FileNotFoundError:
        if needs_all:
            raise vanished(path) from None
    except StagingFailed:
        if needs_all or is_refused:
            raise
    return None


def changed(
    base: int, before: Manifest, globs: Sequence[str], take: Callable[[bytes], bytes], *, needs_all: bool
) -> Manifest:
    """The files, links and directories of a tree that differ from ``before``: entries that match the globs or, without globs,
    all that no `.peerloadignore` excludes. needs_all: raise StagingFailed for a glob without matches, and for entries that cannot
    be staged; otherwise these are left out. Raises StagingFailed, OSError."""
    rules = None if globs else Rules(IGNORE_FILES[1:])
    pattern = matcher(globs) if globs else None
    known = {entry.path: entry for entry in before.files}
    links = dict(before.links)
    found = bounded(scan(base, rules=rules, pattern=pattern, skips=not needs_all))
    if pattern:  # directories are always listed
        found = [item for item in found if item.status is not None or pattern.match(item.path)]
    for glob in globs if needs_all else ():
        if not any(map(matcher([glob]).match, (item.path for item in found))):
            raise StagingFailed(f"nothing matches --out {glob}")
    check_size(found)
    files = []
    with contextlib.closing(DirfdCache(base, makes=False)) as parents:
        for item in found:
            if item.target or item.status is None:
                continue
            entry = known.get(item.path)
            same = entry is not None and (entry.size_bytes, entry.mtime_ns, entry.mode) == (
                item.status.st_size,
                item.status.st_mtime_ns,
                item.status.st_mode & 0o777,
            )
            if not same and (made := _read_output(parents, item.path, take, needs_all=needs_all)) is not None:
                files.append(made)
    new_links = tuple((item.path, item.target) for item in found if item.target and links.get(item.path) != item.target)
    there = {path for path, _ in before.directories}
    for path in (*known, *links):
        while (path := path.rpartition("/")[0]) and path not in there:
            there.add(path)
    directories = tuple(
        (item.path, item.mode)
        for item in found
        if item.status is None and item.path not in there and not objection(item.path)
    )
    return Manifest(tuple(files), new_links, directories)
