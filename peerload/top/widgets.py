"""Lines on the screen: the only place that knows how the styles of `lines` look."""

from __future__ import annotations

import functools

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.top.lines import Line

# The sixteen colours of the terminal itself: they fit whatever background its user likes.
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
    """The look of a style such as ``bad bold``."""
    return sum((STYLES[name] for name in names.split()), Style())


class LineList(Widget):
    """Shows lines that somebody else laid out, and draws again only those that differ."""

    DEFAULT_CSS = "LineList { width: 1fr; height: 1fr; }"
    ALLOW_SELECT = False

    def __init__(self, *, name: str | None = None, id: str | None = None) -> None:  # noqa: A002 -- Textual's own name
        super().__init__(name=name, id=id)
        self._lines: list[Line] = []

    def show(self, lines: Sequence[Line]) -> None:
        """These lines from now on."""
        before, self._lines = self._lines, list(lines)
        width = self.size.width
        if not width or len(before) != len(lines):
            self.refresh()
            return
        changed = [Region(0, y, width, 1) for y, (old, new) in enumerate(zip(before, lines, strict=True)) if old != new]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """One line as Textual takes it."""
        width = self.size.width
        if y >= len(self._lines):
            return Strip.blank(width)
        segments = [Segment(text, style_of(style)) for text, style in self._lines[y]]
        return Strip(segments).adjust_cell_length(width)
