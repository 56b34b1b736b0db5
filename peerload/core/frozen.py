"""Guests whose lease has run out, and the room they hold: their home is silent, and may come back (R11) or never (R5).

Frozen, they keep their room for `frozen_kept_s` at least, and for as long as nobody needs it: no task of this home, and
none that another home could give to nobody else. Then the one that has been frozen longest is ended, without a result,
and those that may run once only are the last. While nothing here runs but what is frozen, this node takes no guests, and
those that wait go home: nobody can say how long it takes. Who asks all the same finds room the next time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.work import HomeTask
from peerload.model.actions import EvictTask
from peerload.model.task import Guarantee, task_home

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.core.admission import Ledger
    from peerload.core.handoff_executor import Executor
    from peerload.core.queue import WaitingQueue
    from peerload.core.state import CoreState
    from peerload.core.work import Guest


class Frozen:
    """One per node, over its guests; its timer is ``frozen``."""

    def __init__(self, state: CoreState, queue: WaitingQueue, ledger: Ledger, executor: Executor) -> None:
        self._state = state
        self._queue = queue
        self._ledger = ledger
        self._executor = executor
        self._since_s: dict[str, float] = {}
        self._evicted = ""

    def restore(self, keys: Iterable[str]) -> None:
        """What the launcher lists as frozen: for how long, it does not say."""
        self._since_s.clear()
        for key in keys:
            self.froze(key)

    def froze(self, key: str) -> None:
        """The launcher holds this attempt still."""
        if key in self._executor.guests:
            self._since_s[key] = self._state.now.boot_s
            self._state.set_timer_in(self._state.config.frozen_kept_s, "frozen", key)

    def thawed(self, key: str) -> None:
        """It runs again."""
        if self._since_s.pop(key, None) is not None:
            self._state.clear_timer("frozen", key)

    def settle(self) -> None:
        """After every event: what there is of room goes to those who can use it."""
        for key in [key for key in self._since_s if key not in self._ledger.running]:
            self.thawed(key)
        self._state.is_stuck = 0 < len(self._since_s) == len(self._ledger.running)
        if self._since_s:
            if self._state.is_stuck and len(self._queue):
                self._executor.give_waiting_back()
            self._make_room()
        self._state.turned_away = None

    def _make_room(self) -> None:
        """For the first task of this home that waits, or who was just turned away, if that is enough for it."""
        if self._evicted in self._since_s:
            return  # it is on its way
        own = next((work for work in self._queue.oldest_first() if isinstance(work, HomeTask)), None)
        task = own or self._state.turned_away
        kept_since_s = self._state.now.boot_s - self._state.config.frozen_kept_s
        due = [key for key, since_s in self._since_s.items() if since_s <= kept_since_s]
        if task is None or not due or not self._ledger.fits_without(due, task.spec.request):
            return
        guest = min((self._executor.guests[key] for key in due), key=self._order)
        self._evicted = guest.key
        self._state.count("frozen tasks ended for their room")
        self._state.note(
            "attempt",
            "evicted",
            task=guest.task,
            attempt=guest.attempt,
            node=guest.home,
            reason=f"{task.task} needs its room",
        )
        reason = f"{guest.home} was silent, and a task of {task_home(task.task)} needed its room"
        self._state.actions.append(EvictTask(guest.key, reason))

    def _order(self, guest: Guest) -> tuple[bool, float]:
        return guest.spec.guarantee is Guarantee.ONCE, self._since_s[guest.key]
