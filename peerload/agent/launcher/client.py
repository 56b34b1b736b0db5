"""The agent's connection to its launcher: requests and events; another launcher is started if it is lost.

`open_or_start` finds a launcher or starts one, `fetch_list` gets its list of tasks and exits. A stopped or hanging launcher
breaks no connection: tasks would seem to run, and no process would enforce their leases. So the `Heartbeat` sends pings, and
reports a launcher that does not answer. A request to start contains the place, variables and deadline of a process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any, Protocol, assert_never, cast

import msgpack
import msgspec

from peerload.agent.launcher.heartbeat import Heartbeat
from peerload.agent.launcher.process import GONE_S, is_alive, is_still_there, wait_gone
from peerload.agent.output.spool import FOLLOWED_BYTES_MAX
from peerload.launcher import protocol
from peerload.model.errors import PeerloadError
from peerload.model.events import (
    LauncherLost,
    LauncherReady,
    LauncherSilent,
    TaskEnded,
    TaskFrozen,
    TaskLost,
    TaskStarted,
)
from peerload.model.resources import GPU, MIB, Device, DeviceMode
from peerload.model.task import Exit, Guarantee, attempt_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from peerload.agent.launcher.process import LauncherProcess
    from peerload.agent.runtime import RunState
    from peerload.core.resources.devices import DeviceLedger
    from peerload.model.actions import SpawnTask
    from peerload.model.config import DeviceConfig
    from peerload.model.events import Event
    from peerload.model.resources import ResourceRequest

log = logging.getLogger("peerload.launcher")

START_S_MAX = 15.0
"""Timeout of a start; a new launcher first kills the tasks that its predecessor has left."""
SERVICE_LOOK_S = 0.25
"""Interval of tries to connect to a launcher that its service starts."""
START_LOOK_S = 0.01
"""Interval of tries to connect to a starting launcher."""
DATE_SET_S = 1.0
"""A larger difference between wall clock and boot clock means that the wall clock was set."""
SHORTAGES = ("", "memory", "gpu memory")
"""Shortages that the model knows."""
LOST = (OSError, protocol.LauncherProtocolError)
"""Errors of reading from a launcher that is gone or malformed; OSError includes TimeoutError."""


class LauncherError(PeerloadError):
    """The launcher cannot be started, or does not answer."""

    code = "launcher"


class LauncherOwner(Protocol):
    """Receiver of the events about a launcher and its tasks."""

    def received(self, event: Event | protocol.StdinFed, /) -> None:
        """Process TaskStarted, TaskEnded, TaskLost, TaskFrozen, LauncherLost, LauncherSilent, LauncherReady or StdinFed."""


class EventFrames(asyncio.Protocol):
    """A connection to a launcher. `next_frame` returns the events of each frame; they are delivered in order.
    ``lost`` completes when the connection ends."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._receiver: LauncherLink | None = None
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Error that ended the connection: one of LOST, or a bug. No more events can arrive."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end(exc if isinstance(exc, OSError) else ConnectionResetError("the launcher closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._receiver is None:
            self._arrived.set()
            return
        try:
            while not self.lost.done() and (events := self._next()) is not None:
                self._receiver.events_received(events)
        except Exception as error:  # noqa: BLE001 -- whoever waits for ``lost`` gets it, a bug too
            self._end(error)

    def _next(self) -> list[protocol.LauncherEvent] | None:
        """The events of the first frame in the buffer, if it is whole. Raises LauncherProtocolError."""
        buffer = self._buffer
        if len(buffer) < protocol.HEADER_BYTES:
            return None
        size = int.from_bytes(buffer[: protocol.HEADER_BYTES], "big")
        if size > protocol.FRAME_BYTES_MAX:
            raise protocol.LauncherProtocolError(f"a frame of {size} bytes from the launcher")
        if len(buffer) < protocol.HEADER_BYTES + size:
            return None
        body = bytes(buffer[protocol.HEADER_BYTES : protocol.HEADER_BYTES + size])
        del buffer[: protocol.HEADER_BYTES + size]
        return protocol.decode_events(body)

    def _end(self, why: Exception) -> None:
        if not self.lost.done():
            self.lost.set_result(why)
        self._arrived.set()
        self.transport.close()

    async def next_frame(self) -> list[protocol.LauncherEvent]:
        """The events of the next frame, before `deliver_to`. Raises the errors in LOST."""
        while (events := self._next()) is None:
            if self.lost.done():
                raise self.lost.result()
            self._arrived.clear()
            await self._arrived.wait()
        return events

    def deliver_to(self, receiver: LauncherLink) -> None:
        """Deliver the events of each frame from now on."""
        self._receiver = receiver
        self.data_received(b"")


