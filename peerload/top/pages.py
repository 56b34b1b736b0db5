"""Pages over the whole screen: help, why, and the output of a task."""

from __future__ import annotations

from textual.binding import Binding
from textual.geometry import Size
from textual.markup import escape
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.widgets import Footer

from peerload.top import lines as draw
from peerload.top.actions import KEYS
from peerload.top.detail import Tail, output_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import ClassVar

    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.strip import Strip

    from peerload.top.lines import Line
    from peerload.top.panes import Painter

LOG_TAIL_BYTES = 128 << 10
LOG_LINES_KEPT = 5000


class PageLines(ScrollView, can_focus=True):
    """Lines that may be longer and more than fit, scrolled with the keys of the tables and Textual's own."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "scroll", key_display="j k g G"),
        Binding("k", "scroll_up", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G", "scroll_end", show=False),
        Binding("space,ctrl+f", "page_down", show=False),
        Binding("ctrl+b", "page_up", show=False),
        Binding("greater_than_sign", "page_right", "sideways", key_display="< >"),
        Binding("less_than_sign", "page_left", show=False),
    ]
    content: Sequence[Line] = ()

    def show(self, content: Sequence[Line], *, follows: bool) -> None:
        """Show these lines. ``follows``: where the end is in sight, the new end comes into sight."""
        follows = follows and self.is_vertical_scroll_end
        self.content = content
        self.virtual_size = Size(max(map(draw.width_of, content), default=0), len(content))
        self.refresh()
        if follows:
            self.scroll_end(animate=False)

    def render_line(self, y: int) -> Strip:
        """One line as Textual takes it."""
        left, top = self.scroll_offset
        line = self.content[top + y] if top + y < len(self.content) else []
        return draw.strip(line).crop_extend(left, left + self.size.width, None)


class Page(Screen[None]):
    """Lines in a frame. ``command``: does the same on the command line; ``closing``: another key that closes the page."""

    CSS = """
    Page { background: ansi_default; }
    PageLines { border: round ansi_cyan; background: ansi_default; scrollbar-size: 1 1; }
    PageLines.ascii { border: ascii ansi_cyan; }
    Footer, FooterKey { background: ansi_default; }
    """
    AUTO_FOCUS = "PageLines"
    FOLLOWS = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape,question_mark", "dismiss", "back", key_display="q"),
        Binding("ctrl+c", "app.exit", show=False),
    ]

    def __init__(
        self, title: str, content: Sequence[Line], painter: Painter, *, command: str = "", closing: str = ""
    ) -> None:
        super().__init__()
        self._painter = painter
        self.lines = PageLines(classes="ascii" if painter.ascii_only else "")
        self._command = escape(draw.plain(command))
        self.lines.border_title = escape(draw.plain(title))
        self.lines.border_subtitle = self._command
        if closing:
            self._bindings.bind(closing, "dismiss", show=False)
        self._content = content

    def compose(self) -> ComposeResult:
        """The lines, and the keys."""
        yield self.lines
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Show what is there."""
        self.put(self._content)

    def put(self, content: Sequence[Line]) -> None:
        """Show other lines."""
        self.lines.show([self._painter.plainer(line) for line in content], follows=self.FOLLOWS)


class LogPage(Page):
    """The end of one task's output, followed until somebody scrolls up."""

    FOLLOWS = True

    def __init__(self, task: str, painter: Painter) -> None:
        waits: list[Line] = [[(" asking the agent ...", "dim")]]
        super().__init__(f"{task} output", waits, painter, command=f"peerload logs {task}", closing="l")
        self.tail = Tail(LOG_LINES_KEPT, LOG_TAIL_BYTES)
        self.tail.clear(task)

    def refill(self) -> None:
        """Show what the tail has now."""
        tail = self.tail
        if tail.lines:
            lines = [output_line(stream, text, draw.LINE_CHARS_MAX) for stream, text in tail.lines]
        else:
            lines = [[(f" {draw.plain(tail.why_none or 'it has written nothing yet')}", "dim")]]
        if max(tail.sizes) > LOG_TAIL_BYTES:
            self.lines.border_subtitle = f"only its end; all of it:  {self._command}"
        self.put(lines)


def help_lines(*, readonly: bool) -> list[Line]:
    """The keys, and what the marks mean."""
    lines: list[Line] = [[]]
    for key in KEYS:
        says = key.says + (" (not with --readonly)" if readonly and key.changes else "")
        lines.append([(draw.padded(f"  {key.shown}", 18), "key"), (says, "dim" if readonly and key.changes else "")])
    lines += [
        [],
        [("  A filter is words that a row must have: ", ""), ("state:running node:gpu !done", "accent")],
        [("  → ws2 runs a task of ours, ← ws2 has a task here; ≈ and dim: old; ? suspect; ! dead or failed", "")],
        [("  Each thing done here is a command, which is shown: what was asked is what you could have typed.", "")],
    ]
    return lines
