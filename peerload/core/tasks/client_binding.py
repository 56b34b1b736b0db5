"""Binding of tasks to their client: a task that somebody waits for in front of a terminal ends with its client.

A connection that is closed while nobody has left the task to itself means that its client was ended: the task is
cancelled, also if it was only being made. A restart of this node closes all of them; then a task has attended_s until its
client must be back: it attends it again, or says its submission again. That a task is attended is in its record, which
connections attend it only in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.work import QUEUED_PHASES
from peerload.model import metrics, timers
from peerload.model.actions import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peerload.core.state import CoreState
    from peerload.core.tasks.batched_requests import BatchedRequests
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask
    from peerload.model import events

SIGTERM = 15
CLIENT_GONE = "its client is gone"
NOT_BACK = "its client did not come back after a restart of this agent"
DETACHED = "left to itself by its client"
CUT = "more was sent to its standard input than is kept for another attempt"


class ClientBinding:
    """One per node; its timer is ``attended``."""

    def __init__(self, state: CoreState, home: Home, batches: BatchedRequests) -> None:
        self._state = state
        self._home = home
        self._batches = batches
        self._clients: dict[int, dict[bytes, None]] = {}
        self._attending: dict[bytes, dict[int, None]] = {}
        self._coming: dict[int, int] = {}
        """Clients whose submissions are being made, and how many of each."""
        self._gone: dict[int, None] = {}
        """The clients among them that are gone."""
        self._expected: dict[bytes, None] = {}
        """Tasks whose client has a while to come back after a restart."""

    def submission_begun(self, client: int) -> None:
        """Tasks that this client attends are about to be taken in."""
        if client:
            self._coming[client] = self._coming.get(client, 0) + 1

    def submission_done(self, client: int) -> None:
        """All of them have been."""
        if not client:
            return
        self._coming[client] -= 1
        if not self._coming[client]:
            del self._coming[client]
            self._gone.pop(client, None)

    def submitted(self, task: HomeTask, clients: Iterable[int]) -> None:
        """A task that these clients attend was taken in, and is durable; or one has said so again."""
        if not task.record.attended or task.record.state.is_final:
            return
        for client in clients:
            if client not in self._gone:
                self._attend(task, client)
        if not self._is_awaited(task):
            self._end_unattended(task)

    def _attend(self, task: HomeTask, client: int) -> None:
        self._clients.setdefault(client, {})[task.uid] = None
        self._attending.setdefault(task.uid, {})[client] = None
        self._await_no_more(task)

    def _is_awaited(self, task: HomeTask) -> bool:
        """True if its client has a while still to come back after a restart."""
        return task.uid in self._expected

    def _await_no_more(self, task: HomeTask) -> None:
        if self._is_awaited(task):
            del self._expected[task.uid]
            self._state.clear_timer(timers.ClientTimeout.of(task.uid))

    def left(self, task: HomeTask) -> None:
        """Forget a task that is over."""
        for client in self._attending.pop(task.uid, ()):
            self._leave(client, task.uid)
        self._await_no_more(task)

    def attend(self, event: events.AttendRequested) -> None:
        """Bind a task to a client that is back."""
        task = self._home.by_id.get(event.task)
        is_attended = task is not None and task.record.attended and not task.record.state.is_final
        if task is not None and is_attended:
            self._attend(task, event.client)
        self._state.actions.append(Answer(event.request, {"attended": is_attended}))

    def detach(self, event: events.DetachRequested) -> None:
        """Detach a task from all its clients: it runs on without them."""
        task = self._home.by_id.get(event.task)
        if task is not None and task.record.attended and not task.record.state.is_final:
            for client in self._attending.pop(task.uid, {}):
                self._leave(client, task.uid)
            self._await_no_more(task)
            self._home.become(task, DETACHED, attended=False)
        self._state.actions.append(Answer(event.request, {}))

    def gone(self, client: int) -> None:
        """Cancel the tasks of a connection that is closed; many of them in batches."""
        if client in self._coming:
            self._gone[client] = None
        uids = self._clients.pop(client, None)
        if uids:
            self._batches.carry_out(-client, self._end_with(client, uids))

    def _end_with(self, client: int, uids: dict[bytes, None]) -> Iterator[None]:
        others: list[bytes] = []
        for uid in uids:
            left = self._attending.get(uid)
            if left is not None:
                left.pop(client, None)
                if not left:
                    del self._attending[uid]
            task = self._home.tasks.get(uid)
            if (
                task is not None and task.phase in QUEUED_PHASES
            ):  # these first: else they would start in the room that others leave
                self._end_unattended(task)
            else:
                others.append(uid)
            yield
        for uid in others:
            self._end_unattended(self._home.tasks.get(uid))
            yield

    def _end_unattended(self, task: HomeTask | None) -> None:
        if task is not None and task.uid not in self._attending:  # another client may have come meanwhile
            self._end(task, CLIENT_GONE)

    def _leave(self, client: int, uid: bytes) -> None:
        uids = self._clients.get(client, {})
        uids.pop(uid, None)
        if not uids:
            self._clients.pop(client, None)

    def restored(self) -> None:
        """After a restart: no connection is there any more."""
        for task in self._home.tasks.values():
            if task.record.attended and not task.record.state.is_final:
                self._expected[task.uid] = None
                self._state.set_timer_in(self._state.config.attended_s, timers.ClientTimeout.of(task.uid))

    def timed_out(self, task: HomeTask) -> None:
        """End a task whose client has not come back in time."""
        if self._is_awaited(task):
            del self._expected[task.uid]
            self._end(task, NOT_BACK)

    def cut(self, uid: bytes) -> None:
        """The beginning of its input is to be dropped: durable before it is."""
        task = self._home.tasks.get(uid)
        if task is not None and not task.record.state.is_final and not task.record.input_is_cut:
            self._home.become(task, CUT, input_is_cut=True)

    def input_came(self, uid: bytes) -> None:
        """Note that its input has come. That is durable with its next state, at the latest with its end: nobody asks before."""
        task = self._home.tasks.get(uid)
        if task is not None and not task.record.input_came:
            task.record = msgspec.structs.replace(task.record, input_came=True)

    def _end(self, task: HomeTask | None, reason: str) -> None:
        if task is not None and task.record.attended and not task.record.state.is_final:
            self._state.count(metrics.TASKS_CANCELLED_WITH_CLIENT)
            self._home.cancel(task, SIGTERM, force=False, reason=reason)
