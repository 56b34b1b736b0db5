"""The inbox: order, bounded turns, and what may be dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

from peerload.agent.runtime import TURN_EVENTS_MAX, Inbox
from peerload.model import timers
from peerload.model.events import Event, LoadSampled, MessageReceived, TimerExpired
from peerload.model.messages import GiveReply
from peerload.model.resources import LoadReport
from tests.each import each
from tests.support import PATIENCE_S

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def timer(number: int) -> TimerExpired:
    return TimerExpired(timers.Batch(str(number)))


class Turns:
    """What came in, turn by turn."""

    def __init__(self) -> None:
        self.turns: list[list[Event]] = []
        self._more = asyncio.Event()

    def take(self, events: list[Event]) -> None:
        self.turns.append(events)
        self._more.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.events) < count:
                self._more.clear()
                await self._more.wait()

    @property
    def events(self) -> list[Event]:
        return [event for turn in self.turns for event in turn]


async def consumed(inbox: Inbox, take: Callable[[list[Event]], None]) -> asyncio.Task[None]:
    """Have a consumer take the events of an inbox, and wait until it does."""

    async def run() -> None:
        while True:
            take(await inbox.turn())

    task = asyncio.get_running_loop().create_task(run())
    await asyncio.sleep(0)
    return task


@each("loop_factory", LOOPS)
def test_order_and_bounded_turns(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def story() -> None:
        turns = Turns()
        inbox = Inbox(10_000)
        consumer = await consumed(inbox, turns.take)
        sent = [timer(number) for number in range(1000)]
        between: list[int] = []
        for event in sent:
            inbox.put(event)
        assert turns.turns == [], "never in the middle of somebody else's turn"
        asyncio.get_running_loop().call_soon(lambda: between.append(len(turns.events)))
        await turns.until(1000)
        assert turns.events == sent
        assert max(map(len, turns.turns)) == TURN_EVENTS_MAX
        assert between == [TURN_EVENTS_MAX], "others get their turn between two"
        consumer.cancel()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(story())


def test_what_is_put_while_a_turn_is_taken_comes_in_the_next() -> None:
    async def story() -> None:
        turns = Turns()

        def take(events: list[Event]) -> None:
            turns.take(events)
            if len(turns.turns) < 4:
                inbox.put(timer(len(turns.turns)))

        inbox = Inbox(10)
        consumer = await consumed(inbox, take)
        inbox.put(timer(0))
        await turns.until(4)
        assert turns.turns == [[timer(number)] for number in range(4)]
        consumer.cancel()

    asyncio.run(story())


def test_a_full_inbox_drops_advice_and_samples_alone() -> None:
    async def story() -> None:
        turns = Turns()
        inbox = Inbox(2)
        consumer = await consumed(inbox, turns.take)
        advice = MessageReceived("n2", GiveReply(1, LoadReport()))
        for event in (advice, LoadSampled(1.0, 1.0, 1), advice, LoadSampled(2.0, 2.0, 2), timer(1), timer(2)):
            inbox.put(event)
        assert (inbox.dropped, len(inbox)) == (2, 4)
        await asyncio.sleep(0)
        assert turns.events == [advice, LoadSampled(1.0, 1.0, 1), timer(1), timer(2)]
        inbox.put(advice)
        assert (inbox.dropped, len(inbox)) == (2, 1)
        consumer.cancel()

    asyncio.run(story())


def test_what_comes_before_the_start_is_handed_over_first() -> None:
    async def story() -> None:
        turns = Turns()
        inbox = Inbox(10)
        inbox.put(timer(1))
        await asyncio.sleep(0)
        consumer = await consumed(inbox, turns.take)
        inbox.put(timer(2))
        await turns.until(2)
        assert turns.events == [timer(1), timer(2)]
        consumer.cancel()

    asyncio.run(story())
