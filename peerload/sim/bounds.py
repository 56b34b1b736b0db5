"""Bounds from queueing theory: nodes that share nothing, and one queue for all slots."""

from __future__ import annotations

import math


def mmc_response(slots: int, load: float) -> float:
    """Mean response of M/M/c in mean service times (Erlang C); load: per slot. Infinite from load 1 on.

    One node on its own is M/M/c with its slots. All nodes with one common queue are M/M/c with all slots: no policy that
    does not know how long tasks take is better than that, if service is exponential and nodes are alike.
    """
    if load >= 1:
        return math.inf
    if load <= 0:
        return 1.0
    offered = slots * load
    blocked = 1.0
    for busy in range(1, slots + 1):  # Erlang B, one slot more at a time: no factorials to overflow
        blocked = offered * blocked / (busy + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return 1 + waits / (slots * (1 - load))
