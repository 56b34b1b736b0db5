"""The verbs that change something: who waits for an answer, and who does no longer."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from peerload.agent.requests.node_verbs import NodeCommands
from peerload.agent.runtime import CoreRequests
from peerload.model.actions import Answer
from peerload.model.errors import BadRequest
from peerload.model.events import DrainRequested, EmptyAwaited, EmptyAwaitedNoMore, Event
from peerload.wire import control


class Inbox:
    """Puts what is asked to a core that is drained at once, and never empty."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.core: CoreRequests

    def put(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, DrainRequested):
            self.core.answered(Answer(event.request, {"returned": 0, "running": 1}))


class Client:
    """What a client is told."""

    def __init__(self) -> None:
        self.pending = 0
        self.told: list[dict[str, Any]] = []

    def more(self, _number: int, body: dict[str, Any]) -> None:
        self.told.append(body)

    def ok(self, _number: int, body: dict[str, Any]) -> None:
        self.told.append(body)


def _story() -> tuple[NodeCommands, CoreRequests, Inbox, Client]:
    inbox = Inbox()
    inbox.core = CoreRequests(cast("Any", inbox))
    unused: Any = None
    return NodeCommands(inbox.core, unused, unused, unused), inbox.core, inbox, Client()


def _kinds(inbox: Inbox) -> list[type[Event]]:
    return [type(event) for event in inbox.events]


async def _put_to_core(inbox: Inbox) -> None:
    while EmptyAwaited not in _kinds(inbox):  # noqa: ASYNC110 -- nothing tells when
        await asyncio.sleep(0)


def test_a_wait_for_a_drain_that_ran_out_is_withdrawn() -> None:
    changes, pending, inbox, client = _story()
    request: Any = control.Drain(id=1, wait=True, timeout_s=0.01)
    asyncio.run(changes.drain(client, request))  # type: ignore[arg-type]
    assert client.told == [{"returned": 0, "running": 1}, {"timed_out": True}]
    assert _kinds(inbox) == [DrainRequested, EmptyAwaited, EmptyAwaitedNoMore]
    assert inbox.events[1].request == inbox.events[2].request  # type: ignore[union-attr]
    pending.answered(Answer(inbox.events[1].request))  # type: ignore[union-attr]
    assert len(client.told) == 2


def test_a_wait_for_a_drain_ends_with_its_client() -> None:
    changes, _, inbox, client = _story()

    async def test() -> None:
        waits = asyncio.create_task(changes.drain(client, control.Drain(id=1, wait=True)))  # type: ignore[arg-type]
        await _put_to_core(inbox)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)

    asyncio.run(test())
    assert _kinds(inbox) == [DrainRequested, EmptyAwaited, EmptyAwaitedNoMore]


def test_a_wait_that_was_answered_is_not_withdrawn() -> None:
    changes, pending, inbox, client = _story()

    async def test(error: BadRequest | None) -> object:
        inbox.events.clear()
        waits = asyncio.create_task(changes.drain(client, control.Drain(id=1, wait=True)))  # type: ignore[arg-type]
        await _put_to_core(inbox)
        pending.answered(Answer(inbox.events[1].request, error=error))  # type: ignore[union-attr]
        return (await asyncio.gather(waits, return_exceptions=True))[0]

    assert asyncio.run(test(None)) is None
    assert client.told[-1] == {"timed_out": False}
    assert EmptyAwaitedNoMore not in _kinds(inbox)
    assert isinstance(asyncio.run(test(BadRequest("n1 is not drained"))), BadRequest)
    assert EmptyAwaitedNoMore not in _kinds(inbox)
