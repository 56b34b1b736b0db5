"""The agent: one inbox, one consumer that owns the `Node`, and the I/O around it; its life from start to stop in one file.

Sockets, MQTT, timers, process exits and sensors only put events into the inbox; the consumer hands them to the core
and its actions to `Performer`. Nothing here decides anything about tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from peerload import __version__
from peerload.agent import cluster, settings, store_notices
from peerload.agent.control import ControlServer
from peerload.agent.disk import Disk
from peerload.agent.inbox import Inbox
from peerload.agent.introduction import Introduction
from peerload.agent.journal import Journal
from peerload.agent.launcher_link import LauncherLink
from peerload.agent.machine import IN_THE_STATE, directory_in, machine_boot_id, private_directory
from peerload.agent.members import Members
from peerload.agent.mqtt import MqttBus
from peerload.agent.node_gpus import node_gpus
from peerload.agent.output import Output
from peerload.agent.parts import Parts
from peerload.agent.peer_link import PeerLinks
from peerload.agent.perform import Performer, settled
from peerload.agent.preconditions import check_addresses, check_places
from peerload.agent.recorder import Recorder
from peerload.agent.release import Release
from peerload.agent.sensors.host import Sensors, tasks_cpu_s
from peerload.agent.speed import find_out
from peerload.agent.spool import Spool
from peerload.agent.store import Store
from peerload.agent.tls import Credentials
from peerload.core.node import Node
from peerload.model import events
from peerload.model.config import CoreConfig
from peerload.model.errors import InvariantBroken, SlowDown, StoreError
from peerload.model.gossip import PRESETS
from peerload.model.messages import Identity, State
from peerload.model.task import TaskState
from peerload.policy import registry
from peerload.wire import recording

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.store_recover import Recovered
    from peerload.model.actions import Action, Row
    from peerload.model.config import AgentConfig
    from peerload.model.errors import PeerloadError
    from peerload.model.events import Event
    from peerload.model.messages import Envelope, Hello, Message

log = logging.getLogger("peerload.agent")

STOP_S_MAX = 5.0
"""How long a polite stop may take before what is left is cut."""


class Daemon:
    """One agent, from start to stop. `run` returns its exit code."""

    def __init__(self, config: AgentConfig, gpu_library: Any = None) -> None:  # noqa: ANN401 -- a module without types
        """gpu_library: what speaks like `pynvml`; None: this machine's driver is looked for."""
        self.config = config
        self.core_config = CoreConfig(
            lease_s=config.lease_s, gossip=PRESETS[config.gossip], gpu=settings.gpu_config(config.gpu)
        )
        self._gpu_library = gpu_library
        self.parts = Parts(config)
        self.introduction = Introduction(self.parts)
        self._is_up = False
        self._early: list[Event] | None = []
        self.recorder: Recorder | None = None
        self._recorded = ("", "", "", "")

    # -- life ----------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start, serve until told to stop, stop. Raises PeerloadError if it cannot start."""
        loop = asyncio.get_running_loop()
        state = private_directory(Path(self.config.state))
        for name in IN_THE_STATE:
            directory_in(state, name)
        self.parts.cluster = cluster.find(self.config.cluster, os.environ)
        check_addresses(self.config, loopback_only=self.parts.cluster.is_local)
        preset = registry.preset_source(self.config.policy)
        policies = registry.build_preset(*preset.tables())
        self.parts.disk = Disk(state)
        self.parts.disk.prepare()
        self.parts.store = Store(state / "peerload.db", self.config.node, self.parts.disk.reserve)
        found = store_notices.traces(state)
        self.parts.store.open()
        try:
            await check_places(self.config, loopback_only=self.parts.cluster.is_local)
            store_notices.begin_anew(self.parts, found)
            self.parts.tls = Credentials(self.parts.cluster, self.config.node, state / "tls")
            self.parts.inbox = Inbox(loop, self._consume, self.config.inbox_max)
            self.parts.spool = Spool(state)
            self.parts.gpus = node_gpus(self.parts, self._gpu_library)
            await self.parts.gpus.find()
            self.parts.identity = Identity(
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
            self.parts.store.close()
            self.parts.claims.close()
        return self.parts.exit_code

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self.parts.store.start_writer(
            lambda done: _threadsafe(loop, lambda: [call() for call in done]),
            lambda error: _threadsafe(loop, lambda: self.parts.fail(f"the store failed: {error}")),
        )
        self.parts.release = Release(self._persist)
        self.parts.journal = Journal(self.parts.release, self.parts.fail)
        self.parts.launcher = LauncherLink(
            Path(self.config.state) / "launcher",
            self._from_launcher,
            self.config.output_bytes_max,
            self.parts.fail,
        )
        launcher = await self.parts.launcher.start()
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
        self.parts.output = Output(self.parts.spool, self.parts.node)
        self.parts.links = PeerLinks(
            identity=self.parts.identity,
            tls=self.parts.tls,
            hello=self.introduction.hello,
            envelope=self.introduction.envelope,
            deliver=self._from_peer,
            met=self._met,
            unreachable=lambda node, reason: self.parts.inbox.put(events.PeerUnreachable(node, reason)),
            send_failed=self._send_failed,
            serve_output=self.parts.output.serve,
            counters=self.parts.counters,
        )
        self.parts.members = Members(
            self.parts, self.introduction.sealer("gossip"), Path(self.config.state) / "addresses"
        )
        self.parts.links.whereabouts = self.parts.members.identity_of
        address = await self.parts.members.listen()
        self.parts.identity = self.parts.links.identity  # its address is known by now
        self.parts.node.state.identity = self.parts.identity
        if self.config.mqtt:
            self.parts.bus = MqttBus(
                urls=self.config.mqtt,
                cluster=self.parts.cluster.name,
                site=self.config.site,
                identity=self.parts.identity,
                sealer=self.introduction.sealer("mqtt"),
                envelope=self.introduction.envelope,
                deliver=self._from_bus,
                on_change=lambda connected: self.parts.inbox.put(events.BusChanged(connected)),
                state=self.introduction.state,
                counters=self.parts.counters,
                state_every_s=self.config.mqtt_state_every_s,
            )
        self.parts.output.links = self.parts.links
        self.control = ControlServer(self.parts)
        self.parts.clients = self.control
        self.performer = Performer(self.parts)
        self._record()
        self._recover(kept, launcher)
        self.parts.disk.changed = self._disk_changed
        if self.parts.disk.state != "ok":
            self._disk_changed(self.parts.disk.state, "at the agent's start")
        async with asyncio.TaskGroup() as group:
            host = Sensors(
                self.parts.inbox.put,
                lambda: self.parts.node.ledger.cpus_running,
                lambda: tasks_cpu_s(self.parts.launcher.pid, self.parts.launcher.run),
            )
            background = [group.create_task(host.run())]
            background.append(group.create_task(self.parts.gpus.run()))
            background.append(group.create_task(self.parts.disk.watch()))
            background.append(group.create_task(self.parts.tls.keep_valid()))
            if self.introduction.speed() is None:
                background.append(group.create_task(find_out(self.introduction.speed_file, self.parts.inbox.put)))
            if self.parts.bus is not None:
                background.append(group.create_task(self.parts.bus.run()))
            self.parts.members.start()
            await self.control.start(self.config.socket)
            self._is_up = True
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.parts.stop)
            self.parts.launcher.tell()
            log.info("node %s is up: %s, peers reach it at %s", self.config.node, self.config.socket, address)
            self.parts.journal.happened(
                "agent", "started", reason=f"peerload {__version__}, incarnation {self.parts.identity.incarnation}"
            )
            await self.parts.stopping.wait()
            await self._wind_down()
            for task in background:
                task.cancel()

    async def _recovered(self) -> Recovered:
        """What was durable; of the tasks that wait, whether their directories are here now. Those that cannot be looked
        at for too many that hang count as here: a start that fails says so."""
        kept = self.parts.store.recover()
        store_notices.tell(self.parts, kept)
        here: dict[bytes, bool] = {}
        for row in kept.tasks:
            directory = row.spec.directory
            if row.record.state is TaskState.QUEUED and directory not in here:
                here[directory] = True
                with contextlib.suppress(SlowDown):
                    here[directory] = await self.parts.directories.look(directory)
        rows = (
            msgspec.structs.replace(row, directory_here=False) if not here.get(row.spec.directory, True) else row
            for row in kept.tasks
        )
        return msgspec.structs.replace(kept, tasks=tuple(rows))

    def _recover(self, kept: Recovered, launcher: events.LauncherReady) -> None:
        self.parts.inbox.put(
            events.AgentStarted(
                tasks=kept.tasks,
                executions=kept.executions,
                floors=kept.floors,
                tokens=kept.tokens,
                counter=kept.counter,
                running=launcher.running,
                ended=launcher.ended,
                frozen=launcher.frozen,
                past=kept.past,
                drained=kept.drained,
                known=self.parts.members.known,
                seeds=self.config.peer,
            )
        )
        self._release_early()

    async def _wind_down(self) -> None:
        """Say good-bye, let what was decided become durable and go out, close everything."""
        await self.control.close()
        self.parts.journal.happened("agent", "stopping")
        self.parts.inbox.put(events.AgentStopping())
        try:
            async with asyncio.timeout(STOP_S_MAX):
                if self.parts.bus is not None:
                    await self.parts.bus.close()
                if self.parts.ends_tasks:
                    await self.parts.launcher.stop_all()
                if not self.parts.has_failed:
                    await self.performer.drained()
        except TimeoutError:
            log.warning("the stop took longer than %g s; the rest is cut", STOP_S_MAX)
        await self.parts.output.close()
        await self.performer.close()
        self.parts.members.close(forget=self.parts.leaves)
        await self.parts.links.close()
        await self.parts.launcher.close()
        await self.parts.gpus.close()
        if self.recorder is not None:
            self.recorder.close()

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
        self.recorder = Recorder(self.config.record, started)
        log.info("every event and decision is recorded in %s, tasks' variables too", self.config.record)

    # -- the consumer --------------------------------------------------------------------------------------------------

    def _consume(self, batch: list[Event]) -> None:
        try:
            for event in batch:
                if self.parts.has_failed:
                    return
                actions = self._decide(event)
                if isinstance(event, events.LauncherReady):
                    self.parts.launcher.resume()
                self.performer.perform(actions)
        except InvariantBroken as error:
            log.critical("%s (%s)", error.what, error.story)
            self.parts.fail("a rule of its own was broken")
        except Exception as error:  # crash-only: a bug must not leave half a decision behind
            log.exception("a bug")
            self.parts.fail(f"a bug: {error!r}")
        finally:
            self._flush()

    def _decide(self, event: Event) -> list[Action]:
        now = self.parts.now()
        try:
            actions = self.parts.node.handle(now, event)
        except Exception as error:
            if self.recorder is not None:
                self.recorder.handled(now, event, (), repr(error))
            raise
        if self.recorder is not None:
            self.recorder.handled(now, event, actions)
        return actions

    def _flush(self) -> None:
        if self.recorder is not None:
            self.recorder.flush()
        try:
            self.parts.release.flush()
        except StoreError as error:
            self.parts.fail(f"the store failed: {error}")

    def _persist(self, rows: list[Row], done: Callable[[], None]) -> None:
        self.parts.store.persist(rows, done)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _from_launcher(self, event: Event) -> None:
        """Into the inbox, ends only with their output on disk; nothing overtakes a launcher's list of what it has."""
        if self._early is not None:  # AgentStarted or such a list has not been told yet
            self._early.append(event)
        elif isinstance(event, events.LauncherReady):
            self._early = []
            self.performer.settle_listed(event, self._release_early)
        elif isinstance(event, events.TaskEnded):
            self.performer.settle(event)
        else:
            self.parts.inbox.put(event)

    def _release_early(self) -> None:
        early, self._early = self._early, None
        for event in early or ():
            self._from_launcher(event)

    def _disk_changed(self, state: str, reason: str) -> None:
        log.warning("the disk of %s is %s: %s", self.config.state, state, reason)
        self.parts.journal.happened("disk", state, reason=reason)
        self.parts.inbox.put(events.DiskRoomChanged(state == "ok", "" if state == "ok" else f"disk {state}"))

    def _from_peer(self, src: str, message: Message) -> None:
        self.performer.received(src, message)

    def _from_bus(self, envelope: Envelope, retained: bool) -> None:
        del retained
        self.performer.heard_on_bus(envelope)
        body = envelope.body
        if isinstance(body, State):
            if body.identity.address:
                self.parts.links.learn(body.identity)
                self.parts.members.news()
            # However live, it may be late: only a Hello proves that a machine was started anew.
            self.parts.inbox.put(events.PeerMet(body.identity, body.profile, body.report, retained=True))
        else:
            self.parts.inbox.put(events.MessageReceived(envelope.src, body))  # type: ignore[arg-type]

    def _met(self, hello: Hello) -> None:
        self.parts.links.learn(hello.identity)
        self.parts.members.news()
        self.parts.inbox.put(
            events.PeerMet(hello.identity, hello.profile, hello.report, hello.peers, refutation=hello.refutation)
        )

    def _send_failed(self, dst: str, message: Message) -> None:
        self.parts.counters["peer sends failed"] += 1
        self.parts.inbox.put(events.SendFailed(dst, message))  # type: ignore[arg-type]


def _threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call in the loop's thread; a loop that is closed already needs it no more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def explain(error: PeerloadError) -> str:
    """One line and a hint."""
    return f"{error}" + (f"\n  {error.hint}" if error.hint else "")
