"""Accounting of energy: joules from sensor readings, and tasks + other + idle = node. Pure.

Unknown energy is a gap, never zero and never a guess. Its causes: a counter that rose faster than the machine can draw, that may
have wrapped more than once, or that was reset.

The idle joules of a window are those that the machine would have drawn without load. The rest is divided by processor time among
the tasks and ``other``, which is everything else; the joules of a GPU among the processes on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from peerload.model.resources import Quality

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


WATTS_MAX = 1000.0
"""Assumed rated power of a zone without one: no processor package draws more. A counter that goes faster has jumped; for a while
processors draw several times their rated power."""
HOLD_S = 35.0
"""Maximum age of a power reading; after that the power is unknown."""
IDLE_NEAR = 0.02
"""Loads this close to the lowest observed one also count as idle."""
IDLE_WEIGHT = 0.05
DRIFT_MAX = 0.10
DRIFT_S = 600.0
DRIFT_EVERY_S = 10.0


class EnergyDelta(NamedTuple):
    """Joules since the previous reading, and seconds of that time with unknown energy."""

    joules: float = 0.0
    gap_s: float = 0.0


class Counter(msgspec.Struct):
    """Counter of joules. value_j: the last reading, at ``at_s`` of a monotonic clock; None before the first."""

    value_j: float | None = None
    at_s: float = 0.0

    def take(self, at_s: float, value_j: float | None, range_j: float = 0.0, tdp_w: float = 0.0) -> EnergyDelta:
        """Add a reading. value_j: None if it cannot be read (the next reading compensates); range_j: value at which it wraps,
        0 = never; tdp_w: rated power, 0 = not known."""
        if value_j is None or not math.isfinite(value_j) or value_j < 0:
            return EnergyDelta()
        before_j, passed_s = self.value_j, at_s - self.at_s
        self.value_j, self.at_s = value_j, at_s
        if before_j is None or passed_s <= 0:
            return EnergyDelta()
        joules = value_j - before_j
        if joules < 0:
            if not before_j < range_j:  # without a wrap, or after a change of the range, it was reset
                return EnergyDelta(gap_s=passed_s)
            joules += range_j
        rated_w = tdp_w or WATTS_MAX
        may_have_wrapped_again = range_j > 0 and joules + range_j <= rated_w * passed_s
        if may_have_wrapped_again or joules > max(rated_w, WATTS_MAX) * passed_s:
            return EnergyDelta(gap_s=passed_s)
        return EnergyDelta(joules)


class Integral(msgspec.Struct):
    """Integral of power that is read at intervals: each reading is valid until the next, for HOLD_S at most."""

    watts: float = 0.0
    read_s: float = -math.inf
    at_s: float | None = None
    joules: float = 0.0
    gap_s: float = 0.0

    def read(self, at_s: float, watts: float) -> None:
        self._advance(at_s)
        self.watts, self.read_s = watts, at_s

    def take(self, at_s: float) -> EnergyDelta:
        """Joules since the last call."""
        self._advance(at_s)
        told = EnergyDelta(self.joules, self.gap_s)
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
    """Idle power of a machine without a measured curve: its power at the lowest observed load, scaled by the ratio of a typical
    machine at that load. share: that load, 0 … 1; above 1 before the first window."""

    watts: float = 0.0
    share: float = 2.0

    def take(self, watts: float, share: float, idle_ratio: float) -> None:
        """Add a window. idle_ratio: idle power over power at this load, of a typical machine."""
        if share > self.share + IDLE_NEAR:
            return
        weight = IDLE_WEIGHT if share >= self.share - IDLE_NEAR else 1.0
        self.watts += weight * (watts * idle_ratio - self.watts)
        self.share = min(self.share, share)


class Drift(msgspec.Struct):
    """Drift of measured power from a power curve: both over DRIFT_EVERY_S, and the time for which they differed by more than
    DRIFT_MAX."""

    measured_j: float = 0.0
    expected_j: float = 0.0
    seconds: float = 0.0
    off_s: float = 0.0

    def take(self, joules: float, expected_j: float, seconds: float) -> bool:
        """Add a window → True if the curve is stale."""
        self.measured_j += joules
        self.expected_j += expected_j
        self.seconds += seconds
        if self.seconds >= DRIFT_EVERY_S:
            is_off = abs(self.measured_j - self.expected_j) > DRIFT_MAX * self.expected_j
            self.off_s = self.off_s + self.seconds if is_off else 0.0
            self.measured_j = self.expected_j = self.seconds = 0.0
        return self.off_s >= DRIFT_S


BUCKET_S = 60.0
ENDED_KEPT_MAX = 256
"""Maximum number of ended attempts with stored joules, since exits are reported again after a restart."""
JOULES_PER_WH = 3600.0


class DomainEnergy(NamedTuple):
    """Joules of one power domain (the host, or a GPU) in a window. used: processor seconds of each attempt, or its share of a
    device; busy: the same of all processes; idle_w: idle power; gap_s: seconds of unknown energy."""

    scope: str
    source: str
    quality: Quality
    joules: float
    gap_s: float
    idle_w: float
    used: Mapping[str, float]
    busy: float

    def known_s(self, seconds: float) -> float:
        """Seconds of the window with known energy. The gap may exceed the window if the sensor was silent before."""
        return seconds - self.gap_s if self.gap_s < seconds else seconds * (self.joules > 0)

    def idle_j(self, seconds: float) -> float:
        """Idle joules of the window."""
        return min(self.idle_w * self.known_s(seconds), self.joules)

    def joules_of(self, key: str, seconds: float) -> float:
        """Joules of an attempt."""
        everybody = max(self.busy, sum(self.used.values()))
        return (self.joules - self.idle_j(seconds)) * self.used[key] / everybody if everybody > 0 else 0.0


class Totals(msgspec.Struct, omit_defaults=True):
    """Joules of a node from ``since`` to ``until`` (Unix s)."""

    since: float
    until: float
    joules: float = 0.0
    tasks_joules: float = 0.0
    other_joules: float = 0.0
    idle_joules: float = 0.0
    gap_s: float = 0.0
    quality: Quality = Quality.MEASURED
    scope: str = ""
    source: str = ""

    def add(self, other: Totals) -> None:
        """Add joules of another period; the quality is the worse of both."""
        self.since, self.until = min(self.since, other.since), max(self.until, other.until)
        self.joules += other.joules
        self.tasks_joules += other.tasks_joules
        self.other_joules += other.other_joules
        self.idle_joules += other.idle_joules
        self.gap_s += other.gap_s
        self.quality = Quality.worst((self.quality, other.quality))
        self.scope, self.source = joined(self.scope, other.scope), joined(self.source, other.source)


class TaskEnergy(msgspec.Struct, omit_defaults=True):
    """Joules of an attempt so far, for ``cpu_s`` processor seconds. device_w: power of its devices in the last window; is_known: at
    least one window had known joules."""

    cpu_s: float = 0.0
    joules: float = 0.0
    device_w: float = 0.0
    quality: Quality = Quality.DERIVED
    scope: str = ""
    is_known: bool = False


class EnergyAccount(msgspec.Struct):
    """Account of one node, which survives restarts. rate: joules per processor second in the last window; owed: processor seconds of
    ended attempts that no window has included yet."""

    rate: float | None = None
    scope: str = ""
    quality: Quality = Quality.ESTIMATED
    at_s: float = 0.0
    tasks: dict[str, TaskEnergy] = {}
    ended: dict[str, TaskEnergy] = {}
    owed: dict[str, float] = {}

    def used_since(self, cpu_s: Mapping[str, float]) -> dict[str, float]:
        """Processor seconds of each attempt since the last window: of running ones from their totals,
        which never fall, and the owed ones of ended attempts."""
        used = dict(self.owed)
        for key, now_s in cpu_s.items():
            if key in self.ended:  # the attempt ended while the launcher answered
                continue
            task = self.tasks.setdefault(key, TaskEnergy())
            used[key] = max(now_s - task.cpu_s, 0.0)
            task.cpu_s = max(now_s, task.cpu_s)
        self.owed = {}
        return used

    def window(
        self, at_s: float, wall_at: float, seconds: float, domains: Sequence[DomainEnergy], running: Collection[str]
    ) -> Totals:
        """Divide the joules of a window that ends now. The first domain is the host's."""
        total = Totals(wall_at - seconds, wall_at, scope="+".join(domain.scope for domain in domains))
        total.source = "+".join(dict.fromkeys(domain.source for domain in domains))
        total.quality = Quality.worst(tuple(domain.quality for domain in domains))
        for task in self.tasks.values():
            task.device_w = 0.0
        for number, domain in enumerate(domains):
            known_s, idle_j = domain.known_s(seconds), domain.idle_j(seconds)
            dynamic_j, everybody = domain.joules - idle_j, max(domain.busy, sum(domain.used.values()))
            tasks_j = 0.0
            for key, used in domain.used.items():
                joules = dynamic_j * used / everybody if everybody > 0 else 0.0
                tasks_j += joules
                one = self.tasks.get(key)
                if one is not None and known_s > 0:
                    one.joules += joules
                    one.is_known = True
                    one.scope = joined(one.scope, domain.scope)
                    one.quality = Quality.worst((one.quality, domain.quality))
                    if number:
                        one.device_w += joules / known_s
            total.joules += domain.joules
            total.tasks_joules += tasks_j
            total.idle_joules += idle_j
            total.other_joules += dynamic_j - tasks_j
            total.gap_s = max(total.gap_s, domain.gap_s)
            if not number and known_s > 0 and domain.busy > 0:
                self.rate, self.scope, self.quality = dynamic_j / everybody, domain.scope, domain.quality
        self.at_s = at_s
        self.tasks = {key: task for key, task in self.tasks.items() if key in running}
        return total

    def finish(
        self,
        key: str,
        cpu_s: float,
        at_s: float,
        rate_else: float,
        cards: Sequence[DomainEnergy] = (),
        counted_s: float = 0.0,
    ) -> TaskEnergy | None:
        """Joules of an ended attempt with ``cpu_s`` processor seconds in total; None if not known. Seconds that no window has
        included yet count at the last rate; rate_else: the rate without a window. cards: its GPUs in the current window, as of
        ``counted_s`` after the start of the window."""
        if (known := self.ended.get(key)) is not None:
            return known
        task = self.tasks.pop(key, None) or TaskEnergy(
            scope=self.scope, quality=Quality.worst((self.quality, Quality.DERIVED))
        )
        rest_s = max(cpu_s - task.cpu_s, 0.0)
        self.owed[key] = rest_s
        if not task.is_known and self.rate is None and not rate_else:
            return None
        rate = rate_else if self.rate is None else self.rate
        rest_of_devices_s = max(at_s - self.at_s - (counted_s if cards else 0.0), 0.0)
        task.joules += rest_s * rate + task.device_w * rest_of_devices_s
        task.scope = task.scope or self.scope
        for card in cards:
            task.joules += card.joules_of(key, counted_s)
            task.scope = joined(task.scope, card.scope)
            task.quality = Quality.worst((task.quality, card.quality))
        if self.rate is None and not task.is_known:
            task.quality = Quality.ESTIMATED
        self.ended[key] = task
        while len(self.ended) > ENDED_KEPT_MAX:
            del self.ended[next(iter(self.ended))]
        return task


def joined(one: str, other: str) -> str:
    """The words of both texts without duplicates, joined by +."""
    return "+".join(dict.fromkeys(word for word in (*one.split("+"), *other.split("+")) if word))
