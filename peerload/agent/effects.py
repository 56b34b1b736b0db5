"""Carries out the core's actions, in order; outward ones as soon as the rows before them are durable."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from peerload.agent.accounts.as_user import TaskUser
from peerload.agent.accounts.environment import variables_of
from peerload.agent.launcher.connect import LauncherError
from peerload.agent.launcher.oom_output import with_shortages
from peerload.agent.launcher.task_environment import given
from peerload.agent.launcher.task_environment import variables as task_variables
from peerload.agent.mqtt.message_filter import SOURCES_MAX
from peerload.agent.store.disk_space import cannot_write
from peerload.core.handoff.executor import OFFERS_MAX
from peerload.launcher.process import SHORTAGES
from peerload.model import actions, events, timers
from peerload.model.errors import BadRequest, PeerloadError, SlowDown, StoreError
from peerload.model.messages import ADVICE, WHY_LENGTH_MAX, DirectoryRequest, DirectoryTold, Offer, Result, State
from peerload.model.task import SCRATCH, Exit, execution_key

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from peerload.agent.parts import Parts
    from peerload.model.actions import Action
    from peerload.model.messages import Envelope, Message

log = logging.getLogger("peerload.agent")

CANNOT_EXECUTE = 126
INLINE_BYTES_MAX = 48 << 10
"""Output up to this rides along with the RESULT; more is fetched over a connection of its own."""
FOUND_AT_A_TIME = 25
"""Tasks looked up on disk, some microseconds each, before others get their turn."""
BULK_TIMERS = (timers.Batch, timers.Eligibility)
"""They go on with what is done for many tasks, some at a time; while the disk is behind they wait for it."""
ADVICE_UNANSWERED_MAX = 6
"""So much advice sent to a peer over MQTT without a word from it there: the peer link is used until it is heard again."""


class Performer:
    """The I/O side of one agent; ``parts`` are what it works with."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._timers: dict[timers.Timer, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_bus: dict[str, tuple[str, int]] = {}
        self._looked_up: Counter[str] = Counter()
        """Of each peer the offers and questions whose directory is looked for."""
        self._wanted: dict[str, None] = {}
        """Tasks that are looked up on disk for the core; no more than it waits for and others may ask after."""

    # -- actions -------------------------------------------------------------------------------------------------------

    def perform(self, decided: list[Action]) -> None:
        """Carry out the actions of one event."""
        release = self._parts.release
        for action in decided:
            if isinstance(action, actions.Persist):
                release.keep(action.rows)
                if any(isinstance(row, actions.DropExecution | actions.PutFloor) for row in action.rows):
                    self._parts.output.guests_left()
                if any(isinstance(row, actions.PutChores) for row in action.rows):
                    release.outward(self._parts.chores.wake)
            elif uids := actions.granted(action):
                release.renewal(uids, lambda action=action: self._outward_or_stop(action))  # type: ignore[misc]
            elif isinstance(action, actions.OUTWARD):
                release.outward(lambda action=action: self._outward_or_stop(action))  # type: ignore[misc]
            else:
                self._inward(action)

    def _outward_or_stop(self, action: Action) -> None:
        """An action that fails for a bug of ours must not be skipped silently: the agent stops (crash-only)."""
        try:
            self._outward(action)
        except Exception as error:
            log.exception("a bug in %s", type(action).__name__)
            self._parts.run.fail(f"a bug: {error!r}")

    def _inward(self, action: Action) -> None:
        if isinstance(action, actions.SetTimer):
            self._set_timer(action)
        elif isinstance(action, actions.ClearTimer):
            handle = self._timers.pop(action.timer, None)
            if handle is not None:
                handle.cancel()
        elif isinstance(action, actions.SendGossip):
            self._parts.members.send(action)
        elif isinstance(action, actions.LookAtDevices):
            self._parts.gpus.look()
        elif isinstance(action, actions.Note):
            self._note(action.event)
        elif isinstance(action, actions.Decided):
            self._parts.clients.decided(action)

    def _outward(self, action: Action) -> None:  # noqa: PLR0912 C901 -- one line an action
        parts = self._parts
        match action:
            case actions.Send():
                self._send(action.dst, action.message)
            case actions.SpawnTask():
                self._spawn(action)
            case actions.TaskChanged():
                parts.clients.changed(action)
            case actions.AttemptGone():
                parts.clients.attempt_gone(action.key)
            case actions.Answer():
                parts.clients.answered(action)
            case actions.ForgetTask():
                parts.launcher.forget(action.key)
                parts.pulls.end(action.key)
                if action.output:
                    parts.spool.drop(action.key)
                parts.spool.drop_scratch(action.key)
            case actions.SignalTask():
                parts.output.pace.signalled(action.key, action.signal)
                parts.launcher.signal(action.key, action.signal)
            case actions.SetLease():
                parts.launcher.set_lease(action.key, action.deadline_s, action.ts)
            case actions.EvictTask():
                parts.launcher.evict(action.key, action.reason)
            case actions.SendResult():
                self._send_result(action)
            case actions.KeepOutput():
                self._in_background(self._keep_output(action))
            case actions.FetchOutput():
                self._in_background(self._fetch_output(action))
            case actions.Announce():
                self._announce(action)
            case actions.FindTasks():
                self._find(action.tasks)
            case actions.Dial():
                parts.links.connect(action.identity)
            case actions.ForgetPeer():
                parts.links.forget(action.node)
                self._on_bus.pop(action.node, None)
            case actions.DialAddress():
                parts.links.dial(action.address)
            case (
                actions.Persist()
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

    def _find(self, tasks: Sequence[str]) -> None:
        """Look tasks up, a few at a time: a peer may ask for many."""
        is_under_way = bool(self._wanted)
        self._wanted.update(dict.fromkeys(tasks))
        if self._wanted and not is_under_way:
            self._in_background(self._look_up())

    async def _look_up(self) -> None:
        """All that are wanted, each as it stands when its turn comes; what cannot be read is not told of, and asked for
        again."""
        while self._wanted:
            found = []
            for task in list(itertools.islice(self._wanted, FOUND_AT_A_TIME)):
                del self._wanted[task]
                try:
                    found.append(self._parts.store.found(task))
                except StoreError as error:
                    log.warning("%s", error)
            if found:
                self._parts.inbox.put(events.TasksFound(tuple(found)))
            await asyncio.sleep(0)

    def _note(self, event: actions.PutEvent) -> None:
        """Keep an event; that the core refuses something for a rule's sake is told as all such things are."""
        if event.what == "security":
            self._parts.security.tell(event.state, event.node, event.reason)
        else:
            self._parts.journal.note(event)

    # -- timers --------------------------------------------------------------------------------------------------------

    def _set_timer(self, action: actions.SetTimer) -> None:
        known = self._timers.get(action.timer)
        if known is not None:
            known.cancel()
        delay_s = max(action.at_s - self._parts.now().boot_s, 0.0)
        loop = asyncio.get_running_loop()
        self._timers[action.timer] = loop.call_later(delay_s, self._expire, action.timer, action.at_s)

    def _expire(self, timer: timers.Timer, at_s: float) -> None:
        del self._timers[timer]
        if self._parts.now().boot_s < at_s - 0.001:  # the loop's clock does not count suspend; BOOTTIME decides
            self._set_timer(actions.SetTimer(timer, at_s))
        elif isinstance(timer, BULK_TIMERS):
            self._parts.release.when_room(lambda: self._parts.inbox.put(events.TimerExpired(timer)))
        else:
            self._parts.inbox.put(events.TimerExpired(timer))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, dst: str, message: Message) -> None:
        """Advice goes over MQTT while both ends are on it; everything else, and advice otherwise, over the peer link."""
        bus = self._parts.bus
        if bus is not None and isinstance(message, ADVICE):
            boot, unanswered = self._on_bus.get(dst, ("", ADVICE_UNANSWERED_MAX))
            if unanswered < ADVICE_UNANSWERED_MAX and bus.send(dst, boot, message):
                self._on_bus[dst] = (boot, unanswered + 1)
                return
        if dst == self._parts.config.node:
            self._parts.inbox.put(events.MessageReceived(dst, message))  # type: ignore[arg-type]
            return
        if isinstance(message, ADVICE):
            self._parts.counters["advice over the peer link"] += 1
        self._parts.links.send(dst, message)

    def heard_on_bus(self, envelope: Envelope) -> None:
        """A peer is on MQTT: advice for it may go there."""
        self._on_bus.pop(envelope.src, None)
        self._on_bus[envelope.src] = (envelope.src_boot, 0)
        if len(self._on_bus) > SOURCES_MAX:  # whoever was not heard for longest is told over the peer link
            del self._on_bus[next(iter(self._on_bus))]

    def _announce(self, action: actions.Announce) -> None:
        bus = self._parts.bus
        message = action.message
        if bus is None:
            told = False
        elif isinstance(message, State):
            told = bus.publish_state(message)
        else:
            told = bus.broadcast(message)
        for peer in self._parts.node.membership:
            node = peer.identity.node
            if not told or node not in self._on_bus:
                self._parts.links.send(node, message)

    def received(self, src: str, message: Message) -> None:
        """A frame from the peer link, on its way to the inbox."""
        if isinstance(message, DirectoryRequest):
            if self._may_look_up(src):
                self._in_background(self._directory_requested(src, message))
            return
        if isinstance(message, DirectoryTold) and not self._parts.asked_nodes.told(src, message):
            self._parts.counters["directories told unasked"] += 1
            return
        if isinstance(message, Offer) and self._has_output(message):
            self._parts.counters["offers of attempts whose output lies here"] += 1
            return
        if isinstance(message, Offer) and not self._parts.users.seen_lately(
            TaskUser(src, message.spec.user), message.spec.directory
        ):
            if self._may_look_up(src):
                self._in_background(self._offer_received(src, message))
        else:
            self._parts.inbox.put(events.MessageReceived(src, message))  # type: ignore[arg-type]

    def _has_output(self, offer: Offer) -> bool:
        """Whether output lies here under the name of this attempt, which the core knows nothing of any more: that of an
        ended task of this node, whose uid another home has taken. It must not be written over."""
        key, node = execution_key(offer.uid, offer.attempt), self._parts.node
        is_known = key in node.executor.guests or offer.uid in node.home.tasks
        return not is_known and any(path.exists() for path in self._parts.spool.paths(key))

    def _may_look_up(self, src: str) -> bool:
        """True if one more directory may be looked at for this peer; otherwise its message stays unanswered."""
        if self._looked_up[src] >= OFFERS_MAX:
            self._parts.counters["offers left unanswered"] += 1
            self._parts.security.tell("P2", src, f"more than {OFFERS_MAX} offers outstanding")
            return False
        self._looked_up[src] += 1
        return True

    def _looked_up_one(self, src: str) -> None:
        self._looked_up[src] -= 1
        if not self._looked_up[src]:
            del self._looked_up[src]

    async def _offer_received(self, src: str, offer: Offer) -> None:
        refused, here, stalled = "", False, ""
        try:
            refused, here = await self._parts.users.objection(TaskUser(src, offer.spec.user), offer.spec.directory)
        except SlowDown as error:
            stalled = error.why[:WHY_LENGTH_MAX]
        except LauncherError:
            self._parts.counters["offers left unanswered"] += 1  # to its sender: declined, but not for good
            return
        finally:
            self._looked_up_one(src)
        self._parts.inbox.put(events.MessageReceived(src, offer, directory_here=here, refused=refused, stalled=stalled))

    async def _directory_requested(self, src: str, request: DirectoryRequest) -> None:
        """Answer with the code with which an offer would be declined."""
        try:
            refused, here = await self._parts.users.objection(TaskUser(src, request.user), request.directory)
        except SlowDown:
            code = "stalled"
        except LauncherError:
            return
        else:
            code = "policy" if refused else "" if here else "directory"
        finally:
            self._looked_up_one(src)
        self._parts.links.send(src, DirectoryTold(request.directory, request.user, code))

    # -- processes -----------------------------------------------------------------------------------------------------

    def _spawn(self, action: actions.SpawnTask) -> None:
        parts = self._parts
        if not parts.node.holds(action.key):
            parts.counters["spawns dropped"] += 1
            return
        index = action.task.partition(".")[2]
        if action.spec.directory == SCRATCH and not parts.users.is_system:
            try:
                scratch = os.fsencode(parts.spool.make_scratch(action.key))
            except OSError as error:
                self._not_spawned(action.key, "its scratch directory cannot be made", error)
                return
            action = msgspec.structs.replace(action, spec=msgspec.structs.replace(action.spec, directory=scratch))
        try:
            own = variables_of(action.spec.environment)
        except BadRequest as error:  # its home has not looked
            self.settle(events.TaskEnded(action.key, Exit(CANNOT_EXECUTE, reason=str(error))))
            return
        held = given(action.key, action.devices, parts.node.ledger.devices)
        variables = {
            "PEERLOAD_TASK_ID": action.task,
            "PEERLOAD_ATTEMPT": str(action.attempt),
            "PEERLOAD_NODE": parts.config.node,
            "PEERLOAD_HOME": action.home,
            "PEERLOAD_ARRAY_INDEX": index,
            **task_variables(action.spec.request, held, parts.config.device, own),
        }
        if not index:
            del variables["PEERLOAD_ARRAY_INDEX"]
        stdout, stderr = parts.spool.paths(action.key)
        extra = {name.encode(): value.encode() for name, value in variables.items()}
        try:
            source = parts.feeding.source(action)
        except (OSError, PeerloadError) as error:
            self._not_spawned(action.key, "its standard input cannot be had", error)
            return
        task = parts.node.home.by_id.get(action.task) if action.home == parts.config.node else None
        parts.launcher.spawn(action, stdout, stderr, extra, source, -1 if task is None else task.terms.owner)
        if source:
            parts.feeding.begin(action.key)
        if action.devices:
            parts.gpus.wake()

    def _not_spawned(self, key: str, what: str, error: OSError | PeerloadError) -> None:
        """The launcher was not asked to start this attempt: for want of something, or it never can be started."""
        if isinstance(error, OSError) and (shortage := SHORTAGES.get(error.errno or 0)):
            log.warning("%s is not started: %s: %s", key, what, error)
            self._parts.inbox.put(events.TaskLost(key, shortage, never_started=True, shortage=shortage))
        else:
            why = getattr(error, "strerror", None) or error
            self.settle(events.TaskEnded(key, Exit(CANNOT_EXECUTE, reason=f"{what}: {why}")))

    def settle(self, event: events.TaskEnded) -> None:
        """An attempt has ended: its output goes to disk before anybody relies on its result; followers learn the end."""
        self._parts.pulls.end(event.key)
        wrote = event.exit.stdout_bytes or event.exit.stderr_bytes
        if wrote or (event.exit.exit_code and (self._parts.disk.is_full or self._holds_devices(event.key))):
            self._in_background(self._settle(event))
        else:
            self._parts.output.attempts_ended(((event.key, event.exit),))
            self._parts.inbox.put(event)

    def _holds_devices(self, key: str) -> bool:
        return key in self._parts.node.ledger.devices.holding

    async def _settle(self, event: events.TaskEnded) -> None:
        ((key, exit_),) = await settled(self._parts, ((event.key, event.exit),))
        if exit_.exit_code and self._holds_devices(key):  # if its card has failed, that is told before its end
            await self._parts.gpus.read_anew()
        self._parts.output.attempts_ended(((key, exit_),))
        self._parts.inbox.put(events.TaskEnded(key, exit_))

    def settle_listed(self, event: events.LauncherReady, then: Callable[[], None]) -> None:
        """The same for all that a launcher lists as ended; ``then`` is called when they are in the inbox."""
        self._in_background(self._settle_listed(event, then))

    async def _settle_listed(self, event: events.LauncherReady, then: Callable[[], None]) -> None:
        ended = await settled(self._parts, event.ended)
        self._parts.output.attempts_ended(ended)
        self._parts.inbox.put(msgspec.structs.replace(event, ended=ended))
        then()

    # -- output --------------------------------------------------------------------------------------------------------

    def _send_result(self, action: actions.SendResult) -> None:
        """RESULT, with the output itself where that is small."""
        stdout = stderr = b""
        exit_ = action.exit
        small = exit_.stdout_bytes + exit_.stderr_bytes <= INLINE_BYTES_MAX
        if small:
            key = execution_key(action.uid, action.attempt)
            stdout, stderr = self._parts.spool.read_small(key, exit_.stdout_bytes, exit_.stderr_bytes)
            small = (len(stdout), len(stderr)) == (exit_.stdout_bytes, exit_.stderr_bytes)
        self._send(
            action.dst,
            Result(
                action.task,
                action.uid,
                action.attempt,
                exit_,
                small,
                stdout if small else b"",
                stderr if small else b"",
            ),
        )

    async def _keep_output(self, action: actions.KeepOutput) -> None:
        error = ""
        if action.stdout or action.stderr:
            try:
                await asyncio.to_thread(self._parts.spool.keep, action.key, action.stdout, action.stderr)
            except OSError as failure:
                error = f"its output cannot be kept: {cannot_write(failure)}"
        self._output_arrived(action, error)

    async def _fetch_output(self, action: actions.FetchOutput) -> None:
        error, missing = await self._parts.output.bring_home(action)
        if any(missing):
            self._parts.counters["outputs that cannot be read"] += 1
        self._output_arrived(action, error, missing)

    def _output_arrived(
        self, action: actions.KeepOutput | actions.FetchOutput, error: str, missing: tuple[int, int] = (0, 0)
    ) -> None:
        if error:
            self._parts.clients.waits(action.task, error)
        self._parts.inbox.put(events.OutputArrived(action.uid, action.attempt, error, missing))

    # -- background ----------------------------------------------------------------------------------------------------

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a bug", exc_info=error)
            self._parts.run.fail(f"a bug: {error!r}")

    async def drained(self) -> None:
        """Wait until everything decided is durable and out."""
        self._parts.journal.settle()
        while len(self._parts.inbox) or self._parts.release.held:
            durable = asyncio.Event()
            self._parts.release.outward(durable.set)
            await durable.wait()
            await asyncio.sleep(0)  # the inbox gets its turn

    async def close(self) -> None:
        """Forget timers, end background work."""
        for handle in self._timers.values():
            handle.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def settled(parts: Parts, ended: Sequence[tuple[str, Exit]]) -> tuple[tuple[str, Exit], ...]:
    """These ended attempts with their output on disk, and with what they say that they ran out of; how many have lost some of it is counted."""
    found = await asyncio.to_thread(parts.spool.settle, ended)
    lost = sum(before[1] is not after[1] for before, after in zip(ended, found, strict=True))
    if lost:
        parts.counters["outputs that cannot be read"] += lost
    full = parts.config.node if parts.disk.is_full else ""
    return await asyncio.to_thread(with_shortages, parts.spool, found, full)
