"""The verbs of a client that is attached to a running task: input, resize, attend and detach; and its disconnect.

Input is answered when there is room for more (backpressure). A client that disconnects without `detach` was killed: the
core cancels the tasks that it attends, and the input of others that it feeds ends there, as that of a pipe would.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from peerload.model.errors import BadRequest
from peerload.model.events import AttendRequested, ClientGone, DetachRequested

if TYPE_CHECKING:
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.core_requests import CoreRequests
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.stdin import StdinForwarding, StdinStore, StoredStdin
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.core.node import Node
    from peerload.model.actions import TaskChanged
    from peerload.model.task import TaskRecord
    from peerload.wire import control

FEEDER_GRACE_S = 30.0
"""Time for the client of an input to reconnect after a restart of this agent; then the input ends."""


class AttachRequests:
    """Clients of one agent that are attached to tasks."""

    def __init__(
        self,
        core: CoreRequests,
        task_ids: TaskIds,
        stdin: StdinStore,
        forwarding: StdinForwarding,
        disk: DiskSpace,
        node: Node,
    ) -> None:
        self._core = core
        self._task_ids = task_ids
        self._stdin = stdin
        self._forwarding = forwarding
        self._disk = disk
        self._node = node
        self._client_numbers: dict[Connection, int] = {}
        self._last_number = 0
        self._watched: set[Connection] = set()

    # -- verbs ---------------------------------------------------------------------------------------------------------

    async def input(self, connection: Connection, request: control.Input) -> None:
        """Take more of a task's standard input; answer when there is room for more."""
        record = self._record(request.task)
        source = self._source(record)
        if source is None:
            connection.ok(request.id, {"offset": 0, "wanted": False, "ended": True})
            return
        self._disk.admit_input(len(request.data))
        self._take_over(connection, record, source, request)
        source.uid = record.uid
        source.add(request.data, request.offset)
        self._forwarding.note_input(record, source)
        if request.ends:
            await source.finish()
        self._forwarding.sent(record.uid)
        connection.ok(request.id, await source.room())

    def _take_over(
        self, connection: Connection, record: TaskRecord, source: StoredStdin, request: control.Input
    ) -> None:
        """Make this client the feeder of the task. Raises BadRequest while another one is; a terminal has room for all."""
        is_shared = self._is_terminal(record)
        if not is_shared and source.feeder not in (None, connection):
            raise BadRequest(f"another client sends the input of {record.task}", why="only one can")
        if (request.data or request.ends or request.offset is not None) and source.feeder is not connection:
            source.feeder = connection
            source.ends_with_feeder = request.is_source and not is_shared
            self.watch_connection(connection)

    def _is_terminal(self, record: TaskRecord) -> bool:
        task = self._node.home.tasks.get(record.uid)
        return task is not None and task.spec.terminal is not None

    def _record(self, ref: str) -> TaskRecord:
        """The newest record; read from the store only if the task has ended."""
        task = self._node.home.by_id.get(self._task_ids.whole_id(ref))
        return task.record if task is not None else self._task_ids.single(ref)

    def _source(self, record: TaskRecord) -> StoredStdin | None:
        """The input of a task; None if the task has ended. Raises BadRequest if it has none."""
        if not record.input:
            raise BadRequest(f"{record.task} does not read its standard input", why="it was submitted without one")
        return None if record.state.is_final else self._stdin.get(record.input)

    def resize(self, connection: Connection, request: control.Resize) -> None:
        """Set the size of the window of a task's terminal."""
        record = self._record(request.task)
        if not self._is_terminal(record):
            raise BadRequest(f"{record.task} has no terminal", why="it was not run with --pty, or has ended")
        source = self._source(record)
        if source is not None:
            source.resize(request.rows, request.columns)
            self._forwarding.resized(record.uid)
        connection.ok(request.id, {})

    def attend(self, connection: Connection, request: control.Attend) -> None:
        """Attach the client of a task again."""
        name = self._task_ids.whole_id(request.task)
        client = self.client_number(connection)
        number = self._core.expect(connection, request.id)
        self._core.put(AttendRequested(number, client, name))

    def client_number(self, connection: Connection) -> int:
        """The number that the core knows this connection by. Its disconnect matters from now on."""
        if connection not in self._client_numbers:
            self._last_number += 1
            self._client_numbers[connection] = self._last_number
            self.watch_connection(connection)
        return self._client_numbers[connection]

    def watch_connection(self, connection: Connection) -> None:
        """Notice the disconnect of this client."""
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_disconnect.append(lambda: self._client_gone(connection))

    async def detach(self, connection: Connection, request: control.Detach) -> None:
        """Detach the client of a task; the task runs on."""
        record = self._record(request.task)
        if record.input and not record.state.is_final:
            source = self._stdin.get(record.input)
            if source.feeder is connection:
                await source.leave()
        self._core.put(DetachRequested(self._core.expect(connection, request.id), record.task))

    # -- disconnects ---------------------------------------------------------------------------------------------------------

    def _client_gone(self, connection: Connection) -> None:
        """A client has disconnected, or was killed."""
        self._watched.discard(connection)
        client = self._client_numbers.pop(connection, 0)
        for source in self._stdin.left_by(connection):
            source.feeder = None
            if not client and source.ends_with_feeder:
                source.end()
                self._forwarding.sent(source.uid)
        if client:
            self._core.put(ClientGone(client))

    def restored(self) -> None:
        """This agent was restarted: clients that were feeding tasks which need no client have FEEDER_GRACE_S to reconnect;
        then the input ends. An input that its client has detached from stays open."""
        for task in list(self._node.home.tasks.values()):
            if not task.record.input:
                continue
            source = self._stdin.get(task.record.input)
            self._forwarding.note_input(task.record, source)
            if task.record.attended:
                continue
            if not (source.has_ended or source.was_left):
                loop = asyncio.get_running_loop()
                loop.call_later(FEEDER_GRACE_S, self._end_abandoned, task.uid)

    def _end_abandoned(self, uid: bytes) -> None:
        task = self._node.home.tasks.get(uid)
        if task is not None and task.record.input:
            source = self._stdin.get(task.record.input)
            if source.feeder is None and not source.was_left:
                source.end()
                self._forwarding.sent(uid)

    def changed(self, action: TaskChanged) -> None:
        """A task of this home has a new record."""
        self._forwarding.changed(action)
