"""Event sources: turn input from the launcher, the peers and the broker into events of the core.

Nothing is decided here. An attempt that has ended is reported when its output is on disk. Reports of the launcher that arrive
before `AgentStarted`, or while one of its lists is being settled, are queued behind that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from peerload.agent.accounts import TaskUser
from peerload.agent.files.environments import BuildFailed
from peerload.agent.launcher.client import LauncherError
from peerload.agent.launcher.oom_output import with_shortages
from peerload.agent.peers.connection import is_link_message
from peerload.agent.runtime import SHORT_OF
from peerload.core.handoff.executor import OFFERS_MAX
from peerload.files.store import NoRoom
from peerload.launcher.process import SHORTAGES
from peerload.launcher.protocol import StdinFed
from peerload.model import events, messages, metrics, rules
from peerload.model.bounded import BoundedDict
from peerload.model.errors import SlowDown, StagingFailed
from peerload.model.task import Exit, execution_key, without_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from peerload.agent.accounts import DirectoryQueries, UserServices
    from peerload.agent.files.attempts import AttemptFiles
    from peerload.agent.joining import CertificateRenewal, TrustDistribution
    from peerload.agent.launcher.mps import MpsDaemons
    from peerload.agent.mqtt import MqttBus
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.local_node import DuplicateNames
    from peerload.agent.peers.membership import Members
    from peerload.agent.runtime import AgentInfo, BackgroundTasks, Inbox, RunState, TaskWatches
    from peerload.agent.sensors.energy import EnergySensors
    from peerload.agent.sensors.gpus import Gpus
    from peerload.agent.stdin import StdinFetches, StdinForwarding
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.core.node import Node
    from peerload.model.events import Event
    from peerload.security.revocation import TrustStore

T = TypeVar("T")
log = logging.getLogger("peerload.agent")

CANNOT_STAGE, CANNOT_EXECUTE = 125, 126
ROOM_PAUSE_S, ROOM_PAUSE_S_MAX = 1.0, 30.0
"""First and longest pause before the output files of an ended attempt are tried again after a lack of room."""
COLLECTED_ANEW = "they are collected anew, since the agent or its launcher was restarted"
SHORT_PAUSE_S, SHORT_PAUSE_S_MAX = 1.0, 30.0
"""First and longest pause before the output of ended attempts is settled again after a lack of descriptors or memory."""
PEERS_MAX = 4096
"""Maximum number of peers remembered from MQTT; the least recent is forgotten first."""
ADVICE_UNANSWERED_MAX = 6
"""Maximum number of advice messages to a peer over MQTT without an answer there; after that, the peer link is used until the
peer is heard on MQTT again."""


# -- the launcher ------------------------------------------------------------------------------------------------------


class ExitRecords:
    """The exits that the launcher reports, completed by syncing their output to disk."""

    def __init__(
        self,
        info: AgentInfo,
        spool: Spool,
        disk: DiskSpace,
        files: AttemptFiles,
        energy: EnergySensors,
        inbox: Inbox,
        watches: TaskWatches,
    ) -> None:
        self._info = info
        self._inbox = inbox
        self._watches = watches
        self._spool = spool
        self.disk = disk
        self.files = files
        self.with_energy = energy.ended
        self.waits_because = ""
        """Resource that was short when ends of attempts last had to wait: file descriptors or memory."""
        self.without_room: dict[str, str] = {}
        """Ended attempts whose output files wait for disk space → the reason. Each keeps its slot, which bounds their
        number."""
        self._given_up: dict[str, asyncio.Event] = {}

    @property
    def waiting(self) -> int:
        """Number of ended attempts that wait because this agent is short of descriptors or memory."""
        return self._info.counters[metrics.ENDS_WAITING]

    async def settled(self, ended: Sequence[tuple[str, Exit]]) -> tuple[tuple[str, Exit], ...]:
        """Sync the output of these ended attempts to disk → the same attempts, with the resource that they have run out of.
        Attempts that lost some of their output are counted."""
        found = await self._patiently(len(ended), lambda: asyncio.to_thread(self._spool.settle, ended))
        lost = sum(before[1] is not after[1] for before, after in zip(ended, found, strict=True))
        if lost:
            self._info.counters[metrics.OUTPUTS_UNREADABLE] += lost
        full = self._info.config.node if self.disk.is_full else ""
        found = await asyncio.to_thread(with_shortages, self._spool, found, full)
        with_energy = [(key, self.with_energy(key, exit_)) for key, exit_ in found]
        ends = await asyncio.gather(*(self._with_files(*one) for one in with_energy))
        return tuple((key, end) for (key, _), end in zip(with_energy, ends, strict=True))

    async def _with_files(self, key: str, exit_: Exit) -> Exit:
        """Collect and place the output files of an ended attempt → its exit. Waits while a disk has no room for them."""
        pause_s = ROOM_PAUSE_S
        try:
            while True:
                try:
                    return await self._patiently(1, functools.partial(self.files.settled, key, exit_))
                except NoRoom as error:
                    why = str(error)
                given_up = self._given_up.setdefault(key, asyncio.Event())
                if self.without_room.get(key) != why:
                    task = self.files.task_of(key)
                    log.warning("output files wait for room: task=%s error=%s", task, why)
                    self._watches.delayed(task, why)
                    self._inbox.put(events.OutputWaits(key, why))
                self.without_room[key] = why
                self._info.counters[metrics.OUTPUTS_WAITING] = len(self.without_room)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await given_up.wait()
                    return without_files(exit_, f"it was ended while its output files waited: {why}")
                pause_s = min(2 * pause_s, ROOM_PAUSE_S_MAX)
        finally:
            self._given_up.pop(key, None)
            self.without_room.pop(key, None)
            self._info.counters[metrics.OUTPUTS_WAITING] = len(self.without_room)

    def give_up(self, key: str) -> bool:
        """Stop the wait of an ended attempt's output files, which are lost. → False if they do not wait."""
        given_up = self._given_up.get(key)
        if given_up is not None:
            given_up.set()
        return given_up is not None

    async def _patiently(self, count: int, settle: Callable[[], Awaitable[T]]) -> T:
        """Settle the ends of ``count`` attempts. They wait while this agent is short of descriptors or memory."""
        pause_s, is_waiting = SHORT_PAUSE_S, False
        try:
            while True:
                try:
                    return await settle()
                except OSError as error:
                    if error.errno not in SHORT_OF:
                        raise
                    self.waits_because = str(error.strerror)
                    log.warning("ends of attempts wait: attempts=%d next_try_s=%g error=%s", count, pause_s, error)
                if not is_waiting:
                    is_waiting = True
                    self._info.counters[metrics.ENDS_WAITING] += count
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, SHORT_PAUSE_S_MAX)
        finally:
            if is_waiting:
                self._info.counters[metrics.ENDS_WAITING] -= count


