"""This node as its peers see it: identity, profile, Hello and State, envelopes and sealers; its address, and its name.

A machine may get another address by a move to another network or a new DHCP lease. If `peerload join` or `invite` chose the
address to listen at, another one is chosen when the machine does not have it any more, and the agent restarts in its
process; tasks go on. An address from a flag, a variable or a file is left alone.

Another agent may have this node's name. A new agent that is refused ends: it started less than NEWCOMER_S ago and never had
a task, so nothing is lost. Any other stays, cut off from the peers that refuse it, and reports that: no peer's word ends an
agent that is at work. Of two agents with copies of one state directory, which have proven that to each other, the younger
ends.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.energy.power_down import cards
from peerload.agent.event_loop import next_tick
from peerload.agent.node_info import now
from peerload.agent.run_state import Ending
from peerload.agent.sensors.cpu_benchmark import stored_speed
from peerload.agent.sensors.host import machine_facts
from peerload.agent.sensors.power import own_curve
from peerload.config.loader import gpu_config
from peerload.core.membership.membership import PeerState
from peerload.environments.builders import kinds
from peerload.model import events
from peerload.model.devices import GPU
from peerload.model.errors import ConfigError
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, Envelope, Hello, State
from peerload.model.resources import Profile
from peerload.security import node_identity_file
from peerload.security.address import join_address, parse_address, reachable, source_address
from peerload.wire.seal import Sealer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.agent.inbox import Inbox
    from peerload.agent.node_info import AgentInfo
    from peerload.agent.run_state import RunState
    from peerload.agent.store.event_log import EventLog
    from peerload.core.node import Node
    from peerload.model.config import AgentConfig
    from peerload.model.devices import Device
    from peerload.model.load import LoadReport
    from peerload.model.messages import Identity, Message
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.revocation import Keyring


class LocalNode:
    """Makes what this node sends about itself, and knows from the core which peers there are."""

    def __init__(self, info: AgentInfo, cluster: ClusterDirectory, keyring: Keyring, node: Node, inbox: Inbox) -> None:
        self._info = info
        self.cluster = cluster
        self._keyring = keyring
        self._node = node
        self._inbox = inbox
        self._sequence = 0

    @property
    def identity(self) -> Identity:
        """Name, boot id and address of this node; the address is empty until `listens_at`."""
        return self._info.identity

    def listens_at(self, address: str) -> None:
        """Set the published `HOST:PORT` of this node."""
        self._info.identity = msgspec.structs.replace(self._info.identity, address=address)
        self._node.state.identity = self._info.identity

    def envelope(self, message: Message, dst: str = "", dst_boot: str = "") -> Envelope:
        """Put a message into an envelope with the next sequence number of this start."""
        self._sequence += 1
        return Envelope(
            v=PROTOCOL_MAX,
            cluster=self.cluster.name,
            src=self.identity.node,
            src_boot=self.identity.boot,
            seq=self._sequence,
            body=message,
            dst=dst,
            dst_boot=dst_boot,
        )

    def sealer(self, purpose: str) -> Sealer:
        """A sealer of this start for one purpose; to be made once for each."""
        node, boot = self.identity.node, self.identity.boot
        return self._keyring.add(Sealer(self.cluster.key, self.cluster.id, node, boot, purpose=purpose))

    def hello(self, *, stream: bool = False, back: int = 0) -> Hello:
        """The first message on a connection. stream: it is for a stream, which the peer requested as number ``back``."""
        return msgspec.structs.replace(
            self._node.membership.hello(self._report()),
            wall_at=now().wall_s,
            up_s=self._info.up_s(),
            trust=self._keyring.trust.digest,
            stream=stream,
            forwards=True,
            dials_back=True,
            back=back,
        )

    def state(self) -> State:
        """The message that a broker retains."""
        state = self._node.state
        return State(state.identity, state.profile, self._report())

    def _report(self) -> LoadReport:
        """This node's load now. The core hears that it was published."""
        report = self._node.sharing.shown()
        self._inbox.put(events.LoadTold(report))
        return report

    # -- peers ---------------------------------------------------------------------------------------------------------

    def identity_of(self, node: str) -> Identity | None:
        """The identity of a peer, as far as the core knows it."""
        peer = self._node.membership.get(node)
        return None if peer is None else peer.identity

    def alive_peers(self) -> Sequence[Identity]:
        """The peers that are alive."""
        return [peer.identity for peer in self._node.membership if peer.state is PeerState.ALIVE]

    def reachable_peers(self) -> list[str]:
        """The names of the peers that are alive or only suspected."""
        states = (PeerState.ALIVE, PeerState.SUSPECT)
        return [peer.identity.node for peer in self._node.membership if peer.state in states]

    def peer_addresses(self) -> Sequence[str]:
        """The addresses of all known peers; empty ones, too."""
        return [peer.identity.address for peer in self._node.membership]


def speed_file(config: AgentConfig) -> Path:
    """The file with the measured speed of this machine."""
    return Path(config.state) / "speed"


def speed_of(config: AgentConfig) -> float | None:
    """The configured speed of this node, else the measured one; None if there is neither."""
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
        mps="" if gpu_config(config.gpu).mps == "off" else "any" if config.mode == "user" else "home",
    )


CHECK_EVERY_S = 4.0
GONE_FOR = 2
"""Checks in a row that have to agree: an address is missing for a moment while its interface is configured."""

_log = logging.getLogger("peerload.peer")


def followed(config: AgentConfig, origins: Mapping[str, str]) -> AgentConfig:
    """The settings; if the address that joining chose is gone, with another address of this machine."""
    address = _moved(config, origins, config.peer)
    if not address:
        return config
    _log.warning("listen address changed: old=%s new=%s", config.listen, address)
    _save(config, address)
    return msgspec.structs.replace(config, listen=address)


