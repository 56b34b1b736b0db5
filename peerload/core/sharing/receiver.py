"""Receiver-initiated sharing: a node with room asks for a waiting task, and a node that is asked gives one.

A receiver asks one node after the other until one promises a task. The promise counts as load for inbound_s; the task
itself comes as an offer of its home. It asks whenever a task has ended here, when a report shows work elsewhere, and
at the policy's retry rate while it is below its mark.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING

from peerload.core.sharing.search import STEPS_MAX
from peerload.model import metrics, timers
from peerload.model.messages import GiveReply, GiveRequest, Need
from peerload.policy.api import Probe as ProbeStep
from peerload.policy.validation import valid_step

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.resources.admission import Ledger
    from peerload.core.sharing.information import Information
    from peerload.core.sharing.retry_rate import RetryRate
    from peerload.core.sharing.search import Search, Searches
    from peerload.core.sharing.task_donor import TaskDonor
    from peerload.core.state import CoreState
    from peerload.core.work import Work
    from peerload.model.load import LoadReport

ASKERS = 3
"""Nodes that are to ask when a node tells everybody that it has work. With one, nobody would come where the one that the others
count on has found work meanwhile."""


class Receiver:
    """One per node; its timers are ``probe`` and ``retry``."""

    def __init__(
        self,
        state: CoreState,
        ledger: Ledger,
        membership: Membership,
        information: Information,
        searches: Searches,
        donor: TaskDonor,
        retry_rate: RetryRate,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._membership = membership
        self._information = information
        self._searches = searches
        self._donor = donor
        self._retry_rate = retry_rate
        self._in_flight = 0
        self._retrying = False

    # -- asking for work -----------------------------------------------------------------------------------------------

    def wants_more(self) -> bool:
        """True if it is below its mark, with what it has asked for already."""
        profile = self._state.profile
        if not self._state.takes_guests or not profile.slots:
            return False
        return self._information.wants(self._in_flight)

    def pull(self, first: str = "", probes_max: int | None = None, *, asks_others: bool = True) -> None:
        """Ask for a waiting task, if this node is below its mark; ``first`` is asked first, and without ``asks_others``
        nobody else."""
        if not self.wants_more():
            return
        search = self._searches.open(None, probes_max)
        search.asks_others = asks_others
        self._in_flight += 1
        self._state.count(metrics.RECEIVER_SEARCHES)
        if first:
            self._ask(search, first)
        else:
            self.step(search)

    def ask_first(self, node: str, _report: LoadReport) -> None:
        """A node has told this one that it has work: ask it first."""
        self.pull(first=node)

    def answer(self, node: str, report: LoadReport) -> None:
        """A node has told everybody that it has work. If all that want more asked it, one of them would have a task, and the
        number of questions would grow with the number of nodes. So of those that ask again by themselves only ASKERS ask,
        and only that node; and none asks where it would be refused because the task would only wait here instead."""
        if self.answers(node, report):
            self.pull(first=node, asks_others=not self._state.policies.receiver.retry_rate)

    def answers(self, node: str, report: LoadReport) -> bool:
        """True if this node asks a node that has told everybody this report."""
        if not self._heeds(report):
            return False
        if not self._state.policies.receiver.retry_rate:
            return True
        return self._is_asker(node, report, is_ahead=self._information.asks_ahead())

    def wants_from(self) -> float:
        """Tasks per slot that a node must have, beside the one that it gives, for this node to ask it; infinite: it asks none."""
        if not self.wants_more():
            return math.inf
        if not self._state.policies.receiver.retry_rate or not self._information.asks_ahead():
            return -math.inf
        return (self._ledger.load_tasks + 1) / self._slots

    def _heeds(self, report: LoadReport) -> bool:
        """True if this node wants more and a node with that report would not refuse it, as far as that tells."""
        if not self.wants_more():
            return False
        if not self._state.policies.receiver.retry_rate or not self._information.asks_ahead():
            return True
        return evens_out(report.load_tasks, report.slots, self._ledger.load_tasks, self._slots)

    def _is_asker(self, node: str, report: LoadReport, *, is_ahead: bool) -> bool:
        """True if this node is among the first ASKERS of those that want more, by rendezvous hashing [TR98] of the
        announcement: nodes that know the same reports agree on who asks, without a message. Those that want more have room,
        as their reports say; with ``is_ahead`` also those with no task to give."""
        announcement = f"{node} {report.incarnation} {report.sequence}"
        own, before = _weight(announcement, self._state.node), 0
        for peer, told in self._membership.reports(self._membership.eligible(Need(), "")):
            if not (told.accepts or (is_ahead and not told.gives)):
                continue
            before += _weight(announcement, peer) < own
            if before == ASKERS:
                return False
        return True

    @property
    def _slots(self) -> int:
        return max(self._state.profile.slots, 1)

    def step(self, search: Search) -> None:
        """Ask the policy whom to ask next, and do it."""
        peers = self._membership.eligible(Need(), "")
        if self._state.policies.information.reports_guide_probing and self._information.asks_ahead():
            here, slots = self._ledger.load_tasks, self._slots  # as far as is known:
            refusing = {
                peer
                for peer, told in self._membership.reports(peers)
                if not evens_out(told.load_tasks, told.slots, here, slots)
            }
            peers = tuple(peer for peer in peers if peer not in refusing)
        view = self._information.view(peers)
        search.steps += 1
        try:
            replies = tuple(search.replies)
            step = valid_step(self._state.policies.receiver.locate(view, search.probes_max, replies, self._state.rng))
        except Exception as error:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            self._searches.decide(search, "nothing", f"the policy failed: {error!r}")
            self._end(search)
            return
        if isinstance(step, ProbeStep) and search.steps <= STEPS_MAX:
            nodes = self._searches.askable(search, step, peers)
            if nodes:
                self._ask(search, nodes[0])
                return
        self._searches.leave_footprints(search)
        self._end(search)

    def _ask(self, search: Search, node: str) -> None:
        self._searches.asked(search, node)
        self._state.count(metrics.RECEIVER_PROBES)
        report, profile = self._information.report(), self._state.profile
        self._state.send(node, GiveRequest(search.id, report, profile, ahead=self._information.asks_ahead()))
        self._searches.wait(search)

    def give_replied(self, src: str, reply: GiveReply) -> None:
        """PROMISED counts as load until the offer comes; NONE asks the next."""
        self._membership.report_received(src, reply.report)
        search = self._searches.answered(reply.search, src)
        if search is None or search.task is not None:
            return
        self._searches.wait_no_more(search)
        if not reply.task:
            search.add(src, accepts=False, report=reply.report)
            if search.asks_others:
                self.step(search)
            else:
                self._end(search)
            return
        self._searches.decide(search, reply.task, f"{src} gives it")
        self._end(search)
        self._donor.expect(reply.uid)

    def settle(self) -> None:
        """After every event: while this node is below its mark it asks again, at the policy's rate."""
        rate = self._state.policies.receiver.retry_rate
        if self._retrying or not rate or not self._information.wants():
            return
        if not self._state.takes_guests or not self._membership.has_any():
            return
        self._retrying = True
        self._state.set_timer_in(self._retry_rate.pause_s(rate), timers.RetryDue())

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
        self._membership.report_received(src, request.report)
        work = self._choose(src, request)
        if work is None:
            self._searches.hints.refused_work(src)
            self._state.send(src, GiveReply(request.search, self._information.report()))
            return
        self._state.send(src, GiveReply(request.search, self._information.report(), work.task, work.uid))
        self._donor.give(work, src, f"{src} has room")

    def _choose(self, src: str, request: GiveRequest) -> Work | None:
        if not self._membership.is_usable(src) or getattr(self._state.policies.sender, "places_all", False):
            return None
        stranded = self._donor.stranded_for(request.profile)
        if stranded is not None:
            return stranded
        if self._membership.circuit_breaker.why(src):
            return None
        if self._ledger.waits_for_devices:
            waiting = self._donor.waits_for_room_there(request.profile, request.report)
            if waiting is not None:
                return waiting
        if not self._information.gives() or request.profile.node != src:
            return None
        there = request.report
        if request.ahead and not evens_out(
            self._ledger.load_tasks, self._slots, there.load_tasks, max(request.profile.slots, 1)
        ):
            return None
        return self._donor.choose(request.profile)


def evens_out(load_tasks: int, slots: int, load_tasks_there: int, slots_there: int) -> bool:
    """True if a node with so many tasks has no fewer than the asker even after it has given it one: else the task would only
    wait there instead of here."""
    return (load_tasks_there + 1) * slots <= (load_tasks - 1) * slots_there


def _weight(announcement: str, node: str) -> bytes:
    """By chance, and the same on every node."""
    return blake2b(f"{announcement} {node}".encode(), digest_size=8).digest()