async def open_or_start(process: LauncherProcess) -> EventFrames:
    """Connect; if no launcher answers, start one and wait for it. Raises LauncherError."""
    directory, is_service = process.directory, bool(process.serves_node)
    deadline_s = time.monotonic() + START_S_MAX
    started = False
    while True:
        try:
            return await _open(directory)
        except OSError as error:
            if not started:
                started = True
                if is_service:
                    log.info("waiting for the launcher of all users: directory=%s", directory)
                await asyncio.to_thread(process.start)
            elif time.monotonic() > deadline_s or process.has_failed():
                process.detach()
                raise LauncherError(
                    "the launcher does not answer",
                    why=process.last_log_line() or str(error.strerror),
                    hint="systemctl status peerload-launcher" if is_service else "",
                ) from None
            await asyncio.sleep(SERVICE_LOOK_S if is_service else START_LOOK_S)


async def _open(directory: Path) -> EventFrames:
    """Connect through a descriptor of the directory: a long path does not fit into a socket address."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{fd}/{protocol.SOCKET_NAME}"
        _, frames = await asyncio.get_running_loop().create_unix_connection(EventFrames, path)
    finally:
        os.close(fd)
    return frames


async def fetch_list(launcher: EventFrames) -> tuple[LauncherReady, protocol.ListedEvent]:
    """Get the launcher's list of tasks and exits → the list, and its last part, which describes the launcher."""
    launcher.transport.write(protocol.frame([protocol.encode(protocol.ListRequest())]))
    running: list[tuple[str, float, float]] = []
    ended: list[tuple[str, Exit]] = []
    frozen: list[str] = []
    last: protocol.ListedEvent | None = None
    while last is None:
        async with asyncio.timeout(START_S_MAX):
            try:
                events = await launcher.next_frame()
            except protocol.LauncherTooOld as error:
                hint = f"end its tasks, and it:  kill {error.pid}"
                raise LauncherError("the launcher has an earlier version", why=str(error), hint=hint) from None
        for event in events:
            if isinstance(event, protocol.ListedEvent):
                for task in event.running:
                    running.append((task.key, began_at(task.started_at, task.ran_s), task.ts))
                    frozen += [task.key] * task.is_frozen
                ended += [(key, exit_of(record)) for key, record in event.ended]
                if not event.more:
                    last = event
    return LauncherReady(tuple(running), tuple(ended), tuple(frozen)), last


def began_at(started_at: float, ran_s: float) -> float:
    """Start of an attempt, by the current date: the boot clock shows how long ago it was (``ran_s``, 0 = unknown), even if
    the date was set since."""
    by_boot_clock = max(time.time() - ran_s, 0.0)
    return by_boot_clock if ran_s and abs(by_boot_clock - started_at) > DATE_SET_S else started_at


def exit_of(record: protocol.ExitRecord) -> Exit:
    """Convert an exit record to the model's form, even from a launcher that knows further shortages. Raises
    LauncherProtocolError."""
    if record.out_of not in SHORTAGES:
        record = record.replace(out_of="")
    fields = record.fields()
    fields["usage"] = record.usage.fields() if record.usage is not None else {}
    try:
        return msgspec.convert(fields, Exit)
    except msgspec.ValidationError as error:
        raise protocol.LauncherProtocolError(f"exit: {error}") from None


STOP_S_MAX = 5.0
RESTART_S = 0.2
CONNECTS_MAX = 3
"""Maximum number of connections to a launcher that hangs up, after which the start of the agent fails."""
REPLIES_MAX = 1024
REPLY_S_MAX = 330.0
"""Timeout of requests that the launcher carries out as a user: slightly longer than its own timeout."""
FRAME_FILL_BYTES = 1 << 20
"""Size at which a frame is sent; a single request may be larger."""

