"""Whether a working directory exists on this node; asked in a thread, since a dead network mount hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time

from peerload.agent.own_turns import comes_within
from peerload.model.errors import SlowDown
from peerload.model.task import SCRATCH

CHECK_S_MAX = 2.0
"""A directory that cannot be looked at for so long counts as missing."""
SEEN_S = 2.0
"""A directory seen so lately is not looked at again for every task of a burst."""
KEPT_MAX = 256
LOOKS_MAX = 32
"""Directories looked at at a time. A look that hangs in a dead mount keeps its thread; whoever asks for one more
directory meanwhile is told to come again, and nothing else waits for them: neither the threads of other work nor the
end of the agent."""
_LOOK = "directory"


class SeenDirectories:
    """Looks at directories, each once at a time for all who ask, and remembers for a moment those that were there."""

    def __init__(self) -> None:
        self._seen: dict[bytes, float] = {}
        self._looks: dict[bytes, asyncio.Future[bool]] = {}

    def seen_lately(self, directory: bytes) -> bool:
        """Whether it was there a moment ago; SCRATCH always is."""
        seen_s = self._seen.get(directory)
        return directory == SCRATCH or (seen_s is not None and time.monotonic() - seen_s < SEEN_S)

    async def look(self, directory: bytes) -> bool:
        """Look again: whether it exists here and may be entered. Raises SlowDown, which says nothing about the
        directory, if too many others are being looked at, or no thread can be made for it."""
        if directory == SCRATCH:
            return True
        found = self._looks.get(directory)
        if found is None:
            if len(self._looks) >= LOOKS_MAX:
                raise SlowDown("too many working directories at once", why=f"{LOOKS_MAX} are being looked for")
            found = self._start(directory)
        return await comes_within(found, CHECK_S_MAX) and found.result()  # others may wait for the same look

    def _start(self, directory: bytes) -> asyncio.Future[bool]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[bool] = loop.create_future()

        def tell(here: bool) -> None:
            del self._looks[directory]
            if here:
                if len(self._seen) >= KEPT_MAX:
                    self._seen.clear()
                self._seen[directory] = time.monotonic()
            found.set_result(here)

        def look() -> None:
            here = _may_enter(directory)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(tell, here)

        try:
            threading.Thread(target=look, name=_LOOK, daemon=True).start()
        except RuntimeError:
            why = "the limit of processes is reached"
            raise SlowDown("working directories cannot be looked at: no thread can be made", why=why) from None
        self._looks[directory] = found
        return found


def _may_enter(directory: bytes) -> bool:
    # Not Path.is_dir: that raises where the path is too long or a directory above it may not be searched.
    return os.path.isdir(directory) and os.access(directory, os.X_OK)  # noqa: PTH112
