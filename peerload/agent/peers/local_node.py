"""Local node as its peers see it: identity, profile, Hello and State, envelopes and sealers; and other agents with
its name.

If an agent is refused because another has its name, it ends if it started less than NEWCOMER_S ago and never had a task, so
that nothing is lost. Otherwise it stays, isolated from the peers that refuse it, and reports this: no message of a peer can end a
working agent. Of two agents with copies of one state directory, which have proven that to each other, the younger one ends.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from peerload.agent.energy import cards
from peerload.agent.runtime import now
from peerload.agent.sensors.cpu_benchmark import stored_speed
from peerload.agent.sensors.host import machine_facts
from peerload.agent.sensors.power import own_curve
from peerload.config.loader import gpu_config
from peerload.core.membership.peers import PeerState
from peerload.environments.builders import kinds
from peerload.model import events
from peerload.model.errors import ConfigError
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, Hello, State
from peerload.model.resources import GPU, Profile
from peerload.wire.peer import Envelopes
from peerload.wire.seal import Sealer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.runtime import AgentInfo, Inbox, RunState
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.model.config import AgentConfig
    from peerload.model.messages import Identity
    from peerload.model.resources import Device, LoadReport
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.revocation import Keyring


class LocalNode:
    """Creates this node's messages about itself; reads the known peers from the core."""

    def __init__(self, info: AgentInfo, cluster: ClusterDirectory, keyring: Keyring, node: Node, inbox: Inbox) -> None:
        self._info = info
        self.cluster = cluster
        self._keyring = keyring
        self._node = node
        self._inbox = inbox
        self.envelopes = Envelopes(cluster.name, info.identity.node, info.identity.boot)

    @property
    def identity(self) -> Identity:
        """Name, boot id and address of this node; the address is empty until `listens_at`."""
        return self._info.identity

    def listens_at(self, address: str) -> None:
        """Set the published `HOST:PORT` of this node."""
        self._info.identity = msgspec.structs.replace(self._info.identity, address=address)
        self._node.state.identity = self._info.identity

    def sealer(self, purpose: str) -> Sealer:
        """A sealer of this start for one purpose; make only one for each purpose."""
        node, boot = self.identity.node, self.identity.boot
        return self._keyring.add(Sealer(self.cluster.key, self.cluster.id, node, boot, purpose=purpose))

    def hello(self, *, stream: bool = False, back: int = 0) -> Hello:
        """The first message on a connection. stream: the connection is a stream, requested as number ``back``."""
        return msgspec.structs.replace(
            self._node.membership.hello(self._report()),
            wall_at=now().wall_s,
            up_s=self._info.up_s(),
            trust=self._keyring.trust.digest,
            stream=stream,
            back=back,
        )

    def state(self) -> State:
        state = self._node.state
        return State(state.identity, state.profile, self._report())

    def _report(self) -> LoadReport:
        """Current load of this node. The core is notified of its publication."""
        report = self._node.sharing.shown()
        self._inbox.put(events.LoadPublished(report))
        return report

    # -- peers ---------------------------------------------------------------------------------------------------------

    def identity_of(self, node: str) -> Identity | None:
        peer = self._node.membership.get(node)
        return None if peer is None else peer.identity

    def alive_peers(self) -> Sequence[Identity]:
        return [peer.identity for peer in self._node.membership if peer.state is PeerState.ALIVE]

    def reachable_peers(self) -> list[str]:
        """The names of the peers that are alive or suspected."""
        states = (PeerState.ALIVE, PeerState.SUSPECT)
        return [peer.identity.node for peer in self._node.membership if peer.state in states]

    def peer_addresses(self) -> Sequence[str]:
        """The addresses of all known peers, including empty ones."""
        return [peer.identity.address for peer in self._node.membership]


def speed_file(config: AgentConfig) -> Path:
    return Path(config.state) / "speed"


def speed_of(config: AgentConfig) -> float | None:
    """The configured speed of this node, or else the measured one; None if there is neither."""
    return config.speed or stored_speed(speed_file(config))


