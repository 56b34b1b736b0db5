"""The parts of one agent, put together by `Daemon` and shared by those who carry things between them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.node_info import REFUSED_BY_MAX, NodeInfo, now
from peerload.agent.peers.diagnostics import PeerFacts
from peerload.agent.sensors.device_locks import DeviceLocks

if TYPE_CHECKING:
    from collections import Counter

    from peerload.agent.accounts.as_user import UserServices
    from peerload.agent.accounts.directory_cache import DirectoryCache, DirectoryQueries
    from peerload.agent.completion.completion_jobs import CompletionJobs
    from peerload.agent.completion.saving import OutputSaver
    from peerload.agent.inbox import Inbox
    from peerload.agent.joining.distribution import TrustLink
    from peerload.agent.joining.enrollment import Enrollment
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.mqtt.client import MqttBus
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.membership import Members
    from peerload.agent.requests.exec_in_task import InsideCommands
    from peerload.agent.run_state import RunState
    from peerload.agent.security_events import SecurityEvents
    from peerload.agent.sensors.gpus import Gpus
    from peerload.agent.stdin.stdin_fetch import StdinFetches
    from peerload.agent.stdin.stdin_forwarding import StdinForwarding
    from peerload.agent.stdin.stdin_store import StdinStore
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.event_log import EventLog
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import Outbox
    from peerload.core.node import Node
    from peerload.model.config import AgentConfig
    from peerload.model.instant import Instant
    from peerload.model.messages import Identity
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.tls import Credentials


class Parts:
    """Filled by `Daemon` while it starts, in the order of the attributes; whole before the first event is handled."""

    cluster: ClusterDirectory
    tls: Credentials
    trust: TrustLink
    joining: Enrollment
    disk: DiskSpace
    store: Store
    spool: Spool
    users: UserServices
    inbox: Inbox
    node: Node
    release: Outbox
    journal: EventLog
    launcher: LauncherLink
    inside: InsideCommands
    inputs: StdinStore
    feeding: StdinForwarding
    pulls: StdinFetches
    output: TaskOutputs
    links: PeerLinks
    asked_nodes: DirectoryQueries
    members: Members
    bus: MqttBus | None
    security: SecurityEvents
    directories: DirectoryCache
    chores: CompletionJobs
    saving: OutputSaver
    gpus: Gpus

    def __init__(self, info: NodeInfo, run: RunState) -> None:
        self.info = info
        self.bus = None
        self.peer_facts = PeerFacts()
        self.claims = DeviceLocks(Path(info.config.gpu_claims) if info.config.gpu_claims else None)
        self.run = run

    # What follows is that of `info`, for those who are not given it yet.

    REFUSED_BY_MAX = REFUSED_BY_MAX

    @property
    def config(self) -> AgentConfig:  # noqa: D102
        return self.info.config

    @config.setter
    def config(self, config: AgentConfig) -> None:
        self.info.config = config

    @property
    def identity(self) -> Identity:  # noqa: D102
        return self.info.identity

    @identity.setter
    def identity(self, identity: Identity) -> None:
        self.info.identity = identity

    @property
    def refused_by(self) -> tuple[str, ...]:  # noqa: D102
        return self.info.refused_by

    @refused_by.setter
    def refused_by(self, refused_by: tuple[str, ...]) -> None:
        self.info.refused_by = refused_by

    @property
    def counters(self) -> Counter[str]:  # noqa: D102
        return self.info.counters

    @property
    def notices(self) -> list[str]:  # noqa: D102
        return self.info.notices

    @property
    def origins(self) -> dict[str, str]:  # noqa: D102
        return self.info.origins

    @property
    def started_at(self) -> float:  # noqa: D102
        return self.info.started_at

    def up_s(self) -> float:  # noqa: D102
        return self.info.up_s()

    def now(self) -> Instant:  # noqa: D102
        return now()
