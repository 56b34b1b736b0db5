"""Write-ahead, made visible: outward actions wait for the rows that were decided before them.

Rows of one turn are kept together. An outward action that comes after a row goes out when that row is durable, and
never overtakes another: a client is not told, a peer is not answered and no process is started on the strength of
something a power cut could take back.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.model.actions import Row


class Release:
    """``persist(rows, done)`` makes rows durable and calls ``done()`` in the loop's thread afterwards."""

    def __init__(self, persist: Callable[[list[Row], Callable[[], None]], None]) -> None:
        self._persist = persist
        self._rows: list[Row] = []
        self._notes: list[Row] = []
        self._given = 0
        self._durable = 0
        self._broken = False
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self.committed: Callable[[], None] = lambda: None
        """Called when rows have become durable."""

    def keep(self, rows: tuple[Row, ...]) -> None:
        """Rows to make durable with this turn."""
        self._rows.extend(rows)

    def note(self, row: Row) -> None:
        """A row that nothing waits for: kept with the next rows, before them, or when `settle` says so."""
        self._notes.append(row)

    def settle(self) -> None:
        """Keep the notes now."""
        if self._notes:
            self._rows[:0] = self._notes
            self._notes = []
            self.flush()

    def outward(self, act: Callable[[], None]) -> None:
        """Do it now if nothing undurable stands before it, else in its turn."""
        ticket = self._given + bool(self._rows)
        if ticket == self._durable and not self._held:
            act()
        else:
            self._held.append((ticket, act))

    def flush(self) -> None:
        """The end of a turn: hand its rows over. Once that has failed nothing is kept and nothing goes out any more:
        what was decided on top of lost rows must not be seen."""
        if not self._rows or self._broken:
            return
        rows, self._rows, self._notes = [*self._notes, *self._rows], [], []
        self._given += 1
        ticket = self._given
        try:
            self._persist(rows, lambda: self._done(ticket))
        except BaseException:
            self._broken = True
            raise

    def _done(self, ticket: int) -> None:
        self._durable = max(self._durable, ticket)
        while self._held and self._held[0][0] <= self._durable:
            self._held.popleft()[1]()
        self.committed()

    @property
    def held(self) -> int:
        """How many outward actions wait for the disk."""
        return len(self._held)