@dataclass(eq=False, repr=False)
class AttemptDevices:
    """The devices that attempts hold. A failure of a device is reported before the failure
    of the attempt that held it."""

    _node: Node
    _gpus: Gpus
    _mps: MpsDaemons

    def has(self, key: str) -> bool:
        return key in self._node.ledger.devices.holding

    async def report_failures(self, key: str) -> None:
        """Check whether the devices of this attempt, or their MPS daemons, have failed, and report that."""
        await asyncio.gather(self._gpus.read_anew(), self._mps.look(key))


@dataclass(eq=False, repr=False)
class ExitSettler:
    """Reports ended attempts to the core: their output is on disk before any result is used, and their
    followers are notified of the end."""

    _records: ExitRecords
    _inbox: Inbox
    _fetches: StdinFetches
    _output: TaskOutputs
    _devices: AttemptDevices
    _background: BackgroundTasks
    _settling: set[str] = field(default_factory=set, init=False)

    def settle(self, event: events.TaskEnded) -> None:
        self._fetches.end(event.key)
        has_output = event.exit.stdout_bytes or event.exit.stderr_bytes
        if (
            has_output
            or self._records.files.has(event.key)
            or (event.exit.exit_code and (self._records.disk.is_full or self._devices.has(event.key)))
        ):
            if event.with_start:
                self._inbox.put(events.TaskStarted(event.key, event.exit.started_at))
            self._settling.add(event.key)
            self._background.start(self._settle(event))
        else:
            self._output.attempts_ended(((event.key, event.exit),))
            exit_ = self._records.with_energy(event.key, event.exit)
            self._inbox.put(events.TaskEnded(event.key, exit_, event.with_start))

    async def _settle(self, event: events.TaskEnded) -> None:
        try:
            ((key, exit_),) = await self._records.settled(((event.key, event.exit),))
            if exit_.exit_code and self._devices.has(key):
                await self._devices.report_failures(key)
        finally:
            self._settling.discard(event.key)
        self._output.attempts_ended(((key, exit_),))
        self._inbox.put(events.TaskEnded(key, exit_))

    def give_up(self, key: str) -> bool:
        """Stop the wait of an ended attempt's output files for room. → False if they do not wait."""
        return self._records.give_up(key)

    def settle_listed(self, event: events.LauncherReady, then: Callable[[], None]) -> None:
        """Settle the list of a launcher; ``then`` is called when the list is in the inbox."""
        self._background.start(self._settle_listed(event, then))

    async def _settle_listed(self, event: events.LauncherReady, then: Callable[[], None]) -> None:
        event, with_files = await self.without_files(event)
        self._output.attempts_ended(event.ended)
        self._inbox.put(event)
        then()
        self.settle_later(with_files)

    async def without_files(self, event: events.LauncherReady) -> tuple[events.LauncherReady, list[tuple[str, Exit]]]:
        """Settle the list of a launcher → the same list, in which ended attempts with files count as running; and these attempts.
        Their outputs may be large, or their file system may hang; they delay nothing else."""
        with_files = [one for one in event.ended if self._records.files.has(one[0])]
        ended = await self._records.settled([one for one in event.ended if not self._records.files.has(one[0])])
        also = tuple((key, exit_.started_at, 0.0) for key, exit_ in with_files)
        return msgspec.structs.replace(event, ended=ended, running=event.running + also), with_files

    def settle_later(self, with_files: Iterable[tuple[str, Exit]]) -> None:
        """Settle ended attempts that the core considers running: it is notified immediately that they have ended."""
        for key, exit_ in with_files:
            if key not in self._records.without_room:
                self._inbox.put(events.OutputWaits(key, COLLECTED_ANEW))
            if key not in self._settling:
                self.settle(events.TaskEnded(key, exit_))

    def never_started(self, key: str, reason: str) -> None:
        """Report that an attempt was not started, and may be tried again."""
        self._inbox.put(events.TaskLost(key, reason, never_started=True))

    def not_started(self, key: str, what: str, error: Exception) -> None:
        """Report that an attempt was not started: the node is short of a resource, or the attempt can never be started."""
        if isinstance(error, OSError) and (shortage := SHORTAGES.get(error.errno or 0)):
            log.warning("attempt not started: key=%s reason=%s error=%s", key, what, error)
            self._inbox.put(events.TaskLost(key, shortage, never_started=True, shortage=shortage))
        else:
            why = str(getattr(error, "strerror", None) or error)
            reason = f"{what}: {why}" if what else why
            code = CANNOT_STAGE if isinstance(error, StagingFailed) else CANNOT_EXECUTE
            not_built = isinstance(error, BuildFailed)
            self.settle(events.TaskEnded(key, Exit(code, reason=reason, not_built=not_built)))


