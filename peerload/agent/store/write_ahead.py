"""Write-ahead outbox: outward actions wait for the rows that were decided before them.

Rows of one turn are kept together. An outward action that comes after a row goes out when that row is durable, and
never overtakes another: a client is not told, a peer is not answered and no process is started on the strength of
something a power cut could take back. Only renewed leases overtake: they wait for rows of their own tasks alone.

Whoever decides about many tasks is held back (`when_room`) while ROWS_AHEAD_MAX rows wait for the disk, so that what others
ask for does not wait for all of that: back pressure from the disk to the decisions.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from peerload.model.actions import PutMembers, PutTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from peerload.agent.runtime import RunState
    from peerload.model.actions import Row

ROWS_AHEAD_MAX = 1000
"""Rows on their way to the disk beyond which bulk requests wait: two or three commits, some hundredths of a second."""


log = logging.getLogger("peerload.agent")


class RowStore(Protocol):
    """Makes rows durable."""

    def persist(self, rows: Sequence[Row], done: Callable[[], None], /) -> None:
        """Make rows durable, then call ``done()`` in the loop's thread."""


class Outbox:
    """store: makes rows durable."""

    def __init__(self, store: RowStore, run: RunState) -> None:
        self._store = store
        self._run = run
        self._rows: list[Row] = []
        self._notes: list[Row] = []
        self._given = 0
        self._durable = 0
        self._broken = False
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._turn: set[bytes] = set()
        self._under_way: deque[tuple[int, int, set[bytes]]] = deque()
        self._rows_under_way = 0
        self._waits_for_room: deque[Callable[[], None]] = deque()
        self._listeners: list[Callable[[], None]] = []

    def on_commit(self, call: Callable[[], None]) -> None:
        """Call when rows have become durable, from now on."""
        self._listeners.append(call)

    def keep(self, rows: tuple[Row, ...]) -> None:
        """Rows to make durable with this turn."""
        self._rows.extend(rows)
        for row in rows:
            if type(row) is PutTask:
                self._turn.add(row.record.uid)

    def note(self, row: Row) -> None:
        """A row that nothing waits for: kept with the next rows, before them, or when `settle` says so."""
        self._notes.append(row)

    def settle(self) -> None:
        """Keep the notes now."""
        if self._notes:
            self._rows[:0] = self._notes
            self._notes = []
            self.flush()

    def when_durable(self, act: Callable[[], None]) -> None:
        """Do it now if nothing undurable stands before it, else in its turn."""
        ticket = self._given + bool(self._rows)
        if ticket == self._durable and not self._held:
            act()
        else:
            self._held.append((ticket, act))

    def renewal(self, uids: Iterable[bytes], act: Callable[[], None]) -> None:
        """Send renewed leases of these tasks at once, unless rows of these very tasks are not durable yet."""
        waiting = [self._turn, *(batch for _, _, batch in self._under_way)]
        if self._broken or any(uid in batch for uid in uids for batch in waiting):
            self.when_durable(act)
        else:
            act()

    def when_room(self, act: Callable[[], None]) -> None:
        """Do it as soon as no more than ROWS_AHEAD_MAX rows wait for the disk, in turn."""
        if self._rows_under_way <= ROWS_AHEAD_MAX and not self._waits_for_room:
            act()
        else:
            self._waits_for_room.append(act)

    def flush(self) -> None:
        """The end of a turn: hand its rows over. Once that has failed nothing is kept and nothing goes out any more:
        what was decided on top of lost rows must not be seen."""
        if not self._rows or self._broken:
            return
        rows, self._rows, self._notes = [*self._notes, *self._rows], [], []
        self._given += 1
        ticket = self._given
        number = len(rows) + sum(len(row.members) for row in rows if type(row) is PutMembers)
        self._under_way.append((ticket, number, self._turn))
        self._rows_under_way += number
        self._turn = set()
        try:
            self._store.persist(rows, lambda: self._done(ticket))
        except BaseException:
            self._broken = True
            raise

    def _done(self, ticket: int) -> None:
        self._durable = max(self._durable, ticket)
        while self._under_way and self._under_way[0][0] <= self._durable:
            self._rows_under_way -= self._under_way.popleft()[1]
        while self._held and self._held[0][0] <= self._durable:
            self._act(self._held.popleft()[1])
        for call in self._listeners:
            call()
        while self._waits_for_room and self._rows_under_way <= ROWS_AHEAD_MAX:
            self._waits_for_room.popleft()()

    def _act(self, act: Callable[[], None]) -> None:
        """A bug in an outward action must not skip it silently: the agent stops (crash-only)."""
        try:
            act()
        except Exception as error:
            log.exception("a bug")
            self._run.fail(f"a bug: {error!r}")

    @property
    def held(self) -> int:
        """The number of outward actions that wait for the disk."""
        return len(self._held)
