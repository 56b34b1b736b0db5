"""Trusted date: the date by which things are forgotten and removed. A jump ahead counts only when it has lasted a day.

What a wrong date removes is gone when the clock is right again, so the date is compared with the boot clock. Within one
boot of the machine the boot clock says how much time has passed. Across a reboot nobody can tell, so that a machine that
was off for a weekend removes nothing for a day. A jump back counts at once, since it removes nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from peerload.security.private_files import machine_boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

SLACK_S = 3600.0
"""The date may be set ahead by less than this at a time without being doubted."""
LASTED_S = 86_400.0
"""A jump counts after so long; the time while the machine is off does not count towards it."""
NOT_AHEAD = -1.0


class DateAnchor(NamedTuple):
    """``wall_s`` is the trusted date at ``boot_s`` of the boot clock of that boot; ``ahead_s``: for how long the machine's
    date has been ahead of it, NOT_AHEAD if it is not."""

    boot_id: str
    boot_s: float
    wall_s: float
    ahead_s: float = NOT_AHEAD

    def packed(self) -> str:
        """The anchor as the database has it."""
        return f"{self.boot_id} {self.boot_s:.3f} {self.wall_s:.3f} {self.ahead_s:.3f}"


def anchor_of(packed: object) -> DateAnchor | None:
    """An anchor as the database has it; None: there is none that can be read."""
    try:
        boot_id, boot_s, wall_s, ahead_s = str(packed).split(" ")
        return DateAnchor(boot_id, float(boot_s), float(wall_s), float(ahead_s))
    except ValueError:
        return None


class TrustedDate:
    """One per database; `anchor` is what is to be kept of it. ``clocks()`` → (boot clock, Unix time), in seconds."""

    def __init__(
        self,
        anchor: DateAnchor | None = None,
        *,
        boot_id: str = "",
        clocks: Callable[[], tuple[float, float]] = lambda: (time.clock_gettime(time.CLOCK_BOOTTIME), time.time()),
    ) -> None:
        """anchor: as an earlier agent has kept it; without one the machine's date is believed."""
        self._clocks = clocks
        self._boot_id = boot_id or machine_boot_id()
        self.anchor = anchor or DateAnchor(self._boot_id, *clocks())

    def now(self) -> float:
        """The trusted date, Unix s."""
        boot_s, wall_s = self._clocks()
        known = self.anchor
        passed_s = max(boot_s - known.boot_s, 0.0) if known.boot_id == self._boot_id else 0.0
        expected_s = known.wall_s + passed_s
        if wall_s <= expected_s + SLACK_S:
            self.anchor = DateAnchor(self._boot_id, boot_s, wall_s)
        else:
            ahead_s = 0.0 if known.ahead_s == NOT_AHEAD else known.ahead_s + passed_s
            is_believed = ahead_s >= LASTED_S
            self.anchor = DateAnchor(
                self._boot_id, boot_s, wall_s if is_believed else expected_s, NOT_AHEAD if is_believed else ahead_s
            )
        return self.anchor.wall_s
