"""Flood protection for a broker connection: which publisher floods, and whether the broker's bridges form a circle.

Each message counts once, so repeats change nothing; but who publishes thousands of messages a second that are not new
keeps every node busy. What one publisher floods is dropped unopened for a while, and the broker is kept: a broker with
the rights of docs/mqtt.md lets a node publish below its own name alone. Two brokers whose bridges form a circle hand
everybody's messages round, our own too: such a broker is left alone for a while, and advice goes over the peer links.
"""

from __future__ import annotations

LOOK_EVERY_S = 5.0
"""What has come is judged so often."""
FLOOD_MAX = 1000
"""So many messages between two looks are a flood …"""
NEW_PART_MIN = 0.1
"""… if less than this part of them was new."""
LEFT_ALONE_S = 60.0
"""A broker that floods is tried again after this, and a publisher that has flooded is heard again."""
PUBLISHERS_MAX = 1024
"""Publishers that are told apart; the others count together, and are not muted."""
REPEATS_MIN = 20
REPEATED_PART_MIN = 0.25
"""From so many repeats on, and from this part of what has come, it is worth a word: each message may come by two bridges."""
SAYS = "it brings the same messages again and again: its bridges to other brokers form a circle"


class _Publisher:
    """What came of one: in all, and since the last look. ``muted_looks``: so many looks until it is heard again."""

    __slots__ = ("came", "came_since", "muted_looks", "new_since", "repeated")

    def __init__(self) -> None:
        self.came = self.repeated = 0
        self.came_since = self.new_since = 0
        self.muted_looks = 0


class LoopDetector:
    """Of one connection to a broker; ``own``: this node's name. What a broker had kept, and sends whoever subscribes, is not
    counted: it comes again at each connection."""

    def __init__(self, own: str = "") -> None:
        self._own = own
        self._publishers: dict[str, _Publisher] = {}

    def _of(self, name: str) -> _Publisher:
        known = self._publishers.get(name)
        if known is None:
            name = name if len(self._publishers) < PUBLISHERS_MAX else ""
            known = self._publishers.setdefault(name, _Publisher())
        return known

    def heard(self, publisher: str) -> bool:
        """A message has come, whatever it is → whether it is to be looked at: its publisher is not muted."""
        known = self._of(publisher)
        known.came_since += 1
        known.came += not known.muted_looks
        return not known.muted_looks

    def judged(self, publisher: str, *, is_new: bool) -> None:
        """One that was not our own was looked at: it was taken, or had been seen before."""
        known = self._of(publisher)
        if is_new:
            known.new_since += 1
        else:
            known.repeated += 1

    def look(self) -> tuple[list[str], bool]:
        """At each look → the publishers that are muted from now on, and whether the broker is to be left."""
        own = self._publishers.get(self._own)
        is_circle = own is not None and _is_flood(own.came_since, 0) and _is_flood(*self._since())
        muted = []
        for name, known in self._publishers.items():
            known.muted_looks = max(known.muted_looks - 1, 0)
            if not is_circle and name not in ("", self._own) and _is_flood(known.came_since, known.new_since):
                if not known.muted_looks:
                    muted.append(name)
                known.muted_looks = int(LEFT_ALONE_S / LOOK_EVERY_S)
                known.came = known.repeated = 0
        is_circle = is_circle or _is_flood(*self._since())
        for known in self._publishers.values():
            known.came_since = known.new_since = 0
        return muted, is_circle

    def _since(self) -> tuple[int, int]:
        """What has come since the last look of those that are not muted, and how much of that was new."""
        heard = [known for known in self._publishers.values() if not known.muted_looks]
        return sum(known.came_since for known in heard), sum(known.new_since for known in heard)

    @property
    def are_many(self) -> bool:
        """Whether messages come more than once as a rule."""
        came = sum(known.came for known in self._publishers.values())
        repeated = sum(known.repeated for known in self._publishers.values())
        return repeated >= REPEATS_MIN and repeated >= came * REPEATED_PART_MIN


def _is_flood(came: int, new: int) -> bool:
    return came >= FLOOD_MAX and new < came * NEW_PART_MIN
