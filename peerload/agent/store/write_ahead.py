"""Write-ahead of outward actions and events: the outbox, the event log and the security events.

Rows of one turn are stored together. An outward action that comes after a row is performed when that row is durable, and
never overtakes another: no answer to a client, no message to a peer and no start of a process may depend on a
decision that a power cut could undo. Only two kinds of message overtake. Renewed leases wait only for rows of their own tasks.
Advice, OFFER and ACCEPT wait for no row, since they promise nothing that a power cut must not undo."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from peerload.model import metrics
from peerload.model.actions import EVENTS, PutEvent, PutMembers, PutTask
from peerload.model.bounded import BoundedDict
from peerload.model.errors import StoreError
from peerload.model.text import printable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from peerload.agent.runtime import RunState
    from peerload.model.actions import Row


log = logging.getLogger("peerload.agent")
_log = logging.getLogger("peerload.security")

ROWS_AHEAD_MAX = 1000
"""Number of rows waiting for the disk beyond which bulk requests wait: two or three commits, some hundredths of a second."""
NOTES_WITHIN_S = 1.0
"""Maximum time until a note is handed to the store."""
RULES = frozenset(EVENTS["security"])
NOTICE_EVERY_S = 60.0
"""Minimum interval of the events about one rule and one culprit."""
NOTED_MAX = 20
"""Maximum number of events about one rule within NOTICE_EVERY_S, for all culprits together: one attacker may have many
addresses."""
CULPRITS_MAX = 1024
"""Maximum number of remembered culprits; the least recent one is forgotten first."""
WHO_CHARS_MAX = 100
WHAT_CHARS_MAX = 300
"""Maximum length of the description; a longer one is cut off."""


class RowStore(Protocol):
    """Makes rows durable."""

    def persist(self, rows: Sequence[Row], done: Callable[[], None], /) -> None:
        """Make rows durable, then call ``done()`` in the loop's thread."""


class Outbox:
    """Write-ahead outbox: holds outward actions until the rows before them are durable. store: makes rows durable.

    Work on many tasks is held back (`when_room`) while ROWS_AHEAD_MAX rows wait for the disk, so that other requests do not
    wait for all of it: backpressure from the disk to the decisions.
    """

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
        self._listeners.append(call)

    def keep(self, rows: tuple[Row, ...]) -> None:
        """Add rows to this turn, to be made durable."""
        self._rows.extend(rows)
        for row in rows:
            if type(row) is PutTask:
                self._turn.add(row.record.uid)

    def note(self, row: Row) -> None:
        """Add a row that no action waits for: it is stored with the next rows, before them, or by `settle`."""
        self._notes.append(row)

    def settle(self) -> None:
        """Make the notes durable now."""
        if self._notes:
            self._rows[:0] = self._notes
            self._notes = []
            self.flush()

    def when_durable(self, act: Callable[[], None]) -> None:
        """Perform an outward action when all rows before it are durable: now, or later in order."""
        ticket = self._given + bool(self._rows)
        if ticket == self._durable and not self._held:
            act()
        else:
            self._held.append((ticket, act))

    def renewal(self, uids: Iterable[bytes], act: Callable[[], None]) -> None:
        """Send renewed leases of these tasks immediately, unless rows of these tasks are not durable yet."""
        waiting = [self._turn, *(batch for _, _, batch in self._under_way)]
        if self._broken or any(uid in batch for uid in uids for batch in waiting):
            self.when_durable(act)
        else:
            act()

    def at_once(self, act: Callable[[], None]) -> None:
        """Immediately send a message that promises nothing: a commit takes longer than its transmission."""
        if self._broken:
            self.when_durable(act)
        else:
            act()

    def when_room(self, act: Callable[[], None]) -> None:
        """Perform an action when at most ROWS_AHEAD_MAX rows wait for the disk, in order."""
        if self._rows_under_way <= ROWS_AHEAD_MAX and not self._waits_for_room:
            act()
        else:
            self._waits_for_room.append(act)

    def flush(self) -> None:
        """End a turn: hand its rows to the store. After a failure of the store, nothing is stored and no outward action is
        performed any more: decisions on top of lost rows must not become visible."""
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
        self._durable = durable = max(self._durable, ticket)
        while self._under_way and self._under_way[0][0] <= durable:
            self._rows_under_way -= self._under_way.popleft()[1]
        held, act = self._held, self._act
        while held and held[0][0] <= durable:
            act(held.popleft()[1])
        for call in self._listeners:
            call()
        while self._waits_for_room and self._rows_under_way <= ROWS_AHEAD_MAX:
            self._waits_for_room.popleft()()

    def _act(self, act: Callable[[], None]) -> None:
        """Perform an outward action. A bug must not silently skip it: the agent stops (crash-only)."""
        try:
            act()
        except Exception as error:
            log.exception("bug in an outward action")
            self._run.fail(f"a bug: {error!r}")

    @property
    def held(self) -> int:
        """The number of outward actions that wait for the disk."""
        return len(self._held)


