"""The verb `output`: which offsets a client is told that wants the last lines only."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from peerload.agent.requests.output_and_wait import OutputStream
from peerload.model.task import TaskState
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RECORD = SimpleNamespace(task="ws1/1", uid=bytes(16), attempt=2, state=TaskState.LEASED, node="ws1")


def test_a_client_that_gets_the_last_lines_is_told_where_they_begin() -> None:
    """So it knows what to leave out of the whole output after a reconnection, also where nothing came before."""
    told: list[tuple[int, int, bytes, int]] = []

    async def stream(_request: int, body: dict[str, Any]) -> None:
        told.append((body["stream"], body["offset"], body["data"], body["attempt"]))

    async def follow(_record: object, sent: list[int], **_more: bool) -> AsyncIterator[tuple[int, int, bytes]]:
        yield 1, sent[0], b"new"

    async def last_lines(*_: object) -> list[int]:
        return [40, 7]

    async def up_to_date(_record: object) -> str:
        return ""

    source = SimpleNamespace(
        bring_up_to_date=up_to_date, last_lines=last_lines, size_now=lambda _record: (40, 7), follow=follow
    )
    request = control.ReadOutput(id=1, task="1", follow=True, tail_lines=0)
    connection = SimpleNamespace(stream=stream)
    work = cast("Any", OutputStream)(source, None, connection, request, None)

    async def story() -> None:
        await work._begin_at_the_last_lines(RECORD, 0)
        await work._send_live(RECORD)
        await work._send_live(RECORD)

    asyncio.run(story())
    assert told == [(1, 40, b"", 2), (2, 7, b"", 2), (1, 40, b"new", 2), (1, 43, b"new", 2)]
