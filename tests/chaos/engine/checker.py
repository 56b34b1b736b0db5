"""The promises, checked at every step: nothing acknowledged is lost, no two copies execute, one result is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import PutMembers, PutTask
from peerload.model.errors import InvariantBroken

if TYPE_CHECKING:
    from peerload.model.actions import Row
    from tests.chaos.engine.launcher import SimProcess
    from tests.chaos.engine.store import SimStore


class Checker:
    """Raises InvariantBroken with the moment at which a promise was broken."""

    def __init__(self) -> None:
        self._executing: dict[str, tuple[str, str]] = {}
        self._started: dict[str, str] = {}
        self._promised: set[tuple[str, str]] = set()
        self._final: dict[str, str] = {}
        self._attempts: dict[str, int] = {}
        self.acknowledged: dict[str, str] = {}

    def spawned(self, at_s: float, node: str, process: SimProcess) -> None:
        """An attempt starts at most once, alone, and not where it was promised never to."""
        if process.key in self._started:
            raise InvariantBroken(f"{at_s:.6f}: {process.task} starts again as {process.key} on {node}")
        if (node, process.key) in self._promised:
            raise InvariantBroken(f"{at_s:.6f}: {process.task} starts as {process.key} on {node}, against its word")
        self._started[process.key] = node
        self.runs(at_s, node, process)

    def promised(self, at_s: float, node: str, key: str) -> None:
        """A node says that this attempt never started there and never will: it did not, and it shall not."""
        if self._started.get(key) == node:
            raise InvariantBroken(f"{at_s:.6f}: {node} says that {key} never started there, and it did")
        self._promised.add((node, key))

    def runs(self, at_s: float, node: str, process: SimProcess) -> None:
        """Note that a copy executes (started or thawed): no other copy does."""
        other = self._executing.get(process.uid)
        if other is not None and other != (node, process.key):
            raise InvariantBroken(f"{at_s:.6f}: {process.task} runs as {process.key} on {node}", story=f"and {other}")
        self._executing[process.uid] = (node, process.key)

    def rests(self, node: str, process: SimProcess) -> None:
        """Note that a copy does not execute (ended or frozen)."""
        if self._executing.get(process.uid) == (node, process.key):
            del self._executing[process.uid]

    def durable(self, at_s: float, row: Row) -> None:
        """A final record never changes; attempts never go back."""
        if isinstance(row, PutMembers):
            for one in row.rows():
                self.durable(at_s, one)
        if not isinstance(row, PutTask):
            return
        record = row.record
        said = f"{record.state} {record.attempt} {record.exit!r}"
        before = self._final.get(record.task)
        if before is not None and before != said:
            raise InvariantBroken(f"{at_s:.6f}: {record.task} changed after its end", story=f"{before} → {said}")
        if record.attempt < self._attempts.get(record.task, 0):
            raise InvariantBroken(f"{at_s:.6f}: {record.task} went back to attempt {record.attempt}")
        self._attempts[record.task] = record.attempt
        if record.state.is_final:
            self._final[record.task] = said

    def acknowledge(self, node: str, task: str) -> None:
        """A client was told this id."""
        self.acknowledged[task] = node

    def kept(self, at_s: float, stores: dict[str, SimStore]) -> None:
        """Every acknowledged task is in its home's store."""
        for task, node in self.acknowledged.items():
            if task not in stores[node].tasks:
                raise InvariantBroken(f"{at_s:.6f}: {task} was acknowledged and is lost")

    def unfinished(self) -> list[str]:
        """Acknowledged tasks without a final record."""
        return [task for task in self.acknowledged if task not in self._final]
