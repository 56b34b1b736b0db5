"""Counters of the events of a run: a fault that never fires is a test that tests nothing."""

from __future__ import annotations


class Gauges:
    """Plain counters by name."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, name: str, by: int = 1) -> None:
        """Once more."""
        self.counts[name] = self.counts.get(name, 0) + by
