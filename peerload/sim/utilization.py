"""Utilization: how long slots were free, and how long they were free while a task waited at another node."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.core.resources.admission import Ledger


class UtilizationMonitor:
    """Areas under three curves in slot seconds, O(1) a change.

    free: slots that run nothing; idle_while_waiting: those of them whose node is not the one where tasks wait, while
    some wait; total: all there are. A task waits while it stands in the queue of a node; one on its way does not. A
    task of several cpus holds as many slots.
    """

    __slots__ = ("_free", "_free_now", "_since_s", "_slots_now", "_waiting", "free", "idle_while_waiting", "total")

    def __init__(self) -> None:
        self.free = 0.0
        self.idle_while_waiting = 0.0
        self.total = 0.0
        self._since_s = 0.0
        self._free: dict[str, int] = {}
        self._waiting: dict[str, None] = {}
        self._free_now = 0
        self._slots_now = 0

    def add(self, name: str, slots: int) -> None:
        """Add a node, idle so far."""
        self._free[name] = slots
        self._free_now += slots
        self._slots_now += slots

    def look(self, now_s: float, name: str, ledger: Ledger, waiting: int) -> None:
        """Note the state of a node after an event: what it runs, and how many tasks wait there."""
        held = max(len(ledger.running), math.ceil(ledger.cpus_running))
        free = ledger.profile.slots - held
        waits = waiting > 0
        before = self._free[name]
        if free == before and waits == (name in self._waiting):
            return
        self.count_until(now_s)
        self._free[name] = free
        self._free_now += free - before
        if waits:
            self._waiting[name] = None
        else:
            self._waiting.pop(name, None)

    def count_until(self, now_s: float) -> None:
        """Add up the areas until now."""
        passed_s = now_s - self._since_s
        if passed_s <= 0:
            return
        self._since_s = now_s
        self.total += self._slots_now * passed_s
        self.free += self._free_now * passed_s
        if len(self._waiting) > 1:
            self.idle_while_waiting += self._free_now * passed_s
        elif self._waiting:
            (alone,) = self._waiting
            self.idle_while_waiting += (self._free_now - self._free[alone]) * passed_s
