"""Frozen attempts: their lease has run out, and they hold room; their home is silent, and may come back (R11) or never (R5).

Frozen, they keep their room for `frozen_kept_s` at least, and for as long as nobody needs it: no task of this home, and
none that another home could give to nobody else. Then the one that has been frozen longest is ended, without a result,
and those that may run once only are the last. While nothing here runs but what is frozen, this node takes no guests that
would have to wait, and those that do go home: nobody can say how long it takes. Who asks all the same finds room the next
time.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from peerload.core.work import HomeTask
from peerload.model import metrics, timers
from peerload.model.actions import EvictTask
from peerload.model.resources import ResourceRequest
from peerload.model.task import Guarantee, task_home

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import RemoteTask
    from peerload.model.messages import Offer

LOOKED_AT_MAX = 64
"""Waiting tasks of this home that are looked at for one that has a use for the room."""
ONE_CORE = ResourceRequest()


class Frozen:
    """One per node, over its guests; its timer is ``frozen``."""

    def __init__(self, state: CoreState, queue: WaitingQueue, ledger: Ledger, executor: ExecutorHandoff) -> None:
        self._state = state
        self._queue = queue
        self._ledger = ledger
        self._executor = executor
        self._since_s: dict[str, float] = {}
        self._evicted = ""

    def __iter__(self) -> Iterator[str]:
        """The attempts that are held still, the longest first."""
        return iter(sorted(self._since_s, key=lambda key: self._since_s[key]))

    def restore(self, keys: Iterable[str]) -> None:
        """Take in the attempts that the launcher lists as frozen; it does not say for how long."""
        self._since_s.clear()
        for key in keys:
            self.froze(key)

    def froze(self, key: str) -> None:
        """Note that the launcher has frozen this attempt."""
        if key in self._executor.guests:
            self._since_s[key] = self._state.now.boot_s
            self._state.set_timer_in(self._state.config.frozen_kept_s, timers.FrozenTimeout(key))

    def thawed(self, key: str) -> None:
        """Note that an attempt runs again."""
        if self._since_s.pop(key, None) is not None:
            self._state.clear_timer(timers.FrozenTimeout(key))

    def settle(self) -> None:
        """Give room to those who can use it, after every event."""
        state, ledger = self._state, self._ledger
        if not self._since_s:  # as after nearly all events
            state.runs_frozen_only = state.is_stuck = False
            state.turned_away = None
            return
        for key in [key for key in self._since_s if key not in ledger.running]:
            self.thawed(key)
        state.runs_frozen_only = 0 < len(self._since_s) == len(ledger.running)
        state.is_stuck = state.runs_frozen_only and not ledger.has_cores(ONE_CORE)
        if state.runs_frozen_only and len(self._queue):
            self._executor.give_waiting_back()
        if self._since_s and not state.profile.drained and not state.profile.trouble:
            self._make_room()
        state.turned_away = None

    def _make_room(self) -> None:
        """For the first task of this home that waits and would have enough then, or for who was just turned away."""
        if self._evicted in self._since_s:
            return  # it is on its way
        kept_since_s = self._state.now.boot_s - self._state.config.frozen_kept_s
        due = [key for key, since_s in self._since_s.items() if since_s <= kept_since_s]
        task = self._whom_it_helps(due) if due else None
        if task is None:
            return
        guest = min((self._executor.guests[key] for key in due), key=self._order)
        self._evicted = guest.key
        self._state.count(metrics.FROZEN_TASKS_EVICTED)
        self._state.note(
            "attempt",
            "evicted",
            task=guest.task,
            attempt=guest.attempt,
            node=guest.home,
            reason=f"{task} needs its room",
        )
        reason = f"{guest.home} was silent, and a task of {task_home(task)} needed its room"
        self._state.actions.append(EvictTask(guest.key, reason))

    def _whom_it_helps(self, due: list[str]) -> str | None:
        """The first task that has no room now, and would have if these were gone; None if there is none."""
        own = (work for work in self._queue.oldest_first() if isinstance(work, HomeTask))
        asking: list[HomeTask | Offer] = list(itertools.islice(own, LOOKED_AT_MAX))
        if self._state.turned_away is not None:
            asking.append(self._state.turned_away)
        seen: set[ResourceRequest] = set()
        for one in asking:
            request = one.spec.request
            if request in seen:
                continue
            seen.add(request)
            if not self._ledger.fits(request) and self._ledger.fits_without(due, request):
                return one.task
        return None

    def _order(self, guest: RemoteTask) -> tuple[bool, float]:
        return guest.spec.guarantee is Guarantee.ONCE, self._since_s[guest.key]
