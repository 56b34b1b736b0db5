"""The clocks of one simulated machine: CLOCK_BOOTTIME runs at its own rate and starts anew with each boot; the wall clock
may be stepped and decides nothing."""

from __future__ import annotations

from peerload.model.events import Instant

EPOCH_S = 1_700_000_000.0
"""Unix time at the start of every run."""


class Clock:
    """``rate``: seconds of this clock in a simulated second (1.0 ± its drift); ``base_s``: what it showed at time 0."""

    __slots__ = ("_base_s", "_since_s", "rate", "step_s")

    def __init__(self, rate: float, base_s: float) -> None:
        self.rate = rate
        self.step_s = 0.0
        """By how much the wall clock was set off."""
        self._base_s = base_s
        self._since_s = 0.0

    def boot_s(self, at_s: float) -> float:
        """CLOCK_BOOTTIME at this simulated time."""
        return self._base_s + (at_s - self._since_s) * self.rate

    def at_s(self, boot_s: float) -> float:
        """The simulated time at which this clock shows ``boot_s``."""
        return self._since_s + (boot_s - self._base_s) / self.rate

    def wall_s(self, at_s: float) -> float:
        """Unix time as this machine believes it to be."""
        return EPOCH_S + at_s + self.step_s

    def instant(self, at_s: float) -> Instant:
        """Both."""
        return Instant(self._base_s + (at_s - self._since_s) * self.rate, EPOCH_S + at_s + self.step_s)

    def booted(self, at_s: float, base_s: float) -> None:
        """The machine was started anew."""
        self._base_s, self._since_s = base_s, at_s
