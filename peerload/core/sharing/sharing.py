"""Load sharing of one node: asks others for work and gives it to nodes that ask, pairs with another, acts on reports,
and answers broadcast requests. `Sharing` composes these and the other files:

    information.py  the node's load reports, hints and views; whether it would accept a task of another home
    sender.py       a home looks for a place for a task

Policies propose; these own the timeouts, the limits, the migration limit and the rules for live systems
(docs/policies.md, "live rules"). An error of a policy counts as "keep the task here".
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from peerload.core.membership.membership import NamesThat
from peerload.core.resources.admission import asked_of, cpus_free_there, has_memory, has_room, slots_of, why_never
from peerload.core.resources.devices import EPSILON
from peerload.core.sharing.information import (
    ANYTHING,
    WAITING_LOOKED_AT_MAX,
    Information,
    MovableTasksView,
    PeerHints,
    RemoteAdmission,
)
from peerload.core.sharing.sender import STEPS_MAX, Searches, Sender
from peerload.core.work import HomePhase, HomeTask, RemotePhase, RemoteTask
from peerload.model import messages, metrics, timers
from peerload.model.actions import Announce, Decided
from peerload.model.bounded import BoundedDict
from peerload.model.resources import LOAD_MAX
from peerload.model.task import task_home
from peerload.policy.api import POLICY_FAILURES, Probe, valid_answer, valid_partner, valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.handoff.home import FileHolders, HomeHandoff
    from peerload.core.membership.membership import Membership
    from peerload.core.resources.admission import Ledger
    from peerload.core.sharing.sender import Search
    from peerload.core.state import CoreState, Mediator
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work
    from peerload.model.events import Instant
    from peerload.model.resources import LoadReport, Profile, ResourceRequest


LOOKED_AT_MAX = 64
"""Tasks that wait for devices and are checked against the room of a node that asks for work."""


class TaskDonor:
    """Gives waiting tasks to a node that asks for them or is paired with this one, and expects promised tasks. One per
    node; its timer is ``inbound``.

    A task of this home is offered immediately; a remote task returns to its home with the name of the new node.
    """

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        home: Home,
        executor: ExecutorHandoff,
        holders: FileHolders,
        sender: Sender,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = queue.ledger
        self._membership = membership
        self._home = home
        self._executor = executor
        self._holders = holders
        self._sender = sender

    # -- giving --------------------------------------------------------------------------------------------------------

    def stranded_for(self, profile: Profile) -> Work | None:
        """A task that this home cannot run but that node could: it goes first, regardless of the loads."""
        for task in islice(self._home.stranded.values(), WAITING_LOOKED_AT_MAX):
            if task.phase is HomePhase.WAITING and self._may_go(task, profile):
                return task
        return None

    def waits_for_room_there(self, profile: Profile, report: LoadReport) -> Work | None:
        """Task that waits for devices here while that node reports free ones; it moves regardless of the loads. None if
        there is none."""
        for work in islice(self._queue.waiting_for_devices(), LOOKED_AT_MAX):
            request = asked_of(self._state, work)
            has_all = (
                request.gpus and has_room(request, report) and self._has_memory(work, profile, report, ahead=False)
            )
            if has_all and self._may_go(work, profile):
                return work
        return None

    def choose(
        self,
        profile: Profile,
        report: LoadReport,
        besides: Container[bytes] = (),
        *,
        load_tasks: int | None = None,
        ahead: bool = False,
    ) -> Work | None:
        """The waiting task that the selection policy chooses for the node of this report, preferably one whose files
        are there; none of ``besides`` (uids). ahead: it may wait there; load_tasks: n of this node, if lower by now."""
        load = self._ledger.load_tasks if load_tasks is None else load_tasks

        def goes(work: Work) -> bool:
            has_room_there = self._has_memory(work, profile, report, ahead=ahead) and self._is_lighter(
                work.spec.request, profile, report, load
            )
            return has_room_there and work.uid not in besides and self._may_go(work, profile)

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

    def others_like(self, first: Work, request: messages.GiveRequest) -> list[HomeTask]:
        """The tasks that go to a node together with ``first``, if that asks only for a slot: similar ones, in the order
        of the selection policy, while that evens out the loads."""
        profile, spec, own_slots, others = (
            request.profile,
            first.spec,
            max(self._state.profile.slots, 1),
            list[HomeTask](),
        )
        asked = spec.request
        if spec.files is not None or asked.mem_bytes or asked.takes_devices or slots_of(asked, profile) > 1:
            return others

        def goes(work: Work) -> bool:
            is_like = work.spec is spec or work.spec == spec
            return is_like and work is not first and isinstance(work, HomeTask) and self._may_leave(work)

        movable = MovableTasksView(self._queue, goes, self._state)
        load, there, slots_there = self._ledger.load_tasks - 1, request.report.load_tasks + 1, max(profile.slots, 1)
        while len(others) < request.most - 1 and evens_out(load, own_slots, there, slots_there):
            work = self._select(movable)
            if not isinstance(work, HomeTask):
                break
            movable.take(work)
            others.append(work)
            load, there = load - 1, there + 1
        return others

    def _selected(self, may_go: Callable[[Work], bool]) -> Work | None:
        return self._select(MovableTasksView(self._queue, may_go, self._state))

    def _select(self, movable: MovableTasksView) -> Work | None:
        try:
            chosen = self._state.policies.selection.select(movable)
            return movable.works.get(chosen.task) if chosen is not None else None
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return None

    def give(self, work: Work, to: str, reason: str) -> None:
        """Give work to that node, which may still decline it."""
        self._state.count(metrics.TASKS_GIVEN)
        if isinstance(work, HomeTask):
            self._sender.give(work, to)
        elif isinstance(work, RemoteTask):
            self._executor.give_back(work, reason, to=to)

    def _has_memory(self, work: Work, profile: Profile, report: LoadReport, *, ahead: bool) -> bool:
        """True if its memory is free there or, with ``ahead``, no scarcer there than here."""
        request, there = work.spec.request, report.mem_requested_bytes
        return has_memory(request, profile, there) or (
            ahead
            and evens_out(
                self._ledger.mem_requested_bytes,
                self._state.profile.mem_bytes,
                there,
                profile.mem_bytes,
                request.mem_bytes,
            )
        )

    def _is_lighter(self, request: ResourceRequest, there: Profile, report: LoadReport, load: int) -> bool:
        """True unless a task of several slots would find no free cores there, and as many tasks before it as here."""
        own, given = self._state.profile, slots_of(request, there)
        if given == 1 or request.cpus <= cpus_free_there(there, report)[0] + EPSILON:
            return True
        return evens_out(load, max(own.slots, 1), report.load_tasks, max(there.slots, 1), slots_of(request, own), given)

    def _may_go(self, work: Work, profile: Profile) -> bool:
        spec, to = work.spec, profile.node
        if why_never(profile, spec.request, spec.placement, task_home(work.task)):
            return False
        if self._membership.will_decline(to, spec):
            return False
        if isinstance(work, HomeTask):
            return bool(work.stranded_because) or self._may_leave(work)
        return (
            isinstance(work, RemoteTask)
            and work.phase is RemotePhase.WAITING
            and work.may_move
            and (to != work.home or work.migrations > 0)  # 0: its home could not run it
            and self._membership.is_usable(work.home)
        )

    def _may_leave(self, task: HomeTask) -> bool:
        is_movable = not task.spec.placement.local and self._home.may_migrate(task)
        return is_movable and task.phase is HomePhase.WAITING

    # -- promised tasks ------------------------------------------------------------------------------------------------

    def expect(self, uid: bytes) -> None:
        """Count a promised task as load until it comes, or for inbound_s; not if it came before the promise, which may
        take another route, or is over already."""
        task, executor = self._home.tasks.get(uid), self._executor
        is_away = (
            uid not in executor.by_uid and uid not in executor.fences if task is None else task.phase is HomePhase.AWAY
        )
        if is_away:
            self._ledger.expect(uid, messages.Need().request)
            self._state.set_timer_in(self._state.config.inbound_s, timers.Inbound(uid.hex()))

    def taken_home(self, uid: bytes) -> None:
        """Stop expecting a promised task of this home that has returned."""
        if self._ledger.expect_no_more(uid):
            self._state.clear_timer(timers.Inbound(uid.hex()))

    def inbound_timed_out(self, uid: bytes) -> None:
        remote = self._executor.by_uid.get(uid)
        if remote is None or remote.phase is not RemotePhase.RESERVED:
            self._ledger.expect_no_more(uid)


class RetryRate:
    """Random pauses between repetitions whose rate is given per mean service time (docs/policies.md, live rules),
    learned from the durations of tasks here."""

    __slots__ = ("_state",)

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def pause_s(self, rate: float) -> float:
        """Random pause until the next search, in seconds, for this number of searches in each mean service time. It is
        random so that nodes do not act in step. It is at least retry_s_min, and at most retry_s_max, because tasks of
        hours must not mean hours of silence."""
        config = self._state.config
        mean_s = self._state.history.mean_s / self._state.profile.speed
        pause_s = mean_s / rate * self._state.rng.expovariate(1.0)
        return min(max(pause_s, config.retry_s_min), config.retry_s_max)


WEIGHTS_KEPT = 1024
"""Weights of nodes that are cached: each announcement needs them repeatedly, in a simulation at each node."""
ASKERS = 3
"""Nodes that ask a node that announces work. With one, none would come if the node that the others rely on has found
work meanwhile."""


PROMISED_MAX = 256
"""Limit on promised tasks that have not arrived."""


class Receiver:
    """Receiver side of load sharing: asks for work. One per node; its timers are ``probe`` and ``retry``.

    It asks one node after the other until one promises a task. The promise counts as load for inbound_s; the task
    itself comes as an offer of its home. If handoffs take longer than tasks, it asks for several tasks in one request.
    It asks when a task has ended here, when a report shows work elsewhere, and at the policy's retry rate while this
    node is below its mark.
    """

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
        self._rate = state.policies.receiver.retry_rate
        self._retry_probes = state.policies.receiver.retry_probes
        self._in_flight = 0
        self._retrying = self._asked_nobody = False
        self.is_paused = False
        """True if the last search by the timer asked no node, and there was no event since."""
        self._promised: BoundedDict[bytes, float] = BoundedDict(PROMISED_MAX)
        """Time of the request for each promised task."""

    # -- asking for work -----------------------------------------------------------------------------------------------

    def wants_more(self) -> bool:
        """True if this node is below its mark, including the tasks that it has asked for."""
        state = self._state
        return self._information.wants(self._in_flight) and state.takes_remote_tasks and state.profile.slots > 0

    def pull(self, first: str = "", probes_max: int | None = None, *, asks_others: bool = True) -> None:
        """Ask for a waiting task, if this node is below its mark; ``first`` is asked first, and without ``asks_others``
        no other node."""
        if not self.wants_more() or not (wanted := self._information.wanted(self._in_flight)):
            return
        search = self._searches.open(None, probes_max)
        search.asks_others = asks_others
        search.wanted = wanted
        self._in_flight += wanted
        self._state.count(metrics.RECEIVER_SEARCHES)
        if first:
            self._ask(search, first)
        else:
            self.step(search)

    def answer(self, node: str, report: LoadReport) -> None:
        """Handle an announcement that a node has work. If all nodes that want work asked, one would get a task, and the
        requests would grow with the number of nodes. So of the nodes that retry on their own only ASKERS ask, and only
        that node; and none asks where it would be refused because the task would only wait here instead."""
        if self.answers(node, report):
            self.pull(first=node, asks_others=not self._rate)

    def answers(self, node: str, report: LoadReport) -> bool:
        """True if this node asks the sender of this announced report for work: it wants more, and according to the
        report would not be refused."""
        if not self.wants_more():
            return False
        if not self._rate:
            return True
        is_ahead = self._information.asks_ahead()
        if is_ahead and not evens_out(report.load_tasks, report.slots, self._ledger.load_tasks, self._slots):
            return False
        return self._is_asker(node, report, is_ahead=is_ahead)

    def wants_from(self) -> float:
        """Tasks per slot that a node must keep after giving one for this node to ask it; infinite: it asks none."""
        if not self.wants_more():
            return math.inf
        if not self._rate or not self._information.asks_ahead():
            return -math.inf
        return (self._ledger.load_tasks + 1) / self._slots

    def _is_asker(self, node: str, report: LoadReport, *, is_ahead: bool) -> bool:
        """True if this node is among the first ASKERS of the nodes that want more, by rendezvous hashing [TR98] of the
        announcement: nodes with the same reports agree on the askers without a message. Nodes that want more are those
        whose reports show room; with ``is_ahead`` also those without a task to give."""
        announcement = f"{node} {report.incarnation} {report.sequence}"
        own = _weight(announcement, self._state.node)
        peers = self._membership.eligible(ANYTHING, "")
        if is_ahead:
            lighter = (peer for peer in peers if _weight(announcement, peer) < own)  # only their reports are checked
            first = (1 for _, told in self._membership.reports(lighter) if told.accepts or not told.gives)
        else:
            accepting = self._membership.saying(peers, "accepts")
            first = (1 for peer, _ in accepting if _weight(announcement, peer) < own)
        return sum(islice(first, ASKERS)) < ASKERS

    @property
    def _slots(self) -> int:
        return max(self._state.profile.slots, 1)

    def step(self, search: Search) -> None:
        """Ask the policy for the next step, and carry it out."""
        peers = self._membership.eligible(ANYTHING, "")
        if self._state.reports_guide_probing and self._information.asks_ahead():
            peers = NamesThat(peers, self._may_even_out)
        view = self._information.view(peers)
        search.steps += 1
        try:
            replies = tuple(search.replies)
            step = valid_step(self._state.policies.receiver.locate(view, search.probes_max, replies, self._state.rng))
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            self._searches.decide(search, "nothing", f"the policy failed: {error!r}")
            self._end(search)
            return
        if isinstance(step, Probe) and search.steps <= STEPS_MAX:
            nodes = self._searches.askable(search, step, peers)
            if nodes:
                self._ask(search, nodes[0])
                return
        self._searches.leave_footprints(search)
        self._end(search)

    def _may_even_out(self, peer: str) -> bool:
        """True unless this peer is known to refuse, because its task would only wait here instead."""
        known = self._membership.believed(peer)
        return known is None or evens_out(
            known.report.load_tasks, known.report.slots, self._ledger.load_tasks, self._slots
        )

    def _ask(self, search: Search, node: str) -> None:
        self._searches.asked(search, node)
        self._state.count(metrics.RECEIVER_PROBES)
        report, profile = self._information.report(), self._state.profile
        is_ahead = self._information.asks_ahead()
        self._state.send(node, messages.GiveRequest(search.id, report, profile, is_ahead, search.wanted))
        self._searches.wait(search)

    def give_replied(self, src: str, reply: messages.GiveReply) -> None:
        """Handle a GiveReply: a promised task counts as load until offered; after a refusal, ask the next node."""
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
        for uid in (reply.uid, *reply.others[: search.wanted - 1]):
            self._donor.expect(uid)
            if uid in self._ledger.inbound:
                self._promised[uid] = search.asked_s
        if self._information.is_pipelining():
            self.pull(first=src, asks_others=False)

    def arrived(self, remote: RemoteTask) -> None:
        """Handle the arrival of a remote task: a requested one without files to fetch shows how long a handoff
        takes."""
        asked_s = self._promised.pop(remote.uid, None)
        if asked_s is not None and not remote.spec.is_staged:
            self._information.handoff_took(self._state.now.boot_s - asked_s)

    def settle(self) -> None:
        """Search again, at the policy's rate, while this node is below its mark; called after every event. After a
        search that asked no node, wait for the next event, because until then there is no node to ask."""
        self.is_paused, self._asked_nobody = self._asked_nobody, False
        if self.is_paused:
            return
        if self._retrying or not self._rate or not self._information.wants():
            return
        if not self._state.takes_remote_tasks or not self._membership.has_any():
            return
        self._retrying = True
        self._state.set_timer_in(self._retry_rate.pause_s(self._rate), timers.RetryDue())

    def retry(self) -> None:
        """Make an extra search, if this node is still below its mark."""
        self._retrying = False
        self.pull(probes_max=self._retry_probes)
        self._asked_nobody = not self._in_flight

    def _end(self, search: Search) -> None:
        if self._searches.close(search):
            self._in_flight -= search.wanted

    # -- giving work ---------------------------------------------------------------------------------------------------

    def give_requested(self, src: str, request: messages.GiveRequest) -> None:
        """Handle a node with room: promise tasks that it can run, and offer them (or let their homes offer them)."""
        self._membership.report_received(src, request.report)
        first, report = self._choose(src, request), self._information.report()
        if first is None:
            self._searches.hints.refused_work(src)
            self._state.send(src, messages.GiveReply(request.search, report))
            return
        others = self._donor.others_like(first, request) if request.most > 1 else ()
        uids = tuple([work.uid for work in others])
        self._state.send(src, messages.GiveReply(request.search, report, first.task, first.uid, uids))
        for work in (first, *others):
            self._donor.give(work, src, f"{src} has room")

    def _choose(self, src: str, request: messages.GiveRequest) -> Work | None:
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
        return self._donor.choose(request.profile, there, ahead=request.ahead)


def evens_out(
    load: int, size: int, load_there: int, size_there: int, given: int = 1, given_there: int | None = None
) -> bool:
    """True if a node with ``load`` tasks in its slots (or memory requested) is loaded no less than the asker even after
    it gives ``given`` of them; otherwise the task would only wait there instead of here. given_there: the same in the
    asker's units, if they differ."""
    return (load_there + (given if given_there is None else given_there)) * size <= (load - given) * size_there


