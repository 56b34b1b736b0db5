"""The agent's end of the launcher: starts it if it is not there, speaks to it, restarts it if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import msgpack

from peerload.agent.launcher_process import GONE_S, LauncherProcess, is_alive, stays, wait_gone
from peerload.agent.launcher_pulse import Pulse
from peerload.agent.launcher_words import exit_of, spawn_request
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peerload.model.actions import SpawnTask
    from peerload.model.events import Event
    from peerload.model.task import Exit

log = logging.getLogger("peerload.launcher")

START_S_MAX = 15.0
"""A new launcher first ends what its predecessor left, then answers."""
STOP_S_MAX = 5.0
RESTART_S = 0.2
CONNECTS_MAX = 3
"""A launcher that hangs up is connected to again so often before the agent gives up starting."""
START_LOOK_S = 0.01
"""A launcher on its way is looked for this often."""
FRAME_BYTES_MAX = 4 << 20
FRAME_FILL_BYTES = 1 << 20
"""A frame is sent when it holds this much; a single request may be larger."""

PINGED_SINCE = 4
"""The first version of its protocol that knows `ping`."""
CUT_OFF = "its connection broke; it is there, and so are its tasks"

_LOST = (OSError, asyncio.IncompleteReadError, ValueError, TypeError, KeyError, AttributeError)
"""What reading from a launcher raises that is gone or does not speak our language; OSError is TimeoutError too."""

IS_FROZEN = 2
"""The place in what is told of a lease, after ts and deadline."""
EVICTS = 3
"""The launcher's protocol from which on it knows `evict`."""


MEMORY_FREE = "memory: this launcher is of an earlier version, and limits none"


class LauncherError(PeerloadError):
    """The launcher cannot be started or does not answer."""

    code = "launcher"


