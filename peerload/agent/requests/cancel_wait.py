"""`cancel --wait`: waits until no process of the cancelled tasks is left, here or elsewhere.

The core reports each end that it hears of. Messages of other nodes may be lost, so that these nodes are asked again
while somebody waits; not before the kill delay is over, since a query would kill the processes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from peerload.agent.runtime import now
from peerload.core.membership.membership import PeerState
from peerload.model.events import CancelledAttempt, EndAsked
from peerload.model.task import TaskState, execution_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.core_requests import CoreRequests
    from peerload.core.node import Node
    from peerload.model.task import TaskRecord
    from peerload.wire import control

ASK_EVERY_S = 5.0
"""Interval between two queries for the attempts that are left."""
EXIT_REPORT_S = 1.0
"""Time after SIGKILL in which a process ends and its node reports it."""
REPORT_AFTER_S = 2.0
"""Time after which the client is told which nodes it waits for."""
ATTEMPTS_AT_A_TIME = 250
"""Attempts in one query."""
LEFT_LISTED_MAX = 100


class CancelWatch:
    """The keys of attempts that have ended since the watch began; ``event`` is set with each."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.event = asyncio.Event()


class CancelWaits:
    """The clients of one agent that wait for the end of cancelled tasks."""

    def __init__(self, core: CoreRequests, node: Node) -> None:
        self._core = core
        self._node = node
        self._watches: set[CancelWatch] = set()

    def attempt_gone(self, key: str) -> None:
        """No process of this attempt is left."""
        for watch in self._watches:
            watch.keys.add(key)
            watch.event.set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[CancelWatch]:
        """A watch of all attempts, until the end of the block."""
        watch = CancelWatch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def wait(
        self, connection: Connection, request: control.Cancel, watch: CancelWatch, records: Sequence[TaskRecord]
    ) -> None:
        """Answer when no process of these tasks is left, or at the timeout."""
        left = {key: attempt for record in records for key, attempt in _attempts(record)}
        newest_s = max((record.ended_at for record in records if record.state is TaskState.CANCELLED), default=0.0)
        wait = _Wait(self._core, self._node, connection, request.id, left, newest_s)
        timed_out = False
        try:
            async with asyncio.timeout(request.timeout_s):
                await wait.run(watch)
        except TimeoutError:
            timed_out = True
        names = [attempt.task for attempt in left.values()][:LEFT_LISTED_MAX]
        connection.ok(request.id, {"timed_out": timed_out, "left": names})


class _Wait:
    """The wait of one request. ``left``: the attempts that may have processes."""

    def __init__(
        self,
        core: CoreRequests,
        node: Node,
        connection: Connection,
        number: int,
        left: dict[str, CancelledAttempt],
        cancelled_at: float,
    ) -> None:
        self._core = core
        self._node = node
        self._connection = connection
        self._number = number
        self._left = left
        self._reported: list[dict[str, object]] = []
        self._known_nodes: set[str] = set()
        reported_s = cancelled_at - now().wall_s + node.state.config.kill_after_s + EXIT_REPORT_S
        now_s = asyncio.get_running_loop().time()
        self._query_s = now_s + min(max(reported_s, 0.0), node.state.config.kill_after_s + EXIT_REPORT_S)
        self._report_s = now_s + REPORT_AFTER_S

    async def run(self, watch: CancelWatch) -> None:
        """Return when no attempt is left."""
        loop = asyncio.get_running_loop()
        ask_s = loop.time()
        while True:
            watch.event.clear()
            for key in watch.keys & self._left.keys():
                del self._left[key]
            watch.keys.clear()
            if not self._left:
                return
            now_s = loop.time()
            if now_s >= ask_s:
                await self._ask_core(query=now_s >= self._query_s)
                ask_s = loop.time() + ASK_EVERY_S
            if now_s >= self._report_s:
                self._report_nodes()
            next_s = min([ask_s, *(moment_s for moment_s in (self._query_s, self._report_s) if moment_s > now_s)])
            if next_s == self._query_s:
                ask_s = next_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watch.event.wait(), max(next_s - loop.time(), 0.0))

    async def _ask_core(self, *, query: bool) -> None:
        """Have the core query again. Attempts at a node that was forgotten meanwhile count as ended."""
        membership = self._node.membership
        for node in {attempt.node for attempt in self._left.values()}:
            if membership.get(node) is not None:
                self._known_nodes.add(node)
            elif node in self._known_nodes:
                for key in [key for key, attempt in self._left.items() if attempt.node == node]:
                    del self._left[key]
        attempts = list(self._left.values())
        for first in range(0, len(attempts), ATTEMPTS_AT_A_TIME):
            self._core.put(EndAsked(tuple(attempts[first : first + ATTEMPTS_AT_A_TIME]), query=query))
            await asyncio.sleep(0)

    def _report_nodes(self) -> None:
        """Tell the client which nodes it waits for, when that has changed."""
        membership, own = self._node.membership, self._node.state.node
        waits_for: list[dict[str, object]] = []
        for node, tasks in sorted(Counter(attempt.node for attempt in self._left.values()).items()):
            peer = membership.get(node)
            state = PeerState.ALIVE if node == own else None if peer is None else peer.state
            waits_for.append({"node": node, "state": state, "tasks": tasks})
        if [(told["node"], told["state"]) for told in waits_for] != [
            (told["node"], told["state"]) for told in self._reported
        ]:
            self._reported = waits_for
            self._connection.more(self._number, {"waits_for": waits_for})


def _attempts(record: TaskRecord) -> Iterator[tuple[str, CancelledAttempt]]:
    """The attempt of a cancelled task that may have processes. Tasks that ended otherwise have none."""
    node = record.node or record.last_node
    if record.state is TaskState.CANCELLED and record.attempt and node:
        key = execution_key(record.uid, record.attempt)
        yield key, CancelledAttempt(record.task, record.uid, record.attempt, node)