class OwnProcesses(Protocol):
    """Processes of the agent's own that the launcher runs beside the tasks, under keys that begin with ``PREFIX``."""

    PREFIX: str

    def event_received(self, event: Event, /) -> None:
        """Process an event about one of them."""

    def listed(self, running: AbstractSet[str], ended: Mapping[str, Exit], /) -> None:
        """Process a launcher's list: running processes, and exit records of ended ones."""


class LauncherEvents:
    """Receiver of the launcher's events."""

    def __init__(self, inbox: Inbox, settler: ExitSettler, stdin: StdinForwarding, own: Sequence[OwnProcesses]) -> None:
        self._inbox = inbox
        self._settler = settler
        self._stdin = stdin
        self._own = own
        self._prefixes = tuple(one.PREFIX for one in own)
        self._early: list[Event] | None = []
        """Queued events; None: events need not wait."""
        self._with_files: list[tuple[str, Exit]] = []
        """Ended attempts of the first list that have files."""

    def received(self, event: Event | StdinFed) -> None:
        """Put an event into the inbox, the end of an attempt only with its output on disk."""
        if isinstance(event, StdinFed):
            if self._early is None:  # early reports are dropped: `StdinForwarding.adopt` requests them again
                self._stdin.fed(event.key, event.offset, is_closed=event.is_closed)
            return
        key = getattr(event, "key", "")
        if key.startswith(self._prefixes):
            next(own for own in self._own if key.startswith(own.PREFIX)).event_received(event)
            return
        if isinstance(event, events.LauncherReady):
            event = self.without_own(event)
        self._take(event)

    async def first_listed(self, ready: events.LauncherReady) -> events.LauncherReady:
        """Settle the first list of a launcher: no result may be used before its output is on disk."""
        ready, self._with_files = await self._settler.without_files(self.without_own(ready))
        return ready

    def without_own(self, ready: events.LauncherReady) -> events.LauncherReady:
        """The list of a launcher without the agent's own processes."""
        for own in self._own:
            running = {key for key, *_ in ready.running if key.startswith(own.PREFIX)}
            ended = {key: exit_ for key, exit_ in ready.ended if key.startswith(own.PREFIX)}
            own.listed(running, ended)
            ready = ready.without(running | ended.keys())
        return ready

    def _take(self, event: Event) -> None:
        if self._early is not None:
            self._early.append(event)
        elif isinstance(event, events.LauncherReady):
            self._early = []
            self._settler.settle_listed(event, self.release_early)
        elif isinstance(event, events.TaskEnded):
            self._settler.settle(event)
        else:
            self._inbox.put(event)

    def release_early(self) -> None:
        """Report the events that have waited, in their order."""
        early, self._early = self._early, None
        with_files, self._with_files = self._with_files, []
        if with_files:
            self._settler.settle_later(with_files)
        for event in early or ():
            self._take(event)


