"""Connecting to the launcher: its socket, its process if nobody answers there, and its frames.

`client.py` speaks to it then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

import msgspec

from peerload.launcher.protocol import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
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

SOCKET_NAME = "launcher.sock"
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
LOST = (OSError, asyncio.IncompleteReadError, LauncherProtocolError)
"""Errors of reading from a launcher that is gone or malformed; OSError includes TimeoutError."""


class LauncherError(PeerloadError):
    """The launcher cannot be started or does not answer."""

    code = "launcher"


async def open_or_start(
    process: LauncherProcess | LauncherService,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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


async def _open(directory: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect through a descriptor of the directory: a long path does not fit into a socket address."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(
            f"/proc/self/fd/{fd}/{SOCKET_NAME}", limit=FRAME_BYTES_MAX + HEADER_BYTES
        )
    finally:
        os.close(fd)


async def fetch_list(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, met: Callable[[ListedEvent], None]
) -> LauncherReady:
    """Get the list of everything the launcher knows; ``met`` gets its last part, which describes the launcher."""
    writer.write(frame([encode(ListRequest())]))
    running: list[tuple[str, float, float]] = []
    ended: list[tuple[str, Exit]] = []
    frozen: list[str] = []
    more = True
    while more:
        async with asyncio.timeout(START_S_MAX):
            try:
                events = await read_frame(reader)
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
    fields = record.fields() | {"usage": record.usage.fields() if record.usage is not None else {}}
    try:
        return msgspec.convert(fields, Exit)
    except msgspec.ValidationError as error:
        raise LauncherProtocolError(f"exit: {error}") from None


async def read_frame(reader: asyncio.StreamReader) -> list[LauncherEvent]:
    """The events of the next frame. Raises what is in LOST."""
    size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
    if size > FRAME_BYTES_MAX:
        raise LauncherProtocolError(f"a frame of {size} bytes from the launcher")
    return decode_events(await reader.readexactly(size))
