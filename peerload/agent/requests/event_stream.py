"""The verb `events`: past events, and with ``follow`` those to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.views import task as views
from peerload.model.errors import NoSuchTask

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.wire import control

EVENTS_AT_A_TIME = 256


class EventRequests:
    """The verb `events` of one agent, whose node is called ``node``."""

    def __init__(self, reads: DurableReads, task_ids: TaskIds, access: Authorization, node: str) -> None:
        self._reads = reads
        self._task_ids = task_ids
        self._access = access
        self._node = node

    async def events(self, connection: Connection, request: control.Events) -> None:
        """Send the newest events, oldest first; with ``follow`` those to come."""
        await self._reads.readable(connection, events=True)
        store = self._access.store(connection.caller)
        names = [self._whole_id(ref, follow=request.follow) for ref in request.tasks]
        with self._reads.event_log.followed() as news:
            last = store.last_event()  # no await since `followed`: no event is missed
            shown = store.events(0, request.limit, newest=True, what=request.what, tasks=names) if request.limit else []
            while True:
                if shown:
                    await connection.stream(request.id, {"events": [views.event_object(event) for event in shown]})
                if not request.follow:
                    break
                shown = store.events(last, EVENTS_AT_A_TIME, what=request.what, tasks=names)
                last = shown[-1].number if shown else last
                if not shown:
                    await news.wait()
                    news.clear()
        connection.ok(request.id, {"events": []})

    def _whole_id(self, ref: str, *, follow: bool) -> str:
        """The whole id of a task of this home, or of another that was here. Raises NoSuchTask."""
        name = self._task_ids.whole_id(ref)
        home = name.partition("/")[0]
        if home == self._node:
            return self._task_ids.known_id(ref)
        if not follow and not self._reads.store.events(0, 1, newest=True, tasks=[name]):
            why = f"its home is {home}, and nothing of it was ever here"
            raise NoSuchTask(f"no such task: {ref}", why=why, hint="ask the agent there")
        return name