# -- peers -------------------------------------------------------------------------------------------------------------


class PeerMessages:
    """Messages of peers on their way to the inbox: offers, after checks of their directory and user; questions about
    directories; and messages to peers that could not be sent."""

    def __init__(
        self,
        inbox: Inbox,
        node: Node,
        spool: Spool,
        users: UserServices,
        queries: DirectoryQueries,
        security: SecurityEvents,
        background: BackgroundTasks,
    ) -> None:
        self._inbox = inbox
        self._node = node
        self._spool = spool
        self._users = users
        self._queries = queries
        self._security = security
        self._counters = security.counters
        self._background = background
        self._looked_up: Counter[str] = Counter()
        """Number of offers and questions per peer whose directory is being checked."""

    def received(self, src: str, message: messages.LinkMessage) -> None:
        """Put a message into the inbox, or answer it."""
        if isinstance(message, messages.Offer):
            self._offered(src, message)
        elif isinstance(message, messages.DirectoryRequest):
            if self._may_look_up(src):
                self._background.start(self._answer(src, message))
        elif isinstance(message, messages.DirectoryTold) and not self._queries.answer_received(src, message):
            self._counters[metrics.DIRECTORY_ANSWERS_UNASKED] += 1
        else:
            self._inbox.put(events.MessageReceived(src, message))

    def _offered(self, src: str, offer: messages.Offer) -> None:
        if self._has_output(offer):
            self._counters[metrics.OFFERS_OF_KEPT_OUTPUT] += 1
        elif self._users.seen_lately(TaskUser(src, offer.spec.user), offer.spec.directory):
            self._inbox.put(events.MessageReceived(src, offer))
        elif self._may_look_up(src):
            self._background.start(self._offer_received(src, offer))

    def send_failed(self, dst: str, message: messages.LinkMessage) -> None:
        self._counters[metrics.PEER_SENDS_FAILED] += 1
        self._inbox.put(events.SendFailed(dst, message))

    def _has_output(self, offer: messages.Offer) -> bool:
        """True if output of this attempt is stored here that the core no longer knows: that of an ended task of this node
        whose uid another home uses, too. It must not be overwritten."""
        key = execution_key(offer.uid, offer.attempt)
        is_known = key in self._node.executor.remote_tasks or offer.uid in self._node.home.tasks
        return not is_known and any(map(os.path.exists, self._spool.names(key)))

    def _may_look_up(self, src: str) -> bool:
        """True if one more directory may be checked for this peer; otherwise its message stays unanswered."""
        if self._looked_up[src] >= OFFERS_MAX:
            self._counters[metrics.OFFERS_UNANSWERED] += 1
            self._security.report(rules.PEERS_LIMITED, src, f"more than {OFFERS_MAX} offers outstanding")
            return False
        self._looked_up[src] += 1
        return True

    def _looked_up_one(self, src: str) -> None:
        self._looked_up[src] -= 1
        if not self._looked_up[src]:
            del self._looked_up[src]

    async def _offer_received(self, src: str, offer: messages.Offer) -> None:
        refused, here, stalled = "", False, ""
        try:
            refused, here = await self._users.objection(TaskUser(src, offer.spec.user), offer.spec.directory)
        except SlowDown as error:
            stalled = error.why[: messages.WHY_LENGTH_MAX]
        except LauncherError:
            self._counters[metrics.OFFERS_UNANSWERED] += 1  # its sender treats silence as a temporary decline
            return
        finally:
            self._looked_up_one(src)
        self._inbox.put(events.MessageReceived(src, offer, directory_here=here, refused=refused, stalled=stalled))

    async def _answer(self, src: str, request: messages.DirectoryRequest) -> None:
        """Answer with the code with which an offer would be declined."""
        try:
            refused, here = await self._users.objection(TaskUser(src, request.user), request.directory)
        except SlowDown:
            code = "stalled"
        except LauncherError:
            return
        else:
            code = "policy" if refused else "" if here else "directory"
        finally:
            self._looked_up_one(src)
        identity = "" if code else self._users.identity_of(request.directory)
        self._queries.answer(src, messages.DirectoryTold(request.directory, request.user, code, identity))


