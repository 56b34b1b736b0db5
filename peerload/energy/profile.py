"""Power profile of a node: levels to measure, the curve through the measurements, and reasons to refuse one. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from peerload.model.resources import POINTS_MAX, PowerCurve, Quality

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_LEVELS = (0, 1, 2, 4)


class Level(NamedTuple):
    """Measured level: this many threads busy. watts: mean power; sd: its standard deviation; rate: work of all
    threads, a second."""

    threads: int
    watts: float
    sd: float = 0.0
    rate: float = 0.0


class PowerProfile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored power profile: the curve, the measurements, and the machine. date: Unix s."""

    curve: PowerCurve
    cpu: str
    levels: tuple[int, ...] = ()
    watts: tuple[float, ...] = ()
    sd: tuple[float, ...] = ()
    governor: str = ""
    source: str = ""
    scope: str = ""
    date: float = 0.0


class BadProfile(ValueError):
    """A power profile that cannot be used, with the reason."""


def levels_of(threads: int) -> list[int]:
    """Numbers of busy threads to measure: idle, a few, and each tenth."""
    return sorted(
        {*(n for n in FIRST_LEVELS if n <= threads), *(round(threads * tenth / 10) for tenth in range(1, 11))}
    )


def fitted(found: Sequence[Level], cores: int, threads: int) -> PowerCurve:
    """The non-decreasing curve through levels that include idle and all threads, over the measured work rate. Raises
    BadProfile."""
    levels = sorted(found)
    if len(levels) < 2 or levels[0].threads or levels[-1].threads != threads:  # noqa: PLR2004 -- a line has two ends
        raise BadProfile("idle power and that of all threads busy have to be measured")
    if any(not math.isfinite(level.watts) or level.watts <= 0 for level in levels):
        raise BadProfile("a level has no power that is a number")
    if any(not math.isfinite(level.rate) or level.rate < 0 for level in levels):
        raise BadProfile("a level has no work rate that is a number")
    smt_gain, all_core = _scaling(levels, cores, threads)
    flat = PowerCurve((0.0, 1.0), cores, threads, smt_gain, all_core)
    watts = _never_falling([level.watts for level in levels])
    at = [flat.rate(level.threads) / flat.rate(threads) for level in levels]
    points = min(max(2 * threads + 1, 2), POINTS_MAX)
    spaced = tuple(_between(at, watts, number / (points - 1)) for number in range(points))
    return msgspec.structs.replace(flat, watts=spaced, quality=Quality.MEASURED)


def _scaling(levels: Sequence[Level], cores: int, threads: int) -> tuple[float, float]:
    """(smt_gain, all_core) from the work rates; (1, 1) if not measured."""
    rates = {level.threads: level.rate for level in levels}
    one = rates.get(1, 0.0)
    if not one:
        return 1.0, 1.0
    known = [level.threads for level in levels if 1 < level.threads <= cores]
    most = max(known, default=1)
    # rate(n) = n (1 - loss n / cores), measured as rate(n) / rate(1): solved for loss at the highest level on cores of their own
    told = min(rates[most] / one, float(most))  # a larger ratio is a measurement error
    loss = min(max(cores * (most - told) / (most**2 - told), 0.0), 0.95) if most > 1 else 0.0
    all_core = 1.0 - loss
    if threads == cores:
        return 1.0, all_core
    gain = 1.0 + (rates[threads] / one * (1.0 - loss / cores) / all_core - cores) / (threads - cores)
    return min(max(gain, 1.01), 16.0), all_core


def _never_falling(values: Sequence[float]) -> list[float]:
    """Isotonic regression: neighbours in falling order are replaced by their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        block = value, 1
        while blocks and blocks[-1][0] > block[0]:
            mean, count = blocks.pop()
            total = count + block[1]
            block = (mean * count + block[0] * block[1]) / total, total
        blocks.append(block)
    return [mean for mean, count in blocks for _ in range(count)]


def _between(at: Sequence[float], values: Sequence[float], where: float) -> float:
    for number in range(1, len(at)):
        if where <= at[number] or number == len(at) - 1:
            width = at[number] - at[number - 1]
            part = min((where - at[number - 1]) / width, 1.0) if width > 0 else 1.0
            return values[number - 1] + (values[number] - values[number - 1]) * part
    raise AssertionError


def decoded(document: bytes, cpu: str) -> PowerProfile:
    """A stored profile of a machine with this processor. Raises BadProfile."""
    try:
        found = msgspec.json.decode(document, type=PowerProfile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadProfile(_reason(document) or str(error)) from None
    if found.cpu != cpu:
        raise BadProfile(f"it is of another processor: {found.cpu or 'unknown'}, and here is {cpu or 'an unknown one'}")
    if found.curve.watts[0] <= 0:
        raise BadProfile("it says that the idle machine draws nothing")
    return msgspec.structs.replace(found, curve=msgspec.structs.replace(found.curve, quality=Quality.MEASURED))


def _reason(document: bytes) -> str:
    """Reason why the document is not a profile; "" if its curve is not the reason."""
    try:
        watts = msgspec.json.decode(document)["curve"]["watts"]
        if any(not isinstance(value, int | float) or isinstance(value, bool) for value in watts):
            return "a point of its curve is not a number"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return "it is not a power profile" if b"NaN" not in document else "a point of its curve is not a number"
    if len(watts) < 2:  # noqa: PLR2004 -- a line has two ends
        return "its curve has one point; two are needed"
    return "its curve falls: more load never draws less" if list(watts) != sorted(watts) else ""
