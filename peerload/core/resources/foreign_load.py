"""Foreign load: the cores that programs other than this node's tasks keep busy, in whole slots.

The sensors tell it averaged over 15 s. Here it is rounded to slots with hysteresis, so that a load that hovers around
half a slot does not change what is told to others. Foreign slots count in n: in the load index, in the acceptance test
and in every report. They never keep a task of this node from starting here, else a busy workstation would hang.
"""

from __future__ import annotations

import math

RISES_AT = 0.75
"""Of one more slot, this share must be kept busy before it counts …"""
FALLS_AT = 0.25
"""… and only so little of a slot that counts may be kept busy before it does not any more."""


def foreign_slots(before: int, cores: float, cpus: float, slots: int) -> int:
    """The number of ``slots`` that foreign programs occupy if they keep ``cores`` of ``cpus`` busy; ``before``: as of the last time."""
    if cpus <= 0 or slots <= 0:
        return 0
    exact = min(cores / cpus, 1.0) * slots
    if exact >= before + RISES_AT:
        return min(math.floor(exact + 1.0 - RISES_AT), slots)
    if exact <= before - 1 + FALLS_AT:
        return max(math.ceil(exact - FALLS_AT), 0)
    return min(before, slots)