@dataclass(eq=False, repr=False)
class CaMessages:
    """Statements of the CA and certificates, which never reach the core."""

    trust: TrustDistribution
    _renewal: CertificateRenewal
    _run: RunState

    def received(self, src: str, message: messages.LinkMessage) -> bool:
        """Process a message of a peer if it is of these kinds → True if it is."""
        match message:
            case messages.Trust():
                try:
                    self.trust.received(src, message)
                except OSError as error:
                    self._run.fail(f"cannot save the statements of the CA: {error.strerror}")
            case messages.CertificateRequest():
                self._renewal.requested(src)
            case messages.CertificateTold():
                self._renewal.received(src, message)
            case _:
                return False
        return True


@dataclass(eq=False, repr=False)
class PeerEventSource:
    """The `LinkOwner`: receives the messages and events of the peer links."""

    _inbox: Inbox
    _ca: CaMessages
    _messages: PeerMessages
    _members: Members
    _duplicates: DuplicateNames
    _bus_peers: BusPeers

    def deliver(self, src: str, message: messages.LinkMessage) -> None:
        if type(message) in messages.OWNERSHIP:
            self._messages.received(src, message)
            return
        if self._ca.received(src, message):
            return
        if isinstance(message, messages.Sync | messages.Leaving):
            self._members.changed()
        elif isinstance(message, messages.State):  # no broker, or this node is not received there
            self._bus_peers.forget(src)
        self._messages.received(src, message)

    def met(self, hello: messages.Hello) -> None:
        self._ca.trust.met(hello)
        self._members.met(hello)
        self._inbox.put(
            events.PeerMet(hello.identity, hello.profile, hello.report, hello.peers, refutation=hello.refutation)
        )

    def unreachable(self, node: str, reason: str) -> None:
        self._inbox.put(events.PeerUnreachable(node, reason))

    def send_failed(self, dst: str, message: messages.LinkMessage) -> None:
        self._messages.send_failed(dst, message)

    def name_taken(self, by: str) -> None:
        self._duplicates.refused(by)

    def copied(self, other: messages.Identity, up_s: float) -> None:
        self._duplicates.copy_proven(other, up_s)


