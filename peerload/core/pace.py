"""How long tasks take here, and how often something is done "per mean service time" (docs/policies.md, live rules)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.core.state import CoreState

MEAN_S_AT_FIRST = 1.0


class Pace:
    """The durations of the last durations_kept_max tasks that ended here, in seconds."""

    __slots__ = ("_durations", "_state", "_sum_s")

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._durations: deque[float] = deque(maxlen=state.config.durations_kept_max)
        self._sum_s = 0.0

    def ended(self, duration_s: float) -> None:
        """One more."""
        self._durations.append(duration_s)
        self._sum_s = sum(self._durations)

    @property
    def mean_s(self) -> float:
        """Their mean, one second while there are none."""
        return self._sum_s / len(self._durations) if self._durations else MEAN_S_AT_FIRST

    def pause_s(self, rate: float) -> float:
        """Until the next time, at so many a mean service time: by chance, so that nodes do not act in step; at least
        retry_s_min, at most retry_s_max, since tasks of hours must not mean hours of silence."""
        config = self._state.config
        pause_s = self.mean_s / rate * self._state.rng.expovariate(1.0)
        return min(max(pause_s, config.retry_s_min), config.retry_s_max)
