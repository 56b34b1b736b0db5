"""Styled text in terminal cells: escapes foreign text, draws bars and sparklines, and shows lines in a widget.

A line is a list of spans ``(text, style)``. Nothing here is parsed as markup, so foreign text cannot inject any.
"""

from __future__ import annotations

import functools
import unicodedata

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from peerload.model.text import printable

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Span = tuple[str, str]
Line = list[Span]

MARKS_IN_A_ROW_MAX = 2
"""Combining marks shown on one character; further ones are escaped."""
LINE_CHARS_MAX = 2000
"""Foreign text is truncated to this length first."""
WARN_SHARE, BAD_SHARE = 0.6, 0.85

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAINER = str.maketrans("…·→←↑↓≈■○◐●▾▸╭╮╰╯─│" + _BLOCKS, "~.><^v~#-=+-+++++-|" + " .:-=+*#@")
"""ASCII characters in place of the drawn ones, for terminals without Unicode."""


# -- foreign text ------------------------------------------------------------------------------------------------------


def plain(value: object) -> str:
    r"""Foreign text in a form that is safe in a cell: `printable`, and besides escapes such as ``\u200b`` for characters of
    zero or uncertain width (zero-width characters, joiners, variation selectors, stacked marks)."""
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
    text = text[:LINE_CHARS_MAX]
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = MARKS_IN_A_ROW_MAX
    for character in unicodedata.normalize("NFC", text):
        escaped = printable(character)
        is_mark = unicodedata.category(character) in ("Mn", "Me")
        marks = marks + 1 if is_mark else 0
        if escaped != character:
            shown.append(escaped)
        elif not character.isprintable() or marks > MARKS_IN_A_ROW_MAX or 0xFE00 <= ord(character) <= 0xFE0F:  # noqa: PLR2004 -- variation selectors
            shown.append(f"\\u{ord(character):04x}")
        else:
            shown.append(character)
    return "".join(shown)


# -- cells -------------------------------------------------------------------------------------------------------------


def cut(text: str, width: int, *, ellipsis: str = "…") -> str:
    """Truncate to ``width`` cells; an ellipsis marks the cut."""
    if cell_len(text) <= width:
        return text
    room = width - len(ellipsis)
    return (chop_cells(text, room)[0] if room > 0 else "") + ellipsis if width > 0 else ""


def padded(text: str, width: int, *, right: bool = False, ellipsis: str = "…") -> str:
    """Truncate or pad to exactly ``width`` cells."""
    text = cut(text, width, ellipsis=ellipsis)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def width_of(line: Iterable[Span]) -> int:
    return sum(cell_len(text) for text, _ in line)


def fitted(line: Iterable[Span], width: int) -> Line:
    """Truncate or pad a line to exactly ``width`` cells."""
    done: Line = []
    room = width
    for text, style in line:
        size = cell_len(text)
        if size > room:
            done.append((padded(text, room), style))
            return done
        if size:
            done.append((text, style))
            room -= size
    if room:
        done.append((" " * room, ""))
    return done


def restyled(line: Iterable[Span], style: str) -> Line:
    return [(text, f"{own} {style}" if own else style) for text, own in line]


def in_ascii(line: Iterable[Span]) -> Line:
    """Replace drawn characters by ASCII, cell by cell."""
    return [(text if text.isascii() else text.translate(_PLAINER), style) for text, style in line]


def as_text(line: Iterable[Span]) -> str:
    return "".join(text for text, _ in line)


# -- drawing -----------------------------------------------------------------------------------------------------------


def level(share: float | None) -> str:
    if share is None:
        return "dim"
    return "good" if share < WARN_SHARE else "warn" if share < BAD_SHARE else "bad"


def bar(share: float | None, width: int) -> Line:
    """Draw a share of 0 … 1 in exactly ``width`` cells; more than 1 ends in ``+``, an unknown share is blank."""
    if width <= 0:
        return []
    if share is None:
        return [(" " * width, "")]
    filled = max(0, min(width, round(share * width)))
    if share > 0 and not filled:
        filled = 1
    steps = (round(width * WARN_SHARE), round(width * BAD_SHARE), width)
    line: Line = []
    begin = 0
    for end, style in zip(steps, ("good", "warn", "bad"), strict=True):
        upto = min(end, filled)
        if upto > begin:
            line.append(("■" * (upto - begin), style))
            begin = upto
    if share > 1 + 0.5 / width:
        text, style = line[-1]
        line[-1] = text[:-1] + "+", style
    if width > filled:
        line.append(("·" * (width - filled), "faint"))
    return line


def sparkline(values: Sequence[float | None], width: int, *, high: float = 1.0) -> str:
    """The newest ``width`` values, the last at the right, each as a character of proportional height (``high`` is full
    height); an unknown value is blank."""
    top = len(_BLOCKS) - 1
    shown = list(values)[-width:] if width > 0 else []
    drawn = [
        " " if value is None or high <= 0 else _BLOCKS[max(min(top, round(value / high * top)), 1)] for value in shown
    ]
    return " " * (width - len(drawn)) + "".join(drawn)


def framed(title: Line, lines: Sequence[Line], width: int, height: int, *, focus: bool) -> list[Line]:
    """Draw a frame with a title around the lines, exactly ``width`` by ``height``; blank lines if that is too small for
    a frame."""
    if height < 2 or width < 6:  # noqa: PLR2004 -- a frame around nothing
        return [fitted([], max(width, 0)) for _ in range(max(height, 0))]
    edge = "focus" if focus else "frame"
    head: Line = [("╭─", edge), (" ", "")]
    room = width - 5
    used = width_of(title)
    if used > room:
        title, used = fitted(title, room), room
    head += [*title, (" ", ""), ("─" * (room - used) + "╮", edge)]
    drawn = [head]
    for number in range(height - 2):
        content = lines[number] if number < len(lines) else []
        drawn.append([("│", edge), *fitted(content, width - 2), ("│", edge)])
    drawn.append([("╰" + "─" * (width - 2) + "╯", edge)])
    return drawn


# The sixteen colours of the terminal's own theme, which fit any background.
STYLES = {
    "": Style(),
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "faint": Style(color="bright_black"),
    "frame": Style(color="bright_black"),
    "focus": Style(color="cyan"),
    "title": Style(bold=True),
    "brand": Style(bold=True, reverse=True),
    "head": Style(bold=True, dim=True),
    "key": Style(color="cyan", bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red"),
    "accent": Style(color="cyan"),
    "here": Style(color="blue", bold=True),
    "chosen": Style(reverse=True),
    "marked": Style(underline=True),
    "stale": Style(dim=True, italic=True),
}


@functools.cache
def style_of(names: str) -> Style:
    """The style of names such as ``bad bold``."""
    return sum((STYLES[name] for name in names.split()), Style())


def strip(line: Line) -> Strip:
    return Strip([Segment(text, style_of(style)) for text, style in line])


class LineList(Widget):
    """Widget for lines that the painter has laid out; it redraws only those that changed."""

    DEFAULT_CSS = "LineList { width: 1fr; height: 1fr; }"
    ALLOW_SELECT = False

    def __init__(self, name: str) -> None:
        super().__init__(id=name, classes="pane")
        self._lines: list[Line] = []

    def show(self, lines: Sequence[Line]) -> None:
        before, self._lines = self._lines, list(lines)
        width = self.size.width
        if not width or len(before) != len(lines):
            self.refresh()
            return
        changed = [Region(0, y, width, 1) for y, (old, new) in enumerate(zip(before, lines, strict=True)) if old != new]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        return strip(self._lines[y]).adjust_cell_length(width) if y < len(self._lines) else Strip.blank(width)
