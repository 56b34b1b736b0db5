"""Price files: CSV with the header ``start,end,value``; times in UTC, rows in their order, without gap or overlap."""

from __future__ import annotations

import csv
import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = ["start", "end", "value"]
ROWS_MAX = 100_000
VALUE_MAX = 1e12


def read_prices(text: str, now_s: float, file: str) -> tuple[tuple[float, float], ...]:
    """Prices as `PricesRead` has them: what is before and after the rows is not known (infinite). Raises ConfigError with the
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
        raise _mistake(file, rows.line_num, "there is no row")
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
        raise _mistake(file, line, f"the value {row[2].strip()[:40]!r} is no number")
    return start_s, until_s, value


def _utc(text: str, file: str, line: int) -> float:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise _mistake(file, line, f"{text[:40]!r} is no time; such as 2030-01-31T06:00Z") from None
    if when.utcoffset() != timedelta(0):
        raise _mistake(file, line, f"{text!r} is not in UTC; such as 2030-01-31T06:00Z")
    return when.timestamp()


def _mistake(file: str, line: int, what: str) -> ConfigError:
    return ConfigError("energy.price_file", what, file=file, line=line)