def profile_of(info: AgentInfo, devices: tuple[Device, ...], *, is_issuer: bool) -> Profile:
    """The profile of this machine at the agent's start."""
    config = info.config
    cpus, mem_bytes = machine_facts()
    slots = config.slots
    return Profile(
        node=config.node,
        slots=max(int(cpus), 1) if slots is None else slots,
        cpus=cpus if slots is None else max(cpus, float(slots)),
        mem_bytes=mem_bytes,
        labels=config.label,
        slots_fixed=slots is not None,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        version=int(info.started_at),
        speed=speed_of(config) or 1.0,
        gpus=sum(device.kind == GPU for device in devices),
        devices=devices,
        issuer=is_issuer,
        wake=cards() if config.energy.sleep_after else (),
        power=own_curve(config, round(cpus)),
        builders=kinds(),
        mps=_mps_for(config),
    )


def _mps_for(config: AgentConfig) -> Literal["", "home", "any"]:
    """Tasks that this node runs under MPS. Each guest has a separate account, and MPS serves one user at a time."""
    if gpu_config(config.gpu).mps == "off":
        return ""
    return "home" if config.mode == "system" and config.users == "guest" else "any"


NEWCOMER_S = 60.0
HINT = "start this one with a name of its own:  peerload up --node NAME"
COPY_NOTICE = "another agent with a copy"
COPIES_REPORTED_MAX = 8
"""Maximum number of addresses of copies that are reported and dialled: any member can invent more."""

_log = logging.getLogger("peerload.agent")


@dataclass(eq=False, repr=False)
class DuplicateNames:
    """Reactions of one agent to others with its name."""

    _info: AgentInfo
    _node: Node
    _run: RunState
    _events: EventLog

    def copy_proven(self, other: Identity, up_s: float) -> None:
        """Another agent has proven, by its certificate, that it has this node's name, and it also has this node's database:
        both would run the same tasks. The younger agent ends, with its tasks."""
        info = self._info
        what = (
            f"another agent with a copy of {info.config.state} runs at {other.address}; both would run the same tasks"
        )
        if (info.up_s(), info.identity.boot) < (up_s, other.boot):
            hint = "stop one of the two; a new node has its own state:  peerload up --node NAME --state NEW_DIR"
            self._run.refuse(ConfigError("state", f"{what}, and this one was started later", hint=hint))
            return
        notice = f"{what}. It was started later than this one, and ends"
        if notice not in info.notices:
            info.notices.append(notice)
        _log.error("another agent has a copy of this state directory, and ends: address=%s", other.address)

    def copy_reported(self, other: Identity) -> bool:
        """A message over the broker claims to come from an agent with this node's name and database; any member can send
        that. → True if its address should be dialled, where a certificate would prove its name (`copy_proven`)."""
        info = self._info
        notice = (
            f"{COPY_NOTICE} of {info.config.state} runs at {other.address or 'an unknown address'}, says the broker;"
            " both would run the same tasks: stop one of the two"
        )
        reported = [known for known in info.notices if known.startswith(COPY_NOTICE)]
        if notice in reported or len(reported) >= COPIES_REPORTED_MAX:
            return False
        info.notices.append(notice)
        _log.error("broker reports a copy of this agent: node=%s address=%s", other.node, other.address or "unknown")
        self._events.record("store", "copied", node=other.node, reason=notice)
        return bool(other.address)

    def refused(self, by: str) -> None:
        """The peer at this address refuses this node, because another agent has its name."""
        info, node = self._info, self._node
        name = info.identity.node
        if by in info.refused_by:
            return
        is_newcomer = time.time() - info.started_at < NEWCOMER_S
        has_worked = node.submissions.counter > 0 or node.executor.remote_tasks or len(node.executor.fences) > 0
        if is_newcomer and not has_worked:
            self._run.refuse(ConfigError("node", f"another agent is called {name}, says the peer at {by}", hint=HINT))
            return
        info.add_refusal(by)
        what = f"the peer at {by} refuses this node: another agent is called {name}"
        info.notices[:] = [notice for notice in info.notices if "another agent is called" not in notice]
        info.notices.append(f"{what} (peerload down, then peerload up --node NAME)")
        _log.error("peer refuses the name of this node: node=%s peer=%s hint=%s", name, by, HINT)
