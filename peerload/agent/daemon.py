"""The agent: one inbox, one consumer that owns the `Node`, and the I/O around it; start and stop are in this one file.

`Daemon._build` is the composition root: it builds every part of the agent, each from earlier ones. Sockets, MQTT, timers,
process exits and sensors only put events into the inbox; `effects.py` carries out the resulting actions. Nothing here decides
anything about tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
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
from peerload.agent import effects, event_sources, preflight, runtime
from peerload.agent.accounts import DirectoryCache, DirectoryQueries, TaskUser, UserServices
from peerload.agent.completion.completion_jobs import CompletionJobs, OutputSaver
from peerload.agent.completion.hooks import NodeHooks, NotifyHooks
from peerload.agent.completion.retention import Retention, TaskRemover
from peerload.agent.control.authorization import Authorization, Quotas
from peerload.agent.control.connection import LocalSocket
from peerload.agent.control.task_ids import TaskIds
from peerload.agent.energy import FILE as CONTROLS_FILE
from peerload.agent.energy import PowerControls, PowerDown, PriceFeed, Waker
from peerload.agent.files.attempts import AttemptFiles
from peerload.agent.files.environments import Environments
from peerload.agent.files.transfer import FileCacheSettings
from peerload.agent.forwarding.request_router import RequestRouter
from peerload.agent.forwarding.tunnels import ForwardedRequests, ForwardServer
from peerload.agent.joining import CertificateRenewal, Enrollment, JoinServer, TrustDistribution
from peerload.agent.launcher.client import LauncherLink
from peerload.agent.launcher.mps import MpsDaemons
from peerload.agent.launcher.process import LauncherProcess, LauncherService
from peerload.agent.output.output import TaskOutputs
from peerload.agent.output.spool import Spool
from peerload.agent.peers.addresses import AddressWatch
from peerload.agent.peers.connection import PeerBackpressure
from peerload.agent.peers.links import PeerLinks
from peerload.agent.peers.local_node import DuplicateNames, LocalNode, profile_of, speed_file, speed_of
from peerload.agent.peers.membership import LOOKUP_THREADS, Members
from peerload.agent.recorder import Recorder
from peerload.agent.requests import server
from peerload.agent.requests.attach import AttachRequests, ExecRequests, InsideCommands
from peerload.agent.requests.node_verbs import ClusterCommands, NodeCommands
from peerload.agent.requests.output_and_wait import OutputRequests, OutputSource, TaskEnds, WaitRequests
from peerload.agent.requests.overview import OverviewCache, OverviewViews, own_user
from peerload.agent.requests.task_commands import CancelWaits, CleanRequests, TaskCommands
from peerload.agent.requests.task_queries import DurableReads, EventRequests, LiveUsage, TaskQueries, WhyRequest
from peerload.agent.sensors.cpu_benchmark import measure_speed
from peerload.agent.sensors.energy import DATABASE as ENERGY_DATABASE
from peerload.agent.sensors.energy import EnergySensors, EnergyStore
from peerload.agent.sensors.gpus import DeviceLocks, node_gpus
from peerload.agent.sensors.host import HostSensors
from peerload.agent.sensors.processes import OwnUse
from peerload.agent.stdin import StdinFetches, StdinForwarding, StdinServer, StdinStore
from peerload.agent.store.disk_space import DiskSpace
from peerload.agent.store.schema import DATABASE, state_gone
from peerload.agent.store.store import LoopOwner, Store
from peerload.agent.store.write_ahead import EventLog, Outbox, SecurityEvents
from peerload.agent.systemd import HealthCheck, Service, ServiceManager, SettingsReload
from peerload.agent.views.agent import (
    AgentView,
    ClusterView,
    DiagnosticsView,
    MetricsView,
    PeerLinksView,
    Samples,
    StorageView,
)
from peerload.agent.views.node import NodesView, StatePublisher
from peerload.config import loader
from peerload.core.node import Node
from peerload.model import events, metrics
from peerload.model.config import CoreConfig
from peerload.model.errors import ConfigError, PeerloadError, SlowDown, StoreError
from peerload.model.gossip import PRESETS
from peerload.model.messages import BlocksRequest, Identity, Message, OutputRequest
from peerload.model.task import TaskState
from peerload.security import cluster_dir, node_identity_file
from peerload.security.broker import BrokerTls
from peerload.security.private_files import IN_THE_STATE, directory_in, machine_boot_id, private_directory
from peerload.security.revocation import Keyring, TrustStore
from peerload.security.tls import Credentials
from peerload.wire import recording
from peerload.wire.frame import LAST_WORDS_BYTES_MAX, LAST_WORDS_ENDING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Mapping

    from peerload.agent.mqtt import MqttBus
    from peerload.agent.peers.streams import PieceServer
    from peerload.agent.systemd import Load
    from peerload.model.config import AgentConfig
    from peerload.policy.registry import LivePreset
    from peerload.security.cluster_dir import ClusterDirectory


log = logging.getLogger("peerload.agent")

RESTART = -1
"""Result of `Daemon.run` when the agent has to be started again."""
AHEAD_S = 0.2
"""Expected duration of the tasks that the launcher has queued for each slot."""
FAR_ANSWER_S = 1.0
"""Timeout of answers where nodes are far apart (`gossip = "wan"`); longer than a round trip."""
CONTROLS_S_MAX = 5.0
"""Time limit for drivers to set or restore the power controls of this machine."""
STOP_S_MAX = 5.0
"""Time limit for an orderly stop, after which remaining work is cancelled."""


MEMORY_LOOK_EVERY_S = 4.0
TASKS_FROZEN_MIN = 20_000
"""Number of new tasks that are frozen at a time. Memory is returned when as many tasks have ended, and more than are
left."""
YOUNG_GENERATIONS = 1
"""The generations of the garbage collector that stay small, however many tasks there are."""


class Daemon:
    """An agent, from start to stop. `run` returns its exit code."""

    def __init__(
        self,
        config: AgentConfig,
        preset: LivePreset,
        gpu_library: Any = None,  # noqa: ANN401 -- a module without types
        origins: Mapping[str, str] | None = None,
        files_max: int = 0,
        manager: ServiceManager | None = None,
        load: Load | None = None,
    ) -> None:
        """preset: from ``config.policy``. gpu_library: a module with the interface of `pynvml`; None: the driver of this machine.
        origins: the source of each setting. files_max: default limit of open files of a task, 0 = that of the agent. manager: the
        service manager that started this process, None: none. load: reads the settings again."""
        self.config = config
        self._preset = preset
        self._gpu_library = gpu_library
        self._origins = origins
        self._files_max = files_max
        self._manager = manager or ServiceManager({})
        self._load = load
        self.run_state = runtime.RunState()
        self.launcher: LauncherLink | None = None
        self._is_up = False

    # -- life ----------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start, serve until asked to stop, and stop. Raises PeerloadError if it cannot start."""
        loop = asyncio.get_running_loop()
        workers, self._lookups = runtime.Workers(), runtime.Workers(LOOKUP_THREADS, end_s=0.0)
        loop.set_default_executor(workers)
        try:
            return await self._run(loop)
        except Exception:
            if self._is_up and self._has_lost_its_state:  # the missing files may cause any error
                raise self._state_is_gone() from None
            raise
        finally:
            workers.shutdown()
            self._lookups.shutdown()
            loop.set_default_executor(cast("Any", None))  # the loop would start another thread to shut it down

    async def _run(self, loop: asyncio.AbstractEventLoop) -> int:
        config = self.config
        state = private_directory(Path(config.state))
        preflight.check_origin(state)
        for name in IN_THE_STATE:
            directory_in(state, name)
        preflight.check_joined(config, self._origins)
        cluster = cluster_dir.find(config.cluster, os.environ)
        preflight.check_addresses(config, loopback_only=cluster.is_local)
        self.disk = DiskSpace(state)
        self.disk.prepare()
        self.store = Store(state / DATABASE, config.node, self.disk.reserve, output_bytes_max=config.output_bytes_max)
        traces = preflight.traces(state)
        self.store.open()
        claim: socket.socket | None = None
        device_locks = DeviceLocks(Path(config.gpu_claims) if config.gpu_claims else None)
        try:
            claim = preflight.claim(self.store.store_id, state)
            self._damage: list[str] = []
            if await asyncio.to_thread(preflight.end_foreign_launcher, self.store.store_id, state / "launcher"):
                self._damage.append(preflight.begin_as_copy(self.store, config))
            await preflight.check_places(config, self._origins, self._manager, loopback_only=cluster.is_local)
            if notice := preflight.begin_anew(self.store, config, traces):
                self._damage.append(notice)
            identity = Identity(
                node=config.node,
                boot=secrets.token_hex(8),
                machine_boot=machine_boot_id(),
                store=self.store.store_id,
                incarnation=self.store.next_incarnation(),
            )
            self.info = runtime.AgentInfo(config, identity, self._origins)
            self._open_durability(loop)
            trust = self._open_credentials(cluster, state)
            self.inbox = runtime.Inbox(config.inbox_max)
            self.gpus = node_gpus(config, self.inbox, device_locks, self._gpu_library)
            await self.gpus.find()
            profile = profile_of(self.info, self.gpus.devices, is_issuer=self.tls.serves_joins)
            seed = secrets.randbits(recording.SEED_BITS)
            chance = random.Random(seed)  # noqa: S311 -- draws peers and nonces, guards no secret
            core_config = _core_config(config)
            self.node = Node(core_config, self._preset.policies, identity, profile, chance)
            self._build(state, cluster, trust)
            await self._serve_under_controls(
                PowerControls(state / CONTROLS_FILE),
                self._serve(
                    loop,
                    recording.Started(
                        version=__version__,
                        config=core_config,
                        preset=self._preset.source.name,
                        preset_text=self._preset.source.text,
                        preset_directory=self._preset.source.base,
                        identity=identity,
                        profile=profile,
                        seed=f"{seed:x}",
                    ),
                ),
            )
        finally:
            if claim is not None:
                claim.close()
            self.store.close()
            device_locks.close()
        if self.run_state.refusal is not None:
            _write_exit_reason(config.socket, self.run_state.refusal)
            raise self.run_state.refusal
        if self.run_state.has_failed and self._has_lost_its_state:
            raise self._state_is_gone()
        if self.run_state.ending is runtime.Ending.RESTART:
            return RESTART
        return int(self.run_state.ending is runtime.Ending.FAILED)

    @property
    def _has_lost_its_state(self) -> bool:
        return not (Path(self.config.state) / DATABASE).exists()

    def _state_is_gone(self) -> StoreError:
        """The error for a removed state directory, written beside the socket as the reason of this agent's end."""
        pid = self.launcher.pid if self.launcher is not None else 0
        end = f"to end the tasks that still run:  kill {pid}        " if pid and self.config.mode != "system" else ""
        error = state_gone(Path(self.config.state), end)
        _write_exit_reason(self.config.socket, error)
        return error

    # -- composition ---------------------------------------------------------------------------------------------------

    def _open_durability(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the writer of the store, and build the outbox and the event log."""
        run = self.run_state
        self.store.start_writer(LoopOwner(loop, run))
        self.outbox = Outbox(self.store, run)
        self.event_log = EventLog(self.outbox, run)
        self.security = SecurityEvents(self.info.counters, self.event_log)

    def _open_credentials(self, cluster: ClusterDirectory, state: Path) -> TrustStore:
        """Read the certificate of this node, and the nodes that it trusts. Raises ConfigError."""
        trust = TrustStore(cluster, state / "trust")
        life = timedelta(seconds=self.config.certificate_s)
        self.tls = Credentials(cluster, self.config.node, state / "tls", life, trust)
        joined = node_identity_file.read(state)  # `invite` and `join` change the cluster on purpose
        if self.tls.was_of_other_cluster and (joined is None or joined.cluster != str(cluster.directory)):
            self.info.notices.append(
                f"its state was last used in another cluster; now it is {cluster.name}"
                " (another: peerload up --cluster DIR)"
            )
        if self.tls.has_ended(datetime.now(UTC)):
            notice = "this node's certificate has expired: it works alone until it joins again (peerload invite)"
            self.info.notices.append(notice)
            log.error("certificate has expired: node=%s reason=%s", self.config.node, notice)
        return trust

    def _build(self, state: Path, cluster: ClusterDirectory, trust: TrustStore) -> None:  # noqa: PLR0915 -- a line a part
        """Build the parts of the agent, each from earlier ones. Nothing runs yet, and nothing is received."""
        config, info, run = self.config, self.info, self.run_state
        background = runtime.BackgroundTasks(run)
        store, outbox, event_log, security = self.store, self.outbox, self.event_log, self.security
        disk, inbox, node, gpus, tls = self.disk, self.inbox, self.node, self.gpus, self.tls

        # The launcher, and the links to other nodes
        process = (
            LauncherService(Path(config.launcher), config.node)
            if config.mode == "system"
            else LauncherProcess(
                state / "launcher", self._files_max, store.store_id, cores=config.cpus.enforce != "off"
            )
        )
        self.launcher = launcher = LauncherLink(process, config.output_bytes_max, run, enforce=config.cpus.enforce)
        self.keyring = keyring = Keyring(trust)
        local = LocalNode(info, cluster, keyring, node, inbox)
        enrollment = Enrollment(info, node, tls, trust)
        joins = JoinServer(enrollment, tls, event_log, security) if tls.serves_joins else None
        self.links = links = PeerLinks(local, tls, security, PeerBackpressure(inbox), joins, lookups=self._lookups)

        # Users, standard input and output of tasks
        directories = DirectoryCache(inbox)
        self.users = users = UserServices(info, launcher, directories, security)
        queries = DirectoryQueries(links, freezes=config.files.snapshot == "auto")
        spool = Spool(state, config.output_bytes_max)
        self.output = output = TaskOutputs(spool, node, links, launcher, info.counters)
        inputs = StdinStore(spool.directory)
        self.fetches = fetches = StdinFetches(launcher, links, spool, run)
        stdin = StdinForwarding(node, launcher, inbox, spool, inputs, fetches)
        self.stdin_server = StdinServer(node, inputs, stdin, run)
        commands = InsideCommands(launcher, spool)
        limit_bytes, is_system = loader.cache_bytes(config.files), config.mode == "system"
        caches = FileCacheSettings(state / "files", limit_bytes, disk.low_bytes, is_system, info.counters)
        files = AttemptFiles(caches, spool, launcher, links, inbox, node, event_log)

        self.energy = energy = EnergySensors(config, node, gpus, launcher, EnergyStore(state / ENERGY_DATABASE), inbox)
        environments = Environments(config, files, launcher, spool, links, inbox, event_log)

        self.mps = mps = MpsDaemons(config, node, launcher, inbox, event_log)

        # After the end of a task
        self.saving = saving = OutputSaver(info, node, store, spool, output, users, run)
        self.notify_hooks = notify_hooks = NotifyHooks(info, store, launcher, spool, users)
        self.jobs = jobs = CompletionJobs(info, store, event_log, run, saving, notify_hooks)
        self.node_hooks = hooks = NodeHooks(info, store, event_log)
        watches = runtime.TaskWatches()
        remover = TaskRemover(store, spool, node, output, watches, run)
        self.retention = Retention(info, store, disk, remover, output, event_log)

        # Other nodes
        self.distribution = TrustDistribution(local, keyring, tls, links, event_log, inbox, security)
        self.renewal = CertificateRenewal(tls, trust, links, node, event_log, info.counters)
        self.members = members = Members(info, local, node, links, trust, inbox, security)
        self.address_watch = AddressWatch(info, local, run, event_log)
        duplicates = DuplicateNames(info, node, run, event_log)
        peer_messages = event_sources.PeerMessages(inbox, node, spool, users, queries, security, background)
        bus_peers = event_sources.BusPeers()
        self.peer_events = event_sources.PeerEventSource(
            inbox,
            event_sources.CaMessages(self.distribution, self.renewal, run),
            peer_messages,
            members,
            duplicates,
            bus_peers,
        )
        self.bus: MqttBus | None = None
        if config.mqtt:
            from peerload.agent.mqtt import MqttBus  # noqa: PLC0415 -- a tenth of a start, for those that have a broker

            broker_tls = BrokerTls(config.mqtt_ca, cluster.authority.certificate, tls.file)
            bus_events = event_sources.BusEvents(inbox, trust, links, members, duplicates, security, bus_peers)
            self.bus = MqttBus(config, local, bus_events, security, broker_tls, self._lookups)

        # Clients: waits for answers of the core, the views, the verbs, the path of a request
        task_ids = TaskIds(store, config.node)
        reads = DurableReads(store, outbox, event_log)
        access = Authorization(info, store, node.executor, security)
        quotas = Quotas(config, store, security)
        core, decisions = runtime.CoreRequests(inbox), runtime.Decisions()
        attach = AttachRequests(core, task_ids, inputs, stdin, disk, node)
        cancel_waits = CancelWaits(core, node)
        timers, task_figures = effects.Timers(inbox, outbox), server.TaskFigures(config.node, info.counters)
        observers: list[server.TaskObserver] = [hooks] if hooks.runs_at_end else []
        self.publisher: StatePublisher | None = None
        if self.bus is not None and config.mqtt_publish_state:
            self.publisher = StatePublisher(node, store, self.bus, own_user())
            observers.append(self.publisher)
        changes = server.TaskChanges(stdin, saving, output, task_figures, watches, observers)
        clients = server.ClientEffects(core, attach, cancel_waits, changes, decisions, task_figures)
        cluster_view = ClusterView(info, cluster, trust, tls)
        links_view = PeerLinksView(info, links, members, self.bus, cluster_view)
        nodes_view = NodesView(node, gpus, cluster_view)
        agent_view = AgentView(info, node, launcher, gpus, cluster_view, links_view)
        storage_view = StorageView(config.node, disk, store, self.retention, self._damage)
        self.exits = event_sources.ExitRecords(info, spool, disk, files, energy, inbox, watches)
        diagnostics = DiagnosticsView(node, launcher, self.exits, storage_view, cluster_view, links_view)
        histograms = {metrics.COMMIT_TIME: store.commits, metrics.LOOP_LAG: timers.lag, **task_figures.histograms}
        figures = MetricsView(info, node, inbox, diagnostics, histograms, energy)
        self.samples = samples = Samples(node, state)
        verbs = server.Verbs(
            server.TaskVerbs(
                TaskCommands(core, reads, task_ids, cancel_waits, access, node),
                CleanRequests(remover, reads, task_ids, node),
                WaitRequests(reads, task_ids, watches, quotas, TaskEnds(store, spool, jobs, config.output_bytes_max)),
                OutputRequests(reads, task_ids, watches, OutputSource(info, node, output, spool), node),
                ExecRequests(commands, node, task_ids, output, inputs, stdin, disk),
                attach,
            ),
            server.QueryVerbs(
                reads,
                TaskQueries(reads, task_ids, access, quotas, spool, node, decisions),
                EventRequests(reads, task_ids, access, config.node),
                WhyRequest(node, store, task_ids, decisions, cluster_view, environments),
                LiveUsage(node, launcher, task_ids, energy, mps),
                OverviewCache(node, access, store, OverviewViews(agent_view, nodes_view, cluster_view)),
                server.FileRequests(files, environments),
            ),
            server.NodeAnswers(agent_view, nodes_view, diagnostics, figures, samples, energy),
            NodeCommands(core, node, run, event_log),
            ClusterCommands(info, node, enrollment, self.distribution, members, event_log),
        )
        submissions = server.Submissions(core, access, reads, task_ids, inputs, attach, node)
        self.forwards = ForwardedRequests(links, node.membership)
        router = RequestRouter(verbs, self.forwards, task_ids, access, store, node)
        checks = server.RequestChecks(quotas, access, router, users, disk, files, queries)
        requests = server.RequestServer(checks, submissions, verbs, security, run)
        self.forward_server = ForwardServer(requests, access)
        self.socket = LocalSocket(info, requests, access, quotas, security, launcher)

        # Events in, actions out
        settler = event_sources.ExitSettler(
            self.exits, inbox, fetches, output, event_sources.AttemptDevices(node, gpus, mps), background
        )
        self.launcher_events = event_sources.LauncherEvents(
            inbox, settler, stdin, (notify_hooks, commands, environments, mps)
        )
        advice, waker = event_sources.BusAdvice(self.bus, bus_peers), Waker(config.energy.resume_cmd)
        peers = effects.PeerEffects(info, inbox, node, links, members, advice, waker)
        variables = effects.TaskVariables(info, node, environments, mps)
        starter = effects.TaskStarter(info, node, spool, stdin, launcher, variables, settler)
        starts = effects.AttemptStarts(starter, gpus, files, environments, mps, settler, background)
        storage = effects.AttemptStorage(spool, output, fetches, files, environments)
        self.performer = effects.Performer(
            outbox,
            timers,
            effects.RecordEffects(store, outbox, inbox, event_log, security, jobs, background),
            effects.TaskEffects(launcher, starts, storage, gpus, stdin, output, node),
            peers,
            effects.ResultEffects(spool, output, inbox, peers, watches, files, background),
            clients,
        )
        pieces: dict[type[Message], PieceServer] = {
            OutputRequest: output.serve_output,
            BlocksRequest: files.serve,
        }
        links.streams.serve(pieces, self.stdin_server, self.forward_server)

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def _serve_under_controls(self, controls: PowerControls, serve: Coroutine[Any, Any, None]) -> None:
        """Serve while the configured power controls are in force. Controls left by an earlier start are restored first."""
        settings = self.config.energy
        try:
            if controls.are_wanted(settings):
                for failure in await _within_patience(
                    functools.partial(controls.start, settings, self.config.gpu.exclude)
                ):
                    self.event_log.record("energy", "control failed", reason=failure)
            await serve
        finally:
            serve.close()
            if controls.are_wanted(settings):
                await _within_patience(controls.restore)

    async def _serve(self, loop: asyncio.AbstractEventLoop, started: recording.Started) -> None:
        assert self.launcher is not None
        launcher = await self.launcher_events.first_listed(await self.launcher.start(self.launcher_events))
        try:
            await self._serve_clients_and_peers(loop, launcher, started)
        except BaseException:
            if not self._is_up:  # after a failed start, nothing is left behind
                if not launcher.running:
                    await self.launcher.stop_all()
                await self.launcher.close()
            raise

    async def _serve_clients_and_peers(
        self, loop: asyncio.AbstractEventLoop, launcher: events.LauncherReady, started: recording.Started
    ) -> None:
        kept = await self._recovered()
        address = await self.members.listen(self.peer_events)
        self.output.adopt(launcher.running, kept.executions)
        recorder: Recorder | None = None
        if self.config.record:
            recorder = Recorder(self.config.record, msgspec.structs.replace(started, identity=self.info.identity))
            log.info("recording events and decisions, with the environment of tasks: path=%s", self.config.record)
        consumer = effects.Consumer(self.node, self.performer, self.outbox, self.run_state, recorder)
        price_feed = PriceFeed(self.config.energy.price_file, self.inbox, self.event_log)
        self._begin(kept, launcher, await price_feed.first())
        del kept  # the rows of a million tasks take half a gigabyte, and this coroutine runs as long as the agent
        if self.disk.state != "ok":
            self.disk.report("at the agent's start", self.inbox, self.event_log)
        async with asyncio.TaskGroup() as group:
            link = self.launcher
            assert link is not None
            own_use = OwnUse(link, self.node.ledger)
            work = [
                consumer.run(self.inbox),
                HostSensors(self.inbox, own_use, self.energy).run(),
                self.energy.command.run(),
                self.mps.run(),
                self.gpus.run(self.node.ledger, self.event_log),
                self.disk.watch(self.inbox, self.event_log, self.run_state),
                self.renewal.run(),
                self.retention.run(),
                self.jobs.run(),
                self.node_hooks.run(),
                self.address_watch.run(),
                watch_memory(self.node),
                price_feed.run(),
                PowerDown(
                    loader.sleep_after_s(self.config.energy),
                    self.config.energy.suspend_cmd,
                    self.node,
                    self.inbox,
                    self.event_log,
                ).run(),
                self.samples.run(),
            ]
            if speed_of(self.config) is None:
                work.append(measure_speed(speed_file(self.config), self.inbox))
            if self.bus is not None:
                work.append(self.bus.run())
            if self.publisher is not None:
                work.append(self.publisher.run())
            background = [group.create_task(one) for one in work]
            self.keyring.refresh()
            await self.socket.start(self._manager.listener(self.config.socket))
            _remove_exit_reason(self.config.socket)
            background.append(group.create_task(self.socket.watch()))
            if self.config.web.listen:
                from peerload.agent.web_server import WebServer  # noqa: PLC0415 -- where one is wanted

                background.append(group.create_task(WebServer(self.info, self.event_log).run()))
            background.append(group.create_task(self._up(loop, address).run()))
            await self.run_state.stopping()
            is_restart = self.run_state.ending is runtime.Ending.RESTART
            (self._manager.reloading if is_restart else self._manager.stopping)()
            await self._wind_down()
            if recorder is not None:
                recorder.close()
            for task in background:
                task.cancel()

    def _up(self, loop: asyncio.AbstractEventLoop, address: str) -> Service:
        """From here on, clients and peers reach the agent → its notifications to a service manager."""
        assert self.launcher is not None
        self._is_up = True
        settings = (
            SettingsReload(self._load, self.info, self.tls, self.distribution, self.event_log)
            if self._load is not None
            else None
        )
        health = HealthCheck(self.config.socket, self.store, self.launcher)
        service = Service(self._manager, health, self.info, self.node, settings)
        service.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.run_state.stop)
        self.launcher.log_facts()
        self.notify_hooks.remove_orphans()
        log.info("agent is up: node=%s socket=%s address=%s", self.config.node, self.config.socket, address)
        self.event_log.record(
            "agent", "started", reason=f"peerload {__version__}, incarnation {self.info.identity.incarnation}"
        )
        return service

    async def _recovered(self) -> events.AgentStarted:
        """Read the durable state, and check whether the directories of waiting tasks exist here. A directory that
        cannot be checked, because too many others hang, counts as existing: a failing start of the task reports it."""
        kept = self.store.recover()
        self.info.notices += preflight.report_damage(self._damage, self.store, self.event_log)
        here: dict[tuple[TaskUser, bytes], bool] = {}
        of: dict[tuple[int, int], tuple[TaskUser, bytes]] = {}  # most of a million tasks share spec and terms
        waiting: list[events.TaskRow | events.MembersRow] = [*kept.tasks, *kept.members]
        for row in waiting:
            alike = id(row.spec), id(row.terms)
            if alike not in of:
                of[alike] = self.users.submitter(row.spec, row.terms), row.spec.directory
            task_user, directory = of[alike]
            if row.record.state is TaskState.QUEUED and (task_user, directory) not in here:
                here[task_user, directory] = True
                with contextlib.suppress(SlowDown):
                    here[task_user, directory] = await self.users.admitted(row.spec, row.terms)
        if all(here.values()):
            return kept

        def is_away(row: events.TaskRow | events.MembersRow) -> bool:
            return not here.get(of[id(row.spec), id(row.terms)], True)

        replace = msgspec.structs.replace
        tasks = (replace(row, directory_here=False) if is_away(row) else row for row in kept.tasks)
        members = (replace(row, directory_here=False) if is_away(row) else row for row in kept.members)
        return replace(kept, tasks=tuple(tasks), members=tuple(members))

    def _begin(
        self, kept: events.AgentStarted, launcher: events.LauncherReady, prices: tuple[tuple[float, float], ...]
    ) -> None:
        """Pass the core its first event: the durable state and the running processes."""
        self.inbox.put(
            msgspec.structs.replace(
                kept,
                running=launcher.running,
                ended=launcher.ended,
                frozen=launcher.frozen,
                known=self.members.known,
                wake_s=tuple(self.members.kept.wake_s.items()),
                asleep=self.members.kept.asleep,
                gone=self.members.kept.gone_since(runtime.now().wall_s),
                seeds=self.config.peer,
                commits_lost=self.store.lost is not None,
                revoked=self.keyring.trust.revoked_nodes(),
                prices=prices,
            )
        )
        if self.launcher is not None and self.launcher.enforces_cores:
            self.inbox.put(events.CoresEnforced())
        self.launcher_events.release_early()

    async def _wind_down(self) -> None:
        """Announce that this node leaves, flush the store and the outbox, close everything."""
        assert self.launcher is not None
        self.socket.close()
        self.forward_server.close()
        await self.forwards.close()
        self.event_log.record("agent", "stopping")
        self.inbox.put(events.AgentStopping())
        try:
            async with asyncio.timeout(STOP_S_MAX):
                if self.bus is not None:
                    await self.bus.close()
                if self.run_state.ends_tasks:
                    await self.launcher.stop_all()
                if not self.run_state.has_failed:
                    await self.performer.drained(self.inbox)
                    if self.run_state.ending is not runtime.Ending.RESTART:
                        self.launcher.retire()
                elif self._has_lost_its_state:
                    self.launcher.retire()  # no other agent will ask for its tasks
        except TimeoutError:
            log.warning("stop timed out: limit_s=%g", STOP_S_MAX)
        self.samples.write()
        await self.saving.close()
        await self.output.close()
        await self.fetches.close()
        await self.stdin_server.close()
        await self.performer.close()
        self.keyring.close()
        self.members.close(forget=self.run_state.leaves)
        if self.run_state.leaves:
            node_identity_file.forget_peers(Path(self.config.state))
        await self.links.close()
        await self.launcher.close()
        await self.gpus.close()
        await self.energy.close()


async def _within_patience(control: Callable[[], list[str]]) -> list[str]:
    """Run ``control`` in a thread with a time limit, since a driver may hang. → its failures, which are logged."""
    try:
        failures = await asyncio.wait_for(asyncio.to_thread(control), CONTROLS_S_MAX)
    except TimeoutError:
        failures = ["a driver does not answer"]
    for failure in failures:
        log.warning("power control failed: error=%s", failure)
    return failures


def _core_config(config: AgentConfig) -> CoreConfig:
    core_config = CoreConfig(
        lease_s=config.lease_s,
        gossip=PRESETS[config.gossip],
        counts_foreign=config.load.foreign == "count",
        gpu=loader.gpu_config(config.gpu, users=config.users if config.mode == "system" else None),
        cap_w=config.energy.cap_w,
        may_sleep=bool(config.energy.sleep_after),
        ahead_s=AHEAD_S,
    )
    if config.gossip == "wan":
        return msgspec.structs.replace(core_config, probe_timeout_s=FAR_ANSWER_S, answer_wait_s=FAR_ANSWER_S)
    return core_config


def _write_exit_reason(socket: str, error: PeerloadError) -> None:
    """Write why the agent ends into a file beside its socket, for the next command of a user. If this fails, only the log
    has the reason."""
    what = str(error.says if isinstance(error, ConfigError) else error)
    text = " ".join(what.split()) + "\n" + " ".join(error.hint.split()) + "\n"
    with contextlib.suppress(OSError):
        path = _exit_reason_path(socket)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8", "replace")[:LAST_WORDS_BYTES_MAX])


def _remove_exit_reason(socket: str) -> None:
    with contextlib.suppress(OSError):
        _exit_reason_path(socket).unlink(missing_ok=True)


def _exit_reason_path(socket: str) -> Path:
    return Path(socket + LAST_WORDS_ENDING)


async def watch_memory(node: Node) -> None:
    """Keep many tasks out of the garbage collector, and return their memory to the machine when they have ended; until
    cancelled.

    A full collection visits every task, which stops the event loop for seconds with a million tasks, so new tasks are frozen
    (`gc.freeze`). Tables keep their maximum size, and the allocator keeps freed memory for later. After a million tasks this is
    more than a gigabyte, which is returned when most tasks have ended and no more are ending right now. Whole arenas of the
    interpreter (1 MiB) stay allocated if they contain younger objects.
    """
    most = before = frozen = 0
    await asyncio.to_thread(runtime.trim_memory)  # memory that only the start has used
    while True:
        await runtime.next_tick(MEMORY_LOOK_EVERY_S)
        tasks = len(node.home.tasks)
        most = max(most, tasks)
        if tasks - frozen >= TASKS_FROZEN_MIN:
            frozen = tasks
            gc.collect(YOUNG_GENERATIONS)
            gc.freeze()
            await asyncio.to_thread(runtime.trim_memory)  # memory of tables that were replaced by larger ones
        elif tasks >= before and most - tasks >= max(TASKS_FROZEN_MIN, tasks):
            most = frozen = tasks
            node.shrink()
            if tasks < TASKS_FROZEN_MIN:
                gc.unfreeze()
            gc.collect()  # also empties the free lists of the interpreter, which keep whole arenas
            gc.freeze()
            await asyncio.to_thread(runtime.trim_memory)
        before = tasks
