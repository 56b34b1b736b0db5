"""Intake of submitted tasks: refuse, make durable, answer; and dispatch of arriving tasks: to the gate, to the queue here, or
to a search for a place elsewhere.

A task *arrives* when it is submitted, released, queued again, or given back by another node. One that this home can never
run, or that no policy would keep waiting for room here, is looked after by `sender.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.resources.admission import why_never
from peerload.core.work import HomePhase
from peerload.energy.price import cheapest_start, integral, price_at
from peerload.model import metrics, timers
from peerload.model.actions import Answer
from peerload.model.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.sharing import Sharing
    from peerload.core.state import CoreState
    from peerload.core.tasks.batched_requests import BatchedRequests
    from peerload.core.tasks.client_binding import ClientBinding
    from peerload.core.tasks.eligibility import Eligibility
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.tasks.submission import SubmissionInProgress, SubmissionLog
    from peerload.core.work import HomeTask, UntouchedMembers
    from peerload.model.events import TaskSubmitted
    from peerload.model.messages import NotStarted, Return
    from peerload.model.task import TaskSpec


SINGLY_MAX = 250
"""Members of a uniform array that are looked at one by one for whether they go elsewhere: the first of them mostly stay."""


class TaskDispatch:
    """One per node; it keeps nothing of its own."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        home: Home,
        sharing: Sharing,
        eligibility: Eligibility,
    ) -> None:
        self._state = state
        self._queue = queue
        self._membership = membership
        self._home = home
        self._sharing = sharing
        self._eligibility = eligibility

    def adopt(self, task: HomeTask, *, directory_here: bool) -> None:
        """Add a task of this home, new or from the store."""
        self._home.adopt(task)
        self._eligibility.adopt(task)
        if not directory_here:
            task.cannot_here = _no_directory(task.spec)

    def arrives(self, task: HomeTask) -> None:
        """Dispatch an arriving task: it waits here, or looks for a place elsewhere. The load that decides does not count it."""
        if self._home.rests_until_sure(task) or not self._eligibility.admits(task) or self._rests_for_price(task):
            return
        spec = task.spec
        cannot = task.cannot_here or why_never(self._state.profile, spec.request, spec.placement, self._state.node)
        if cannot:
            self._sharing.sender.strand(task, cannot)
            return
        sends = self._membership.has_any() and self._sharing.sender.sends(task)
        self._queue.add(task)
        if sends:
            self._sharing.sender.search_for(task)

    def arrive_together(self, block: UntouchedMembers) -> Iterator[int | None]:
        """Dispatch arriving members of a uniform array: they wait here as one, and look for places in turn."""
        state, spec, sender = self._state, block.spec, self._sharing.sender
        may_send = self._membership.has_any() and sender.may_send(block)
        if why_never(state.profile, spec.request, spec.placement, state.node) or (may_send and sender.places_all):
            for member in block.members:
                task = self._home.by_id.get(f"{block.task}.{member}")
                if task is not None and self.has_yet_to_arrive(task):
                    self.arrives(task)
                yield None
            return
        for _ in range(SINGLY_MAX if may_send else 0):
            if not block.members or sender.sends(block):
                break
            self.arrives(self._home.touch(block, block.members[0]))
        if block.members:
            self._queue.add(block)
            if may_send and sender.still_sends(block):
                sender.search_for_members(block.task)

    def _rests_for_price(self, task: HomeTask) -> bool:
        """Have a task rest that may start later, until its cheapest hours. → whether it does."""
        start_s = self._cheapest_start(task)
        now = self._state.now.wall_s
        if start_s > now:
            self._home.rest(task, start_s - now)
        return start_s > now

    def _cheapest_start(self, task: HomeTask) -> float:
        state, start_by = self._state, task.terms.start_by
        now = state.now.wall_s
        if start_by <= now or not state.prices:
            return 0.0
        return cheapest_start(state.prices, now, start_by, self._duration_s(task))

    def _duration_s(self, task: HomeTask) -> float:
        history = self._state.history
        return task.spec.est_s or history.expected_s(history.keys(task.spec)) or history.mean_s

    def deferral(self, task: HomeTask) -> tuple[float, float, float | None] | None:
        """When (Unix s) a task that is put off for its price will start, the mean price of a kWh then, and now; None if it is not
        put off."""
        start_s = self._cheapest_start(task) if task.phase is HomePhase.RESTING else 0.0
        if start_s <= self._state.now.wall_s:
            return None
        duration_s, prices = self._duration_s(task), self._state.prices
        price = integral(prices, start_s, start_s + duration_s) / duration_s
        return start_s, price, price_at(prices, self._state.now.wall_s)

    def prices_changed(self, prices: tuple[tuple[float, float], ...]) -> None:
        """Other prices are known: tasks that are put off arrive again."""
        put_off = [task for task in self._home.tasks.values() if self.deferral(task) is not None]
        self._state.prices = prices
        for task in put_off:
            self._state.clear_timer(timers.Rest.of(task.uid))
            self._home.rested(task)

    def judge_again(self) -> None:
        """This node has other devices than before. Its own tasks that wait for some wait here if it can run them now, else
        look for a place elsewhere."""
        sender, profile = self._sharing.sender, self._state.profile
        for task in [task for task in self._home.tasks.values() if task.spec.request.takes_devices]:
            is_queued, is_stranded = task.is_queued, task.uid in self._home.stranded
            if task.cannot_here or not (is_queued or is_stranded):
                continue
            cannot = why_never(profile, task.spec.request, task.spec.placement, self._state.node)
            if is_stranded and cannot:
                task.stranded_because = cannot
            elif is_stranded:
                self._home.take_out(task)
                self.arrives(task)
            elif cannot:
                self._queue.remove(task)
                sender.strand(task, cannot)

    def directory_found(self, directory: bytes) -> None:
        """A working directory is here after all: the tasks that wait elsewhere for want of it may run here, too."""
        stranded = self._home.stranded
        for task in [
            task for task in self._home.tasks.values() if task.cannot_here and task.spec.directory == directory
        ]:
            task.cannot_here = ""
            if task.uid in stranded and task.phase is HomePhase.WAITING:
                self._home.take_out(task)
                self.arrives(task)

    def has_yet_to_arrive(self, task: HomeTask) -> bool:
        """True if this new task is neither dispatched nor changed by anybody so far."""
        is_waiting = task.phase is HomePhase.WAITING and self._home.tasks.get(task.uid) is task
        return is_waiting and not task.is_queued and task.uid not in self._home.stranded

    def requeued(self, task: HomeTask, reason: str) -> None:
        """Dispatch a task that is back in the queue, as an arrival."""
        del reason
        self._queue.remove(task)
        self.arrives(task)

    def returned(self, message: Return | NotStarted, to: str) -> None:
        """A node has promised never to start its attempt. With ``to``, a better node that it suggests, the task is offered
        there at once, without a search; else it is an arrival."""
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.RESTING:  # None: it cannot be run again, and has failed
            return
        if not self._eligibility.admits(task):
            self._queue.remove(task)
            return
        here = self._state.node
        spec = task.spec
        runs_here = not task.cannot_here and not why_never(self._state.profile, spec.request, spec.placement, here)
        if runs_here and to == here:
            self._state.count(metrics.TASKS_RETURNED)
            self._sharing.donor.taken_home(message.uid)
            if self._sharing.sender.passes_on:  # the same test here as anywhere
                self.requeued(task, message.reason)
        elif to in self._membership.eligible(task.need(), here) and self._home.may_migrate(task):
            if not runs_here:
                self._queue.remove(task)
                self._sharing.sender.strand(task, message.reason, searches=False)
            self._sharing.sender.forward(task, to)
        else:
            self.requeued(task, message.reason)