class LauncherLink:
    """``put`` gets TaskStarted, TaskEnded, LauncherLost and LauncherReady; ``failed(why)`` is called if no more can come.
    Requests of one loop turn go in one frame."""

    def __init__(
        self,
        directory: Path,
        put: Callable[[Event], None],
        output_bytes_max: int,
        failed: Callable[[str], None] | None = None,
        pulse: Callable[[Callable[[], None], Callable[[bool], None]], Pulse] = Pulse,
    ) -> None:
        self._directory = directory
        self._failed = failed
        self._put = put
        self._output_bytes_max = output_bytes_max
        self._pid = 0
        self._run = ""
        self._protocol = 1
        self.units = ""
        """How the launcher holds the processes of a task together: cgroup2, cgroup1 or bare; "" until it has answered."""
        self.memory = ""
        """How it limits their memory: cgroup2, cgroup1 or rlimit; "" if it does not, being of an earlier version."""
        self.unenforced: tuple[str, ...] = ()
        """What it cannot hold, in words for people."""
        self._writer: asyncio.StreamWriter | None = None
        self._requests: list[bytes] = []
        self._flushing = False
        self._reading: asyncio.Task[None] | None = None
        self._closing = False
        self._paused = False
        self._process = LauncherProcess(directory)
        self._pulse = pulse(lambda: self._request({"do": "ping"}), lambda silent: put(LauncherSilent(silent)))
        self._is_asked = False

    @property
    def pid(self) -> int:
        """The launcher's pid, 0 while there is none."""
        return self._pid

    async def start(self) -> LauncherReady:
        """Find the launcher or start one. → what runs, what has ended unforgotten, and of what runs the frozen. Raises LauncherError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        reader, listing = await self._connect_again()
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        self._reading.add_done_callback(self._read_ended)
        self._watch()
        return listing

    def _watch(self) -> None:
        """Ask whether it answers; one of an earlier version would not understand."""
        if self._is_asked:
            self._pulse.start()

    def _read_ended(self, reading: asyncio.Task[None]) -> None:
        """Without its events no task would ever end: a bug here must stop the agent, not deafen it."""
        if not reading.cancelled() and (error := reading.exception()) is not None:
            log.error("a bug", exc_info=error)
            if self._failed is not None:
                self._failed(f"the launcher's events are lost: {error!r}")

    def tell(self) -> None:
        """Say in the log which launcher this is, and what it cannot hold. After `start` that is left to the caller, since
        an agent that does not come up has only to say why."""
        by = f"{self.units}, their memory by {self.memory or 'nothing'}"
        log.info("launcher %d (protocol %d) holds tasks by %s", self._pid, self._protocol, by)
        for what in self.unenforced:
            log.info("not held: %s", what)

    async def close(self) -> None:
        """Let go of it; it and its tasks go on."""
        self._closing = True
        self._pulse.stop()
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
        self._pulse.stop()
        if self._writer is None and self._reading is not None:  # one is on its way
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            with contextlib.suppress(LauncherError):
                await self._connect_again()
        pid = self._pid
        self.resume()
        self._request({"do": "stop"})
        self._flush()
        await asyncio.to_thread(wait_gone, pid, STOP_S_MAX)
        if is_alive(pid):
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

    def spawn(self, action: SpawnTask, stdout: Path, stderr: Path, extra: dict[bytes, bytes]) -> None:
        """Start a process; ``extra`` is added to its environment."""
        request = spawn_request(action, (str(stdout), str(stderr)), extra)
        request["output_bytes_max"] = self._output_bytes_max
        if self._run:
            request["run"] = self._run
        self._request(request)

    def signal(self, key: str, number: int) -> None:
        """Send a signal to a task."""
        self._request({"do": "signal", "key": key, "signal": number})

    def set_lease(self, key: str, deadline_s: float, ts: float) -> None:
        """Move the time at which a task is frozen; ``ts``: what that was granted for, kept with it."""
        self._request({"do": "lease", "key": key, "deadline_s": deadline_s, "ts": ts})

    def evict(self, key: str, reason: str) -> None:
        """End a task that is frozen; a launcher of an earlier version cannot, and keeps it."""
        if self._protocol >= EVICTS:
            self._request({"do": "evict", "key": key, "reason": reason})

    def forget(self, key: str) -> None:
        """The exit record is not needed any more."""
        self._request({"do": "forget", "key": key})

    def _request(self, request: dict[str, Any]) -> None:
        if self._writer is None or self._paused:
            return  # LauncherReady will tell what is true then
        self._requests.append(msgpack.packb(request))
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        requests, self._requests = self._requests, []
        if self._writer is None:
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
        body = msgpack.Packer().pack_array_header(len(batch)) + b"".join(batch)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    # -- connection ----------------------------------------------------------------------------------------------------

    async def _connect(self) -> tuple[asyncio.StreamReader, LauncherReady]:
        """Connect, starting the launcher if nobody answers, and ask for the list."""
        reader, writer = await self._open_or_start()
        try:
            listing = await self._list(reader, writer)
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
            except _LOST as error:
                why = str(error) or type(error).__name__
                log.warning("the launcher hung up: %s", why)
        self._process.let_go()
        raise LauncherError("the launcher does not answer", why=why)

    async def _list(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> LauncherReady:
        writer.write(_frame([{"do": "list"}]))
        running: list[tuple[str, float, float]] = []
        ended: list[tuple[str, Exit]] = []
        frozen: list[str] = []
        more = True
        while more:
            async with asyncio.timeout(START_S_MAX):
                events = await _read_frame(reader)
            for event in events:
                if event.get("is") == "listed":
                    more = bool(event["more"])
                    leases = event.get("leases") or [(0.0,)] * len(event["running"])
                    for (key, started_at), lease in zip(event["running"], leases, strict=True):
                        running.append((key, float(started_at), float(lease[0])))
                        frozen += [key] * (len(lease) > IS_FROZEN and bool(lease[IS_FROZEN]))
                    ended += [(key, exit_of(exit_)) for key, exit_ in event["ended"]]
                    if not more:
                        self._met(event)
        return LauncherReady(tuple(running), tuple(ended), tuple(frozen))

    def _met(self, hello: dict[str, Any]) -> None:
        """What it says of itself; one of the first version says nothing but its pid."""
        self._pid = int(hello["pid"])
        self._run = str(hello.get("run", ""))
        self.units = str(hello.get("units", "bare"))
        self.unenforced = tuple(
            map(str, hello.get("unenforced", ("a process that leaves the process group of its task",)))
        )
        self._protocol = int(hello.get("protocol", 1))
        self.memory = str(hello.get("memory", ""))
        if not self.memory:
            self.unenforced += (MEMORY_FREE,)
        self._is_asked = self._protocol >= PINGED_SINCE

    async def _open_or_start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline_s = time.monotonic() + START_S_MAX
        started = False
        while True:
            try:
                return await self._open()
            except OSError as error:
                if not started:
                    started = True
                    await asyncio.to_thread(self._process.start)
                elif time.monotonic() > deadline_s or self._process.has_failed():
                    self._process.let_go()
                    raise LauncherError(
                        "the launcher does not answer", why=self._process.last_words() or str(error.strerror)
                    ) from None
                await asyncio.sleep(START_LOOK_S)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect by way of the directory's own descriptor: a long path does not fit into a socket's name."""
        fd = os.open(self._directory, os.O_PATH | os.O_DIRECTORY)
        try:
            return await asyncio.open_unix_connection(f"/proc/self/fd/{fd}/launcher.sock", limit=FRAME_BYTES_MAX + 4)
        finally:
            os.close(fd)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Events until the launcher is lost; then another one, for ever."""
        while True:
            lost = await self._events_until_lost(reader)
            if self._closing:
                return
            self._pulse.stop()
            is_there = await asyncio.to_thread(stays, self._pid)
            log.warning("%s (%s)", CUT_OFF if is_there else "the launcher is lost; another one is started", lost)
            self._pid = 0
            if self._writer is not None:
                self._writer.close()
            self._writer = None
            self._paused = True
            self._requests.clear()
            self._put(LauncherLost(CUT_OFF) if is_there else LauncherLost())
            reader, ready = await self._reconnect()
            self.tell()
            self._put(ready)
            self._watch()

    async def _events_until_lost(self, reader: asyncio.StreamReader) -> str:
        try:
            while True:
                told = await _read_frame(reader)
                self._pulse.heard()
                for event in told:
                    self._event(event)
        except _LOST as error:
            return str(error) or type(error).__name__

    async def _reconnect(self) -> tuple[asyncio.StreamReader, LauncherReady]:
        await asyncio.to_thread(self._process.wait, GONE_S)  # the connection broke a moment before it was gone
        while True:
            try:
                return await self._connect()
            except (LauncherError, *_LOST) as error:
                log.error("no launcher: %s", error)  # noqa: TRY400 -- said every time it fails; the story is in the error
                await asyncio.sleep(RESTART_S)

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["is"]
        if kind == "started":
            self._put(TaskStarted(event["key"], float(event["started_at"])))
        elif kind == "expired":
            reason = event.get("reason", "its lease ran out before it could be started")
            self._put(TaskLost(event["key"], reason, never_started=bool(event.get("never_started", True))))
        elif kind == "ended":
            self._put(TaskEnded(event["key"], exit_of(event["exit"])))
        elif kind in ("frozen", "thawed"):
            self._put(TaskFrozen(event["key"], frozen=kind == "frozen"))


async def _read_frame(reader: asyncio.StreamReader) -> list[dict[str, Any]]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes from the launcher")
    events: list[dict[str, Any]] = msgpack.unpackb(await reader.readexactly(size))
    return events


def _frame(requests: list[dict[str, Any]]) -> bytes:
    body: bytes = msgpack.packb(requests)
    return len(body).to_bytes(4, "big") + body
