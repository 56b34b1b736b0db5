"""Searches, and sender-initiated sharing: a home looks for a place for a task.

A search, by a sender for a place or by a receiver for work, asks nodes, waits for replies and decides. A node that has
not answered within probe_timeout_s counts as not accepting. A search ends exactly once.

A sender's searches wait for their turn: at most searches_in_flight_max run at a time. A task that its home cannot run
is *stranded*: searches for it repeat with increasing delay until it has a place, also beyond the policy's choices. This
file only proposes a place; the handoff makes the offer and handles its outcome.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from peerload.core.resources.admission import asked_of, has_room, offers_good_gpus, seen_by
from peerload.core.sharing.information import task_view
from peerload.core.work import HomePhase, HomeTask
from peerload.model import metrics, timers
from peerload.model.actions import Announce, Decided
from peerload.model.messages import SOURCES_MAX, Enough, Footprint, Need, ProbeReply, ProbeRequest, StateRequest
from peerload.model.resources import GpuWait, TaskCost
from peerload.policy.api import ANY_LOAD, POLICY_FAILURES, Broadcast, Keep, Probe, Reply, Transfer, valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerload.core.handoff.home import HomeHandoff
    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.information import Information, PeerHints
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Offering, RemoteTask, UntouchedMembers
    from peerload.model.messages import StateAnswer
    from peerload.model.resources import LoadReport, ResourceRequest


Step = Probe | Broadcast | Transfer | Keep
STEPS_MAX = 256
"""Steps that a policy may take in one search, in case it never decides."""


class Search(msgspec.Struct, eq=False):
    """A search by a sender for a node for ``task``, or (``task`` None) by a receiver for work."""

    id: int
    task: HomeTask | None
    probes_max: int | None
    """Nodes that a receiver may ask; None: as many as the policy says."""
    replies: list[Reply] = []
    pending: dict[str, float] = {}
    """Nodes that were asked and have not answered, with the time of the question."""
    asked_s: float = 0.0
    """Time of the last question."""
    inputs: list[tuple[str, float, float]] = []
    """Inputs of the decision: (node, load, age in s)."""
    offered: set[str] = set()
    """Nodes that were offered the task."""
    remembered: set[str] = set()
    """Nodes that were asked because of a hint."""
    steps: int = 0
    wanted: int = 1
    """Number of tasks that a receiver's search asks for."""
    asks_others: bool = True
    """True if a receiver's search continues after a refusal."""
    holds: bool = False
    """True if the task could start at home but must not yet: its home sends although it has room (``send_at`` below one
    task per slot), or another node has a better GPU for it."""
    wants_good_gpus: bool = False
    """True if it searches for better GPUs."""
    because: str = ""
    """Reason why the node that was offered the task was chosen."""
    is_broadcast: bool = False
    """True if all nodes were asked at once, by a broadcast."""
    is_late: bool = False
    """True if the time for answers to the broadcast is over."""
    compared: tuple[TaskCost, ...] = ()
    """Costs on which the policy's last step is based."""

    def add(self, node: str, *, accepts: bool, report: LoadReport | None = None, price_s: float = 0.0) -> None:
        """Add an answer, or a missing answer as a refusal."""
        self.replies.append(Reply(node, accepts, report, node in self.remembered, price_s))
        self.inputs.append((node, report.load if report is not None else -1.0, 0.0))


