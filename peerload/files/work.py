"""Work with the files of a task in a directory of its user: the agent does it itself, or, where it serves all users, has
`as_user.py` do it as each of them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, Protocol

from peerload.files import manifest as manifests
from peerload.files import tree
from peerload.files.beneath import DIRECTORY
from peerload.files.manifest import Manifest
from peerload.files.place import Homecoming, make_tree
from peerload.model.errors import StagingFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class BlockAccess(Protocol):
    """The blocks of one user's files, as `BlockStore` has them."""

    def read(self, digest: bytes, /) -> bytes:
        """One block."""
        raise NotImplementedError

    def read_some(self, digests: Sequence[bytes], bytes_max: int, /) -> list[bytes]:
        """The first of these blocks, at least one, until they have so many bytes together."""
        raise NotImplementedError

    def put(self, blocks: Sequence[bytes], /) -> list[bytes]:
        """Keep these blocks → their digests."""
        raise NotImplementedError


def make(directory: bytes, blocks: BlockAccess, manifest: bytes, globs: Sequence[str]) -> None:
    """Make the working directory of a task, in the place of what an earlier try has left. Raises StagingFailed, OSError."""
    with os.scandir(directory) as entries:
        for entry in entries:
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)  # noqa: PTH108 -- bytes
    make_tree(directory, manifests.decode(manifest, blocks.read), globs, blocks.read_some)


def collect(directory: bytes, blocks: BlockAccess, manifest: bytes, globs: Sequence[str], needs_all: bool) -> bytes:
    """Keep the files of a working directory that are new or changed → the id of their manifest, b"" if there are none. Raises
    StagingFailed, OSError."""
    before = manifests.decode(manifest, blocks.read)
    base = os.open(directory, DIRECTORY | os.O_CLOEXEC)
    try:
        after = tree.changed(base, before, globs, lambda block: blocks.put([block])[0], needs_all=needs_all)
    finally:
        os.close(base)
    if not after.files and not after.links:
        return b""
    id_, own = manifests.encode(after)
    blocks.put(own)
    return id_


def place(
    directory: bytes,
    blocks: BlockAccess,
    before: bytes,
    outputs: bytes,
    own: dict[str, bytes],
    since: float,
    mark: str,
) -> tuple[list[str], dict[str, bytes]]:
    """Place the outputs of a task among what its user has → the paths of those that are kept beside another, and what this task
    has placed so far, as `Homecoming` has it. Raises StagingFailed, OSError."""
    try:
        known = manifests.decode(before, blocks.read)
    except StagingFailed:  # it is not kept any more: then nothing at home counts as unchanged
        known = Manifest()
    coming = Homecoming(directory, known, own, since=since, mark=mark)
    coming.place(manifests.decode(outputs, blocks.read), blocks.read_some)
    return coming.conflicts, own


WORK: dict[str, Callable[..., Any]] = {"make": make, "collect": collect, "place": place}
