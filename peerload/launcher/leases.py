"""Leases as the launcher enforces them: nothing of a task executes after its deadline, whatever the agent does.

Deadlines are of CLOCK_BOOTTIME, which counts suspend. Used by the launcher alone; the imports are few.
"""

from __future__ import annotations

from peerload.launcher.protocol import FrozenEvent, ThawedEvent
from peerload.launcher.task import boot_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.containment import Units
    from peerload.launcher.protocol import LauncherEvent
    from peerload.launcher.task import LaunchedTask

CHECK_S = 0.5
"""While a deadline is set it is compared with the clock at least this often (timers do not count suspend)."""


class LeaseTimers:
    """Of the launcher's ``tasks``, in their ``units``; ``events``: where the agent's next ones are gathered."""

    def __init__(self, tasks: dict[str, LaunchedTask], units: Units, events: list[LauncherEvent]) -> None:
        self._tasks = tasks
        self._units = units
        self._events = events
        self._count = 0

    def soonest_s(self) -> float | None:
        """So long it may take until `enforce` is due; None if no task has a deadline."""
        if not self._count:
            return None
        now_s = boot_s()
        left_s = (t.deadline_s - now_s for t in self._tasks.values() if t.deadline_s and not t.frozen_at_s)
        return max(0.0, min(left_s, default=CHECK_S))

    def apply(self, task: LaunchedTask, deadline_s: float, ts: float) -> None:
        """A new deadline, given for ``ts`` (0 says nothing): an older word than the last comes too late. 0 is none; one
        that lies ahead thaws."""
        if task.ended_at or (ts or task.ts) < task.ts:
            return
        task.ts = ts or task.ts
        self._count += bool(deadline_s) - bool(task.deadline_s)
        task.deadline_s = deadline_s
        if task.frozen_at_s and (not deadline_s or deadline_s > boot_s()) and not task.lost_because:
            task.frozen_at_s = 0.0
            self._units.thaw(task.key)
            self._events.append(ThawedEvent(task.key))

    def evict(self, task: LaunchedTask, reason: str) -> None:
        """Kill it if it is frozen: its agent needs the room. One that was thawed meanwhile is left alone."""
        if task.frozen_at_s and not task.ended_at and not task.lost_because:
            task.lost_because = reason
            self._units.kill(task.key)

    def drop(self, task: LaunchedTask) -> None:
        """Its leader has ended."""
        self._count -= bool(task.deadline_s)
        task.deadline_s = 0.0

    def enforce(self) -> None:
        """Freeze what is past its deadline, kill what has been for too long."""
        if not self._count:
            return
        now_s = boot_s()
        for task in self._tasks.values():
            if task.deadline_s and task.deadline_s <= now_s and not task.ended_at:
                self._hold(task, now_s)

    def _hold(self, task: LaunchedTask, now_s: float) -> None:
        if not task.frozen_at_s:
            task.frozen_at_s = now_s
            self._units.freeze(task.key)
            self._events.append(FrozenEvent(task.key))
        elif not task.lost_because and now_s >= task.frozen_at_s + task.frozen_s_max:
            task.lost_because = f"it was frozen for {task.frozen_s_max:g} s, without a lease"
        if task.lost_because:
            self._units.kill(task.key)

    def hold_again(self) -> None:
        """What is frozen stays so, also where others can thaw it."""
        frozen = [task.key for task in self._tasks.values() if task.frozen_at_s and not task.lost_because]
        if frozen:
            self._units.freeze_again(frozen)
