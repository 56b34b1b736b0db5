"""Human-readable text: tables, sizes, times, and messages on stderr."""

from __future__ import annotations

import os
import sys

from peerload.model.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, TextIO

_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86_400
INSTANT_S_MAX = 253_402_300_799
"""The end of the year 9999 as a Unix time. Larger numbers, from a broken or malicious node, are not shown as times."""
NUMBER_MAX = 1e300
"""Larger numbers, infinity and NaN are not shown."""
CELL_WIDTH_MIN = 8

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def width_of(text: str) -> int:
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    return len(text) + wide - sum(unicodedata.category(one) in ("Mn", "Me") for one in text)


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """``text`` in a colour of `_COLOURS` if the stream is a terminal and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def terminal_columns(stream: TextIO | None = None) -> int:
    """The width of the terminal on this stream (default: stdout); 0 if it is not a terminal."""
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns
    except (OSError, ValueError):
        return 0


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    *,
    columns: int = 0,
    gives_way: Sequence[str | tuple[str, int]] = (),
    left_out: Sequence[str] = (),
    paint: Mapping[str, Mapping[str, str]] | None = None,
) -> list[str]:
    """Lines of aligned columns, each cell made `printable`; the columns in ``right`` are aligned to the right.

    columns: the width of the terminal (0: unlimited). If the table is wider, the columns in ``gives_way`` are shortened in
    order, to the given minimum width if there is one; then the columns in ``left_out`` are dropped in order; at
    last the widest ones are shortened, so that no row wraps. paint: for a heading, the colour of a cell by its first word.
    """
    cells = [tuple(headings), *(tuple(map(printable, row)) for row in rows)]
    plain = [all(map(str.isascii, row)) for row in cells]
    widths = [
        max(map(len if all(plain) else width_of, (row[column] for row in cells))) for column in range(len(headings))
    ]
    if columns and _excess(widths, columns) > 0:
        kept, widths = _fitted(widths, headings, columns, gives_way, left_out)
        headings = [headings[at] for at in kept]
        cells = [tuple(row[at] for at in kept) for row in cells]
        plain = [all(map(str.isascii, row)) for row in cells]
    aligned = "  ".join(
        f"{{:{'>' if name in right else '<'}{width}}}" for name, width in zip(headings, widths, strict=True)
    )
    painted = paint if paint and coloured("", "bold", sys.stdout) else {}
    lines = []
    for number, row in enumerate(cells):
        is_simple = plain[number] and not painted and all(map(_fits, row, widths))
        lines.append((aligned.format(*row) if is_simple else _aligned(row, widths, headings, right, painted)).rstrip())
    return lines


def _fits(cell: str, width: int) -> bool:
    return len(cell) <= width


def _aligned(
    row: Sequence[str],
    widths: Sequence[int],
    headings: Sequence[str],
    right: Sequence[str],
    paint: Mapping[str, Mapping[str, str]],
) -> str:
    """Row of a table whose cells may be wide, long or coloured."""
    padded = []
    for cell, width, heading in zip(row, widths, headings, strict=True):
        fitting = shortened(cell, width)
        blank = " " * (width - width_of(fitting))
        colour = paint.get(heading, {}).get(cell.partition(",")[0].partition(" ")[0])
        said = coloured(fitting, colour, sys.stdout) if colour else fitting
        padded.append(blank + said if heading in right else said + blank)
    return "  ".join(padded)


def _excess(widths: Sequence[int], columns: int) -> int:
    """Cells by which columns of these widths exceed the terminal."""
    return sum(widths) + 2 * (len(widths) - 1) - columns


def _fitted(
    widths: Sequence[int],
    headings: Sequence[str],
    columns: int,
    gives_way: Sequence[str | tuple[str, int]],
    left_out: Sequence[str],
) -> tuple[list[int], list[int]]:
    """The columns of a table that are shown on a terminal, by their numbers, and their widths."""
    kept, fitted = list(range(len(headings))), list(widths)
    for name in ("", *left_out):
        kept = [at for at in kept if headings[at] != name]
        fitted = [widths[at] for at in kept]
        _narrow(fitted, [headings[at] for at in kept], columns, gives_way)
        if _excess(fitted, columns) <= 0:
            break
    while _excess(fitted, columns) > 0 and max(fitted) > 1:
        fitted[fitted.index(max(fitted))] -= 1
    return kept, fitted


def _narrow(
    widths: list[int], headings: Sequence[str], columns: int, gives_way: Sequence[str | tuple[str, int]]
) -> None:
    """Shorten the columns in ``gives_way``, but not below the width of their headings."""
    excess = _excess(widths, columns)
    for one in gives_way:
        name, width_min = (one, CELL_WIDTH_MIN) if isinstance(one, str) else one
        if excess <= 0 or name not in headings:
            continue
        at = headings.index(name)
        taken = min(excess, max(widths[at] - max(len(name), width_min), 0))
        widths[at] -= taken
        excess -= taken


def shortened(text: str, width_max: int = 48) -> str:
    """The text in at most ``width_max`` columns; an ellipsis marks the cut."""
    if len(text) <= width_max and width_of(text) <= width_max:
        return text
    kept = text[: width_max - 1]
    while width_of(kept) > width_max - 1:
        kept = kept[:-1]
    return kept + "…"


def size_text(size_bytes: object) -> str:
    """Text such as ``1.5 GiB``; a dash if not known."""
    if not isinstance(size_bytes, (int, float)) or isinstance(size_bytes, bool):
        return "-"
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:  # noqa: PLR2004 -- the step from one unit to the next
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"  # noqa: PLR2004 -- three digits
        amount /= 1024
    return f"{amount:.4g} TiB"


def duration_text(duration_s: object) -> str:
    """Text such as ``0.4s``, ``12s``, ``3m05s``, ``2h10m``, ``4d03h``; a dash if not known."""
    if not isinstance(duration_s, (int, float)) or isinstance(duration_s, bool):
        return "-"
    seconds = max(0.0, float(duration_s))
    if not seconds <= INSTANT_S_MAX:  # includes NaN
        return "-"
    if seconds < 10:  # noqa: PLR2004 -- below that, tenths matter
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m{whole % _MINUTE_S:02d}s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h{whole % _HOUR_S // _MINUTE_S:02d}m"
    return f"{whole // _DAY_S}d{whole % _DAY_S // _HOUR_S:02d}h"


def ago_text(seconds: float) -> str:
    """Text such as ``4s ago``, ``11m ago``, ``2h ago``, ``3d ago``; a dash for other values."""
    if not abs(seconds) <= INSTANT_S_MAX:
        return "-"
    for unit, size_s in (("d", _DAY_S), ("h", _HOUR_S), ("m", _MINUTE_S)):
        if seconds >= size_s:
            return f"{int(seconds // size_s)}{unit} ago"
    return f"{max(int(seconds), 0)}s ago"


def number_text(number: object, digits: int = 2) -> str:
    """A number without trailing zeros; a dash if not known."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return "-"
    if not abs(number) <= NUMBER_MAX:  # includes NaN
        return "-"
    rounded = round(float(number), digits)
    return f"{rounded:.0f}" if rounded == int(rounded) else f"{rounded:.{digits}f}"


def counted(number: int, what: str) -> str:
    """Text such as ``1 node`` or ``2 nodes``, for nouns with a plural in s."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def say(message: str, hint: str = "") -> None:
    """Write a message to stderr: one line that begins with `peerload:`, and a hint below it."""
    lines = f"peerload: {printable(message)}\n" + (f"  {printable(hint)}\n" if hint else "")
    sys.stderr.write(lines)
    sys.stderr.flush()


def print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json_line(value))
    sys.stdout.flush()


def print_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def print_result(value: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print the result of a verb on stdout: as one JSON object, or as lines of text."""
    if as_json:
        print_json(value)
    else:
        print_lines(lines)


def json_line(value: dict[str, Any]) -> str:
    """JSON of an object on one line, with the version of the format."""
    import json

    return json.dumps({"v": 1, **value}, separators=(", ", ": "), default=_json_bytes) + "\n"


def _json_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    raise TypeError(f"{type(value).__name__} has no JSON form")
