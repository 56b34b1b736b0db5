"""The line of tasks that wait for devices: who of them starts next, and what is kept for whom.

They are looked at in order. One that fits starts; for one that does not, devices are reserved (`backfill.py`), and later
ones start only where that does no harm. One whose devices are free but not the cores that it asks for has the next cores
that come free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.backfill import Backfill
from peerload.core.devices import NEVER_S, Ask
from peerload.core.placing import place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from peerload.core.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.core.work import Work
    from peerload.model.resources import ResourceRequest

LOOKED_AT_MAX = 32
"""Different requests that are tried one after the other."""
PASSED_MAX = 1024
"""Tasks in line that are looked at in all; those that ask the same as one before are passed by."""


class DeviceLine:
    """One per queue. due_s: when a task that waits for certain GPUs will take others, infinite = never; lacks_cores: of
    each priority the first whose devices are free, but not the cores that it asks for; depends_on_cores: whether one might
    start if there were others."""

    __slots__ = ("_failed", "_ledger", "_state", "depends_on_cores", "due_s", "lacks_cores")

    def __init__(self, state: CoreState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._failed: set[tuple[ResourceRequest, float, bool, tuple[tuple[str, int], ...]]] = set()
        self.due_s = NEVER_S
        self.lacks_cores: dict[int, Work] = {}
        self.depends_on_cores = False

    def begin(self) -> None:
        """A new look at all that waits; nothing is reserved so far."""
        self._ledger.kept = Backfill(self._ledger.devices, self._ledger.now_s)
        self._failed.clear()
        self.lacks_cores.clear()
        self.depends_on_cores = False
        self.due_s = NEVER_S

    def is_overdue(self, work: Work) -> bool:
        """Whether it has waited so long that nobody may overtake it."""
        return self._ledger.now_s - work.arrived_s >= self._ledger.devices.config.starve_after_s

    def first_that_fits(self, priority: int, line: Iterable[Work], before: Work | None) -> Work | None:
        """The first that may start now, with its devices. ``before``: only those that came earlier than this one may
        start."""
        failed, now_s = self._failed, self._ledger.now_s
        self._ledger.kept.now_s = now_s
        for passed, work in enumerate(line):
            lacking = self.lacks_cores.get(priority)
            if (
                passed >= PASSED_MAX
                or len(failed) >= LOOKED_AT_MAX
                or (lacking is not None and self.is_overdue(lacking))
            ):
                break
            if before is not None and work.order > before.order:
                self.depends_on_cores = True
                continue
            request, run_s = work.spec.request, self._state.run_s_max(work, self._ledger.devices.models)
            learned = self._state.learned_gpu_bytes(work, self._ledger.devices.models)
            waits_s = request.gpu_wait_s_max
            key = request, run_s, bool(waits_s) and now_s - work.arrived_s >= waits_s, tuple(learned.items())
            if key in failed and not self._may_reserve(work, run_s, is_soft_too=False):
                continue
            if self._fits(work, run_s, learned):
                if self._ledger.has_cores(request):
                    return work
                self.depends_on_cores = True
                if lacking is None:
                    self.lacks_cores[priority] = work
            failed.add(key)
        return None

    def _may_reserve(self, work: Work, run_s: float, *, is_soft_too: bool = True) -> bool:
        """Whether something may be kept for it: what has hardened stays."""
        kept = self._ledger.kept
        is_hard = kept.is_hard(run_s, self._ledger.now_s - work.arrived_s)
        return bool(work.reserved) or ((is_hard or is_soft_too) and kept.may_reserve(is_hard=is_hard))

    def _fits(self, work: Work, run_s: float, learned: Mapping[str, int]) -> bool:
        """Whether its devices are free; if not, some are kept for it."""
        request, now_s = work.spec.request, self._ledger.now_s
        waited_s = now_s - work.arrived_s
        ask = Ask(request, self._ledger.devices.config, learned, run_s)
        if len(self._ledger.kept.seen) < PASSED_MAX:
            self._ledger.kept.seen[work.task] = self._ledger.kept.number
        names = place(self._ledger.devices, request, ask, now_s, waited_s, self._ledger.kept.allows)
        if names is not None:
            work.devices = names
            return True
        kept = None
        if self._may_reserve(work, run_s):
            kept = self._ledger.kept.reserve(request, ask, waited_s, work.reserved, work.task)
        work.reserved = kept.devices if kept is not None and kept.is_hard else ()
        if request.gpu_wait_s_max and waited_s < request.gpu_wait_s_max:
            self.due_s = min(self.due_s, work.arrived_s + request.gpu_wait_s_max)
        return False
