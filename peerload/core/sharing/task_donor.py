"""Giving waiting tasks to a node that asks for them, or that is paired with this one; and expecting what was promised.

A task of this home is offered at once; a guest goes back to its home with the name of the node that is to have it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from peerload.core.resources.admission import why_never
from peerload.core.resources.effective_request import asked_of
from peerload.core.resources.gpu_terms import has_room
from peerload.core.sharing.view import WAITING_LOOKED_AT_MAX, MovableTasksView, task_view
from peerload.core.work import HomePhase, HomeTask, RemotePhase, RemoteTask
from peerload.model import metrics, timers
from peerload.model.actions import Decided
from peerload.model.messages import Need
from peerload.model.task import task_home
from peerload.policy.api import Transfer
from peerload.policy.validation import valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.handoff.home import FileHolders
    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.information import Information
    from peerload.core.sharing.sender import Sender
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work
    from peerload.model.load import LoadReport
    from peerload.model.resources import Profile

LOOKED_AT_MAX = 64
"""Tasks that wait for devices and are held against the room of a node that asks for work."""


class TaskDonor:
    """One per node; its timer is ``inbound``."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        home: Home,
        executor: ExecutorHandoff,
        holders: FileHolders,
        information: Information,
        sender: Sender,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = queue.ledger
        self._membership = membership
        self._home = home
        self._executor = executor
        self._holders = holders
        self._information = information
        self._sender = sender

    # -- giving --------------------------------------------------------------------------------------------------------

    def stranded_for(self, profile: Profile) -> Work | None:
        """A task that this home cannot run at all and that node could: it goes first, whatever the loads are."""
        for task in islice(self._home.stranded.values(), WAITING_LOOKED_AT_MAX):
            if task.phase is HomePhase.WAITING and self._may_go(task, profile):
                return task
        return None

    def waits_for_room_there(self, profile: Profile, report: LoadReport) -> Work | None:
        """A task that waits for devices here while that node says that it has some: it goes, whatever the loads are."""
        for work in islice(self._queue.waiting_for_devices(), LOOKED_AT_MAX):
            request = asked_of(self._state, work)
            if request.gpus and has_room(request, report) and self._may_go(work, profile):
                return work
        return None

    def choose(self, profile: Profile, besides: Container[bytes] = ()) -> Work | None:
        """The waiting task that the selection policy lets go to that node, if it can from those whose files are there; not
        one of ``besides``, by uid, nor one that takes devices."""

        def goes(work: Work) -> bool:
            return work.uid not in besides and self._may_go(work, profile)

        node, holders = profile.node, self._holders
        if holders.has_any(node):
            near = self._selected(
                lambda work: isinstance(work, HomeTask) and holders.saved_at(node, work) > 0 and goes(work)
            )
            if isinstance(near, HomeTask):
                policy, reason = self._state.policies.names["selection"], f"{node} has room and its files, which saves"
                reason = f"{reason} {holders.saved_at(node, near):.1f} s"
                self._state.actions.append(Decided(near.task, policy, (), node, reason))
                return near
        return self._selected(goes)

    def _selected(self, may_go: Callable[[Work], bool]) -> Work | None:
        movable = MovableTasksView(self._queue, may_go, self._state)
        try:
            chosen = self._state.policies.selection.select(movable)
            return movable.works.get(chosen.task) if chosen is not None else None
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return None

    def give(self, work: Work, to: str, reason: str) -> None:
        """Give work to that node, unless it is declined there."""
        self._state.count(metrics.TASKS_GIVEN)
        if isinstance(work, HomeTask):
            self._sender.give(work, to)
        elif isinstance(work, RemoteTask):
            self._executor.give_back(work, reason, to=to)

    def _may_go(self, work: Work, profile: Profile) -> bool:
        spec, to = work.spec, profile.node
        if why_never(profile, spec.request, spec.placement, task_home(work.task)):
            return False
        if self._membership.will_decline(to, spec):
            return False
        if isinstance(work, HomeTask):
            return bool(work.stranded_because) or (
                self._home.may_migrate(work) and not spec.placement.local and work.phase is HomePhase.WAITING
            )
        return (
            isinstance(work, RemoteTask)
            and work.phase is RemotePhase.WAITING
            and work.may_move
            and (to != work.home or work.migrations > 0)  # 0: its home could not run it itself
            and self._membership.is_usable(work.home)
        )

    def guest_arrived(self, guest: RemoteTask) -> None:
        """A policy that places without asking applies its test here, too: the task may go on, until its limit."""
        if not self._sender.passes_on or not guest.may_move:
            return
        if not self._information.sends(uncounted=guest):
            return
        view = self._information.view(
            self._membership.eligible(Need(guest.spec.request, guest.spec.placement), guest.home), uncounted=guest
        )
        shown = task_view(guest, self._state)
        try:
            step = valid_step(self._state.policies.sender.locate(view, shown, (), self._state.rng))
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return
        if isinstance(step, Transfer) and step.to in view.peers:
            self._state.count(metrics.TASKS_PASSED_ON)
            name = self._state.policies.names["location.sender"]
            self._state.actions.append(Decided(guest.task, name, (), step.to, f"{self._state.node} passes it on"))
            self._executor.give_back(guest, f"{self._state.node} passes it on", to=step.to)

    # -- what others have promised -------------------------------------------------------------------------------------

    def expect(self, uid: bytes) -> None:
        """A task was promised: it counts as load until it comes, or for inbound_s."""
        if not self._has_come(uid):
            self._ledger.expect(uid, Need().request)
            self._state.set_timer_in(self._state.config.inbound_s, timers.Inbound.of(uid))

    def _has_come(self, uid: bytes) -> bool:
        """True if a promised task came before the promise, which may take another way; it may even be over."""
        task = self._home.tasks.get(uid)
        if task is not None:
            return task.phase is not HomePhase.AWAY
        return uid in self._executor.by_uid or uid in self._executor.fences

    def taken_home(self, uid: bytes) -> None:
        """A promised task of this home has come back: it waits here and is on its way no more."""
        if self._ledger.expect_no_more(uid):
            self._state.clear_timer(timers.Inbound.of(uid))

    def inbound_timed_out(self, uid: bytes) -> None:
        """Stop counting a promised task that did not come."""
        guest = self._executor.by_uid.get(uid)
        if guest is None or guest.phase is not RemotePhase.RESERVED:
            self._ledger.expect_no_more(uid)
