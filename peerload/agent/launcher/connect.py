"""Connecting to the launcher: its socket, its process if nobody answers there, and its frames.

`client.py` speaks to it then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, cast

import msgspec

from peerload.launcher.protocol import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    SOCKET_NAME,
    LauncherProtocolError,
    LauncherTooOld,
    ListedEvent,
    ListRequest,
    decode_events,
    encode,
    frame,
)
from peerload.model.errors import PeerloadError
from peerload.model.events import LauncherReady
from peerload.model.task import Exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peerload.agent.launcher.process import LauncherProcess, LauncherService
    from peerload.launcher.protocol import ExitRecord, LauncherEvent

log = logging.getLogger("peerload.launcher")

START_S_MAX = 15.0
"""Timeout of a start; a new launcher first kills what its predecessor left."""
SERVICE_LOOK_S = 0.25
"""Interval at which a launcher is tried that its service starts."""
START_LOOK_S = 0.01
"""Interval at which a starting launcher is tried."""
DATE_SET_S = 1.0
"""A larger difference between date and boot clock means that the date was set."""
SHORTAGES = ("", "memory", "gpu memory")
"""Shortages that the model knows."""
LOST = (OSError, LauncherProtocolError)
"""Errors of reading from a launcher that is gone or malformed; OSError includes TimeoutError."""


class LauncherError(PeerloadError):
    """The launcher cannot be started or does not answer."""

    code = "launcher"


class EventFrames(asyncio.Protocol):
    """One connection to a launcher: the events of each frame are taken by `next_frame`, then delivered as they come. ``lost`` is its end."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._deliver: Callable[[list[LauncherEvent]], None] | None = None
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Why no more events can come: what is in LOST, or a bug."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end(exc if isinstance(exc, OSError) else ConnectionResetError("the launcher closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Deliver the events of whole frames."""
        self._buffer += data
        if self._deliver is None:
            self._arrived.set()
            return
        try:
            while not self.lost.done() and (events := self._next()) is not None:
                self._deliver(events)
        except Exception as error:  # noqa: BLE001 -- whoever waits for ``lost`` gets it, a bug too
            self._end(error)

    def _next(self) -> list[LauncherEvent] | None:
        """The events of the first frame in the buffer, if it is whole. Raises LauncherProtocolError."""
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES:
            return None
        size = int.from_bytes(buffer[:HEADER_BYTES], "big")
        if size > FRAME_BYTES_MAX:
            raise LauncherProtocolError(f"a frame of {size} bytes from the launcher")
        if len(buffer) < HEADER_BYTES + size:
            return None
        body = bytes(buffer[HEADER_BYTES : HEADER_BYTES + size])
        del buffer[: HEADER_BYTES + size]
        return decode_events(body)

    def _end(self, why: Exception) -> None:
        if not self.lost.done():
            self.lost.set_result(why)
        self._arrived.set()
        self.transport.close()

    async def next_frame(self) -> list[LauncherEvent]:
        """The events of the next frame, before `deliver_to`. Raises what is in LOST."""
        while (events := self._next()) is None:
            if self.lost.done():
                raise self.lost.result()
            self._arrived.clear()
            await self._arrived.wait()
        return events

    def deliver_to(self, deliver: Callable[[list[LauncherEvent]], None]) -> None:
        """Call this with the events of each frame from now on."""
        self._deliver = deliver
        self.data_received(b"")


async def open_or_start(process: LauncherProcess | LauncherService) -> EventFrames:
    """Connect; if nobody answers, have the launcher started and wait for it. Raises LauncherError."""
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
        path = f"/proc/self/fd/{fd}/{SOCKET_NAME}"
        _, frames = await asyncio.get_running_loop().create_unix_connection(EventFrames, path)
    finally:
        os.close(fd)
    return frames


async def fetch_list(launcher: EventFrames, met: Callable[[ListedEvent], None]) -> LauncherReady:
    """Get the list of everything the launcher knows; ``met`` gets its last part, which describes the launcher."""
    launcher.transport.write(frame([encode(ListRequest())]))
    running: list[tuple[str, float, float]] = []
    ended: list[tuple[str, Exit]] = []
    frozen: list[str] = []
    more = True
    while more:
        async with asyncio.timeout(START_S_MAX):
            try:
                events = await launcher.next_frame()
            except LauncherTooOld as error:
                hint = f"end its tasks, and it:  kill {error.pid}"
                raise LauncherError("the launcher is of an earlier version", why=str(error), hint=hint) from None
        for event in events:
            if isinstance(event, ListedEvent):
                more = event.more
                for task in event.running:
                    running.append((task.key, began_at(task.started_at, task.ran_s), task.ts))
                    frozen += [task.key] * task.is_frozen
                ended += [(key, exit_of(record)) for key, record in event.ended]
                if not more:
                    met(event)
    return LauncherReady(tuple(running), tuple(ended), tuple(frozen))


def began_at(started_at: float, ran_s: float) -> float:
    """Start of an attempt, by the current date: the boot clock says how long ago it was (``ran_s``, 0 = unknown); the
    date may have been set since."""
    by_boot_clock = time.time() - ran_s
    return by_boot_clock if ran_s and abs(by_boot_clock - started_at) > DATE_SET_S else started_at


def exit_of(record: ExitRecord) -> Exit:
    """An exit record as the model has it, even from a launcher that knows further shortages. Raises
    LauncherProtocolError."""
    if record.out_of not in SHORTAGES:
        record = record.replace(out_of="")
    fields = record.fields()
    fields["usage"] = record.usage.fields() if record.usage is not None else {}
    try:
        return msgspec.convert(fields, Exit)
    except msgspec.ValidationError as error:
        raise LauncherProtocolError(f"exit: {error}") from None
