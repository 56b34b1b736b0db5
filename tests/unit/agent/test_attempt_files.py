"""Files of attempts on one node: refused where they cannot travel, removed beside the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peerload.agent.files.attempts import AttemptFiles
from peerload.agent.output.spool import Spool
from peerload.files import manifest
from peerload.files.manifest import FileEntry, Manifest
from peerload.files.store import BlockStore
from peerload.model.actions import StageFiles
from peerload.model.messages import Blocks, BlocksEnd, BlocksRequest
from peerload.model.task import SCRATCH, TaskFiles, TaskSpec
from tests.support import PATIENCE_S

UID = bytes(16)
KEY = f"{UID.hex()}-1"
SPEC = TaskSpec((b"true",), SCRATCH, files=TaskFiles(bytes(32)))


def files_of(state: Path, came: list[Any], mode: str = "user", links: Any = None) -> AttemptFiles:
    info: Any = SimpleNamespace(config=SimpleNamespace(mode=mode, node="n"), counters=Counter())
    home: Any = SimpleNamespace(home=SimpleNamespace(tasks={}, by_id={}))
    disk: Any = SimpleNamespace(low_bytes=0)
    inbox: Any = SimpleNamespace(put=came.append)
    launcher: Any = SimpleNamespace(run="", forget=came.append)
    event_log: Any = SimpleNamespace(record=lambda *_, **__: None)
    return AttemptFiles(state, 1 << 30, disk, Spool(state), launcher, links, inbox, info, home, event_log)


async def others() -> None:
    """Wait for all other tasks of the loop."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def test_a_working_directory_is_gone_at_once_and_its_files_are_removed_in_a_thread(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [])
        for number in range(50):
            made = tmp_path / "scratch" / f"{number:032x}-1" / "sub"
            made.mkdir(parents=True)
            (made / "file").write_text("text")
            files.forget(made.parent.name)
            assert not made.parent.exists()
        await others()
        assert not any((tmp_path / "scratch").iterdir())
        await files.close()

    asyncio.run(story())


def test_files_are_written_while_others_are_still_on_their_way(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "home", 1 << 30)
    digests = store.put([bytes([number]) * 1000 for number in range(3)])
    entries = [FileEntry(f"f{number}", 0o644, 1000, 0, (digest,)) for number, digest in enumerate(digests)]
    id_, blocks = manifest.encode(Manifest(tuple(entries)))
    store.put(blocks)
    came: list[Any] = []
    scratch = tmp_path / "node" / "scratch" / KEY
    (tmp_path / "node").mkdir()

    async def serve(_: str, request: BlocksRequest) -> AsyncIterator[Blocks | BlocksEnd]:
        for digest in request.digests:
            if digest in digests[1:]:  # the file before it is there already
                before = scratch / f"f{digests.index(digest) - 1}"
                async with asyncio.timeout(PATIENCE_S):
                    while not before.exists():  # noqa: ASYNC110 -- a thread makes it
                        await asyncio.sleep(0.01)
            yield Blocks((memoryview(store.read(digest)),))
        yield BlocksEnd()

    async def story() -> None:
        links: Any = SimpleNamespace(fetch_blocks=serve, send=lambda *_: None)
        files = files_of(tmp_path / "node", came, links=links)
        spec = TaskSpec((b"true",), SCRATCH, files=TaskFiles(id_, 3000, 3))
        files.offered(StageFiles(KEY, "h/1", UID, 1, "h", spec))
        async with asyncio.timeout(PATIENCE_S):
            while not came:  # noqa: ASYNC110 -- an inbox tells nobody
                await asyncio.sleep(0.01)
        assert files.is_ready(KEY)
        await files.close()

    asyncio.run(story())
    (told,) = came
    assert (told.key, told.code) == (KEY, "")
    assert [(scratch / f"f{number}").read_bytes() for number in range(3)] == list(map(store.read, digests))
