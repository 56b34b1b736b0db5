"""What tasks really did: each writes its own lines, and from these is computed what was lost, repeated or overlapped.

A line is ``task attempt node word CLOCK_BOOTTIME pid``: ``start``, then ``beat`` as long as it lives, then ``stop``.
The first field of /proc/uptime is CLOCK_BOOTTIME in hundredths of a second.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SCRIPT = r"""
note() { read up _ </proc/uptime; echo "$PEERLOAD_TASK_ID $PEERLOAD_ATTEMPT $PEERLOAD_NODE $1 $up $$" >>"$0"; }
note start
i=0
while [ $i -lt $1 ] || { [ "$3" ] && ! [ -e "$3" ]; }; do sleep 0.1; note beat; i=$((i + 1)); done
note stop
echo "out $PEERLOAD_TASK_ID"
exit $2
"""
RESOLUTION_S = 0.02


class Line(NamedTuple):
    """One line of one attempt."""

    task: str
    attempt: int
    node: str
    word: str
    at_s: float
    pid: int


class Ledger:
    """A file that tasks append to, and what it tells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def argv(self, tenths: int = 3, exit_code: int = 0, until: Path | None = None) -> list[str]:
        """A command that lives for so many tenths of a second, and until there is this file, and writes down that it did."""
        gate = [] if until is None else [str(until)]
        return ["sh", "-c", _SCRIPT, str(self.path), str(tenths), str(exit_code), *gate]

    def lines(self) -> list[Line]:
        """All lines, as they were written; of the last one there may be only a part yet."""
        found = []
        for text in self.path.read_text(encoding="ascii").rpartition("\n")[0].splitlines():
            task, attempt, node, word, at_s, pid = text.split()
            found.append(Line(task, int(attempt), node, word, float(at_s), int(pid)))
        return found

    def of(self, task: str) -> list[Line]:
        """The lines of one task."""
        return [line for line in self.lines() if line.task == task]

    def started(self, task: str) -> bool:
        """Whether it has begun at least once."""
        return bool(self.of(task))

    def pids(self, task: str) -> list[int]:
        """The processes that were this task, in order."""
        return list(dict.fromkeys(line.pid for line in self.of(task)))

    def lost(self, acknowledged: Iterable[str]) -> set[str]:
        """Tasks that were acknowledged and never came to their end."""
        return set(acknowledged) - {line.task for line in self.lines() if line.word == "stop"}

    def repeated(self) -> set[str]:
        """Tasks that were started more than once (which a lost node or launcher allows)."""
        starts = collections.Counter(line.task for line in self.lines() if line.word == "start")
        return {task for task, count in starts.items() if count > 1}

    def overlapped(self) -> set[str]:
        """Tasks of which two attempts, or one attempt twice, lived at a time: that must never be."""
        spans: dict[str, dict[tuple[int, int], list[float]]] = {}
        for line in self.lines():
            spans.setdefault(line.task, {}).setdefault((line.attempt, line.pid), []).append(line.at_s)
        bad = set()
        for task, attempts in spans.items():
            ordered = sorted((min(times), max(times)) for times in attempts.values())
            for (_, earlier_end_s), (later_start_s, _) in itertools.pairwise(ordered):
                if later_start_s < earlier_end_s - RESOLUTION_S:
                    bad.add(task)
        return bad

    def check(self, acknowledged: Iterable[str]) -> None:
        """Nothing was lost and nothing overlapped."""
        assert not self.lost(acknowledged)
        assert not self.overlapped()
