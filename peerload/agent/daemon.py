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
from peerload.agent.accounts.directory_cache import DirectoryQueries
from peerload.agent.completion.completion_jobs import CompletionJobs
from peerload.agent.completion.saving import OutputSaver
from peerload.agent.consumer import Consumer
from peerload.agent.effects import Performer, settled
from peerload.agent.event_sources import Incoming
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
from peerload.agent.requests.exec_in_task import InsideCommands
from peerload.agent.requests.server import ControlServer
from peerload.agent.run_state import Ending
from peerload.agent.sensors.cpu_benchmark import find_out
from peerload.agent.sensors.host import Sensors
from peerload.agent.sensors.node_gpus import NodeGpuHost, node_gpus
from peerload.agent.sensors.own_use import OwnUse
from peerload.agent.stdin.stdin_fetch import StdinFetches
from peerload.agent.stdin.stdin_forwarding import StdinForwarding
from peerload.agent.stdin.stdin_serve import StdinServer
from peerload.agent.stdin.stdin_store import StdinStore
from peerload.agent.store import claim, damage_report, state_origin
from peerload.agent.store.disk_space import DiskSpace
from peerload.agent.store.event_log import EventLog
from peerload.agent.store.retention import Retention
from peerload.agent.store.schema import DATABASE
from peerload.agent.store.store import Store
from peerload.agent.store.write_ahead import Outbox
from peerload.agent.systemd.health import HealthCheck
from peerload.agent.systemd.notify import ServiceManager
from peerload.agent.systemd.service import Service, SettingsReload
from peerload.agent.thread_pool import Workers
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
    from peerload.model.actions import Row
    from peerload.model.config import AgentConfig

log = logging.getLogger("peerload.agent")

RESTART = -1
"""What `Daemon.run` returns when the agent is to be started again."""
FAR_ANSWER_S = 1.0
"""Where nodes are far apart (`gossip = "wan"`) answers are waited for longer than a way there and back takes."""
STOP_S_MAX = 5.0
"""How long a polite stop may take before what is left is cut."""


