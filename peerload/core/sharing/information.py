"""Load information of this node: the load index, the thresholds, the region, the report, announcements.

The information policy says what it watches: the load region, n, or nothing. A load region, or that there is a task to
give by now, is told when it has held for settle_s and the information policy says so, and besides at the policy's
period, if it has one. It is also told again when something else was mentioned to somebody meanwhile, in a probe or a
reply: who heard that would believe it until the next change. The transfer policy is asked for its thresholds once an event,
or once for all if they are steady.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.core.resources.foreign_load import foreign_slots
from peerload.core.sharing.view import Observed, View
from peerload.energy.price import price_at
from peerload.model import metrics, timers
from peerload.model.actions import Announce
from peerload.model.events import LoadSampled
from peerload.model.load import LoadReport, Region, Thresholds
from peerload.model.messages import UNASKED, State, StateAnswer
from peerload.policy.api import KnownReport
from peerload.policy.validation import valid_answer, valid_audience, valid_thresholds

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized

    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.peer_hints import PeerHints
    from peerload.core.state import CoreState, Mediator
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work
    from peerload.model.instant import Instant
    from peerload.model.resources import Profile, ResourceRequest
    from peerload.policy.api import TransferPolicy

    Standing = tuple[Region, bool, bool]

THRESHOLDS_AT_FIRST = Thresholds(send_at=1.0, accept_below=1.0, receive_below=1.0, give_above=1.0)
"""Until the transfer policy has spoken, and while it fails."""
NOT_SETTLED = (-1, 0, 0, 0)
LEVEL_DIGITS = 6
"""The load index in slots is rounded to so many decimals: n / c · c is to be n."""


class Information:
    """One per node; its timers are ``region``, ``period`` and ``tell``. ``ask(report)`` is called when the policy wants the
    others' load asked for. stranded: the tasks of this home without a place, which count as movable; running: what runs here."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        hints: PeerHints,
        stranded: Sized,
        mediator: Mediator,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = queue.ledger
        self._membership = membership
        self._observed = Observed(state, queue, membership, hints, mediator, stranded)
        self._stranded = stranded
        self._sequence = 0
        self._told: LoadReport | None = None
        self._told_s = 0.0
        self._said: LoadReport | None = None
        self._before: LoadReport | None = None
        self._seen_tasks = 0
        self._is_quiet = False
        self._watches = state.policies.information.watches
        self._mediator = mediator
        self._due: Standing | None = None
        self._thresholds = THRESHOLDS_AT_FIRST
        self._marks_at: Instant | None = None
        self._steady: TransferPolicy | None = None
        self._settled_version = NOT_SETTLED
        self._own: View | None = None
        self._sensed = LoadSampled(0.0, 0.0, 0)
        self._samples = 0
        self._is_index_steady = bool(getattr(state.policies.load, "steady", False))
        """True if the load index changes only with the tasks here and with what the sensors read."""
        self._level = 0.0
        self._level_at: tuple[int, int, Profile] | None = None

    # -- asked by the other parts --------------------------------------------------------------------------------------

    def sampled(self, event: LoadSampled) -> bool:
        """The sensors have read again. → whether foreign programs have left a slot that they occupied."""
        self._sensed = event
        self._samples += 1
        ledger = self._ledger
        before = ledger.foreign_slots
        if self._state.config.counts_foreign:
            profile = ledger.profile
            cpus = event.cpus or profile.cpus
            ledger.set_foreign_slots(foreign_slots(before, event.cpus_busy_foreign, cpus, profile.slots))
        return ledger.foreign_slots < before

    def view(
        self,
        peers: Sequence[str] | None = None,
        uncounted: Work | None = None,
        request: ResourceRequest | None = None,
    ) -> View:
        """The view that a policy gets of this node, and the peers in question (None: all). ``uncounted``: a waiting task that the load
        leaves out. request: of the task that is to be placed."""
        view = self._view(peers, uncounted)
        view.for_request = request if request is not None and request.gpus else None
        view.thresholds = self.thresholds()
        if self._told is not None:
            view.told = KnownReport(self._told, self._state.now.boot_s - self._told_s)
        return view

    def _view(self, peers: Sequence[str] | None, uncounted: Work | None) -> View:
        return View(self._observed, self._sensed, peers, uncounted)

    def thresholds(self) -> Thresholds:
        """The transfer policy's thresholds; asked for once an event."""
        policy = self._state.policies.transfer
        if policy is self._steady or self._marks_at is self._state.now:
            return self._thresholds
        view = self._view(None, None)
        view.thresholds = self._thresholds
        try:
            thresholds = policy.thresholds(view)
            self._thresholds = thresholds if thresholds == self._thresholds else valid_thresholds(thresholds)
            self._steady = policy if getattr(policy, "steady", False) else None
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
        self._marks_at = self._state.now
        return self._thresholds

    # -- the thresholds, which are on the load index ------------------------------------------------------------------------
    #
    # A threshold of at most one task per slot counts tasks as well: whatever the index says, a node with a task in every slot
    # asks for and accepts no more, and sends and gives what it cannot start.

    def level(self, uncounted: Work | None = None) -> float:
        """The load index in slots, which the thresholds are compared with: of the index `tasks` it is n. ``uncounted``: a waiting
        task that is left out."""
        at = self._ledger.version, self._samples, self._ledger.profile
        if uncounted is None and at == self._level_at:
            return self._level
        view = self._own_view(self._thresholds) if uncounted is None else self._view(None, uncounted)
        level = round(view.load / view.load_unit * max(view.slots, 1), LEVEL_DIGITS)
        if uncounted is None and self._is_index_steady:
            self._level, self._level_at = level, at
        return level

    def sends(self, uncounted: Work | None = None) -> bool:
        """True if an arriving task is to go elsewhere, as far as the load tells: where it is counted, it is left out."""
        return self.level(uncounted) >= self.thresholds().send_at * self._slots

    def accepts(self) -> bool:
        """True if a task of another home is welcome, as far as the load tells."""
        below = self.thresholds().accept_below
        if self._ledger.exceeds_cap(self._ledger.cpus_requested + 1.0):
            return False
        return self.level() < below * self._slots and (below > 1.0 or self._ledger.load_tasks < self._slots)

    def wants(self, expected: int = 0) -> bool:
        """True if this node is to ask for a task, beside so many that it has asked for already."""
        thresholds = self.thresholds()
        if self.level() + expected >= thresholds.receive_below * self._slots + thresholds.prefetch:
            return False
        return thresholds.receive_below > 1.0 or self._ledger.load_tasks + expected < self._slots + thresholds.prefetch

    def asks_ahead(self) -> bool:
        """True if a task that it asks for would have to wait here (`Thresholds.prefetch`)."""
        return self.level() >= self.thresholds().receive_below * self._slots

    def gives(self) -> bool:
        """True if there are so many tasks here that one may go, if any waits."""
        above = self.thresholds().give_above
        return self.level() > above * self._slots or (above <= 1.0 and self._ledger.load_tasks > self._slots)

    @property
    def _slots(self) -> int:
        return self._ledger.profile.slots

    def report(self) -> LoadReport:
        """The load report of this node now, to be sent."""
        self._sequence += 1
        report = self._described(self.thresholds())
        self.report_sent(report)
        return report

    def shown(self) -> LoadReport:
        """The load report of this node as of the end of the last event; changes nothing."""
        return self._described(self._thresholds)

    def report_sent(self, report: LoadReport) -> None:
        """Somebody has this report: does it stand elsewhere than everybody knows?"""
        if (
            self._watches == "region"
            and self._told is not None
            and self._standing(report) != self._standing(self._told)
        ):
            self._said = report
            self._settled_version = NOT_SETTLED

    def _described(self, thresholds: Thresholds) -> LoadReport:
        ledger, sensed = self._ledger, self._sensed
        n, slots = ledger.load_tasks, ledger.profile.slots
        stranded, devices = len(self._stranded), ledger.devices
        if devices.states:
            gpus: dict[str, Any] = {
                "gpus": ledger.profile.gpus,
                "gpus_free": devices.gpus_free(),
                "gpu_tasks": ledger.gpu_tasks,
                "gpu_load": self._own_view(thresholds).gpu_load,
                "devices": devices.loads(ledger.now_s) if ledger.profile.devices else (),
                "cpus_free": ledger.cpus_free,
            }
        else:
            gpus = {}
        return LoadReport(
            load_tasks=n,
            slots=slots,
            running=len(ledger.running),
            waiting=ledger.waiting + stranded,
            movable=len(self._queue) + stranded,
            load=self._own_view(thresholds).load,
            region=self._region(),
            accepts=self.accepts() and self._state.takes_guests,
            gives=self._gives(),
            cpus_busy=sensed.cpus_busy,
            mem_used_bytes=sensed.mem_used_bytes,
            incarnation=self._state.identity.incarnation,
            sequence=self._sequence,
            cpu_pressure=sensed.cpu_pressure,
            mem_pressure=sensed.mem_pressure,
            cpus_foreign=sensed.cpus_busy_foreign,
            slots_foreign=ledger.foreign_slots,
            is_asleep=self._state.is_asleep,
            watts=sensed.watts,
            price=price_at(self._state.prices, self._state.now.wall_s),
            **gpus,
        )

    def _standing(self, report: LoadReport) -> Standing:
        """The part of a report that is announced when it has changed: the region and, where reports choose whom to ask, whether this node has a
        task to give. With a threshold of 1 a node is overloaded as soon as it runs one task, and stays so with ten. And
        whether it has a GPU that nobody uses: whoever waits for one elsewhere hears of it."""
        guides = self._state.policies.information.reports_guide_probing
        return report.region, report.gives and guides, report.gpus_free > 0

    def _region(self) -> Region:
        """Underloaded below the low threshold, overloaded from the high one on."""
        if self.level() > 0 and self.sends():
            return Region.OVERLOADED
        if self.accepts():
            return Region.UNDERLOADED
        is_full = self.thresholds().send_at <= 1.0 and self._ledger.load_tasks >= max(self._slots, 1)
        return Region.OVERLOADED if is_full else Region.NORMAL

    def _gives(self) -> bool:
        """True if it has a task that may go."""
        if self._stranded or self._ledger.waits_for_devices:
            return True
        return len(self._queue) > 0 and self.gives()

    def _own_view(self, thresholds: Thresholds) -> View:
        """A report goes with every probe and reply, so one view is kept for it."""
        view = self._own
        if view is None:
            view = self._own = self._view(None, None)
        view.sensed = self._sensed
        view.thresholds = thresholds
        return view

    # -- told to everybody ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Notice changes of what the information policy watches, after every event."""
        self._sequence += 1  # what is shown between this event and the next is newer than all that was said in it
        if self._told is None:
            self.announce()
            self._before = self._told
        elif self._watches == "region":
            self._settle_standing(self._told, self._before or self._told)
        elif self._watches == "tasks":
            self._settle_tasks()
        self._marks_at = None

    def _settle_standing(self, told: LoadReport, before: LoadReport) -> None:
        """Another standing counts if it holds."""
        devices = self._ledger.devices
        seen = devices.version if devices.states else 0
        version = self._ledger.version, seen, len(self._stranded), self._samples
        is_steady = self._state.policies.transfer is self._steady and self._is_index_steady
        if version == self._settled_version and is_steady:
            return  # neither a task nor a reading nor a threshold has changed since
        self._settled_version = version
        guides = self._state.policies.information.reports_guide_probing
        standing = self._region(), guides and self._gives(), bool(devices.states and devices.gpus_free())
        if standing == self._standing(before) == self._standing(told) and self._said is None:
            if self._due is not None:
                self._due = None
                self._state.clear_timer(timers.RegionSettled())
        elif self._due != standing:
            self._due = standing
            self._state.set_timer_in(self._state.config.settle_s, timers.RegionSettled())

    def region_held(self) -> None:
        """The standing has held for settle_s: told, or asked about, if the information policy says so."""
        said = self._said
        now = self.report()
        known = said if said is not None and self._standing(said) != self._standing(now) else self._told
        self._changed(known, now)

    def _settle_tasks(self) -> None:
        if self._ledger.load_tasks != self._seen_tasks and not self._is_quiet:
            self._seen_tasks = self._ledger.load_tasks
            self._changed(self._told, self.report())

    def announce_again(self) -> None:
        """tell_s_min is over."""
        self._is_quiet = False

    def _changed(self, told: LoadReport | None, now: LoadReport) -> None:
        """Announce a change, or ask others, as the information policy says."""
        before, self._before = self._before, now
        self._settled_version = NOT_SETTLED
        policy = self._state.policies.information
        try:
            tells, asks = valid_answer(policy.tells(told, now)), valid_answer(policy.asks(before, now))
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return
        if tells:
            audience = self._audience()
            if audience is None:
                self.announce(now)
            else:
                self._announce_to(audience, now)
        if asks:
            self._mediator.ask_for_states(now)
        quiet_s = self._state.config.tell_s_min
        if self._watches == "tasks" and quiet_s and (tells or asks):
            self._is_quiet = True
            self._state.set_timer_in(quiet_s, timers.Announcement())

    def _audience(self) -> Sequence[str] | None:
        """Nodes that the information policy sends an announcement to; None: everybody, as of a policy without an opinion."""
        choose = getattr(self._state.policies.information, "audience", None)
        if choose is None:
            return None
        view = self.view()
        try:
            return valid_audience(choose(view, self._state.rng), view.peers)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return ()

    def _announce_to(self, audience: Sequence[str], report: LoadReport) -> None:
        """Announce this node's load to these alone."""
        self._announced(report)
        for node in audience:
            self._state.count(metrics.ANNOUNCEMENTS_TO_ONE)
            self._state.send(node, StateAnswer(UNASKED, report))

    def _announced(self, report: LoadReport) -> None:
        self._told = report
        self._told_s = self._state.now.boot_s
        self._said = self._due = None

    def period_passed(self) -> None:
        """The information policy tells everybody at a fixed period."""
        self.announce()

    def announce(self, report: LoadReport | None = None) -> None:
        """Announce this node's load to everybody."""
        report = report or self.report()
        self._announced(report)
        self._state.count(metrics.ANNOUNCEMENTS)
        self._membership.announce_load(report)
        self._state.actions.append(Announce(State(self._state.identity, self._state.profile, report)))
        period_s = self._state.policies.information.period_s
        if period_s:
            self._state.set_timer_in(max(period_s, self._state.config.tell_s_min), timers.Period())
