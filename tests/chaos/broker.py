"""A simulated MQTT broker: advice goes over it while both ends are connected; it may be down, slow, repeat itself, and
remember states of nodes that are long gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import events
from peerload.model.messages import State

if TYPE_CHECKING:
    import random

    from peerload.model.messages import Advice, Broadcast
    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine

DELAY_S = 0.001
RECONNECT_S = 1.0
REPEATS = 0.2
"""The share of messages that come twice while it is slow."""


class Broker:
    """One for the whole cluster."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._connected: dict[str, int] = {}
        self._retained: dict[str, State] = {}
        self.is_up = True
        self.delay_s_max = 0.0

    def agent_started(self, machine: Machine) -> None:
        """Connect a node, if that is possible."""
        if self.is_up:
            self._connect(machine)

    def agent_ended(self, machine: Machine) -> None:
        """Disconnect a node; its retained message stays."""
        self._connected.pop(machine.name, None)

    def _connect(self, machine: Machine) -> None:
        self._connected[machine.name] = machine.run
        machine.deliver(events.BusChanged(connected=True))
        for name, state in list(self._retained.items()):
            if name != machine.name:
                self._cluster.gauges.count("retained states told")
                self._deliver(machine, events.PeerMet(state.identity, state.profile, state.report, retained=True))

    def tend(self) -> None:
        """Whoever is up and not connected tries again, now and every RECONNECT_S."""
        self._cluster.after(RECONNECT_S, self.tend)
        if self.is_up:
            for machine in self._cluster.machines.values():
                if machine.node is not None and not machine.is_asleep and machine.name not in self._connected:
                    self._connect(machine)

    def down(self, *, forgets: bool) -> None:
        """End the broker; everybody notices."""
        self.is_up = False
        if forgets:
            self._retained.clear()
        for name in self._connected:
            self._cluster.machines[name].deliver(events.BusChanged(connected=False))
        self._connected.clear()

    def up(self) -> None:
        """Start the broker again."""
        self.is_up = True

    def fast(self) -> None:
        """End the slowness of the broker."""
        self.delay_s_max = 0.0

    def send(self, src: Machine, dst: str, message: Advice) -> bool:
        """Advice to one node; False if not both are connected."""
        if src.name not in self._connected or dst not in self._connected:
            return False
        coded = self._cluster.network.coded(src, dst, message)
        self._deliver(self._cluster.machines[dst], events.MessageReceived(src.name, coded))  # type: ignore[arg-type]
        return True

    def announce(self, src: Machine, message: Broadcast) -> frozenset[str]:
        """To all who are connected → who they are."""
        if src.name not in self._connected:
            return frozenset()
        if isinstance(message, State):
            self._retained[src.name] = message
        for name in self._connected:
            if name == src.name:
                continue
            self._deliver(self._cluster.machines[name], events.MessageReceived(src.name, message))
        return frozenset(self._connected)

    def _deliver(self, machine: Machine, event: events.Event) -> None:
        delay_s = DELAY_S
        if self.delay_s_max:
            delay_s += self._rng.uniform(0.0, self.delay_s_max)
            if self._rng.random() < REPEATS:
                machine.later(delay_s + self._rng.uniform(0.0, self.delay_s_max), machine.handle, event)
        machine.later(delay_s, machine.handle, event)