CONNECTION_BROKEN = "the connection to it broke; it still runs, and so do its tasks"
USAGE_S_MAX = 2.0
"""Timeout of a usage request; the launcher answers immediately, unless it is busy."""

NO_CORES = (
    "cores are not enforced; no cgroup for processors can be made here, or the launcher was started without that setting"
    " (peerload down --all; peerload up)"
)


class LauncherLink:
    """The connection to the launcher of ``process``. Requests of one turn of the loop are sent in one frame. The agent stops if no
    more events can arrive."""

    _owner: LauncherOwner

    def __init__(self, process: LauncherProcess, output_bytes_max: int, run: RunState, *, enforce: str = "off") -> None:
        self._process = process
        self._directory = process.directory
        self._service_of = process.serves_node
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._run_state = run
        self._output_bytes_max = output_bytes_max
        self.pid = 0
        self.run = ""
        self._protocol = 0
        self.units = ""
        """The containment backend: cgroup2 or bare; "" until the launcher has answered."""
        self.memory = ""
        """The memory backend: cgroup2, cgroup1 or rlimit; "" until the launcher has answered."""
        self.unenforced: tuple[str, ...] = ()
        """Sentences about what the launcher cannot enforce."""
        self.enforces_cores = False
        """True if CPU shares of tasks are enforced, as ``enforce`` requires."""
        self._enforce = enforce
        self._frames: EventFrames | None = None
        self._requests: list[bytes] = []
        self._flushing = False
        self._reading: asyncio.Task[None] | None = None
        self._closing = False
        self._paused = False
        self._heartbeat = Heartbeat(self)

    @property
    def is_silent(self) -> bool:
        """True if the launcher has not answered a ping in time."""
        return self._heartbeat.is_silent

    async def answers(self, within_s: float) -> bool:
        """True if the launcher answers a ping within ``within_s`` seconds."""
        return bool(self.pid) and await self._heartbeat.answers(within_s)

    async def start(self, owner: LauncherOwner) -> LauncherReady:
        """Find the launcher or start one. owner: receiver of its events; it needs this link itself, to end and feed
        tasks. → running tasks, exit records, and keys of frozen tasks. Raises LauncherError."""
        self._owner = owner
        if not self._service_of:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        frames, listing = await self._connect_again()
        self._reading = asyncio.get_running_loop().create_task(self._read(frames))
        self._reading.add_done_callback(self._read_ended)
        self._heartbeat.start()
        return listing

    def _read_ended(self, reading: asyncio.Task[None]) -> None:
        """Stop the agent after a bug in the reader: without events no task would ever end."""
        if not reading.cancelled() and (error := reading.exception()) is not None:
            log.error("bug in the reader of launcher events", exc_info=error)
            self._run_state.fail(f"the launcher's events are lost: {error!r}")

    def log_facts(self) -> None:
        """Log the launcher's identity, and the limits that it cannot enforce. The caller decides when: an agent that
        fails to start should only log the reason."""
        log.info(
            "launcher connected: pid=%d protocol=%d units=%s memory=%s",
            self.pid,
            self._protocol,
            self.units,
            self.memory,
        )
        for what in self.unenforced:
            log.info("launcher does not enforce a limit: reason=%s", what)

    async def close(self) -> None:
        """Close the connection; the launcher and its tasks continue."""
        self._closing = True
        self._heartbeat.stop()
        self._flush()
        if self._frames is not None:
            self._frames.transport.close()
            await self._frames.lost
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._process.detach()

    async def stop_all(self) -> None:
        self._closing = True
        self._heartbeat.stop()
        if self._frames is None and self._reading is not None:  # another is being started
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            with contextlib.suppress(LauncherError):
                await self._connect_again()
        pid = self.pid
        self.resume()
        self._request(protocol.StopRequest())
        self._flush()
        await asyncio.to_thread(wait_gone, pid, STOP_S_MAX)
        if is_alive(pid) and not self._service_of:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    def retire(self) -> None:
        """Make the launcher of one user end after its last task."""
        if not self._service_of:
            self._request(protocol.RetireRequest())

    def resume(self) -> None:
        """Send requests again, since LauncherReady was handled. Requests before that are dropped: they were decided
        before the attempts of the old launcher were found dead."""
        self._paused = False

    # -- requests ------------------------------------------------------------------------------------------------------

    def spawn(
        self,
        action: SpawnTask,
        stdout: Path | str,
        stderr: Path | str,
        extra: dict[bytes, bytes],
        source: str = "",
        owner: int = -1,
        inside: str = "",
    ) -> None:
        """Start a process. extra: added to its environment. source: the file that feeds its stdin. owner: uid of its
        submitter on this node, -1 = unknown. inside: key of the running attempt whose working directory, environment
        and unit it gets."""
        spec, limit = action.spec, self._output_bytes_max
        request = protocol.SpawnRequest(
            key=action.key,
            argv=list(spec.argv),
            environment=_environment(spec.environment, extra),
            directory=spec.directory,
            umask=spec.umask,
            stdout=str(stdout),
            stderr=str(stderr),
            deadline_s=action.deadline_s,
            output_bytes_max=max(limit, FOLLOWED_BYTES_MAX) if spec.followed else limit,
            run=self.run,
            **_rare_fields(action, extra, source, inside),
        )
        if self._service_of:
            request = request.replace(
                node=self._service_of,
                home=action.home,
                user=spec.user,
                uid=owner,
                kept=[*extra, *spec.named],
                devices=bool(action.devices),
            )
        if self._service_of or self._enforce != "off":
            request = request.replace(cpus=spec.request.cpus)
        if self._enforce == "limit" or (self._enforce == "share" and spec.request.overcommit):
            request = request.replace(cpus_max=spec.request.cpus)
        self._request(request)

    def signal(self, key: str, number: int) -> None:
        self._request(protocol.SignalRequest(key, number))

    def feed(self, key: str, size_bytes: int, *, has_ended: bool) -> None:
        """Report the size of the file that feeds a task's stdin; has_ended: it is complete. `StdinFed` answers."""
        self._request(protocol.StdinRequest(key, size_bytes, has_ended))

    def resize(self, key: str, rows: int, columns: int) -> None:
        self._request(protocol.ResizeRequest(key, rows, columns))

    def set_lease(self, key: str, deadline_s: float, ts: float) -> None:
        """Move the deadline of a task, granted for the message of ``ts``."""
        self._request(protocol.LeaseRequest(key, deadline_s, ts))

    def evict(self, key: str, reason: str) -> None:
        self._request(protocol.EvictRequest(key, reason))

    def look_for_socket(self) -> None:
        """Make the launcher restore its socket if it is gone: otherwise the next agent could not reach it and its tasks."""
        if not (self._directory / protocol.SOCKET_NAME).exists():
            self._request(protocol.ListenRequest())

    def forget(self, key: str) -> None:
        self._request(protocol.ForgetRequest(key))

    async def ask(self, request: protocol.UserRequest, within_s: float = REPLY_S_MAX) -> str:
        """Request that the launcher acts as a user → the reason why it failed, "" if it succeeded. Raises LauncherError."""
        request = request.replace(id=next(self._numbers), node=self._service_of)
        return str(await self._answer(request.id, request, within_s))

    async def usage(
        self, keys: Sequence[str], *, brief: bool = False, counters: bool = False
    ) -> protocol.UsageEvent | None:
        """Current usage of these tasks; None if the launcher does not answer in time. brief, counters: see `UsageRequest`."""
        number = next(self._numbers)
        try:
            answer = await self._answer(number, protocol.UsageRequest(number, list(keys), brief, counters), USAGE_S_MAX)
        except LauncherError:
            return None
        return answer if isinstance(answer, protocol.UsageEvent) else None

    async def _answer(self, number: int, request: protocol.Request, within_s: float) -> str | protocol.UsageEvent:
        """Send a request and wait for the answer with this number. Raises LauncherError."""
        if self._frames is None or self._paused or len(self._answers) >= REPLIES_MAX:
            raise LauncherError("the launcher does not answer", hint="systemctl status peerload-launcher")
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._request(request)
        try:
            async with asyncio.timeout(within_s):
                found: str | protocol.UsageEvent = await answer
                return found
        except TimeoutError:
            raise LauncherError("the launcher has not answered in time") from None
        finally:
            del self._answers[number]

    def _request(self, request: protocol.Request) -> None:
        if self._frames is None or (self._paused and not _is_own(request)):
            return  # LauncherReady will report the state
        self._requests.append(protocol.encode(request))
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        requests, self._requests = self._requests, []
        if self._frames is None or self._frames.transport.is_closing():  # `_read` will notice the loss
            return
        batch: list[bytes] = []
        size = 0
        for request in requests:
            if batch and size + len(request) > FRAME_FILL_BYTES:
                self._write(batch)
                batch, size = [], 0
            batch.append(request)
            size += len(request)
        if batch:
            self._write(batch)

    def _write(self, batch: list[bytes]) -> None:
        assert self._frames is not None
        self._frames.transport.write(protocol.frame(batch))

    # -- connection ----------------------------------------------------------------------------------------------------

    async def _connect(self) -> tuple[EventFrames, LauncherReady]:
        """Connect and get the list of tasks; start a launcher if none answers."""
        frames = await open_or_start(self._process)
        try:
            listing, facts = await fetch_list(frames)
            self._note_facts(facts)
        except BaseException:
            frames.transport.close()
            raise
        self._frames = frames
        return frames, listing

    async def _connect_again(self) -> tuple[EventFrames, LauncherReady]:
        """Connect, with several tries: a launcher that accepted may have been ending. Raises LauncherError."""
        why = ""
        for _ in range(CONNECTS_MAX):
            try:
                return await self._connect()
            except LOST as error:
                why = str(error) or type(error).__name__
                log.warning("launcher closed the connection: error=%s", why)
        self._process.detach()
        raise LauncherError("the launcher does not answer", why=why)

    def _note_facts(self, hello: protocol.ListedEvent) -> None:
        """Store the facts about a launcher. Raises LauncherError if it serves one user, but has to serve all."""
        self.pid = hello.pid
        self.run = hello.run
        self.units = hello.units
        self.unenforced = tuple(hello.unenforced)
        self._protocol = hello.protocol
        self.memory = hello.memory
        self.enforces_cores = hello.cores and self._enforce != "off"
        if self._enforce != "off" and not hello.cores:
            self.unenforced += (f'[cpus] enforce = "{self._enforce}": {NO_CORES}',)
        if self._service_of and not hello.system:
            raise LauncherError("this launcher serves one user only", why=f"it answers in {self._directory}")

    async def _read(self, frames: EventFrames) -> None:
        """Deliver events until the launcher is lost, then reconnect; until cancelled."""
        while True:
            frames.deliver_to(self)
            lost = await frames.lost
            if self._closing:
                return
            if not isinstance(lost, LOST):
                raise lost
            self._heartbeat.stop()
            is_there = await asyncio.to_thread(is_still_there, self.pid)
            action = "reconnect" if is_there else "restart"
            log.warning("launcher connection lost: action=%s error=%s", action, str(lost) or type(lost).__name__)
            self.pid = 0
            self._frames = None
            self._paused = True
            self._requests.clear()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(LauncherError("the launcher was lost"))
            self._owner.received(LauncherLost(CONNECTION_BROKEN) if is_there else LauncherLost())
            frames, ready = await self._reconnect()
            self.log_facts()
            self._owner.received(ready)
            self._heartbeat.start()

    def ping(self) -> None:
        self._request(protocol.PingRequest())

    def silence_changed(self, *, silent: bool) -> None:
        self._owner.received(LauncherSilent(silent))

    def events_received(self, events: list[protocol.LauncherEvent], /) -> None:
        """Handle the events of one frame. An exception ends the connection."""
        self._heartbeat.received()
        for event in events:
            self._event(event)

    async def _reconnect(self) -> tuple[EventFrames, LauncherReady]:
        await asyncio.to_thread(self._process.wait, GONE_S)  # the connection broke shortly before the process ended
        while True:
            try:
                return await self._connect()
            except (LauncherError, *LOST) as error:
                log.error("cannot reach the launcher: error=%s", error)  # noqa: TRY400 -- logged for each try; the error says enough
                await asyncio.sleep(RESTART_S)

    def _event(self, event: protocol.LauncherEvent) -> None:
        match event:
            case protocol.StartedEvent(key, _, started_at):
                self._owner.received(TaskStarted(key, started_at))
            case protocol.ExpiredEvent(key, reason, never_started, shortage):
                self._owner.received(TaskLost(key, reason, never_started=never_started, shortage=shortage))
            case protocol.EndedEvent(key, record, with_start):
                self._owner.received(TaskEnded(key, exit_of(record), with_start))
            case protocol.UserReply(number, why):
                self._answered(number, why)
            case protocol.UsageEvent(number):
                self._answered(number, event)
            case protocol.StdinFed():
                self._owner.received(event)
            case protocol.FrozenEvent(key):
                self._owner.received(TaskFrozen(key, frozen=True))
            case protocol.ThawedEvent(key):
                self._owner.received(TaskFrozen(key, frozen=False))
            case protocol.PongEvent() | protocol.ListedEvent():
                pass  # handled by the heartbeat or, for the list, before the events
            case _:
                assert_never(event)

    def _answered(self, number: int, found: str | protocol.UsageEvent) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(found)


