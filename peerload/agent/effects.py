"""Effects: the consumer passes each event of the inbox to the node, in order, and carries out the resulting actions.

Outward actions are carried out as soon as the rows before them are durable. `Performer` passes each action to the object that
owns that kind of effect. The rows of a batch of events go to the store together, at its end. Nothing here decides anything
about tasks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from dataclasses import dataclass, field
from functools import partial
from signal import SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any, ClassVar, assert_never

import msgspec

from peerload.agent.files.environments import BuildFailed
from peerload.agent.launcher.client import TRACEPARENT, child_traceparent, held_devices, task_variables
from peerload.agent.runtime import Histogram, coalesced_s, now
from peerload.agent.store.disk_space import cannot_write
from peerload.model import actions, events, metrics, timers
from peerload.model.errors import BadRequest, InvariantBroken, PeerloadError, StoreError
from peerload.model.messages import ADVICE, RenewOk, Result, needs_no_row
from peerload.model.task import SCRATCH, Exit, execution_key, variables_of
from peerload.model.timers import GossipTimerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from peerload.agent.completion.completion_jobs import CompletionJobs
    from peerload.agent.energy import Waker
    from peerload.agent.event_sources import BusAdvice, ExitSettler
    from peerload.agent.files.attempts import AttemptFiles
    from peerload.agent.files.environments import Environments
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.launcher.mps import MpsDaemons
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.membership import Members
    from peerload.agent.recorder import Recorder
    from peerload.agent.requests.server import ClientEffects
    from peerload.agent.runtime import AgentInfo, BackgroundTasks, Inbox, RunState, TaskWatches
    from peerload.agent.sensors.gpus import Gpus
    from peerload.agent.stdin import StdinFetches, StdinForwarding
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog, Outbox, SecurityEvents
    from peerload.core.node import Node
    from peerload.model.actions import Action, Row
    from peerload.model.events import Event, Instant
    from peerload.model.messages import LinkMessage
    from peerload.model.task import TaskSpec


log = logging.getLogger("peerload.agent")


@dataclass(eq=False, repr=False)
class Consumer:
    """The one consumer of the inbox. recorder: records every event with its decisions; None: nothing is recorded."""

    _node: Node
    _performer: Performer
    _outbox: Outbox
    _run: RunState
    _recorder: Recorder | None
    _has_failing_policy: bool = field(default=False, init=False)

    async def run(self, inbox: Inbox) -> None:
        """Handle events as they arrive, until cancelled."""
        while True:
            self.consume(await inbox.turn())

    def consume(self, batch: list[Event]) -> None:
        """Handle some events, in order. A bug ends the agent; only durable decisions have taken effect then."""
        try:
            for event in events.together(batch) if len(batch) > 1 else batch:
                if self._run.has_failed:
                    return
                self._performer.perform(event, self._decide(event))
        except InvariantBroken as error:
            log.critical("invariant broken: what=%s story=%s", error.what, error.story)
            self._run.fail("an internal invariant was broken")
        except Exception as error:  # crash-only: a bug must not leave half a decision behind
            log.exception("bug in a decision or an effect")
            self._run.fail(f"a bug: {error!r}")
        finally:
            self._flush()

    def _decide(self, event: Event) -> list[Action]:
        moment = now()
        try:
            actions = self._node.handle(moment, event)
        except Exception as error:
            if self._recorder is not None:
                self._recorder.handled(moment, event, (), repr(error))
            raise
        if self._recorder is not None:
            self._recorder.handled(moment, event, actions)
        if (failure := self._node.state.policy_failure) and not self._has_failing_policy:
            log.warning("policy failed, tasks stay where it decides nothing: error=%s", failure)
            self._has_failing_policy = True
        return actions

    def _flush(self) -> None:
        if self._recorder is not None:
            self._recorder.flush()
        try:
            self._outbox.flush()
        except StoreError as error:
            self._run.fail(f"the store failed: {error}")


INLINE_BYTES_MAX = 48 << 10
"""Maximum size of output that is sent in the RESULT; more is fetched over a separate connection."""
FOUND_AT_A_TIME = 25
"""Number of tasks looked up on disk, some microseconds each, before other work gets its turn."""
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
CLOCKS_DIFFER_S = 0.001
"""Timers that expire too early by more than this are set again."""
ROWS_WITH_EFFECTS = frozenset((actions.PutChores, actions.DropExecution, actions.PutFloor))
"""Types of rows that have further effects when they are durable."""
STARTS = (events.AgentStarted, events.LauncherReady)
COALESCED = frozenset((GossipTimerKind.TURN, GossipTimerKind.SYNC, GossipTimerKind.AGAIN, GossipTimerKind.PROFILES))
"""Periodic timers of gossip, which expire together with the agent's other periodic work, as do long pauses of a node that looks for
work; all timers that wait for an answer are exact."""
BULK_TIMERS = (timers.Batch, timers.EligibilityDue)
"""Timers that continue work on many tasks, some at a time; they wait while the disk is behind."""


@dataclass(eq=False, repr=False)
class Performer:
    """The performer of actions: passes each one to the object that owns that kind of effect, outward ones when they may become
    visible."""

    _outbox: Outbox
    _timers: Timers
    _records: RecordEffects
    _tasks: TaskEffects
    _peers: PeerEffects
    _results: ResultEffects
    _clients: ClientEffects

    def perform(self, event: Event, decided: list[Action]) -> None:
        """Perform the actions of one event."""
        if isinstance(event, events.LauncherReady):
            self._tasks.launcher.resume()
        for action in decided:
            if (carry_out := self._AT_ONCE.get(type(action))) is not None:
                carry_out(self, action)
            else:
                self._outbox.when_durable(partial(self._outward, action))
        if isinstance(event, STARTS):
            is_first = isinstance(event, events.AgentStarted)
            if is_first:
                self._clients.attach.restored()
            self._tasks.adopt(is_first=is_first)

    def _send(self, action: actions.Send) -> None:
        """Send a message when the rows that it depends on are durable: renewed leases depend only on rows of their own tasks, and
        messages that promise nothing depend on none."""
        act = partial(self._peers.send, action.dst, action.message)
        if isinstance(action.message, RenewOk):
            self._outbox.renewal(tuple(extension.uid for extension in action.message.extensions), act)
        elif needs_no_row(action.message):
            self._outbox.at_once(act)
        else:
            self._outbox.when_durable(act)

    def _persist(self, rows: tuple[Row, ...]) -> None:
        self._outbox.keep(rows)
        for row in rows:
            if type(row) in ROWS_WITH_EFFECTS:
                self._records.kept(row)
                self._tasks.storage.dropped(row)

    _AT_ONCE: ClassVar[Mapping[type[Any], Callable[[Performer, Any], object]]] = {
        actions.SetTimer: lambda self, action: self._timers.set(action),
        actions.ClearTimer: lambda self, action: self._timers.clear(action),
        actions.SendGossip: lambda self, action: self._peers.members.send(action),
        actions.LookAtDevices: lambda self, _: self._tasks.gpus.look(),
        actions.Note: lambda self, action: self._records.note(action.event),
        actions.Decided: lambda self, action: self._clients.decided(action),
        actions.Persist: lambda self, action: self._persist(action.rows),
        actions.Send: _send,
    }
    """All that cannot be seen from outside; messages, some of which wait for no row; and the rows themselves."""

    def _outward(self, action: Action) -> None:  # noqa: PLR0912 C901 -- one line an action
        match action:  # frequent ones first
            case actions.TaskChanged():
                self._clients.tasks.changed(action)
            case actions.MembersCancelled():
                self._clients.tasks.members_cancelled(action)
            case actions.SpawnTask():
                self._tasks.starts.spawn(action)
            case actions.ForgetTask():
                self._tasks.forget(action)
            case actions.AttemptGone():
                self._clients.cancel_waits.attempt_gone(action.key)
            case actions.Answer():
                self._clients.core.answered(action)
            case actions.AnswerPart():
                self._clients.core.answered_in_part(action)
            case actions.StageFiles():
                self._tasks.starts.environments.offered(action)
            case actions.SignalTask():
                self._tasks.signal(action)
            case actions.SetLease():
                self._tasks.launcher.set_lease(action.key, action.deadline_s, action.ts)
            case actions.EvictTask():
                self._tasks.launcher.evict(action.key, action.reason)
            case actions.SendResult():
                self._results.send(action)
            case actions.KeepOutput():
                self._results.keep(action)
            case actions.FetchOutput():
                self._results.fetch(action)
            case actions.Announce():
                self._peers.announce(action)
            case actions.FindTasks():
                self._records.find(action.tasks)
            case actions.Dial():
                self._peers.links.connect(action.identity)
            case actions.WakePeer():
                self._peers.wake(action)
            case actions.ForgetPeer():
                self._peers.forget(action)
            case actions.DialAddress():
                self._peers.links.dial(action.address)
            case (
                actions.Persist()
                | actions.Send()
                | actions.SetTimer()
                | actions.ClearTimer()
                | actions.Note()
                | actions.Decided()
                | actions.SendGossip()
                | actions.LookAtDevices()
            ):
                raise AssertionError("not outward")
            case _:
                assert_never(action)

    async def drained(self, inbox: Inbox) -> None:
        """Wait until all decisions are durable and carried out."""
        self._records.journal.settle()
        while len(inbox) or self._outbox.held:
            durable = asyncio.Event()
            self._outbox.when_durable(durable.set)
            await durable.wait()
            await asyncio.sleep(0)  # lets the consumer empty the inbox

    async def close(self) -> None:
        self._timers.close()
        await self._tasks.starts.close()


class Timers:
    """The timers of the core, which put `TimerExpired` into the inbox. clock: returns the current time."""

    def __init__(self, inbox: Inbox, outbox: Outbox, clock: Callable[[], Instant] = now) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self.lag = Histogram(LAG_SECONDS)
        """Lateness of timers: the lag of the event loop."""
        self._timers: dict[timers.Timer, asyncio.TimerHandle] = {}

    def set(self, action: actions.SetTimer) -> None:
        """Start a timer, or restart it with another time."""
        known = self._timers.get(action.timer)
        if known is not None:
            known.cancel()
        now_s = self._clock().boot_s
        delay_s = max(action.at_s - now_s, 0.0)
        if isinstance(action.timer, timers.RetryDue) or (
            isinstance(action.timer, timers.GossipDue) and action.timer.kind in COALESCED
        ):
            delay_s = coalesced_s(delay_s)
        loop = asyncio.get_running_loop()
        self._timers[action.timer] = loop.call_later(delay_s, self._expire, action.timer, now_s + delay_s)

    def clear(self, action: actions.ClearTimer) -> None:
        handle = self._timers.pop(action.timer, None)
        if handle is not None:
            handle.cancel()

    def _expire(self, timer: timers.Timer, at_s: float) -> None:
        del self._timers[timer]
        late_s = self._clock().boot_s - at_s
        if late_s < -CLOCKS_DIFFER_S:  # the loop's clock does not count suspend; BOOTTIME decides
            self.set(actions.SetTimer(timer, at_s))
            return
        self.lag.observe(max(late_s, 0.0))
        if isinstance(timer, BULK_TIMERS):
            self._outbox.when_room(lambda: self._inbox.put(events.TimerExpired(timer)))
        else:
            self._inbox.put(events.TimerExpired(timer))

    def close(self) -> None:
        for handle in self._timers.values():
            handle.cancel()


@dataclass(eq=False, repr=False)
class RecordEffects:
    """Effects on the disk: rows, events, completion jobs; and lookups of tasks that the core asks the store for."""

    _store: Store
    _outbox: Outbox
    _inbox: Inbox
    journal: EventLog
    _security: SecurityEvents
    _jobs: CompletionJobs
    _background: BackgroundTasks
    _wanted: dict[str, None] = field(default_factory=dict, init=False)
    """Tasks that wait to be looked up for the core."""

    def kept(self, row: Row) -> None:
        """Start completion jobs when their rows are durable."""
        if isinstance(row, actions.PutChores):
            self._outbox.when_durable(self._jobs.wake)

    def note(self, event: actions.PutEvent) -> None:
        """Log an event; refusals of the core by a security rule are counted and bounded like all such events."""
        if event.what == "security":
            self._security.report(event.state, event.node, event.reason)
        else:
            self.journal.note(event)

    def find(self, tasks: Sequence[str]) -> None:
        """Look up tasks for the core, a few at a time: a peer may query many."""
        is_under_way = bool(self._wanted)
        self._wanted.update(dict.fromkeys(tasks))
        if self._wanted and not is_under_way:
            self._background.start(self._look_up())

    async def _look_up(self) -> None:
        """Look up all requested tasks, each in its state at that time. A task that cannot be read is not reported; the core
        requests it again."""
        while self._wanted:
            found = []
            for task in list(itertools.islice(self._wanted, FOUND_AT_A_TIME)):
                del self._wanted[task]
                try:
                    found.append(self._store.found(task))
                except StoreError as error:
                    log.warning("cannot read a task: error=%s", error)
            if found:
                self._inbox.put(events.TasksFound(tuple(found)))
            await asyncio.sleep(0)


@dataclass(eq=False, repr=False)
class PeerEffects:
    """Effects on other nodes: messages, gossip, connections."""

    _info: AgentInfo
    _inbox: Inbox
    _node: Node
    links: PeerLinks
    members: Members
    _bus: BusAdvice
    _waker: Waker

    def wake(self, action: actions.WakePeer) -> None:
        peer = self._node.membership.get(action.node)
        if peer is not None:
            self._waker.wake(peer.profile)

    def send(self, dst: str, message: LinkMessage) -> None:
        """Send a message over the peer link; advice over MQTT while both ends are on it, unless their link carries tasks now:
        an open link costs less than the broker, but no link is opened only for advice."""
        if isinstance(message, ADVICE) and not self.links.carries_tasks(dst) and self._bus.send(dst, message):
            return
        if dst == self._info.config.node:
            self._inbox.put(events.MessageReceived(dst, message))
            return
        if isinstance(message, ADVICE):
            self._info.counters[metrics.ADVICE_OVER_PEER_LINK] += 1
        self.links.send(dst, message)

    def announce(self, action: actions.Announce) -> None:
        """Send to all peers: over MQTT to those that are on it, over the peer link to the others."""
        reached = self._bus.announce(action.message)
        for peer in self._node.membership:
            if peer.identity.node not in reached:
                self.links.send(peer.identity.node, action.message)

    def forget(self, action: actions.ForgetPeer) -> None:
        """Close the link to a peer, and do not contact it again, not even after a restart."""
        self.links.forget(action.node)
        self._bus.forget(action.node)
        self.members.changed()


class TaskVariables:
    """The variables that are added to the environments of tasks."""

    def __init__(self, info: AgentInfo, node: Node, environments: Environments, mps: MpsDaemons) -> None:
        self._info = info
        self._node = node
        self._environments = environments
        self._mps = mps
        self._last: tuple[TaskSpec | None, dict[bytes, bytes], dict[bytes, bytes]] = (None, {}, {})
        """Cache of the last started task: its spec, its environment, and the additions for a task without devices.
        Tasks of one array share them."""

    def of(self, action: actions.SpawnTask) -> dict[bytes, bytes]:
        """The variables for an attempt. Raises BadRequest if the environment of its submission is invalid."""
        if action.spec is not self._last[0]:
            own = variables_of(action.spec.environment)
            self._last = action.spec, own, self._shared(action, (), own)
        _, own, shared = self._last
        variables = {
            **(self._shared(action, action.devices, own) if action.devices else shared),
            b"PEERLOAD_TASK_ID": action.task.encode(),
            b"PEERLOAD_ATTEMPT": b"%d" % action.attempt,
            b"PEERLOAD_HOME": action.home.encode(),
        }
        if action.devices:
            found = self._mps.variables(action.key)
            variables |= {name.encode(): os.fsencode(value) for name, value in found.items()}
        if action.spec.lock is not None:
            found = self._environments.variables(action.key, own)
            variables |= {name.encode(): os.fsencode(value) for name, value in found.items()}
        if trace := child_traceparent(own.get(TRACEPARENT, b""), action.key):
            variables[TRACEPARENT] = trace.encode()
        if index := action.task.partition(".")[2]:
            variables[b"PEERLOAD_ARRAY_INDEX"] = index.encode()
        return variables

    def _shared(self, action: actions.SpawnTask, devices: Sequence[str], own: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The variables that depend only on the request and the devices of a task."""
        held = held_devices(action.key, devices, self._node.ledger.devices)
        added = task_variables(action.spec.request, held, self._info.config.device, own)
        return {
            name.encode(): value.encode() for name, value in (added | {"PEERLOAD_NODE": self._info.config.node}).items()
        }


