"""Parsers for sizes and durations with units."""

from __future__ import annotations

_SIZE_UNITS = {"B": 1} | {
    unit + suffix: factor**power
    for power, unit in enumerate("KMGT", start=1)
    for suffix, factor in (("", 1024), ("I", 1024), ("IB", 1024), ("B", 1000))
}
_TIME_UNITS = {"S": 1, "M": 60, "H": 3600, "D": 86_400, "W": 604_800}
_CLOCK_PARTS = 3


def invalid(why: str) -> Exception:
    """The argparse.ArgumentTypeError for a value. argparse is imported here, since most commands do not need this error."""
    import argparse

    return argparse.ArgumentTypeError(why)


def size(text: str, least: int = 1) -> int:
    """Bytes from a size: ``8G`` and ``8GiB`` are 8 times 2^30 bytes, ``8GB`` is 8 times 10^9. A bare number is refused."""
    number, unit = _split_unit(text)
    if not unit and number is not None:
        raise invalid(f"{text!r} has no unit: {text}G is {text} GiB, {text}M is {text} MiB; which is meant?")
    if number is None or unit not in _SIZE_UNITS:
        raise invalid(f"{text!r} is not a size; such as 8G, 512M, 1.5GiB")
    amount = int(number * _SIZE_UNITS[unit])
    if not least <= amount < 1 << 60:
        raise invalid(f"{text!r} is not between {least} B and 2^60")
    return amount


def duration(text: str) -> float:
    """Seconds from a duration: ``30s``, ``90m``, ``2h``, ``1d``, ``1h30m``, ``0:30:00``, ``1-12:00:00``. A bare number is refused."""
    if ":" in text:
        return _clock(text)
    number, unit = _split_unit(text)
    if not unit and number is not None:
        minutes, seconds = ("minute", "second") if number == 1 else ("minutes", "seconds")
        raise invalid(
            f"{text!r} has no unit: {text}m is {text} {minutes}, {text}s is {text} {seconds}; which is meant?"
        )
    total, rest = 0.0, text.strip().upper()
    while rest or not text.strip():
        digits = len(rest) - len(rest.lstrip("0123456789."))
        unit = rest[digits:].lstrip()
        try:
            total += float(rest[:digits]) * _TIME_UNITS[unit[:1]]
        except (ValueError, KeyError):
            raise invalid(f"{text!r} is not a duration; such as 30s, 90m, 2h, 1h30m, 0:30:00") from None
        rest = unit[1:].lstrip()
    return _within(text, total)


def _clock(text: str) -> float:
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()):
        raise invalid(f"{text!r} is not a duration; such as 0:30:00 or 1-12:00:00")
    if len(parts) != _CLOCK_PARTS:
        raise invalid(
            f"{text!r} can be read in two ways: {text}:00 is hours and minutes, 0:{text} is minutes and seconds"
        )
    hours, minutes, seconds = (int(part) for part in parts)
    return _within(text, int(days or 0) * 86_400.0 + hours * 3600 + minutes * 60 + seconds)


def _within(text: str, total_s: float) -> float:
    if not 0 < total_s <= 1e9:  # noqa: PLR2004 -- the bound of TaskSpec.time_limit_s
        raise invalid(f"{text!r} is out of range: more than 0 s, and at most 10^9 s (31 years)")
    return total_s


def _split_unit(text: str) -> tuple[float | None, str]:
    """``("1.5", "GIB")`` as a number and the unit in capitals; None if there is no number."""
    word = text.strip().upper()
    digits = len(word) - len(word.lstrip("0123456789."))
    try:
        return float(word[:digits]), word[digits:].strip()
    except ValueError:
        return None, word
