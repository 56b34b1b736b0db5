"""How the agent reaches its launcher: its socket, its process if nobody answers there, and its frames.

What is said then is `launcher/client.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import msgpack

from peerload.agent.launcher.protocol import exit_of
from peerload.model.errors import PeerloadError
from peerload.model.events import LauncherReady

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peerload.agent.launcher.process import LauncherProcess, LauncherService
    from peerload.model.task import Exit

log = logging.getLogger("peerload.launcher")

SOCKET_NAME = "launcher.sock"
START_S_MAX = 15.0
"""A new launcher first ends what its predecessor left, then answers."""
SERVICE_LOOK_S = 0.25
"""One that its service starts is looked for this often."""
START_LOOK_S = 0.01
"""A launcher on its way is looked for this often."""
FRAME_BYTES_MAX = 4 << 20
DATE_SET_S = 1.0
"""A start that date and boot clock place farther apart than this: the date was set since."""
IS_FROZEN = 2
"""The place in what is told of a lease, after ts and deadline."""

LOST = (
    OSError,
    asyncio.IncompleteReadError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
)
"""What reading from a launcher raises that is gone or does not speak our language; OSError is TimeoutError too."""


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
        return await asyncio.open_unix_connection(f"/proc/self/fd/{fd}/{SOCKET_NAME}", limit=FRAME_BYTES_MAX + 4)
    finally:
        os.close(fd)


async def listed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, met: Callable[[dict[str, Any]], None]
) -> LauncherReady:
    """Ask it for all it knows; ``met`` is called with what it says of itself."""
    writer.write(_frame([{"do": "list"}]))
    running: list[tuple[str, float, float]] = []
    ended: list[tuple[str, Exit]] = []
    frozen: list[str] = []
    more = True
    while more:
        async with asyncio.timeout(START_S_MAX):
            events = await read_frame(reader)
        for event in events:
            if event.get("is") == "listed":
                more = bool(event["more"])
                leases = event.get("leases") or [(0.0,)] * len(event["running"])
                ran_s = event.get("ran_s") or [0.0] * len(leases)
                for (key, started_at), lease, one_s in zip(event["running"], leases, ran_s, strict=True):
                    running.append((key, began_at(float(started_at), float(one_s)), float(lease[0])))
                    frozen += [key] * (len(lease) > IS_FROZEN and bool(lease[IS_FROZEN]))
                ended += [(key, exit_of(exit_)) for key, exit_ in event["ended"]]
                if not more:
                    met(event)
    return LauncherReady(tuple(running), tuple(ended), tuple(frozen))


def began_at(started_at: float, ran_s: float) -> float:
    """When an attempt started, by the date as it is now: the boot clock says how long ago that was (``ran_s``, 0 = not told),
    the date may have been set since."""
    by_boot_clock = time.time() - ran_s
    return by_boot_clock if ran_s and abs(by_boot_clock - started_at) > DATE_SET_S else started_at


async def read_frame(reader: asyncio.StreamReader) -> list[dict[str, Any]]:
    """What came next from it. Raises what is in LOST."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes from the launcher")
    events: list[dict[str, Any]] = msgpack.unpackb(await reader.readexactly(size))
    return events


def _frame(requests: list[dict[str, Any]]) -> bytes:
    body: bytes = msgpack.packb(requests)
    return len(body).to_bytes(4, "big") + body