def _is_own(request: protocol.Request) -> bool:
    """True if a request is about one of the agent's own processes, which are notified of a new launcher immediately."""
    key = getattr(request, "key", "")
    try:
        attempt_of(key)
    except ValueError:
        return bool(key)
    return False


def _rare_fields(action: SpawnTask, extra: dict[bytes, bytes], source: str, inside: str) -> dict[str, Any]:
    """The fields of a `SpawnRequest` that do not have their default."""
    spec, mem_bytes, fields = action.spec, action.spec.request.mem_bytes, dict[str, Any]()
    if action.ts or action.frozen_s_max:
        fields |= {"ts": action.ts, "frozen_s_max": action.frozen_s_max}
    if mem_bytes:
        fields |= {"memory_bytes_max": mem_bytes, "node": extra.get(b"PEERLOAD_NODE", b"").decode()}
    if spec.guarantee is Guarantee.ONCE:
        fields["once"] = True
    if source:
        fields["input"] = source
    if spec.terminal is not None:
        fields["terminal"] = [spec.terminal.rows, spec.terminal.columns]
    if inside:
        fields["inside"] = inside
    if action.after:
        fields["after"] = action.after
    return fields


def _environment(packed: bytes, extra: dict[bytes, bytes]) -> dict[bytes, bytes] | None:
    """The variables of a task; None if its home sent no map: the launcher then ends the task with a reason."""
    try:
        return {**msgpack.unpackb(packed), **extra}
    except (ValueError, TypeError):
        return None


