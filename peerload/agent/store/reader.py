"""The reads of a node's database, and the selection of tasks by references, states, node, name, group and tags.

Nothing here writes. A row that cannot be read (a bad disk, a wrong edit) is reported when it is requested, and never hides other
rows from a list.

States and nodes are columns; names, groups and tags are packed in submissions, which are decoded one by one. So selection runs in
a thread, on its own connection. In a list, the waiting, held, done or cancelled members of an array count as one row for each
state, so that an array of a million leaves room for others in a list of 200."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import sqlite3
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.store import schema
from peerload.model.errors import StoreError
from peerload.model.events import PastRun, TaskFound
from peerload.model.task import (
    NO_TERMS,
    SINGLE,
    SubmitOptions,
    TaskRecord,
    TaskSpec,
    TaskState,
    failure_text,
    order_of,
    task_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from peerload.wire import control


BESIDE_WITHIN_S = 10.0
"""Maximum time that a separate connection waits for a locked database."""
PAST_RUNS_MAX = 2000
"""Maximum number of ended tasks from which a starting agent learns its estimates again."""
REF_CHARS_MAX = 4000
"""Maximum length of the ranges in a reference; longer ones are split."""
SUBMISSIONS_AT_A_TIME = 500
TOGETHER = (TaskState.HELD, TaskState.QUEUED, TaskState.DONE, TaskState.CANCELLED)
"""The members of an array in one of these states are one row."""
TOGETHER_IF_MANY = (TaskState.FAILED, TaskState.UNKNOWN)
"""The members of an array in one of these states are one row if there are more than SINGLE_MAX of them; each other task has its own."""
SINGLE_MAX = 20
SPANS_LISTED_MAX = 4
FIRSTS_AT_A_TIME = 250
_PAGE = "t.counter = ? AND t.member > ? AND t.member <= ? ORDER BY t.member LIMIT ?"
_GROUPS = (
    "t.counter, t.state, count(*), min(t.member), max(t.member), count(DISTINCT nullif(t.node, '')),"
    " min(t.node) = max(t.node),"
    " min(nullif(t.started_at, 0)), max(t.ended_at), count(DISTINCT t.reason)"
)


class StoreReader:
    """The reading half of `Store`; for the agent's own thread alone."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._reader: sqlite3.Connection | None = None
        self._who = ""
        self._only = ""
        """A condition on each found task, followed by AND."""
        self._damaged: dict[str, schema.Damage] = {}
        """Unfinished tasks, by id, that could not be read when the agent started, and so do not run."""
        self.unreadable: tuple[str, ...] = ()
        """Other rows that could not be read then, with one sentence for each."""

    def only_of(self, who: str) -> StoreReader:
        """Reader restricted to the tasks that one owner (`owner_key`) may see: tasks in lists, events and counts.
        Reads that name a task or a submission are not restricted, since they are checked before."""
        narrowed = StoreReader(self._node)
        narrowed._reader = self._reader
        narrowed._who = who
        return narrowed

    def owners_of(self, counters: Iterable[int]) -> dict[int, str]:
        wanted = list(dict.fromkeys(counters))
        owners: dict[int, str] = {}
        for first in range(0, len(wanted), SUBMISSIONS_AT_A_TIME):
            some = wanted[first : first + SUBMISSIONS_AT_A_TIME]
            owners.update(self.rows(schema.OWNERS_OF.format(marks=marks(some)), tuple(some)))
        return owners

    def last_counter_of(self, who: str) -> int | None:
        """The number of the last submission of an owner, None if there is none."""
        highest: int | None = self.rows(schema.LAST_OF, (who,))[0][0]
        return highest

    def unfinished_of(self, who: str) -> int:
        """The number of unfinished tasks of an owner; ``node:``: of all users of that node that have no account
        here."""
        return int(self.rows(schema.UNFINISHED_OF_OWNER, _from_to(who))[0][0])

    def output_bytes_of_owner(self, who: str) -> int:
        """Greatest disk use of the outputs of an owner's ended tasks; ``node:`` as in `unfinished_of`."""
        return int(self.rows(schema.OUTPUT_BYTES_OF_OWNER, _from_to(who))[0][0] or 0)

    def past_runs(self) -> tuple[PastRun, ...]:
        """Last ended tasks with a known usage, the oldest first; unreadable rows are skipped."""
        specs: dict[int, TaskSpec] = {}
        each: dict[int, schema.Each] = {}
        runs = []
        for counter, exit_, spec, member, is_each in self.rows(schema.PAST_RUNS, (PAST_RUNS_MAX,)):
            with contextlib.suppress(StoreError):
                if counter not in specs:
                    specs[counter] = schema.decoded_spec(spec, counter)
                    each[counter] = self.each(counter) if is_each else ()
                one = schema.spec_of_member(specs[counter], each[counter], member, f"{self._node}/{counter}")
                runs.append(PastRun(one, schema.decoded_exit(exit_, counter)))
        return tuple(reversed(runs))

    def last_counter(self) -> int | None:
        """The number of the last submission, None if there is none."""
        highest = self.rows(
            "SELECT max(counter) FROM (SELECT max(counter) AS counter FROM submissions"
            " UNION SELECT value FROM meta WHERE key = 'removed')"
        )[0][0]
        if highest is not None and not isinstance(highest, int):
            raise StoreError("the number of a submission cannot be read from the database", why=repr(highest)[:100])
        return highest

    def counter_before(self, counter: int, back: int, who: str | None = None) -> int | None:
        """The number of the submission ``back`` places before this one, among those that are kept; None if there is none.
        ``who``: only among those of this owner."""
        table, only, values = ("submissions", "", ()) if who is None else ("owners", " AND who = ?", (who,))
        rows = self.rows(
            f"SELECT counter FROM {table} WHERE counter < ?{only} ORDER BY counter DESC LIMIT 1 OFFSET ?",  # noqa: S608 -- constants
            (counter, *values, back - 1),
        )
        return int(rows[0][0]) if rows else None

    def has(self, counter: int, index: int | None) -> bool:
        where, values = _where(counter, index)
        return bool(self.rows(f"SELECT 1 FROM tasks t WHERE t.{schema.WHOLE} AND {where} LIMIT 1", values))  # noqa: S608 -- constants

    def records(self, counter: int, index: int | None) -> list[TaskRecord]:
        """The records of one task, or of all members of an array (index None)."""
        return self._records(*_where(counter, index))

    def output_gone(self, task: str) -> tuple[float, str] | None:
        """The time at which the output of an ended task was removed (Unix s), and why; None if it was not."""
        rows = self.rows(
            "SELECT output_gone_at, output_gone_why FROM tasks WHERE counter = ? AND member = ? AND output_gone_at > 0",
            order_of(task),
        )
        return (float(rows[0][0]), str(rows[0][1])) if rows else None

    def was_removed(self, counter: int) -> bool:
        """True if tasks of this number may have been removed after their end."""
        rows = self.rows("SELECT value FROM meta WHERE key = 'removed'")
        return bool(rows) and counter <= rows[0][0]

    def spec(self, counter: int) -> TaskSpec:
        return SubmissionRows(self.rows, {counter}).shared_spec(counter)

    def terms(self, counter: int) -> SubmitOptions:
        rows = self.rows("SELECT terms FROM submissions WHERE counter = ?", (counter,))
        if not rows or rows[0][0] is None:
            return NO_TERMS
        return schema.decoded_terms(rows[0][0], counter)

    def found(self, task: str) -> TaskFound:
        """The state of a task or an array of this home, for nodes whose tasks wait for it: whether it exists, has
        ended or failed."""
        counter, member = order_of(task)
        index = None if member == SINGLE else member
        if not self.has(counter, index):
            return TaskFound(task, is_known=False)
        first, last = (SINGLE, schema.MEMBER_MAX) if index is None else (index, index)
        # read before the failures, so that no failure is missed
        is_over = not self.rows(schema.UNFINISHED_OF, (counter, first, last))
        rows = self.rows(schema.FAILED_OF, (counter, first, last))
        if not rows:
            return TaskFound(task, is_known=True, is_over=is_over)
        failed, state, reason = rows[0]
        name = self._name(counter, failed)
        how = reason if isinstance(reason, str) else "it cannot be read how"
        words = failure_text(name, is_cancelled=state == "cancelled", reason=how)
        return TaskFound(task, is_known=True, failed=words, is_over=is_over)

    def each(self, counter: int) -> schema.Each:
        """The command of each member of an array, from member 1; () if all run the same."""
        rows = self.rows("SELECT commands FROM submissions WHERE counter = ?", (counter,))
        if not rows or rows[0][0] is None:
            return ()
        return schema.decoded_each(rows[0][0], counter)

    def page(self, counter: int, after: int, last: int, limit: int) -> list[TaskRecord]:
        """The first records of a submission with member numbers greater than ``after`` and at most ``last``. The first page
        is after BEFORE_FIRST, the next after the last member of the page."""
        return self._records(_PAGE, (counter, after, last, limit))

    def _records(self, where: str, values: tuple[object, ...]) -> list[TaskRecord]:
        found = self._found(where, values)
        for row in found:
            self._check_damage(row[0], row[1])
        return [schema.decoded_record(row, self._node) for row in found]

    def _check_damage(self, counter: object, member: object) -> None:
        if self._damaged and (name := self._name(counter, member)) in self._damaged:
            raise StoreError(
                f"{name} is damaged: it cannot be read from the database",
                why=self._damaged[name].why,
                hint=f"it stays as it is, and nothing runs it; what happened to it:  peerload events {name}"
                "        submit it again, or, with the agent stopped, repair its row in peerload.db",
            )

    def members(self, counter: int, after: int, last: int, limit: int) -> list[int]:
        """The numbers of the members whose records `page` would read. Raises StoreError if one of them is damaged."""
        found = [row[0] for row in self.each_found("t.member", _PAGE, (counter, after, last, limit))]
        for member in found if self._damaged else ():
            self._check_damage(counter, member)
        return found

    def counts(self) -> dict[str, int]:
        """The number of unfinished tasks in each state that has any."""
        where, values = self._narrowed("counter")
        counts = self.rows(
            f"SELECT state, count(*) FROM tasks WHERE {schema.WHOLE} AND ended_at = 0{where} GROUP BY state",  # noqa: S608 -- constants
            values,
        )
        return {state: number for state, number in counts if state in tuple(TaskState)}

    def list_tasks(
        self, ended_after: float, limit: int, *, states: Sequence[str] = (), node: str = ""
    ) -> schema.TaskPage:
        found, truncated = self.listed(ended_after, limit, states=states, node=node)
        read, damaged = self._readable([row.first for row in found])
        if not states and not node:
            damaged += self.damaged_besides(damaged, limit)
        return schema.TaskPage(read, damaged, truncated)

    @property
    def damaged(self) -> tuple[schema.Damage, ...]:
        return tuple(self._damaged.values())

    @property
    def has_damage(self) -> bool:
        """True if there are unreadable unfinished tasks, which the core does not know."""
        return bool(self._damaged)

    def damaged_besides(self, named: Sequence[schema.Damage], limit: int) -> list[schema.Damage]:
        """Unreadable unfinished tasks, except for those in ``named``."""
        names = {damage.task for damage in named}
        return [damage for damage in self._damaged.values() if damage.task not in names][:limit]

    def read(self, found: Sequence[schema.Found]) -> schema.TaskPage:
        """Decode some rows of `listed`."""
        return schema.TaskPage(*self._readable(found))

    def listed(
        self, ended_after: float, limit: int, *, states: Sequence[str] = (), node: str = "", gathered: bool = False
    ) -> tuple[list[ArrayRow], bool]:
        """Unfinished tasks and those that ended after this time (Unix s), oldest first, as rows that `read` decodes later;
        and True if there were more. gathered: members of arrays share rows.

        If there are more than ``limit`` rows, those on a node come first. The rest is shared by waiting tasks (the next to start
        first, held ones last) and ended ones (the last ended first). ``states`` (none: all) and ``node`` ("": any) restrict the
        list; they exclude unreadable tasks."""
        wanted = [state for state in TaskState if not states or state in states]
        on_node, values = (" AND t.node = ?", (node,)) if node else ("", ())
        unplaced = (TaskState.QUEUED, TaskState.HELD)
        placed = [state for state in wanted if not state.is_final and state not in unplaced]
        final = [state for state in wanted if state.is_final]
        more = limit + 1
        busy = rows(self, f"t.ended_at = 0{on_node}", values, placed, more, gathered=gathered)
        waiting: list[ArrayRow] = []
        for state in unplaced if not node else ():
            if state in wanted:
                waiting += rows(self, "t.ended_at = 0", (), [state], more, gathered=gathered)
        since = max(ended_after, 0.0)
        among = f"t.ended_at > 0 AND t.ended_at > ?{on_node}"  # the first condition selects the index
        ended = rows(self, among, (since, *values), final, more, newest=True, gathered=gathered)
        truncated = len(busy) + len(waiting) + len(ended) > limit
        left = max(limit - len(busy), 0)
        waiting = waiting[: max(left - len(ended), -(-left // 2))]
        kept = busy[:limit] + waiting + ended[: left - len(waiting)]
        return sorted(kept, key=lambda row: row.place), truncated

    def listed_in_thread(
        self, path: Path, ended_after: float, limit: int, criteria: Criteria, *, gathered: bool = False
    ) -> tuple[list[ArrayRow], bool]:
        """`listed`, for another thread."""
        with self.snapshot(path, criteria) as reader:
            return reader.listed(ended_after, limit, states=criteria.states, node=criteria.node, gathered=gathered)

    def behind(self, path: Path, damaged: Sequence[ArrayRow]) -> list[ArrayRow]:
        """The rows of the members after the first one of each of these rows, which cannot be read; for another thread."""
        found: list[ArrayRow] = []
        for row in damaged:
            counter, member, state = row.first[0], row.first[1], row.first[3]
            rest = Criteria(meant=(schema.TaskSelection(counter, ((member + 1, schema.MEMBER_MAX),)),))
            with self.snapshot(path, rest) as reader:
                found += rows(reader, "1", (), [TaskState(state)], SINGLE_MAX, gathered=True)
        return found

    def selected_in_thread(self, path: Path, criteria: Criteria) -> Selected:
        """All matching tasks, for another thread."""
        with self.snapshot(path, criteria) as reader:
            return selected(criteria, reader)

    @contextlib.contextmanager
    def snapshot(self, path: Path, criteria: Criteria) -> Iterator[StoreReader]:
        """A reader with its own connection to the database at ``path``, for another thread: large reads must
        not block the agent's own connection. It finds only tasks that match the criteria."""
        reader = StoreReader(self._node)
        reader._who = self._who
        reader._damaged = self._damaged
        try:
            with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=BESIDE_WITHIN_S)) as connection:
                connection.execute("PRAGMA query_only = 1")
                connection.execute("BEGIN")  # a consistent snapshot
                reader._reader = connection
                if not criteria.is_of_columns:
                    connection.create_function("is_wanted", 2, is_wanted_by(criteria, reader))
                    reader._only = "is_wanted(t.counter, t.member) AND "
                if criteria.meant:
                    counters = [meant.counter for meant in criteria.meant]
                    reader._only = f"t.counter BETWEEN {min(counters):d} AND {max(counters):d} AND {reader._only}"
                yield reader
        except sqlite3.Error as error:
            if not path.parent.exists():
                raise schema.state_gone(path.parent) from None
            raise StoreError("the database cannot be read", why=str(error)) from None

    def ended(self, since: float, after: schema.Place | None, limit: int, *, oldest_first: bool) -> schema.TaskPage:
        """Page of the tasks that ended at ``since`` (Unix s) or later: those that follow ``after`` (None: the
        first). Ordered by end, the last first; or, with ``oldest_first``, by submission."""
        if oldest_first:
            place: tuple[object, ...] = after[1:] if after is not None else (-1, SINGLE)
        else:
            place = after if after is not None else (float("inf"), 0, 0)
        found = self._found(schema.ENDED_OLDEST if oldest_first else schema.ENDED_NEWEST, (since, *place, limit))
        return schema.TaskPage(*self._readable(found), last=schema.place_of(found[-1]) if found else None)

    def before_the_last(self, since: float, number: int) -> schema.Place | None:
        """Among the tasks that ended at ``since`` or later: the place of the one with ``number`` later submitted tasks; None if
        there are not that many."""
        found = self._found(schema.ENDED_BEFORE_LAST, (since, number))
        return schema.place_of(found[0]) if found else None

    # -- events --------------------------------------------------------------------------------------------------------

    def history(self, task: str) -> list[schema.RecordedEvent]:
        """The events of a task of this home, in order; the submission of an array counts for all its members."""
        counter, member = order_of(task)
        rows = self.rows(
            f"SELECT {schema.EVENT_COLUMNS} FROM events WHERE counter = ? AND member IN (?, ?) ORDER BY number",  # noqa: S608 -- constants
            (counter, SINGLE, member),
        )
        return [schema.decoded_event(row, self._node) for row in rows]

    def last_event(self) -> int:
        """The number of the newest event, 0 if there is none."""
        return int(self.rows("SELECT max(number) FROM events")[0][0] or 0)

    def events(
        self, after: int, limit: int, *, newest: bool = False, what: Sequence[str] = (), tasks: Sequence[str] = ()
    ) -> list[schema.RecordedEvent]:
        """Events with greater numbers than ``after``, in order: the first ``limit``, or the ``newest``. ``what`` (none:
        all kinds) restricts them; so do ``tasks``: ids, where an array stands for all its members."""
        where = ["number > ?"]
        values: list[object] = [after]
        if self._who:  # events about no task are visible to all users, except for security events
            where.append(
                "(counter IN (SELECT counter FROM owners WHERE who = ?)"
                " OR (counter IS NULL AND task IS NULL AND what != 'security'))"
            )
            values.append(self._who)
        if what:
            where.append(f"what IN ({marks(what)})")
            values += what
        if tasks:
            each = [self._about(task) for task in tasks]
            where.append(f"({' OR '.join(text for text, _ in each)})")
            values += [value for _, more in each for value in more]
        order = "DESC" if newest else "ASC"
        rows = self.rows(
            f"SELECT {schema.EVENT_COLUMNS} FROM events WHERE {' AND '.join(where)} ORDER BY number {order} LIMIT ?",  # noqa: S608 -- constants
            (*values, limit),
        )
        return [schema.decoded_event(row, self._node) for row in (reversed(rows) if newest else rows)]

    def _about(self, task: str) -> tuple[str, tuple[object, ...]]:
        counter, member = order_of(task)
        if task.partition("/")[0] != self._node:
            return "task = ?", (task,)
        if member == SINGLE:
            return "counter = ?", (counter,)
        return "(counter = ? AND member IN (?, ?))", (counter, SINGLE, member)

    def rows(self, sql: str, values: tuple[object, ...] = ()) -> list[Any]:
        return list(self.each_row(sql, values))

    def _found(self, where: str, values: tuple[object, ...]) -> list[schema.Found]:
        return list(self.each_found(schema.COLUMNS, where, values))

    def each_found(self, columns: str, where: str, values: tuple[object, ...]) -> Iterator[schema.Found]:
        """Yield these columns of each task that matches a condition and this reader's criteria."""
        only, who = self._narrowed("t.counter")
        return self.each_row(
            f"SELECT {columns} FROM tasks t WHERE {self._only}t.{schema.WHOLE}{only} AND {where}",  # noqa: S608 -- constants
            (*who, *values),
        )

    def each_row(self, sql: str, values: tuple[object, ...] = ()) -> Iterator[schema.Found]:
        """The rows of a query, one by one: there may be a million. Raises StoreError."""
        assert self._reader is not None
        try:
            yield from self._reader.execute(sql, values)
        except sqlite3.Error as error:
            raise StoreError("the database cannot be read", why=str(error)) from None

    def _narrowed(self, column: str) -> tuple[str, tuple[object, ...]]:
        """The part of a condition that restricts it to one owner."""
        if not self._who:
            return "", ()
        return f" AND {column} IN (SELECT counter FROM owners WHERE who = ?)", (self._who,)  # noqa: S608 -- constants

    def _readable(self, found: Sequence[schema.Found]) -> tuple[list[tuple[TaskRecord, TaskSpec]], list[schema.Damage]]:
        submissions = SubmissionRows(self.rows, {row[0] for row in found})
        rows: list[tuple[TaskRecord, TaskSpec]] = []
        damaged: list[schema.Damage] = []
        for row in found:
            if self._damaged and (name := self._name(row[0], row[1])) in self._damaged:
                damaged.append(self._damaged[name])
                continue
            try:
                rows.append((schema.decoded_record(row, self._node), submissions.spec_of(row[0], row[1], self._node)))
            except StoreError as error:
                damaged.append(schema.Damage(self._name(row[0], row[1]), str(error)))
        return rows, damaged

    def _name(self, counter: object, member: object) -> str:
        return task_name(self._node, counter, member)


def _from_to(who: str) -> tuple[str, str]:
    return who, f"{who}\U0010ffff" if who.endswith(":") else who


def _where(counter: int, index: int | None) -> tuple[str, tuple[object, ...]]:
    if index is None:
        return "t.counter = ? ORDER BY t.member", (counter,)
    return "t.counter = ? AND t.member = ?", (counter, index)


class Criteria(msgspec.Struct, frozen=True):
    """Selection criteria for tasks; a field at its default selects all. meant: the given references."""

    states: tuple[str, ...] = ()
    node: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    meant: tuple[schema.TaskSelection, ...] = ()

    @classmethod
    def of(cls, request: control.TasksRequest | control.Select, meant: Iterable[schema.TaskSelection]) -> Criteria:
        """The criteria of a request. A task that is shown as running is leased in the database."""
        states = tuple(dict.fromkeys("leased" if state == "running" else state for state in request.states))
        return cls(states, request.node, request.name, request.group, request.tags, tuple(meant))

    @property
    def needs_submissions(self) -> bool:
        """True if submissions have to be decoded to apply it."""
        return bool(self.name or self.group or self.tags)

    @property
    def is_of_columns(self) -> bool:
        """True if the columns of a task are sufficient to apply it."""
        return not self.needs_submissions and not self.meant


class _Named(msgspec.Struct, frozen=True):
    """The fields of a TaskSpec that criteria use."""

    argv: tuple[bytes, ...] = ()
    name: str = ""


class _Marked(msgspec.Struct, frozen=True):
    """The fields of SubmitOptions that criteria use."""

    group: str = ""
    tags: tuple[str, ...] = ()


_named = msgspec.msgpack.Decoder(_Named)
_marked = msgspec.msgpack.Decoder(_Marked)


def is_wanted_by(criteria: Criteria, reader: StoreReader) -> Callable[[object, object], bool]:
    """A function that returns True if a task (number of its submission, of its member) matches."""
    spans: dict[object, tuple[list[int], list[int]]] = {}
    for counter, first, last in schema.apart(
        (meant.counter, *span) for meant in criteria.meant for span in meant.ranges
    ):
        starts, ends = spans.setdefault(counter, ([], []))
        starts.append(first)
        ends.append(last)
    submissions = set(_submissions(criteria, reader)) if criteria.needs_submissions else None

    def is_wanted(counter: object, member: object) -> bool:
        if submissions is not None and counter not in submissions:
            return False
        if not criteria.meant:
            return True
        starts, ends = spans.get(counter, ([], []))
        at = bisect_right(starts, member) - 1 if isinstance(member, int) else -1
        return at >= 0 and isinstance(member, int) and member <= ends[at]

    return is_wanted


def _submissions(criteria: Criteria, reader: StoreReader) -> Iterator[int]:
    """The numbers of the submissions whose name, group and tags match; an unreadable one never matches."""
    is_like = re.compile(fnmatch.translate(criteria.name)).match if criteria.name else None
    for counter, spec, terms in reader.each_row("SELECT counter, spec, terms FROM submissions"):
        try:
            if is_like is not None:
                named = _named.decode(spec)
                name = named.name or named.argv[0].decode("utf-8", "backslashreplace").rpartition("/")[2]
                if not is_like(name):
                    continue
            marked = _Marked() if terms is None else _marked.decode(terms)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, IndexError):
            continue
        if criteria.group and marked.group != criteria.group:
            continue
        if all(_has_tag(marked.tags, tag) for tag in criteria.tags):
            yield counter