@dataclass(eq=False, repr=False)
class TaskStarter:
    """Orders the launcher to start attempts."""

    _info: AgentInfo
    _node: Node
    _spool: Spool
    _stdin: StdinForwarding
    _launcher: LauncherLink
    _variables: TaskVariables
    _settler: ExitSettler

    def start(self, action: actions.SpawnTask) -> bool:
        """Start an attempt. → False if it has already ended, or cannot be started, which is reported."""
        if not self._node.holds(action.key):
            self._info.counters[metrics.SPAWNS_DROPPED] += 1
            return False
        if action.spec.directory == SCRATCH or action.spec.files is not None:
            try:
                is_system = self._info.config.mode == "system"  # the launcher makes scratch directories of other users
                scratch = SCRATCH if is_system else os.fsencode(self._spool.make_scratch(action.key))
            except OSError as error:
                self._settler.not_started(action.key, "its scratch directory cannot be made", error)
                return False
            action = msgspec.structs.replace(action, spec=msgspec.structs.replace(action.spec, directory=scratch))
        try:
            variables = self._variables.of(action)
        except BadRequest as error:  # its home has not checked it
            self._settler.not_started(action.key, "", error)
            return False
        try:
            source = self._stdin.source(action) if action.spec.takes_input else ""
        except (OSError, PeerloadError) as error:
            self._settler.not_started(action.key, "its standard input cannot be opened", error)
            return False
        stdout, stderr = self._spool.names(action.key)
        is_own = action.home == self._info.config.node
        task = self._node.home.by_id.get(action.task) if is_own else None
        owner = -1 if task is None else task.terms.owner
        self._launcher.spawn(action, stdout, stderr, variables, source, owner)
        if source:
            self._stdin.begin(action.key)
        return True