# -- variables of tasks ------------------------------------------------------------------------------------------------
#
# GPUs are passed by name, not by number, since a process with some of them numbers these from 0. A task without GPUs
# sees none. Variables that are only hints (threads, memory of frameworks) are left as the user has set them;
# variables that assign devices are not.

IDS = "{ids}"
"""Placeholder in the variables of the config for the names of the task's devices of that kind, separated by commas."""
KNOWN_BY_NAME = "nvidia"
ADVICE = frozenset(
    {"OMP_NUM_THREADS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_FORCE_GPU_ALLOW_GROWTH"}
)
"""Variables that the submitter may override."""
SHARE_MIN = 0.01


class HeldDevices(msgspec.Struct, frozen=True):
    """The devices of one attempt. devices: in the order granted, GPUs and others. is_exclusive: its GPUs are not
    shared. promised_bytes: memory on each GPU, 0 = unknown. is_mps: it runs under MPS."""

    devices: tuple[Device, ...] = ()
    is_exclusive: bool = False
    promised_bytes: int = 0
    is_mps: bool = False

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == GPU)

    @property
    def mode(self) -> DeviceMode:
        """The mode in which its GPUs are held; FREE without any."""
        if not self.gpus:
            return DeviceMode.FREE
        if self.is_mps:
            return DeviceMode.MPS
        return DeviceMode.EXCLUSIVE if self.is_exclusive else DeviceMode.TIME