def _has_tag(tags: tuple[str, ...], wanted: str) -> bool:
    return any(wanted in (tag, tag.partition("=")[0]) for tag in tags)


class Selected(msgspec.Struct):
    """Matching tasks, before it is known which leased ones run: members by submission, the number in each
    state, and the leased ones as (number of the submission, of the member, uid, attempt)."""

    members: dict[int, list[int]]
    states: Counter[str]
    leased: list[tuple[int, int, bytes, int]]
    sizes: dict[int, int]


def selected(criteria: Criteria, reader: StoreReader) -> Selected:
    """Find all tasks that match."""
    found = Selected({}, Counter(), [], {})
    where: list[str] = ["1"]
    values: list[object] = []
    if criteria.states:
        where.append(f"t.state IN ({', '.join('?' * len(criteria.states))})")
        values += criteria.states
        if not any(state.is_final for state in TaskState if state.value in criteria.states):
            where.append("t.ended_at = 0")
    if criteria.node:
        where.append("t.node = ?")
        values.append(criteria.node)
    for counter, member, state, uid, attempt in reader.each_found(
        "t.counter, t.member, t.state, t.uid, t.attempt", " AND ".join(where), tuple(values)
    ):
        if not isinstance(counter, int) or not isinstance(member, int):
            continue  # a damaged row
        if state == TaskState.LEASED.value:
            found.leased.append((counter, member, uid, attempt))
        else:
            found.members.setdefault(counter, []).append(member)
            found.states[state] += 1
    wanted = {*found.members, *(counter for counter, *_ in found.leased)}
    sizes = reader.each_row("SELECT counter, members FROM submissions")
    found.sizes = {counter: members for counter, members in sizes if counter in wanted}
    return found


