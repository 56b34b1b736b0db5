"""The health check of an agent: its socket answers, its store commits, its launcher answers. The service manager hears that the
agent is alive only after these checks have passed, so that an agent that merely has a process is restarted."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.store.pruning import CommitProbe
from peerload.model.errors import StoreError
from peerload.wire import frame

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.store.store import Store

ANSWER_BYTES_MAX = 1 << 20
REQUEST_ID = 1
LOOK_S = 0.5
"""Interval at which a commit that waits for disk space is noticed."""


class HealthCheck:
    """The checks of one agent. socket: path of the socket for clients."""

    def __init__(self, socket: str, store: Store, launcher: LauncherLink) -> None:
        self._socket = socket
        self._store = store
        self._launcher = launcher

    async def trouble(self, within_s: float) -> str:
        """Why this agent does not do its work, "" if it does. Each check may take so many seconds."""
        checks = {
            "its socket does not answer": _socket_answers(self._socket),
            "its store does not commit": _store_commits(self._store),
            "its launcher does not answer": self._launcher.answers(within_s),
        }
        found = await asyncio.gather(*(_within(within_s, check) for check in checks.values()))
        return "; ".join(f"{says}{why}" for says, why in zip(checks, found, strict=True) if why is not None)


async def _within(within_s: float, check: Awaitable[bool]) -> str | None:
    """None if the check passed, else what to add to its message."""
    try:
        async with asyncio.timeout(within_s):
            return None if await check else ""
    except TimeoutError:
        return f" within {within_s:g} s"
    except (OSError, ValueError, StoreError) as error:
        return f" ({getattr(error, 'strerror', None) or error})"


async def _socket_answers(path: str) -> bool:
    """Whether the agent answers; any answer counts, even a refusal."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frame.pack({"id": REQUEST_ID, "verb": "info"}))
        size = int.from_bytes(await reader.readexactly(frame.HEADER_BYTES), "big")
        if size > ANSWER_BYTES_MAX:
            return False
        return isinstance(msgspec.msgpack.decode(await reader.readexactly(size)), dict)
    except (asyncio.IncompleteReadError, msgspec.DecodeError):
        return False
    finally:
        writer.close()


async def _store_commits(store: Store) -> bool:
    """Whether a row reaches the disk. A commit that waits for disk space passes: it is meant to wait, is reported
    elsewhere, and a restart would not help."""
    if store.is_stalled:
        return True
    kept = asyncio.Event()
    store.persist([CommitProbe(time.time())], kept.set)
    waits = asyncio.create_task(kept.wait())
    try:
        while not waits.done() and not store.is_stalled:
            await asyncio.wait([waits], timeout=LOOK_S)
    finally:
        waits.cancel()
    return True
