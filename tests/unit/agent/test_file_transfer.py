"""Blocks on their way from another node: verified, continued after a cut, and never more than was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peerload.agent.files import transfer
from peerload.agent.files.transfer import FileTransfer
from peerload.files import manifest
from peerload.files.manifest import FileEntry, Manifest
from peerload.files.store import BlockStore, NoRoom
from peerload.model.errors import LinkUnavailable, StagingFailed
from peerload.model.messages import BLOCKS_MAX, Blocks, BlocksEnd, BlocksRequest, Envelope
from peerload.wire.peer import encode_frame

Pieces = AsyncIterator[Blocks | BlocksEnd]


class Links:
    """The links of a node: streams to others, which answer as they were told: each in its way, or all alike."""

    def __init__(self, serve: Callable[[str, BlocksRequest], Pieces] | None = None, **nodes: Any) -> None:
        self.nodes = nodes or {"y": serve}
        self.asked: list[int] = []
        self.asked_of: dict[str, int] = dict.fromkeys(self.nodes, 0)

    def fetch_blocks(self, node: str, request: BlocksRequest, *_: object) -> Pieces:
        self.asked.append(len(request.digests))
        self.asked_of[node] += len(request.digests)
        pieces: Pieces = self.nodes[node](node, request)
        return pieces


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
    made.append(FileTransfer(store, links, lambda _: None, Counter()))
    return made[-1]


def fetched(store: BlockStore, links: Any, id_: bytes, times: int = 1) -> int:
    """Fetch so many times at once → the bytes that came."""

    async def story() -> int:
        there = transfer_of(store, links)
        fetches = [there.fetch(id_, list(links.nodes), b"") for _ in range(times)]
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


def test_a_manifest_is_decoded_once_for_each_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, empty, id_ = stores(tmp_path)
    decoded: list[bytes] = []

    def counted(id_: bytes, read: Callable[[bytes], bytes]) -> Manifest:
        decoded.append(id_)
        return manifest.decode(id_, read)

    monkeypatch.setattr("peerload.files.store.decode", counted)
    fetched(empty, Links(server(full)), id_)
    assert decoded == [id_]


def test_a_copy_that_broke_off_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RETRY_S_MIN", 0.0)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 20)
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


def test_no_verified_block_is_sent_again_after_cuts_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    full, empty, id_ = stores(tmp_path)
    serve = server(full)
    sent: Counter[bytes] = Counter()

    async def cut(node: str, request: BlocksRequest) -> Pieces:
        at = 0
        async for piece in serve(node, request):
            yield piece
            if isinstance(piece, Blocks):
                sent.update(request.digests[at : at + len(piece.blocks)])
                at += len(piece.blocks)
            if at == 7:
                raise asyncio.CancelledError  # the agent ends

    ends = 0
    while empty.missing_of(id_):
        with contextlib.suppress(asyncio.CancelledError):
            fetched(empty, Links(cut), id_)
        ends += 1
        empty.close()
        empty = BlockStore(tmp_path / "empty", 1 << 30)  # the next one goes on
    assert ends > 3
    assert set(sent.values()) == {1}
    assert len(sent) == full.usage().blocks


async def wrong(_: str, request: BlocksRequest) -> Pieces:
    yield Blocks(tuple(memoryview(b"something else") for _ in request.digests))
    yield BlocksEnd()


async def too_many(_: str, request: BlocksRequest) -> Pieces:
    yield Blocks((memoryview(b"x"),) * (len(request.digests) + 1))


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


# -- several sources ------------------------------------------------------------------------------------------------------


async def lost(node: str, _: BlocksRequest) -> Pieces:
    raise LinkUnavailable(node, "it is gone")
    yield BlocksEnd()


def cut_after_one(serve: Callable[[str, BlocksRequest], Pieces]) -> Callable[[str, BlocksRequest], Pieces]:
    async def one(node: str, request: BlocksRequest) -> Pieces:
        async for piece in serve(node, request):
            yield piece
            raise LinkUnavailable(node, "cut")

    return one


@pytest.fixture
def _small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCKS_MIN", 3)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    monkeypatch.setattr(transfer, "RETRY_S_MIN", 0.0)


@pytest.mark.usefixtures("_small_shares")
def test_several_sources_share_the_work_and_each_block_comes_once(tmp_path: Path) -> None:
    full, empty, id_ = stores(tmp_path)
    links = Links(y=server(full), z=server(full))
    assert fetched(empty, links, id_) == full.usage().size_bytes
    assert sum(links.asked) == full.usage().blocks
    assert min(links.asked_of.values()) > 0


@pytest.mark.usefixtures("_small_shares")
@pytest.mark.parametrize("bad", ["lost", "cut", "wrong", "too_many", "too_few", "gone"])
def test_a_source_that_fails_is_replaced(tmp_path: Path, bad: str) -> None:
    full, empty, id_ = stores(tmp_path)
    ways = {"lost": lost, "cut": cut_after_one(server(full)), "wrong": wrong, "too_many": too_many}
    ways |= {"too_few": too_few, "gone": gone}
    links = Links(y=ways[bad], z=server(full))
    assert fetched(empty, links, id_) == full.usage().size_bytes
    assert empty.missing_of(id_) == []


def test_a_source_whose_block_is_damaged_is_asked_to_verify_and_drops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerload.files.store.FRESH_S", 0.0)
    full, empty, id_ = stores(tmp_path)
    damaged, _, _ = stores(tmp_path / "other")
    for path in (tmp_path / "other/full/blocks").rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    links = Links(y=server(damaged), z=server(full))
    assert fetched(empty, links, id_) == full.usage().size_bytes
    assert damaged.missing([id_]) == [id_]


# -- pace ------------------------------------------------------------------------------------------------------------------


def test_few_pieces_become_ready_in_one_turn_of_the_loop_however_many_nodes_ask(tmp_path: Path) -> None:
    full, _, id_ = stores(tmp_path)
    every = tuple(full.missing_of(id_) or manifest.decode(id_, full.read).blocks())
    ready: Counter[int] = Counter()

    async def story() -> None:
        serving = transfer_of(full, None)
        loop = asyncio.get_running_loop()
        turn = 0

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(next_turn)

        async def reader(number: int) -> None:
            async for _ in serving.serve(f"n{number}", BlocksRequest(every)):
                ready[turn] += 1

        next_turn()
        await asyncio.gather(*map(reader, range(50)))

    asyncio.run(story())
    pieces = -(-sum(len(full.read(digest)) for digest in every) // transfer.PIECE_BYTES)
    assert sum(ready.values()) >= 50 * pieces
    assert max(ready.values()) <= 2 * transfer.PIECES_MAX  # each with the word that it was the last


@pytest.mark.parametrize("last_but", [0, 1])
def test_no_piece_is_too_large_for_a_frame(tmp_path: Path, last_but: int) -> None:
    """Many small blocks, just not enough for a piece, and then the largest one."""
    store = BlockStore(tmp_path / "full", 1 << 30)
    small, rest = divmod(transfer.PIECE_BYTES - last_but, BLOCKS_MAX - 2)
    sizes = [small] * (BLOCKS_MAX - 2) + [rest + 1, manifest.BLOCK_BYTES]
    blocks = [number.to_bytes(2, "big") * (size // 2) + b"x" * (size % 2) for number, size in enumerate(sizes)]
    digests = tuple(store.put(blocks))

    async def story() -> list[Blocks]:
        return [piece async for piece in server(store)("y", BlocksRequest(digests)) if isinstance(piece, Blocks)]

    pieces = asyncio.run(story())
    for piece in pieces:
        encode_frame(Envelope(1, "c" * 40, "n" * 40, "b" * 32, 1 << 40, piece, "n" * 40, "b" * 32))
    assert sum(len(piece.blocks) for piece in pieces) == len(digests)


def test_a_transfer_holds_a_few_pieces_however_large_it_is(tmp_path: Path) -> None:
    full, empty = (BlockStore(tmp_path / name, 1 << 30) for name in ("full", "empty"))
    count = 32
    digests = [full.put([number.to_bytes(2, "big") * (manifest.BLOCK_BYTES // 2)])[0] for number in range(count)]
    size = count * manifest.BLOCK_BYTES
    id_, blocks = manifest.encode(Manifest((FileEntry("large", 0o644, size, 0, tuple(digests)),)))
    full.put(blocks)
    tracemalloc.start()
    try:
        assert fetched(empty, Links(server(full)), id_) > size
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the server's piece that is read and that on its way; the other end's that came and that which is written
    assert most_bytes < 4 * (transfer.PIECE_BYTES + manifest.BLOCK_BYTES)
    assert most_bytes < size / 2


def test_outputs_come_home_while_inputs_that_do_not_arrive_wait(tmp_path: Path) -> None:
    full, empty, id_ = stores(tmp_path)

    async def silent(_: str, __: BlocksRequest) -> Pieces:
        await asyncio.Event().wait()
        yield BlocksEnd()

    async def story() -> None:
        there = transfer_of(empty, Links(y=silent, z=server(full)))
        for number in range(2 * transfer.FETCHES_MAX):
            there.fetch(bytes([number]) * 32, ["y"], b"")
        home = there.fetch(id_, ["z"], b"", is_output=True)
        assert home.work is not None
        await home.work
        await there.close()

    asyncio.run(story())
    assert empty.missing_of(id_) == []


def test_a_full_cache_ends_the_copy_and_keeps_within_its_limit(tmp_path: Path) -> None:
    full, _, id_ = stores(tmp_path)
    small = BlockStore(tmp_path / "small", 1 << 20)
    with pytest.raises(NoRoom):
        fetched(small, Links(server(full)), id_)
    assert small.usage().size_bytes <= 1 << 20
