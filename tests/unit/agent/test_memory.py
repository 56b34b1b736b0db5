"""Memory of many tasks: frozen while they are there, looked through and given back when they have ended."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent import daemon
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class Cyclic:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    yield
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


def test_many_tasks_are_frozen_and_memory_is_given_back_once_when_most_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon, "MEMORY_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(daemon, "TASKS_FROZEN_MIN", 100)
    tasks: dict[int, Cyclic] = {}
    shrunk: list[int] = []
    node = SimpleNamespace(home=SimpleNamespace(tasks=tasks), shrink=lambda: shrunk.append(len(tasks)))

    async def scenario() -> None:
        watching = asyncio.get_running_loop().create_task(daemon.watch_memory(cast("Any", node)))
        before = gc.get_freeze_count()
        tasks.update((number, Cyclic()) for number in range(1000))
        while gc.get_freeze_count() < before + 1000:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)
        for number in range(400):  # most are left
            del tasks[number]
        for _ in range(20):
            await asyncio.sleep(0)
        assert shrunk == []
        for number in range(400, 990):
            del tasks[number]
        while not shrunk:  # noqa: ASYNC110 -- as above
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert shrunk == [10]
        assert sum(isinstance(found, Cyclic) for found in _all()) == 10
        watching.cancel()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def _all() -> list[object]:
    """Every object that the collector knows of, frozen ones too."""
    gc.unfreeze()
    return gc.get_objects()


THREADS_ALLOCATE = """
import sys, threading
from peerload.agent.runtime import share_heap
if sys.argv[1] == "shared":
    share_heap()
barrier = threading.Barrier(8)
def allocate():
    kept = [bytes(2000) for _ in range(100)]
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
regions = [line.split()[:2] for line in open("/proc/self/maps")]
regions = [(*(int(end, 16) for end in place.split("-")), rights) for place, rights in regions]
heaps = 0
for (start, end, rights), (rest, rest_end, rest_rights) in zip(regions, regions[1:]):
    heaps += (rights, rest_rights) == ("rw-p", "---p") and end == rest and rest_end - start == 64 << 20
print(heaps)
"""
"""Prints the number of heaps of threads: for each, glibc reserves 64 MiB, of which it uses the beginning."""


def heaps_of_threads(form: str) -> int:
    done = subprocess.run([sys.executable, "-c", THREADS_ALLOCATE, form], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_threads_share_one_heap() -> None:
    assert heaps_of_threads("shared") == 0
    assert heaps_of_threads("own") > 1
