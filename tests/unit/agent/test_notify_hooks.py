"""Commands of `--notify` whose end comes when nobody waits for it: the agent was started anew while they ran."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peerload.agent.completion.hooks import NotifyHooks
from peerload.agent.output.spool import Spool
from peerload.agent.store.maintenance import DueJob
from peerload.model.events import TaskEnded
from peerload.model.task import SINGLE, CompletionJob, Exit

KEY = "notify-1-0"


def test_a_command_that_ended_before_its_job_came_round_is_not_awaited_for_ever(tmp_path: Path) -> None:
    forgotten: list[str] = []
    launcher: Any = SimpleNamespace(forget=forgotten.append)
    store: Any = SimpleNamespace(terms=lambda _counter: SimpleNamespace(notify=b"true"))
    hooks = NotifyHooks(SimpleNamespace(), store, launcher, Spool(tmp_path), SimpleNamespace())  # type: ignore[arg-type]
    hooks.listed({KEY}, {})
    hooks.event_received(TaskEnded(KEY, Exit(0)))
    job = DueJob(1, CompletionJob.NOTIFY, 1, SINGLE, 0.0, 0, "")

    async def carried_out() -> None:
        work = asyncio.ensure_future(hooks.carry_out(job))
        await asyncio.sleep(0)
        assert work.done()
        assert work.result()[0] == "notified"

    asyncio.run(carried_out())
    assert forgotten == [KEY]
