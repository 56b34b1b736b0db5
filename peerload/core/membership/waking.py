"""Waking of nodes that are asleep: asked for when a task has no place elsewhere, repeated, and given up when a node does not wake."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Protocol

from peerload.core.resources.admission import why_never
from peerload.energy.plan import slope_at
from peerload.model import messages, timers
from peerload.model.actions import WakePeer
from peerload.model.resources import estimated_curve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.core.state import CoreState
    from peerload.core.work import HomeTask
    from peerload.model.messages import Identity
    from peerload.model.resources import Profile

WAKE_S = 60.0
"""Time that a node takes to wake, until that is learned."""
IPV4 = 4
ALIVE, ASLEEP = "alive", "asleep"
ASKED_MAX = 4
"""Peers that are asked to send magic packets, too."""
AGAIN_S = 1.0
"""A node is woken no more than once in this, whoever asks."""
RESTING_MAX = 1024
TRIES = 3
"""A node that is not there after so many times its wake time is not asked again before it is heard of."""


class KnownPeer(Protocol):
    """A peer, as far as waking needs it."""

    @property
    def identity(self) -> Identity:
        """Its start, and its address."""

    @property
    def profile(self) -> Profile:
        """Its static facts."""

    @property
    def state(self) -> str:
        """The belief about it."""


class Waking:
    """One per node; its timers are ``wake``. took_s: how long nodes took to wake the last time."""

    def __init__(self, state: CoreState, peers: Mapping[str, KnownPeer]) -> None:
        self._state = state
        self._peers = peers
        self._under_way: dict[str, tuple[float, int]] = {}
        self._asked_s: dict[str, float] = {}
        self._resting: dict[str, list[bytes]] = {}
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def could_run(self, task: HomeTask) -> dict[str, float]:
        """The nodes asleep that could run a task, and how long each takes to be there."""
        spec, home, now_s = task.spec, self._state.node, self._state.now.boot_s
        return {
            name: max(self.wake_s(name) - (now_s - self._under_way[name][0] if name in self._under_way else 0.0), 1.0)
            for name, peer in self._peers.items()
            if peer.state == ASLEEP
            and name not in self.failed
            and not why_never(peer.profile, spec.request, spec.placement, home)
        }

    def for_task(self, task: HomeTask) -> None:
        """Wake the node that could run a task and costs least, unless one is being woken."""
        if self._under_way:
            return
        fit = [(_cost(self._peers[name].profile), name) for name in self.could_run(task)]
        if fit:
            self._wake(min(fit)[1], 0, "a task has no place elsewhere")

    def for_joules(self, task: HomeTask, node: str) -> float:
        """Wake a node where a task costs least, for which it is to rest → how long at most."""
        if node not in self._under_way:
            self._wake(node, 0, "a task costs least there")
        resting = self._resting.setdefault(node, [])
        if len(resting) < RESTING_MAX:
            resting.append(task.uid)
        return self.wake_s(node)

    def _wake(self, node: str, tries: int, reason: str = "") -> None:
        began_s = self._under_way[node][0] if tries else self._state.now.boot_s
        self._under_way[node] = began_s, tries + 1
        self._state.actions.append(WakePeer(node))
        for peer in self._near(node, everywhere=tries > 0):
            self._state.send(peer, messages.Wake(node))
        self._state.set_timer_in(self.wake_s(node), timers.Wake(node))
        if not tries:
            self._state.note("node", "waking", node=node, reason=reason)

    def _near(self, node: str, *, everywhere: bool) -> list[str]:
        """Peers that may reach a node by a magic packet: those on its network, if this node is on another; ``everywhere``: any,
        since that was in vain."""
        network = _network(self._peers[node].identity.address)
        if not everywhere and network == _network(self._state.identity.address):
            return []
        alive = sorted(name for name, peer in self._peers.items() if peer.state == ALIVE)
        near = [name for name in alive if network and _network(self._peers[name].identity.address) == network]
        return [*near, *(name for name in alive if everywhere and name not in near)][:ASKED_MAX]

    def asked_for(self, node: str) -> None:
        """A peer asks this node to wake another."""
        peer, now_s = self._peers.get(node), self._state.now.boot_s
        if peer is not None and peer.state == ASLEEP and now_s - self._asked_s.get(node, -AGAIN_S) >= AGAIN_S:
            self._asked_s[node] = now_s
            self._state.actions.append(WakePeer(node))

    def wake_s(self, node: str) -> float:
        """Time that a node takes to wake: as it was the last time, else as it tells, else WAKE_S."""
        peer = self._peers.get(node)
        power = peer.profile.power if peer is not None else None
        return self.took_s.get(node) or (power.wake_s if power is not None else 0.0) or WAKE_S

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
        self._rested(node)
        passed_s = self._state.now.boot_s - began_s
        self._state.note("node", "not woken", node=node, reason=f"it did not wake within {passed_s:.0f} s")

    def is_there(self, node: str) -> None:
        """A node is alive: learn how long that took."""
        self.failed.discard(node)
        self._asked_s.pop(node, None)
        self._rested(node)
        if node in self._under_way:
            began_s, _ = self._under_way.pop(node)
            self.took_s[node] = max(self._state.now.boot_s - began_s, 1.0)
            self._state.clear_timer(timers.Wake(node))

    def _rested(self, node: str) -> None:
        """Tasks that waited for this node to wake look for a place again."""
        for uid in self._resting.pop(node, ()):
            self._state.set_timer_in(0.0, timers.Rest.of(uid))


def _network(address: str) -> str:
    """The network of an address, as far as its number tells: 24 bits of it, of IPv6 64; "" for a name."""
    try:
        number = ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return ""
    return str(ip_network((number, 24 if number.version == IPV4 else 64), strict=False))


def _cost(profile: Profile) -> float:
    curve = profile.power or estimated_curve(round(profile.cpus))
    return slope_at(curve, 0.0, curve.threads) / profile.speed
