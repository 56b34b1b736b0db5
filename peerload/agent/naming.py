"""What a client means by `42`, `42.7`, `ws1/42` or `@`."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from peerload.agent.store_read import BEFORE_FIRST, order_of
from peerload.model.errors import BadRequest, NoSuchTask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from peerload.agent.parts import Parts
    from peerload.model.task import TaskRecord

REF = re.compile(r"(?:(?P<home>[a-z0-9-]{1,40})/)?(?P<counter>[0-9]{1,18})(?:\.(?P<index>[0-9]{1,9}))?")

RECORDS_AT_A_TIME = 500
"""Records read of an array before others have their turn: some milliseconds."""


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

    def full(self, ref: str) -> str:
        """The whole id; whether there is such a task, and whether its home is here, is not looked at."""
        parsed = REF.fullmatch(ref)
        if parsed is not None and parsed["home"] not in (None, self._parts.config.node):
            return ref
        counter, index = self.resolve(ref)
        return f"{self._parts.config.node}/{counter}" + ("" if index is None else f".{index}")

    def known(self, ref: str) -> str:
        """The whole id of a task or an array of this home. Raises NoSuchTask if there is none."""
        if not self._parts.store.has(*self.resolve(ref)):
            raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
        return self.full(ref)

    def records(self, ref: str) -> list[TaskRecord]:
        """The task, or all members of the array. Raises NoSuchTask if there is none."""
        records = self._parts.store.records(*self.resolve(ref))
        if not records:
            raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
        return records

    async def pages(self, ref: str) -> AsyncIterator[list[TaskRecord]]:
        """The same, RECORDS_AT_A_TIME of them, others having their turn in between: an array may be large."""
        counter, index = self.resolve(ref)
        after = BEFORE_FIRST
        while page := self._parts.store.page(counter, index, after, RECORDS_AT_A_TIME):
            after = order_of(page[-1].task)[1]
            yield page
            if len(page) < RECORDS_AT_A_TIME:
                return
            await asyncio.sleep(0)
        if after == BEFORE_FIRST:
            raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")

    def single(self, ref: str) -> TaskRecord:
        """The one task of this name. Raises BadRequest for an array."""
        records = self.records(ref)
        if len(records) > 1:
            raise BadRequest(f"{ref} is an array", why="name one of its members", hint=f"such as {records[0].task}")
        return records[0]
