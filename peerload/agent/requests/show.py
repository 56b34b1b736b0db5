"""The verb `show`: everything about some tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.control.authorization import display_user
from peerload.agent.requests.overview import own_user
from peerload.agent.requests.task_lists import send_page, task_row, why_waiting
from peerload.agent.store.rows import member_spec
from peerload.agent.views import remote_task
from peerload.agent.views import task as views
from peerload.agent.views.completion import completion_object
from peerload.core.work import as_recorded

if TYPE_CHECKING:
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.core_requests import Decisions
    from peerload.agent.control.quotas import Quotas
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.output.spool import Spool
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.core.node import Node
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskRecord, TaskSpec
    from peerload.wire import control

PAGE_TASKS = 50
"""Tasks in one page; others have their turn between two pages."""


class ShowRequests:
    """The verb `show` of one agent."""

    def __init__(
        self,
        reads: DurableReads,
        task_ids: TaskIds,
        quotas: Quotas,
        spool: Spool,
        node: Node,
        decisions: Decisions,
    ) -> None:
        self._reads = reads
        self._task_ids = task_ids
        self._quotas = quotas
        self._spool = spool
        self._node = node
        self._decisions = decisions
        self._user = own_user()

    async def show(self, connection: Connection, request: control.Show) -> None:
        """Show tasks of this home; with ``at`` tasks of other homes that are here, too. Raises NoSuchTask."""
        store = await self._reads.readable(connection, events=True)
        shown: list[dict[str, object]] = []
        for ref in request.tasks:
            if request.at and (guest := remote_task.find(self._node, ref)) is not None:
                shown.append(remote_task.shown(self._node, guest, display_user(guest.spec, self._user)))
                continue
            counter = self._task_ids.parse(ref).counter
            if not store.has(counter, None):
                raise self._task_ids.unknown_task(ref)
            spec = store.spec(counter)
            each, terms = store.each(counter), store.terms(counter)
            async for page in self._task_ids.pages(ref, PAGE_TASKS):
                shown += [self._shown(record, member_spec(spec, each, record.task), terms) for record in page]
                if len(shown) >= PAGE_TASKS:
                    await send_page(self._quotas, connection, request.id, shown, len(shown))
                    shown = []
        connection.ok(request.id, {"tasks": shown})

    def _shown(self, record: TaskRecord, submitted: TaskSpec, terms: SubmitOptions) -> dict[str, object]:
        store, spec = self._reads.store, as_recorded(submitted, record)
        task = task_row(self._node, record, spec, self._user)
        if task["state"] == "queued":
            task["reason"] = why_waiting(self._node, record)
        task |= views.error_line(self._spool, record)
        task |= views.detail_object(spec, record, views.devices_of(self._node, record))
        task |= views.output_gone_object(store, record) | completion_object(store, record, spec, terms)
        task |= views.submit_options_object(terms, record) | views.learned_gpu_memory(self._node.state.history, spec)
        task["history"] = [views.history_step(event) for event in store.history(record.task)]
        task["decision"] = self._decisions.of_task(record.task)
        return task
