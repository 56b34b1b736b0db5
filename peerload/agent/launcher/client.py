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
from typing import TYPE_CHECKING, Any

import msgpack

from peerload.agent.launcher.connect import LOST, SOCKET_NAME, LauncherError, listed, open_or_start, read_frame
from peerload.agent.launcher.heartbeat import Heartbeat
from peerload.agent.launcher.process import GONE_S, is_alive, stays, wait_gone
from peerload.agent.launcher.protocol import StdinFed, exit_of, spawn_request
from peerload.agent.output.spool import FOLLOWED_BYTES_MAX
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
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from peerload.agent.launcher.process import LauncherProcess, LauncherService
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

FEEDS_SINCE = 6
"""The first version of its protocol that knows `input` and `resize`."""
APPENDS_SINCE = 9
"""The first version of its protocol that knows `append`."""
PINGED_SINCE = 4
"""The first version of its protocol that knows `ping`."""
CUT_OFF = "its connection broke; it is there, and so are its tasks"
MEASURES_SINCE = 8
"""The first version of its protocol that knows `usage`."""
INSIDE_SINCE = 9
"""The first version of its protocol that starts a command inside of a task."""
LISTENS_SINCE = 9
"""The first version of its protocol that knows `listen`."""
MEASURED_S_MAX = 2.0
"""It answers that at once, or it is busy: nobody waits longer for figures."""
EVICTS = 3
"""The launcher's protocol from which on it knows `evict`."""
MEMORY_FREE = "memory: this launcher is of an earlier version, and limits none"