def held_devices(key: str, names: Iterable[str], ledger: DeviceLedger) -> HeldDevices:
    """The devices among these ids that the attempt with this key holds."""
    states = [ledger.states[name] for name in names if name in ledger.states]
    grants = [state.grants[key] for state in states if state.device.kind == GPU and key in state.grants]
    is_exclusive = any(grant.ask.is_exclusive for grant in grants)
    promised = [grant.promised_bytes or 0 for grant in grants]
    if is_exclusive and not all(promised):
        promised = [state.grantable_bytes for state in states if state.device.kind == GPU]
    is_mps = any(grant.mode is DeviceMode.MPS for grant in grants)
    return HeldDevices(tuple(state.device for state in states), is_exclusive, min(promised, default=0), is_mps)


def task_variables(
    request: ResourceRequest, held: HeldDevices, config: Sequence[DeviceConfig], own: Mapping[bytes, bytes]
) -> dict[str, str]:
    """The variables to add. own: the task's own variables. config: the `[[device]]` tables of this node."""
    found = {
        "PEERLOAD_CPUS": f"{request.cpus:g}",
        "PEERLOAD_MEM_BYTES": str(request.mem_bytes),
        "OMP_NUM_THREADS": str(max(int(request.cpus), 1)),
        **_gpu_variables(held),
        **(_mps_variables(request, held) if held.is_mps else {}),
        **_device_variables(held, config),
    }
    return {name: value for name, value in found.items() if name not in ADVICE or name.encode() not in own}


