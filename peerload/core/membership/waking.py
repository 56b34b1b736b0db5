"""Waking of nodes that are asleep: asked for when a task has no place elsewhere, repeated, and given up when a node does not wake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.resources.admission import why_never
from peerload.energy.envelope import slope_at
from peerload.model import timers
from peerload.model.actions import WakePeer
from peerload.model.power import estimated_curve

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.core.state import CoreState
    from peerload.core.work import HomeTask
    from peerload.model.resources import Profile

WAKE_S = 60.0
"""Time that a node takes to wake, until that is learned."""
TRIES = 3
"""A node that is not there after so many times its wake time is not asked again before it is heard of."""


class Waking:
    """One per node; its timers are ``wake``. took_s: how long nodes took to wake the last time."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._under_way: dict[str, tuple[float, int]] = {}
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def for_task(self, task: HomeTask, asleep: Iterable[Profile]) -> None:
        """Wake the node that could run a task and costs least, unless one is being woken."""
        if self._under_way:
            return
        spec, home = task.spec, self._state.node
        fit = [
            (_cost(profile), profile.node)
            for profile in asleep
            if profile.node not in self.failed and not why_never(profile, spec.request, spec.placement, home)
        ]
        if fit:
            self._wake(min(fit)[1], 0)

    def _wake(self, node: str, tries: int) -> None:
        began_s = self._under_way[node][0] if tries else self._state.now.boot_s
        self._under_way[node] = began_s, tries + 1
        self._state.actions.append(WakePeer(node))
        self._state.set_timer_in(self._wake_s(node), timers.Wake(node))
        if not tries:
            self._state.note("node", "waking", node=node, reason="a task has no place elsewhere")

    def _wake_s(self, node: str) -> float:
        return self.took_s.get(node, WAKE_S)

    def overdue(self, node: str) -> None:
        """A node was to be awake by now: ask again, or give up."""
        began_s, tries = self._under_way.get(node, (0.0, 0))
        if not tries:
            return
        if tries < TRIES:
            self._wake(node, tries)
            return
        del self._under_way[node]
        self.failed.add(node)
        passed_s = self._state.now.boot_s - began_s
        self._state.note("node", "not woken", node=node, reason=f"it did not wake within {passed_s:.0f} s")

    def is_there(self, node: str) -> None:
        """A node is alive: learn how long that took."""
        self.failed.discard(node)
        if node in self._under_way:
            began_s, _ = self._under_way.pop(node)
            self.took_s[node] = max(self._state.now.boot_s - began_s, 1.0)
            self._state.clear_timer(timers.Wake(node))


def _cost(profile: Profile) -> float:
    curve = profile.power or estimated_curve(round(profile.cpus))
    return slope_at(curve, 0.0, curve.threads) / profile.speed
