"""The read-only views that policies get."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.policy.api import TaskView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerload.core.admission import Ledger
    from peerload.core.membership import Membership
    from peerload.core.queue import WaitingQueue
    from peerload.core.work import Work
    from peerload.model.load import Marks
    from peerload.policy.api import KnownReport


class View:
    """`policy.api.NodeView` over the machines of one node; made anew for each question, it copies nothing."""

    __slots__ = ("_ledger", "_membership", "cpus_busy", "load", "marks", "node", "peers", "reports_guide_probing")

    def __init__(
        self,
        node: str,
        ledger: Ledger,
        membership: Membership,
        cpus_busy: float,
        peers: Sequence[str] = (),
        *,
        reports_guide_probing: bool = False,
    ) -> None:
        self.node = node
        self._ledger = ledger
        self._membership = membership
        self.cpus_busy = cpus_busy
        self.peers = peers
        self.reports_guide_probing = reports_guide_probing
        self.load: float
        self.marks: Marks

    @property
    def load_tasks(self) -> int:
        """n."""
        return self._ledger.load_tasks

    @property
    def slots(self) -> int:
        """c."""
        return self._ledger.profile.slots

    @property
    def cpus(self) -> float:
        """Cores of this node."""
        return self._ledger.profile.cpus

    @property
    def cpus_requested(self) -> float:
        """Cores asked for by the tasks here."""
        return self._ledger.cpus_requested

    @property
    def idle_list(self) -> Sequence[str]:
        """Empty: no shipped preset has memory yet."""
        return ()

    @property
    def busy_list(self) -> Sequence[str]:
        """Empty: no shipped preset has memory yet."""
        return ()

    def report(self, node: str) -> KnownReport | None:
        """The newest unexpired report of a peer."""
        return self._membership.report(node)


class Movable:
    """`policy.api.WaitingView`: the waiting work that ``may_go`` lets go, as task views."""

    __slots__ = ("_may_go", "_now_s", "_queue", "works")

    def __init__(self, queue: WaitingQueue, may_go: Callable[[Work], bool], now_s: float) -> None:
        self._queue = queue
        self._may_go = may_go
        self._now_s = now_s
        self.works: dict[str, Work] = {}

    def oldest_first(self) -> Iterator[TaskView]:
        """In the order of arrival."""
        return self._views(self._queue.oldest_first())

    def newest_first(self) -> Iterator[TaskView]:
        """The reverse."""
        return self._views(self._queue.newest_first())

    def _views(self, works: Iterator[Work]) -> Iterator[TaskView]:
        for work in works:
            if self._may_go(work):
                self.works[work.task] = work
                yield task_view(work, 0, self._now_s)


def task_view(work: Work, migrations: int, now_s: float) -> TaskView:
    """A waiting task as policies see it."""
    spec = work.spec
    return TaskView(work.task, spec.request, spec.placement, migrations, now_s - work.arrived_s)
