"""Co-run degree of a GPU under MPS: how many tasks pay off at a time, learned from the run times of the same command.

Additive increase, multiplicative decrease: the limit grows by one when k runs at a time got at least GAIN_MIN more done than
fewer, and is halved when they got LOSS_MAX less done, as tasks that contend for memory bandwidth do. Pure.
"""

from __future__ import annotations

from peerload.model.bounded import BoundedDict

START = 4
GAIN_MIN, LOSS_MAX = 1.03, 0.90
NEWEST_SHARE = 0.3
"""Weight of the newest run in the average."""
COMMANDS_MAX = 64


class MpsDegree:
    """limit: tasks at a time."""

    __slots__ = ("_most", "_seconds", "limit")

    def __init__(self, most: int) -> None:
        self.limit = min(START, most)
        self._most = most
        self._seconds: BoundedDict[tuple[bytes, ...], dict[int, float]] = BoundedDict(COMMANDS_MAX)

    def ended(self, command: tuple[bytes, ...], degree: int, seconds: float) -> None:
        """Learn from a run that has ended well, with so many at a time, itself counted."""
        if seconds <= 0.0:
            return
        of_degree = self._seconds.setdefault(command, {})
        before = of_degree.get(degree)
        of_degree[degree] = seconds if before is None else before + NEWEST_SHARE * (seconds - before)
        fewer = max((one for one in of_degree if one < degree), default=0)
        if degree != self.limit:
            return
        # Where nothing is known of fewer at a time, one more is tried.
        gain = (degree / of_degree[degree]) / (fewer / of_degree[fewer]) if fewer else GAIN_MIN
        if gain >= GAIN_MIN:
            self.limit = min(self.limit + 1, self._most)
        elif gain <= LOSS_MAX:
            self.limit = max(self.limit // 2, 1)
