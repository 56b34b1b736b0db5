"""The agent's end of the launcher: what is said to it and what it says; another one if it is lost.

How one is found or started is `connect.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from typing import TYPE_CHECKING, assert_never

import msgpack

from peerload.agent.launcher.connect import (
    LOST,
    SOCKET_NAME,
    LauncherError,
    exit_of,
    listed,
    open_or_start,
    read_frame,
)
from peerload.agent.launcher.heartbeat import Heartbeat
from peerload.agent.launcher.process import GONE_S, is_alive, stays, wait_gone
from peerload.agent.output.spool import FOLLOWED_BYTES_MAX
from peerload.launcher.protocol import (
    EndedEvent,
    EvictRequest,
    ExpiredEvent,
    ForgetRequest,
    FrozenEvent,
    LeaseRequest,
    ListedEvent,
    ListenRequest,
    PingRequest,
    PongEvent,
    ResizeRequest,
    SignalRequest,
    SpawnRequest,
    StartedEvent,
    StdinFed,
    StdinRequest,
    StopRequest,
    ThawedEvent,
    UsageEvent,
    UsageRequest,
    UserReply,
    encode,
    frame,
)
from peerload.model.events import (
    LauncherLost,
    LauncherReady,
    LauncherSilent,
    TaskEnded,
    TaskFrozen,
    TaskLost,
    TaskStarted,
)
from peerload.model.task import Guarantee

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from peerload.agent.launcher.process import LauncherProcess, LauncherService
    from peerload.launcher.protocol import LauncherEvent, Request, UserRequest
    from peerload.model.actions import SpawnTask
    from peerload.model.events import Event

log = logging.getLogger("peerload.launcher")

STOP_S_MAX = 5.0
RESTART_S = 0.2
CONNECTS_MAX = 3
"""A launcher that hangs up is connected to again so often before the agent gives up starting."""
ASKED_MAX = 1024
ASK_S_MAX = 330.0
"""What it does as a user may take as long as it lets that, and a little more."""
FRAME_FILL_BYTES = 1 << 20
"""A frame is sent when it holds this much; a single request may be larger."""

CUT_OFF = "its connection broke; it is there, and so are its tasks"
MEASURED_S_MAX = 2.0
"""It answers that at once, or it is busy: nobody waits longer for figures."""


class LauncherLink:
    """The connection to the launcher of ``process``; ``failed(why)`` is called if no more events can come. Requests of one loop
    turn go in one frame."""

    _put: Callable[[Event | StdinFed], None]

    def __init__(
        self,
        process: LauncherProcess | LauncherService,
        output_bytes_max: int,
        failed: Callable[[str], None] | None = None,
        heartbeat: Callable[[Callable[[], None], Callable[[bool], None]], Heartbeat] = Heartbeat,
    ) -> None:
        self._process = process
        self._directory = process.directory
        self._service_of = process.serves_node
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._measured: dict[int, asyncio.Future[UsageEvent]] = {}
        self._failed = failed
        self._output_bytes_max = output_bytes_max
        self._pid = 0
        self._run = ""
        self._protocol = 0
        self.units = ""
        """How the launcher holds the processes of a task together: cgroup2 or bare; "" until it has answered."""
        self.memory = ""
        """How it limits their memory: cgroup2, cgroup1 or rlimit; "" until it has answered."""
        self.unenforced: tuple[str, ...] = ()
        """What it cannot hold, in words for people."""
        self._writer: asyncio.StreamWriter | None = None
        self._requests: list[bytes] = []
        self._flushing = False
        self._reading: asyncio.Task[None] | None = None
        self._closing = False
        self._paused = False
        self._heartbeat = heartbeat(
            lambda: self._request(PingRequest()), lambda silent: self._put(LauncherSilent(silent))
        )

    @property
    def pid(self) -> int:
        """The launcher's pid, 0 while there is none."""
        return self._pid

    @property
    def is_silent(self) -> bool:
        """Whether it was asked whether it is there, and did not answer in time."""
        return self._heartbeat.is_silent

    async def answers(self, within_s: float) -> bool:
        """Whether there is one that answers within so many seconds."""
        return bool(self._pid) and await self._heartbeat.answers(within_s)

    def report_to(self, put: Callable[[Event | StdinFed], None]) -> None:
        """Set who gets TaskStarted, TaskEnded, LauncherLost, LauncherReady and StdinFed, before `start`."""
        self._put = put

    async def start(self) -> LauncherReady:
        """Find the launcher or start one. → what runs, what has ended unforgotten, and of what runs the frozen. Raises LauncherError."""
        if not self._service_of:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        reader, listing = await self._connect_again()
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        self._reading.add_done_callback(self._read_ended)
        self._heartbeat.start()
        return listing

    def _read_ended(self, reading: asyncio.Task[None]) -> None:
        """Without its events no task would ever end: a bug here must stop the agent, not deafen it."""
        if not reading.cancelled() and (error := reading.exception()) is not None:
            log.error("a bug", exc_info=error)
            if self._failed is not None:
                self._failed(f"the launcher's events are lost: {error!r}")

    def tell(self) -> None:
        """Say in the log which launcher this is, and what it cannot hold. After `start` that is left to the caller, since
        an agent that does not come up has only to say why."""
        by = f"{self.units}, their memory by {self.memory}"
        log.info("launcher %d (protocol %d) holds tasks by %s", self._pid, self._protocol, by)
        for what in self.unenforced:
            log.info("not held: %s", what)

    async def close(self) -> None:
        """Let go of it; it and its tasks go on."""
        self._closing = True
        self._heartbeat.stop()
        self._flush()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._process.let_go()

    async def stop_all(self) -> None:
        """End its tasks and the launcher itself."""
        self._closing = True
        self._heartbeat.stop()
        if self._writer is None and self._reading is not None:  # one is on its way
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            with contextlib.suppress(LauncherError):
                await self._connect_again()
        pid = self._pid
        self.resume()
        self._request(StopRequest())
        self._flush()
        await asyncio.to_thread(wait_gone, pid, STOP_S_MAX)
        if is_alive(pid) and not self._service_of:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    def resume(self) -> None:
        """LauncherReady was taken note of: from here on requests go to the new launcher. Before that they are dropped,
        since they were decided upon before the attempts of the old one were found dead."""
        self._paused = False

    @property
    def run(self) -> str:
        """What this run of the launcher calls itself; "" if it does not say."""
        return self._run

    # -- requests ------------------------------------------------------------------------------------------------------

    def spawn(
        self,
        action: SpawnTask,
        stdout: Path,
        stderr: Path,
        extra: dict[bytes, bytes],
        source: str = "",
        owner: int = -1,
        inside: str = "",
    ) -> None:
        """Start a process; ``extra`` is added to its environment; ``source``: the file that its stdin is fed from; ``owner``: the
        uid that its submitter has on this node, -1 = not known; ``inside``: the key of the running attempt whose working
        directory, environment and unit it gets."""
        spec, limit = action.spec, self._output_bytes_max
        mem_bytes = spec.request.mem_bytes
        request = SpawnRequest(
            key=action.key,
            argv=list(spec.argv),
            environment=_environment(spec.environment, extra),
            directory=spec.directory,
            umask=spec.umask,
            stdout=str(stdout),
            stderr=str(stderr),
            deadline_s=action.deadline_s,
            output_bytes_max=max(limit, FOLLOWED_BYTES_MAX) if spec.followed else limit,
            ts=action.ts,
            frozen_s_max=action.frozen_s_max,
            once=spec.guarantee is Guarantee.ONCE,
            memory_bytes_max=mem_bytes,
            node=extra.get(b"PEERLOAD_NODE", b"").decode() if mem_bytes else "",
            input=source,
            terminal=[spec.terminal.rows, spec.terminal.columns] if spec.terminal is not None else None,
            run=self._run,
            inside=inside,
        )
        if self._service_of:
            request = request.replace(
                node=self._service_of,
                home=action.home,
                user=spec.user,
                uid=owner,
                kept=[*extra, *spec.named],
                devices=bool(action.devices),
                cpus=spec.request.cpus,
            )
        self._request(request)

    def signal(self, key: str, number: int) -> None:
        """Send a signal to a task."""
        self._request(SignalRequest(key, number))

    def feed(self, key: str, size_bytes: int, *, has_ended: bool) -> None:
        """The file that a task's stdin is fed from has so many bytes; ``has_ended``: that is all. `StdinFed` answers."""
        self._request(StdinRequest(key, size_bytes, has_ended))

    def resize(self, key: str, rows: int, columns: int) -> None:
        """The window of a task's terminal is another."""
        self._request(ResizeRequest(key, rows, columns))

    def set_lease(self, key: str, deadline_s: float, ts: float) -> None:
        """Move the time at which a task is frozen; ``ts``: what that was granted for, kept with it."""
        self._request(LeaseRequest(key, deadline_s, ts))

    def evict(self, key: str, reason: str) -> None:
        """End a task that is frozen."""
        self._request(EvictRequest(key, reason))

    def look_for_socket(self) -> None:
        """Have it make its socket anew if that is gone: the next agent could not reach it, nor its tasks."""
        if not (self._directory / SOCKET_NAME).exists():
            self._request(ListenRequest())

    def forget(self, key: str) -> None:
        """The exit record is not needed any more."""
        self._request(ForgetRequest(key))

    async def ask(self, request: UserRequest) -> str:
        """Have the launcher of all users do something as one of them → what was in the way, "" if nothing. Raises
        LauncherError."""
        if self._writer is None or self._paused or len(self._asked) >= ASKED_MAX:
            raise LauncherError("the launcher does not answer", hint="systemctl status peerload-launcher")
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._request(request.replace(id=number, node=self._service_of))
        try:
            async with asyncio.timeout(ASK_S_MAX):
                return await answer
        except TimeoutError:
            raise LauncherError("the launcher has not done in time what it was asked") from None
        finally:
            self._asked.pop(number, None)

    async def usage(self, keys: Sequence[str]) -> UsageEvent | None:
        """Usage of these tasks now; None if the launcher does not answer in time."""
        if self._writer is None or self._paused or len(self._measured) >= ASKED_MAX:
            return None
        number = next(self._numbers)
        answer: asyncio.Future[UsageEvent] = asyncio.get_running_loop().create_future()
        self._measured[number] = answer
        self._request(UsageRequest(number, list(keys)))
        try:
            async with asyncio.timeout(MEASURED_S_MAX):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._measured.pop(number, None)

    def _request(self, request: Request) -> None:
        if self._writer is None or self._paused:
            return  # LauncherReady will tell what is true then
        self._requests.append(encode(request))
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        requests, self._requests = self._requests, []
        if self._writer is None or self._writer.is_closing():  # it has gone, which is noticed by who reads
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
        assert self._writer is not None
        self._writer.write(frame(batch))

    # -- connection ----------------------------------------------------------------------------------------------------

    async def _connect(self) -> tuple[asyncio.StreamReader, LauncherReady]:
        """Connect, starting the launcher if nobody answers, and ask for the list."""
        reader, writer = await open_or_start(self._process)
        try:
            listing = await listed(reader, writer, self._met)
        except BaseException:
            writer.close()
            raise
        self._writer = writer
        return reader, listing

    async def _connect_again(self) -> tuple[asyncio.StreamReader, LauncherReady]:
        """The same, more than once: the launcher that took the connection may just have been ending. Raises
        LauncherError."""
        why = ""
        for _ in range(CONNECTS_MAX):
            try:
                return await self._connect()
            except LOST as error:
                why = str(error) or type(error).__name__
                log.warning("the launcher hung up: %s", why)
        self._process.let_go()
        raise LauncherError("the launcher does not answer", why=why)

    def _met(self, hello: ListedEvent) -> None:
        """What it says of itself. Raises LauncherError."""
        self._pid = hello.pid
        self._run = hello.run
        self.units = hello.units
        self.unenforced = tuple(hello.unenforced)
        self._protocol = hello.protocol
        self.memory = hello.memory
        if self._service_of and not hello.system:
            raise LauncherError("the launcher is one user's own", why=f"it answers in {self._directory}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Events until the launcher is lost; then another one, for ever."""
        while True:
            lost = await self._events_until_lost(reader)
            if self._closing:
                return
            self._heartbeat.stop()
            is_there = await asyncio.to_thread(stays, self._pid)
            log.warning("%s (%s)", CUT_OFF if is_there else "the launcher is lost; another one is started", lost)
            self._pid = 0
            if self._writer is not None:
                self._writer.close()
            self._writer = None
            self._paused = True
            self._requests.clear()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(LauncherError("the launcher went away"))
            self._put(LauncherLost(CUT_OFF) if is_there else LauncherLost())
            reader, ready = await self._reconnect()
            self.tell()
            self._put(ready)
            self._heartbeat.start()

    async def _events_until_lost(self, reader: asyncio.StreamReader) -> str:
        try:
            while True:
                told = await read_frame(reader)
                self._heartbeat.heard()
                for event in told:
                    self._event(event)
        except LOST as error:
            return str(error) or type(error).__name__

    async def _reconnect(self) -> tuple[asyncio.StreamReader, LauncherReady]:
        await asyncio.to_thread(self._process.wait, GONE_S)  # the connection broke a moment before it was gone
        while True:
            try:
                return await self._connect()
            except (LauncherError, *LOST) as error:
                log.error("no launcher: %s", error)  # noqa: TRY400 -- said every time it fails; the story is in the error
                await asyncio.sleep(RESTART_S)

    def _event(self, event: LauncherEvent) -> None:  # noqa: C901 -- one case for each event
        match event:
            case StartedEvent(key, _, started_at):
                self._put(TaskStarted(key, started_at))
            case ExpiredEvent(key, reason, never_started, shortage):
                self._put(TaskLost(key, reason, never_started=never_started, shortage=shortage))
            case EndedEvent(key, record):
                self._put(TaskEnded(key, exit_of(record)))
            case UserReply(number, why):
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(why)
            case UsageEvent(number):
                measured = self._measured.get(number)
                if measured is not None and not measured.done():
                    measured.set_result(event)
            case StdinFed():
                self._put(event)
            case FrozenEvent(key):
                self._put(TaskFrozen(key, frozen=True))
            case ThawedEvent(key):
                self._put(TaskFrozen(key, frozen=False))
            case PongEvent() | ListedEvent():
                pass  # the heartbeat has heard it; a list is read before the events
            case _:
                assert_never(event)


def _environment(packed: bytes, extra: dict[bytes, bytes]) -> dict[bytes, bytes] | None:
    """The variables of a task; None if what its home sent is no map: the launcher then ends it with a reason."""
    try:
        return {**msgpack.unpackb(packed), **extra}
    except (ValueError, TypeError):
        return None
