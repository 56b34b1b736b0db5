"""Clients of this node: requests about tasks of this home and about this node, and tasks that end with their client.

Every request is answered with the result for each name; what is durable before the answer follows from the order of
the actions. A request about many tasks is carried out in `BatchedRequests`, and answered at its end.

A task with a client that waits at a terminal is bound to that client. If the connection closes without a detach, the
client was ended: the task is cancelled, even if its submission is not complete. A restart of this node closes all
connections. The client then has attended_s to return: it attends the task again or repeats its submission. The task's
record says that it is attended; the connections that attend it are only in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from peerload.core.membership.peers import PeerState
from peerload.core.work import QUEUED_PHASES, HomePhase
from peerload.model import events, metrics, timers
from peerload.model.actions import Answer, AnswerPart
from peerload.model.errors import BadRequest, NoSuchTask
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peerload.core.coordination.evacuation import NodeDrain
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.handoff.home import HomeLeases
    from peerload.core.membership.membership import Membership
    from peerload.core.state import BatchedRequests, CoreState
    from peerload.core.tasks.eligibility import Eligibility
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask


NAMES_IN_A_PART = 10_000
"""Names in one part of the answer to a request about many tasks: no client waits until a million are encoded."""
TasksRequested = events.CancelRequested | events.HoldRequested | events.ReleaseRequested | events.PriorityRequested
"""Requests of a user about many tasks of this home."""
CANCELLED = "cancelled"
HELD_BY_USER = "held by its user"
RELEASED = "released"


@dataclass(eq=False, repr=False)
class ClientRequests:
    """Requests of clients about tasks of this home and about this node. One per node."""

    _state: CoreState
    _home: Home
    _leases: HomeLeases
    _membership: Membership
    _drain: NodeDrain
    _batches: BatchedRequests
    _eligibility: Eligibility

    def _is_there(self, task: HomeTask) -> bool:
        return self._home.tasks.get(task.uid) is task

    def carry_out(self, event: TasksRequested) -> None:
        """Carry out a request about many tasks, in batches."""
        match event:
            case events.CancelRequested():
                steps = self._cancel(event)
            case events.HoldRequested():
                steps = self._hold(event)
            case events.ReleaseRequested():
                steps = self._release(event)
            case _:
                steps = self._prioritize(event)
        self._batches.carry_out(event.request, steps)

    def _cancel(self, event: events.CancelRequested) -> Iterator[int | None]:
        """Cancel the named tasks, durably before the confirmation (D7)."""
        # Every member of an array, even if the first one is already cancelled. Waiting tasks go first, because they
        # would start when the others free their slots.
        stopped: dict[str, bool] = {}
        others: list[tuple[str, HomeTask]] = []
        later: dict[str, None] = {}
        at = 0
        while at < len(event.tasks):
            name = event.tasks[at]
            if untouched := self._home.untouched_run(event.tasks, at):
                block, members = untouched
                named = 0 if block.task == name else len(members)
                stopped.update(dict.fromkeys(event.tasks[at : at + max(named, 1)], True))
                at += named
                self._home.cancel_untouched(block, members, CANCELLED)
                yield len(members)
                if len(stopped) - len(later) >= NAMES_IN_A_PART:
                    stopped = self._answer_part(event.request, stopped, later)
                continue
            at += 1
            stopped.setdefault(name, False)
            for task in self._home.named(name):
                if task.phase not in QUEUED_PHASES:
                    others.append((name, task))
                    later[name] = None
                elif self._is_there(task):
                    stopped[name] |= self._home.cancel(task, event.signal, force=event.force)
                yield None
            if len(stopped) - len(later) >= NAMES_IN_A_PART:
                stopped = self._answer_part(event.request, stopped, later)
        unreachable: list[dict[str, object]] = []
        for name, task in others:
            if self._is_there(task):
                unreachable += self._silent(task)
                stopped[name] |= self._home.cancel(task, event.signal, force=event.force)
            yield None
        self._answer(event.request, **_cancelled(stopped), **({"unreachable": unreachable} if unreachable else {}))

    def _silent(self, task: HomeTask) -> list[dict[str, object]]:
        """The task with its node and the node's state, if the node is suspect or dead: no signal may reach it."""
        peer = self._membership.get(task.record.node) if task.phase in (HomePhase.AWAY, HomePhase.UNKNOWN) else None
        if peer is None or peer.state not in (PeerState.SUSPECT, PeerState.DEAD):
            return []
        return [{"id": task.task, "node": task.record.node, "state": peer.state.value}]

    def _answer_part(self, request: int, stopped: dict[str, bool], later: dict[str, None]) -> dict[str, bool]:
        """Report the outcome of the handled tasks. → the tasks that are still to be handled."""
        done = {name: is_stopped for name, is_stopped in stopped.items() if name not in later}
        self._state.actions.append(AnswerPart(request, _cancelled(done)))
        return {name: stopped[name] for name in later}

    def signal(self, event: events.SignalRequested) -> None:
        task = None if self._home.is_being_made(event.task) else self._home.by_id.get(event.task)
        error: BadRequest | None = None
        if task is None:
            error = NoSuchTask(f"no unfinished task {event.task}", hint="peerload ls")
        elif not self._home.signal(task, event.signal):
            error = BadRequest(f"{event.task} is not running", hint=f"peerload cancel {event.task}")
        self._state.actions.append(Answer(event.request, {}, error=error))

    def _hold(self, event: events.HoldRequested) -> Iterator[int | None]:
        """Hold the named tasks that wait; a task that a node already has stays there."""
        held: list[str] = []
        already_held: list[str] = []
        not_waiting: list[str] = []
        for name in event.tasks:
            is_held, phases = False, set()
            for task in self._home.named(name):
                phases.add(task.phase)
                if task.phase in QUEUED_PHASES and self._is_there(task):
                    # Held for good: not even a node that still has an attempt may continue with it.
                    self._home.hold(task, HELD_BY_USER, last_node="")
                    is_held = True
                yield None
            (held if is_held else already_held if phases == {HomePhase.HELD} else not_waiting).append(name)
        self._answer(event.request, held=held, already_held=already_held, not_waiting=not_waiting)

    def _release(self, event: events.ReleaseRequested) -> Iterator[int | None]:
        """Release the named tasks that are held; their earlier losses no longer count."""
        released: list[str] = []
        not_held: list[str] = []
        for name in event.tasks:
            is_released = False
            for task in self._home.named(name):
                if task.phase is HomePhase.HELD and self._is_there(task):
                    task.enter(HomePhase.WAITING)
                    is_freed = task.record.is_freed or self._eligibility.is_lost(task)
                    self._home.become(task, RELEASED, state=TaskState.QUEUED, losses=0, lost_on=(), is_freed=is_freed)
                    self._home.mediator.task_arrives(task)
                    is_released = True
                yield None
            (released if is_released else not_held).append(name)
        self._answer(event.request, released=released, not_held=not_held)

    def _prioritize(self, event: events.PriorityRequested) -> Iterator[int | None]:
        """Set the priority of the named tasks that wait; a node that has one in its queue is notified."""
        changed: list[str] = []
        passed_on: list[str] = []
        elsewhere: list[str] = []
        ended: list[str] = []
        for name in event.tasks:
            waits = is_told = is_there = False
            for task in self._home.named(name):
                if self._is_there(task) and not task.record.state.is_final:
                    is_there = True
                    waits |= task.phase in QUEUED_PHASES or task.phase is HomePhase.HELD
                    self._home.prioritize(task, event.priority)
                    self._eligibility.groups.moved(task)
                    is_told |= self._leases.send_priority(task)
                yield None
            (changed if waits else passed_on if is_told else elsewhere if is_there else ended).append(name)
        self._answer(
            event.request,
            changed=changed,
            passed_on=passed_on,
            elsewhere=elsewhere,
            ended=ended,
            priority=event.priority,
        )

    def drain(self, event: events.DrainRequested) -> None:
        returned, running = self._drain.begin(event.reason)
        self._answer(event.request, returned=returned, running=running)

    def undrain(self, event: events.UndrainRequested) -> None:
        was_drained = self._state.profile.drained
        self._drain.end()
        self._answer(event.request, was_drained=was_drained)

    def forget(self, event: events.ForgetRequested, executor: ExecutorHandoff) -> None:
        """Handle `forget`: a user declares a node gone for good. A node that is alive is refused. executor: has the
        attempts of that node's tasks here."""
        peer = self._membership.get(event.node)
        is_forgotten = self._membership.forget(event.node)
        error: BadRequest | None = None
        if event.node == self._state.node:
            error = BadRequest(f"{event.node} is this node itself", hint="peerload leave")
        elif peer is not None and not is_forgotten:
            error = _still_there(event.node, peer.state)
        elif not (
            is_forgotten
            or self._home.at(event.node)
            or self._eligibility.dependencies.waits_on(event.node)
            or executor.is_home(event.node)
        ):  # after a restart of this agent only the node's tasks may be known
            error = BadRequest(f"no node {event.node} is known here", hint="peerload nodes")
        reply: dict[str, object] = {"node": event.node, "was": peer.state.value if peer is not None else None}
        if error is None:
            reply["ended"] = executor.home_forgotten(event.node)
            reply["tasks"] = self._leases.forgotten(event.node) + self._eligibility.dependencies.forgotten(event.node)
        self._state.actions.append(Answer(event.request, reply, error=error))

    def _answer(self, request: int, **reply: object) -> None:
        self._state.actions.append(Answer(request, reply))


