"""Files of attempts on one node: refused where they cannot travel, removed beside the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.files.attempts import AttemptFiles
from peerload.agent.output.spool import Spool
from peerload.model.actions import StageFiles
from peerload.model.errors import BadRequest
from peerload.model.events import FilesStaged
from peerload.model.submit_options import SubmitOptions
from peerload.model.task import SCRATCH, TaskFiles, TaskSpec

UID = bytes(16)
KEY = f"{UID.hex()}-1"
SPEC = TaskSpec((b"true",), SCRATCH, files=TaskFiles(bytes(32)))


def files_of(state: Path, came: list[Any], mode: str = "user") -> AttemptFiles:
    info: Any = SimpleNamespace(config=SimpleNamespace(mode=mode), counters=Counter())
    home: Any = SimpleNamespace(home=SimpleNamespace(tasks={}, by_id={}))
    disk: Any = SimpleNamespace(low_bytes=0)
    inbox: Any = SimpleNamespace(put=came.append)
    links: Any = None
    event_log: Any = SimpleNamespace(record=lambda *_, **__: None)
    return AttemptFiles(state, 1 << 30, disk, Spool(state), links, inbox, info, home, event_log)


async def others() -> None:
    """Wait for all other tasks of the loop."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def test_the_service_for_all_users_takes_no_files_and_says_what_helps(tmp_path: Path) -> None:
    came: list[Any] = []

    async def story() -> None:
        files = files_of(tmp_path, came, "system")
        with pytest.raises(BadRequest) as refused:
            await files.check(SPEC, SubmitOptions(files_home=b"/home/u"))
        assert "peerload up" in refused.value.hint
        files.offered(StageFiles(KEY, "h/1", UID, 1, "h", SPEC))
        await others()
        await files.close()

    asyncio.run(story())
    (told,) = came
    assert isinstance(told, FilesStaged)
    assert (told.key, told.code) == (KEY, "cannot")


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
