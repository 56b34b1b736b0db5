"""One moment as the core sees it."""

from __future__ import annotations

import msgspec


class Instant(msgspec.Struct, frozen=True, gc=False):
    """A moment on two clocks of one node.

    ``boot_s`` is CLOCK_BOOTTIME in seconds and decides (suspend counts, clock steps do not);
    ``wall_s`` is Unix time in seconds and is for records and people only.
    """

    boot_s: float
    wall_s: float