@dataclass(eq=False, repr=False)
class AttemptStarts:
    """Attempts before their start: first their files, environment, and the MPS daemon of a GPU are prepared.
    ``_background`` has the work of all effects and event sources."""

    _starter: TaskStarter
    _gpus: Gpus
    _files: AttemptFiles
    environments: Environments
    _mps: MpsDaemons
    _settler: ExitSettler
    _background: BackgroundTasks
    _await_mps: dict[str, asyncio.Task[None]] = field(init=False, default_factory=dict)

    def spawn(self, action: actions.SpawnTask) -> None:
        """Start an attempt as soon as everything is in place."""
        spec = action.spec
        if spec.is_staged and not self._are_staged(action):
            self._background.start(self._stage_own(action))
        elif action.devices and self._mps.is_awaited(action.key):
            self._await_mps[action.key] = self._background.start(self._start_mps(action))
        elif self._starter.start(action) and action.devices:
            self._gpus.wake()

    def _are_staged(self, action: actions.SpawnTask) -> bool:
        has_files = action.spec.files is None or self._files.is_ready(action.key)
        return has_files and self.environments.is_ready(action)

    async def _stage_own(self, action: actions.SpawnTask) -> None:
        """Start a task of this home when its files and its environment are in place."""
        try:
            await self.environments.stage_own(action)
        except (PeerloadError, OSError, TimeoutError) as error:
            self._settler.not_started(action.key, "environment" if isinstance(error, BuildFailed) else "staging", error)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise  # the agent stops; else a signal has ended it, which was reported
        else:
            self.spawn(action)

    async def _start_mps(self, action: actions.SpawnTask) -> None:
        """Start an attempt when the MPS daemon of its GPU runs. An attempt that requires MPS is not started
        without it."""
        why = await self._mps.start(action)
        self._await_mps.pop(action.key, None)
        if why:
            self._settler.never_started(action.key, f"MPS does not work: {why}")
        else:
            self.spawn(action)

    def interrupt(self, action: actions.SignalTask) -> bool:
        """End the staging of an attempt by this signal, or its wait for MPS, or the wait of its output files for room. → False if
        it does none of these."""
        if action.signal in (SIGINT, SIGTERM, SIGKILL) and self._settler.give_up(action.key):
            return True
        if (waits := self._await_mps.pop(action.key, None)) is not None:
            waits.cancel()
            reason = f"signal {action.signal} while its MPS daemon was started"
        elif self.environments.ended_early(action.key) or self._files.ended_early(action.key):
            reason = f"signal {action.signal} while its files were put in place"
        else:
            return False
        self._settler.settle(events.TaskEnded(action.key, Exit(128 + action.signal, action.signal, reason)))
        return True

    async def close(self) -> None:
        """End all background work; staging continues with the next start of its attempt."""
        await self._background.close()
        await self.environments.close()
        self._mps.close()
        await self._files.close()