# -- events ------------------------------------------------------------------------------------------------------------


class EventLog:
    """Event log: what happened to tasks and nodes, for users; and its followers. Call it only from the loop's thread.

    An event about a task's record is written with that record. All others are *notes*: they are stored with the next commit, or by
    their own after NOTES_WITHIN_S, so that they need no extra sync under load. The agent stops if they cannot be stored.
    """

    def __init__(self, outbox: Outbox, run: RunState) -> None:
        self._outbox = outbox
        self._run = run
        self._timer: asyncio.TimerHandle | None = None
        self._followers: set[asyncio.Event] = set()
        self._noted: list[Callable[[PutEvent], None]] = []
        outbox.on_commit(self._committed)

    def on_note(self, call: Callable[[PutEvent], None]) -> None:
        self._noted.append(call)

    def note(self, event: PutEvent) -> None:
        self._outbox.note(event)
        for call in self._noted:
            call(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTES_WITHIN_S, self.settle)

    def record(self, what: str, state: str, *, task: str = "", node: str = "", reason: str = "") -> None:
        """Note an event that the core does not decide about, with the current time."""
        self.note(PutEvent(time.time(), what, state, task=task, node=node, reason=reason))

    def settle(self) -> None:
        """Hand the notes to the store."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._outbox.settle()
        except StoreError as error:
            self._run.fail(f"the store failed: {error}")

    @contextlib.contextmanager
    def followed(self) -> Iterator[asyncio.Event]:
        """An `asyncio.Event` that is set whenever there may be new events in the store."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            yield news
        finally:
            self._followers.discard(news)

    def _committed(self) -> None:
        for news in self._followers:
            news.set()


class _Culprit(msgspec.Struct):
    """The refusals of one culprit by one rule."""

    began_s: float
    noted_s: float = float("-inf")
    seen: int = 0
    unsaid: int = 0


class SecurityEvents:
    """Security events: each refusal by a security rule is counted, logged and stored as an event.

    The number of events is bounded, since a refused peer may retry at any rate: one event a minute for each rule and culprit
    (with the number of refusals in between), and NOTED_MAX a minute for each rule. The counters include all refusals. counters:
    the agent's own; clock: monotonic, in seconds.
    """

    def __init__(self, counters: Counter[str], journal: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters
        self._journal = journal
        self._clock = clock
        self._culprits: BoundedDict[tuple[str, str], _Culprit] = BoundedDict(CULPRITS_MAX)
        self._noted: dict[str, deque[float]] = {}

    def report(self, rule: str, who: str, what: str, *, tolerated: int = 0) -> None:
        """Count a refusal, and store an event about it within the limits. Never raises.

        rule: its name in docs/security.md; who: a node, an address without its port, or ``uid 1000``; what: a
        description for users. Foreign text in both is escaped. tolerated: number of refusals within a minute that may have an
        innocent cause (a datagram that the network has duplicated): they are counted, but are no events.
        """
        assert rule in RULES, rule
        self.counters[metrics.SECURITY_EVENTS] += 1
        self.counters[metrics.labelled(metrics.SECURITY_EVENTS, rule=rule)] += 1
        who, what = printable(who[:WHO_CHARS_MAX]), printable(what[:WHAT_CHARS_MAX])
        now_s = self._clock()
        culprit = self._culprit(rule, who, now_s)
        culprit.seen += 1
        if culprit.seen <= tolerated:
            return
        if now_s - culprit.noted_s < NOTICE_EVERY_S or not self._has_room(rule, now_s):
            culprit.unsaid += 1
            return
        culprit.noted_s = now_s
        more = f" (and {culprit.unsaid} more before)" if culprit.unsaid else ""
        culprit.unsaid = 0
        self._note(rule, who, what + more)

    def _culprit(self, rule: str, who: str, now_s: float) -> _Culprit:
        known = self._culprits[rule, who] = self._culprits.get((rule, who)) or _Culprit(now_s)
        if now_s - known.began_s >= NOTICE_EVERY_S:
            known.began_s, known.seen = now_s, 0
        return known

    def _has_room(self, rule: str, now_s: float) -> bool:
        noted = self._noted.setdefault(rule, deque(maxlen=NOTED_MAX))
        if len(noted) == NOTED_MAX and now_s - noted[0] < NOTICE_EVERY_S:
            return False
        noted.append(now_s)
        return True

    def _note(self, rule: str, who: str, what: str) -> None:
        _log.warning("security event: rule=%s who=%s what=%s", rule, who or "unknown", what)
        self._journal.record("security", rule, node=who, reason=what)
