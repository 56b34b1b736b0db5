"""Local health: how far this node may trust its own judgement of others ([LIFEGUARD17] local health).

A node that is slow sees slow answers everywhere. It counts what only its own slowness explains, and gives everybody
more time in proportion.
"""

from __future__ import annotations


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
