"""Files of attempts on one node: refused where they cannot travel, removed beside the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peerload.agent.files.attempts import AttemptFiles
from peerload.agent.output.spool import Spool
from peerload.model.task import SCRATCH, TaskFiles, TaskSpec

UID = bytes(16)
KEY = f"{UID.hex()}-1"
SPEC = TaskSpec((b"true",), SCRATCH, files=TaskFiles(bytes(32)))


def files_of(state: Path, came: list[Any], mode: str = "user") -> AttemptFiles:
    info: Any = SimpleNamespace(config=SimpleNamespace(mode=mode, node="n"), counters=Counter())
    home: Any = SimpleNamespace(home=SimpleNamespace(tasks={}, by_id={}))
    disk: Any = SimpleNamespace(low_bytes=0)
    inbox: Any = SimpleNamespace(put=came.append)
    links: Any = None
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