def references(node: str, members: dict[int, list[int]], sizes: dict[int, int]) -> list[str]:
    """References to exactly these tasks: an array's id if all its members are included, else ranges."""
    names: list[str] = []
    for counter in sorted(members):
        chosen = members[counter]
        if chosen == [SINGLE] or len(chosen) == sizes.get(counter):
            names.append(f"{node}/{counter}")
            continue
        spans = [(first, last) for _, first, last in schema.apart((0, member, member) for member in chosen)]
        names += [f"{node}/{counter}.{part}" for part in _references(spans)]
    return names


def _references(spans: list[tuple[int, int]]) -> Iterator[str]:
    """The spans as text, as many at a time as fit into a reference."""
    text = ""
    for span in spans:
        more = schema.spans_text((span,))
        if text and len(text) + 1 + len(more) > REF_CHARS_MAX:
            yield text
            text = more
        else:
            text = f"{text},{more}" if text else more
    if text:
        yield text


# -- lists in rows ------------------------------------------------------------------------------------------------------


class ArrayRow(msgspec.Struct, frozen=True):
    """The first of the members of one array in one state, and common values of all of them. spans: at most SPANS_LISTED_MAX of
    their ranges; nodes: number of nodes that they are or were on; started_at: earliest start, 0.0 = none; has_reason, has_node:
    the value of the first is that of all."""

    first: schema.Found
    spans: tuple[tuple[int, int], ...] = ()
    count: int = 1
    nodes: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    has_reason: bool = True
    has_node: bool = True

    @property
    def place(self) -> tuple[float, float]:
        return _number(self.first[0]), _number(self.first[1])


