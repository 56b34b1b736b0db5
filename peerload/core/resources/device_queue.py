"""The line of tasks that wait for devices: who of them starts next, and what is kept for whom.

They are looked at in order. One that fits starts; for one that does not, devices are reserved (`backfill.py`), and later
ones start only where that does no harm. One whose devices are free but not the cores that it asks for has the next cores
that come free.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from peerload.core.resources.backfill import Backfill
from peerload.core.resources.devices import NEVER_S, DeviceRequest
from peerload.core.resources.placement import place
from peerload.core.work import HomeTask
from peerload.model.devices import GpuWait

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.core.work import Work
    from peerload.model.resources import ResourceRequest

    Key = tuple[ResourceRequest, float, bool, tuple[tuple[str, int], ...]]

LOOKED_AT_MAX = 32
"""Different requests of one scope that are tried one after the other: of those that wait for the same GPUs, or for any."""
LOOKED_AT_IN_ALL_MAX = 256
PASSED_MAX = 1024
"""Tasks of one scope that are looked at in all; those that ask the same as one before are passed by."""
SKIPPED_MAX = 16_384
"""Tasks in line that are gone through in all: those of a scope that was looked at for long enough are skipped."""
Scope = tuple[tuple[str, ...] | None, tuple[str, ...]]
"""The GPUs that it waits for, () = any, None = it takes none; and its other kinds of devices."""
ANY_GPU: Scope = ((), ())


class DeviceQueue:
    """One per queue. due_s: when a task that waits for certain GPUs will take others, infinite = never; lacks_cores: of
    each priority the first whose devices are free, but not the cores that it asks for; depends_on_cores: whether one might
    start if there were others."""

    __slots__ = ("_failed", "_ledger", "_looked_at", "_state", "depends_on_cores", "due_s", "lacks_cores")

    def __init__(self, state: CoreState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._failed: set[Key] = set()
        self._looked_at: dict[Scope, int] = {}
        self.due_s = NEVER_S
        self.lacks_cores: dict[int, Work] = {}
        self.depends_on_cores = False

    def begin(self) -> None:
        """A new look at all that waits; nothing is reserved so far."""
        self._ledger.kept = Backfill(self._ledger.devices, self._ledger.now_s)
        self._failed.clear()
        self._looked_at.clear()
        self.lacks_cores.clear()
        self.depends_on_cores = False
        self.due_s = NEVER_S

    def is_overdue(self, work: Work) -> bool:
        """True if it has waited so long that nobody may overtake it."""
        return self._ledger.now_s - work.arrived_s >= self._ledger.devices.config.starve_after_s

    def first_that_fits(self, priority: int, line: Iterable[Work], before: Work | None) -> Work | None:
        """The first that may start now, with its devices. ``before``: only those that came earlier than this one may
        start."""
        failed, now_s = self._failed, self._ledger.now_s
        self._ledger.kept.now_s = now_s
        passed: dict[Scope, int] = {}
        for work in islice(line, SKIPPED_MAX):
            lacking = self.lacks_cores.get(priority)
            if len(failed) >= LOOKED_AT_IN_ALL_MAX or (lacking is not None and self.is_overdue(lacking)):
                break
            if before is not None and work.order > before.order:
                self.depends_on_cores = True
                continue
            scope = self._scope(work)
            passed[scope] = passed.get(scope, 0) + 1
            is_done = passed[scope] > PASSED_MAX or self._looked_at.get(scope, 0) >= LOOKED_AT_MAX
            if is_done and scope == ANY_GPU:
                break
            key, run_s, learned = self._asks(work) if not is_done else (None, 0.0, {})
            if key is None or (key in failed and not self._may_reserve(work, run_s, is_soft_too=False)):
                continue
            if self._fits(work, run_s, learned):
                if self._ledger.has_cores(work.spec.request):
                    return work
                self.depends_on_cores = True
                if lacking is None:
                    self.lacks_cores[priority] = work
            if key not in failed:
                failed.add(key)
                self._looked_at[scope] = self._looked_at.get(scope, 0) + 1
        return None

    def _waits_for_those(self, work: Work) -> bool:
        """True if it wants certain GPUs and no others, by now."""
        request = work.spec.request
        waits_s = request.gpu_wait_s_max
        is_over = bool(waits_s) and self._ledger.now_s - work.arrived_s >= waits_s
        return request.gpu_wait is GpuWait.QUEUE and bool(request.gpu_prefer) and not is_over

    def _scope(self, work: Work) -> Scope:
        request = work.spec.request
        prefer = request.gpu_prefer if self._waits_for_those(work) else ()
        return prefer if request.gpus else None, tuple(kind for kind, _ in request.devices)

    def _asks(self, work: Work) -> tuple[Key, float, Mapping[str, int]]:
        """Key of its request, alike for all that ask the same now; how long it runs at most, as far as that is known; what is
        known of its need."""
        request, models = work.spec.request, self._ledger.devices.models
        run_s = self._state.run_s_max(work, models)
        learned = self._state.learned_gpu_bytes(work, models)
        waits_s = request.gpu_wait_s_max
        is_over = bool(waits_s) and self._ledger.now_s - work.arrived_s >= waits_s
        return (request, run_s, is_over, tuple(learned.items())), run_s, learned

    def _may_reserve(self, work: Work, run_s: float, *, is_soft_too: bool = True) -> bool:
        """True if something may be kept for it: what has hardened stays."""
        kept = self._ledger.kept
        is_hard = kept.is_hard(run_s, self._ledger.now_s - work.arrived_s)
        return bool(work.reserved) or ((is_hard or is_soft_too) and kept.may_reserve(is_hard=is_hard))

    def _fits(self, work: Work, run_s: float, learned: Mapping[str, int]) -> bool:
        """True if its devices are free; if not, some are kept for it."""
        request, now_s = work.spec.request, self._ledger.now_s
        waited_s = now_s - work.arrived_s
        owner = self._ledger.devices.mps_owner(work.spec, is_local=isinstance(work, HomeTask))
        ask = DeviceRequest(request, self._ledger.devices.config, learned, run_s, owner)
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
