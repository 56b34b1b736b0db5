"""Lease enforcement: nothing of a task executes after its deadline, whatever the agent does.

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
"""Deadlines are compared with the clock at least this often, since timers do not count suspend."""


class LeaseTimers:
    """The leases of the launcher's tasks. ``events`` collects what the agent is told."""

    def __init__(self, tasks: dict[str, LaunchedTask], units: Units, events: list[LauncherEvent]) -> None:
        self._tasks = tasks
        self._units = units
        self._events = events
        self._count = 0

    def soonest_s(self) -> float | None:
        """Seconds until `enforce` is due; None if no task has a deadline."""
        if not self._count:
            return None
        now_s = boot_s()
        left_s = (t.deadline_s - now_s for t in self._tasks.values() if t.deadline_s and not t.frozen_at_s)
        return max(0.0, min(left_s, default=CHECK_S))

    def apply(self, task: LaunchedTask, deadline_s: float, ts: float) -> None:
        """Set a new deadline, granted for the message of ``ts`` (0: unknown); older than the last is ignored. 0 is no
        deadline. A deadline in the future thaws the task."""
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
        """Kill the task if it is frozen, since its agent needs the room."""
        if task.frozen_at_s and not task.ended_at and not task.lost_because:
            task.lost_because = reason
            self._units.kill(task.key)

    def drop(self, task: LaunchedTask) -> None:
        """Drop the deadline of a task whose leader has ended."""
        self._count -= bool(task.deadline_s)
        task.deadline_s = 0.0

    def enforce(self) -> None:
        """Freeze tasks past their deadline; kill those that were frozen for too long."""
        if not self._count:
            return
        now_s = boot_s()
        for task in self._tasks.values():
            if task.deadline_s and task.deadline_s <= now_s and not task.ended_at:
                self._enforce_one(task, now_s)

    def _enforce_one(self, task: LaunchedTask, now_s: float) -> None:
        if not task.frozen_at_s:
            task.frozen_at_s = now_s
            self._units.freeze(task.key)
            self._events.append(FrozenEvent(task.key))
        elif not task.lost_because and now_s >= task.frozen_at_s + task.frozen_s_max:
            task.lost_because = f"it was frozen for {task.frozen_s_max:g} s, without a lease"
        if task.lost_because:
            self._units.kill(task.key)

    def refreeze(self) -> None:
        """Freeze again what users have thawed."""
        frozen = [task.key for task in self._tasks.values() if task.frozen_at_s and not task.lost_because]
        if frozen:
            self._units.refreeze(frozen)
