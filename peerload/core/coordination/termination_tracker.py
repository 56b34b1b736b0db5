"""Termination tracker: whether the processes of cancelled attempts are gone, for those who wait for that.

A cancel is confirmed when it is durable, which says nothing about processes. Whoever wants to know asks, and is told when
the launcher here has seen the end, or the node that had the attempt has given its word: a result, DIED, NOT_STARTED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import AttemptGone
from peerload.model.bounded import BoundedDict
from peerload.model.messages import Died, NotStarted, Query, Result, Return
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from peerload.core.coordination.runs import RunningTasks
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.model.events import EndAsked

LATELY_MAX = 10_000
"""Attempts of tasks that are over which are remembered to be gone; of an earlier one its node is asked."""
ENDS_AWAITED_MAX = 100_000
"""Attempts whose end is waited for at a time; of more, those asked about longest ago are told of when asked again."""
TerminationMessage = Result | Died | NotStarted | Return
TERMINATION_MESSAGES = (Result, Died, NotStarted, Return)
"""After any of these no process of the attempt is left, nor will there be one."""


class TerminationTracker:
    """One per node. It keeps nothing durable: who still waits asks again."""

    def __init__(self, state: CoreState, home: Home, runs: RunningTasks) -> None:
        self._state = state
        self._home = home
        self._runs = runs
        self._awaited: BoundedDict[str, str] = BoundedDict(ENDS_AWAITED_MAX)
        self._lately: BoundedDict[str, str] = BoundedDict(LATELY_MAX)

    def asked(self, event: EndAsked) -> None:
        """Report each attempt once it is gone; with ``query`` the nodes that have them are asked, too."""
        for attempt in event.attempts:
            key = execution_key(attempt.uid, attempt.attempt)
            is_own = attempt.node == self._state.node
            if self._lately.get(key) == attempt.node or (
                is_own and not (self._runs.holds(key) or self._runs.is_ending(key))
            ):
                self._state.actions.append(AttemptGone(key))
                continue
            self._awaited[key] = attempt.node
            if event.query and attempt.node != self._state.node:
                self._state.send(attempt.node, Query(attempt.task, attempt.uid, attempt.attempt))

    def message_received(self, src: str, message: TerminationMessage) -> None:
        """Note that a node has proven the end of an attempt. Messages about a task that is not over are for others."""
        if message.uid in self._home.tasks:
            return
        key = execution_key(message.uid, message.attempt)
        self._lately[key] = src
        self.gone(key, src)

    def gone(self, key: str, node: str = "") -> None:
        """No process of this attempt is left at that node ("": here)."""
        if self._awaited.get(key) == (node or self._state.node):
            del self._awaited[key]
            self._state.actions.append(AttemptGone(key))
