"""The work that waits for resources of this node: by user priority, then by the priority policy, then by arrival.

Tasks of this home and of other homes wait side by side. A task with a pending offer keeps its place but is withheld. A
later task of its class that would fit never overtakes the head of the line, which would starve. Tasks that take devices
have their own line (`DeviceQueue`), so that no task waits for cores behind a task that waits for a GPU, or vice versa.
"""

from __future__ import annotations

import heapq
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

import msgspec

from peerload.core.resources.admission import DeviceQueue
from peerload.core.work import UntouchedMembers
from peerload.policy.api import POLICY_FAILURES, valid_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from peerload.core.estimates import BacklogEstimate
    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.core.work import HomeTask, Work

NEVER = (-1, -1)
ARRIVED_MAX = 64
"""Arrivals since the last full scan of work that waits for devices; one more triggers another full scan."""
LOCAL, KEPT_HERE, REMOTE, LOCAL_DEVICES, REMOTE_DEVICES = range(5)
"""The lines of one user priority: tasks of this home, those of them that must stay here, and tasks of other homes;
then the same for tasks that take devices (own and of other homes)."""
ALL = tuple(range(5))
MOVABLE = LOCAL, REMOTE
"""The lines of tasks that can move to another node."""


class LinkedQueue:
    """Work in the order of its arrival: a doubly linked list through `Work.before` and `Work.after`, without memory of
    its own. Iteration yields tasks: a member of a uniform array becomes a task when its turn comes."""

    __slots__ = ("_last", "first")

    def __init__(self) -> None:
        self.first: Work | None = None
        self._last: Work | None = None

    def __bool__(self) -> bool:
        return self.first is not None

    def __iter__(self) -> Iterator[Work]:
        work = self.first
        while work is not None:
            if isinstance(work, UntouchedMembers):
                work = work.home.touch(work, work.members[0])
            following = work.after  # the caller may remove it
            yield work
            if following is not None and not following.is_queued:
                following = work.after if work.is_queued else None
            work = following

    def __reversed__(self) -> Iterator[Work]:
        work = self._last
        while work is not None:
            if isinstance(work, UntouchedMembers):
                work = work.home.touch(work, work.members[-1])
            preceding = work.before
            yield work
            if preceding is not None and not preceding.is_queued:
                preceding = work.before if work.is_queued else None
            work = preceding

    def as_it_is(self) -> Iterator[Work]:
        """The work, with untouched members of an array as one item; the queue must not change meanwhile."""
        work = self.first
        while work is not None:
            yield work
            work = work.after

    def append(self, work: Work) -> None:
        self.insert(work, self._last)

    def insert(self, work: Work, before: Work | None) -> None:
        """Add work behind ``before``; None: at the front."""
        after = self.first if before is None else before.after
        work.before, work.after = before, after
        if before is None:
            self.first = work
        else:
            before.after = work
        if after is None:
            self._last = work
        else:
            after.before = work

    def remove(self, work: Work) -> None:
        """Remove work from any position."""
        before, after = work.before, work.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self._last = before
        else:
            after.before = before
        work.before = work.after = None