def rows(
    reader: StoreReader,
    where: str,
    values: tuple[object, ...],
    states: Sequence[TaskState],
    limit: int,
    *,
    newest: bool = False,
    gathered: bool = False,
) -> list[ArrayRow]:
    """The first ``limit`` rows of tasks in these states: ordered by number, or with ``newest`` by end, last first. gathered:
    members of arrays share rows; otherwise each task is a row."""
    together = [state for state in states if gathered and state in TOGETHER]
    if_many = [state for state in states if gathered and state in TOGETHER_IF_MANY]
    single = [state for state in states if state not in together]
    order = "max(t.ended_at) DESC" if newest else "t.counter"
    by = "+t.counter" if newest else "t.counter"  # the sign makes SQLite read the recently ended tasks, not all

    def groups(of: list[TaskState], having: str = "") -> list[schema.Found]:
        if not of:
            return []
        among = f"{where} AND t.state IN ({marks(of)}) GROUP BY {by}, t.state{having} ORDER BY {order} LIMIT ?"
        return list(reader.each_found(_GROUPS, among, (*values, *of, limit)))

    many = groups(if_many, f" HAVING count(*) > {SINGLE_MAX}")
    made = _made(reader, where, values, groups(together) + many)
    if single:
        among = f"{where} AND t.state IN ({marks(single)})"
        besides: tuple[object, ...] = ()
        if many:
            among += " AND (t.counter, t.state) NOT IN (SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))"
            besides = (json.dumps([group[:2] for group in many]),)
        order = "t.ended_at DESC" if newest else "t.counter, t.member"
        found = reader.each_found(
            schema.COLUMNS, f"{among} ORDER BY {order} LIMIT ?", (*values, *single, *besides, limit)
        )
        made += [ArrayRow(row, ended_at=_number(row[schema.ENDED_AT])) for row in found]
    made.sort(key=(lambda row: -row.ended_at) if newest else (lambda row: row.place))
    return made[:limit]


