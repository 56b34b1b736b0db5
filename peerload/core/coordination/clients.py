"""Requests of clients about the tasks of this home, and about this node: cancel, signal, hold, release, drain, forget.

Every request is answered, with what was done for which name; what is durable before the answer follows from the order of
the actions. One about many tasks is carried out in `BatchedRequests`, and answered at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.membership.membership import PeerState
from peerload.core.work import QUEUED_PHASES, HomePhase
from peerload.model.actions import Answer, AnswerPart
from peerload.model.errors import BadRequest, NoSuchTask
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.core.coordination.evacuation import NodeDrain
    from peerload.core.handoff.home import HomeLeases
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.batched_requests import BatchedRequests
    from peerload.core.tasks.eligibility import Eligibility
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask
    from peerload.model import events

NAMES_IN_A_PART = 10_000
"""Names in one part of the answer to a request about many tasks: nobody waits until a million of them are encoded."""
CANCELLED = "cancelled"
HELD_BY_USER = "held by its user"
RELEASED = "released"


class ClientRequests:
    """One per node."""

    def __init__(
        self,
        state: CoreState,
        home: Home,
        leases: HomeLeases,
        membership: Membership,
        drain: NodeDrain,
        batches: BatchedRequests,
        eligibility: Eligibility,
    ) -> None:
        self._state = state
        self._home = home
        self._leases = leases
        self._membership = membership
        self._drain = drain
        self._batches = batches
        self._eligibility = eligibility

    def _is_there(self, task: HomeTask) -> bool:
        return self._home.tasks.get(task.uid) is task

    def cancel(self, event: events.CancelRequested) -> None:
        """Durable before it is confirmed (D7)."""
        self._batches.carry_out(event.request, self._cancel(event))

    def _cancel(self, event: events.CancelRequested) -> Iterator[int | None]:
        # Every member of an array, although the first may have been cancelled already. Those that wait go first: else they
        # would start in the room that the others leave.
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
        for name, task in others:
            if self._is_there(task):
                stopped[name] |= self._home.cancel(task, event.signal, force=event.force)
            yield None
        self._answer(event.request, **_cancelled(stopped))

    def _answer_part(self, request: int, stopped: dict[str, bool], later: dict[str, None]) -> dict[str, bool]:
        """Tell what has become of the tasks that were looked at, but for those that are yet to be. → these."""
        done = {name: is_stopped for name, is_stopped in stopped.items() if name not in later}
        self._state.actions.append(AnswerPart(request, _cancelled(done)))
        return {name: stopped[name] for name in later}

    def signal(self, event: events.SignalRequested) -> None:
        """Passed on to a running task."""
        task = None if self._home.is_being_made(event.task) else self._home.by_id.get(event.task)
        error: BadRequest | None = None
        if task is None:
            error = NoSuchTask(f"no unfinished task {event.task}", hint="peerload ls")
        elif not self._home.signal(task, event.signal):
            error = BadRequest(f"{event.task} is not running", hint=f"peerload cancel {event.task}")
        self._state.actions.append(Answer(event.request, {}, error=error))

    def hold(self, event: events.HoldRequested) -> None:
        """Waiting tasks are kept back; one that a node has already is not taken from it."""
        self._batches.carry_out(event.request, self._hold(event))

    def _hold(self, event: events.HoldRequested) -> Iterator[None]:
        held: list[str] = []
        already_held: list[str] = []
        not_waiting: list[str] = []
        for name in event.tasks:
            is_held, phases = False, set()
            for task in self._home.named(name):
                phases.add(task.phase)
                if task.phase in QUEUED_PHASES and self._is_there(task):
                    # Kept back for good: not even a node that still has an attempt of it may go on with that.
                    self._home.hold(task, HELD_BY_USER, last_node="")
                    is_held = True
                yield
            (held if is_held else already_held if phases == {HomePhase.HELD} else not_waiting).append(name)
        self._answer(event.request, held=held, already_held=already_held, not_waiting=not_waiting)

    def release(self, event: events.ReleaseRequested) -> None:
        """Held tasks go on; what was lost before does not count any more."""
        self._batches.carry_out(event.request, self._release(event))

    def _release(self, event: events.ReleaseRequested) -> Iterator[None]:
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
                yield
            (released if is_released else not_held).append(name)
        self._answer(event.request, released=released, not_held=not_held)

    def prioritize(self, event: events.PriorityRequested) -> None:
        """Waiting tasks go before, or behind, others; the node that has one in its queue is told."""
        self._batches.carry_out(event.request, self._prioritize(event))

    def _prioritize(self, event: events.PriorityRequested) -> Iterator[None]:
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
                    self._eligibility.prioritized(task)
                    is_told |= self._leases.send_priority(task)
                yield
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
        """This node takes no more tasks."""
        returned, running = self._drain.begin(event.reason)
        self._answer(event.request, returned=returned, running=running)

    def undrain(self, event: events.UndrainRequested) -> None:
        """Undrain this node."""
        was_drained = self._state.profile.drained
        self._drain.end()
        self._answer(event.request, was_drained=was_drained)

    def forget(self, event: events.ForgetRequested) -> None:
        """A user asserts that a node is gone for good; one that is there is not forgotten."""
        peer = self._membership.get(event.node)
        error: BadRequest | None = None
        if event.node == self._state.node:
            error = BadRequest(f"{event.node} is this node itself", hint="peerload leave")
        elif (
            peer is None and not self._home.at(event.node) and not self._eligibility.dependencies.waits_on(event.node)
        ):  # an agent's restart may have forgotten it, its tasks not
            error = BadRequest(f"no node {event.node} is known here", hint="peerload nodes")
        elif peer is not None and not self._membership.forget(event.node):
            error = _still_there(event.node, peer.state)
        reply: dict[str, object] = {"node": event.node, "was": peer.state.value if peer is not None else None}
        if error is None:
            reply["tasks"] = self._leases.forgotten(event.node) + self._eligibility.dependencies.forgotten(event.node)
        self._state.actions.append(Answer(event.request, reply, error=error))

    def _answer(self, request: int, **reply: object) -> None:
        self._state.actions.append(Answer(request, reply))


def _cancelled(stopped: dict[str, bool]) -> dict[str, object]:
    """The answer about these names, each with whether something was stopped."""
    return {
        "cancelled": [name for name, is_stopped in stopped.items() if is_stopped],
        "already_ended": [name for name, is_stopped in stopped.items() if not is_stopped],
    }


def _still_there(node: str, state: PeerState) -> BadRequest:
    if state is PeerState.SUSPECT:
        return BadRequest(
            f"{node} is only suspect",
            why="it does not answer; it is called dead if that goes on for some seconds",
            hint=f"then:  peerload forget {node}        what it is now:  peerload nodes",
        )
    return BadRequest(f"{node} is {state}", hint="stop it first; there:  peerload leave")