class Daemon:
    """One agent, from start to stop. `run` returns its exit code."""

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
        self.parts = Parts(self.info)
        self.introduction = LocalNode(self.parts)
        self._is_up = False
        self._claim: socket.socket | None = None
        self.incoming = Incoming(self.parts)
        self.consumer = Consumer(self.parts)
        self._recorded = ("", "", "", "")

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
        self.parts.disk = DiskSpace(state)
        self.parts.disk.prepare()
        self.parts.store = Store(
            state / DATABASE,
            self.config.node,
            self.parts.disk.reserve,
            output_bytes_max=self.config.output_bytes_max,
        )
        found = damage_report.traces(state)
        self.parts.store.open()
        try:
            self._claim = claim.claim(self.parts.store.store_id, state)
            if await asyncio.to_thread(claim.end_strange_launcher, self.parts.store.store_id, state / "launcher"):
                damage_report.begin_as_copy(self.parts)
            await check_places(self.config, self._manager, loopback_only=self.parts.cluster.is_local)
            damage_report.begin_anew(self.parts, found)
            self._prove(state)
            self.parts.inbox = Inbox(loop, self.consumer.consume, self.config.inbox_max)
            self.parts.spool = Spool(state, self.config.output_bytes_max)
            self.parts.gpus = node_gpus(self.config, self.parts.inbox.put, self.parts.claims, self._gpu_library)
            await self.parts.gpus.find()
            self.info.identity = Identity(
                node=self.config.node,
                boot=secrets.token_hex(8),
                machine_boot=machine_boot_id(),
                store=self.parts.store.store_id,
                incarnation=self.parts.store.next_incarnation(),
            )
            seed = secrets.randbits(recording.SEED_BITS)
            self._profile_at_first = self.introduction.profile()
            chance = random.Random(seed)  # noqa: S311 -- draws peers and nonces, guards no secret
            self.parts.node = Node(self.core_config, policies, self.parts.identity, self._profile_at_first, chance)
            self._recorded = (preset.name, preset.text, preset.base, f"{seed:x}")
            await self._serve(loop)
        finally:
            if self._claim is not None:
                self._claim.close()
            self.parts.store.close()
            self.parts.claims.close()
        if self.parts.run.refusal is not None:
            exit_reason.leave(self.config.socket, self.parts.run.refusal)
            raise self.parts.run.refusal
        if self.parts.run.has_failed and self._has_lost_its_state:
            raise self._state_is_gone()
        if self.parts.run.ending is Ending.RESTART:
            return RESTART
        return int(self.parts.run.ending is Ending.FAILED)

    @property
    def _has_lost_its_state(self) -> bool:
        return not (Path(self.config.state) / DATABASE).exists()

    def _state_is_gone(self) -> StoreError:
        """Somebody has removed the state directory: nothing can be kept any more, and what was kept is lost."""
        pid = self.parts.launcher.pid
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
            self.parts.notices.append(
                f"its state was last used in another cluster; now it is {name} (another: peerload up --cluster DIR)"
            )
        tls.refuses = self.parts.trust.trust.refuses
        tls.ask_for_another = self.parts.trust.ask_for_another
        if tls.has_ended(datetime.now(UTC)):
            notice = "this node's certificate has ended: it works alone until it is let in anew (peerload invite)"
            self.parts.notices.append(notice)
            log.error("%s", notice)

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self.parts.store.start_writer(
            lambda done: _threadsafe(loop, lambda: [call() for call in done]),
            lambda error: _threadsafe(loop, lambda: self.parts.run.fail(f"the store failed: {error}")),
        )
        self.parts.release = Outbox(self._persist)
        self.parts.journal = EventLog(self.parts.release, self.parts.run.fail)
        self.parts.security.begin(self.parts.journal)
        process = (
            LauncherService(Path(self.config.launcher), self.config.node)
            if self.config.mode == "system"
            else LauncherProcess(Path(self.config.state) / "launcher", self._files_max, self.parts.store.store_id)
        )
        self.parts.users = UserServices(self.parts)
        self.parts.launcher = LauncherLink(
            process, self.incoming.from_launcher, self.config.output_bytes_max, self.parts.run.fail
        )
        self.parts.chores = CompletionJobs(self.parts)
        self.parts.inside = InsideCommands(self.parts)
        launcher = self.parts.inside.listed(self.parts.chores.notices.listed(await self.parts.launcher.start()))
        ended = await settled(self.parts, launcher.ended)  # nobody may rely on a result before its output is on disk
        try:
            await self._serve_clients_and_peers(loop, msgspec.structs.replace(launcher, ended=ended))
        except BaseException:
            if not self._is_up:  # a start that failed leaves nothing behind
                if not launcher.running:
                    await self.parts.launcher.stop_all()
                await self.parts.launcher.close()
            raise

    async def _serve_clients_and_peers(self, loop: asyncio.AbstractEventLoop, launcher: events.LauncherReady) -> None:
        kept = await self._recovered()
        self.parts.output = TaskOutputs(self.parts.spool, self.parts.node, self.parts.launcher.signal)
        self.parts.inputs = StdinStore(self.parts.spool.directory)
        self.parts.pulls = StdinFetches(self.parts)
        self.parts.feeding = StdinForwarding(self.parts)
        self.parts.links = PeerLinks(
            identity=self.parts.identity,
            tls=self.parts.tls,
            hello=self.introduction.hello,
            envelope=self.introduction.envelope,
            deliver=self.incoming.from_peer,
            met=self.incoming.met,
            unreachable=lambda node, reason: self.parts.inbox.put(events.PeerUnreachable(node, reason)),
            send_failed=self.incoming.send_failed,
            serve_output=self.parts.output.serve,
            counters=self.parts.counters,
            name_taken=lambda by: name_taken(self.parts, by),
            copied=lambda other, up_s: copied(self.parts, other, up_s),
            broken=self.parts.security.tell,
            backlog=PeerBackpressure(self.parts.inbox),
        )
        self.parts.asked_nodes = DirectoryQueries(self.parts.links.send)
        self.parts.members = Members(
            self.parts, self.introduction.sealer("gossip"), Path(self.config.state) / "addresses"
        )
        self.parts.links.whereabouts = self.parts.members.identity_of
        self.parts.joining = Enrollment(self.parts)
        address = await self.parts.members.listen()
        self.info.identity = self.parts.links.identity  # its address is known by now
        self.parts.node.state.identity = self.parts.identity
        if self.config.mqtt:
            from peerload.agent.mqtt.client import MqttBus  # noqa: PLC0415 -- a tenth of a start, for those that have a broker

            self.parts.bus = MqttBus(
                urls=self.config.mqtt,
                cluster=self.parts.cluster.name,
                identity=self.parts.identity,
                sealer=self.introduction.sealer("mqtt"),
                envelope=self.introduction.envelope,
                deliver=self.incoming.from_bus,
                on_change=lambda connected: self.parts.inbox.put(events.BusChanged(connected)),
                state=self.introduction.state,
                counters=self.parts.counters,
                broken=self.parts.security.tell,
                state_every_s=self.config.mqtt_state_every_s,
                tls=BrokerTls(self.config.mqtt_ca, self.parts.cluster.authority.certificate, self.parts.tls.file),
                password_file=self.config.mqtt_password_file,
                copied=lambda other: heard_of_copy(self.parts, other),
            )
        self.parts.saving = OutputSaver(self.parts)
        self.parts.output.adopt(self.parts.links, launcher.running)
        self.input_server = StdinServer(self.parts)
        self.parts.links.streams.inputs = self.input_server
        self.control = ControlServer(self.parts)
        self.parts.clients = self.control
        self.parts.retention = Retention(self.parts, Path(self.config.state) / DATABASE)
        self.performer = self.incoming.performer = self.consumer.performer = Performer(self.parts)
        self._record()
        self._recover(kept, launcher)
        self.parts.disk.changed = self.incoming.disk_changed
        self.parts.disk.lost = self.parts.run.fail
        if self.parts.disk.state != "ok":
            self.incoming.disk_changed(self.parts.disk.state, "at the agent's start")
        async with asyncio.TaskGroup() as group:
            own_use = OwnUse(
                lambda: (self.parts.launcher.pid, self.parts.launcher.run),
                lambda: bool(self.parts.node.ledger.running),
            )
            host = Sensors(self.parts.inbox.put, own_use.seconds)
            work = (
                host.run(),
                self.parts.gpus.run(NodeGpuHost(self.parts.node.ledger, self._gpu_changed)),
                self.parts.disk.watch(),
                self.parts.tls.keep_valid(),
                self.parts.retention.run(),
                self.parts.chores.run(),
                own_address.watch(self.parts),
                memory.watch(self.parts),
            )
            background = [group.create_task(one) for one in work]
            if self.introduction.speed() is None:
                background.append(group.create_task(find_out(self.introduction.speed_file, self.parts.inbox.put)))
            if self.parts.bus is not None:
                background.append(group.create_task(self.parts.bus.run()))
            self.parts.trust.start()
            self.parts.members.start()
            await self.control.start(self._manager.listener(self.config.socket))
            exit_reason.forget(self.config.socket)
            background.append(group.create_task(self.control.watch()))
            background.append(group.create_task(self._serves(loop, address).run()))
            await self.parts.run.stopping()
            is_restart = self.parts.run.ending is Ending.RESTART
            (self._manager.reloading if is_restart else self._manager.stopping)()
            await self._wind_down()
            for task in background:
                task.cancel()

    def _gpu_changed(self, state: str, words: str) -> None:
        self.parts.journal.happened("gpu", state, reason=words)

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
            loop.add_signal_handler(number, self.parts.run.stop)
        self.parts.launcher.tell()
        self.parts.chores.notices.forget_strangers()
        log.info("node %s is up: %s, peers reach it at %s", self.config.node, self.config.socket, address)
        self.parts.journal.happened(
            "agent", "started", reason=f"peerload {__version__}, incarnation {self.parts.identity.incarnation}"
        )
        return service

    async def _recovered(self) -> Recovered:
        """What was durable; of the tasks that wait, whether their directories are here now. Those that cannot be looked
        at for too many that hang count as here: a start that fails says so."""
        kept = self.parts.store.recover()
        damage_report.tell(self.parts, kept)
        damage_report.tell_loss(self.parts)
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

    def _recover(self, kept: Recovered, launcher: events.LauncherReady) -> None:
        self.parts.inbox.put(
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
                known=self.parts.members.known,
                seeds=self.config.peer,
                fates=kept.fates,
                groups=kept.groups,
                commits_lost=self.parts.store.lost is not None,
                revoked=self.parts.trust.trust.revoked_nodes(),
                attempts_from=kept.attempts_from,
                attempts_up_to=kept.attempts_up_to,
            )
        )
        self.incoming.release_early()

    async def _wind_down(self) -> None:
        """Say good-bye, let what was decided become durable and go out, close everything."""
        await self.control.close()
        self.parts.journal.happened("agent", "stopping")
        self.parts.inbox.put(events.AgentStopping())
        try:
            async with asyncio.timeout(STOP_S_MAX):
                if self.parts.bus is not None:
                    await self.parts.bus.close()
                if self.parts.run.ends_tasks:
                    await self.parts.launcher.stop_all()
                if not self.parts.run.has_failed:
                    await self.performer.drained()
        except TimeoutError:
            log.warning("the stop took longer than %g s; the rest is cut", STOP_S_MAX)
        await self.parts.saving.close()
        await self.parts.output.close()
        await self.parts.pulls.close()
        await self.input_server.close()
        await self.performer.close()
        self.parts.trust.close()
        self.parts.members.close(forget=self.parts.run.leaves)
        if self.parts.run.leaves:
            node_identity_file.forget_peers(Path(self.config.state))
        await self.parts.links.close()
        await self.parts.launcher.close()
        await self.parts.gpus.close()
        if self.consumer.recorder is not None:
            self.consumer.recorder.close()

    def _record(self) -> None:
        """Begin the recording, if one is asked for: what the node was made of, before its first event."""
        if not self.config.record:
            return
        preset, preset_text, preset_directory, seed = self._recorded
        started = recording.Started(
            version=__version__,
            config=self.core_config,
            preset=preset,
            preset_text=preset_text,
            preset_directory=preset_directory,
            identity=self.parts.identity,
            profile=self._profile_at_first,
            seed=seed,
        )
        self.consumer.recorder = Recorder(self.config.record, started)
        log.info("every event and decision is recorded in %s, tasks' variables too", self.config.record)

    def _persist(self, rows: list[Row], done: Callable[[], None]) -> None:
        self.parts.store.persist(rows, done)


def _threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call in the loop's thread; a loop that is closed already needs it no more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