def _gpu_variables(held: HeldDevices) -> dict[str, str]:
    gpus = held.gpus
    found = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(_cuda_name(gpu) for gpu in gpus),
        "PEERLOAD_GPUS": ",".join(str(gpu.index) for gpu in gpus),
    }
    if not gpus:
        return found
    found["PEERLOAD_GPU_MODE"] = held.mode.name.lower()
    if held.promised_bytes:
        found["PEERLOAD_GPU_MEM_MB"] = str(held.promised_bytes // MIB)
    if not held.is_exclusive:
        found |= _sharing_variables(held)
    return found


def _sharing_variables(held: HeldDevices) -> dict[str, str]:
    """Variables that keep frameworks from taking nearly the whole card at once."""
    found = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    smallest = min((gpu.mem_bytes for gpu in held.gpus if gpu.mem_bytes), default=0)
    if held.promised_bytes and smallest:
        share = max(min(held.promised_bytes / smallest, 1.0), SHARE_MIN)
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{int(share * 1000) / 1000:g}"
    return found


def _mps_variables(request: ResourceRequest, held: HeldDevices) -> dict[str, str]:
    """Limits that MPS enforces. The directories of the daemon are added when it runs."""
    found = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(request.gpu_pct)} if request.gpu_pct else {}
    if held.promised_bytes:
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={held.promised_bytes // MIB}M"
    return found


def _cuda_name(gpu: Device) -> str:
    """The name of a GPU for CUDA; its number where the name is unknown."""
    return gpu.name if gpu.id.startswith(KNOWN_BY_NAME + ":") else str(gpu.index)


def _device_variables(held: HeldDevices, config: Sequence[DeviceConfig]) -> dict[str, str]:
    """`PEERLOAD_FPGA=f0,f1` for each kind, and the variables of the config."""
    by_kind: dict[str, list[str]] = {}
    for device in held.devices:
        if device.kind != GPU:
            by_kind.setdefault(device.kind, []).append(device.name)
    found: dict[str, str] = {}
    for kind, names in by_kind.items():
        ids = ",".join(names)
        found[f"PEERLOAD_{kind.upper().replace('-', '_')}"] = ids
        for one in config:
            if one.kind == kind:
                found |= {name: value.replace(IDS, ids) for name, value in one.env.items()}
    return found


TRACEPARENT = b"TRACEPARENT"
TRACEPARENT_PARTS = 4
_TRACEPARENT = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def child_traceparent(given: bytes, key: str) -> str:
    """The W3C trace context of an attempt: the trace in which its task was submitted, and a new span, derived from its key.
    "" if ``given`` is no trace context."""
    if not _TRACEPARENT.fullmatch(given):
        return ""
    span = hashlib.blake2b(given + key.encode(), digest_size=8).hexdigest()
    return f"{given[:35].decode()}-{span}-{given[53:].decode()}"