@dataclass(eq=False, repr=False)
class AddressWatch:
    """Restarts the agent when the address of this machine has changed."""

    _info: AgentInfo
    _local: LocalNode
    _run: RunState
    _events: EventLog

    async def run(self) -> None:
        """Check until the agent restarts."""
        config, warned, seen = self._info.config, False, 0
        while True:
            await next_tick(CHECK_EVERY_S)
            others = [address for address in self._local.peer_addresses() if address]
            address = _moved(config, self._info.origins, [*others, *config.peer]) or self._seen_otherwise()
            seen = seen + 1 if address else 0
            if seen >= GONE_FOR and not self._run.is_stopping:
                old = self._info.identity.address
                _log.warning("restarting: listen address changed: old=%s new=%s", old, address)
                self._events.record("agent", "restarting", reason=f"its address was {old} and is {address}")
                self._run.stop(Ending.RESTART)
                return
            if not warned and not address and is_gone(config.listen):
                warned = True
                _log.warning("listen address is gone from this machine; no peer can reach this node: %s", config.listen)

    def _seen_otherwise(self) -> str:
        """The address where a node that listens at every address is found now, if it is not the published one; else
        empty."""
        config, published = self._info.config, self._info.identity.address
        ip = _ip(config.listen)
        if ip is None or not ip.is_unspecified or config.advertise:
            return ""
        try:
            found = join_address(reachable(str(ip)), int(published.rpartition(":")[2]))
        except OSError:
            return ""  # no network at all: it may be back with the same address
        return found if found != published else ""


def is_gone(listen: str) -> bool:
    """True if this is a numeric `HOST:PORT` that no interface of this machine has."""
    ip = _ip(listen)
    if ip is None or ip.is_unspecified:
        return False
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET  # noqa: PLR2004 -- IPv6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return True
    return False


def _moved(config: AgentConfig, origins: Mapping[str, str], others: Iterable[str]) -> str:
    """The address to listen at if the one that joining chose is gone and there is another; else empty."""
    if Path(origins.get("listen", "")).name != node_identity_file.NAME or not is_gone(config.listen):
        return ""
    ip, port = _ip(config.listen), config.listen.rpartition(":")[2]
    hosts = [host for other in others if (host := _ip(other)) is not None and host.version == ip.version] if ip else []
    for host in hosts:
        if (found := _towards(str(host))) and not ipaddress.ip_address(found).is_loopback:
            return join_address(found, _free(found, int(port)))
    return ""


def _towards(host: str) -> str:
    """The source address of packets to that host; empty without a route."""
    try:
        return source_address(host)
    except OSError:
        return ""


def _free(host: str, port: int) -> int:
    """This port if it is free there, else 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                return 0
    return port


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(parse_address("listen", address, loopback_only=False)[0])
    except (ValueError, ConfigError):
        return None


def _save(config: AgentConfig, address: str) -> None:
    """Write the address down for the next start."""
    try:
        found = node_identity_file.read(Path(config.state))
        if found is not None:
            node_identity_file.write(Path(config.state), found._replace(listen=address))
    except (OSError, ConfigError) as error:
        _log.warning("cannot save the listen address: address=%s error=%s", address, error)


NEWCOMER_S = 60.0
HINT = "start this one with a name of its own:  peerload up --node NAME"
COPY_NOTICE = "another agent with a copy"
COPIES_REPORTED_MAX = 8
"""Addresses of copies that are reported and dialled: any member can make up more."""

_agent_log = logging.getLogger("peerload.agent")


@dataclass(eq=False, repr=False)
class DuplicateNames:
    """Reactions of one agent to others with its name."""

    _info: AgentInfo
    _node: Node
    _run: RunState
    _events: EventLog

    def copy_proven(self, other: Identity, up_s: float) -> None:
        """Another agent has proven, by its certificate, that it has this node's name, and it has this node's database, too:
        both would run the same tasks. The younger of the two ends, with its tasks."""
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
        _agent_log.error("another agent has a copy of this state directory: address=%s; it ends", other.address)

    def copy_reported(self, other: Identity) -> bool:
        """A message over the broker claims to come from an agent with this node's name and database; any member can send
        that. Returns whether its address is to be dialled, where a certificate proves its name (`copy_proven`)."""
        info = self._info
        notice = (
            f"{COPY_NOTICE} of {info.config.state} runs at {other.address or 'an unknown address'}, says the broker;"
            " both would run the same tasks: stop one of the two"
        )
        reported = [known for known in info.notices if known.startswith(COPY_NOTICE)]
        if notice in reported or len(reported) >= COPIES_REPORTED_MAX:
            return False
        info.notices.append(notice)
        _agent_log.error("%s", notice)
        self._events.record("store", "copied", node=other.node, reason=notice)
        return bool(other.address)

    def refused(self, by: str) -> None:
        """The peer at this address refuses this node, because another agent has its name."""
        info, node = self._info, self._node
        name = info.identity.node
        if by in info.refused_by:
            return
        is_newcomer = time.time() - info.started_at < NEWCOMER_S
        has_worked = node.submissions.counter > 0 or node.executor.guests or len(node.executor.fences) > 0
        if is_newcomer and not has_worked:
            self._run.refuse(ConfigError("node", f"another agent is called {name}, says the peer at {by}", hint=HINT))
            return
        info.add_refusal(by)
        what = f"the peer at {by} refuses this node: another agent is called {name}"
        info.notices[:] = [notice for notice in info.notices if "another agent is called" not in notice]
        info.notices.append(f"{what} (peerload down, then peerload up --node NAME)")
        _agent_log.error("%s; %s", what, HINT)
