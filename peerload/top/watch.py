"""The threads beside the view: one takes samples, two fetch output and usage, short ones carry out what takes time.

They end with the program, wherever they are: nobody waits for an agent that does not answer in order to quit.
"""

from __future__ import annotations

import threading
import time

from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError
from peerload.top.model import ANSWERS_WITHIN_S, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from peerload.top.model import Source

EVERY_S = 1.0
AGENT_SHARE_MAX = 0.01
"""An agent whose answers take more than this share of its time is asked less often."""
USED_WITHIN_S = 1.5
"""Patience with a node that is asked what its tasks use."""
AWAY_S = 15.0
"""A node that did not answer that is not asked again before this."""
PAUSE_S_MAX = 5.0
PAUSE_S_MIN = 0.2
"""Pause between two samples, however long the first one took."""


def reason(error: BaseException) -> str:
    """The error on one line."""
    why = str(getattr(error, "why", "") or "")
    what = str(getattr(error, "what", "") or error)
    return f"{what.rstrip('.')} ({why})" if why else what.rstrip(".")


class Watcher(threading.Thread):
    """A thread that does ``work`` and ends with the program. ``broke(error)`` is called for a bug in it, which must not pass unseen."""

    def __init__(self, name: str, work: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._broke = broke

    def run(self) -> None:
        """Work to the end."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 -- whatever it is, whoever looks is told
            self._broke(error)


class Sampler(Watcher):
    """Takes a sample each second. ``took(sample)`` and ``lost(why, at)`` are called from this thread."""

    def __init__(
        self, source: Source, took: Callable[..., None], lost: Callable[..., None], broke: Callable[[Exception], None]
    ) -> None:
        super().__init__("sampler", self._sample, broke)
        self._source = source
        self._took, self._lost = took, lost
        self._ended = threading.Event()
        self._hurry = threading.Event()
        self._goes = threading.Event()
        self._goes.set()

    def _sample(self) -> None:
        source = self._source
        while not self._ended.is_set():
            began_s, every_s = time.monotonic(), EVERY_S
            source = self._source
            try:
                sample = source.look()
            except PeerloadError as error:
                self._lost(reason(error), time.time())
            else:
                every_s = min(max(EVERY_S, number(sample.answer.get("took_s")) / AGENT_SHARE_MAX), PAUSE_S_MAX)
                if source is self._source:
                    self._took(sample)
            self._hurry.wait(max(every_s - (time.monotonic() - began_s), PAUSE_S_MIN))
            self._goes.wait()
            self._hurry.clear()
        source.close()

    def pause(self, *, is_paused: bool) -> None:
        """Take no samples until this is called again; the next one has what has changed meanwhile."""
        if is_paused:
            self._goes.clear()
        else:
            self._goes.set()
            self._hurry.set()

    def switch(self, source: Source) -> None:
        """Sample another agent from now on."""
        self._source = source
        self._hurry.set()

    def hurry(self) -> None:
        """Take a sample at once: something was changed."""
        self._hurry.set()

    def end(self) -> None:
        """Take no more."""
        self._ended.set()
        self._hurry.set()
        self._goes.set()


class Poller(Watcher):
    """Calls ``fetch(wanted)`` when something else is wanted, and again each second as long as ``repeats(wanted)``."""

    def __init__(
        self,
        name: str,
        fetch: Callable[[Any], None],
        repeats: Callable[[Any], object],
        broke: Callable[[Exception], None],
    ) -> None:
        super().__init__(name, self._poll, broke)
        self._fetch, self._repeats = fetch, repeats
        self._news = threading.Condition()
        self._wanted: Any = None
        self._is_new = self._is_over = False

    def want(self, wanted: object) -> None:
        """Fetch this from now on."""
        with self._news:
            if wanted != self._wanted:
                self._wanted, self._is_new = wanted, True
                self._news.notify()

    def end(self) -> None:
        """Fetch no more."""
        with self._news:
            self._is_over = True
            self._news.notify()

    def _poll(self) -> None:
        while True:
            with self._news:
                while not self._is_over and not self._is_new:
                    repeats = self._wanted is not None and self._repeats(self._wanted)
                    if not self._news.wait(EVERY_S if repeats else None):
                        break
                if self._is_over:
                    return
                self._is_new = False
                wanted = self._wanted
            self._fetch(wanted)


def read_tail(socket_path: str | None, wanted: tuple[str, int, bool], took: Callable[..., None]) -> None:
    """Fetch the end of a task's output. ``wanted``: task, bytes, whether it grows; ``took(task, pieces, why_none)`` gets it."""
    task, tail_bytes, _ = wanted
    if not task:
        return
    try:
        with AgentConnection(socket_path, timeout_s=ANSWERS_WITHIN_S) as client:
            pieces = [piece for piece in client.stream("output", task=task, tail_bytes=tail_bytes) if "data" in piece]
    except PeerloadError as error:
        took(task, [], reason(error))
    else:
        took(task, pieces, "")


class UsageReader:
    """Asks nodes what their tasks use. ``used(tasks)`` gets each answer."""

    def __init__(self, socket_path: str | None, used: Callable[..., None]) -> None:
        self._path = socket_path
        self._used = used
        self._not_before_s: dict[str, float] = {}

    def read(self, wanted: dict[str, list[str]]) -> None:
        """Ask each node for its tasks. A node that is away is not asked again for a while."""
        for node, tasks in wanted.items():
            if time.monotonic() < self._not_before_s.get(node, 0.0):
                continue
            try:
                with AgentConnection(self._path, timeout_s=USED_WITHIN_S) as client:
                    self._used(client.call("usage", at=node, tasks=tasks)["tasks"])
            except PeerloadError:
                self._not_before_s[node] = time.monotonic() + AWAY_S
        time.sleep(PAUSE_S_MIN)  # however fast somebody scrolls
