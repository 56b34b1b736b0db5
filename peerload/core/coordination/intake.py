"""Intake of submitted tasks: refuse, make durable, answer, dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import Answer
from peerload.model.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.core.coordination.dispatch import TaskDispatch
    from peerload.core.state import CoreState
    from peerload.core.tasks.batched_requests import BatchedRequests
    from peerload.core.tasks.client_binding import ClientBinding
    from peerload.core.tasks.eligibility import Eligibility
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.submission import SubmissionLog
    from peerload.model.events import TaskSubmitted


class Intake:
    """One per node; it keeps nothing but the submissions. ``client_binding`` hears of each new task."""

    def __init__(
        self,
        state: CoreState,
        home: Home,
        submissions: SubmissionLog,
        batches: BatchedRequests,
        eligibility: Eligibility,
        client_binding: ClientBinding,
        dispatch: TaskDispatch,
    ) -> None:
        self._state = state
        self._home = home
        self._submissions = submissions
        self._batches = batches
        self._eligibility = eligibility
        self._client_binding = client_binding
        self._dispatch = dispatch

    def submitted(self, event: TaskSubmitted) -> None:
        """Kept, answered, and considered; or refused. One that names tasks to wait for only once there are known to be such."""
        if not event.terms.awaits or self._submissions.is_known(event):
            self.accepted(event)
        else:
            self._eligibility.remote_status.begin(event, self._submissions.counter)

    def accepted(self, event: TaskSubmitted) -> None:
        """There is all that it names."""
        self._batches.carry_out(event.request, self._submitted(event))

    def _repeated(self, event: TaskSubmitted, reply: dict[str, object]) -> Iterator[None]:
        """Answer a submission that was accepted before. Its client attends the tasks from now on; that of then may be gone."""
        if event.client:
            self._client_binding.submission_begun(event.client)
            for task in self._home.named(str(reply["id"])):
                self._client_binding.submitted(task, (event.client,))
                yield
            self._client_binding.submission_done(event.client)
        self._state.actions.append(Answer(event.request, reply))

    def _submitted(self, event: TaskSubmitted) -> Iterator[None]:
        """The members of an array are made one by one and kept some at a time; all of them count, and are told of, once the
        last are kept: nobody knows their names before. Then each arrives, unless something has become of it already; from then on it ends with its client."""
        try:
            reply = self._submissions.repeated(event)
            if reply is not None:
                yield from self._repeated(event, reply)
                return
            if self._submissions.is_under_way(event):
                self._client_binding.submission_begun(event.client)
                return
            placeable, declining = self._submissions.placeable(event)
            array = self._submissions.begin(event, len(self._home.tasks))
        except BadRequest as error:
            self._state.actions.append(Answer(event.request, error=error))
            return
        self._home.begin_making(array.name)
        self._client_binding.submission_begun(event.client)
        for member in array.members():
            self._submissions.keep_so_far(array)
            task = array.add(member)
            self._dispatch.adopt(task, directory_here=event.directory_here)
            yield
        self._submissions.accept(array, placeable, self._eligibility.dependencies.rows(event.terms), declining)
        self._home.has_made(array.name)
        clients = array.clients()
        for task in array.tasks if clients or not event.held else ():
            if clients and self._home.tasks.get(task.uid) is task:
                self._client_binding.submitted(task, clients)
            if not event.held and self._dispatch.has_yet_to_arrive(task):
                self._dispatch.arrives(task)
            yield
        for client in clients:
            self._client_binding.submission_done(client)
