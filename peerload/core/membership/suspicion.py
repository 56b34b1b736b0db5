"""Suspicion and local health: how long a suspect may refute, and how far this node may trust its own judgement ([LIFEGUARD17]).

The more members confirm a suspicion, the shorter is the time of the suspect (section 4.2). A node that is slow sees slow
answers everywhere: it counts what only its own slowness explains, and gives everybody more time in proportion."""

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


class LocalHealth:
    """score: 0 (well) … the preset's health_max; factor: by which times are stretched."""

    __slots__ = ("_score_max", "score")

    def __init__(self, score_max: int) -> None:
        self.score = 0
        self._score_max = score_max

    @property
    def factor(self) -> int:
        """1 … health_max + 1."""
        return self.score + 1

    def better(self) -> None:
        """A probe was answered in time."""
        self.score = max(self.score - 1, 0)

    def worse(self, by: int = 1) -> None:
        """A helper gave no sign of life, a suspicion had to be refuted, or this node did not run for a while."""
        self.score = min(self.score + by, self._score_max)