def _no_directory(spec: TaskSpec) -> str:
    return f"no directory {spec.directory.decode(errors='replace')} on this node"


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

    def _repeated(self, event: TaskSubmitted, reply: dict[str, object]) -> Iterator[int | None]:
        """Answer a submission that was accepted before. Its client attends the tasks from now on; that of then may be gone."""
        if event.client:
            self._client_binding.submission_begun(event.client)
            for task in self._home.named(str(reply["id"])):
                self._client_binding.submitted(task, (event.client,))
                yield None
            self._client_binding.submission_done(event.client)
        self._state.actions.append(Answer(event.request, reply))

    def _is_uniform(self, event: TaskSubmitted) -> bool:
        """True if the members of an array differ in nothing but their numbers, and nothing keeps them from the queue."""
        terms, spec = event.terms, event.spec
        is_apart = event.each or event.held or event.client or event.input or event.retry_of or not event.directory_here
        is_kept_back = terms.awaits or terms.group or terms.start_by or spec.request.takes_devices
        return len(event.indices) >= self._state.config.uniform_array_min and not is_apart and not is_kept_back

    def _submitted(self, event: TaskSubmitted) -> Iterator[int | None]:
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
            array = self._submissions.begin(event, self._home.number)
        except BadRequest as error:
            self._state.actions.append(Answer(event.request, error=error))
            return
        self._home.begin_making(array.name)
        self._client_binding.submission_begun(event.client)
        is_uniform = self._is_uniform(event)
        yield from self._make_members(array) if is_uniform else self._make_tasks(array)
        self._submissions.accept(array, placeable, self._eligibility.dependencies.rows(event.terms), declining)
        self._home.has_made(array.name)
        for block in array.adopt_members(self._home) if is_uniform else ():
            yield from self._dispatch.arrive_together(block)
        yield from self._arrive(array)

    def _make_members(self, array: SubmissionInProgress) -> Iterator[int | None]:
        array.make_uniform()
        for members in array.parts(self._state.config.uniform_at_a_time):
            self._submissions.keep_so_far(array)
            array.add_members(members)
            yield len(members)

    def _make_tasks(self, array: SubmissionInProgress) -> Iterator[int | None]:
        for member in array.members():
            self._submissions.keep_so_far(array)
            task = array.add(member)
            self._dispatch.adopt(task, directory_here=array.event.directory_here)
            yield None

    def _arrive(self, array: SubmissionInProgress) -> Iterator[int | None]:
        event, clients = array.event, array.clients()
        for task in array.tasks if clients or not event.held else ():
            if clients and self._home.tasks.get(task.uid) is task:
                self._client_binding.submitted(task, clients)
            if not event.held and self._dispatch.has_yet_to_arrive(task):
                self._dispatch.arrives(task)
            yield None
        for client in clients:
            self._client_binding.submission_done(client)
