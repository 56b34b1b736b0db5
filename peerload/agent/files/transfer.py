"""Blocks of files on their way: served to other nodes, and fetched from them, once for each node however many tasks wait.

They go over streams, as outputs do (`peers/streams.py`). Each block is verified before it is kept, so that a copy that
broke off is continued with what is still missing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from peerload.files.manifest import decode_root
from peerload.files.store import NoRoom
from peerload.model.errors import LinkUnavailable, PeerloadError, StagingFailed
from peerload.model.messages import BLOCKS_MAX, WHY_LENGTH_MAX, Blocks, BlocksEnd, BlocksRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from peerload.agent.peers.links import PeerLinks
    from peerload.files.store import BlockStore

log = logging.getLogger("peerload.files")

PIECE_BYTES = 1 << 20
"""Blocks are sent together up to this."""
SILENCE_S_MAX = 30.0
"""Longest time without progress; then the copy is given up."""
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
"""A node that cannot be reached is tried again after the first, then twice as long each time, up to the second."""


class Fetch:
    """One manifest on its way. done_bytes: what has come; size_bytes: of all files, 0 = not known yet; is_counted:
    some attempt has taken it for its own."""

    def __init__(self) -> None:
        self.is_counted = False
        self.done_bytes = self.size_bytes = 0
        self.work: asyncio.Task[None] | None = None


class FileTransfer:
    """The transfers of one agent. room: makes room for so many bytes in the store, for this manifest."""

    def __init__(self, store: BlockStore, links: PeerLinks, room: Callable[[int], None], *, serves: bool) -> None:
        self._store = store
        self._links = links
        self._room = room
        self._serves = serves
        self._fetches: dict[bytes, Fetch] = {}

    @property
    def under_way(self) -> set[bytes]:
        """The manifests that are being fetched."""
        return set(self._fetches)

    # -- to other nodes ------------------------------------------------------------------------------------------------

    async def serve(self, _: str, request: BlocksRequest) -> AsyncIterator[Blocks | BlocksEnd]:
        """The blocks that a member asks for. It ends without BlocksEnd if they cannot be read just now."""
        if not self._serves:
            yield BlocksEnd("this node serves all users of its machine, and does not pass files on yet")
            return
        at = 0
        try:
            while at < len(request.digests):
                blocks = await asyncio.to_thread(self._read, request.digests, at)
                at += len(blocks)
                yield Blocks(tuple(blocks))
            yield BlocksEnd()
        except StagingFailed as error:
            yield BlocksEnd(str(error)[:WHY_LENGTH_MAX])
        except OSError as error:
            log.warning("cannot read a block: error=%s", error)

    def _read(self, digests: Sequence[bytes], at: int) -> list[bytes]:
        found: list[bytes] = []
        size = 0
        while at < len(digests) and size < PIECE_BYTES:
            found.append(self._store.read(digests[at]))
            size += len(found[-1])
            at += 1
        return found

    # -- from other nodes ----------------------------------------------------------------------------------------------

    def fetch(self, manifest: bytes, node: str) -> Fetch:
        """Fetch a manifest and all its blocks from this node, unless that is under way. Its work raises StagingFailed for
        what cannot be had at all, PeerloadError or OSError for what may be had later."""
        known = self._fetches.get(manifest)
        if known is None:
            known = self._fetches[manifest] = Fetch()
            known.work = asyncio.get_running_loop().create_task(self._fetch(known, manifest, node))
            known.work.add_done_callback(lambda work: self._done(manifest, work))
        return known

    def _done(self, manifest: bytes, work: asyncio.Task[None]) -> None:
        del self._fetches[manifest]
        if not work.cancelled() and (error := work.exception()) is not None:
            log.info("cannot fetch files: manifest=%s error=%s", manifest.hex()[:16], error)

    async def _fetch(self, fetch: Fetch, manifest: bytes, node: str) -> None:
        wait_s, silent_s = RETRY_S_MIN, 0.0
        while lacking := await asyncio.to_thread(self._store.missing_of, manifest):
            if not fetch.size_bytes and lacking != [manifest]:
                fetch.size_bytes = decode_root(await asyncio.to_thread(self._store.read, manifest)).size_bytes
                await asyncio.to_thread(self._room, fetch.size_bytes)
            before = fetch.done_bytes
            try:
                for at in range(0, len(lacking), BLOCKS_MAX):
                    await self._fetch_blocks(fetch, lacking[at : at + BLOCKS_MAX], node)
            except (LinkUnavailable, ConnectionError, TimeoutError) as error:
                silent_s = 0.0 if fetch.done_bytes > before else silent_s + wait_s
                if isinstance(error, TimeoutError) or silent_s > SILENCE_S_MAX:
                    why = str(error) or f"nothing came for {SILENCE_S_MAX:g} s"
                    raise PeerloadError(f"files cannot be fetched from {node}", why=why) from None
                await asyncio.sleep(wait_s)
                wait_s = RETRY_S_MIN if fetch.done_bytes > before else min(wait_s * 2, RETRY_S_MAX)
        await asyncio.to_thread(self._store.sync)

    async def _fetch_blocks(self, fetch: Fetch, digests: Sequence[bytes], node: str) -> None:
        pieces = self._links.fetch_blocks(node, BlocksRequest(tuple(digests)))
        at = 0
        try:
            while True:
                async with asyncio.timeout(SILENCE_S_MAX):
                    piece = await anext(pieces)
                if isinstance(piece, BlocksEnd):
                    if piece.why:
                        raise StagingFailed(f"{node} does not have files of the task", why=piece.why)
                    if at < len(digests):
                        raise StagingFailed(f"{node} has sent {at} of {len(digests)} blocks")
                    return
                wanted = digests[at : at + len(piece.blocks)]
                if len(wanted) < len(piece.blocks):
                    raise StagingFailed(f"{node} has sent more blocks than were asked for")
                await asyncio.to_thread(self._keep, node, wanted, piece.blocks)
                at += len(wanted)
                fetch.done_bytes += sum(map(len, piece.blocks))
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    def _keep(self, node: str, wanted: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        size = sum(map(len, blocks))
        if self._store.needs_room(size):
            self._room(size)
        try:
            self._store.put(blocks, wanted)
        except NoRoom:
            raise
        except StagingFailed as error:
            raise StagingFailed(f"{node} has sent something else than was asked for", why=error.why) from None

    async def close(self) -> None:
        """Stop all; the next agent goes on with what is missing."""
        work = [fetch.work for fetch in self._fetches.values() if fetch.work is not None]
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
