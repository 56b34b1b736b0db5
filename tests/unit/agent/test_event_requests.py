"""The verb `events`: what a client that follows some kinds of events is sent, and from which event on it is searched for."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from peerload.agent.requests import task_queries
from peerload.agent.requests.task_queries import EventRequests
from peerload.model.actions import PutEvent
from peerload.wire import control
from tests.support import PATIENCE_S
from tests.unit.agent.test_store import NOW, Opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

NODES = PutEvent(NOW, "node", "alive", node="ws3")
TASKS = PutEvent(NOW, "task", "running", "ws2/1", 1, "ws1")


def test_events_that_do_not_match_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what comes, each event is sent once, also where more match than are read at a time."""
    monkeypatch.setattr(task_queries, "EVENTS_AT_A_TIME", 2)
    rounds = [[TASKS] * 5, [TASKS] * 3 + [NODES] * 3 + [TASKS], [TASKS], [NODES]]
    searched: list[int] = []
    sent: list[int] = []

    async def story() -> None:
        over = asyncio.Event()

        class News(asyncio.Event):
            """Has the next events come when the ones before were handled."""

            async def wait(self) -> Any:
                if not rounds:
                    over.set()
                    await asyncio.Event().wait()
                opened.keep(*rounds.pop(0))

        @contextlib.contextmanager
        def followed() -> Iterator[News]:
            yield News()

        async def readable(*_: object, **__: object) -> None:
            """Always."""

        async def stream(_request: int, body: dict[str, Any]) -> None:
            sent.extend(event["number"] for event in body["events"])

        def events(after: int, *words: Any, **more: Any) -> list[Any]:
            searched.append(after)
            return find(after, *words, **more)

        find = opened.store.events
        monkeypatch.setattr(opened.store, "events", events)
        reads = SimpleNamespace(readable=readable, event_log=SimpleNamespace(followed=followed))
        access = SimpleNamespace(store=lambda _caller: opened.store)
        connection = SimpleNamespace(caller=None, stream=stream)
        work = EventRequests(cast("Any", reads), cast("Any", None), cast("Any", access), "ws1")
        request = control.Events(id=1, follow=True, limit=0, what=("node",))
        async with asyncio.timeout(PATIENCE_S):
            following = asyncio.create_task(work.events(cast("Any", connection), request))
            await over.wait()
            following.cancel()

    with Opened(tmp_path / "db") as opened:
        asyncio.run(story())
    assert sent == [9, 10, 11, 14]
    assert searched == [0, 0, 5, 10, 12, 12, 13, 14]
