"""Accounting of energy: tasks + other + idle = node. Pure.

The idle joules of a window are those that the machine would have drawn anyway. The rest is divided by processor time: of the
tasks by what their processes used, of everything else together as ``other``; the joules of a GPU by who holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from peerload.model.resources import Quality

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

BUCKET_S = 60.0
ENDED_KEPT_MAX = 256
"""Ended attempts whose joules are remembered, since an exit is told again after a restart."""
JOULES_PER_WH = 3600.0


class Part(NamedTuple):
    """Joules of one part of the machine in a window. used: processor seconds of each attempt, or its share of a device;
    busy: of everybody; idle_w: what it draws anyway; gap_s: for so long nothing is known."""

    scope: str
    source: str
    quality: Quality
    joules: float
    gap_s: float
    idle_w: float
    used: Mapping[str, float]
    busy: float

    def known_s(self, seconds: float) -> float:
        """Seconds of the window of which the joules are. A longer gap is of a sensor that was silent before, beside others."""
        return seconds - self.gap_s if self.gap_s < seconds else seconds * (self.joules > 0)


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
        """Add what came later, or earlier: the quality is the worst of both."""
        self.since, self.until = min(self.since, other.since), max(self.until, other.until)
        self.joules += other.joules
        self.tasks_joules += other.tasks_joules
        self.other_joules += other.other_joules
        self.idle_joules += other.idle_joules
        self.gap_s += other.gap_s
        self.quality = Quality.worst((self.quality, other.quality))
        self.scope, self.source = joined(self.scope, other.scope), joined(self.source, other.source)


class TaskEnergy(msgspec.Struct, omit_defaults=True):
    """Joules of an attempt so far, for so many processor seconds of it. device_w: of its devices in the last window;
    is_known: whether there was any window with joules."""

    cpu_s: float = 0.0
    joules: float = 0.0
    device_w: float = 0.0
    quality: Quality = Quality.DERIVED
    scope: str = ""
    is_known: bool = False


class Book(msgspec.Struct):
    """Account of one node, which is kept as it is over restarts. rate: joules for a processor second in the last window;
    owed: processor seconds of ended attempts that no window has had."""

    rate: float | None = None
    scope: str = ""
    quality: Quality = Quality.ESTIMATED
    at_s: float = 0.0
    tasks: dict[str, TaskEnergy] = {}
    ended: dict[str, TaskEnergy] = {}
    owed: dict[str, float] = {}

    def used_since(self, cpu_s: Mapping[str, float]) -> dict[str, float]:
        """Processor seconds of each attempt since the last window: of running ones from their totals so far, which
        never fall, and what is owed for ended ones."""
        used = dict(self.owed)
        for key, now_s in cpu_s.items():
            task = self.tasks.setdefault(key, TaskEnergy())
            used[key] = max(now_s - task.cpu_s, 0.0)
            task.cpu_s = max(now_s, task.cpu_s)
        self.owed = {}
        return used

    def window(
        self, at_s: float, wall_at: float, seconds: float, parts: Sequence[Part], running: Collection[str]
    ) -> Totals:
        """Divide the joules of a window that ends now. The first part is the host's."""
        total = Totals(wall_at - seconds, wall_at, scope="+".join(part.scope for part in parts))
        total.source = "+".join(dict.fromkeys(part.source for part in parts))
        total.quality = Quality.worst(tuple(part.quality for part in parts))
        for task in self.tasks.values():
            task.device_w = 0.0
        for number, part in enumerate(parts):
            known_s = part.known_s(seconds)
            idle_j = min(part.idle_w * known_s, part.joules)
            dynamic_j, everybody = part.joules - idle_j, max(part.busy, sum(part.used.values()))
            tasks_j = 0.0
            for key, used in part.used.items():
                joules = dynamic_j * used / everybody if everybody > 0 else 0.0
                tasks_j += joules
                one = self.tasks.get(key)
                if one is not None and known_s > 0:
                    one.joules += joules
                    one.is_known = True
                    one.scope = joined(one.scope, part.scope)
                    one.quality = Quality.worst((one.quality, part.quality))
                    if number:
                        one.device_w += joules / known_s
            total.joules += part.joules
            total.tasks_joules += tasks_j
            total.idle_joules += idle_j
            total.other_joules += dynamic_j - tasks_j
            total.gap_s = max(total.gap_s, part.gap_s)
            if not number and known_s > 0 and part.busy > 0:
                self.rate, self.scope, self.quality = dynamic_j / everybody, part.scope, part.quality
        self.at_s = at_s
        self.tasks = {key: task for key, task in self.tasks.items() if key in running}
        return total

    def finish(self, key: str, cpu_s: float, at_s: float, rate_else: float) -> TaskEnergy | None:
        """The joules of an attempt that has ended, with so many processor seconds in all; None if they are not known.
        What no window has had yet counts as in the last one; rate_else: where there was none."""
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
        task.joules += rest_s * rate + task.device_w * max(at_s - self.at_s, 0.0)
        task.scope = task.scope or self.scope
        if self.rate is None and not task.is_known:
            task.quality = Quality.ESTIMATED
        self.ended[key] = task
        while len(self.ended) > ENDED_KEPT_MAX:
            del self.ended[next(iter(self.ended))]
        return task


def joined(one: str, other: str) -> str:
    """Words of both, each once, with + between them."""
    return "+".join(dict.fromkeys(word for word in (*one.split("+"), *other.split("+")) if word))
