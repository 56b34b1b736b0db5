"""Blocks on their way from another node: verified, continued after a cut, and never more than was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peerload.agent.files import transfer
from peerload.agent.files.transfer import FileTransfer
from peerload.files import manifest
from peerload.files.manifest import FileEntry, Manifest
from peerload.files.store import BlockStore
from peerload.model.errors import LinkUnavailable, StagingFailed
from peerload.model.messages import Blocks, BlocksEnd, BlocksRequest

Pieces = AsyncIterator[Blocks | BlocksEnd]


class Links:
    """The links of a node: streams to one other, which answers as it was told."""

    def __init__(self, serve: Callable[[str, BlocksRequest], Pieces]) -> None:
        self.serve = serve
        self.asked: list[int] = []

    def fetch_blocks(self, node: str, request: BlocksRequest) -> Pieces:
        self.asked.append(len(request.digests))
        return self.serve(node, request)


def stores(tmp_path: Path) -> tuple[BlockStore, BlockStore, bytes]:
    """One that has a tree of 30 files, one that is empty, and the id of the tree."""
    full, empty = (BlockStore(tmp_path / name, 1 << 30) for name in ("full", "empty"))
    contents = [bytes([number]) * 100_000 for number in range(30)]
    digests = full.put(contents)
    files = [FileEntry(f"f{number:02}", 0o644, 100_000, 0, (digest,)) for number, digest in enumerate(digests)]
    id_, blocks = manifest.encode(Manifest(tuple(files)))
    full.put(blocks)
    return full, empty, id_


made: list[FileTransfer] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while made:
        asyncio.run(made.pop().close())


def transfer_of(store: BlockStore, links: Any) -> FileTransfer:
    made.append(FileTransfer(store, links, lambda _: None, serves=True))
    return made[-1]


def fetched(store: BlockStore, links: Any, id_: bytes, times: int = 1) -> int:
    """Fetch so many times at once → the bytes that came."""

    async def story() -> int:
        there = transfer_of(store, links)
        fetches = [there.fetch(id_, ["y"]) for _ in range(times)]
        work = [fetch.work for fetch in fetches if fetch.work is not None]
        await asyncio.gather(*work)
        return fetches[0].done_bytes

    return asyncio.run(story())


def server(store: BlockStore) -> Callable[[str, BlocksRequest], Pieces]:
    return transfer_of(store, None).serve


def test_each_byte_comes_once_however_many_tasks_wait(tmp_path: Path) -> None:
    full, empty, id_ = stores(tmp_path)
    came = fetched(empty, Links(server(full)), id_, times=100)
    assert empty.missing_of(id_) == []
    assert came == empty.usage().size_bytes
    assert fetched(empty, Links(server(full)), id_) == 0


def test_a_copy_that_broke_off_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RETRY_S_MIN", 0.0)
    full, empty, id_ = stores(tmp_path)
    serve = server(full)

    async def cut(node: str, request: BlocksRequest) -> Pieces:
        yield await anext(aiter(serve(node, request)))
        if len(request.digests) > 5:
            raise LinkUnavailable("y", "cut")
        yield BlocksEnd()

    links = Links(cut)
    came = fetched(empty, links, id_)
    assert came == empty.usage().size_bytes == full.usage().size_bytes
    assert len(links.asked) > 3


async def wrong(_: str, request: BlocksRequest) -> Pieces:
    yield Blocks(tuple(b"something else" for _ in request.digests))
    yield BlocksEnd()


async def too_many(_: str, request: BlocksRequest) -> Pieces:
    yield Blocks(tuple(b"x" for _ in range(len(request.digests) + 1)))


async def too_few(_: str, __: BlocksRequest) -> Pieces:
    yield BlocksEnd()


async def gone(_: str, __: BlocksRequest) -> Pieces:
    yield BlocksEnd("it is not kept any more")


@pytest.mark.parametrize("serve", [wrong, too_many, too_few, gone])
def test_a_node_that_sends_something_else_fails_the_staging_and_leaves_nothing(tmp_path: Path, serve: Any) -> None:
    _, empty, id_ = stores(tmp_path)
    with pytest.raises(StagingFailed, match="y "):
        fetched(empty, Links(serve), id_)
    assert empty.usage().blocks == 0


def test_a_damaged_block_is_told_and_not_sent(tmp_path: Path) -> None:
    full, empty, id_ = stores(tmp_path)
    for path in (tmp_path / "full/blocks").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    with pytest.raises(StagingFailed, match="damaged"):
        fetched(empty, Links(server(full)), id_)