def _made(reader: StoreReader, where: str, values: tuple[object, ...], groups: list[schema.Found]) -> list[ArrayRow]:
    made: list[ArrayRow] = []
    for at in range(0, len(groups), FIRSTS_AT_A_TIME):
        some = groups[at : at + FIRSTS_AT_A_TIME]
        places = [(group[0], group[3]) for group in some]
        marked = ", ".join(["(?, ?)"] * len(places))
        found = reader.each_found(
            schema.COLUMNS,
            f"(t.counter, t.member) IN (VALUES {marked})",
            tuple(value for place in places for value in place),
        )
        firsts = {(row[0], row[1]): row for row in found}
        for group in some:
            counter, state, count, first, last, nodes, has_node, started_at, ended_at, reasons = group
            if (counter, first) in firsts:
                spans = _spans(reader, where, values, counter, state, first, last, count)
                told, times = firsts[counter, first], (_number(started_at), _number(ended_at))
                made.append(ArrayRow(told, spans, count, nodes, *times, reasons == 1, bool(has_node)))
    return made


def _spans(
    reader: StoreReader,
    where: str,
    values: tuple[object, ...],
    counter: int,
    state: str,
    first: object,
    last: object,
    count: int,
) -> tuple[tuple[int, int], ...]:
    if isinstance(first, int) and isinstance(last, int) and last - first + 1 == count:
        return ((first, last),)
    spans: list[tuple[int, int]] = []
    members = reader.each_found(
        "t.member", f"{where} AND t.counter = ? AND t.state = ? ORDER BY t.member", (*values, counter, state)
    )
    for (member,) in members:
        if spans and member == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], member)
        elif len(spans) == SPANS_LISTED_MAX:
            break
        else:
            spans.append((member, member))
    return tuple(spans)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


