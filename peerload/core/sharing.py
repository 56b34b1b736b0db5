"""Drives the policies: what is told, whom a sender probes, whom a receiver asks, which task is given.

Policies propose; this file owns the time-outs, the bounds, the migration limit and the rules for live systems
(docs/policies.md, "live rules"). Whatever a policy does wrong counts as "keep the task here".
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from peerload.core.admission import why_never
from peerload.core.view import Movable, View, task_view
from peerload.core.work import Guest, GuestPhase, HomePhase, HomeTask
from peerload.model.actions import Announce, Decided
from peerload.model.load import LoadReport, Marks, Region
from peerload.model.messages import GiveReply, GiveRequest, Need, Probe, ProbeReply, State
from peerload.policy.api import Keep, Reply, Transfer
from peerload.policy.api import Probe as ProbeStep

if TYPE_CHECKING:
    from peerload.core.admission import Ledger
    from peerload.core.handoff_executor import Executor
    from peerload.core.handoff_home import Home
    from peerload.core.membership import Membership
    from peerload.core.queue import WaitingQueue
    from peerload.core.state import CoreState
    from peerload.core.work import Work
    from peerload.model.instant import Instant
    from peerload.model.messages import Offer

STEPS_MAX = 256
"""Questions a policy is asked in one search; one that never ends is cut off here."""


MARKS_AT_FIRST = Marks(send_at=1.0, accept_below=1.0, receive_below=1.0, give_above=1.0)
"""Until the transfer policy has spoken, and while it fails."""

STRANDED_ASKED_MAX = 64
"""Stranded tasks looked at when a report says that its node has room; the others have their timers."""


class Search:
    """A search on its way: of a sender for a place (task set), or of a receiver for work."""

    __slots__ = ("id", "inputs", "offered", "pending", "probes_max", "replies", "steps", "task")

    def __init__(self, search_id: int, task: HomeTask | None, probes_max: int | None = None) -> None:
        self.id = search_id
        self.task = task
        self.probes_max = probes_max
        self.replies: list[Reply] = []
        self.pending: dict[str, float] = {}
        self.inputs: list[tuple[str, float, float]] = []
        self.offered: set[str] = set()
        self.steps = 0


class Sharing:
    """One per node; its timers are ``probe``, ``inbound``, ``stranded``, ``region``, ``retry`` and ``period``."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        ledger: Ledger,
        membership: Membership,
        home: Home,
        executor: Executor,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = ledger
        self._membership = membership
        self._home = home
        self._executor = executor
        self._searches: dict[int, Search] = {}
        self._turns: deque[HomeTask] = deque()
        self._senders = 0
        self._pulls = 0
        self._next_search = 0
        self._sequence = 0
        self._told: LoadReport | None = None
        self._region = Region.UNDERLOADED
        self._retrying = False
        self._marks = MARKS_AT_FIRST
        self._marks_at: Instant | None = None
        self._durations: deque[float] = deque(maxlen=state.config.durations_kept_max)
        self.stranded: dict[bytes, HomeTask] = {}
        self.cpus_busy = 0.0
        self.mem_used_bytes = 0

    # -- this node's load ----------------------------------------------------------------------------------------------

    def _view(self, peers: tuple[str, ...] = ()) -> View:
        policies = self._state.policies
        view = View(
            self._state.node,
            self._ledger,
            self._membership,
            self.cpus_busy,
            peers,
            reports_guide_probing=policies.information.reports_guide_probing,
        )
        try:
            view.load = policies.load.load(view)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            view.load = view.load_tasks / max(view.slots, 1)
        view.marks = self._marks if self._marks_at is self._state.now else self._ask_marks(view)
        return view

    def marks(self) -> Marks:
        """The transfer policy's marks; asked for once an event."""
        return self._marks if self._marks_at is self._state.now else self._view().marks

    def _ask_marks(self, view: View) -> Marks:
        view.marks = self._marks
        try:
            self._marks = self._state.policies.transfer.marks(view)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
        self._marks_at = self._state.now
        return self._marks

    def report(self) -> LoadReport:
        """What this node says of itself now."""
        view = self._view()
        n, slots, marks = view.load_tasks, view.slots, view.marks
        self._sequence += 1
        movable = len(self._queue) + len(self.stranded)
        return LoadReport(
            load_tasks=n,
            slots=slots,
            running=len(self._ledger.running),
            waiting=self._ledger.waiting + len(self.stranded),
            movable=movable,
            load=view.load,
            region=_region(n, slots, marks),
            accepts=n < marks.accept_below * slots and not self._state.profile.drained,
            gives=movable > 0 and (n > marks.give_above * slots or bool(self.stranded)),
            cpus_busy=self.cpus_busy,
            mem_used_bytes=self.mem_used_bytes,
            incarnation=self._state.identity.incarnation,
            sequence=self._sequence,
        )

    def settle(self) -> None:
        """After every event: whose turn has come, and has the load region changed for long enough to be told?"""
        if self._turns:
            self.take_turns()
        slots = self._ledger.profile.slots
        region = _region(self._ledger.load_tasks, slots, self.marks())
        self._marks_at = None
        if self._told is None:
            self.tell()
        elif region is not self._region:
            self._region = region
            if region is self._told.region:
                self._state.clear_timer("region")
            else:
                self._state.set_timer_in(self._state.config.settle_s, "region")

    def region_held(self) -> None:
        """The region has held for settle_s: told, if the information policy says so."""
        now = self.report()
        try:
            tells = self._told is None or self._state.policies.information.tells(self._told, now)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            tells = False
        if tells:
            self.tell(now)

    def period_passed(self) -> None:
        """The information policy tells everybody at a fixed period."""
        self.tell()

    def tell(self, report: LoadReport | None = None) -> None:
        """Announce this node's load to everybody."""
        report = report or self.report()
        self._told = report
        self._region = report.region
        self._state.count("announcements")
        self._state.actions.append(Announce(State(self._state.identity, self._state.profile, report)))
        period_s = self._state.policies.information.period_s
        if period_s:
            self._state.set_timer_in(period_s, "period")

    # -- the sender's side ---------------------------------------------------------------------------------------------

    def sends(self, task: HomeTask) -> bool:
        """Whether an arriving task (not counted itself) should go elsewhere."""
        if not self._home.may_migrate(task) or task.spec.placement.local:
            return False
        marks = self.marks()
        n, slots = self._ledger.load_tasks, self._ledger.profile.slots
        if n >= marks.send_at * slots:
            return True
        return marks.send_at <= 1.0 and not self._ledger.fits_beside_all(task.spec.request)

    def strand(self, task: HomeTask, reason: str) -> None:
        """Its home cannot run it: it is placed elsewhere, asked about again until it is."""
        task.stranded_because = reason
        task.backoff_s = self._state.config.stranded_backoff_s
        self.stranded[task.uid] = task
        self.search_for(task)
        self._state.set_timer_in(task.backoff_s, "stranded", task.uid.hex())

    def unstrand(self, task: HomeTask) -> None:
        """It was placed, cancelled or can run here after all."""
        if self.stranded.pop(task.uid, None) is not None:
            self._state.clear_timer("stranded", task.uid.hex())

    def ask_again(self, uid: bytes) -> None:
        """The back-off of a stranded task is over."""
        task = self.stranded.get(uid)
        if task is None:
            return
        task.backoff_s = min(task.backoff_s * 2, self._state.config.stranded_backoff_s_max)
        self._state.set_timer_in(task.backoff_s, "stranded", uid.hex())
        self.search_for(task)

    def search_for(self, task: HomeTask) -> None:
        """Look for a place, in turn: at most searches_in_flight_max at a time."""
        if task.search is not None or task.phase is not HomePhase.WAITING:
            return
        task.search = 0
        self._turns.append(task)
        self.take_turns()

    def take_turns(self) -> None:
        """Start searches whose turn has come; a task whose node has room by now just stays."""
        while self._turns and self._senders < self._state.config.searches_in_flight_max:
            task = self._turns.popleft()
            if task.search != 0 or task.phase is not HomePhase.WAITING:
                continue
            if not task.stranded_because and not self._still_sends(task):
                task.search = None
                continue
            self._next_search += 1
            task.search = self._next_search
            self._senders += 1
            search = Search(self._next_search, task)
            self._searches[search.id] = search
            self._state.count("sender searches")
            self._step(search)

    def _still_sends(self, task: HomeTask) -> bool:
        marks = self.marks()
        return self._ledger.load_tasks - 1 >= marks.send_at * self._ledger.profile.slots or (
            marks.send_at <= 1.0 and not self._ledger.fits(task.spec.request)
        )

    def _candidates(self, task: HomeTask) -> tuple[str, ...]:
        peers = self._membership.eligible(task.need(), self._state.node)
        if not self._membership.any_declined():
            return peers
        return tuple(
            peer for peer in peers if not self._membership.has_declined(peer, "directory", task.spec.directory)
        )

    def _step(self, search: Search) -> None:
        """Ask the policy what to do next, and do it."""
        task = search.task
        if task is None:
            self._pull_step(search)
            return
        if task.search != search.id or task.phase is not HomePhase.WAITING:
            self._end(search)
            return
        peers = self._candidates(task)
        view = self._view(peers)
        shown = task_view(task, task.record.migrations, self._state.now.boot_s)
        search.steps += 1
        try:
            step = self._state.policies.sender.locate(view, shown, tuple(search.replies), self._state.rng)
        except Exception as error:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            step = Keep(f"the policy failed: {error!r}")
        if search.steps > STEPS_MAX:
            step = Keep("the policy does not come to an end")
        if isinstance(step, Keep) and task.stranded_because:
            step = self._place_stranded(search, peers) or step
        if isinstance(step, Transfer) and step.to in peers:
            self._offer(search, task, step.to, only=len(peers) == 1 and bool(task.stranded_because))
        elif isinstance(step, ProbeStep) and (nodes := self._askable(search, step, peers)):
            need = task.need()
            report = self.report()
            for node in nodes:
                search.pending[node] = self._state.now.boot_s
                self._state.send(node, Probe(search.id, need, report))
            self._state.count("sender probes", len(nodes))
            self._state.set_timer_in(self._state.config.probe_timeout_s, "probe", str(search.id))
        else:
            reason = step.reason if isinstance(step, Keep) else f"the policy named nobody who could run it: {step}"
            self._decide(search, "stay", reason)
            self._end(search)

    def _askable(self, search: Search, step: ProbeStep, peers: tuple[str, ...]) -> list[str]:
        room = self._state.config.probes_per_search_max - len(search.replies)
        asked = {reply.node for reply in search.replies}
        return [node for node in step.nodes if node in peers and node not in asked][: max(room, 0)]

    def _place_stranded(self, search: Search, peers: tuple[str, ...]) -> ProbeStep | Transfer | None:
        """Beyond the policy, for a task that home cannot run at all: where only one node could ever run it there is
        nothing to choose, so it waits there; else everybody not asked yet is asked."""
        if len(peers) == 1:
            return None if peers[0] in search.offered else Transfer(peers[0])
        asked = {reply.node for reply in search.replies}
        left = tuple(peer for peer in peers if peer not in asked)
        if left:
            return ProbeStep(left[: self._state.config.probes_per_search_max])
        willing = [reply.node for reply in search.replies if reply.accepts and reply.node not in search.offered]
        return Transfer(willing[0]) if willing else None

    def _offer(self, search: Search, task: HomeTask, node: str, *, only: bool) -> None:
        search.offered.add(node)
        voluntary = not task.stranded_because
        self._home.offer(task, node, voluntary=voluntary, only=only)

    def probe_received(self, src: str, probe: Probe) -> None:
        """Would this node accept it now? Advice: nothing is reserved."""
        self._membership.heard_report(src, probe.report)
        need = probe.need
        accepts = self._would_accept(src, need)
        self._state.send(src, ProbeReply(probe.search, accepts, self.report()))

    def _would_accept(self, home: str, need: Need) -> bool:
        profile = self._state.profile
        if profile.drained or why_never(profile, need.request, need.placement, home):
            return False
        marks = self.marks()
        if self._ledger.load_tasks >= marks.accept_below * profile.slots:
            return False
        return marks.accept_below > 1.0 or self._ledger.fits_beside_all(need.request)

    def accepts_offer(self, offer: Offer) -> bool:
        """The same question, asked when it counts."""
        need = Need(offer.spec.request, offer.spec.placement)
        return self._would_accept(offer.task.partition("/")[0], need)

    def reply_received(self, src: str, reply: ProbeReply) -> None:
        """An answer to a probe; one that comes after its time is only a report."""
        search = self._searches.get(reply.search)
        if search is not None and search.pending.pop(src, None) is not None:
            self._add(search, Reply(src, reply.accepts, reply.report))
            if not search.pending:
                self._state.clear_timer("probe", str(search.id))
                self._step(search)
        self._membership.heard_report(src, reply.report)

    def _add(self, search: Search, reply: Reply) -> None:
        search.replies.append(reply)
        load = reply.report.load if reply.report is not None else -1.0
        search.inputs.append((reply.node, load, 0.0))

    def probe_timed_out(self, search_id: int) -> None:
        """Whoever has not answered by now does not accept."""
        search = self._searches.get(search_id)
        if search is None:
            return
        for node in list(search.pending):
            self._state.count("probes unanswered")
            self._add(search, Reply(node, accepts=False))
        search.pending.clear()
        self._step(search)

    def offer_declined(self, task: HomeTask, node: str, reason: str) -> None:
        """It goes back to the policy as a reply; it costs no probe."""
        search = self._searches.get(task.search or -1)
        if search is not None:
            self._add(search, Reply(node, accepts=False))
            self._step(search)
        elif task.on_decline_search:
            self.search_for(task)
        if task.stranded_because:
            task.stranded_because = reason or task.stranded_because

    def placed(self, task: HomeTask, node: str) -> None:
        """It needs no place any more: its search, if any, is over. ``node``: where it is now, "" if it has ended."""
        search = self._searches.get(task.search or -1)
        if search is not None:
            self._decide(search, node or "over", f"{node} takes it" if node else "the task is over")
            self._end(search)
        task.search = None
        self.unstrand(task)
        task.stranded_because = ""

    def _decide(self, search: Search, choice: str, reason: str) -> None:
        names = self._state.policies.names
        task = search.task
        kind = "location.receiver" if task is None else "location.sender"
        self._state.actions.append(
            Decided(task.task if task is not None else "", names[kind], tuple(search.inputs), choice, reason)
        )

    def _end(self, search: Search) -> None:
        if self._searches.pop(search.id, None) is None:
            return
        if search.pending:
            self._state.clear_timer("probe", str(search.id))
        if search.task is None:
            self._pulls -= 1
            return
        self._senders -= 1
        if search.task.search == search.id:
            search.task.search = None

    # -- the receiver's side -------------------------------------------------------------------------------------------

    def completed(self, duration_s: float) -> None:
        """A task has ended here, and the next one has been started: ask for another?"""
        self._durations.append(duration_s)
        self.pull()

    def pull(self, first: str = "", probes_max: int | None = None) -> None:
        """Ask for a waiting task, if this node is below its mark; ``first`` is asked first."""
        if self._state.profile.drained or not self._state.profile.slots:
            return
        below = self.marks().receive_below * self._ledger.profile.slots
        if self._ledger.load_tasks + self._pulls >= below:
            return
        self._next_search += 1
        search = Search(self._next_search, None, probes_max)
        self._searches[search.id] = search
        self._pulls += 1
        self._state.count("receiver searches")
        if first:
            self._ask_for_work(search, first)
        else:
            self._step(search)
        self._arm_retry()

    def _pull_step(self, search: Search) -> None:
        peers = self._membership.eligible(Need(), "")
        view = self._view(peers)
        search.steps += 1
        try:
            step = self._state.policies.receiver.locate(view, search.probes_max, tuple(search.replies), self._state.rng)
        except Exception as error:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            step = Keep(f"the policy failed: {error!r}")
        if isinstance(step, ProbeStep) and search.steps <= STEPS_MAX:
            nodes = self._askable(search, step, peers)
            if nodes:
                self._ask_for_work(search, nodes[0])
                return
        self._end(search)

    def _ask_for_work(self, search: Search, node: str) -> None:
        search.pending[node] = self._state.now.boot_s
        self._state.count("receiver probes")
        self._state.send(node, GiveRequest(search.id, self.report(), self._state.profile))
        self._state.set_timer_in(self._state.config.probe_timeout_s, "probe", str(search.id))

    def give_requested(self, src: str, request: GiveRequest) -> None:
        """A node has room: promise one task that it can run, and offer it (or have its home offer it)."""
        self._membership.heard_report(src, request.report)
        work = self._choose(src, request)
        if work is None:
            self._state.send(src, GiveReply(request.search, self.report()))
            return
        self._state.count("tasks given")
        self._state.send(src, GiveReply(request.search, self.report(), work.task, work.uid))
        if isinstance(work, HomeTask):
            self._drop_search(work)
            self._home.offer(work, src, voluntary=not work.stranded_because, search=False)
        elif isinstance(work, Guest):
            self._executor.give_back(work, f"{src} has room", to=src)

    def _drop_search(self, task: HomeTask) -> None:
        search = self._searches.get(task.search or -1)
        if search is not None:
            self._end(search)
        task.search = None

    def _choose(self, src: str, request: GiveRequest) -> Work | None:
        if not self._membership.is_usable(src):
            return None
        profile = request.profile
        for task in self.stranded.values():
            if task.phase is HomePhase.WAITING and self._may_go(task, src, request):
                return task
        marks = self.marks()
        if self._ledger.load_tasks <= marks.give_above * self._ledger.profile.slots or profile.node != src:
            return None
        movable = Movable(self._queue, lambda work: self._may_go(work, src, request), self._state.now.boot_s)
        try:
            chosen = self._state.policies.selection.select(movable)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            return None
        return movable.works.get(chosen.task) if chosen is not None else None

    def _may_go(self, work: Work, to: str, request: GiveRequest) -> bool:
        spec = work.spec
        home = work.task.partition("/")[0]
        if why_never(request.profile, spec.request, spec.placement, home):
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
            and to != work.home
            and self._membership.is_usable(work.home)
        )

    def give_replied(self, src: str, reply: GiveReply) -> None:
        """PROMISED counts as load until the offer comes; NONE asks the next."""
        self._membership.heard_report(src, reply.report)
        search = self._searches.get(reply.search)
        if search is None or search.pending.pop(src, None) is None:
            return
        self._state.clear_timer("probe", str(search.id))
        if not reply.task:
            self._add(search, Reply(src, accepts=False, report=reply.report))
            self._step(search)
            return
        self._decide(search, reply.task, f"{src} gives it")
        self._end(search)
        if reply.uid not in self._executor.by_uid:
            self._ledger.expect(reply.uid, Need().request)
            self._state.set_timer_in(self._state.config.inbound_s, "inbound", reply.uid.hex())

    def inbound_timed_out(self, uid: bytes) -> None:
        """A promised task did not come."""
        guest = self._executor.by_uid.get(uid)
        if guest is None or guest.phase is not GuestPhase.RESERVED:
            self._ledger.expect_no_more(uid)

    # -- reports -------------------------------------------------------------------------------------------------------

    def report_received(self, src: str, report: LoadReport) -> None:
        """A peer's load: kept, and acted upon."""
        if self._membership.heard_report(src, report):
            self.report_met(src, report)

    def report_met(self, src: str, report: LoadReport) -> None:
        """A new report: its node may have work for this one, or room for a stranded task."""
        has_work = report.gives or (report.region is Region.OVERLOADED and report.movable > 0)
        if has_work and self._state.policies.names["location.receiver"] != "none":
            self.pull(first=src)
        if self.stranded and report.accepts:
            for task in list(islice(self.stranded.values(), STRANDED_ASKED_MAX)):
                if task.search is None and src in self._candidates(task):
                    self.search_for(task)

    def _arm_retry(self) -> None:
        rate = self._state.policies.receiver.retry_rate
        if not rate or self._retrying:
            return
        mean_s = sum(self._durations) / len(self._durations) if self._durations else 1.0
        self._retrying = True
        self._state.set_timer_in(min(mean_s / rate, self._state.config.retry_s_max), "retry")

    def retry(self) -> None:
        """Extra receiver searches while this node is below its mark."""
        self._retrying = False
        self.pull(probes_max=self._state.policies.receiver.retry_probes)
        if self._ledger.load_tasks < self.marks().receive_below * self._ledger.profile.slots:
            self._arm_retry()


def _region(n: int, slots: int, marks: Marks) -> Region:
    """Underloaded below the low mark, overloaded from the high one on."""
    if n >= max(marks.send_at * slots, 1):
        return Region.OVERLOADED
    return Region.UNDERLOADED if n < marks.accept_below * slots else Region.NORMAL
