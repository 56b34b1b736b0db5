"""The agent's thread pool where no thread can be made, from the start or for a while."""

from __future__ import annotations

import asyncio
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from peerload.agent.runtime import Workers
from peerload.agent.store.disk_space import DiskReserve
from peerload.agent.store.maintenance import CommitProbe
from peerload.agent.store.store import Store
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Limit:
    """How many more threads can be made."""

    def __init__(self) -> None:
        self.left = 0
        self._start = threading.Thread.start

    def start(self, thread: threading.Thread) -> None:
        if self.left <= 0:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        self._start(thread)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    made = Limit()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: made.start(thread))  # noqa: PLW0108 -- it is given the thread
    return made


@pytest.fixture
def workers(limit: Limit) -> Iterator[Callable[[int], Workers]]:
    made: list[Workers] = []

    def make(threads: int) -> Workers:
        limit.left = threads
        made.append(Workers(count=3))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def where() -> str:
    return threading.current_thread().name


def fails() -> None:
    raise ValueError("its own")


def test_the_threads_are_there_from_the_start(workers: Callable[[int], Workers], limit: Limit) -> None:
    pool = workers(3)
    assert limit.left == 0
    assert {pool.submit(where).result(60) for _ in range(10)} == {"worker"}
    assert isinstance(pool.submit(fails).exception(60), ValueError)


def test_without_a_single_thread_work_is_done_by_who_asks_for_it_until_there_is_one(
    workers: Callable[[int], Workers], limit: Limit
) -> None:
    pool = workers(0)
    assert pool.submit(where).result(0) == threading.main_thread().name
    assert isinstance(pool.submit(fails).exception(0), ValueError)
    limit.left = 1
    assert pool.submit(where).result(60) == "worker"


def test_the_event_loop_waits_for_it_as_for_its_own(workers: Callable[[int], Workers]) -> None:
    with asyncio.Runner() as runner:
        assert runner.run(ask_with(workers(2))) == "worker"


async def ask_with(pool: Workers) -> str:
    return await asyncio.get_running_loop().run_in_executor(pool, where)


def test_the_store_keeps_rows_without_a_thread_of_its_own(tmp_path: Path, limit: Limit) -> None:
    store = Store(tmp_path / "db", "n", DiskReserve(tmp_path / "reserve", 0))
    store.open()
    done: list[str] = []
    failed: list[Exception] = []
    owner: Any = SimpleNamespace(committed=lambda calls: [call() for call in calls].clear(), failed=failed.append)
    try:
        store.start_writer(owner)
        store.persist([CommitProbe(1.0)], lambda: done.append("in the caller's"))
        assert done == ["in the caller's"]
        limit.left = 1
        written = threading.Event()
        store.persist([CommitProbe(2.0)], written.set)
        assert written.wait(60)
        assert limit.left == 0
    finally:
        store.close()
    assert not failed


class Large:
    """Something that can be looked for."""


def test_an_idle_thread_holds_neither_arguments_nor_result_of_its_last_work() -> None:
    workers = Workers(1)
    given = Large()
    made = workers.submit(lambda _: Large(), given).result()
    there = [weakref.ref(given), weakref.ref(made)]
    del given, made
    wait_until(lambda: not any(one() for one in there), what="both to be gone")
    workers.shutdown()


def test_an_end_with_a_bound_does_not_wait_for_work_that_takes_longer() -> None:
    workers, go = Workers(1, end_s=0.01), threading.Event()
    done = workers.submit(go.wait)
    workers.shutdown()
    assert not done.done()
    go.set()
    assert done.result(60)
