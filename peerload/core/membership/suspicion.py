"""Time that a suspect has to refute a suspicion: the more others confirm it, the shorter ([LIFEGUARD17] section 4.2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.model.gossip import GossipPreset


def suspicion_s(preset: GossipPreset, members: int) -> float:
    """The least time, for n members alive."""
    return preset.suspicion_mult * max(1.0, math.log10(max(members, 1))) * preset.probe_s


class Suspicion:
    """One suspect, since ``started_s``; members: n at that time."""

    __slots__ = ("_longest_s", "_shortest_s", "_wanted", "started_s")

    def __init__(self, preset: GossipPreset, members: int, now_s: float) -> None:
        others = max(members - 2, 0)  # besides the accuser and the suspect
        self.started_s = now_s
        self._wanted = preset.confirmations if others >= preset.confirmations else 0
        self._shortest_s = suspicion_s(preset, members)
        self._longest_s = self._shortest_s * (preset.suspicion_max_mult if self._wanted else 1.0)

    def over_s(self, accusers: int, factor: int) -> float:
        """The time at which it is over, if so many confirm it (the first is no confirmation); ``factor``: of the local health."""
        confirmations = min(max(accusers - 1, 0), self._wanted)
        part = math.log(confirmations + 1) / math.log(self._wanted + 1) if self._wanted else 1.0
        return self.started_s + (self._longest_s - part * (self._longest_s - self._shortest_s)) * factor
