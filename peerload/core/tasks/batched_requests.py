"""Batches of requests about many tasks: some tasks at a time, with other events in between, so that nobody else waits
for all of them. A request about a few tasks is done in the event it came with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import timers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.core.state import CoreState

TASKS_AT_A_TIME = 250
"""Steps that one request takes before others have their turn: some milliseconds, with what the agent does about each."""


class BatchedRequests:
    """One per node; its timer is ``request``. What is under way is not durable: an agent that is killed meanwhile has
    answered nobody."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._under_way: dict[int, Iterator[int | None]] = {}

    def carry_out(self, request: int, steps: Iterator[int | None]) -> None:
        """Do what a request takes, a step a task, or for as many alike as it yields; what is left after TASKS_AT_A_TIME goes on in
        events of its own. What has become of a task meanwhile is for its step to look at."""
        self._under_way[request] = steps
        self.go_on(request)

    def go_on(self, request: int) -> None:
        """The next steps of a request that is under way."""
        steps = self._under_way.get(request)
        if steps is None:
            return
        left = TASKS_AT_A_TIME
        for number in steps:
            left -= number or 1
            if left <= 0:
                self._state.set_timer_in(0.0, timers.Batch.of(request))
                return
        del self._under_way[request]
