"""Output files of tasks: `submit -o FILE`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.completion import completion_jobs
from peerload.agent.completion.completion_jobs import WRITES_AT_A_TIME, OutputSaver, SavedOutput, SaveProgress
from tests.support import PATIENCE_S


def test_files_on_a_dead_mount_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_jobs, "mount_point", lambda path: path[:5])

    async def story() -> None:
        over = asyncio.Event()

        async def append(_: Any, __: Any, path: bytes, *___: Any, **____: Any) -> None:
            if path.startswith(b"/dead"):
                await over.wait()

        def copied(path: bytes) -> asyncio.Task[bool]:
            spec: Any = None
            saved = SavedOutput("key", spec, spec, {path: [1]}, SaveProgress("", [0, 0], {path: 0}))
            return asyncio.create_task(saver._copy(saved, None))

        info: Any = SimpleNamespace(identity=SimpleNamespace(machine_boot=""))
        part = SimpleNamespace(ranges=[], end=0, missing_bytes=0)
        spool: Any = SimpleNamespace(data_ranges=lambda *_: part, path=lambda *_: None)
        users: Any = SimpleNamespace(append=append)
        none: Any = None
        saver = OutputSaver(info, none, none, spool, none, users, none)
        dead = [copied(b"/dead/%d" % number) for number in range(2 * WRITES_AT_A_TIME)]
        async with asyncio.timeout(PATIENCE_S):
            assert not await copied(b"/live/file")
        assert not any(one.done() for one in dead)
        over.set()
        await asyncio.gather(*dead)

    asyncio.run(story())
