"""The agent: one inbox, one consumer that owns the `Node`, and the I/O around it; its life from start to stop in one file.

Sockets, MQTT, timers, process exits and sensors only put events into the inbox; what is done with them is
`consumer.py`'s. Nothing here decides anything about tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from peerload import __version__
from peerload.agent import exit_reason, memory
from peerload.agent.accounts.as_user import TaskUser, UserServices
from peerload.agent.accounts.directory_cache import DirectoryCache, DirectoryQueries
from peerload.agent.completion.completion_jobs import CompletionJobs
from peerload.agent.completion.notify_hook import NotifyHooks
from peerload.agent.completion.saving import OutputSaver
from peerload.agent.consumer import Consumer
from peerload.agent.control.authorization import Authorization
from peerload.agent.control.core_requests import CoreRequests, Decisions
from peerload.agent.control.local_socket import LocalSocket
from peerload.agent.control.quotas import Quotas
from peerload.agent.control.task_ids import TaskIds
from peerload.agent.effects import (
    PeerEffects,
    Performer,
    RecordEffects,
    ResultEffects,
    TaskEffects,
    TaskStarter,
    Timers,
)
from peerload.agent.event_sources import (
    BusEvents,
    BusPeers,
    DiskEvents,
    ExitRecords,
    ExitSettler,
    LauncherEvents,
    PeerEvents,
    PeerMessages,
)
from peerload.agent.forwarding.client import ForwardedRequests
from peerload.agent.forwarding.request_router import RequestRouter
from peerload.agent.forwarding.server import ForwardServer
from peerload.agent.inbox import Inbox
from peerload.agent.joining.distribution import TrustLink
from peerload.agent.joining.enrollment import Enrollment
from peerload.agent.launcher.client import LauncherLink
from peerload.agent.launcher.process import LauncherProcess, LauncherService
from peerload.agent.node_info import NodeInfo
from peerload.agent.output.output import TaskOutputs
from peerload.agent.output.spool import Spool
from peerload.agent.parts import Parts
from peerload.agent.peers import own_address
from peerload.agent.peers.backpressure import PeerBackpressure
from peerload.agent.peers.duplicate_node_name import copied, heard_of_copy, name_taken
from peerload.agent.peers.links import PeerLinks
from peerload.agent.peers.local_node import LocalNode
from peerload.agent.peers.membership import Members
from peerload.agent.preflight import check_addresses, check_places
from peerload.agent.recorder import Recorder
from peerload.agent.requests.attach import AttachRequests
from peerload.agent.requests.cancel_wait import CancelWaits
from peerload.agent.requests.clean import CleanRequests
from peerload.agent.requests.client_events import ClientEvents
from peerload.agent.requests.dispatch import Dispatcher, Queries, TaskRequests
from peerload.agent.requests.durable_reads import DurableReads
from peerload.agent.requests.event_stream import EventRequests
from peerload.agent.requests.exec_in_task import ExecRequests, InsideCommands
from peerload.agent.requests.live_usage import LiveUsage
from peerload.agent.requests.node_commands import NodeCommands
from peerload.agent.requests.output_stream import OutputRequests, OutputSource
from peerload.agent.requests.overview import OverviewCache, OverviewViews
from peerload.agent.requests.server import RequestServer
from peerload.agent.requests.show import ShowRequests
from peerload.agent.requests.status import StatusRequests
from peerload.agent.requests.submissions import SubmissionChecks, Submissions
from peerload.agent.requests.task_commands import TaskCommands
from peerload.agent.requests.task_lists import TaskLists
from peerload.agent.requests.task_watch import TaskWatches
from peerload.agent.requests.wait_request import TaskEnds, WaitRequests
from peerload.agent.requests.why import WhyRequest
from peerload.agent.run_state import Ending, RunState
from peerload.agent.security_events import SecurityEvents
from peerload.agent.sensors.cpu_benchmark import find_out
from peerload.agent.sensors.gpus import NodeGpuHost, node_gpus
from peerload.agent.sensors.host import Sensors
from peerload.agent.sensors.own_use import OwnUse
from peerload.agent.stdin.stdin_fetch import StdinFetches
from peerload.agent.stdin.stdin_forwarding import StdinForwarding
from peerload.agent.stdin.stdin_serve import StdinServer
from peerload.agent.stdin.stdin_store import StdinStore
from peerload.agent.store import claim, damage_report, state_origin
from peerload.agent.store.disk_space import DiskSpace
from peerload.agent.store.event_log import EventLog
from peerload.agent.store.retention import Retention, TaskRemover
from peerload.agent.store.schema import DATABASE
from peerload.agent.store.store import Store
from peerload.agent.store.write_ahead import Outbox
from peerload.agent.systemd.health import HealthCheck
from peerload.agent.systemd.notify import ServiceManager
from peerload.agent.systemd.service import Service, SettingsReload
from peerload.agent.thread_pool import Workers
from peerload.agent.views.agent import AgentView
from peerload.agent.views.cluster import ClusterView
from peerload.agent.views.diagnostics import DiagnosticsView, StorageView
from peerload.agent.views.node import NodesView
from peerload.agent.views.peer_links import PeerLinksView
from peerload.config import loader
from peerload.core.node import Node
from peerload.model import events
from peerload.model.config import CoreConfig
from peerload.model.errors import SlowDown, StoreError
from peerload.model.gossip import PRESETS
from peerload.model.messages import Identity
from peerload.model.task import TaskState
from peerload.policy import registry
from peerload.security import cluster_dir, node_identity_file
from peerload.security.broker_tls import BrokerTls
from peerload.security.private_files import IN_THE_STATE, directory_in, machine_boot_id, private_directory
from peerload.security.revocation import Trust
from peerload.security.tls import Credentials
from peerload.wire import recording

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from peerload.agent.store.recovery import Recovered
    from peerload.agent.systemd.service import Load
    from peerload.model.config import AgentConfig
    from peerload.policy.preset import PolicySet

log = logging.getLogger("peerload.agent")

RESTART = -1
"""What `Daemon.run` returns when the agent is to be started again."""
FAR_ANSWER_S = 1.0
"""Where nodes are far apart (`gossip = "wan"`) answers are waited for longer than a way there and back takes."""
STOP_S_MAX = 5.0
"""How long a polite stop may take before what is left is cut."""


class Daemon:
    """One agent, from start to stop. `run` returns its exit code."""

    launcher_events: LauncherEvents
    peer_events: PeerEvents
    output: TaskOutputs

    def __init__(
        self,
        config: AgentConfig,
        gpu_library: Any = None,  # noqa: ANN401 -- a module without types
        origins: Mapping[str, str] | None = None,
        files_max: int = 0,
        manager: ServiceManager | None = None,
        load: Load | None = None,
    ) -> None:
        """gpu_library: what speaks like `pynvml`; None: this machine's driver is looked for. origins: where each setting
        comes from. files_max: how many files a task may have open unless it asks for more, 0 = as many as we. manager: the
        service manager that started this process, None: nobody did. load: reads the settings again."""
        self.config = config
        self.core_config = CoreConfig(
            lease_s=config.lease_s,
            gossip=PRESETS[config.gossip],
            counts_foreign=config.load.foreign == "count",
            gpu=loader.gpu_config(config.gpu),
        )
        if config.gossip == "wan":
            self.core_config = msgspec.structs.replace(
                self.core_config, probe_timeout_s=FAR_ANSWER_S, answer_wait_s=FAR_ANSWER_S
            )
        self._gpu_library = gpu_library
        self._files_max = files_max
        self._manager = manager or ServiceManager({})
        self._load = load
        self.info = NodeInfo(config, origins)
        self.run_state = RunState()
        self.parts = Parts(self.info, self.run_state)
        self._is_up = False
        self._claim: socket.socket | None = None
        self._damage: list[str] = []

    # -- life ----------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start, serve until told to stop, stop. Raises PeerloadError if it cannot start."""
        loop = asyncio.get_running_loop()
        workers = Workers()
        loop.set_default_executor(workers)
        try:
            return await self._run(loop)
        except Exception:
            if self._is_up and self._has_lost_its_state:  # whatever it was that needed a file there
                raise self._state_is_gone() from None
            raise
        finally:
            workers.shutdown()
            loop.set_default_executor(cast("Any", None))  # to end it the loop would make one more thread

    async def _run(self, loop: asyncio.AbstractEventLoop) -> int:
        state = private_directory(Path(self.config.state))
        state_origin.check(state)
        for name in IN_THE_STATE:
            directory_in(state, name)
        self.parts.cluster = cluster_dir.find(self.config.cluster, os.environ)
        check_addresses(self.config, loopback_only=self.parts.cluster.is_local)
        preset = registry.preset_source(self.config.policy)
        policies = registry.build_preset(*preset.tables())
        self.disk = DiskSpace(state)
        self.disk.prepare()
        self.store = Store(
            state / DATABASE, self.config.node, self.disk.reserve, output_bytes_max=self.config.output_bytes_max
        )
        traces = damage_report.traces(state)
        self.store.open()
        try:
            self._claim = claim.claim(self.store.store_id, state)
            if await asyncio.to_thread(claim.end_strange_launcher, self.store.store_id, state / "launcher"):
                self._damage.append(damage_report.begin_as_copy(self.store, self.config))
            await check_places(self.config, self._manager, loopback_only=self.parts.cluster.is_local)
            if notice := damage_report.begin_anew(self.store, self.config, traces):
                self._damage.append(notice)
            self.info.identity = Identity(
                node=self.config.node,
                boot=secrets.token_hex(8),
                machine_boot=machine_boot_id(),
                store=self.store.store_id,
                incarnation=self.store.next_incarnation(),
            )
            await self._build(loop, state, policies, preset)
            await self._serve(loop)
        finally:
            if self._claim is not None:
                self._claim.close()
            self.store.close()
            self.parts.claims.close()
        if self.run_state.refusal is not None:
            exit_reason.leave(self.config.socket, self.run_state.refusal)
            raise self.run_state.refusal
        if self.run_state.has_failed and self._has_lost_its_state:
            raise self._state_is_gone()
        if self.run_state.ending is Ending.RESTART:
            return RESTART
        return int(self.run_state.ending is Ending.FAILED)

    @property
    def _has_lost_its_state(self) -> bool:
        return not (Path(self.config.state) / DATABASE).exists()

    def _state_is_gone(self) -> StoreError:
        """Somebody has removed the state directory: nothing can be kept any more, and what was kept is lost."""
        pid = self.launcher.pid
        end = f"to end the tasks that still run:  kill {pid}        " if pid and self.config.mode != "system" else ""
        error = StoreError(
            f"the state directory {self.config.state} is gone",
            why="it was removed, with all that this node knew of its tasks; the agent stops",
            hint=f"{end}a new agent:  peerload up",
        )
        exit_reason.leave(self.config.socket, error)
        return error

    def _prove(self, state: Path) -> None:
        """What this node proves itself with, and whom it believes."""
        life = timedelta(seconds=self.config.certificate_s)
        self.parts.tls = tls = Credentials(self.parts.cluster, self.config.node, state / "tls", life)
        self.parts.trust = TrustLink(self.parts, Trust(self.parts.cluster, state / "trust"))
        if tls.was_elsewhere:
            name = self.parts.cluster.name
            self.info.notices.append(
                f"its state was last used in another cluster; now it is {name} (another: peerload up --cluster DIR)"
            )
        tls.refuses = self.parts.trust.trust.refuses
        tls.ask_for_another = self.parts.trust.ask_for_another
        if tls.has_ended(datetime.now(UTC)):
            notice = "this node's certificate has ended: it works alone until it is let in anew (peerload invite)"
            self.info.notices.append(notice)
            log.error("%s", notice)

    async def _build(  # noqa: PLR0915 -- one line a part
        self, loop: asyncio.AbstractEventLoop, state: Path, policies: PolicySet, preset: registry.PresetSource
    ) -> None:
        """Build the parts of the agent, each from those before it. Nothing runs yet."""
        parts, config, info, run = self.parts, self.config, self.info, self.run_state

        # Durability
        self.store.start_writer(
            lambda done: _threadsafe(loop, lambda: [call() for call in done]),
            lambda error: _threadsafe(loop, lambda: run.fail(f"the store failed: {error}")),
        )
        self.outbox = outbox = Outbox(self.store, run)
        self.journal = EventLog(outbox, run)
        parts.security = SecurityEvents(info.counters, self.journal)
        parts.disk, parts.store, parts.release, parts.journal = self.disk, self.store, outbox, self.journal

        # Decisions
        self.inbox = parts.inbox = Inbox(loop, config.inbox_max)
        self._prove(state)
        parts.gpus = node_gpus(config, self.inbox.put, parts.claims, self._gpu_library)
        await parts.gpus.find()
        self.introduction = LocalNode(parts)
        profile = self.introduction.profile()
        seed = secrets.randbits(recording.SEED_BITS)
        chance = random.Random(seed)  # noqa: S311 -- draws peers and nonces, guards no secret
        self.node = parts.node = Node(self.core_config, policies, info.identity, profile, chance)

        # Processes, their input and output
        self.spool = parts.spool = Spool(state, config.output_bytes_max)
        process = (
            LauncherService(Path(config.launcher), config.node)
            if config.mode == "system"
            else LauncherProcess(state / "launcher", self._files_max, self.store.store_id)
        )
        self.launcher = parts.launcher = LauncherLink(
            process,
            lambda event: self.launcher_events.received(event),  # noqa: PLW0108 -- built later
            config.output_bytes_max,
            run.fail,
        )
        parts.links = links = PeerLinks(
            identity=info.identity,
            tls=parts.tls,
            hello=self.introduction.hello,
            envelope=self.introduction.envelope,
            deliver=lambda src, message: self.peer_events.from_peer(src, message),  # noqa: PLW0108 -- built later
            met=lambda hello: self.peer_events.met(hello),  # noqa: PLW0108 -- built later
            unreachable=lambda node, reason: self.inbox.put(events.PeerUnreachable(node, reason)),
            send_failed=lambda dst, message: self.peer_events.send_failed(dst, message),  # noqa: PLW0108 -- built later
            serve_output=lambda src, request: self.output.serve(src, request),  # noqa: PLW0108 -- built later
            counters=info.counters,
            name_taken=lambda by: name_taken(parts, by),
            copied=lambda other, up_s: copied(parts, other, up_s),
            broken=parts.security.tell,
            backlog=PeerBackpressure(self.inbox),
        )
        parts.directories = DirectoryCache(lambda directory: self.inbox.put(events.DirectoryFound(directory)))
        parts.users = users = UserServices(info, self.launcher, parts.directories, parts.security)
        self.output = parts.output = TaskOutputs(self.spool, self.node, links, self.launcher.signal)
        parts.inputs = inputs = StdinStore(self.spool.directory)
        self.pulls = parts.pulls = StdinFetches(self.launcher, links, self.spool, run)
        stdin = StdinForwarding(self.node, self.launcher, self.inbox, self.spool, inputs, self.pulls)
        parts.feeding = stdin
        self.input_server = StdinServer(self.node, inputs, stdin, run)
        links.streams.inputs = self.input_server

        # After the end of a task
        self.saving = parts.saving = OutputSaver(info, self.node, self.store, self.spool, self.output, users, run)
        self.notices = NotifyHooks(info, self.store, self.launcher, self.spool, users)
        self.jobs = parts.chores = CompletionJobs(info, self.store, self.journal, run, self.saving, self.notices)

        # Other nodes
        parts.asked_nodes = DirectoryQueries(links.send)
        self.members = parts.members = Members(parts, self.introduction.sealer("gossip"), state / "addresses")
        links.whereabouts = self.members.identity_of
        parts.joining = Enrollment(parts)
        bus_peers = BusPeers()
        self.peer_messages = PeerMessages(info, self.inbox, self.node, self.spool, users, parts.security, run)
        self.peer_events = PeerEvents(
            info, self.inbox, parts.trust, links, self.members, self.peer_messages, parts.asked_nodes, parts.peer_facts
        )
        bus_events = BusEvents(info, self.inbox, parts.trust, links, self.members, parts.security, bus_peers)
        if config.mqtt:
            from peerload.agent.mqtt.client import MqttBus  # noqa: PLC0415 -- a tenth of a start, for those that have a broker

            parts.bus = MqttBus(
                urls=config.mqtt,
                cluster=parts.cluster.name,
                identity=info.identity,
                sealer=self.introduction.sealer("mqtt"),
                envelope=self.introduction.envelope,
                deliver=bus_events.received,
                on_change=lambda connected: self.inbox.put(events.BusChanged(connected)),
                state=self.introduction.state,
                counters=info.counters,
                broken=parts.security.tell,
                state_every_s=config.mqtt_state_every_s,
                tls=BrokerTls(config.mqtt_ca, parts.cluster.authority.certificate, parts.tls.file),
                password_file=config.mqtt_password_file,
                copied=lambda other: heard_of_copy(parts, other),
            )

        # Clients
        parts.inside = InsideCommands(self.launcher, self.spool)
        clients = self._build_requests()

        # Events in, actions out
        self.exits = ExitRecords(info, self.spool, self.disk)
        self.settler = ExitSettler(self.exits, self.inbox, self.node, self.pulls, self.output, parts.gpus, run)
        self.launcher_events = LauncherEvents(self.inbox, self.settler, stdin, (self.notices, parts.inside))
        self.disk_events = DiskEvents(info, self.inbox, self.journal, run)
        starter = TaskStarter(info, self.node, self.spool, stdin, self.launcher, self.settler)
        peers = PeerEffects(info, self.inbox, self.node, links, self.members, parts.bus, bus_peers)
        self.performer = Performer(
            outbox,
            Timers(self.inbox, outbox),
            RecordEffects(self.store, outbox, self.inbox, self.journal, parts.security, self.jobs, run),
            TaskEffects(starter, self.launcher, stdin, self.pulls, self.spool, self.output, parts.gpus),
            peers,
            ResultEffects(info, self.spool, self.output, self.inbox, peers, clients, run),
            clients,
        )
        self._recorded = recording.Started(
            version=__version__,
            config=self.core_config,
            preset=preset.name,
            preset_text=preset.text,
            preset_directory=preset.base,
            identity=info.identity,
            profile=profile,
            seed=f"{seed:x}",
        )

    def _build_requests(self) -> ClientEvents:
        """Build what serves requests: what waits for answers of the core first, the socket last."""
        parts, info, node = self.parts, self.info, self.parts.node
        security, store, spool, own = parts.security, parts.store, parts.spool, self.config.node
        task_ids = TaskIds(store, own)
        reads = DurableReads(store, parts.release, parts.journal)
        access = Authorization(self.config, store, node.executor, security)
        quotas = Quotas(self.config, store, security)
        core, decisions, watches = CoreRequests(parts.inbox), Decisions(), TaskWatches()
        attach = AttachRequests(core, task_ids, parts.inputs, parts.feeding, parts.disk, node)
        cancel_waits = CancelWaits(core, node)
        clients = ClientEvents(core, decisions, watches, attach, cancel_waits, parts.saving, parts.output)
        remover = TaskRemover(store, spool, node, parts.output, clients, parts.run)
        self.retention = Retention(info, store, parts.disk, remover, parts.output, parts.journal)
        # Views.
        cluster = ClusterView(self.config, parts.cluster, parts.trust, parts.tls)
        links = PeerLinksView(info, parts.links, parts.peer_facts, parts.bus, cluster)
        nodes = NodesView(node, parts.gpus, cluster)
        agent = AgentView(info, node, parts.launcher, parts.gpus, cluster, links)
        storage = StorageView(own, parts.disk, store, self.retention)
        diagnostics = DiagnosticsView(node, parts.launcher, storage, cluster, links)
        # Verbs.
        checks = SubmissionChecks(access, quotas, parts.users, parts.disk, parts.asked_nodes, node)
        source = OutputSource(info, node, parts.output, spool)
        ends = TaskEnds(store, spool, parts.chores, self.config.output_bytes_max)
        tasks = TaskRequests(
            Submissions(core, checks, reads, task_ids, parts.inputs, attach, node),
            TaskCommands(core, reads, task_ids, cancel_waits, access, node),
            CleanRequests(remover, reads, task_ids, node),
            WaitRequests(reads, task_ids, watches, quotas, ends),
            OutputRequests(reads, task_ids, watches, source, node),
            ExecRequests(parts.inside, node, task_ids, parts.output, parts.inputs, parts.feeding, parts.disk),
            attach,
        )
        queries = Queries(
            reads,
            TaskLists(reads, task_ids, access, quotas, spool, node),
            ShowRequests(reads, task_ids, quotas, spool, node, decisions),
            WhyRequest(node, store, task_ids, decisions, cluster),
            LiveUsage(node, parts.launcher, task_ids),
            EventRequests(reads, task_ids, access, own),
            OverviewCache(node, access, store, OverviewViews(agent, nodes, cluster)),
        )
        status = StatusRequests(info, node, store, parts.inbox, agent, nodes, diagnostics)
        dispatcher = Dispatcher(
            tasks, queries, status, NodeCommands(core, node, parts.run, parts.journal), parts.joining
        )
        # Clients.
        self.forwards = ForwardedRequests(parts.links, node.membership)
        router = RequestRouter(dispatcher, self.forwards, task_ids, access, store, node, parts.run)
        server = RequestServer(access, quotas, router, dispatcher, info, security, parts.run)
        self.forward_server = parts.links.streams.forwards = ForwardServer(server, access)
        self.socket = LocalSocket(self.config, server, access, quotas, security, parts.launcher)
        return clients

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        launcher = self.launcher_events.without_own(await self.launcher.start())
        ended = await self.exits.settled(launcher.ended)  # nobody may rely on a result before its output is on disk
        try:
            await self._serve_clients_and_peers(loop, msgspec.structs.replace(launcher, ended=ended))
        except BaseException:
            if not self._is_up:  # a start that failed leaves nothing behind
                if not launcher.running:
                    await self.launcher.stop_all()
                await self.launcher.close()
            raise

    async def _serve_clients_and_peers(self, loop: asyncio.AbstractEventLoop, launcher: events.LauncherReady) -> None:
        parts = self.parts
        kept = await self._recovered()
        address = await self.members.listen()
        self.node.state.identity = self.info.identity = parts.links.identity  # its address is known by now
        self.output.adopt(launcher.running)
        self._begin(kept, launcher)
        if self.disk.state != "ok":
            self.disk_events.changed(self.disk.state, "at the agent's start")
        async with asyncio.TaskGroup() as group:
            own_use = OwnUse(
                lambda: (self.launcher.pid, self.launcher.run),
                lambda: bool(self.node.ledger.running),
            )
            host = Sensors(self.inbox.put, own_use.seconds)
            work = (
                host.run(),
                parts.gpus.run(NodeGpuHost(self.node.ledger, self._gpu_changed)),
                self.disk.watch(self.disk_events),
                parts.tls.keep_valid(),
                self.retention.run(),
                self.jobs.run(),
                own_address.watch(parts),
                memory.watch(self.node),
            )
            background = [group.create_task(one) for one in work]
            if self.introduction.speed() is None:
                background.append(group.create_task(find_out(self.introduction.speed_file, self.inbox.put)))
            if self.parts.bus is not None:
                background.append(group.create_task(self.parts.bus.run()))
            self.parts.trust.start()
            self.members.start()
            await self.socket.start(self._manager.listener(self.config.socket))
            exit_reason.forget(self.config.socket)
            background.append(group.create_task(self.socket.watch()))
            background.append(group.create_task(self._serves(loop, address).run()))
            await self.run_state.stopping()
            is_restart = self.run_state.ending is Ending.RESTART
            (self._manager.reloading if is_restart else self._manager.stopping)()
            await self._wind_down()
            for task in background:
                task.cancel()

    def _gpu_changed(self, state: str, words: str) -> None:
        self.journal.happened("gpu", state, reason=words)

    def _serves(self, loop: asyncio.AbstractEventLoop, address: str) -> Service:
        """Clients and peers find it from here on → what it owes whoever runs it as a service."""
        self._is_up = True
        parts = self.parts
        settings = (
            SettingsReload(self._load, self.info, parts.tls, parts.trust, parts.journal)
            if self._load is not None
            else None
        )
        health = HealthCheck(self.config.socket, parts.store, parts.launcher)
        service = Service(self._manager, health, self.info, parts.node, settings)
        service.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.run_state.stop)
        self.launcher.tell()
        self.notices.forget_strangers()
        log.info("node %s is up: %s, peers reach it at %s", self.config.node, self.config.socket, address)
        self.journal.happened(
            "agent", "started", reason=f"peerload {__version__}, incarnation {self.info.identity.incarnation}"
        )
        return service

    async def _recovered(self) -> Recovered:
        """What was durable; of the tasks that wait, whether their directories are here now. Those that cannot be looked
        at for too many that hang count as here: a start that fails says so."""
        kept = self.store.recover()
        self.info.notices += damage_report.report(self._damage, self.store, kept, self.journal)
        here: dict[tuple[TaskUser, bytes], bool] = {}
        of = {id(row): (self.parts.users.submitter(row.spec, row.terms), row.spec.directory) for row in kept.tasks}
        for row in kept.tasks:
            whose, directory = of[id(row)]
            if row.record.state is TaskState.QUEUED and (whose, directory) not in here:
                here[whose, directory] = True
                with contextlib.suppress(SlowDown):
                    here[whose, directory] = await self.parts.users.admitted(row.spec, row.terms)
        rows = (
            msgspec.structs.replace(row, directory_here=False) if not here.get(of[id(row)], True) else row
            for row in kept.tasks
        )
        return msgspec.structs.replace(kept, tasks=tuple(rows))

    def _begin(self, kept: Recovered, launcher: events.LauncherReady) -> None:
        """Have the core take up what was durable, and what runs, as its first event."""
        recorder = None
        if self.config.record:
            started = msgspec.structs.replace(self._recorded, identity=self.info.identity)
            recorder = Recorder(self.config.record, started)
            log.info("every event and decision is recorded in %s, tasks' variables too", self.config.record)
        self.recorder = recorder
        consumer = Consumer(
            self.node, self.performer, self.outbox, self.run_state, recorder, validates=self.config.debug_validate
        )
        self.inbox.start(consumer.consume)
        self.inbox.put(
            events.AgentStarted(
                tasks=kept.tasks,
                executions=kept.executions,
                floors=kept.floors,
                counter=kept.counter,
                running=launcher.running,
                ended=launcher.ended,
                frozen=launcher.frozen,
                past=kept.past,
                drained=kept.drained,
                known=self.members.known,
                seeds=self.config.peer,
                fates=kept.fates,
                groups=kept.groups,
                commits_lost=self.store.lost is not None,
                revoked=self.parts.trust.trust.revoked_nodes(),
                attempts_from=kept.attempts_from,
                attempts_up_to=kept.attempts_up_to,
            )
        )
        self.launcher_events.release_early()

    async def _wind_down(self) -> None:
        """Say good-bye, let what was decided become durable and go out, close everything."""
        self.socket.close()
        self.forward_server.close()
        await self.forwards.close()
        self.journal.happened("agent", "stopping")
        self.inbox.put(events.AgentStopping())
        try:
            async with asyncio.timeout(STOP_S_MAX):
                if self.parts.bus is not None:
                    await self.parts.bus.close()
                if self.run_state.ends_tasks:
                    await self.launcher.stop_all()
                if not self.run_state.has_failed:
                    await self.performer.drained(self.inbox)
        except TimeoutError:
            log.warning("the stop took longer than %g s; the rest is cut", STOP_S_MAX)
        await self.saving.close()
        await self.output.close()
        await self.pulls.close()
        await self.input_server.close()
        await self.performer.close()
        await self.settler.close()
        await self.peer_messages.close()
        self.parts.trust.close()
        self.members.close(forget=self.run_state.leaves)
        if self.run_state.leaves:
            node_identity_file.forget_peers(Path(self.config.state))
        await self.parts.links.close()
        await self.launcher.close()
        await self.parts.gpus.close()
        if self.recorder is not None:
            self.recorder.close()


def _threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call in the loop's thread; a loop that is closed already needs it no more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
