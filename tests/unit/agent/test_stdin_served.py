"""Standard input that a home serves to another node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from peerload.agent.runtime import RunState
from peerload.agent.stdin import StdinServer, StoredStdin
from peerload.model.messages import InputRequest
from peerload.model.task import TaskState
from tests.each import each

if TYPE_CHECKING:
    from pathlib import Path

UID = bytes(16)


class Link:
    """A connection that takes everything."""

    def send(self, message: object) -> None: ...

    async def drain(self) -> None: ...

    def close(self, why: str) -> None: ...


@each("is_first", [False, True])
def test_that_a_task_reads_no_more_counts_although_its_node_hangs_up_at_once(tmp_path: Path, is_first: bool) -> None:
    source = StoredStdin(tmp_path / "input.in")
    record = SimpleNamespace(input="token", state=TaskState.LEASED, node="n2", attempt=1)
    task = SimpleNamespace(record=record, task="n1/1", uid=UID)
    node = SimpleNamespace(home=SimpleNamespace(tasks={UID: task}))
    inputs = SimpleNamespace(get=lambda _: source)
    forwarding = SimpleNamespace(cut_if_due=lambda *_: None)

    async def story() -> None:
        server = StdinServer(*cast("Any", (node, inputs, forwarding, RunState())))
        link = cast("Any", Link())
        if not is_first:
            server.received(link, "n2", InputRequest("n1/1", UID, 1, up_to=100))
            await asyncio.sleep(0)
        server.received(link, "n2", InputRequest("n1/1", UID, 1, up_to=100, is_closed=True))
        server.closed(link)
        await server.close()

    asyncio.run(story())
    assert source.is_closed
