"""Energy counters of the processors (powercap, RAPL). Only root may read them, so the launcher of all users reads them, once a
second at most. The agent of one user reads those that it may.

Zones are known by their names, never by their numbers: `psys` may be `intel-rapl:1`. Imports are few: the launcher has to stay
small.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = "/sys/class/powercap"
ZONES_MAX = 256
DEPTH_MAX = 3
FRESH_S = 1.0
"""Minimum age of readings before the next: with finer ones, users could find out what others compute (CVE-2020-8694)."""

Reading = tuple[str, str, int, int, int]
"""(path, name, microjoules, range in microjoules, rated microwatts); -1: unreadable, -2: readable by root only."""
UNREADABLE, FORBIDDEN = -1, -2
FIND_EVERY_S = 10.0
"""Interval of the search for zones."""


class Powercap:
    """Zones below a directory that count the joules of packages and memory, and of the whole platform."""

    def __init__(self, place: str = PLACE, now_s: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._now_s = now_s
        self._read_s = self._found_s = float("-inf")
        self._zones: list[tuple[str, str, int, int]] = []
        self._last: list[Reading] = []

    def read(self) -> list[Reading]:
        """Readings of all zones, at most FRESH_S old."""
        now_s = self._now_s()
        if not 0 <= now_s - self._read_s < FRESH_S:
            self._read_s = now_s
            if not 0 <= now_s - self._found_s < FIND_EVERY_S or any(reading[2] == UNREADABLE for reading in self._last):
                self._found_s = now_s
                self._zones = [_described(path, name) for path, name in sorted(zones(self._place).items())]
            self._last = [(path, name, _counter(path), *rest) for path, name, *rest in self._zones]  # type: ignore[misc]
        return self._last


def zones(place: str) -> dict[str, str]:
    """Zones that count (path → name): packages and memory once each, however they are accessed, and the platform.
    `core` and `uncore` are inside the package; `intel-rapl-mmio` repeats it."""
    found: dict[str, str] = {}
    _search(place, found, DEPTH_MAX)
    counted = {path: name for path, name in found.items() if name.startswith("package") or name in ("dram", "psys")}
    first = {path: name for path, name in counted.items() if not os.path.basename(path).startswith("intel-rapl-mmio")}
    return first or counted


def _search(place: str, found: dict[str, str], depth: int) -> None:
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return
    for name in names:
        path = os.path.realpath(f"{place}/{name}")
        if (":" not in name and "rapl" not in name) or path in found or len(found) >= ZONES_MAX:
            continue
        found[path] = _text(f"{path}/name")
        if depth > 1:
            _search(path, found, depth - 1)


def _described(path: str, name: str) -> tuple[str, str, int, int]:
    rated = max(_number(_text(f"{path}/constraint_0_{what}_uw"), 0) for what in ("max_power", "power_limit"))
    return path, name, _number(_text(f"{path}/max_energy_range_uj"), 0), rated


def _counter(path: str) -> int:
    try:
        return _number(_read(f"{path}/energy_uj"), UNREADABLE)
    except PermissionError:
        return FORBIDDEN
    except OSError:
        return UNREADABLE


def _number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else default  # noqa: PLR2004 -- 64 bits


def _text(path: str) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(fd, 64).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
