"""The verb `clean`: removes ended tasks, or only their outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.store.pruning import RemovalCriteria
from peerload.model.errors import BadRequest

if TYPE_CHECKING:
    from peerload.agent.completion.retention import Removed, TaskRemover
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.core.node import Node
    from peerload.wire import control

REASON = "peerload clean"


class CleanRequests:
    """The verb `clean` of one agent."""

    def __init__(self, remover: TaskRemover, reads: DurableReads, task_ids: TaskIds, node: Node) -> None:
        self._remover = remover
        self._reads = reads
        self._task_ids = task_ids
        self._node = node

    async def clean(self, connection: Connection, request: control.Clean) -> None:
        """Remove ended tasks, and tell which. Raises BadRequest if one that is named has not ended, NoSuchTask if there is
        none."""
        if request.tasks and request.keep:
            raise BadRequest("clean: tasks are named, or the newest are kept; not both")
        for name in await self._task_ids.known_ids(request.tasks):
            if unfinished := len(self._node.home.named(name)):
                of = f": {unfinished} of its members have not" if "." not in name and unfinished > 1 else ""
                raise BadRequest(f"{name} has not ended{of}", hint=f"to end it:  peerload cancel {name}")
        wanted = RemovalCriteria(
            before=self._reads.store.date.now() - request.older_s if request.older_s else float("inf"),
            states=request.states,
            keep=request.keep,
            named=tuple(
                (meant.counter, *span) for meant in map(self._task_ids.parse, request.tasks) for span in meant.ranges
            ),
            with_output=request.outputs_only,
            who="" if connection.caller.sees_all else connection.caller.who,
        )

        async def tell(removed: Removed) -> None:
            names, removed.names = removed.names, []
            await connection.stream(request.id, {"tasks": names})

        gone = await self._remover.remove(
            wanted, outputs_only=request.outputs_only, why=REASON, is_tried=request.dry_run, told=tell
        )
        if gone.tasks and not request.dry_run:
            what = "the outputs of" if request.outputs_only else ""
            reason = f"{what} {gone.tasks} ended tasks, {gone.output_bytes} bytes of output: {REASON}".strip()
            self._reads.event_log.happened("store", "removed", reason=reason)
        counts = {"outputs": gone.outputs, "output_bytes": gone.output_bytes, "in_use": gone.in_use}
        connection.ok(request.id, {"removed": gone.tasks, **counts})
