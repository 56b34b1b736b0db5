"""What can be computed from the moments of all tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fidelity.live import Ran


def idle_while_waiting(ran: Iterable[Ran], nodes: int) -> float:
    """The share of all nodes' time, from the first submission to the last end, in which a node runs nothing while a
    task waits: one that was submitted and whose process has not started. Every idle node counts, however few tasks
    wait; so does the time in which a task is started."""
    changes: list[tuple[float, int, int]] = []
    for one in ran:
        changes += [(one.submitted_s, 0, 1), (one.started_s, 1, -1), (one.ended_s, -1, 0)]
    changes.sort()
    running = waiting = 0
    lost_s = 0.0
    before_s = changes[0][0]
    for at_s, runs, waits in changes:
        lost_s += (nodes - running if waiting else 0) * (at_s - before_s)
        running, waiting, before_s = running + runs, waiting + waits, at_s
    return lost_s / (nodes * (changes[-1][0] - changes[0][0]))
