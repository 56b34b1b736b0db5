"""Receiver-initiated sharing: a node with room asks for a waiting task, and a node that is asked gives one.

A receiver asks one node after the other until one promises a task. The promise counts as load for inbound_s; the task
itself comes as an offer of its home. It asks whenever a task has ended here, when a report shows work elsewhere, and
at the policy's retry rate while it is below its mark.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from peerload.core.admission import why_never
from peerload.core.search import STEPS_MAX
from peerload.core.view import Movable
from peerload.core.work import Guest, GuestPhase, HomePhase, HomeTask
from peerload.model.messages import GiveReply, GiveRequest, Need
from peerload.model.task import task_home
from peerload.policy.api import ANY_LOAD
from peerload.policy.api import Probe as ProbeStep

if TYPE_CHECKING:
    from peerload.core.admission import Ledger
    from peerload.core.handoff_executor import Executor
    from peerload.core.handoff_home import Handoff
    from peerload.core.home import Home
    from peerload.core.information import Information
    from peerload.core.membership import Membership
    from peerload.core.memory import Memory
    from peerload.core.queue import WaitingQueue
    from peerload.core.search import Search, Searches
    from peerload.core.sender import Sender
    from peerload.core.state import CoreState
    from peerload.core.work import Work


class Receiver:
    """One per node; its timers are ``probe``, ``inbound`` and ``retry``."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        ledger: Ledger,
        membership: Membership,
        memory: Memory,
        home: Home,
        handoff: Handoff,
        executor: Executor,
        information: Information,
        searches: Searches,
        sender: Sender,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = ledger
        self._membership = membership
        self._memory = memory
        self._home = home
        self._handoff = handoff
        self._executor = executor
        self._information = information
        self._searches = searches
        self._sender = sender
        self._in_flight = 0
        self._retrying = False
        self._durations: deque[float] = deque(maxlen=state.config.durations_kept_max)

    # -- asking for work -----------------------------------------------------------------------------------------------

    def completed(self, duration_s: float) -> None:
        """A task has ended here, and the next one has been started: ask for another?"""
        self._durations.append(duration_s)
        self.pull()

    def pull(self, first: str = "", probes_max: int | None = None) -> None:
        """Ask for a waiting task, if this node is below its mark; ``first`` is asked first."""
        if self._state.profile.drained or not self._state.profile.slots:
            return
        if self._ledger.load_tasks + self._in_flight >= self._receives_below():
            return
        search = self._searches.open(None, probes_max)
        self._in_flight += 1
        self._state.count("receiver searches")
        if first:
            self._ask(search, first)
        else:
            self.step(search)

    def _receives_below(self) -> float:
        marks = self._information.marks()
        return marks.receive_below * self._ledger.profile.slots + marks.prefetch

    def step(self, search: Search) -> None:
        """Ask the policy whom to ask next, and do it."""
        peers = self._membership.eligible(Need(), "")
        view = self._information.view(peers)
        search.steps += 1
        try:
            step = self._state.policies.receiver.locate(view, search.probes_max, tuple(search.replies), self._state.rng)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            self._end(search)
            return
        if isinstance(step, ProbeStep) and search.steps <= STEPS_MAX:
            nodes = self._searches.askable(search, step, peers)
            if nodes:
                self._ask(search, nodes[0])
                return
        if self._memory.is_on:
            self._searches.leave_footprints(search)
        self._end(search)

    def _ask(self, search: Search, node: str) -> None:
        self._searches.asked(search, node)
        self._state.count("receiver probes")
        if self._memory.take_busy(node):
            search.remembered.add(node)
        report, profile = self._information.report(), self._state.profile
        ahead = report.load_tasks >= self._information.marks().receive_below * profile.slots
        self._state.send(node, GiveRequest(search.id, report, profile, ahead=ahead))
        self._searches.wait(search)

    def give_replied(self, src: str, reply: GiveReply) -> None:
        """PROMISED counts as load until the offer comes; NONE asks the next."""
        self._membership.heard_report(src, reply.report)
        search = self._searches.answered(reply.search, src)
        if search is None or search.task is not None:
            return
        self._searches.wait_no_more(search)
        if not reply.task:
            search.add(src, accepts=False, report=reply.report)
            self.step(search)
            return
        self._searches.decide(search, reply.task, f"{src} gives it")
        self._end(search)
        if not self._has_come(reply.uid):
            self._ledger.expect(reply.uid, Need().request)
            self._state.set_timer_in(self._state.config.inbound_s, "inbound", reply.uid.hex())

    def _has_come(self, uid: bytes) -> bool:
        """It was faster than the word that it would come, which may travel by another way; it may be over, even."""
        task = self._home.tasks.get(uid)
        if task is not None:
            return task.phase is not HomePhase.AWAY
        return uid in self._executor.by_uid or uid in self._executor.floors

    def taken_home(self, uid: bytes) -> None:
        """A promised task of this home has come back: it waits here and is on its way no more."""
        if self._ledger.expect_no_more(uid):
            self._state.clear_timer("inbound", uid.hex())

    def inbound_timed_out(self, uid: bytes) -> None:
        """A promised task did not come."""
        guest = self._executor.by_uid.get(uid)
        if guest is None or guest.phase is not GuestPhase.RESERVED:
            self._ledger.expect_no_more(uid)

    def settle(self) -> None:
        """After every event: while this node is below its mark it asks again, at the policy's rate, by chance (so that
        idle nodes do not ask in step), at least every retry_s_max and not more often than retry_s_min."""
        rate = self._state.policies.receiver.retry_rate
        if self._retrying or not rate or self._ledger.load_tasks >= self._receives_below():
            return
        if self._state.profile.drained or not self._membership.has_any():
            return
        config = self._state.config
        mean_s = sum(self._durations) / len(self._durations) if self._durations else 1.0
        pause_s = mean_s / rate * self._state.rng.expovariate(1.0)
        self._retrying = True
        self._state.set_timer_in(min(max(pause_s, config.retry_s_min), config.retry_s_max), "retry")

    def retry(self) -> None:
        """An extra search, if this node is still below its mark."""
        self._retrying = False
        self.pull(probes_max=self._state.policies.receiver.retry_probes)

    def _end(self, search: Search) -> None:
        if self._searches.close(search):
            self._in_flight -= 1

    # -- giving work ---------------------------------------------------------------------------------------------------

    def give_requested(self, src: str, request: GiveRequest) -> None:
        """A node has room: promise one task that it can run, and offer it (or have its home offer it)."""
        self._membership.heard_report(src, request.report)
        work = self._choose(src, request)
        if work is None:
            self._state.send(src, GiveReply(request.search, self._information.report()))
            return
        self._state.count("tasks given")
        self._state.send(src, GiveReply(request.search, self._information.report(), work.task, work.uid))
        if isinstance(work, HomeTask):
            self._sender.drop_search(work)
            voluntary = not work.stranded_because
            self._handoff.offer(work, src, voluntary=voluntary, search=False, load_tasks_max=ANY_LOAD)
        elif isinstance(work, Guest):
            self._executor.give_back(work, f"{src} has room", to=src)

    def _choose(self, src: str, request: GiveRequest) -> Work | None:
        if not self._membership.is_usable(src):
            return None
        for task in self._sender.stranded.values():
            if task.phase is HomePhase.WAITING and self._may_go(task, src, request):
                return task
        give_above = self._information.marks().give_above * self._ledger.profile.slots
        if self._ledger.load_tasks <= give_above or request.profile.node != src:
            return None
        if request.ahead and not self._evens_out(request):
            return None
        movable = Movable(self._queue, lambda work: self._may_go(work, src, request), self._state.now.boot_s)
        try:
            chosen = self._state.policies.selection.select(movable)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            return None
        return movable.works.get(chosen.task) if chosen is not None else None

    def _evens_out(self, request: GiveRequest) -> bool:
        """A task that would only wait there instead of here stays, unless there are more here even then."""
        there, slots_there = request.report.load_tasks + 1, max(request.profile.slots, 1)
        return there * self._ledger.profile.slots <= (self._ledger.load_tasks - 1) * slots_there

    def _may_go(self, work: Work, to: str, request: GiveRequest) -> bool:
        spec = work.spec
        if why_never(request.profile, spec.request, spec.placement, task_home(work.task)):
            return False
        if self._membership.has_declined(to, "directory", spec.directory):
            return False
        if isinstance(work, HomeTask):
            return bool(work.stranded_because) or (
                self._home.may_migrate(work) and not spec.placement.local and work.phase is HomePhase.WAITING
            )
        return (
            isinstance(work, Guest)
            and work.phase is GuestPhase.WAITING
            and work.may_move
            and (to != work.home or work.migrations > 0)  # 0: its home could not run it itself
            and self._membership.is_usable(work.home)
        )