@dataclass(eq=False, repr=False)
class AttemptStorage:
    """Files of attempts on the disk of this node: output, input, staged files and environments."""

    _spool: Spool
    _output: TaskOutputs
    _fetches: StdinFetches
    _files: AttemptFiles
    _environments: Environments

    def keep_only(self, node: Node) -> None:
        """Remove staged files and environments of all attempts that the node does not know."""
        self._files.keep_only_known()
        self._environments.keep_only(node)

    def forget(self, action: actions.ForgetTask) -> None:
        self._fetches.end(action.key)
        if action.output:
            self._spool.drop(action.key)
        self._files.forget(action.key)
        self._environments.forget(action.key)

    def dropped(self, row: Row) -> None:
        """End the outputs of attempts that this row removes from this node."""
        if self._output.served and isinstance(row, actions.DropExecution | actions.PutFloor):
            self._output.remote_attempts_gone()


@dataclass(eq=False, repr=False)
class TaskEffects:
    """Effects on the processes of this node and on their files."""

    launcher: LauncherLink
    starts: AttemptStarts
    storage: AttemptStorage
    gpus: Gpus
    _stdin: StdinForwarding
    _output: TaskOutputs
    _node: Node

    def adopt(self, *, is_first: bool) -> None:
        """Resume forwarding input to running attempts after a launcher's list; ``is_first``: this agent has just been started."""
        if is_first:
            self.storage.keep_only(self._node)
        self._stdin.adopt(is_first=is_first)

    def forget(self, action: actions.ForgetTask) -> None:
        self.launcher.forget(action.key)
        self.storage.forget(action)

    def signal(self, action: actions.SignalTask) -> None:
        if not self.starts.interrupt(action):
            self._output.backpressure.signalled(action.key, action.signal)
            self.launcher.signal(action.key, action.signal)


