"""Price of energy, or its carbon, over time: piecewise constant; and price files: CSV with the header ``start,end,value``, times
in UTC, rows in their order, without gap or overlap. Pure.
"""

from __future__ import annotations

import csv
import functools
import math
from bisect import bisect_right
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Price = Sequence[tuple[float, float]]
    """(start in s, value), ascending; the first value also applies before its start, the last one without end. An infinite
    value: the price of that period is unknown, and no task is deferred to it."""


STARTS_KEPT_MAX = 64
"""Cache size for starts: thousands of waiting tasks are mostly alike."""


def integral(price: Price, start_s: float, end_s: float) -> float:
    """Sum of value times seconds."""
    total = 0.0
    number = max(bisect_right(price, start_s, key=lambda one: one[0]) - 1, 0)
    while start_s < end_s:
        until_s = price[number + 1][0] if number + 1 < len(price) else end_s
        total += price[number][1] * (min(until_s, end_s) - start_s)
        start_s, number = min(until_s, end_s), number + 1
    return total


@functools.lru_cache(STARTS_KEPT_MAX)
def cheapest_start(
    price: tuple[tuple[float, float], ...], earliest_s: float, latest_s: float, duration_s: float
) -> float:
    """The cheapest start of a window of this many seconds, the earliest of equal ones. At the cheapest start, the window starts or
    ends at a change of the price, or the start is at a bound."""
    starts = {earliest_s, latest_s}
    starts.update(at_s for change_s, _ in price for at_s in (change_s, change_s - duration_s))
    allowed = sorted(at_s for at_s in starts if earliest_s <= at_s <= latest_s)
    return min(allowed, key=lambda at_s: integral(price, at_s, at_s + max(duration_s, 1.0)), default=earliest_s)


HEADER = ["start", "end", "value"]
ROWS_MAX = 100_000
VALUE_MAX = 1e12


def read_prices(text: str, now_s: float, file: str) -> tuple[tuple[float, float], ...]:
    """Prices as in `PricesRead`; infinite (unknown) before and after the rows. Raises ConfigError with the
    line of the first mistake."""
    rows = csv.reader(text.splitlines())
    found: list[tuple[float, float]] = []
    end_s = -math.inf
    if [cell.strip() for cell in next(rows, [])] != HEADER:
        raise _mistake(file, 1, f"the header is not {','.join(HEADER)}")
    for row in rows:
        if not row:
            continue
        line = rows.line_num
        if len(found) == ROWS_MAX:
            raise _mistake(file, line, f"more than {ROWS_MAX} rows")
        start_s, until_s, value = _row(row, file, line)
        if until_s <= start_s:
            raise _mistake(file, line, "it ends before it starts")
        if found and start_s != end_s:
            what = "unsorted" if start_s < found[-1][0] else "an overlap" if start_s < end_s else "a gap"
            raise _mistake(file, line, f"{what}: it starts at {row[0].strip()}, and not where the row before ends")
        found.append((start_s, value))
        end_s = until_s
    if not found:
        raise _mistake(file, rows.line_num, "the file has no rows")
    if end_s <= now_s:
        raise _mistake(file, rows.line_num, f"all of it is in the past: it ends at {row[1].strip()}")
    return ((0.0, math.inf), *found, (end_s, math.inf))


def _row(row: Sequence[str], file: str, line: int) -> tuple[float, float, float]:
    if len(row) != len(HEADER):
        raise _mistake(file, line, f"{len(row)} fields instead of {len(HEADER)}")
    start_s, until_s = (_utc(cell.strip(), file, line) for cell in row[:2])
    try:
        value = float(row[2])
    except ValueError:
        value = math.nan
    if not abs(value) <= VALUE_MAX:
        raise _mistake(file, line, f"the value {row[2].strip()[:40]!r} is not a number")
    return start_s, until_s, value


def _utc(text: str, file: str, line: int) -> float:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise _mistake(file, line, f"{text[:40]!r} is not a time; such as 2030-01-31T06:00Z") from None
    if when.utcoffset() != timedelta(0):
        raise _mistake(file, line, f"{text!r} is not in UTC; such as 2030-01-31T06:00Z")
    return when.timestamp()


def _mistake(file: str, line: int, what: str) -> ConfigError:
    return ConfigError("energy.price_file", what, file=file, line=line)