class Searches:
    """The open searches of one node, each with its own ``probe`` timer."""

    def __init__(self, state: CoreState, hints: PeerHints) -> None:
        self._state = state
        self.hints = hints
        self._open: dict[int, Search] = {}
        self._last = 0

    def open(self, task: HomeTask | None, probes_max: int | None = None) -> Search:
        search = Search(self.next_id(), task, probes_max)
        self._open[search.id] = search
        return search

    def next_id(self) -> int:
        """A number that no other search or request of this run of the agent has."""
        self._last += 1
        return self._last

    def get(self, search_id: int) -> Search | None:
        return self._open.get(search_id)

    def of(self, task: HomeTask) -> Search | None:
        """The open search for a place for this task."""
        return self._open.get(task.search or -1)

    def askable(self, search: Search, step: Probe, peers: Sequence[str]) -> list[str]:
        """The nodes to ask: named by the policy, eligible, not asked yet, and within the limit."""
        room = self._state.config.probes_per_search_max - len(search.replies)
        asked = {reply.node for reply in search.replies}
        return [node for node in step.nodes if node in peers and node not in asked][: max(room, 0)]

    def asked(self, search: Search, node: str) -> None:
        search.pending[node] = search.asked_s = self._state.now.boot_s
        if self.hints.take_idle(node) if search.task is not None else self.hints.take_busy(node):
            search.remembered.add(node)

    def wait(self, search: Search) -> None:
        """Set the timeout for the nodes that were asked; longer with each search for a stranded task, because answers
        may take long."""
        patience_s = search.task.backoff_s if search.task is not None and search.task.stranded_because else 0.0
        self._state.set_timer_in(
            max(self._state.config.probe_timeout_s, patience_s), timers.ProbeTimeout(str(search.id))
        )

    def broadcast(self, search: Search, need: Need, report: LoadReport, expected_s: float) -> None:
        """Ask all nodes together; those that accept answer. expected_s: for their bids, 0 = none are wanted."""
        search.is_broadcast = True
        self._state.count(metrics.REQUESTS_BROADCAST)
        self._state.actions.append(Announce(StateRequest(search.id, report, need, expected_s)))
        self._state.set_timer_in(self._state.config.answer_wait_s, timers.ProbeTimeout(str(search.id)))

    def answered(self, search_id: int, node: str) -> Search | None:
        """The search in which this node was asked and has now answered; None if the answer is late."""
        search = self._open.get(search_id)
        if search is None or search.pending.pop(node, None) is None:
            return None
        return search

    def wait_no_more(self, search: Search) -> None:
        """Clear the timeout: all nodes have answered."""
        self._state.clear_timer(timers.ProbeTimeout(str(search.id)))

    def timed_out(self, search_id: int) -> Search | None:
        """Count missing answers as refusals."""
        search = self._open.get(search_id)
        if search is None:
            return None
        for node in search.pending:
            self._state.count(metrics.PROBES_UNANSWERED)
            search.add(node, accepts=False)
        search.pending.clear()
        search.is_late = True
        return search

    def decide(self, search: Search, choice: str, reason: str) -> None:
        task = search.task
        kind = "location.receiver" if task is None else "location.sender"
        policy = self._state.policies.names[kind]
        self._state.actions.append(
            Decided(
                task.task if task is not None else "", policy, tuple(search.inputs), choice, reason, search.compared
            )
        )

    def leave_footprints(self, search: Search) -> None:
        """Notify the nodes that were asked at random that the search found nothing, if the preset uses footprints."""
        if not self.hints.leaves_footprints:
            return
        answered = (reply.node for reply in search.replies if reply.report is not None and not reply.remembered)
        for node in dict.fromkeys(answered):
            self._state.send(node, Footprint(has_room=search.task is None))
            self._state.count(metrics.FOOTPRINTS_LEFT)

    def close(self, search: Search) -> bool:
        """Close a search; False if it was closed before."""
        if self._open.pop(search.id, None) is None:
            return False
        waits = search.is_broadcast and not search.is_late
        if waits:
            self._state.actions.append(Announce(Enough(search.id)))
        if search.pending or waits:
            self.wait_no_more(search)
        return True


STRANDED_ASKED_MAX = 64
"""Stranded tasks that are checked when a node reports room; the others have their timers."""

NEVER = (0.0, 0.0)
STRANDED_TIMED_MAX = 1000
"""Stranded tasks that have a timer; the others take turns with those that have searched longest in vain. Timers for
100,000 tasks would block the agent for seconds."""


