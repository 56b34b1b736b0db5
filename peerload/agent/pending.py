"""What the core was asked and what it said: requests that wait for its answer, and its newest decisions."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from peerload.agent.connection import Connection
    from peerload.model.actions import Answer, Decided

DECISIONS_KEPT_MAX = 10_000


class Pending:
    """Which answer of the core goes to which request of which client."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Connection, int]] = {}
        self._next = 0

    def expect(self, connection: Connection, number: int) -> int:
        """A number for the core; its Answer goes to this request of this client."""
        self._next += 1
        self._waiting[self._next] = (connection, number)
        connection.pending += 1
        return self._next

    def answered(self, answer: Answer) -> None:
        """Pass an answer on to whoever asked."""
        connection, number = self._waiting.pop(answer.request, (None, 0))
        if connection is None:
            return
        connection.pending -= 1
        if answer.error is not None:
            connection.fail(number, answer.error)
        else:
            try:
                connection.ok(number, answer.reply)
            except PeerloadError as error:
                connection.fail(number, error)


class Decisions:
    """The newest decision about each of the last tasks."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Decided] = OrderedDict()

    def keep(self, decision: Decided) -> None:
        """A decision was made."""
        if decision.task:
            self._kept[decision.task] = decision
            self._kept.move_to_end(decision.task)
            if len(self._kept) > DECISIONS_KEPT_MAX:
                self._kept.popitem(last=False)

    def about(self, task: str) -> dict[str, object] | None:
        """The newest decision about a task, as `show` shows it."""
        decision = self._kept.get(task)
        if decision is None:
            return None
        inputs = [{"node": node, "load": load, "age_s": age_s} for node, load, age_s in decision.inputs]
        return {"policy": decision.policy, "choice": decision.choice, "reason": decision.reason, "inputs": inputs}
