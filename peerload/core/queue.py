"""The work that waits for room on this node: user priority first, then the priority policy, then the order of arrival.

Tasks of this home and guests wait side by side. A task whose offer is out stays in its place but is withheld. The head
of the line is never overtaken by a later task of its class that would fit: it would starve.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

from peerload.core.history import Backlog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peerload.core.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.core.work import Work


class WaitingQueue:
    """Linked lists per user priority and class; everything is O(1) but a look past withheld work (a plain dictionary
    would look past all that was ever taken from its front)."""

    __slots__ = ("_backlog", "_ledger", "_levels", "_next_order", "_nothing_startable_at", "_state", "_work")

    def __init__(self, state: CoreState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._levels: dict[int, tuple[OrderedDict[bytes, Work], OrderedDict[bytes, Work]]] = {}
        self._work: dict[bytes, Work] = {}
        self._next_order = 0
        self._nothing_startable_at = -1
        self._backlog: Backlog | None = None

    def __len__(self) -> int:
        return len(self._work)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._work

    def add(self, work: Work) -> None:
        """At the end of its class and priority."""
        if work.uid in self._work:
            return
        self._next_order += 1
        work.order = self._next_order
        work.withheld = False
        level = self._levels.setdefault(work.spec.priority, (OrderedDict(), OrderedDict()))
        level[0 if work.is_local else 1][work.uid] = work
        self._work[work.uid] = work
        self._ledger.wait(work.spec.request, is_local=work.is_local)
        if self._backlog is not None:
            self._backlog.add(work)

    def remove(self, work: Work) -> bool:
        """Wherever it stands; False if it does not wait here."""
        if self._work.pop(work.uid, None) is None:
            return False
        level = self._levels[work.spec.priority]
        del level[0 if work.is_local else 1][work.uid]
        if not level[0] and not level[1]:
            del self._levels[work.spec.priority]
        self._ledger.wait(work.spec.request, is_local=work.is_local, by=-1)
        if self._backlog is not None:
            self._backlog.remove(work)
        return True

    def withhold(self, work: Work) -> None:
        """An offer is out: it keeps its place and is looked past."""
        work.withheld = True
        self._nothing_startable_at = -1

    def release(self, work: Work) -> None:
        """No offer is out any more."""
        work.withheld = False
        self._nothing_startable_at = -1

    @property
    def expected_s(self) -> float:
        """How long all that waits is expected to take on the reference machine; nothing is kept of it before the first
        who asks, a load policy."""
        if self._backlog is None:
            self._backlog = Backlog(self._state.history)
            for work in self._work.values():
                self._backlog.add(work)
        return self._backlog.expected_s

    def next_startable(self) -> Work | None:
        """The work at the head of the line, if it fits now; asked after every event, so that where nothing could be
        started and nothing has changed since, it is not looked for again."""
        version = self._ledger.version
        if version == self._nothing_startable_at:
            return None
        for priority in sorted(self._levels, reverse=True):
            head = self._head(*self._levels[priority])
            if head is not None:
                if self._ledger.fits(head.spec.request):
                    return head
                break
        self._nothing_startable_at = version
        return None

    def oldest_first(self) -> Iterator[Work]:
        """Work that is not withheld: the higher priority first, then by arrival at this node."""
        for priority in sorted(self._levels, reverse=True):
            local, remote = self._levels[priority]
            yield from _free(heapq.merge(local.values(), remote.values(), key=_order))

    def newest_first(self) -> Iterator[Work]:
        """The reverse."""
        for priority in sorted(self._levels):
            local, remote = self._levels[priority]
            newest = heapq.merge(reversed(local.values()), reversed(remote.values()), key=_order, reverse=True)
            yield from _free(newest)

    def _head(self, local: dict[bytes, Work], remote: dict[bytes, Work]) -> Work | None:
        first_local = _first(local)
        first_remote = _first(remote)
        if first_local is None or first_remote is None:
            return first_local or first_remote
        ledger = self._ledger
        try:
            preferred = self._state.policies.priority.prefer(
                ledger.waiting_local + ledger.running_local,
                ledger.waiting_remote + len(ledger.running) - ledger.running_local,
            )
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count("policy errors")
            preferred = "first"
        if preferred == "first":
            return first_local if first_local.order < first_remote.order else first_remote
        return first_local if preferred == "local" else first_remote


def _first(works: dict[bytes, Work]) -> Work | None:
    for work in works.values():
        if not work.withheld:
            return work
    return None


def _free(works: Iterable[Work]) -> Iterator[Work]:
    return (work for work in works if not work.withheld)


def _order(work: Work) -> int:
    return work.order