@lru_cache(WEIGHTS_KEPT)
def _weight(announcement: str, node: str) -> bytes:
    """Pseudo-random weight; the same on every node."""
    return blake2b(f"{announcement} {node}".encode(), digest_size=8).digest()


PARTNERS_ASKED_MAX = 8
"""Nodes asked in one turn, one after the other, until one of them pairs."""


class PairProtocol:
    """Pairing: two nodes even out their loads and part [BF81]. One per node; its timers are ``pair`` (the next turn)
    and ``paired`` (the partner has been silent for too long).

    A node asks a random other node that the policy names. A node that is paired, or waits for an answer, refuses; then
    the asker asks another, at most ``PARTNERS_ASKED_MAX`` before its next turn. The richer of the two gives: it
    promises waiting tasks while the policy lets one more move, and offers them. Promised tasks count immediately as
    load of the poorer, so the pair can part before they arrive.
    """

    def __init__(
        self,
        state: CoreState,
        membership: Membership,
        information: Information,
        donor: TaskDonor,
        retry_rate: RetryRate,
    ) -> None:
        self._state = state
        self._membership = membership
        self._information = information
        self._donor = donor
        self._retry_rate = retry_rate
        self.rate = state.policies.pairing.rate
        self._partner = ""
        self._pairing = 0
        self._last = 0
        self._is_armed = False
        self._refused: list[str] = []
        """The nodes that have refused in this turn."""

    # -- this node asks ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Set the time of the next search; called after every event."""
        if self.rate and not self._is_armed and self._membership.has_any():
            self._is_armed = True
            self._state.set_timer_in(self._retry_rate.pause_s(self.rate), timers.Pair())

    def ask(self) -> None:
        """Begin a turn: ask the node that the policy names."""
        self._is_armed = False
        if self._partner:
            return
        self._refused.clear()
        self._ask_next()

    def _ask_next(self) -> None:
        """Ask one of the nodes that have not refused in this turn."""
        if self._state.profile.drained or len(self._refused) >= PARTNERS_ASKED_MAX:
            return
        peers = [node for node in self._information.view().peers if node not in self._refused]
        view = self._information.view(peers)
        try:
            node = valid_partner(self._state.policies.pairing.partner(view, self._state.rng))
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return
        if node is None or node not in view.peers:
            return
        self._last += 1
        self._pair_with(node, self._last, self._state.config.probe_timeout_s)
        self._state.count(metrics.PAIR_REQUESTS)
        self._state.send(node, messages.PairRequest(self._last, self._information.report()))

    def reply_received(self, src: str, reply: messages.PairReply) -> None:
        """Handle the partner's answer: it refuses, loads are even, it gives, or this node gives."""
        self._membership.report_received(src, reply.report)
        for uid in reply.promised:
            self._donor.expect(uid)
        if not self._is_paired_with(src, reply.pairing):
            return  # too late: the partner's timeout ends the pair
        self._part()
        if not reply.accepts:
            self._state.count(metrics.PAIR_REQUESTS_REFUSED)
            self._refused.append(src)
            self._ask_next()
        elif not reply.promised:
            chosen = self._choose(src, self._information.report(), reply.report)
            self._state.send(src, messages.Unpair(reply.pairing, tuple(work.uid for work in chosen)))
            self._give(chosen, src)

    # -- another node asks ---------------------------------------------------------------------------------------------

    def request_received(self, src: str, request: messages.PairRequest) -> None:
        """Pair, unless this node is already paired."""
        self._membership.report_received(src, request.report)
        own = self._information.report()
        if self._partner or self._state.profile.drained or not self._membership.is_usable(src):
            self._state.send(src, messages.PairReply(request.pairing, accepts=False, report=own))
            return
        chosen = self._choose(src, own, request.report)
        if not chosen and self._moves(request.report, own):
            self._pair_with(src, request.pairing, self._state.config.inbound_s)
        promised = tuple(work.uid for work in chosen)
        self._state.send(src, messages.PairReply(request.pairing, accepts=True, report=own, promised=promised))
        self._give(chosen, src)

    def unpair_received(self, src: str, message: messages.Unpair) -> None:
        """Handle the richer partner's decision about what it gives."""
        for uid in message.promised:
            self._donor.expect(uid)
        if self._is_paired_with(src, message.pairing):
            self._part()

    def timed_out(self) -> None:
        """End a pair whose partner has been silent for too long."""
        if self._partner:
            self._state.count(metrics.PAIRS_UNANSWERED)
        self._partner = ""

    # -- internals -----------------------------------------------------------------------------------------------------

    def _pair_with(self, node: str, pairing: int, seconds: float) -> None:
        self._partner, self._pairing = node, pairing
        self._state.set_timer_in(seconds, timers.Paired())

    def _is_paired_with(self, node: str, pairing: int) -> bool:
        return (self._partner, self._pairing) == (node, pairing)

    def _part(self) -> None:
        self._partner = ""
        self._state.clear_timer(timers.Paired())

    def _choose(self, to: str, own: LoadReport, theirs: LoadReport) -> list[Work]:
        """The tasks to move there, while the policy lets one more move."""
        peer = self._membership.get(to)
        chosen: dict[bytes, Work] = {}
        while peer is not None and len(chosen) < messages.PAIR_MOVES_MAX and self._moves(own, theirs):
            work = self._donor.choose(peer.profile, theirs, chosen, load_tasks=own.load_tasks)
            if work is None:
                break
            chosen[work.uid] = work
            request = work.spec.request
            given = slots_of(request, self._state.profile)
            own = msgspec.structs.replace(own, load_tasks=max(own.load_tasks - given, 0))
            theirs = msgspec.structs.replace(
                theirs,
                load_tasks=theirs.load_tasks + slots_of(request, peer.profile),
                cpus_free=max(theirs.cpus_free - request.cpus, 0.0) if theirs.cpus_free < LOAD_MAX else LOAD_MAX,
                mem_requested_bytes=theirs.mem_requested_bytes + request.mem_bytes,
            )
        return list(chosen.values())

    def _moves(self, richer: LoadReport, poorer: LoadReport) -> bool:
        try:
            return valid_answer(self._state.policies.pairing.moves(richer, poorer))
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return False

    def _give(self, chosen: list[Work], to: str) -> None:
        policy, known = self._state.policies.names["location.pairing"], self._membership.last_report(to)
        inputs = ((to, known.report.load, 0.0),) if known is not None else ()
        for work in chosen:
            self._state.actions.append(Decided(work.task, policy, inputs, to, f"paired with {to}, which has less"))
            self._donor.give(work, to, f"paired with {to}")