class WaitingQueue:
    """Linked lists by user priority and class. Everything is O(1), except skipping withheld work and scanning work that
    takes devices."""

    def __init__(self, state: CoreState, ledger: Ledger) -> None:
        self._state = state
        self.ledger = ledger
        self._levels: dict[int, tuple[LinkedQueue, ...]] = {}
        self._spare: tuple[LinkedQueue, ...] | None = None
        """Empty lines of a priority that is no longer used, for the next priority."""
        self._devices = DeviceQueue(state, ledger)
        self._number = 0
        self._next_order = 0
        self.settled_at = NEVER
        """Versions of the ledger and of its devices at the last scan, if nothing could start then and nothing has
        changed since that these versions do not show."""
        self._no_room_at = NEVER
        self._arrived: list[Work] = []
        self._backlog: BacklogEstimate | None = None

    def __len__(self) -> int:
        return self._number

    def add(self, work: Work) -> None:
        """Add work at the end of its class and priority."""
        if work.is_queued:
            return
        work.order = self._next_order + 1
        self._next_order += work.count
        work.is_queued = True
        work.withheld = False
        if work.reserved:
            work.reserved = ()
        level = self._levels.get(work.spec.priority)
        if level is None:
            level = self._levels[work.spec.priority] = self._spare or tuple(LinkedQueue() for _ in ALL)
            self._spare = None
        work.line = line = _line(work)
        level[line].append(work)
        if line >= LOCAL_DEVICES:
            self._arrived.append(work)
        self._number += work.count
        self.ledger.wait(work.spec.request, is_local=work.is_local, by=work.count)
        if self._backlog is not None:
            self._backlog.add(work)

    def split(self, block: UntouchedMembers, task: HomeTask, member: int) -> UntouchedMembers | None:
        """Replace one of these members by its task. → the members behind it, if members before it remain."""
        index = block.members.index(member)
        if not block.is_queued:
            return self._divide(block, index, 1)
        task.order, task.is_queued, task.line = block.order + index, True, block.line
        line = self._levels[block.spec.priority][block.line]
        if not index:
            line.insert(task, block.before)
        rest = self._divide(block, index, 1)
        if index:
            line.insert(task, block)
        return rest

    def drop(self, block: UntouchedMembers, members: range) -> UntouchedMembers | None:
        """Remove members that no longer wait. → the members behind them, if members before them remain."""
        if block.is_queued:
            self._leaves(block, len(members))
        return self._divide(block, block.members.index(members[0]), len(members))

    def _divide(self, block: UntouchedMembers, index: int, number: int) -> UntouchedMembers | None:
        """Remove ``number`` members from a block; it keeps those before, else those behind. → those behind, if both
        remain."""
        earlier, later = block.members[:index], block.members[index + number :]
        rest = block.split(later) if earlier and later else None
        block.members = earlier or later
        if not block.is_queued:
            return rest
        level = self._levels[block.spec.priority]
        line = level[block.line]
        if rest is not None:
            rest.order, rest.is_queued, rest.line = block.order + index + number, True, block.line
            line.insert(rest, block)
        elif not earlier:
            block.order += number
        if not block.members:
            block.is_queued = False
            line.remove(block)
            self._drop_if_empty(block.spec.priority)
        return rest

    def prioritize(self, work: Work, priority: int) -> None:
        """Change the priority of work; if it waits here, it goes behind work that has this priority already."""
        is_queued, is_withheld = self.remove(work), work.withheld
        work.spec = msgspec.structs.replace(work.spec, priority=priority)
        if is_queued:
            self.add(work)
            if is_withheld:
                self.withhold(work)

    def remove(self, work: Work) -> bool:
        """Remove work from any position; False if it does not wait here."""
        if not work.is_queued:
            return False
        work.is_queued = False
        self._levels[work.spec.priority][work.line].remove(work)
        if work.line >= LOCAL_DEVICES:
            self._look_again()  # its reserved devices are free
        self._drop_if_empty(work.spec.priority)
        self._leaves(work, work.count)
        return True

    def _drop_if_empty(self, priority: int) -> None:
        for line in self._levels[priority]:
            if line.first is not None:
                return
        self._spare = self._levels.pop(priority)

    def _leaves(self, work: Work, number: int) -> None:
        """Count tasks of this work that no longer wait."""
        self._number -= number
        self.ledger.wait(work.spec.request, is_local=work.is_local, by=-number)
        if self._backlog is not None:
            self._backlog.remove(work, number)

    def withhold(self, work: Work) -> None:
        """Withhold work with a pending offer: it keeps its place and is skipped."""
        work.withheld = True
        self._look_again()

    def release(self, work: Work) -> None:
        work.withheld = False
        self._look_again()

    def oldest_wait_s(self) -> float:
        """The time that the first task in line has waited here, over all lines; 0 if nothing waits."""
        firsts = [next(line.as_it_is()) for level in self._levels.values() for line in level if line]
        return max((self._state.now.boot_s - work.arrived_s for work in firsts), default=0.0)

    @property
    def expected_s(self) -> float:
        """The expected duration of all waiting tasks on the reference machine. It is not tracked before the first
        query, by a load policy."""
        if self._backlog is None:
            self._backlog = self._state.history.backlog()
            for work in self.as_it_is():
                self._backlog.add(work)
        return self._backlog.expected_s

    def _look_again(self) -> None:
        """Require a new scan after a change that the ledger does not show."""
        self.settled_at = self._no_room_at = NEVER
        self._arrived.clear()

    @property
    def due_s(self) -> float:
        """The time from which a task that waits for certain GPUs takes any; infinite = never."""
        return self._devices.due_s

    def next_startable(self) -> Work | None:
        """The work at the head of the line, if it fits now. `Work.devices` lists the devices that it will get."""
        ledger, levels, devices = self.ledger, self._levels, self._devices
        version = ledger.version, ledger.devices.version
        if version == self.settled_at:
            return None
        if devices.is_idle and (not levels or (ledger.is_full and not ledger.waits_for_devices)):
            self._arrived.clear()
            devices.depends_on_cores = bool(levels)
            self.settled_at = version
            self._no_room_at = ledger.room_version if levels else 0, version[1]
            return None
        room = ledger.room_version if self._devices.depends_on_cores else 0, ledger.devices.version
        looks_at_all = room != self._no_room_at or self._has_urgent()
        if looks_at_all:
            self._devices.begin()
        for priority in sorted(self._levels, reverse=True):
            found, goes_on = self._next_of(priority, self._levels[priority], looks_at_all=looks_at_all)
            if found is not None:
                return found
            if not goes_on:
                self._devices.depends_on_cores = True  # work of lower priority was not scanned
                break
        self._arrived.clear()
        room = ledger.room_version if self._devices.depends_on_cores else 0, ledger.devices.version
        self.settled_at, self._no_room_at = version, room
        return None

    def head(self) -> Work | None:
        """The work at the head of the line, whether it fits or not; None if work of its priority waits for devices."""
        if not self._levels:
            return None
        level = self._levels[max(self._levels)]
        return None if level[LOCAL_DEVICES] or level[REMOTE_DEVICES] else self._head(level)

    # -- for explanations ----------------------------------------------------------------------------------------------

    def goes_before(self, work: Work) -> Work | None:
        """The work that must start before this work, though there may be room for it; None if it is next. Read-only."""
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            lacks_cores = self._devices.lacks_cores.get(priority)
            head = self._head(level)
            if priority > work.spec.priority:
                first = head or lacks_cores
            elif work.spec.request.takes_devices:
                is_overdue = head is not None and head.order < work.order and self._devices.is_overdue(head)
                first = head if is_overdue else lacks_cores
            else:
                is_later = head is None or lacks_cores is None or head.order < lacks_cores.order
                first = head if is_later else lacks_cores
            if first is not None and first is not work and first.is_queued:
                return first
            if priority <= work.spec.priority:
                break
        return None

    def count_before(self, work: Work, at_most: int) -> int:
        """Number of waiting tasks of its kind and priority that start before it; counted up to ``at_most``."""
        level = self._levels.get(work.spec.priority)
        if level is None:
            return 0
        if work.spec.request.takes_devices:
            local, remote = level[LOCAL_DEVICES : LOCAL_DEVICES + 1], level[REMOTE_DEVICES:]
        else:
            local, remote = level[:REMOTE], level[REMOTE : REMOTE + 1]
        own, others = (local, remote) if work.is_local else (remote, local)
        preferred = self._preferred()

        def free(*lines: LinkedQueue) -> Iterator[Work]:
            return _free(heapq.merge(*(line.as_it_is() for line in lines), key=_order))

        lines = (*own, *others) if preferred == "first" else own
        before: Iterator[Work] = takewhile(lambda other: other.order < work.order, free(*lines))
        if preferred == ("remote" if work.is_local else "local"):
            before = chain(before, free(*others))
        return min(sum(other.count for other in islice(before, at_most)), at_most)

    def _has_urgent(self) -> bool:
        """True if new work takes devices and precedes other waiting work."""
        if len(self._arrived) > ARRIVED_MAX:
            return True
        return bool(self._arrived) and any(work.spec.priority > min(self._levels) for work in self._arrived)

    def _next_of(
        self, priority: int, level: tuple[LinkedQueue, ...], *, looks_at_all: bool
    ) -> tuple[Work | None, bool]:
        """The work of one priority that starts next, and, if there is none, whether a lower priority may have
        the room. Without ``looks_at_all`` no resources were freed: of the work that waits for devices, only
        new arrivals are scanned."""
        head = self._head(level)
        fits = head is not None and self.ledger.fits(head.spec.request)
        lacks_cores = None
        if level[LOCAL_DEVICES].first or level[REMOTE_DEVICES].first:
            before = head if head is not None and not fits and self._devices.is_overdue(head) else None
            line = self._in_line(level[LOCAL_DEVICES], level[REMOTE_DEVICES]) if looks_at_all else self._new(priority)
            found = self._devices.first_that_fits(priority, line, before)
            if found is not None:
                return found, False
            lacks_cores = self._devices.lacks_cores.get(priority)
        if head is None:
            return None, lacks_cores is None
        if fits and (lacks_cores is None or head.order < lacks_cores.order):
            return head, False
        return None, False

    def _new(self, priority: int) -> Iterator[Work]:
        """Work of this priority that has arrived since the last full scan."""
        return (work for work in self._arrived if work.spec.priority == priority and not work.withheld)

    def _in_line(self, local: LinkedQueue, remote: LinkedQueue) -> Iterator[Work]:
        """Both lines merged in the order of the priority policy."""
        lines = _free(local), _free(remote)
        preferred = self._preferred() if local and remote else "first"
        if preferred == "first":
            return heapq.merge(*lines, key=_order)
        return chain(*(lines if preferred == "local" else reversed(lines)))

    def as_it_is(self) -> Iterator[Work]:
        """All waiting work in no particular order; the untouched members of an array are one item."""
        return chain.from_iterable(line.as_it_is() for level in self._levels.values() for line in level)

    def oldest_first(self, lines: Sequence[int] = ALL) -> Iterator[Work]:
        """Work in these lines that is not withheld: the higher priority first, then by arrival at this node."""
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            yield from _free(heapq.merge(*(level[line] for line in lines), key=_order))

    def newest_first(self, lines: Sequence[int] = ALL) -> Iterator[Work]:
        for priority in sorted(self._levels):
            level = self._levels[priority]
            yield from _free(heapq.merge(*(reversed(level[line]) for line in lines), key=_order, reverse=True))

    @property
    def newest(self) -> int:
        """The highest `Work.order` so far."""
        return self._next_order

    def since(self, order: int) -> Iterator[Work]:
        """Work with a higher `Work.order` than this, withheld or not: the newest first."""
        lines = (reversed(line) for level in self._levels.values() for line in level)
        return takewhile(lambda work: work.order > order, heapq.merge(*lines, key=_order, reverse=True))

    def waiting_for_devices(self) -> Iterator[Work]:
        """Work that waits for devices and is not withheld, in the order in which it would get them."""
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            yield from heapq.merge(_free(level[LOCAL_DEVICES]), _free(level[REMOTE_DEVICES]), key=_order)

    def _head(self, level: tuple[LinkedQueue, ...]) -> Work | None:
        first_local, first_remote = _first(level[LOCAL]), _first(level[REMOTE])
        kept_here = _first(level[KEPT_HERE]) if level[KEPT_HERE].first else None
        if first_local is None or (kept_here is not None and kept_here.order < first_local.order):
            first_local = kept_here
        if first_local is None or first_remote is None:
            return first_local or first_remote
        preferred = self._preferred()
        if preferred == "first":
            return first_local if first_local.order < first_remote.order else first_remote
        return first_local if preferred == "local" else first_remote

    def _preferred(self) -> str:
        """Kind of task that the priority policy starts first when both kinds wait."""
        ledger = self.ledger
        try:
            return valid_class(
                self._state.policies.priority.prefer(
                    ledger.waiting_local + ledger.running_local,
                    ledger.waiting_remote + len(ledger.running) - ledger.running_local,
                )
            )
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return "first"


def _line(work: Work) -> int:
    takes_devices = work.spec.request.takes_devices
    if work.is_local:
        placement = work.spec.placement
        return LOCAL_DEVICES if takes_devices else KEPT_HERE if placement.local or placement.node else LOCAL
    return REMOTE_DEVICES if takes_devices else REMOTE


def _first(line: LinkedQueue) -> Work | None:
    work = line.first
    if work is None or not (work.withheld or isinstance(work, UntouchedMembers)):  # the usual case
        return work
    for work in line:
        if not work.withheld:
            return work
    return None


def _free(works: Iterable[Work]) -> Iterator[Work]:
    return (work for work in works if not work.withheld)


def _order(work: Work) -> int:
    return work.order
