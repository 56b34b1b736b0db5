"""Whether a broker brings again and again what it has brought before.

Each message counts once, so repeats change nothing; but two brokers whose bridges form a circle hand a single message round
thousands of times a second, for ever, and a node would do little else than throw them away. It leaves such a broker alone for
a while: advice goes over the peer links meanwhile.
"""

from __future__ import annotations

LOOK_EVERY_S = 5.0
"""What has come is judged so often."""
FLOOD_MAX = 1000
"""So many messages between two looks are a flood …"""
NEW_PART_MIN = 0.1
"""… if less than this part of them was new."""
LEFT_ALONE_S = 60.0
"""A broker that floods is tried again after this."""
REPEATS_MIN = 20
REPEATED_PART_MIN = 0.25
"""From so many repeats on, and from this part of what has come, it is worth a word: each message may come by two bridges."""
SAYS = "it brings the same messages again and again: its bridges to other brokers form a circle"


class Repeats:
    """Of one connection to a broker. What a broker had kept, and sends whoever subscribes, is not counted: it comes again at
    each connection."""

    def __init__(self) -> None:
        self.came = 0
        """Messages in all."""
        self.repeated = 0
        """Of them those that were dropped as seen before; the newest State of a node may stand for several."""
        self._came_before = 0
        self._new = 0

    def heard(self) -> None:
        """One has come, whatever it is."""
        self.came += 1

    def judged(self, *, is_new: bool) -> None:
        """One that was not our own was looked at: it was taken, or had been seen before."""
        if is_new:
            self._new += 1
        else:
            self.repeated += 1

    def is_flood(self) -> bool:
        """At each look: whether what has come since the last one was mostly old."""
        came, self._came_before = self.came - self._came_before, self.came
        new, self._new = self._new, 0
        return came >= FLOOD_MAX and new < came * NEW_PART_MIN

    @property
    def are_many(self) -> bool:
        """Whether messages come more than once as a rule."""
        return self.repeated >= REPEATS_MIN and self.repeated >= self.came * REPEATED_PART_MIN