class StateRequests:
    """Broadcast requests for state, and answers to such requests. One per node; its timer is ``answer``.

    Only useful nodes answer, each after a random pause, until the asker has enough. The information policy asks for
    load; a sender's search may ask for room for one task (the answers belong to that search).
    """

    def __init__(
        self,
        state: CoreState,
        membership: Membership,
        information: Information,
        searches: Searches,
        admission: RemoteAdmission,
        receiver: Receiver,
    ) -> None:
        self._state = state
        self._membership = membership
        self._information = information
        self._searches = searches
        self._admission = admission
        self._receiver = receiver
        self._asked = 0
        self._answers_left = 0
        self._to_answer: dict[str, tuple[str, messages.StateRequest]] = {}

    # -- this node asks ------------------------------------------------------------------------------------------------

    def ask(self, report: LoadReport) -> None:
        """Ask all nodes for their load; this ends an earlier request."""
        self._asked = self._searches.next_id()
        self._answers_left = self._state.config.answers_enough
        self._state.count(metrics.REQUESTS_BROADCAST)
        self._state.actions.append(Announce(messages.StateRequest(self._asked, report)))

    def answer_received(self, answer: messages.StateAnswer) -> None:
        """Handle the answer of a useful node: end the request after enough answers, or if this node needs no more."""
        if answer.request == messages.UNASKED or answer.request != self._asked or not self._answers_left:
            return
        self._answers_left -= 1
        # More similar answers help: from busy nodes while there is room here, from idle nodes while there is none.
        helps = self._receiver.wants_more() if answer.report.gives else not self._information.shown().accepts
        if not self._answers_left or not helps:
            self._answers_left = 0
            self._state.actions.append(Announce(messages.Enough(answer.request)))

    # -- another node asks ---------------------------------------------------------------------------------------------

    def request_received(self, src: str, request: messages.StateRequest) -> None:
        """Answer after a pause, if this node is useful to the asker."""
        self._membership.report_received(src, request.report)
        if not self._membership.is_usable(src) or not self._is_useful(src, request):
            return
        if len(self._to_answer) >= self._state.config.answers_pending_max:
            self._state.count(metrics.REQUESTS_UNANSWERED)
            return
        key = f"{src} {request.request}"
        self._to_answer[key] = (src, request)
        pause_s = self._state.rng.random() * self._state.config.answer_backoff_s
        self._state.set_timer_in(pause_s, timers.AnswerDue(key))

    def answer(self, key: str) -> None:
        """Answer after the pause, if this node is still useful."""
        src, request = self._to_answer.pop(key, ("", None))
        if request is not None and self._is_useful(src, request):
            self._state.count(metrics.REQUESTS_ANSWERED)
            price_s = self._admission.price_s(request.expected_s)
            self._state.send(src, messages.StateAnswer(request.request, self._information.report(), price_s))

    def enough_received(self, src: str, message: messages.Enough) -> None:
        key = f"{src} {message.request}"
        if self._to_answer.pop(key, None) is not None:
            self._state.clear_timer(timers.AnswerDue(key))

    def _is_useful(self, src: str, request: messages.StateRequest) -> bool:
        if request.need is not None:
            return self._admission.would_accept(src, request.need)
        own = self._information.shown()
        return own.gives if request.report.accepts else own.accepts


