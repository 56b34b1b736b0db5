"""Results of attempts of other homes: how they end here, and how their homes learn of it.

RESULT is durable before it is said (D4), and is kept and repeated until its home has acknowledged it (R10). An attempt
without a result has died, unless the launcher gives its word that it never had a process: then it is refused (D6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.work import RemotePhase
from peerload.model import timers
from peerload.model.actions import DropExecution, ForgetTask, PutExecution, SendResult
from peerload.model.messages import Died, NotStarted
from peerload.model.task import ExecutionState, FenceKind, how_it_ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.handoff.attempt_fence import AttemptFences
    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.core.work import RemoteTask
    from peerload.model.task import Exit


class ExecutorResults:
    """One per node, over its guests by key; its timers are ``result``. ``remove(guest)``: nothing more is to be known of it
    here."""

    def __init__(
        self,
        state: CoreState,
        ledger: Ledger,
        fences: AttemptFences,
        guests: dict[str, RemoteTask],
        remove: Callable[[RemoteTask], None],
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._fences = fences
        self._guests = guests
        self._remove = remove

    def ended(self, guest: RemoteTask, exit_: Exit) -> None:
        """Make a RESULT durable, then send it until it is acknowledged."""
        if guest.phase is RemotePhase.ENDED:
            return
        if guest.is_revoked:  # that it was killed is nobody's result
            self.died(guest, "it was ended there: its home was shut out of the cluster")
            self._state.actions.append(ForgetTask(guest.key, output=True))
            return
        guest.enter(RemotePhase.ENDED)
        guest.exit = exit_
        self._state.history.learn(guest.spec, exit_)
        guest.repeat_s = self._state.config.repeat_s
        if guest.spec.time_limit_s:
            self._state.clear_timer(timers.TimeLimit(guest.key))
        self._state.persist(PutExecution(guest.record(ExecutionState.RESULT)))
        self._state.note_guest(guest, "ended", how_it_ended(exit_))
        self.send(guest)

    def send(self, guest: RemoteTask) -> None:
        """Send a result, and again after a while."""
        if guest.exit is not None:
            self._state.actions.append(SendResult(guest.home, guest.task, guest.uid, guest.attempt, guest.exit))
            self._state.set_timer_in(guest.repeat_s, timers.Result(guest.key))

    def repeat(self, key: str) -> None:
        """Send a result again that is not acknowledged."""
        guest = self._guests.get(key)
        if guest is not None and guest.phase is RemotePhase.ENDED:
            guest.repeat_s = min(guest.repeat_s * 2, self._state.config.repeat_s_max)
            self.send(guest)

    def acknowledged(self, guest: RemoteTask) -> None:
        """Forget an attempt whose result is recorded at home; its fence stays."""
        self._state.clear_timer(timers.Result(guest.key))
        self._state.persist(DropExecution(guest.uid, guest.attempt))
        self._fences.noted(guest.uid, guest.attempt)
        self._state.note_guest(guest, "delivered", "its home has the result")
        self._state.actions.append(ForgetTask(guest.key, output=True))
        self._remove(guest)

    def died(self, guest: RemoteTask, reason: str) -> None:
        """Report an attempt that was started, left no result, and whose processes are gone."""
        self._ledger.end(guest.key)
        self._state.persist(DropExecution(guest.uid, guest.attempt))
        self._state.note_guest(guest, "lost", reason)
        store = self._state.store
        self._state.send(guest.home, Died(guest.task, guest.uid, guest.attempt, reason, store))
        self._remove(guest)

    def never_started(self, guest: RemoteTask, reason: str) -> None:
        """Refuse an attempt whose START is durable: the launcher has confirmed that it never had a process, and will have none (D6)."""
        self._ledger.end(guest.key)
        refused = self._fences.row(guest.uid, guest.attempt, FenceKind.REFUSED, guest.home)
        self._state.persist(DropExecution(guest.uid, guest.attempt), refused)
        self._state.note_guest(guest, "refused", reason)
        store = self._state.store
        self._state.send(guest.home, NotStarted(guest.task, guest.uid, guest.attempt, reason, store))
        self._remove(guest)
