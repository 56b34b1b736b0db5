"""ResponseQueue of several nodes put together, and frames that wait for whoever takes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peerload.agent.forwarding.request_router import merged
from peerload.agent.forwarding.tunnels import FRAME_BYTES_MIN, FRAMES_WAITING_MAX, ResponseQueue
from peerload.model.errors import LinkUnavailable
from tests.each import each
from tests.support import PATIENCE_S


@each(
    ("first", "second", "together"),
    [
        ({}, {"held": ["a"]}, {"held": ["a"]}),
        ({"held": ["a"], "n": 1}, {"held": ["b"], "n": 2.5}, {"held": ["a", "b"], "n": 3.5}),
        ({"timed_out": False}, {"timed_out": True}, {"timed_out": True}),
        (
            {"unfinished": {"queued": 1}},
            {"unfinished": {"queued": 2, "held": 1}},
            {"unfinished": {"queued": 3, "held": 1}},
        ),
        ({"placeable": None}, {"placeable": "no"}, {"placeable": "no"}),
        ({"id": "ws1/1"}, {"id": "ws2/1"}, {"id": "ws1/1"}),
        ({"a": True}, {"a": 7}, {"a": True}),  # of two forms: neither is trusted to be the other's
        ({"a": [1]}, {"a": {"b": 1}}, {"a": [1]}),
        ({"a": 1}, {"a": 2**64 - 1}, {"a": 2**64 - 1}),  # no sum is more than a frame can hold
    ],
)
def test_two_answers_as_one(first: dict[str, Any], second: dict[str, Any], together: dict[str, Any]) -> None:
    assert merged(first, second) == together


def test_frames_wait_and_hold_back_who_brings_them() -> None:
    async def story() -> list[tuple[str, dict[str, Any]]]:
        answers = ResponseQueue()
        for number in range(FRAMES_WAITING_MAX):
            answers.add("more", {"n": number})
        held = asyncio.get_running_loop().create_task(answers.drain())
        await asyncio.sleep(0)
        assert not held.done()
        answers.add("ok", {})
        answers.add("more", {"n": "too late"})
        taken = [frame async for frame in answers]
        await held
        return taken

    taken = asyncio.run(story())
    assert taken == [*(("more", {"n": number}) for number in range(FRAMES_WAITING_MAX)), ("ok", {})]


def test_what_came_before_it_broke_is_taken_first() -> None:
    async def story() -> list[object]:
        answers = ResponseQueue()
        answers.add("more", {"n": 1})
        answers.fail(LinkUnavailable("ws2", "gone"))
        frames = aiter(answers)
        first = await anext(frames)
        with pytest.raises(LinkUnavailable):
            await anext(frames)
        return [first]

    assert asyncio.run(story()) == [("more", {"n": 1})]


def test_who_takes_nothing_any_more_holds_nobody_back() -> None:
    async def story() -> None:
        answers = ResponseQueue()
        for _ in range(FRAMES_WAITING_MAX):
            answers.add("more", {})
        answers.close()
        async with asyncio.timeout(PATIENCE_S):
            await answers.drain()

    asyncio.run(story())


def test_an_empty_frame_is_charged_too() -> None:
    answers = ResponseQueue(10 * FRAME_BYTES_MIN)
    assert [answers.has_budget(size) for size in (0, FRAME_BYTES_MIN, *[1] * 9)] == [True] * 10 + [False]
