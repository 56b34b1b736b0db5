"""Recovery: the reads of the database at the start of an agent.

An unreadable row blocks nothing: it stays unchanged, is reported, and all others are served. Its id is never reused.
An unreadable promise (a floor, an attempt of another home) counts as the strongest promise.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from itertools import chain, islice
from sys import intern
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.agent.store import schema
from peerload.agent.store.reader import StoreReader
from peerload.agent.store.schema import COLUMNS, MEMBER_MAX, Damage, decoded_execution, decoded_terms
from peerload.model.errors import StoreError
from peerload.model.events import AgentStarted, MembersRow, TaskRow
from peerload.model.task import (
    ATTEMPT_MAX,
    NO_TERMS,
    SINGLE,
    ExecutionRecord,
    FenceKind,
    GroupSettings,
    TaskOutcome,
    TaskRecord,
    TaskState,
    member_uid,
    ranges,
    submission_of,
    task_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from peerload.model.task import SubmitOptions

UID_BYTES = 16
ROWS_AT_A_TIME = 10_000
"""Rows in memory at a time, besides the tasks made from them; a million rows would double the memory."""
FLOOR_MAX = 1 << 62
"""The floor of a task with an unreadable floor: no attempt of it is ever started here (again)."""
UNIFORM_MAX = 1000
"""Maximum number of uniform arrays whose untouched members are read together; members of further arrays are single tasks."""
COUNTER_MAX = 10**15
"""Bound on numbers of submissions; a greater one was never assigned."""


class StoreRecovery(StoreReader):
    """The reads at an agent's start."""

    def recover(self) -> AgentStarted:
        """Read all unfinished tasks and promises → the first event, as far as the database has its fields. Raises StoreError only
        if the database as a whole cannot be read; `damaged` and `unreadable` have the unreadable rows."""
        tasks, members = self._unfinished(self._uniform())
        unreadable: list[str] = []
        executions, floors = self._promises(unreadable)
        drained = self.rows("SELECT value FROM meta WHERE key = 'drained'")
        reason = drained[0][0] if drained else None
        if drained and not isinstance(reason, str):
            reason = "the reason of the drain cannot be read"
            unreadable.append(f"the drained state cannot be read, so this node is drained: {drained[0]!r}"[:200])
        attempts_from, attempts_up_to = self._attempts()
        started = AgentStarted(
            tasks=tuple(tasks),
            members=tuple(members),
            executions=tuple(executions),
            floors=tuple((uid, *floor) for uid, floor in floors.items()),
            counter=self._counter(),
            past=self.past_runs(),
            drained=reason,
            fates=self._fates(unreadable),
            groups=self._groups(unreadable),
            attempts_from=attempts_from,
            attempts_up_to=attempts_up_to,
        )
        self.unreadable = tuple(unreadable)
        return started

    def _attempts(self) -> tuple[int, int]:
        """The first attempt number after a loss of commits, and the last submission that it applies to."""
        match self.rows(schema.ATTEMPTS):
            case [(int(attempts_from),), (int(attempts_up_to),)]:
                return min(max(attempts_from, 1), ATTEMPT_MAX // 2), attempts_up_to
        return 1, 0

    def _uniform(self) -> dict[int, _Uniform]:
        """The uniform arrays with a waiting member."""
        arrays = {}
        terms = self._terms()
        for counter, key in self.rows(schema.UNIFORM, (UNIFORM_MAX,)):
            first = self.rows(schema.FIRST_MEMBER, (counter,))
            with contextlib.suppress(StoreError):
                self.spec(counter)
                is_sound = isinstance(key, bytes) and [tuple(map(type, row)) for row in first] == [(float, str)]
                if is_sound and not self.each(counter) and not terms.why_damaged(counter):
                    arrays[counter] = _Uniform(key, *first[0])
        return arrays

    def _terms(self) -> _Terms:
        return _Terms(dict(self.rows("SELECT counter, terms FROM submissions WHERE terms IS NOT NULL")))

    def _unfinished(self, arrays: Mapping[int, _Uniform]) -> tuple[list[TaskRow], list[MembersRow]]:
        """The readable unfinished tasks and, separately, the untouched members of these arrays; unreadable tasks are
        remembered as damaged while this agent runs. A value of the wrong type in ended_at sorts after all numbers, so
        that the index finds it."""
        self._damaged = {}
        others = f"t.counter NOT IN ({', '.join(map(str, arrays))})"
        touched = f"t.ended_at = 0 AND t.counter = ? AND NOT ({schema.UNTOUCHED_WITH}) ORDER BY t.member"
        found = chain(
            self.each_found(COLUMNS, f"t.ended_at = 0 AND {others} ORDER BY t.counter, t.member", ()),
            *(
                self.each_found(COLUMNS, touched, (counter, array.submitted_at, array.reason))
                for counter, array in arrays.items()
            ),
            self.each_found(COLUMNS, "t.ended_at > 0 AND t.ended_at >= ''", ()),
        )
        terms = self._terms()
        tasks: list[TaskRow] = []
        damages: list[Damage] = []
        seen: set[object] = set()
        twice: set[object] = set()
        between: dict[object, list[object]] = {counter: [] for counter in arrays}
        while part := list(islice(found, ROWS_AT_A_TIME)):
            for row in part:
                (twice if row[2] in seen else seen).add(row[2])
                if row[0] in between:
                    between[row[0]].append(row[1])
            rows, damaged = self._readable(part)
            damages += damaged
            for record, spec in rows:
                why = _why_unsound(record) or terms.why_damaged(submission_of(record.task))
                if why:
                    damages.append(Damage(record.task, why))
                elif not record.state.is_final:
                    tasks.append(TaskRow(record, spec, terms=terms.of[submission_of(record.task)]))
        members = self._together(arrays, between, seen, terms)
        if members is None:
            return self._unfinished({})  # read row by row to find the damaged ones
        if twice:
            shared = [row.record for row in tasks if row.record.uid in twice]
            damages += [Damage(one.task, f"its uid {one.uid.hex()} is also that of another task") for one in shared]
            tasks = [row for row in tasks if row.record.uid not in twice]
        self._damaged = {damage.task: damage for damage in damages}
        return tasks, members

    def _together(
        self,
        arrays: Mapping[int, _Uniform],
        between: Mapping[object, list[object]],
        uids: AbstractSet[object],
        terms: _Terms,
    ) -> list[MembersRow] | None:
        """The untouched members of all these arrays; None if `_untouched` returns None for one of them."""
        members: list[MembersRow] = []
        for counter, array in arrays.items():
            spans = self._untouched(counter, array, between[counter], uids)
            if spans is None:
                return None
            spec = self.spec(counter)
            terms.why_damaged(counter)
            name = task_name(self._node, counter, SINGLE)
            record = TaskRecord(name, b"", TaskState.QUEUED, array.submitted_at, reason=intern(array.reason))
            members += [
                MembersRow(record, array.key, span[0], span[-1], span.step, spec, terms=terms.of[counter])
                for span in spans
            ]
        return members

    def _untouched(
        self, counter: int, array: _Uniform, between: Sequence[object], uids: AbstractSet[object]
    ) -> list[range] | None:
        """The untouched members of a uniform array, in ranges that none of the members ``between`` interrupts. None if one of
        them is not exactly as it was written, or another task has its uid."""
        spans: list[range] = []
        breaks = sorted(one for one in between if isinstance(one, int))
        rows = self.each_row(schema.MEMBERS, (counter, array.submitted_at, array.reason))
        while part := list(islice(rows, ROWS_AT_A_TIME)):
            members, found = zip(*part, strict=True)
            if {*map(type, members)} != {int} or members[0] < 0 or not uids.isdisjoint(found):
                return None
            if found != tuple(member_uid(array.key, member) for member in members):
                return None
            at = 0
            for one in (*breaks[bisect_left(breaks, members[0]) : bisect_left(breaks, members[-1])], MEMBER_MAX):
                behind = bisect_left(members, one)
                spans += ranges(members[at:behind])
                at = behind
            if len(spans) > 1 and spans[-1].step == spans[-2].step == 1 == spans[-1].start - spans[-2][-1]:
                spans[-2:] = [range(spans[-2].start, spans[-1].stop)]
        return spans

    def _promises(self, unreadable: list[str]) -> tuple[list[ExecutionRecord], dict[bytes, tuple[int, FenceKind, str]]]:
        """Attempts of other homes, and floors. An unreadable row of either counts as the highest floor that it allows."""
        floors: dict[bytes, tuple[int, FenceKind, str]] = {}
        for uid, floor, kind, home in self.rows("SELECT uid, floor, kind, home FROM floors ORDER BY at, uid"):
            if not isinstance(uid, bytes):
                unreadable.append(f"a floor of an unknown task cannot be read: {(uid, floor, kind, home)!r}"[:200])
            elif not isinstance(floor, int) or floor < 1:
                unreadable.append(f"the floor of {uid.hex()} cannot be read; the task is never started here again")
                floors[uid] = FLOOR_MAX, FenceKind.STARTED_ONCE, ""
            else:
                floors[uid] = floor, _floor_kind(kind), home if isinstance(home, str) else ""
        executions = []
        for uid, attempt, raw in self.rows("SELECT uid, attempt, record FROM executions ORDER BY uid, attempt"):
            what = f"execution {uid.hex() if isinstance(uid, bytes) else repr(uid)[:80]}-{attempt!r:.40}"
            try:
                record: ExecutionRecord = decoded_execution(raw, what)
                if (record.uid, record.attempt) == (uid, attempt):
                    executions.append(record)
                    continue
                why, others = f"{what} says that it is {record.uid.hex()}-{record.attempt}", [record.uid]
            except StoreError as error:
                why, others = str(error), []
            unreadable.append(why)
            for one in {uid, *others}:
                if isinstance(one, bytes):
                    highest = attempt if isinstance(attempt, int) and attempt > 0 and not others else FLOOR_MAX
                    floor, _, home = floors.get(one, (0, FenceKind.STARTED, ""))
                    floors[one] = max(floor, highest), FenceKind.STARTED_ONCE, home
        return executions, floors

    def _fates(self, unreadable: list[str]) -> tuple[TaskOutcome, ...]:
        rows = self._sound(
            (str, int, str, str),
            "the outcome of a task that others wait for",
            "SELECT task, is_over, failed, lost FROM fates ORDER BY task",
            (),
            unreadable,
        )
        return tuple(TaskOutcome(task, bool(is_over), failed, lost) for task, is_over, failed, lost in rows)

    def _groups(self, unreadable: list[str]) -> tuple[GroupSettings, ...]:
        rows = self._sound(
            (str, int, int),
            "a group",
            "SELECT name, slots, is_paused FROM groups ORDER BY name",
            (),
            unreadable,
        )
        return tuple(GroupSettings(name, max(slots, 0), bool(is_paused)) for name, slots, is_paused in rows)

    def _counter(self) -> int:
        """Highest known number of a submission, from all rows that contain one."""
        numbers = [row[0] for row in self.rows("SELECT value FROM meta WHERE key IN ('counter', 'removed')")]
        for table in ("submissions", "tasks", "events"):
            numbers += [row[0] for row in self.rows(schema.HIGHEST.format(table=table), (COUNTER_MAX,))]
        return max((number for number in numbers if isinstance(number, int)), default=0)

    def _sound(
        self, types: tuple[type, ...], what: str, sql: str, values: tuple[object, ...], unreadable: list[str]
    ) -> list[Any]:
        """The rows with columns of these types; the others are added to ``unreadable``."""
        rows = []
        for row in self.rows(sql, values):
            if tuple(map(type, row)) == types:
                rows.append(row)
            else:
                unreadable.append(f"{what} cannot be read: {row!r}"[:200])
        return rows


class _Uniform(NamedTuple):
    """A uniform array: the key of its uids, and the common values of the rows of its untouched members."""

    key: bytes
    submitted_at: float
    reason: str


class _Terms:
    """The terms of submissions by number; equal ones share memory. packed: as stored."""

    def __init__(self, packed: dict[int, object]) -> None:
        self._packed = packed
        self._decoded: dict[object, SubmitOptions] = {None: NO_TERMS}
        self._unreadable: dict[int, str] = {}
        self.of: dict[int, SubmitOptions] = {}

    def why_damaged(self, counter: int) -> str:
        """Read the terms of a submission → the reason why they cannot be read, "" if they can."""
        if counter not in self.of:
            raw = self._packed.get(counter)
            try:
                if raw not in self._decoded:
                    self._decoded[raw] = decoded_terms(raw, counter)
            except StoreError as error:
                self._unreadable[counter] = str(error)
            self.of[counter] = self._decoded.get(raw, NO_TERMS)
        return self._unreadable.get(counter, "")


def _why_unsound(record: TaskRecord) -> str:
    """The reason why a readable row is inconsistent; "" if it is not."""
    if len(record.uid) != UID_BYTES:
        return f"its uid has {len(record.uid)} bytes instead of {UID_BYTES}"
    return f"its attempt is {record.attempt}" if record.attempt < 0 else ""


def _floor_kind(kind: object) -> FenceKind:
    """The kind of a floor; an unreadable one counts as the strongest promise."""
    return next((one for one in FenceKind if one == kind), FenceKind.STARTED_ONCE)