@dataclass(eq=False, repr=False)
class ResultEffects:
    """Results and outputs on their way to the home of a task."""

    _spool: Spool
    _output: TaskOutputs
    _inbox: Inbox
    _peers: PeerEffects
    _watches: TaskWatches
    _files: AttemptFiles
    _background: BackgroundTasks

    def send(self, action: actions.SendResult) -> None:
        """Send RESULT, including the output if it is small."""
        stdout = stderr = b""
        exit_ = action.exit
        is_small = exit_.stdout_bytes + exit_.stderr_bytes <= INLINE_BYTES_MAX
        if is_small:
            key = execution_key(action.uid, action.attempt)
            stdout, stderr = self._spool.read_small(key, exit_.stdout_bytes, exit_.stderr_bytes)
            is_small = (len(stdout), len(stderr)) == (exit_.stdout_bytes, exit_.stderr_bytes)
        if not is_small:
            stdout = stderr = b""
        self._peers.send(action.dst, Result(action.task, action.uid, action.attempt, exit_, is_small, stdout, stderr))

    def keep(self, action: actions.KeepOutput) -> None:
        if action.stdout or action.stderr or action.files:
            self._background.start(self._keep(action))
        else:
            self._inbox.put(events.OutputArrived(action.uid, action.attempt))

    def fetch(self, action: actions.FetchOutput) -> None:
        self._background.start(self._fetch(action))

    async def _keep(self, action: actions.KeepOutput) -> None:
        error = ""
        if action.stdout or action.stderr:
            try:
                await asyncio.to_thread(self._spool.keep, action.key, action.stdout, action.stderr)
            except OSError as failure:
                error = f"its output cannot be kept: {cannot_write(failure)}"
        await self._arrived(action, error, action.node)

    async def _fetch(self, action: actions.FetchOutput) -> None:
        error, missing = await self._output.bring_home(action)
        await self._arrived(action, error, action.node, missing)

    async def _arrived(
        self,
        action: actions.KeepOutput | actions.FetchOutput,
        error: str,
        node: str,
        missing: tuple[int, int] = (0, 0),
    ) -> None:
        """Report that an output is stored here, and that its output files are in place."""
        event = events.OutputArrived(action.uid, action.attempt)
        if not error and action.files:
            error, event = await self._files.bring_home(node, action)
        if error:
            self._watches.delayed(action.task, error)
        self._inbox.put(msgspec.structs.replace(event, error=error, missing=missing))
