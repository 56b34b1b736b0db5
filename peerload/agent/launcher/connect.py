"""How the agent reaches its launcher: its socket, its process if nobody answers there, and its frames.

What is said then is `launcher/client.py`.
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
"""A new launcher first ends what its predecessor left, then answers."""
SERVICE_LOOK_S = 0.25
"""One that its service starts is looked for this often."""
START_LOOK_S = 0.01
"""A launcher on its way is looked for this often."""
DATE_SET_S = 1.0
"""A start that date and boot clock place farther apart than this: the date was set since."""
SHORTAGES = ("", "memory", "gpu memory")
"""Resources that the model knows an attempt to be short of."""
LOST = (OSError, asyncio.IncompleteReadError, LauncherProtocolError)
"""What reading from a launcher raises that is gone or malformed; OSError is TimeoutError too."""


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
                    log.info("waits for the launcher of all users in %s", directory)
                await asyncio.to_thread(process.start)
            elif time.monotonic() > deadline_s or process.has_failed():
                process.let_go()
                raise LauncherError(
                    "the launcher does not answer",
                    why=process.last_words() or str(error.strerror),
                    hint="systemctl status peerload-launcher" if is_service else "",
                ) from None
            await asyncio.sleep(SERVICE_LOOK_S if is_service else START_LOOK_S)


async def _open(directory: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect by way of the directory's own descriptor: a long path does not fit into a socket's name."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(
            f"/proc/self/fd/{fd}/{SOCKET_NAME}", limit=FRAME_BYTES_MAX + HEADER_BYTES
        )
    finally:
        os.close(fd)


async def listed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, met: Callable[[ListedEvent], None]
) -> LauncherReady:
    """Ask it for all it knows; ``met`` is called with what it says of itself."""
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
    """When an attempt started, by the date as it is now: the boot clock says how long ago that was (``ran_s``, 0 = not told),
    the date may have been set since."""
    by_boot_clock = time.time() - ran_s
    return by_boot_clock if ran_s and abs(by_boot_clock - started_at) > DATE_SET_S else started_at


def exit_of(record: ExitRecord) -> Exit:
    """An exit record as the model has it, also that of a launcher that knows further shortages. Raises LauncherProtocolError."""
    if record.out_of not in SHORTAGES:
        record = record.replace(out_of="")
    fields = record.fields() | {"usage": record.usage.fields() if record.usage is not None else {}}
    try:
        return msgspec.convert(fields, Exit)
    except msgspec.ValidationError as error:
        raise LauncherProtocolError(f"exit: {error}") from None


async def read_frame(reader: asyncio.StreamReader) -> list[LauncherEvent]:
    """What came next from it. Raises what is in LOST."""
    size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
    if size > FRAME_BYTES_MAX:
        raise LauncherProtocolError(f"a frame of {size} bytes from the launcher")
    return decode_events(await reader.readexactly(size))
