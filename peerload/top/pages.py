"""Pages over the whole screen: help, why, and the output of a task."""

from __future__ import annotations

from textual.screen import Screen

from peerload.top import lines as draw
from peerload.top.actions import KEYS
from peerload.top.detail import Tail, output_line
from peerload.top.lines import LineList

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.events import Key, MouseScrollDown, MouseScrollUp, Resize

    from peerload.top.lines import Line

CLOSING = ("q", "escape", "question_mark")
SIDEWAYS = 8
LOG_TAIL_BYTES = 128 << 10
LOG_LINES_KEPT = 5000


class Page(Screen[None]):
    """Lines that are longer than the screen, in a frame; scrolled with the keys of the tables."""

    AUTO_FOCUS = None
    CSS = "Page { background: ansi_default; }"

    def __init__(
        self, title: Line, content: Sequence[Line], *, ascii_only: bool, says: str = "", ends_at: str = "q"
    ) -> None:
        super().__init__()
        self.caption = title
        self.content = list(content)
        self.says = says
        self.follows = False
        self.ends_at = ends_at
        self._ascii_only = ascii_only
        self._top = self._left = 0

    def compose(self) -> ComposeResult:
        """One widget has it all."""
        yield LineList(id="page")

    def on_resize(self, event: Resize) -> None:
        """Another size."""
        self.draw(event.size.width, event.size.height)

    def put(self, content: Sequence[Line], says: str = "") -> None:
        """Other lines; at the end it stays at the end."""
        self.content = list(content)
        self.says = says
        self.draw()

    def draw(self, width: int = 0, height: int = 0) -> None:
        """What can be seen of it."""
        width, height = width or self.size.width, height or self.size.height
        if not width or not self.is_mounted:
            return
        room = max(height - 3, 1)
        last = max(len(self.content) - room, 0)
        self._top = last if self.follows else max(0, min(self._top, last))
        shown = [_shifted(line, self._left) for line in self.content[self._top : self._top + room]]
        seen = f"lines {min(self._top + 1, len(self.content))}-{min(self._top + room, len(self.content))} of {len(self.content)}"
        title = [*self.caption, (f"  {seen}", "dim")] if last else self.caption
        framed = draw.framed(title, shown, width, height - 1, focus=True, ascii_only=self._ascii_only)
        foot: Line = [(" q", "key"), (" back  ", ""), ("j k g G", "key"), (" scroll  ", "")]
        foot += [("< >", "key"), (" sideways   ", ""), (self.says, "accent")]
        drawn = [*framed, draw.fitted(foot, width)]
        self.query_one("#page", LineList).show([draw.in_ascii(line) for line in drawn] if self._ascii_only else drawn)

    def on_key(self, event: Key) -> None:
        """Scroll, or go back."""
        event.stop()
        event.prevent_default()
        page = max(self.size.height - 4, 1)
        moves = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": page, "space": page, "ctrl+f": page, "pageup": -page,
                 "ctrl+b": -page}  # fmt: skip
        key = event.key
        if key in CLOSING or key == self.ends_at:
            self.dismiss()
            return
        if key == "ctrl+c":
            self.app.exit(0)
        elif key in moves:
            self._scroll_by(moves[key])
        elif key in ("g", "home"):
            self.follows, self._top = False, 0
        elif key in ("G", "end"):
            self.follows = True
        elif key in ("right", "greater_than_sign"):
            self._left += SIDEWAYS
        elif key in ("left", "less_than_sign"):
            self._left = max(self._left - SIDEWAYS, 0)
        self.draw()

    def _scroll_by(self, lines: int) -> None:
        last = max(len(self.content) - max(self.size.height - 3, 1), 0)
        self._top = max(0, min(self._top + lines, last))
        self.follows = self.follows and lines > 0

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """As three lines down."""
        event.stop()
        self._scroll_by(3)
        self.draw()

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """As three lines up."""
        event.stop()
        self._scroll_by(-3)
        self.draw()


class LogPage(Page):
    """The output of one task: the end of it, followed until somebody scrolls up."""

    def __init__(self, task: str, command: str, *, ascii_only: bool) -> None:
        super().__init__([(draw.plain(task), "bold"), (" output", "title")], [], ascii_only=ascii_only, ends_at="l")
        self.tail = Tail(LOG_LINES_KEPT, LOG_TAIL_BYTES)
        self.tail.clear(task)
        self.follows = True
        self._command = command
        self.put([[(" asking the agent ...", "dim")]], command)

    def refill(self) -> None:
        """What the tail has now."""
        tail = self.tail
        if tail.lines:
            lines = [output_line(stream, text, draw.LINE_CHARS_MAX) for stream, text in tail.lines]
        else:
            lines = [[(f" {draw.plain(tail.why_none or 'it has written nothing yet')}", "dim")]]
        left_out = max(tail.sizes) > LOG_TAIL_BYTES
        self.put(lines, ("only its end; all of it: " if left_out else "") + self._command)


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


def _shifted(line: Line, cells: int) -> Line:
    """The line without its first characters."""
    kept: Line = []
    for text, style in line:
        if cells >= len(text):
            cells -= len(text)
            continue
        kept.append((text[cells:], style))
        cells = 0
    return kept
