"""What a client means by `42`, `42.7`, `ws1/42` or `@`."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from peerload.agent.store_rows import BEFORE_FIRST, order_of
from peerload.model.errors import BadRequest, NoSuchTask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from peerload.agent.parts import Parts
    from peerload.model.task import TaskRecord
    from peerload.wire import control

REF = re.compile(r"(?:(?P<home>[a-z0-9-]{1,40})/)?(?P<counter>[0-9]{1,18})(?:\.(?P<index>[0-9]{1,9}))?")

RECORDS_AT_A_TIME = 500
"""Records read of an array before others have their turn: some milliseconds."""
KNOWN_AT_A_TIME = 250
"""Names looked up before others have their turn."""


def refs_of(request: control.Request) -> tuple[str, ...]:
    """The tasks that a request names, to do something with them."""
    task = getattr(request, "task", None)
    if isinstance(task, str):
        return (task,)
    tasks = getattr(request, "tasks", ())
    return tasks if isinstance(tasks, tuple) else ()


class Names:
    """Looks names up in the store of one agent."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def resolve(self, ref: str) -> tuple[int, int | None]:
        """A name as (counter, index). Raises NoSuchTask or BadRequest."""
        node = self._parts.config.node
        if ref.startswith("@"):
            last = self._parts.store.last_counter()
            if last is None:
                raise NoSuchTask("@ stands for your last task, and there is none yet", hint="peerload submit CMD")
            ref = f"{last}{ref[1:]}"
        parsed = REF.fullmatch(ref)
        if parsed is None:
            raise BadRequest(f"{ref!r} is no task id", why="ids look like 42, 42.7, ws1/42 or @", hint="peerload ls")
        if parsed["home"] not in (None, node):
            raise NoSuchTask(f"no task {ref} here", why=f"its home is {parsed['home']}", hint="ask the agent there")
        return int(parsed["counter"]), int(parsed["index"]) if parsed["index"] is not None else None

    def unknown(self, ref: str) -> NoSuchTask:
        """What is said of a name that no task has (any more)."""
        if self._parts.store.was_removed(self.resolve(ref)[0]):
            why = "if there was one, it has ended and was removed since (retention, or peerload clean)"
            return NoSuchTask(f"no such task: {ref}", why=why, hint="what there is:  peerload history")
        return NoSuchTask(f"no such task: {ref}", hint="peerload ls")

    def full(self, ref: str) -> str:
        """The whole id; whether there is such a task, and whether its home is here, is not looked at."""
        parsed = REF.fullmatch(ref)
        if parsed is not None and parsed["home"] not in (None, self._parts.config.node):
            member = "" if parsed["index"] is None else f".{int(parsed['index'])}"
            return f"{parsed['home']}/{int(parsed['counter'])}{member}"
        counter, index = self.resolve(ref)
        return f"{self._parts.config.node}/{counter}" + ("" if index is None else f".{index}")

    def known(self, ref: str) -> str:
        """The whole id of a task or an array of this home. Raises NoSuchTask if there is none."""
        if not self._parts.store.has(*self.resolve(ref)):
            raise self.unknown(ref)
        return self.full(ref)

    async def all_known(self, refs: Sequence[str]) -> tuple[str, ...]:
        """The whole ids of all these, others having their turn in between. Raises NoSuchTask if there is nothing of one."""
        names = []
        for number, ref in enumerate(refs, start=1):
            names.append(self.known(ref))
            if number % KNOWN_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return tuple(names)

    def first(self, ref: str) -> TaskRecord:
        """The task, or the first member of the array. Raises NoSuchTask if there is none."""
        return self._some(ref, 1)[0]

    def _some(self, ref: str, limit: int) -> list[TaskRecord]:
        records = self._parts.store.page(*self.resolve(ref), BEFORE_FIRST, limit)
        if not records:
            raise self.unknown(ref)
        return records

    async def pages(self, ref: str, limit: int = RECORDS_AT_A_TIME) -> AsyncIterator[list[TaskRecord]]:
        """The task, or the members of the array, ``limit`` at a time, others having their turn in between: an array may be
        large. Raises NoSuchTask if there is none."""
        counter, index = self.resolve(ref)
        after = BEFORE_FIRST
        while page := self._parts.store.page(counter, index, after, limit):
            after = order_of(page[-1].task)[1]
            yield page
            if len(page) < limit:
                return
            await asyncio.sleep(0)
        if after == BEFORE_FIRST:
            raise self.unknown(ref)

    async def all_pages(self, refs: Sequence[str]) -> AsyncIterator[list[TaskRecord]]:
        """The pages of all these, one name after the other, others having their turn in between. Raises NoSuchTask if there is
        nothing of one of them."""
        for number, ref in enumerate(refs, start=1):
            async for page in self.pages(ref):
                yield page
            if number % KNOWN_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def single(self, ref: str) -> TaskRecord:
        """The one task of this name. Raises BadRequest for an array."""
        records = self._some(ref, 2)
        if len(records) > 1:
            raise BadRequest(f"{ref} is an array", why="name one of its members", hint=f"such as {records[0].task}")
        return records[0]
