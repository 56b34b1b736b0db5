"""Circuit breaker for the start of processes here, for while this node is short of something that every process needs.

Room on the disk, inodes, descriptors, processes, memory: an attempt that could not be started for want of one of these
never started, and so would not the next one. After such a failure the breaker is open: nothing starts here, tasks of
others go home, own ones look for a place elsewhere, and peers are told why. After a pause, or once something has ended
here, it is half open: one attempt is tried, of others if no own one waits. If that starts, the breaker is closed; if not,
the next pause is twice as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import metrics, timers

if TYPE_CHECKING:
    from peerload.core.coordination.leaving import TaskEvacuation
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.membership.own_profile import OwnProfile
    from peerload.core.sharing.information import Information
    from peerload.core.state import CoreState

TROUBLE = "shortage"


class ResourceShortage:
    """One per node. ``reason``: what this node is short of, as far as is known; "" while the breaker is closed."""

    def __init__(
        self,
        state: CoreState,
        own_profile: OwnProfile,
        executor: ExecutorHandoff,
        information: Information,
        evacuation: TaskEvacuation,
    ) -> None:
        self._state = state
        self._own_profile = own_profile
        self._executor = executor
        self._information = information
        self._evacuation = evacuation
        self.reason = ""
        self._is_open = False
        self._is_announced = False
        self._trial = ""
        self._pause_s = 0.0
        self._closed_s = 0.0

    @property
    def may_start(self) -> bool:
        """True if an attempt may be started now."""
        return not self._is_open and not self._trial

    @property
    def leaves_because(self) -> str:
        """Why own waiting tasks look for a place elsewhere; "" if they need not."""
        return f"{self._state.node} cannot start it: {self.reason}" if self._is_open else ""

    def began(self, reason: str) -> None:
        """Open the breaker: an attempt could not be started for want of something."""
        if self._is_open:  # it was on its way when another failed
            return
        config, now_s = self._state.config, self._state.now.boot_s
        if not self.reason:
            self._state.count(metrics.SHORTAGES)
            self._state.note("launcher", "short", reason=reason)
            if now_s > self._closed_s + 2 * self._pause_s:  # else it has not really been over
                self._pause_s = 0.0
        self._pause_s = min(max(self._pause_s * 2, config.loss_backoff_s), config.loss_backoff_s_max)
        self.reason = reason
        self._is_open = True
        self._trial = ""
        self._state.set_timer_in(self._pause_s, timers.Shortage())
        self._announce(reason)
        self._executor.give_all_back(f"{self._state.node} cannot start it: {reason}")

    def try_again(self) -> None:
        """The pause is over, or something has ended here and may have given back what was missing."""
        if self._is_open:
            self._is_open = False
            self._state.clear_timer(timers.Shortage())
            self._evacuation.over()

    def starting(self, key: str) -> None:
        """Note that this attempt is being started; while the breaker is half open it is the trial."""
        if self.reason:
            self._trial = key

    def started(self, key: str) -> None:
        """Close the breaker if this attempt was the trial: its process has started."""
        if key == self._trial:
            self._trial = self.reason = ""
            self._closed_s = self._state.now.boot_s
            self._state.note("launcher", "recovered")
            self._announce("")

    def gone(self, key: str) -> None:
        """Note that an attempt is not to run here any more: if it was the trial, another one may be."""
        if key == self._trial:
            self._trial = ""

    def settle(self) -> None:
        """After every event: while it is half open and no own task waits, the next offer of others is the trial."""
        if self.reason and self.may_start:
            self._announce("")

    def _announce(self, reason: str) -> None:
        if bool(reason) is self._is_announced:
            return
        self._is_announced = bool(reason)
        self._own_profile.trouble(TROUBLE, f"cannot start tasks: {reason}" if reason else "")
        self._information.announce()
