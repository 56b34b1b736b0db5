"""What both baselines need: rumours that are passed on a limited number of times, the least told first."""

from __future__ import annotations

import math
from typing import NamedTuple


class Rumour(NamedTuple):
    """Somebody says of a node that it is alive, suspect, dead or left."""

    state: str
    node: str
    incarnation: int
    accuser: str


class Rumours:
    """One rumour a node, the newest; each is handed out ``multiplier * ceil(log10(n + 1))`` times."""

    def __init__(self, multiplier: int) -> None:
        self._multiplier = multiplier
        self._told: dict[str, tuple[Rumour, int]] = {}

    def __len__(self) -> int:
        return len(self._told)

    def add(self, rumour: Rumour) -> None:
        """Pass this on from now on, in place of any other of this node."""
        self._told.pop(rumour.node, None)
        self._told[rumour.node] = (rumour, 0)

    def take(self, members: int, most: int) -> tuple[Rumour, ...]:
        """At most so many for one message."""
        if not self._told:
            return ()
        limit = self._multiplier * math.ceil(math.log10(members + 1))
        newest_first = list(reversed(self._told.values()))
        chosen = sorted(newest_first, key=lambda entry: entry[1])[:most]  # the least told first
        for rumour, told in chosen:
            if told + 1 >= limit:
                del self._told[rumour.node]
            else:
                self._told[rumour.node] = (rumour, told + 1)
        return tuple(rumour for rumour, _ in chosen)
