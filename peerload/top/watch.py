"""The threads beside the view: one takes samples, one fetches output, and short ones carry out what takes time.

They end with the program, wherever they are: nobody waits for an agent that does not answer in order to quit.
"""

from __future__ import annotations

import threading
import time

from peerload.client.connection import Client
from peerload.model.errors import PeerloadError
from peerload.top.model import ANSWERS_WITHIN_S, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from peerload.top.model import Source, TopSample

EVERY_S = 1.0
AGENT_SHARE_MAX = 0.01
"""An agent with so much to look through that this part of its time would not do is asked less often."""
USED_WITHIN_S = 1.5
"""What a task uses is told by its node within this, or not at all."""
AWAY_S = 15.0
"""A node that did not tell what tasks use is not asked for it again before that."""
PAUSE_S_MAX = 5.0
PAUSE_S_MIN = 0.2
"""Between two looks, however long the first took."""


def reason(error: BaseException) -> str:
    """What went wrong, on one line."""
    why = str(getattr(error, "why", "") or "")
    what = str(getattr(error, "what", "") or error)
    return f"{what.rstrip('.')} ({why})" if why else what.rstrip(".")


class Watcher(threading.Thread):
    """A thread that ends with the program. ``broke(error)`` is told of a bug of ours in it, which must not pass unseen."""

    def __init__(self, name: str, broke: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._broke = broke

    def run(self) -> None:
        """Work to the end."""
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 -- whatever it is, whoever looks is told
            self._broke(error)

    def work(self) -> None:
        """What it is for."""
        raise NotImplementedError


class Sampler(Watcher):
    """Looks once a second. ``took(sample)`` and ``lost(why, at)`` are called from this thread."""

    def __init__(
        self,
        source: Source,
        took: Callable[[TopSample], None],
        lost: Callable[[str, float], None],
        broke: Callable[[Exception], None],
    ) -> None:
        super().__init__("sampler", broke)
        self._source = source
        self._took, self._lost = took, lost
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._hurry = threading.Event()
        self._goes = threading.Event()
        self._goes.set()

    def work(self) -> None:
        """Until `end`, or until a recording is at its end."""
        source = self._source
        while not self._ended.is_set():
            began_s, every_s = time.monotonic(), EVERY_S
            with self._lock:
                source = self._source
            try:
                sample = source.look()
            except PeerloadError as error:
                self._lost(reason(error), time.time())
            except EOFError:
                return
            else:
                every_s = min(max(EVERY_S, number(sample.answer.get("took_s")) / AGENT_SHARE_MAX), PAUSE_S_MAX)
                if source is self._source:
                    self._took(sample)
            took_s = time.monotonic() - began_s
            self._hurry.wait(max(every_s - took_s, PAUSE_S_MIN))
            self._goes.wait()
            self._hurry.clear()
        source.close()

    def pause(self, *, is_paused: bool) -> None:
        """Look no more until this is called again; the next look tells what has changed meanwhile."""
        if is_paused:
            self._goes.clear()
        else:
            self._goes.set()
            self._hurry.set()

    def switch(self, source: Source) -> None:
        """Look at another agent from now on."""
        with self._lock:
            self._source = source
        self._hurry.set()

    def hurry(self) -> None:
        """Look again at once: something was changed."""
        self._hurry.set()

    def end(self) -> None:
        """No more."""
        self._ended.set()
        self._hurry.set()
        self._goes.set()


class TailWatcher(Watcher):
    """Fetches the end of one task's output each second, as long as it may grow. ``took(task, pieces, at)`` and
    ``failed(task, why)`` are called from this thread."""

    def __init__(
        self,
        socket_path: str | None,
        took: Callable[[str, list[dict[str, Any]], float], None],
        failed: Callable[[str, str], None],
        broke: Callable[[Exception], None],
    ) -> None:
        super().__init__("tail", broke)
        self._path = socket_path
        self._took, self._failed = took, failed
        self._news = threading.Condition()
        self._wanted: tuple[str, int, bool] = ("", 0, False)
        self._is_new = False
        self._ended = False

    def want(self, task: str, tail_bytes: int, *, grows: bool) -> None:
        """From now on this task's, "" for none; one that does not grow is fetched once."""
        wanted = (task, tail_bytes, grows)
        with self._news:
            if wanted != self._wanted:
                self._wanted, self._is_new = wanted, True
                self._news.notify()

    def end(self) -> None:
        """No more."""
        with self._news:
            self._ended = True
            self._news.notify()

    def work(self) -> None:
        """Until `end`."""
        while True:
            with self._news:
                while not self._ended and not self._is_new:
                    grows = self._wanted[0] and self._wanted[2]
                    if not self._news.wait(EVERY_S if grows else None):
                        break
                if self._ended:
                    return
                self._is_new = False
                task, tail_bytes, _ = self._wanted
            if task:
                self._fetch(task, tail_bytes)

    def _fetch(self, task: str, tail_bytes: int) -> None:
        try:
            with Client(self._path, timeout_s=ANSWERS_WITHIN_S) as client:
                pieces = [
                    piece for piece in client.stream("output", task=task, tail_bytes=tail_bytes) if "data" in piece
                ]
        except PeerloadError as error:
            self._failed(task, reason(error))
        else:
            self._took(task, pieces, time.time())


class UsageWatcher(Watcher):
    """Asks nodes each second what tasks use. ``used(tasks)`` is called from this thread."""

    def __init__(
        self,
        socket_path: str | None,
        used: Callable[[list[dict[str, Any]]], None],
        broke: Callable[[Exception], None],
    ) -> None:
        super().__init__("usage", broke)
        self._path = socket_path
        self._used = used
        self._ended = threading.Event()
        self._news = threading.Event()
        self._wanted: dict[str, list[str]] = {}
        self._not_before_s: dict[str, float] = {}

    def want(self, tasks: dict[str, list[str]]) -> None:
        """From now on of these: node → tasks that run there."""
        is_other = tasks != self._wanted
        self._wanted = tasks
        if is_other and tasks:
            self._news.set()

    def end(self) -> None:
        """No more."""
        self._ended.set()
        self._news.set()

    def work(self) -> None:
        """Until `end`."""
        while not self._ended.is_set():
            self._news.clear()
            began_s = time.monotonic()
            for node, tasks in self._wanted.items():
                if not self._ended.is_set() and time.monotonic() >= self._not_before_s.get(node, 0.0):
                    self._measure(node, tasks)
            self._ended.wait(PAUSE_S_MIN)
            self._news.wait(max(EVERY_S - (time.monotonic() - began_s), 0.0) if self._wanted else None)

    def _measure(self, node: str, tasks: list[str]) -> None:
        """Where the node is away, or of an earlier version, it is not told, and not asked for a while."""
        try:
            with Client(self._path, timeout_s=USED_WITHIN_S) as client:
                told = client.call("usage", at=node, tasks=tasks)["tasks"]
        except PeerloadError:
            self._not_before_s[node] = time.monotonic() + AWAY_S
        else:
            self._used(told)


class Once(Watcher):
    """Does one thing."""

    def __init__(self, work: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        super().__init__("request", broke)
        self._work = work

    def work(self) -> None:
        """That one thing."""
        self._work()