class LauncherLink:
    """The connection to the launcher of ``process``. ``put`` gets TaskStarted, TaskEnded, LauncherLost, LauncherReady and
    StdinFed; ``failed(why)`` is called if no more can come. Requests of one loop turn go in one frame."""

    def __init__(
        self,
        process: LauncherProcess | LauncherService,
        put: Callable[[Event | StdinFed], None],
        output_bytes_max: int,
        failed: Callable[[str], None] | None = None,
        heartbeat: Callable[[Callable[[], None], Callable[[bool], None]], Heartbeat] = Heartbeat,
    ) -> None:
        self._process = process
        self._directory = process.directory
        self._service_of = process.serves_node
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._measured: dict[int, asyncio.Future[dict[str, Any]]] = {}
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
        self._heartbeat = heartbeat(lambda: self._request({"do": "ping"}), lambda silent: put(LauncherSilent(silent)))
        self._is_asked = False

    @property
    def pid(self) -> int:
        """The launcher's pid, 0 while there is none."""
        return self._pid

    @property
    def is_silent(self) -> bool:
        """Whether it was asked whether it is there, and did not answer in time."""
        return self._heartbeat.is_silent

    async def answers(self, within_s: float) -> bool:
        """Whether there is one that answers within so many seconds; one of an earlier version cannot be asked."""
        return bool(self._pid) and (not self._is_asked or await self._heartbeat.answers(within_s))

    async def start(self) -> LauncherReady:
        """Find the launcher or start one. → what runs, what has ended unforgotten, and of what runs the frozen. Raises LauncherError."""
        if not self._service_of:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        reader, listing = await self._connect_again()
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        self._reading.add_done_callback(self._read_ended)
        self._watch()
        return listing

    def _watch(self) -> None:
        """Ask whether it answers; one of an earlier version would not understand."""
        if self._is_asked:
            self._heartbeat.start()

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
        self._request({"do": "stop"})
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
        request = spawn_request(action, (str(stdout), str(stderr)), extra, source)
        if self._service_of:
            request |= {"node": self._service_of, "home": action.home, "user": action.spec.user, "uid": owner}
            request |= {
                "kept": [*extra, *action.spec.named],
                "devices": bool(action.devices),
                "cpus": action.spec.request.cpus,
            }
        if inside:
            request["inside"] = inside
        limit = self._output_bytes_max
        request["output_bytes_max"] = max(limit, FOLLOWED_BYTES_MAX) if action.spec.followed else limit
        if self._run:
            request["run"] = self._run
        self._request(request)

    def signal(self, key: str, number: int) -> None:
        """Send a signal to a task."""
        self._request({"do": "signal", "key": key, "signal": number})

    @property
    def feeds(self) -> bool:
        """Whether it passes standard input on, and makes terminals; one of an earlier version does neither."""
        return self._protocol >= FEEDS_SINCE

    @property
    def appends(self) -> bool:
        """Whether it writes to the files of users piece by piece."""
        return self._protocol >= APPENDS_SINCE

    @property
    def goes_inside(self) -> bool:
        """Whether it can start a command inside of a task; one of an earlier version cannot."""
        return self._protocol >= INSIDE_SINCE

    def feed(self, key: str, size_bytes: int, *, has_ended: bool) -> None:
        """The file that a task's stdin is fed from has so many bytes; ``has_ended``: that is all. `StdinFed` answers."""
        self._request({"do": "input", "key": key, "size": size_bytes, "ends": has_ended})

    def resize(self, key: str, rows: int, columns: int) -> None:
        """The window of a task's terminal is another."""
        self._request({"do": "resize", "key": key, "rows": rows, "columns": columns})

    def set_lease(self, key: str, deadline_s: float, ts: float) -> None:
        """Move the time at which a task is frozen; ``ts``: what that was granted for, kept with it."""
        self._request({"do": "lease", "key": key, "deadline_s": deadline_s, "ts": ts})

    def evict(self, key: str, reason: str) -> None:
        """End a task that is frozen; a launcher of an earlier version cannot, and keeps it."""
        if self._protocol >= EVICTS:
            self._request({"do": "evict", "key": key, "reason": reason})

    def look_for_socket(self) -> None:
        """Have it make its socket anew if that is gone: the next agent could not reach it, nor its tasks."""
        if self._protocol >= LISTENS_SINCE and not (self._directory / SOCKET_NAME).exists():
            self._request({"do": "listen"})

    def forget(self, key: str) -> None:
        """The exit record is not needed any more."""
        self._request({"do": "forget", "key": key})

    async def ask(self, request: dict[str, Any]) -> str:
        """Have the launcher of all users do something as one of them → what was in the way, "" if nothing. Raises
        LauncherError."""
        if self._writer is None or self._paused or len(self._asked) >= ASKED_MAX:
            raise LauncherError("the launcher does not answer", hint="systemctl status peerload-launcher")
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._request({**request, "id": number, "node": self._service_of})
        try:
            async with asyncio.timeout(ASK_S_MAX):
                return await answer
        except TimeoutError:
            raise LauncherError("the launcher has not done in time what it was asked") from None
        finally:
            self._asked.pop(number, None)

    async def usage(self, keys: Sequence[str]) -> dict[str, Any]:
        """Usage of these tasks now, as `usage.used` has it; tasks are missing if the launcher does not answer in time."""
        if self._protocol < MEASURES_SINCE or self._writer is None or self._paused or len(self._measured) >= ASKED_MAX:
            return {}
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._measured[number] = answer
        self._request({"do": "usage", "id": number, "keys": list(keys)})
        try:
            async with asyncio.timeout(MEASURED_S_MAX):
                return await answer
        except TimeoutError:
            return {}
        finally:
            self._measured.pop(number, None)

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
        body = msgpack.Packer().pack_array_header(len(batch)) + b"".join(batch)
        self._writer.write(len(body).to_bytes(4, "big") + body)

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
        if self._service_of and not hello.get("system"):
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
            self._watch()

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

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["is"]
        if kind == "started":
            self._put(TaskStarted(event["key"], float(event["started_at"])))
        elif kind == "expired":
            reason = event.get("reason", "its lease ran out before it could be started")
            never_started, shortage = bool(event.get("never_started", True)), str(event.get("shortage", ""))
            self._put(TaskLost(event["key"], reason, never_started=never_started, shortage=shortage))
        elif kind == "ended":
            self._put(TaskEnded(event["key"], exit_of(event["exit"])))
        elif kind == "told":
            answer = self._asked.get(int(event["id"]))
            if answer is not None and not answer.done():
                answer.set_result(str(event["why"]))
        elif kind == "used":
            measured = self._measured.get(int(event["id"]))
            if measured is not None and not measured.done():
                measured.set_result(event)
        elif kind == "fed":
            self._put(StdinFed(str(event["key"]), int(event["offset"]), bool(event["is_closed"])))
        elif kind in ("frozen", "thawed"):
            self._put(TaskFrozen(event["key"], frozen=kind == "frozen"))