class ReportFilter(NamedTuple):
    """Filter of the announced reports that a node may act on (`Sharing.acts_on`): all; those of nodes with room; those
    of nodes that keep this many tasks per slot after giving one; those of nodes for which it has a hint."""

    every: bool
    with_room: bool
    with_work_from: float
    of_nodes: tuple[str, ...]


ACTS_ON_ALL = ReportFilter(True, False, math.inf, ())
ACTS_ON_NONE = ReportFilter(False, False, math.inf, ())


class Sharing:
    """Facade of load sharing for the rest of the core. One per node."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        home: Home,
        handoff: HomeHandoff,
        executor: ExecutorHandoff,
        mediator: Mediator,
    ) -> None:
        self._state = state
        self._membership = membership
        self._hints = hints = PeerHints(is_on=state.policies.memory, by_refusal=state.reports_guide_probing)
        self._searches = searches = Searches(state, hints)
        self._has_receiver = state.policies.names["location.receiver"] != "none"
        transfer, load, sender = state.policies.transfer, state.policies.load, state.policies.sender
        rated = state.policies.receiver.retry_rate or state.policies.pairing.rate
        only_asked = (
            getattr(transfer, "stateless", False) and not rated and state.policies.information.watches != "region"
        )
        self._has_steady_thresholds = bool(getattr(transfer, "steady", False))
        is_known = (self._has_steady_thresholds or only_asked) and getattr(load, "steady", False)
        self._acts_on_all = not is_known or hasattr(sender, "announced")
        self._places_all = bool(getattr(sender, "places_all", False))
        self._stranded = home.stranded
        self._ledger = queue.ledger
        retry_rate = RetryRate(state)
        self.information = information = Information(state, queue, membership, hints, home.stranded, mediator)
        self.admission = RemoteAdmission(state, queue.ledger, membership, information, hints)
        self.sender = Sender(state, queue, membership, home, handoff, information, searches)
        self.donor = TaskDonor(state, queue, membership, home, executor, handoff.holders, self.sender)
        self.receiver = Receiver(state, queue.ledger, membership, information, searches, self.donor, retry_rate)
        self.pairing = PairProtocol(state, membership, information, self.donor, retry_rate)
        self.requests = StateRequests(state, membership, information, searches, self.admission, self.receiver)
        rates = (
            (self.receiver, state.policies.receiver.retry_rate),
            (self.pairing, state.policies.pairing.rate),
        )
        self.paced: tuple[Receiver | PairProtocol, ...] = tuple(machine for machine, rate in rates if rate)
        """The machines that ask others at their own rate, if the policies want that."""

    def report(self) -> LoadReport:
        """The load report of this node now, within an event."""
        return self.information.report()

    def shown(self) -> LoadReport:
        """The load report as of the last event, for drivers and people; changes nothing. A driver that sends it to
        others must report that with LoadPublished."""
        return self.information.shown()

    def arrived(self, remote: RemoteTask) -> None:
        self.receiver.arrived(remote)

    def completed(self) -> None:
        """Ask for another task, if wanted, after a task has ended here and the next one has started."""
        if self._has_receiver:
            self.receiver.pull()

    def would_leave(self, task: HomeTask) -> bool:
        """True if a task like this one of this home would reach a node with room: sent, or given on request."""
        is_sent = self.sender.is_on and self.sender.still_sends(task)
        is_given = task.spec.request.takes_devices or self.information.gives()
        return is_sent or bool(self.pairing.rate) or (self._has_receiver and is_given)

    def stays_because(self, task: HomeTask) -> str:
        """The reason why a waiting task of this home moves to no other node now, regardless of room; "" if it may."""
        if task.phase is not HomePhase.WAITING or task.stranded_because or task.search is not None:
            return ""
        if task.spec.request.takes_devices or self.sender.places_all or self.pairing.rate:
            return ""
        node, policies = self._state.node, self._state.policies
        if not self._has_receiver:
            return f"{node}'s preset {policies.name} " + (
                "looks for a place only when a task comes" if self.sender.is_on else "sends no tasks"
            )
        if self.information.gives():
            return ""
        above = self.information.thresholds().give_above * self._ledger.profile.slots
        return f"{node} keeps it: its load is {self.information.level():g}, and it gives tasks away above {above:g}"

    def probe_timed_out(self, search_id: int) -> None:
        """End the wait of a search: it continues with the answers so far."""
        search = self._searches.timed_out(search_id)
        if search is None:
            return
        if search.task is None:
            self.receiver.step(search)
        else:
            self.sender.timed_out(search, search.task)

    def footprint_received(self, src: str, footprint: messages.Footprint) -> None:
        """Handle Footprint: a search of that node found nothing."""
        if footprint.has_room:
            self._hints.is_idle(src)
        else:
            self._hints.is_busy(src)

    def report_received(self, src: str, report: LoadReport) -> None:
        """Store a peer's load report, and act on it."""
        if self._membership.report_received(src, report):
            self.report_met(src, report)

    def report_met(self, src: str, report: LoadReport) -> None:
        """Handle a new announced report, which other nodes receive too."""
        self._announced(src, report, to_all=True)
        self._act_on(src, report, asks=self.receiver.answer)

    def report_filter(self) -> ReportFilter:
        """The filter of the reports that this node may act on, as of the last event."""
        if (
            self._acts_on_all
            or self._hints.leaves_footprints
            or not self._has_steady_thresholds
            or self.receiver.is_paused
        ):
            return ACTS_ON_ALL
        wants_from = self.receiver.wants_from() if self._has_receiver else math.inf
        return ReportFilter(False, self._looks_for_room(), wants_from, tuple(self._hints.busy))

    def _looks_for_room(self) -> bool:
        return bool(self._stranded or self._ledger.waits_for_devices or (self._places_all and self._ledger.waiting))

    def acts_on(self, now: Instant, src: str, report: LoadReport) -> bool:
        """True if this node would act on an announced report: ask for work, offer a task, or change its hints, cached
        thresholds or load index."""
        if self._acts_on_all or self.receiver.is_paused:
            return True
        self._state.now = now
        acts = self._answers_or_remembers(src, report)
        self.information.between_events()
        return acts

    def _answers_or_remembers(self, src: str, report: LoadReport) -> bool:
        if (report.accepts or report.gpus) and self._looks_for_room():
            return True
        if report.has_work:
            if report.is_overloaded and self._hints.leaves_footprints:
                return True
            return self._has_receiver and self.receiver.answers(src, report)
        return src in self._hints.busy

    def answer_received(self, src: str, answer: messages.StateAnswer) -> None:
        """Handle the answer of a useful node, for a search or this node's request. No other node got its report."""
        self._membership.report_received(src, answer.report)
        if self.sender.answer_received(src, answer):
            return
        self._announced(src, answer.report, to_all=False)
        self._act_on(src, answer.report, asks=lambda node, _report: self.receiver.pull(first=node))
        self.requests.answer_received(answer)

    def _announced(self, src: str, report: LoadReport, *, to_all: bool) -> None:
        """Pass the announcement to the sender policy, if it wants it."""
        hook = getattr(self._state.policies.sender, "announced", None)
        if hook is None:
            return
        try:
            hook(src, report, to_all=to_all)
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)

    def _act_on(self, src: str, report: LoadReport, asks: Callable[[str, LoadReport], None]) -> None:
        """Act on a report: its node may have work for this one, or room for a stranded task."""
        if not self._state.reports_guide_probing:
            if report.is_overloaded:
                self._hints.is_busy(src)
        elif not report.has_work:
            self._hints.take_busy(src)
        if report.has_work and self._has_receiver:
            asks(src, report)
        if report.accepts or report.gpus:
            self.sender.room_at(src, report)