# -- submissions -------------------------------------------------------------------------------------------------------


class SubmissionRows:
    """The submissions of a list of tasks, read together; shared parts are decoded, and kept in memory, only once."""

    def __init__(self, query: Callable[[str, tuple[object, ...]], list[Any]], counters: set[object]) -> None:
        """query: returns the rows of an SQL statement with these values; counters: numbers of the submissions."""
        self._query = query
        self._rows: dict[object, tuple[Any, ...]] = {}
        self._specs: dict[tuple[object, object], TaskSpec] = {}
        self._each: dict[object, schema.Each] = {}
        self._environments: dict[object, bytes] = {}
        wanted = list(counters)
        for first in range(0, len(wanted), SUBMISSIONS_AT_A_TIME):
            some = wanted[first : first + SUBMISSIONS_AT_A_TIME]
            sql = f"SELECT counter, spec, environment, commands FROM submissions WHERE counter IN ({marks(some)})"  # noqa: S608 -- constants
            self._rows.update((row[0], row[1:]) for row in query(sql, tuple(some)))

    def spec_of(self, counter: object, member: object, node: str) -> TaskSpec:
        """The spec of one task. Raises StoreError."""
        spec = self.shared_spec(counter)
        commands = self._rows[counter][2]
        if commands is None:
            return spec
        if counter not in self._each:
            self._each[counter] = schema.decoded_each(commands, counter)
        return schema.spec_of_member(spec, self._each[counter], member, f"{node}/{counter}.{member}")

    def shared_spec(self, counter: object) -> TaskSpec:
        """The spec that all tasks of a submission share. Raises StoreError."""
        found = self._rows.get(counter)
        if found is None:
            raise StoreError(f"submission {counter} is missing from the database")
        packed, digest, _ = found
        spec = self._specs.get((packed, digest))
        if spec is None:
            spec = msgspec.structs.replace(
                schema.decoded_spec(packed, counter), environment=self._environment(digest, counter)
            )
            self._specs[packed, digest] = spec
        return spec

    def _environment(self, digest: object, counter: object) -> bytes:
        if digest not in self._environments:
            found = self._query("SELECT environment FROM environments WHERE digest = ?", (digest,))
            if not found:
                raise StoreError(f"the environment of submission {counter} is missing from the database")
            if not isinstance(found[0][0], bytes):
                raise StoreError(f"the environment of submission {counter} cannot be read from the database")
            self._environments[digest] = found[0][0]
        return self._environments[digest]


def marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
