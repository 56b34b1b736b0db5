"""Task references: `42`, `42.7`, `42.3-9,12`, `ws1/42`, `@` and `@~1`, looked up in the store of one agent."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from peerload.agent.store.schema import BEFORE_FIRST, MEMBER_MAX, TaskSelection, apart, spans_text
from peerload.model.errors import BadRequest, NoSuchTask
from peerload.model.task import order_of, task_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from peerload.agent.store.reader import StoreReader
    from peerload.model.task import TaskRecord

_SPAN = r"[0-9]{1,9}(?:-[0-9]{1,9})?"
REF = re.compile(
    rf"(?:(?P<home>[a-z0-9-]{{1,40}})/)?(?P<counter>[0-9]{{1,18}})(?:\.(?P<members>{_SPAN}(?:,{_SPAN})*))?"
)
LAST = re.compile(r"@(?:~(?P<back>[0-9]{1,6}))?(?P<members>\..*)?", re.DOTALL)
"""`@`: the last submission of the caller; `@~1`: the previous one, among those that are still kept."""

RECORDS_AT_A_TIME = 500
"""Maximum number of records of an array in one read, which takes some milliseconds."""
NAMES_AT_A_TIME = 2000
"""Maximum number of names of array members in one read, which takes some milliseconds."""
KNOWN_AT_A_TIME = 250
"""Maximum number of ids in one lookup."""


def parse_spans(ref: str, members: str) -> tuple[tuple[int, int], ...]:
    """`12,3-9` as ((3, 9), (12, 12)). Raises BadRequest for a range whose start is greater than its end."""
    spans = []
    for part in members.split(","):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise BadRequest(f"{ref!r} is not a task id", why=f"the start of {part} is greater than its end")
        spans.append((0, low, high))
    return tuple((low, high) for _, low, high in apart(spans))


def last_submission(store: StoreReader, ref: str, who: str | None = None) -> str:
    """Resolve `@` and `@~1`, with or without members, to the number of a submission. ``who``: owner key, None = any
    owner. Raises NoSuchTask if there is none, BadRequest for an invalid reference."""
    parsed = LAST.fullmatch(ref)
    if parsed is None:
        raise invalid_task_id(ref)
    back = int(parsed["back"] or 0)
    last = store.last_counter() if who is None else store.last_counter_of(who)
    if last is None:
        raise NoSuchTask("@ stands for your last task, and there is none yet", hint="peerload submit CMD")
    if back:
        last = store.counter_before(last, back, who)
    if last is None:
        raise NoSuchTask(f"{ref}: you have not submitted so many tasks that are still kept", hint="peerload history")
    return f"{last}{parsed['members'] or ''}"


def invalid_task_id(ref: str) -> BadRequest:
    return BadRequest(
        f"{ref!r} is not a task id", why="ids look like 42, 42.7, 42.3-9, ws1/42, @ or @~1", hint="peerload ls"
    )


class TaskIds:
    """Resolves task references in the store of one home. ``node``: the name of the home."""

    def __init__(self, store: StoreReader, node: str) -> None:
        self._store = store
        self._node = node

    def parse(self, ref: str) -> TaskSelection:
        """Parse a reference to tasks of this home. Raises NoSuchTask or BadRequest."""
        named = last_submission(self._store, ref) if ref.startswith("@") else ref
        parsed = REF.fullmatch(named)
        if parsed is None:
            raise invalid_task_id(ref)
        if parsed["home"] not in (None, self._node):
            raise NoSuchTask(f"no task {ref} here", why=f"its home is {parsed['home']}", hint="ask the agent there")
        return TaskSelection(int(parsed["counter"]), parse_spans(ref, parsed["members"]) if parsed["members"] else ())

    def resolve(self, ref: str) -> tuple[int, int | None]:
        """Parse a reference to one task or a whole array → (counter, index). Raises NoSuchTask or BadRequest."""
        meant = self.parse(ref)
        if meant.is_range:
            raise BadRequest(
                f"{ref} names several tasks", why="one task, or a whole array, is needed", hint="peerload ls"
            )
        return meant.counter, meant.spans[0][0] if meant.spans else None

    def unknown_task(self, ref: str) -> NoSuchTask:
        """The error for an id that no task has, or no longer has."""
        if self._store.was_removed(self.parse(ref).counter):
            why = "if there was one, it has ended and was removed since (retention, or peerload clean)"
            return NoSuchTask(f"no such task: {ref}", why=why, hint="list ended tasks:  peerload history")
        return NoSuchTask(f"no such task: {ref}", hint="peerload ls")

    def whole_id(self, ref: str) -> str:
        """The whole id for a reference, of any home. The task may not exist."""
        parsed = REF.fullmatch(ref)
        if parsed is not None and parsed["home"] not in (None, self._node):
            home, meant = parsed["home"], TaskSelection(int(parsed["counter"]))
            if parsed["members"]:
                meant = TaskSelection(meant.counter, parse_spans(ref, parsed["members"]))
        else:
            home, meant = self._node, self.parse(ref)
        return f"{home}/{meant.counter}" + (f".{spans_text(meant.spans)}" if meant.spans else "")

    def known_id(self, ref: str) -> str:
        """The whole id of an existing task or array of this home. Raises NoSuchTask, BadRequest for a range."""
        if not self._store.has(*self.resolve(ref)):
            raise self.unknown_task(ref)
        return self.whole_id(ref)

    async def known_ids(self, refs: Sequence[str]) -> tuple[str, ...]:
        """The whole ids of all references; ranges are expanded. Yields to other work in between. Raises NoSuchTask."""
        names: list[str] = []
        for number, ref in enumerate(refs, start=1):
            if self.parse(ref).is_range:
                names += await self.names((ref,))
            else:
                names.append(self.known_id(ref))
            if number % KNOWN_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return tuple(names)

    async def names(self, refs: Sequence[str]) -> tuple[str, ...]:
        """The ids of all tasks that the references name, each once; arrays are expanded to their members. Yields to other work
        in between. Raises NoSuchTask if a reference has no task."""
        names: dict[str, None] = {}
        for number, ref in enumerate(refs, start=1):
            meant, has_any = self.parse(ref), False
            for first, last in meant.ranges:
                after = first - 1
                while members := self._store.members(meant.counter, after, last, NAMES_AT_A_TIME):
                    after, has_any = members[-1], True
                    names.update(dict.fromkeys(task_name(self._node, meant.counter, member) for member in members))
                    await asyncio.sleep(0)
            if not has_any:
                raise self.unknown_task(ref)
            if number % KNOWN_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return tuple(names)

    def first(self, ref: str) -> TaskRecord:
        """The record of the task, or of the first member of the array. Raises NoSuchTask."""
        return self._some(ref, 1)[0]

    def _some(self, ref: str, limit: int) -> list[TaskRecord]:
        counter, index = self.resolve(ref)
        after, last = (BEFORE_FIRST, MEMBER_MAX) if index is None else (index - 1, index)
        records = self._store.page(counter, after, last, limit)
        if not records:
            raise self.unknown_task(ref)
        return records

    async def pages(self, ref: str, limit: int = RECORDS_AT_A_TIME) -> AsyncIterator[list[TaskRecord]]:
        """The records of a task, an array or a range, ``limit`` at a time. Yields to other work in between, since an array
        may be large. Raises NoSuchTask if there is none."""
        meant = self.parse(ref)
        has_any = False
        for number, (first, last) in enumerate(meant.ranges, start=1):
            after = first - 1
            while page := self._store.page(meant.counter, after, last, limit):
                after = order_of(page[-1].task)[1]
                has_any = True
                yield page
                if len(page) < limit:
                    break
                await asyncio.sleep(0)
            if number % KNOWN_AT_A_TIME == 0:
                await asyncio.sleep(0)
        if not has_any:
            raise self.unknown_task(ref)

    async def all_pages(self, refs: Sequence[str]) -> AsyncIterator[list[TaskRecord]]:
        """The pages of several references in their order. Raises NoSuchTask if one has no task."""
        for number, ref in enumerate(refs, start=1):
            async for page in self.pages(ref):
                yield page
            if number % KNOWN_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def single(self, ref: str) -> TaskRecord:
        """The record of one task. Raises NoSuchTask, BadRequest for an array."""
        records = self._some(ref, 2)
        if len(records) > 1:
            raise BadRequest(f"{ref} is an array", why="name one of its members", hint=f"such as {records[0].task}")
        return records[0]
