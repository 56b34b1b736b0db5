"""How this node shows itself to others: its profile, its load as it is told, and the envelopes and seals of its messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.sensors.cpu_benchmark import stored_speed
from peerload.agent.sensors.host import machine_facts
from peerload.model import events
from peerload.model.devices import GPU
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, Envelope, Hello, State
from peerload.model.resources import Profile
from peerload.wire.seal import Sealer

if TYPE_CHECKING:
    from peerload.agent.parts import Parts
    from peerload.model.load import LoadReport
    from peerload.model.messages import Message


class LocalNode:
    """Of the agent that has these ``parts``, as far as each method needs them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sequence = 0
        self.speed_file = Path(parts.config.state) / "speed"

    def envelope(self, message: Message, dst: str = "", dst_boot: str = "") -> Envelope:
        """A message in its envelope, with the next sequence number of this start."""
        self._sequence += 1
        return Envelope(
            v=PROTOCOL_MAX,
            cluster=self._parts.cluster.name,
            src=self._parts.identity.node,
            src_boot=self._parts.identity.boot,
            seq=self._sequence,
            body=message,
            dst=dst,
            dst_boot=dst_boot,
        )

    def sealer(self, purpose: str) -> Sealer:
        """What this start of this node seals with for one purpose; to be made once for each."""
        of, identity = self._parts.cluster, self._parts.identity
        return self._parts.trust.seals(Sealer(of.key, of.id, identity.node, identity.boot, purpose=purpose))

    def hello(self) -> Hello:
        """What is said first on every link."""
        hello = self._parts.node.membership.hello(self._report())
        parts = self._parts
        return msgspec.structs.replace(
            hello, wall_at=parts.now().wall_s, up_s=parts.up_s(), trust=parts.trust.trust.digest
        )

    def state(self) -> State:
        """What is told by way of the broker."""
        state = self._parts.node.state
        return State(state.identity, state.profile, self._report())

    def _report(self) -> LoadReport:
        """This node's load as it is told to others now."""
        report = self._parts.node.sharing.shown()
        self._parts.inbox.put(events.LoadTold(report))
        return report

    def profile(self) -> Profile:
        """What this machine is, as it is found at the agent's start."""
        config = self._parts.config
        cpus, mem_bytes = machine_facts()
        slots, devices = config.slots, self._parts.gpus.devices
        return Profile(
            node=config.node,
            slots=max(int(cpus), 1) if slots is None else slots,
            cpus=cpus if slots is None else max(cpus, float(slots)),
            mem_bytes=mem_bytes,
            labels=config.label,
            slots_fixed=slots is not None,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            version=int(self._parts.started_at),
            speed=self.speed() or 1.0,
            gpus=sum(device.kind == GPU for device in devices),
            devices=devices,
            issuer=self._parts.tls.lets_in,
        )

    def speed(self) -> float | None:
        """As it was set, else as it was measured, None if it was not yet."""
        return self._parts.config.speed or stored_speed(self.speed_file)
