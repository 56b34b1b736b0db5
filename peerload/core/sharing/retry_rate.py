"""Retry rate: how often something is repeated "per mean service time", by chance (docs/policies.md, live rules)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.core.state import CoreState


class RetryRate:
    """Pauses between retries, from the learned durations of tasks here."""

    __slots__ = ("_state",)

    def __init__(self, state: CoreState) -> None:
        self._state = state

    @property
    def mean_s(self) -> float:
        """The mean of the last durations_kept_max durations seen, in seconds of this node."""
        return self._state.history.mean_s / self._state.profile.speed

    def pause_s(self, rate: float) -> float:
        """Until the next time, at so many a mean service time: by chance, so that nodes do not act in step; at least
        retry_s_min, at most retry_s_max, since tasks of hours must not mean hours of silence."""
        config = self._state.config
        pause_s = self.mean_s / rate * self._state.rng.expovariate(1.0)
        return min(max(pause_s, config.retry_s_min), config.retry_s_max)
