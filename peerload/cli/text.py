"""Text for people: foreign strings made harmless, plain tables, sizes and times."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TextIO

_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86_400

_BIDI_AND_SEPARATORS = frozenset(
    (0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
)
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def printable(text: object) -> str:
    r"""Foreign text as a terminal may be given it: on one line, and unable to move, colour or reorder anything.

    Control characters (C0, C1, ESC, DEL), bidi controls, line separators and bytes that are no UTF-8 become
    ``\x1b``-style escapes. bytes are taken as UTF-8.
    """
    words = text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else str(text)
    if words.isascii() and words.isprintable():
        return words
    return "".join(map(_escaped, words))


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # noqa: PLR2004 -- a byte that was no UTF-8, as surrogateescape keeps it
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x20 or 0x7F <= code < 0xA0:  # noqa: PLR2004 -- C0, DEL and C1
        return f"\\x{code:02x}"
    if code in _BIDI_AND_SEPARATORS or 0xD800 <= code <= 0xDFFF:  # noqa: PLR2004 -- surrogates
        return f"\\u{code:04x}"
    if 0xE0000 <= code <= 0xE007F:  # noqa: PLR2004 -- tag characters: invisible text
        return f"\\U{code:08x}"
    return character


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """``text`` in a colour of `_COLOURS` if the stream is a terminal and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> list[str]:
    """Lines of aligned columns, each cell made `printable`; those named in ``right`` are aligned to the right."""
    cells = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if heading in right else cell.ljust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def shortened(text: str, width_max: int = 48) -> str:
    """At most ``width_max`` characters; an ellipsis shows that some are missing."""
    return text if len(text) <= width_max else text[: width_max - 1] + "…"


def size_text(size_bytes: object) -> str:
    """``1.5 GiB``; a dash for what is not known."""
    if not isinstance(size_bytes, (int, float)) or isinstance(size_bytes, bool):
        return "-"
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:  # noqa: PLR2004 -- the step from one unit to the next
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"  # noqa: PLR2004 -- three digits
        amount /= 1024
    return f"{amount:.4g} TiB"


def duration_text(duration_s: object) -> str:
    """``0.4s``, ``12s``, ``3m05s``, ``2h10m``, ``4d03h``; a dash for what is not known."""
    if not isinstance(duration_s, (int, float)) or isinstance(duration_s, bool):
        return "-"
    seconds = max(0.0, float(duration_s))
    if seconds < 10:  # noqa: PLR2004 -- below that, tenths tell something
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m{whole % _MINUTE_S:02d}s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h{whole % _HOUR_S // _MINUTE_S:02d}m"
    return f"{whole // _DAY_S}d{whole % _DAY_S // _HOUR_S:02d}h"


def number_text(number: object, digits: int = 2) -> str:
    """A number without needless zeros; a dash for what is not known."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return "-"
    rounded = round(float(number), digits)
    return f"{rounded:.0f}" if rounded == int(rounded) else f"{rounded:.{digits}f}"


def counted(number: int, what: str) -> str:
    """``1 node``, ``2 nodes``: for words that take an s."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def say(message: str, hint: str = "") -> None:
    """Talk, on stderr: one line that begins with `peerload:`, and a hint below it."""
    lines = f"peerload: {printable(message)}\n" + (f"  {printable(hint)}\n" if hint else "")
    sys.stderr.write(lines)
    sys.stderr.flush()


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of stdout, versioned."""
    sys.stdout.write(json_line(value))
    sys.stdout.flush()


def json_line(value: dict[str, Any]) -> str:
    """One object on one line, versioned."""
    import json

    return json.dumps({"v": 1, **value}, separators=(", ", ": "), default=_json_bytes) + "\n"


def _json_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    raise TypeError(f"{type(value).__name__} has no JSON form")