# -- the broker --------------------------------------------------------------------------------------------------------


class BusPeers:
    """Peers whose messages this node receives on MQTT; advice for them may be sent there."""

    def __init__(self) -> None:
        self._peers: BoundedDict[str, tuple[str, int]] = BoundedDict(PEERS_MAX)
        """Boot id of each node, and the number of advice messages sent since its last message."""

    def received(self, envelope: messages.Envelope) -> None:
        self._peers[envelope.src] = (envelope.src_boot, 0)

    def boot_of(self, node: str) -> str | None:
        """The boot id of a peer to which advice may be sent; None if the peer link has to be used."""
        boot, unanswered = self._peers.get(node, ("", ADVICE_UNANSWERED_MAX))
        return boot if unanswered < ADVICE_UNANSWERED_MAX else None

    def sent(self, node: str) -> None:
        boot, unanswered = self._peers[node]
        self._peers[node] = (boot, unanswered + 1)

    def forget(self, node: str) -> None:
        """Use the peer link to this node until it sends over MQTT again."""
        self._peers.pop(node, None)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, str) and self.boot_of(node) is not None


class BusAdvice:
    """Sender of advice over MQTT. bus: None if no broker is configured."""

    def __init__(self, bus: MqttBus | None, peers: BusPeers) -> None:
        self._bus = bus
        self._peers = peers

    def send(self, dst: str, message: messages.LinkMessage) -> bool:
        """Send advice over MQTT while both ends are on it. → False if the peer link has to be used."""
        boot = self._peers.boot_of(dst) if self._bus is not None else None
        if self._bus is None or boot is None or not self._bus.send(dst, boot, message):
            return False
        self._peers.sent(dst)
        return True

    def announce(self, message: messages.Broadcast) -> Container[str]:
        """Publish advice for all peers → the peers that it reaches."""
        if self._bus is None:
            return ()
        is_published = (
            self._bus.publish_state(message) if isinstance(message, messages.State) else self._bus.broadcast(message)
        )
        return self._peers if is_published else ()

    def forget(self, node: str) -> None:
        self._peers.forget(node)


@dataclass(eq=False, repr=False)
class BusEvents:
    """The `BusOwner`: receives the messages of the broker."""

    _inbox: Inbox
    _trust: TrustStore
    _links: PeerLinks
    _members: Members
    _duplicates: DuplicateNames
    _security: SecurityEvents
    _bus_peers: BusPeers

    def bus_changed(self, *, connected: bool) -> None:
        self._inbox.put(events.BusChanged(connected))

    def copy_reported(self, other: messages.Identity) -> None:
        if self._duplicates.copy_reported(other):
            self._links.dial_copy(other.address)

    def from_bus(self, envelope: messages.Envelope, *, retained: bool) -> None:
        """Handle advice from the broker, unless its sender is revoked."""
        if not self._trust.admits(envelope.src, envelope.src_boot):
            self._security.counters[metrics.labelled(metrics.MQTT_MESSAGES_DROPPED, reason="revoked_node")] += 1
            self._security.report("J4", envelope.src, "a message over MQTT, though it was revoked")
            return
        self._bus_peers.received(envelope)
        body = envelope.body
        assert is_link_message(body)  # the filter admits only advice
        if isinstance(body, messages.State):
            if body.identity.address and self._links.learn(body.identity):
                self._members.changed()
            if retained:
                self._inbox.put(events.PeerMet(body.identity, body.profile, body.report, retained=True))
                return
        self._inbox.put(events.MessageReceived(envelope.src, body))
