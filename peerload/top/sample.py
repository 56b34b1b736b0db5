"""Looks at an agent: what it says each second, fetched in one request, and whatever else a view wants of it."""

from __future__ import annotations

import dataclasses
import time

from peerload.client.connection import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, Protocol

    class Source(Protocol):
        """Where samples come from: an agent, or a recording of one."""

        def look(self) -> TopSample:
            """The next one. Raises PeerloadError if the agent does not answer."""

        def close(self) -> None:
            """No more is wanted."""


ENDED_SHOWN_MAX = 100
EVENTS_AT_ONCE_MAX = 200
ENDED_EVER_S = 1e9
ENDED_AGAIN_AFTER = 20.0
"""The ended tasks are not asked for again before so many times as long as the last answer took."""
ANSWERS_WITHIN_S = 5.0
ENDINGS = ("done", "failed", "cancelled")


@dataclasses.dataclass(frozen=True, slots=True)
class TopSample:
    """One look. at: when (Unix s); answer: what the agent said (`overview` of docs/wire.md); ended: the tasks that ended
    last, members of an array that are done or were cancelled as one of each; None if these have not changed."""

    at: float
    answer: dict[str, Any]
    ended: list[dict[str, Any]] | None = None


class LiveSampler:
    """An agent, over its socket. ``at``: the node that is to answer, "" for the one at the socket."""

    def __init__(self, socket_path: str | None, at: str = "", clock: Callable[[], float] = time.time) -> None:
        self._path = socket_path
        self._at = at
        self._clock = clock
        self._client: Client | None = None
        self._revision = ""
        self._last_event = 0
        self._knows_ended = False
        self._ended_from_s = 0.0
        """Before this (monotonic) the ended tasks are not asked for again."""

    def look(self) -> TopSample:
        """Raises PeerloadError; the next look connects anew, and is told everything."""
        try:
            return self._look()
        except BaseException:
            self.close()
            raise

    def _look(self) -> TopSample:
        if self._client is None:
            self._client = Client(self._path, timeout_s=ANSWERS_WITHIN_S)
        client, there = self._client, at(self._at)
        answer = client.call(
            "overview",
            since=self._revision,
            events_after=0 if not self._revision else self._last_event,
            events_max=EVENTS_AT_ONCE_MAX,
            **there,
        )
        events = answer.get("events") or []
        ended = None
        if answer.get("complete") or any(map(is_ending, events)):
            self._knows_ended = False
        if not self._knows_ended and time.monotonic() >= self._ended_from_s:
            began_s = time.monotonic()
            wanted = {"states": ENDINGS, "ended_within_s": ENDED_EVER_S, "limit": ENDED_SHOWN_MAX, "gathered": True}
            ended = client.call("tasks", **wanted, **there)["tasks"]
            self._knows_ended = True
            self._ended_from_s = time.monotonic() + ENDED_AGAIN_AFTER * (time.monotonic() - began_s)
        self._revision = str(answer.get("revision") or "")
        if events:
            self._last_event = int(events[-1].get("number") or 0)
        return TopSample(self._clock(), answer, ended)

    def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._revision, self._ended_from_s = "", 0.0


class RecordedSampler:
    """Samples that were taken before, one a look; then EOFError."""

    def __init__(self, samples: Sequence[TopSample]) -> None:
        self._left: Iterator[TopSample] = iter(samples)

    def look(self) -> TopSample:
        """The next one."""
        for sample in self._left:
            return sample
        raise EOFError

    def close(self) -> None:
        """Play no more."""
        self._left = iter(())


def at(node: str) -> dict[str, str]:
    """The field that has another node answer; none for the one asked."""
    return {"at": node} if node else {}


def is_ending(event: dict[str, Any]) -> bool:
    """Whether a task of this home ended with it."""
    return event.get("what") == "task" and event.get("state") in ENDINGS
