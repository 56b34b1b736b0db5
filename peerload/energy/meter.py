"""Joules from what sensors tell: counters that wrap and restart, and power over time. Pure.

What is not known is a gap, never zero and never a guess: a counter that went faster than anything the machine can draw, one
that may have wrapped more than once, one that began anew.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

JUMP_TDPS = 2.0
"""A counter that goes faster than so many times the rated power has jumped."""
WATTS_MAX = 1000.0
"""Taken for the rated power of a zone that does not tell it: no processor package draws more."""
HOLD_S = 35.0
"""A reading of power holds no longer than this; then it is not known."""
IDLE_NEAR = 0.02
"""Loads this close to the lowest that was seen count as idle, too."""
IDLE_WEIGHT = 0.05
DRIFT_MAX = 0.10
DRIFT_S = 600.0
DRIFT_EVERY_S = 10.0


class Counted(NamedTuple):
    """Joules since the reading before, and for how long of that time nothing is known."""

    joules: float = 0.0
    gap_s: float = 0.0


class Counter(msgspec.Struct):
    """Counter of joules. value_j: its last reading, at ``at_s`` by a clock that never steps; None: there is none yet."""

    value_j: float | None = None
    at_s: float = 0.0

    def take(self, at_s: float, value_j: float | None, range_j: float = 0.0, tdp_w: float = 0.0) -> Counted:
        """Take a reading. value_j: None where it cannot be read, which the next one makes up for; range_j: it wraps
        there, 0 = never; tdp_w: rated power, 0 = not known."""
        if value_j is None or not math.isfinite(value_j) or value_j < 0:
            return Counted()
        before_j, passed_s = self.value_j, at_s - self.at_s
        self.value_j, self.at_s = value_j, at_s
        if before_j is None or passed_s <= 0:
            return Counted()
        joules = value_j - before_j
        if joules < 0:
            if not before_j < range_j:  # it has no end, or another one by now: it began anew
                return Counted(gap_s=passed_s)
            joules += range_j
        rated_w = tdp_w or WATTS_MAX
        may_have_wrapped_again = range_j > 0 and joules + range_j <= rated_w * passed_s
        if may_have_wrapped_again or joules > JUMP_TDPS * rated_w * passed_s:
            return Counted(gap_s=passed_s)
        return Counted(joules)


class Integral(msgspec.Struct):
    """Integral of power that is read now and then: each reading holds until the next, for HOLD_S at most."""

    watts: float = 0.0
    read_s: float = -math.inf
    at_s: float | None = None
    joules: float = 0.0
    gap_s: float = 0.0

    def read(self, at_s: float, watts: float) -> None:
        """Take a reading of the sensor."""
        self._advance(at_s)
        self.watts, self.read_s = watts, at_s

    def take(self, at_s: float) -> Counted:
        """Joules since this was last asked."""
        self._advance(at_s)
        told = Counted(self.joules, self.gap_s)
        self.joules = self.gap_s = 0.0
        return told

    def _advance(self, at_s: float) -> None:
        before_s = at_s if self.at_s is None else self.at_s
        if at_s >= before_s:
            known_s = min(max(self.read_s + HOLD_S - before_s, 0.0), at_s - before_s)
            self.joules += self.watts * known_s
            self.gap_s += at_s - before_s - known_s
            self.at_s = at_s


class IdlePower(msgspec.Struct):
    """Power of an idle machine of which no curve was measured: what it drew at the lowest load that was seen, less what a
    typical machine draws for that load. share: that load, 0 … 1."""

    watts: float = 0.0
    share: float = math.inf

    def take(self, watts: float, share: float, idle_ratio: float) -> None:
        """Take a window. idle_ratio: idle power over power at this load, of a typical machine."""
        if share > self.share + IDLE_NEAR:
            return
        weight = IDLE_WEIGHT if share >= self.share - IDLE_NEAR else 1.0
        self.watts += weight * (watts * idle_ratio - self.watts)
        self.share = min(self.share, share)


class Drift(msgspec.Struct):
    """Drift of measured power from a power curve: the ratio of both over DRIFT_EVERY_S, and for how long it was more than
    DRIFT_MAX off."""

    measured_j: float = 0.0
    expected_j: float = 0.0
    seconds: float = 0.0
    off_s: float = 0.0

    def take(self, joules: float, expected_j: float, seconds: float) -> bool:
        """Take a window → whether the curve is stale."""
        self.measured_j += joules
        self.expected_j += expected_j
        self.seconds += seconds
        if self.seconds >= DRIFT_EVERY_S:
            is_off = abs(self.measured_j - self.expected_j) > DRIFT_MAX * self.expected_j
            self.off_s = self.off_s + self.seconds if is_off else 0.0
            self.measured_j = self.expected_j = self.seconds = 0.0
        return self.off_s >= DRIFT_S
