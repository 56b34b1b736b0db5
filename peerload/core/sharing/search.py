"""Searches on their way: a sender's for a place, a receiver's for work. Both ask nodes, wait for replies, and decide.

A node that has not answered within probe_timeout_s counts as one that does not accept. A search ends exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import metrics, timers
from peerload.model.actions import Announce, Decided
from peerload.model.messages import Enough, Footprint, StateRequest
from peerload.policy.api import Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.core.sharing.peer_hints import PeerHints
    from peerload.core.state import CoreState
    from peerload.core.work import HomeTask
    from peerload.model.load import LoadReport
    from peerload.model.messages import Need
    from peerload.model.power import TaskCost
    from peerload.policy.api import Probe

STEPS_MAX = 256
"""Questions a policy is asked in one search; one that never ends is cut off here."""


class Search:
    """One search. task: what a sender looks for a place for, None for a receiver's; probes_max: how many nodes a
    receiver may ask (None: as the policy says); pending: who was asked and has not answered; offered: who was offered
    the task; is_broadcast: everybody was asked at once, and with is_late time is up for answers; holds: the task could start at home and must not, since its
    home sends although it has room (``send_at`` below one task per slot), or has no GPU for it that is as good as another node's;
    wants_good_gpus: it looks for such GPUs; compared: costs that the policy's last step rests on; asks_others: whether a
    receiver's goes on after the first answer; because: why the node that was offered the task was chosen before all others;
    remembered: who was asked because memory named it; inputs: what the decision rests on, as (node, load, age
    in s)."""

    __slots__ = (
        "asks_others",
        "because",
        "compared",
        "holds",
        "id",
        "inputs",
        "is_broadcast",
        "is_late",
        "offered",
        "pending",
        "probes_max",
        "remembered",
        "replies",
        "steps",
        "task",
        "wants_good_gpus",
    )

    def __init__(self, search_id: int, task: HomeTask | None, probes_max: int | None = None) -> None:
        self.id = search_id
        self.task = task
        self.probes_max = probes_max
        self.replies: list[Reply] = []
        self.pending: dict[str, float] = {}
        self.inputs: list[tuple[str, float, float]] = []
        self.offered: set[str] = set()
        self.remembered: set[str] = set()
        self.steps = 0
        self.asks_others = True
        self.holds = False
        self.wants_good_gpus = False
        self.because = ""
        self.is_broadcast = False
        self.is_late = False
        self.compared: tuple[TaskCost, ...] = ()

    def add(self, node: str, *, accepts: bool, report: LoadReport | None = None, price_s: float = 0.0) -> None:
        """Add an answer, or that there was none."""
        self.replies.append(Reply(node, accepts, report, node in self.remembered, price_s))
        self.inputs.append((node, report.load if report is not None else -1.0, 0.0))


class Searches:
    """The open searches of one node; each waits with a timer ``probe`` of its own."""

    def __init__(self, state: CoreState, hints: PeerHints) -> None:
        self._state = state
        self.hints = hints
        self._open: dict[int, Search] = {}
        self._last = 0

    def open(self, task: HomeTask | None, probes_max: int | None = None) -> Search:
        """A new search."""
        search = Search(self.next_id(), task, probes_max)
        self._open[search.id] = search
        return search

    def next_id(self) -> int:
        """A number that no search or request of this start of the agent has had."""
        self._last += 1
        return self._last

    def get(self, search_id: int) -> Search | None:
        """The open search of this number."""
        return self._open.get(search_id)

    def of(self, task: HomeTask) -> Search | None:
        """The open search for a place for this task."""
        return self._open.get(task.search or -1)

    def askable(self, search: Search, step: Probe, peers: Sequence[str]) -> list[str]:
        """Nodes to ask: named by the policy, eligible, not asked yet, and within the bound."""
        room = self._state.config.probes_per_search_max - len(search.replies)
        asked = {reply.node for reply in search.replies}
        return [node for node in step.nodes if node in peers and node not in asked][: max(room, 0)]

    def asked(self, search: Search, node: str) -> None:
        """A question is on its way to this node."""
        search.pending[node] = self._state.now.boot_s
        if self.hints.take_idle(node) if search.task is not None else self.hints.take_busy(node):
            search.remembered.add(node)

    def wait(self, search: Search) -> None:
        """Wait for those asked, but not for ever; longer each time for a task that has no other choice, since answers may
        take long."""
        patience_s = search.task.backoff_s if search.task is not None and search.task.stranded_because else 0.0
        self._state.set_timer_in(max(self._state.config.probe_timeout_s, patience_s), timers.ProbeTimeout.of(search.id))

    def broadcast(self, search: Search, need: Need, report: LoadReport, expected_s: float) -> None:
        """Ask everybody at once; those that accept answer. expected_s: for their bids, 0 = none are wanted."""
        search.is_broadcast = True
        self._state.count(metrics.REQUESTS_BROADCAST)
        self._state.actions.append(Announce(StateRequest(search.id, report, need, expected_s)))
        self._state.set_timer_in(self._state.config.answer_wait_s, timers.ProbeTimeout.of(search.id))

    def answered(self, search_id: int, node: str) -> Search | None:
        """The search that this node was asked in and has now answered; None if it comes too late."""
        search = self._open.get(search_id)
        if search is None or search.pending.pop(node, None) is None:
            return None
        return search

    def wait_no_more(self, search: Search) -> None:
        """Stop waiting: everybody has answered."""
        self._state.clear_timer(timers.ProbeTimeout.of(search.id))

    def timed_out(self, search_id: int) -> Search | None:
        """Take all that have not answered by now for refusals."""
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
        """Record the outcome of a search, and the reason."""
        task = search.task
        kind = "location.receiver" if task is None else "location.sender"
        policy = self._state.policies.names[kind]
        self._state.actions.append(
            Decided(
                task.task if task is not None else "", policy, tuple(search.inputs), choice, reason, search.compared
            )
        )

    def leave_footprints(self, search: Search) -> None:
        """Leave a hint with nodes that were asked at random that a search was in vain, where the preset wants that."""
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
