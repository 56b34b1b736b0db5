"""Utilization of simulated nodes: how long slots were free, and the CPU readings of an agent's sensors.

A running task keeps its requested cores busy, and nothing else runs. The busy cores are sampled every SAMPLE_S and
averaged exponentially over AVERAGE_S, as in `agent/sensors/host.py`; in simulated seconds. They are sampled only for load
policies that use them, and only while they change.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from peerload.model import events
from peerload.model.errors import ConfigError
from peerload.policy.preset import IdleNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from peerload.core.node import Node
    from peerload.core.resources.admission import Ledger
    from peerload.policy.preset import PolicySet


class UtilizationMonitor:
    """Areas under three curves in slot seconds, in O(1) for each change.

    free: free slots; idle_while_waiting: free slots, while tasks wait on another node than that of the
    slot; total: all slots. A task waits while it is in the queue of a node, not while it is being transferred. A
    task of several cpus occupies as many slots.
    """

    __slots__ = ("_free", "_free_now", "_since_s", "_slots_now", "_waiting", "free", "idle_while_waiting", "total")

    def __init__(self) -> None:
        self.free = 0.0
        self.idle_while_waiting = 0.0
        self.total = 0.0
        self._since_s = 0.0
        self._free: dict[str, int] = {}
        self._waiting: dict[str, None] = {}
        self._free_now = 0
        self._slots_now = 0

    def add(self, name: str, slots: int) -> None:
        self._free[name] = slots
        self._free_now += slots
        self._slots_now += slots

    def look(self, now_s: float, name: str, ledger: Ledger, waiting: int) -> None:
        """Record the state of a node after an event: its running tasks, and the number of waiting ones."""
        held = max(len(ledger.running), math.ceil(ledger.cpus_running))
        free = ledger.profile.slots - held
        waits = waiting > 0
        before = self._free[name]
        if free == before and waits == (name in self._waiting):
            return
        self.count_until(now_s)
        self._free[name] = free
        self._free_now += free - before
        if waits:
            self._waiting[name] = None
        else:
            self._waiting.pop(name, None)

    def count_until(self, now_s: float) -> None:
        """Add up the areas until now."""
        passed_s = now_s - self._since_s
        if passed_s <= 0:
            return
        self._since_s = now_s
        self.total += self._slots_now * passed_s
        self.free += self._free_now * passed_s
        if len(self._waiting) > 1:
            self.idle_while_waiting += self._free_now * passed_s
        elif self._waiting:
            (alone,) = self._waiting
            self.idle_while_waiting += (self._free_now - self._free[alone]) * passed_s


SAMPLE_S = 1.0
AVERAGE_S = 5.0
LITTLE = 0.005
"""Number of busy cores below which a node counts as idle."""
READINGS = ("cpus_busy", "gpus_busy")
SAMPLE = events.LoadSampled(0.0, 0.0, 0)
"""Placeholder in the event heap for the reading of that moment."""


class _ReadingsProbe(IdleNode):
    """A node that records which of its readings a load policy uses."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.seen: set[str] = set()

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 -- whatever a node has
        """Get an attribute and record the access."""
        if name in READINGS:
            self.seen.add(name)
        return super().__getattribute__(name)


def readings_of(policies: PolicySet, gpus: int) -> set[str]:
    """The sensor readings that the load policy uses on a node with this many GPUs: `cpus_busy`, `gpus_busy`."""
    node = _ReadingsProbe(gpus)
    for index in (policies.load.load, getattr(policies.load, "gpu_load", None) if gpus else None):
        if index is not None:
            try:
                index(node)
            except (Exception, SystemExit):  # noqa: BLE001, S112 -- a policy may fail in any way; the simulation counts that
                continue
    return node.seen


def check_modelled(policies: PolicySet, gpus: int, modelled: tuple[str, ...]) -> None:
    """Raises ConfigError if the load policy uses a reading that the simulation does not model."""
    missing = sorted(readings_of(policies, gpus) - set(modelled))
    if missing:
        raise ConfigError(
            "load.policy",
            f"{policies.names['load']!r} cannot be simulated",
            why=f"it uses {' and '.join(missing)}, which this simulation does not model",
            hint='peerload sim --policy PRESET, whose table [load] has  policy = "tasks"',
        )


class CpuUse:
    """CPU utilization of all nodes of a simulation. ``at(at_s, name)`` schedules a call of `sample(name)`."""

    def __init__(self, nodes: Mapping[str, Node], at: Callable[[float, str], object]) -> None:
        self._nodes = nodes
        self._at = at
        self._busy_s = dict.fromkeys(nodes, 0.0)
        self._since_s = dict.fromkeys(nodes, 0.0)
        self._sampled_s = dict.fromkeys(nodes, 0.0)
        self._average = dict.fromkeys(nodes, 0.0)
        self._is_sampled = dict.fromkeys(nodes, False)

    def before(self, name: str, now_s: float) -> None:
        """Integrate the utilization up to now; called before an event changes what runs on this node."""
        self._busy_s[name] += self._nodes[name].ledger.cpus_running * (now_s - self._since_s[name])
        self._since_s[name] = now_s

    def after(self, name: str, now_s: float) -> None:
        """Schedule a sample if something runs; called after an event."""
        if not self._is_sampled[name] and self._nodes[name].ledger.cpus_running:
            self._is_sampled[name] = True
            self._sampled_s[name], self._busy_s[name] = now_s, 0.0
            self._at(now_s + SAMPLE_S, name)

    def sample(self, name: str, now_s: float) -> events.LoadSampled:
        """Return the reading of this moment, and schedule the next one if anything is busy."""
        self.before(name, now_s)
        busy = self._busy_s[name] / max(now_s - self._sampled_s[name], SAMPLE_S)
        average = self._average[name] + (1.0 - math.exp(-SAMPLE_S / AVERAGE_S)) * (busy - self._average[name])
        self._is_sampled[name] = bool(self._nodes[name].ledger.cpus_running) or average >= LITTLE
        self._average[name] = average if self._is_sampled[name] else 0.0
        self._sampled_s[name], self._busy_s[name] = now_s, 0.0
        if self._is_sampled[name]:
            self._at(now_s + SAMPLE_S, name)
        return events.LoadSampled(self._average[name], 0.0, 0)