class Sender:
    """Finds places for tasks of this home. One per node; its timers are ``probe`` and ``stranded``."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        home: Home,
        handoff: HomeHandoff,
        information: Information,
        searches: Searches,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = queue.ledger
        self._membership = membership
        self._home = home
        self._handoff = handoff
        self._information = information
        self._searches = searches
        self.is_on = state.policies.names["location.sender"] != "none"
        self._wants_bids = bool(getattr(state.policies.sender, "wants_bids", False))
        self.places_all = bool(getattr(state.policies.sender, "places_all", False))
        """True if the policy looks for a place for every task."""
        self.passes_on = bool(getattr(state.policies.sender, "passes_on", False))
        """True if the policy places without asking, so that each receiving node applies the policy's test."""
        self.waiting: deque[HomeTask | str] = deque()
        """Tasks, and names of uniform arrays, that wait for their turn."""
        self._full: dict[str, dict[ResourceRequest, tuple[float, float]]] = {}
        """Nodes without room for a request: the time until which stranded tasks skip them, and the last pause."""
        self._timed: set[bytes] = set()
        self._untimed: dict[bytes, HomeTask] = {}
        self._in_flight = 0

    # -- tasks that look for a place -----------------------------------------------------------------------------------

    def may_send(self, task: HomeTask | UntouchedMembers) -> bool:
        """True if a task may go elsewhere by choice."""
        return self.is_on and self._home.may_migrate(task) and not task.spec.placement.local

    def sends(self, task: HomeTask | UntouchedMembers) -> bool:
        """True if an arriving task (not counted itself), or the next of these members, should go elsewhere."""
        return self.may_send(task) and self._goes(task, self._ledger.fits_beside_all, None)

    def still_sends(self, task: HomeTask | UntouchedMembers) -> bool:
        """True if a waiting task, or the next of these members, should go elsewhere."""
        return self._goes(task, self._ledger.fits, task)

    def _goes(
        self,
        task: HomeTask | UntouchedMembers,
        fits: Callable[[ResourceRequest], bool],
        uncounted: HomeTask | UntouchedMembers | None,
    ) -> bool:
        if self.places_all:
            return True
        if task.spec.request.takes_devices and isinstance(task, HomeTask):
            return not fits(self._asked_here(task)) or bool(self._with_good_gpus(task))
        if self._information.sends(uncounted):
            return True
        return self._information.thresholds().send_at <= 1.0 and not fits(task.spec.request)

    def _asked_here(self, task: HomeTask) -> ResourceRequest:
        return asked_of(self._state, task, self._state.profile)

    def strand(self, task: HomeTask, reason: str, *, searches: bool = True) -> None:
        """Mark a task that its home cannot run as stranded: search until it has a place. ``searches``: also now."""
        task.stranded_because = reason
        task.backoff_s = self._state.config.stranded_backoff_s
        self._home.stranded[task.uid] = task
        if searches:
            self.search_for(task)
        self._set_timer(task)

    def unstrand(self, task: HomeTask) -> None:
        """Stop searching for a task that was placed or cancelled, or that can run here after all."""
        if self._home.stranded.pop(task.uid, None) is None:
            return
        self._untimed.pop(task.uid, None)
        if task.uid in self._timed:
            self._timed.remove(task.uid)
            self._state.clear_timer(timers.Stranded(task.uid.hex()))
            self._time_next()

    def _set_timer(self, task: HomeTask) -> None:
        if task.uid in self._timed or len(self._timed) < STRANDED_TIMED_MAX:
            self._timed.add(task.uid)
            self._state.set_timer_in(task.backoff_s, timers.Stranded(task.uid.hex()))
        else:
            self._untimed[task.uid] = task

    def _time_next(self) -> None:
        """Set a timer for the task that has been without one longest."""
        if self._untimed:
            self._set_timer(self._untimed.pop(next(iter(self._untimed))))

    def ask_again(self, uid: bytes) -> None:
        """Search again for a stranded task after its back-off."""
        task = self._home.stranded.get(uid)
        if task is None:
            return
        most_s = self._state.config.stranded_backoff_s_max
        if self._untimed and task.backoff_s >= most_s:
            self._timed.discard(uid)
            self._time_next()
        task.backoff_s = min(task.backoff_s * 2, most_s)
        self._set_timer(task)
        self.search_for(task)

    def _was_full(self, node: str, task: HomeTask) -> None:
        """Record that a node had no room for a stranded task; all tasks with the same request wait together."""
        config, now_s = self._state.config, self._state.now.boot_s
        if len(self._full) >= config.full_kept_max:
            self._full.clear()
        requests = self._full.setdefault(node, {})
        if len(requests) >= config.full_kept_max:
            requests.clear()
        until_s, pause_s = requests.get(task.spec.request, (0.0, config.full_s_min / 2))
        if until_s <= now_s:  # otherwise this question was sent before the last refusal
            pause_s = min(2 * pause_s, config.full_s_max)
            requests[task.spec.request] = now_s + pause_s, pause_s

    def _all_full(self, task: HomeTask) -> bool:
        """True if every node that could run a stranded task had no room recently."""
        if not self._full:
            return False
        now_s, request = self._state.now.boot_s, task.spec.request
        nodes = self._candidates(task)
        return bool(nodes) and all(self._full.get(node, {}).get(request, NEVER)[0] > now_s for node in nodes)

    def room_freed(self, node: str) -> None:
        """Handle the end of a task of this home at a node: it has room for the next task that looks for a place."""
        if self._full.pop(node, None) is not None:
            waiting = (task for task in self._home.stranded.values() if task.search is None)
            following = next((task for task in waiting if node in self._candidates(task)), None)
            if following is not None:
                self.search_for(following)

    def peer_met(self) -> None:
        """Handle a new node: it may have room for any stranded task."""
        for task in list(self._home.stranded.values()):
            self.search_for(task)

    def room_at(self, node: str, report: LoadReport) -> None:
        """Handle a report of a node's room: offer it a stranded task, or one that waits for devices here."""
        if report.accepts:
            self._full.pop(node, None)
        tasks = list(islice(self._without_place(), STRANDED_ASKED_MAX))
        if not self.places_all and report.gpus and self._ledger.waits_for_devices:
            waiting = (work for work in self._queue.waiting_for_devices() if isinstance(work, HomeTask))
            tasks += [task for task in islice(waiting, STRANDED_ASKED_MAX) if self._home.may_migrate(task)]
        for task in tasks:
            request = asked_of(self._state, task)
            fits = has_room(request, report) if request.gpus else report.accepts
            if fits and task.search is None and node in self._candidates(task):
                self.search_for(task)

    def _without_place(self) -> Iterator[HomeTask]:
        """Tasks that look for a place, the oldest first: the stranded ones and, if the policy places all tasks, those
        that wait here."""
        yield from self._home.stranded.values()
        if self.places_all:
            for work in self._queue.oldest_first():
                if isinstance(work, HomeTask) and self._home.may_migrate(work) and not work.spec.placement.local:
                    yield work

    def place_next(self) -> None:
        """If the policy places all tasks, search for the one that has waited longest: there may be room again."""
        following = next((task for task in self._without_place() if task.search is None), None)
        if following is not None:
            self.search_for(following)

    def search_for(self, task: HomeTask) -> None:
        """Look for a place, in turn: at most searches_in_flight_max at a time."""
        if task.search is not None or task.phase is not HomePhase.WAITING or not self._state.has_disk_room:
            return
        task.search = 0
        if self.places_all and not task.stranded_because:
            self._queue.withhold(task)  # also while it waits for its turn
        self.waiting.append(task)
        self.take_turns()

    def search_for_members(self, array: str) -> None:
        """Look for places for the untouched members of a uniform array, one after the other."""
        self.waiting.append(array)
        self.take_turns()

    def _next_in_turn(self) -> HomeTask | None:
        following = self.waiting[0]
        if not isinstance(following, str):
            self.waiting.popleft()
            return following
        blocks = self._home.untouched.get(following)
        if not blocks or not self._state.has_disk_room or not self.still_sends(blocks[0]):
            self.waiting.popleft()
            return None
        task = self._home.touch(blocks[0], blocks[0].members[0])
        task.search = 0
        return task

    def next_node(self, remote: RemoteTask) -> str:
        """Apply the test of a policy that places without asking to a remote task that has just arrived: → the node to
        pass it on to; "": it stays."""
        if not self.passes_on or not remote.may_move or not self._information.sends(uncounted=remote):
            return ""
        view = self._information.view(
            self._membership.eligible(Need(remote.spec.request, remote.spec.placement), remote.home), uncounted=remote
        )
        shown = task_view(remote, self._state)
        try:
            step = valid_step(self._state.policies.sender.locate(view, shown, (), self._state.rng))
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return ""
        if not isinstance(step, Transfer) or step.to not in view.peers:
            return ""
        self._state.count(metrics.TASKS_PASSED_ON)
        name = self._state.policies.names["location.sender"]
        self._state.actions.append(Decided(remote.task, name, (), step.to, f"{self._state.node} passes it on"))
        return step.to

    def take_turns(self) -> None:
        """Start the searches whose turn has come. A task stays if this node now has room for it."""
        while self.waiting and self._in_flight < self._state.config.searches_in_flight_max:
            task = self._next_in_turn()
            if task is None or task.search != 0 or task.phase is not HomePhase.WAITING:
                continue
            if self._all_full(task) if task.stranded_because else not self.still_sends(task):
                task.search = None
                continue
            search = self._searches.open(task)
            search.holds = not task.stranded_because and (self.places_all or self._ledger.fits(self._asked_here(task)))
            search.wants_good_gpus = search.holds and task.spec.request.takes_devices and not self.places_all
            task.search = search.id
            self._in_flight += 1
            self._state.count(metrics.SENDER_SEARCHES)
            self.step(search, task)

    def _with_good_gpus(self, task: HomeTask) -> list[str]:
        """The nodes that now have better GPUs for a task than this node: its preferred ones, and not crowded. Empty if
        this node has such GPUs free, or the task waits for certain ones."""
        request = task.spec.request
        if not request.gpus or request.gpu_wait is GpuWait.QUEUE:
            return []
        if self._ledger.has_good_devices(self._asked_here(task)):
            return []
        report = self._membership.report_of_devices
        return [node for node in self._candidates(task) if self._has_good_gpus(node, task, report(node))]

    def _has_good_gpus(self, node: str, task: HomeTask, report: LoadReport | None) -> bool:
        peer = self._membership.get(node)
        return peer is not None and offers_good_gpus(asked_of(self._state, task, peer.profile), peer.profile, report)

    # -- a search ------------------------------------------------------------------------------------------------------

    def _candidates(self, task: HomeTask) -> Sequence[str]:
        peers = self._membership.eligible(task.need(), self._state.node)
        if not self._membership.any_declined():
            return peers
        return tuple(peer for peer in peers if not self._membership.will_decline(peer, task.spec))

    def step(self, search: Search, task: HomeTask) -> None:
        """Ask the policy what to do next, and do it."""
        if task.search != search.id or task.phase is not HomePhase.WAITING:
            self._end(search)
            return
        if search.holds:
            self._queue.withhold(task)
        peers = self._candidates(task)
        step = self._choose(search, task, peers)
        if task.stranded_because and self._stays(search, step, peers):
            beyond = self._beside_foreign_load(search) if self.places_all else self._place_stranded(search, peers)
            step = beyond or step
        if isinstance(step, Probe) and (nodes := self._searches.askable(search, step, peers)):  # the usual case
            self._probe(search, task, nodes)
            return
        if isinstance(step, (Transfer, Keep)):
            search.compared = step.compared
        if (
            isinstance(step, Transfer)
            and step.load_tasks_max >= 0
            and task.spec.request.takes_devices
            and task.record.migrations > 0
            and not task.stranded_because
        ):  # a task does not spend its migrations on moving between crowded nodes
            step = Keep("it waits for devices, and has moved once already")
        if isinstance(step, Transfer) and step.to in peers:
            search.offered.add(step.to)
            is_stranded = bool(task.stranded_because)
            self._handoff.offer(
                task,
                step.to,
                voluntary=not is_stranded,
                only=is_stranded and len(peers) == 1,
                load_tasks_max=step.load_tasks_max,
            )
        elif isinstance(step, Broadcast) and peers and not search.is_late:
            if not search.is_broadcast:
                self._searches.broadcast(search, task.need(), self._information.report(), self._expected_s(task))
        else:
            reason = _why(step, peers)
            self._searches.decide(search, "stay", reason)
            self._searches.leave_footprints(search)
            self._end(search)
            self._wake_for(task, step)

    def _wake_for(self, task: HomeTask, step: Step) -> None:
        """Wake a node for a task that no node accepts, unless it can start here or waits for a node to wake."""
        if isinstance(step, Keep) and step.wakes and self._queue.remove(task):
            self._home.rest(task, self._membership.waking.for_joules(task, step.wakes))
        elif task.stranded_because or not self._ledger.fits(self._asked_here(task)):
            self._membership.waking.for_task(task)

    def _choose(self, search: Search, task: HomeTask, peers: Sequence[str]) -> Step:
        search.because = ""
        if search.wants_good_gpus:
            return self._place_well(search, task)
        return self._place_by_files(search, task, peers) or self._ask_policy(search, task, peers)

    def _ask_policy(self, search: Search, task: HomeTask, peers: Sequence[str]) -> Step:
        uncounted = None if task.stranded_because else task
        view = self._information.view(peers, uncounted, asked_of(self._state, task))
        view.starts_here = search.holds and self._ledger.fits(self._asked_here(task))
        if self.places_all and search.holds:
            view.asleep = self._membership.waking.could_run(task)
        shown = task_view(task, self._state)
        search.steps += 1
        try:
            step = self._state.policies.sender.locate(view, shown, tuple(search.replies), self._state.rng)
            step = valid_step(step, view.asleep)
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return Keep(f"the policy failed: {error!r}")
        if isinstance(step, Broadcast) and search.is_late and step.otherwise is not None:
            step = step.otherwise
        return step if search.steps <= STEPS_MAX else Keep("the policy does not come to an end")

    def _stays(self, search: Search, step: Step, peers: Sequence[str]) -> bool:
        """True if the task would stay here, also because the policy names no node that could run it."""
        if isinstance(step, Transfer):
            return step.to not in peers
        if isinstance(step, Broadcast):
            return search.is_late or not peers
        return isinstance(step, Keep) or not self._searches.askable(search, step, peers)

    def _place_stranded(self, search: Search, peers: Sequence[str]) -> Probe | Transfer | None:
        """Choose beyond the policy, for a task that home cannot run at all. If only one node could ever run it, there
        is no choice, and it waits there; otherwise all nodes not asked yet are asked."""
        if len(peers) == 1:
            return None if peers[0] in search.offered else Transfer(peers[0])
        asked = {reply.node for reply in search.replies}
        left = tuple(peer for peer in peers if peer not in asked)
        if left:
            return Probe(left[: self._state.config.probes_per_search_max])
        willing = [reply.node for reply in search.replies if reply.accepts and reply.node not in search.offered]
        return Transfer(willing[0]) if willing else self._beside_foreign_load(search)

    def _beside_foreign_load(self, search: Search) -> Transfer | None:
        """Choose a node for a task that waits only because of foreign load. Foreign load delays a task that only
        other nodes can run, but must not starve it: once its back-off is at its longest, the task goes where
        it would have room without that load."""
        task = search.task
        if task is None or task.spec.request.takes_devices:
            return None
        if task.backoff_s < self._state.config.stranded_backoff_s_max:
            return None
        room = [
            (report.load_tasks - report.slots_foreign, reply.node, report.load_tasks)
            for reply in search.replies
            if (report := reply.report) is not None and reply.node not in search.offered
            if report.slots_foreign and report.load_tasks - report.slots_foreign < report.slots
        ]
        if not room:
            return None
        _, node, load_tasks = min(room)
        return Transfer(node, load_tasks)

    def _place_well(self, search: Search, task: HomeTask) -> Probe | Transfer | Keep:
        """Place a task that could start here, but on worse GPUs than another node's. Those nodes are asked in
        the order in which they are known; the first that accepts gets the task. If none accepts, the task
        starts here. The policy is not asked: it compares loads and does not know GPUs."""
        asked = {reply.node for reply in search.replies}
        left = tuple(node for node in self._with_good_gpus(task) if node not in asked)
        if left and len(asked) < self._state.config.probes_per_search_max:
            return Probe(left)
        willing = [
            reply.node
            for reply in search.replies
            if reply.accepts
            and reply.node not in search.offered
            and self._has_good_gpus(reply.node, task, reply.report)
        ]
        return Transfer(willing[0]) if willing else Keep("no other node has better GPUs for it now")

    def _place_by_files(self, search: Search, task: HomeTask, peers: Sequence[str]) -> Probe | Transfer | None:
        """Place a task whose files take long to transfer. Nodes that have the files are asked before the
        policy. The one where the task would start first gets it, unless the task would wait there longer than
        the transfer takes. None: the policy chooses."""
        saved_s = self._handoff.holders.saved_s(task)
        if not saved_s or search.is_broadcast:
            return None
        holders = [node for node in self._handoff.holders.nodes(task) if node in peers]
        asked = {reply.node for reply in search.replies}
        left = tuple(node for node in holders if node not in asked)
        if left and len(asked) < SOURCES_MAX:
            return Probe(left[: SOURCES_MAX - len(asked)])
        waits_s = {
            reply.node: max(reply.report.load_tasks - reply.report.slots + 1, 0)
            / max(reply.report.slots, 1)
            * self._state.history.mean_s
            for reply in search.replies
            if reply.accepts and reply.report is not None and reply.node in holders and reply.node not in search.offered
        }
        nearest = min(waits_s, key=lambda node: (waits_s[node], node), default="")
        if not nearest or waits_s[nearest] >= saved_s:
            return None
        search.because = f", because it has its files, which saves {saved_s:.1f} s"
        return Transfer(nearest)

    def _probe(self, search: Search, task: HomeTask, nodes: list[str]) -> None:
        report, expected_s = self._information.report(), self._expected_s(task)
        for node in nodes:
            asked = asked_of(self._state, task, self._membership.profile(node))
            need = Need(asked, task.spec.placement, task.record.migrations)
            self._searches.asked(search, node)
            self._state.send(node, ProbeRequest(search.id, need, report, expected_s))
        self._state.count(metrics.SENDER_PROBES, len(nodes))
        self._searches.wait(search)

    def _expected_s(self, task: HomeTask) -> float:
        """The expected duration of a task on the reference machine, for bids; 0 if no bids are wanted."""
        history = self._state.history
        return (history.expected_of(task) or history.mean_s) if self._wants_bids else 0.0

    def reply_received(self, src: str, reply: ProbeReply) -> None:
        """Handle an answer to a probe; a late answer counts only as a report."""
        search = self._searches.answered(reply.search, src)
        if search is not None and search.task is not None:
            seen = seen_by(asked_of(self._state, search.task), reply.report)
            search.add(src, accepts=reply.accepts, report=seen, price_s=reply.price_s)
            if reply.accepts:
                self._full.pop(src, None)
            elif search.task.stranded_because:
                self._was_full(src, search.task)
            if not search.pending:
                self._searches.wait_no_more(search)
                self.step(search, search.task)
        self._membership.report_received(src, reply.report)

    def answer_received(self, src: str, answer: StateAnswer) -> bool:
        """Handle an answer to a broadcast search; False if it was for none. While an offer is pending it is kept."""
        search = self._searches.get(answer.request)
        if search is None or search.task is None or not search.is_broadcast:
            return False
        if len(search.replies) < self._state.config.probes_per_search_max:
            seen = seen_by(asked_of(self._state, search.task), answer.report)
            search.add(src, accepts=True, report=seen, price_s=answer.price_s)
            if search.task.phase is not HomePhase.OFFERED:
                self.step(search, search.task)
        return True

    def timed_out(self, search: Search, task: HomeTask) -> None:
        """Continue with the answers so far after the timeout, unless an offer is pending."""
        if task.phase is not HomePhase.OFFERED:
            self.step(search, task)

    def offer_declined(self, task: HomeTask, offering: Offering, reason: str) -> None:
        """Pass a declined offer to the policy as a reply; it costs no probe."""
        search = self._searches.of(task)
        if task.stranded_because:
            self._was_full(offering.node, task)
        if search is not None:
            search.add(offering.node, accepts=False)
            self.step(search, task)
        elif offering.searches_on:
            self.search_for(task)
        if task.stranded_because:
            task.stranded_because = reason or task.stranded_because

    def placed(self, task: HomeTask, node: str) -> None:
        """End the search for a task that no longer needs a place. ``node``: its place, "" if it has ended."""
        search = self._searches.of(task)
        if search is not None:
            reason = (
                f"{node} takes it{search.because if node in search.offered else ''}" if node else "the task is over"
            )
            self._searches.decide(search, node or "over", reason)
        self.drop_search(task)
        self.unstrand(task)
        if task.stranded_because:
            task.stranded_because = ""
        if node and self.places_all:  # there may be room for the next one
            self.place_next()

    def drop_search(self, task: HomeTask) -> None:
        search = self._searches.of(task)
        if search is not None:
            self._end(search)
        task.search = None

    def _end(self, search: Search) -> None:
        if not self._searches.close(search):
            return
        self._in_flight -= 1
        task = search.task
        if task is not None and task.search == search.id:
            task.search = None
            if search.holds and task.phase is HomePhase.WAITING:
                self._queue.release(task)

    # -- tasks for a certain node --------------------------------------------------------------------------------------

    def forward(self, task: HomeTask, to: str) -> None:
        """Offer a task that was returned with the name of a better node to that node. It has asked for the task, or
        should accept it as it is."""
        self._handoff.offer(task, to, voluntary=True, search=True, load_tasks_max=ANY_LOAD)

    def give(self, task: HomeTask, to: str) -> None:
        """Offer a task to a node that asked for it; if it is declined, no other place is searched for."""
        self.drop_search(task)
        voluntary = not task.stranded_because
        self._handoff.offer(task, to, voluntary=voluntary, search=False, load_tasks_max=ANY_LOAD)


def _why(step: Step, peers: Sequence[str]) -> str:
    """The reason why a search ends."""
    match step:
        case Keep():
            return step.reason
        case Broadcast():
            return "no node has accepted in time" if peers else "no node to ask"
        case _:
            return f"the policy named no node that could run it: {step}"