def _cancelled(stopped: dict[str, bool]) -> dict[str, object]:
    """Answer to a cancel, from whether each name had tasks to stop."""
    return {
        "cancelled": [name for name, is_stopped in stopped.items() if is_stopped],
        "already_ended": [name for name, is_stopped in stopped.items() if not is_stopped],
    }


def _still_there(node: str, state: PeerState) -> BadRequest:
    if state is PeerState.SUSPECT:
        return BadRequest(
            f"{node} is only suspect",
            why="it does not answer; it is declared dead if that goes on for some seconds",
            hint=f"then:  peerload forget {node}        what it is now:  peerload nodes",
        )
    return BadRequest(f"{node} is {state}", hint="stop it first; there:  peerload leave")


SIGTERM = 15
CLIENT_GONE = "its client has disconnected"
NOT_BACK = "its client did not return after a restart of this agent"
DETACHED = "detached by its client"
CUT = "more was sent to its standard input than is kept for another attempt"


class ClientBinding:
    """Binding of attended tasks to their clients: a task ends with the last of them. One per node; its timer is ``attended``."""

    def __init__(self, state: CoreState, home: Home, batches: BatchedRequests) -> None:
        self._state = state
        self._home = home
        self._batches = batches
        self._clients: dict[int, dict[bytes, None]] = {}
        self._attending: dict[bytes, dict[int, None]] = {}
        self._coming: dict[int, int] = {}
        """Clients with submissions in progress, and the number of these."""
        self._gone: dict[int, None] = {}
        """The clients among them that have disconnected."""
        self._expected: dict[bytes, None] = {}
        """Tasks whose client may still return after a restart."""

    def submission_begun(self, client: int) -> None:
        """Record that a submission with this client begins."""
        self._coming[client] = self._coming.get(client, 0) + 1

    def submission_done(self, client: int) -> None:
        """Record that all tasks of one submission with this client are created."""
        self._coming[client] -= 1
        if not self._coming[client]:
            del self._coming[client]
            self._gone.pop(client, None)

    def submitted(self, task: HomeTask, clients: Iterable[int]) -> None:
        """Bind a task that was created, and is durable, to these clients; also for a repeated submission."""
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
        """True if its client may still return after a restart."""
        return task.uid in self._expected

    def _await_no_more(self, task: HomeTask) -> None:
        if self._is_awaited(task):
            del self._expected[task.uid]
            self._state.clear_timer(timers.ClientTimeout(task.uid.hex()))

    def left(self, task: HomeTask) -> None:
        for client in self._attending.pop(task.uid, ()):
            self._leave(client, task.uid)
        if self._expected:
            self._await_no_more(task)

    def attend(self, event: events.AttendRequested) -> None:
        """Bind a task to a client that has returned."""
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
        """Cancel the tasks of a connection that has closed; many of them in batches."""
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
            ):  # these first, because they would start when others free their slots
                self._end_unattended(task)
            else:
                others.append(uid)
            yield
        for uid in others:
            self._end_unattended(self._home.tasks.get(uid))
            yield

    def _end_unattended(self, task: HomeTask | None) -> None:
        if task is not None and task.uid not in self._attending:  # another client may attend it now
            self._end(task, CLIENT_GONE)

    def _leave(self, client: int, uid: bytes) -> None:
        uids = self._clients.get(client, {})
        uids.pop(uid, None)
        if not uids:
            self._clients.pop(client, None)

    def restored(self) -> None:
        """Restore the state after a restart, when no connection exists any more."""
        for task in self._home.tasks.values():
            if task.record.attended and not task.record.state.is_final:
                self._expected[task.uid] = None
                self._state.set_timer_in(self._state.config.attended_s, timers.ClientTimeout(task.uid.hex()))

    def timed_out(self, task: HomeTask) -> None:
        if self._is_awaited(task):
            del self._expected[task.uid]
            self._end(task, NOT_BACK)

    def cut(self, uid: bytes) -> None:
        """Record, in advance, that the beginning of a task's input will be dropped."""
        task = self._home.tasks.get(uid)
        if task is not None and not task.record.state.is_final and not task.record.input_is_cut:
            self._home.become(task, CUT, input_is_cut=True)

    def input_came(self, uid: bytes) -> None:
        """Record that the input of a task has arrived. It becomes durable with the task's next state, at the latest
        its end, because nothing needs it earlier."""
        task = self._home.tasks.get(uid)
        if task is not None and not task.record.input_came:
            task.record = msgspec.structs.replace(task.record, input_came=True)

    def _end(self, task: HomeTask | None, reason: str) -> None:
        if task is not None and task.record.attended and not task.record.state.is_final:
            self._state.count(metrics.TASKS_CANCELLED_WITH_CLIENT)
            self._home.cancel(task, SIGTERM, force=False, reason=reason)
