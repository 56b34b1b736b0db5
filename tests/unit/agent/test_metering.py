"""What work takes of the loop is told while it runs, and it is driven as if it were awaited itself."""

from __future__ import annotations

import asyncio
import time

import pytest

from peerload.agent.control.cpu_accounting import MeteredCoroutine


def busy(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        continue


def test_what_it_takes_is_told_and_what_it_waits_is_not() -> None:
    told: list[float] = []

    async def work() -> None:
        busy(0.02)
        await asyncio.sleep(0.2)
        busy(0.02)

    async def story() -> float:
        began_s = time.perf_counter()
        await MeteredCoroutine(work(), told.append)
        return time.perf_counter() - began_s

    took_s = asyncio.run(story())
    assert len(told) == 2
    assert min(told) >= 0.02
    assert sum(told) <= took_s - 0.15


def test_what_it_raises_and_that_it_is_cancelled_goes_through() -> None:
    seen: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("as it is")

    async def waits() -> None:
        try:
            await asyncio.sleep(3600.0)
        finally:
            seen.append("cleaned up")

    async def run(work: MeteredCoroutine) -> None:
        await work

    async def story() -> None:
        with pytest.raises(ValueError, match="as it is"):
            await MeteredCoroutine(fails(), lambda _: None)
        task = asyncio.get_running_loop().create_task(run(MeteredCoroutine(waits(), lambda _: None)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
    assert seen == ["cleaned up"]
