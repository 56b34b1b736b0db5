"""Whether a working directory exists on this node; asked in a thread, since a dead network mount hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time

from peerload.model.task import SCRATCH

CHECK_S_MAX = 2.0
"""A directory that cannot be looked at for so long counts as missing."""
SEEN_S = 2.0
"""A directory seen so lately is not looked at again for every offer of a burst."""
KEPT_MAX = 256
LOOKS_MAX = 32
"""Looks under way at a time. One that hangs in a dead mount keeps its thread; what is asked for beyond these counts as
missing, and nothing else waits for them: neither the threads of other work nor the end of the agent."""
_LOOK = "directory"


async def is_directory_here(directory: bytes) -> bool:
    """Whether it exists here and may be entered; SCRATCH always does."""
    if directory == SCRATCH:
        return True
    if sum(thread.name == _LOOK for thread in threading.enumerate()) >= LOOKS_MAX:
        return False
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()

    def tell(here: bool) -> None:
        if not answer.done():
            answer.set_result(here)

    def look() -> None:
        here = _may_enter(directory)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(tell, here)

    threading.Thread(target=look, name=_LOOK, daemon=True).start()
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            return await answer
    except TimeoutError:
        return False


def _may_enter(directory: bytes) -> bool:
    # Not Path.is_dir: that raises where the path is too long or a directory above it may not be searched.
    return os.path.isdir(directory) and os.access(directory, os.X_OK)  # noqa: PTH112


class SeenDirectories:
    """Remembers, for a moment, the directories that were there."""

    def __init__(self) -> None:
        self._seen: dict[bytes, float] = {}

    def seen_lately(self, directory: bytes) -> bool:
        """Whether it was there a moment ago."""
        seen_s = self._seen.get(directory)
        return directory == SCRATCH or (seen_s is not None and time.monotonic() - seen_s < SEEN_S)

    async def look(self, directory: bytes) -> bool:
        """Look again."""
        here = await is_directory_here(directory)
        if here:
            if len(self._seen) >= KEPT_MAX:
                self._seen.clear()
            self._seen[directory] = time.monotonic()
        return here
