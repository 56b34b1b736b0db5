"""Manifest of a tree of files: its encoding, and the rules for names in it (rule F1).

A file is a list of blocks of at most BLOCK_BYTES; large inputs are cut by their content (docs/adr/0043). A block is identified by
the BLAKE3 digest of its content (docs/adr/0049). The manifest is itself cut into blocks. Its *root* lists these, and the digest of
the root is the id of the whole tree. So any node with the id can fetch the rest from any other node, and verify it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
from blake3 import blake3

from peerload.model.errors import StagingFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FORMAT = 3
BLOCK_BYTES = 1 << 20
HASH_BYTES = 32
FILES_MAX = 100_000
"""Maximum number of files, links and directories in one manifest."""
PARTS_MAX = 64
"""Maximum number of blocks of the manifest itself."""
NAME_BYTES_MAX, PATH_BYTES_MAX, DEPTH_MAX = 255, 1024, 200
FILE_BYTES_MAX = 1 << 50
DIRECTORY_MODE = 0o755
"""Permissions of directories that are not listed in a manifest."""


class FileEntry(NamedTuple):
    """Regular file. mode: its permissions, 0 … 0o777; blocks: the digests of its content, in order; sizes: the sizes of the
    blocks if they were cut by content, () if all except the last have BLOCK_BYTES."""

    path: str
    mode: int
    size_bytes: int
    mtime_ns: int
    blocks: tuple[bytes, ...]
    sizes: tuple[int, ...] = ()

    @property
    def block_sizes(self) -> tuple[int, ...]:
        whole, rest = divmod(self.size_bytes, BLOCK_BYTES)
        return self.sizes or (BLOCK_BYTES,) * whole + (rest,) * (rest > 0)


class Manifest(NamedTuple):
    """A tree of files. links: symbolic links within the tree, as (path, target); directories: empty ones, and ones
    with other permissions than DIRECTORY_MODE, as (path, mode); their owner has all rights."""

    files: tuple[FileEntry, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    directories: tuple[tuple[str, int], ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    def blocks(self) -> Iterator[bytes]:
        """The digests of the content of all files, each once, in order."""
        return iter(dict.fromkeys(digest for entry in self.files for digest in entry.blocks))


class Root(NamedTuple):
    """First block of a manifest. size_bytes: of all files; files: their number; parts: digests of the blocks of the manifest."""

    size_bytes: int
    files: int
    parts: tuple[bytes, ...]


def digest_of(data: bytes | memoryview) -> bytes:
    return blake3(data).digest()


_NOT_PLAIN = re.compile(r"/\.{0,2}/")
ZEROS = digest_of(bytes(BLOCK_BYTES))
"""The digest of a block of zeros, of which sparse files have many: it is read and written at most once."""


def objection(path: str) -> str:
    """The reason why a file of this name cannot be staged; "" if it can (rule F1)."""
    if path.isascii() and path.isprintable() and len(path) <= NAME_BYTES_MAX and not _NOT_PLAIN.search(f"/{path}/"):
        return ""  # most names
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if len(raw) > PATH_BYTES_MAX:
        return f"its path has {len(raw)} bytes; at most {PATH_BYTES_MAX} are allowed"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "its path is not plain and relative"
    if len(parts) > DEPTH_MAX:
        return f"it lies more than {DEPTH_MAX} directories deep"
    if any(len(part.encode()) > NAME_BYTES_MAX for part in parts):
        return f"its name has more than {NAME_BYTES_MAX} bytes"
    if any(character < " " or "\x7f" <= character <= "\x9f" for character in path):
        return "its name has control characters"
    return ""


def link_objection(path: str, target: str) -> str:
    """The reason why a link at ``path`` cannot be staged; "" if it can. ``..`` may not follow a name: the name may be another
    link, and then the text does not determine the target."""
    if not target or any(character == "\0" or "\ud800" <= character <= "\udfff" for character in target):
        return "it is a link whose target is not UTF-8 text"
    names = [name for name in target.split("/") if name not in ("", ".")]
    ups = names.count("..")
    is_outside = target.startswith("/") or ups > path.count("/") or ".." in names[ups:]
    return f"it is a link to {target!r}, outside" if is_outside else ""


def encode(manifest: Manifest) -> tuple[bytes, list[bytes]]:
    """Encode a manifest → its id, and its blocks, the root last."""
    body = msgpack.packb(list(manifest))
    parts = [body[at : at + BLOCK_BYTES] for at in range(0, len(body), BLOCK_BYTES)]
    root = msgpack.packb([FORMAT, manifest.size_bytes, len(manifest.files), [digest_of(part) for part in parts]])
    return digest_of(root), [*parts, root]


def decode_root(raw: bytes) -> Root:
    """Decode the root of a manifest. Raises StagingFailed."""
    match _unpacked(raw):
        case [int(format_), int(size), int(count), list(parts)] if (
            format_ == FORMAT and 0 <= size <= FILE_BYTES_MAX and 0 <= count <= FILES_MAX and len(parts) <= PARTS_MAX
        ):
            return Root(size, count, _digests(parts))
    raise _malformed("its first block is not that of a manifest")


def decode(manifest: bytes, read: Callable[[bytes], bytes]) -> Manifest:
    """The manifest of this id. ``read(digest)`` returns a block. Raises StagingFailed if it is not valid, and the errors of
    ``read``."""
    root = decode_root(read(manifest))
    body = _unpacked(b"".join(map(read, root.parts)))
    if not isinstance(body, list) or len(body) != len(Manifest._fields):
        raise _malformed("it is not a tree of files")
    try:
        files = tuple(map(_file, body[0]))
        links = tuple((str(path), str(target)) for path, target in body[1])
        directories = tuple((str(path), int(mode)) for path, mode in body[2])
    except (TypeError, ValueError, OverflowError) as error:
        raise _malformed(str(error)) from None
    found = Manifest(files, links, directories)
    _check(found)
    if (root.size_bytes, root.files) != (found.size_bytes, len(files)):
        raise _malformed("its sizes do not agree")
    return found


def _check(found: Manifest) -> None:
    paths = [*(entry.path for entry in found.files), *(path for path, _ in found.links)]
    paths += [path for path, _ in found.directories]
    if len(paths) > FILES_MAX or len(set(paths)) < len(paths):
        raise _malformed("it has too many names, or one of them twice")
    for path in paths:
        if why := objection(path):
            raise StagingFailed(f"{path!r} cannot be staged", why=why)
    if any(mode & ~0o777 or ~mode & 0o700 for _, mode in found.directories):
        raise _malformed("a directory has an impossible mode")
    for path, target in found.links:
        if why := link_objection(path, target):
            raise StagingFailed(f"{path!r} cannot be staged", why=why)


def _file(values: Any) -> FileEntry:  # noqa: ANN401 -- of another node
    path, mode, size, mtime, blocks, sizes = values
    entry = FileEntry(str(path), int(mode), int(size), int(mtime), _digests(blocks), tuple(map(int, sizes)))
    if entry.mode & ~0o777 or not 0 <= entry.size_bytes <= FILE_BYTES_MAX or not 0 <= entry.mtime_ns < 1 << 63:
        raise ValueError("a file has an impossible mode, size or date")
    if entry.sizes and (
        min(entry.sizes) <= 0 or max(entry.sizes) > BLOCK_BYTES or sum(entry.sizes) != entry.size_bytes
    ):
        raise ValueError("a file has blocks of impossible sizes")
    if len(entry.blocks) != (len(entry.sizes) or -(-entry.size_bytes // BLOCK_BYTES)):
        raise ValueError("a file has too many or too few blocks")
    return entry


def _digests(values: Iterable[Any]) -> tuple[bytes, ...]:
    found = tuple(values)
    for value in found:
        if not isinstance(value, bytes) or len(value) != HASH_BYTES:
            raise _malformed("the name of a block is not a digest")
    return found


def _unpacked(raw: bytes) -> Any:  # noqa: ANN401 -- of another node
    try:
        return msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException) as error:
        raise _malformed(str(error)) from None


def _malformed(why: str) -> StagingFailed:
    return StagingFailed("the manifest of the files is not valid", why=why)
