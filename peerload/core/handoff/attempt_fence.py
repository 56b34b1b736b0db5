"""Fencing of attempts (R7): per task the highest attempt that this node has started or refused, and will never start
(again).

A fence is durable before what it promises is said or done (D3, D6). No message is late by more than seconds, so a fence
that was of no use for floor_kept_s may go: what it refuses, the nonce of a COMMIT refuses as well. Kept for longer are
those of attempts that were started of tasks that may run once only, until their home has taken note of their end: their
home would take a forgotten start for a task that was never started.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from peerload.model import timers
from peerload.model.actions import DropFloors, PutFloor
from peerload.model.task import FenceKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from peerload.core.state import CoreState
    from peerload.core.work import RemoteTask

DROPPED_AT_ONCE_MAX = 1000
"""Floors that one event forgets: a row each in one commit."""
DROP_AGAIN_S = 1.0


class AttemptFence(NamedTuple):
    """``at_s``: this node's clock when it was last of use; ``home``: whose task it is, "" if nobody knows."""

    attempt: int
    kind: FenceKind
    at_s: float
    home: str


class AttemptFences:
    """The fences by uid, the one that was longest of no use first; its timer is ``floors``. here: the attempts that are on
    this node now, by uid."""

    def __init__(self, state: CoreState, here: Mapping[bytes, RemoteTask]) -> None:
        self._state = state
        self._here = here
        self._fences: dict[bytes, AttemptFence] = {}

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._fences

    def __len__(self) -> int:
        return len(self._fences)

    def restore(self, fences: Iterable[tuple[bytes, int, FenceKind, str]]) -> None:
        """As they were durable, at start; each is kept as if it had been of use just now."""
        now_s = self._state.now.boot_s
        self._fences.update((uid, AttemptFence(attempt, kind, now_s, home)) for uid, attempt, kind, home in fences)

    def attempt(self, uid: bytes) -> int:
        """The fence itself; 0: there is none."""
        fence = self._fences.get(uid)
        return fence.attempt if fence is not None else 0

    def home(self, uid: bytes) -> str:
        """The home of the task; "": not known."""
        fence = self._fences.get(uid)
        return fence.home if fence is not None else ""

    def was_refused(self, uid: bytes, attempt: int) -> bool:
        """True if this very attempt was refused: then it has never started here."""
        fence = self._fences.get(uid)
        return fence is not None and fence.attempt == attempt and fence.kind is FenceKind.REFUSED

    def row(self, uid: bytes, attempt: int, kind: FenceKind, home: str) -> PutFloor:
        """Raise the fence (or say otherwise why it is there) → what is to be made durable. Where there are too many, the
        oldest are forgotten."""
        now = self._state.now
        self._fences.pop(uid, None)  # so that it comes last
        self._bound()
        self._fences[uid] = AttemptFence(attempt, kind, now.boot_s, home)
        return PutFloor(uid, attempt, now.wall_s, kind, home)

    def raise_to(self, uid: bytes, attempt: int, kind: FenceKind, home: str) -> None:
        """Raise the fence durably; it never sinks."""
        if self.attempt(uid) < attempt:
            self._state.persist(self.row(uid, attempt, kind, home))

    def found_running(self, key: str) -> None:
        """The launcher has an attempt that nobody here knows (the database was lost): it has started, whatever comes."""
        uid, _, attempt = key.rpartition("-")
        with contextlib.suppress(ValueError):
            self.raise_to(bytes.fromhex(uid), int(attempt), FenceKind.STARTED, self.home(bytes.fromhex(uid)))

    def noted(self, uid: bytes, attempt: int) -> None:
        """The home has taken note of the end of an attempt that may run once only."""
        fence = self._fences.get(uid)
        if fence is not None and fence.attempt == attempt and fence.kind is FenceKind.STARTED_ONCE:
            self._state.persist(self.row(uid, attempt, FenceKind.STARTED, fence.home))

    def expire(self) -> None:
        """Drop fences that have been of no use for floor_kept_s."""
        now_s, kept_s = self._state.now.boot_s, self._state.config.floor_kept_s
        self._drop(now_s - kept_s)
        oldest = next(iter(self._fences.values()), None)
        left_s = oldest.at_s + kept_s - now_s if oldest is not None else kept_s
        self._state.set_timer_in(max(left_s, DROP_AGAIN_S), timers.Fences())

    def _bound(self) -> None:
        if len(self._fences) >= self._state.config.floors_kept_max + DROPPED_AT_ONCE_MAX:
            self._drop(self._state.now.boot_s)

    def _drop(self, before_s: float) -> None:
        """Drop fences of no use since then, DROPPED_AT_ONCE_MAX at most; those that are still needed come last again."""
        gone: list[bytes] = []
        for _ in range(min(DROPPED_AT_ONCE_MAX, len(self._fences))):
            uid, fence = next(iter(self._fences.items()))
            if fence.at_s > before_s:
                break
            del self._fences[uid]
            if fence.kind is FenceKind.STARTED_ONCE or uid in self._here:
                self._fences[uid] = fence._replace(at_s=self._state.now.boot_s)
            else:
                gone.append(uid)
        if gone:
            self._state.persist(DropFloors(tuple(gone)))
