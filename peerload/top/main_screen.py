"""The screen of `peerload top` with the panes: what keys and the mouse do to the look, and what is drawn where."""

from __future__ import annotations

import time

from textual.screen import Screen
from textual.widgets import Input

from peerload.top import actions
from peerload.top import lines as draw
from peerload.top.actions import BY_NAME, KEYS
from peerload.top.layout import layout
from peerload.top.lines import LineList
from peerload.top.pages import LogPage, Page, help_lines
from peerload.top.tables import order_hint, signal_hint
from peerload.top.view_state import FILTER_CHARS_MAX, PANES, TABLES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from textual.app import ComposeResult
    from textual.events import Click, Key, MouseScrollDown, MouseScrollUp

    from peerload.top.layout import Place
    from peerload.top.lines import Line
    from peerload.top.model import TopModel
    from peerload.top.panes import Painter
    from peerload.top.view_state import ViewState

    class Owner(Protocol):
        """Interface of the app that the screen uses."""

        look: ViewState
        world: TopModel
        painter: Painter
        log_page: LogPage | None
        readonly: bool
        at: str
        clock: Callable[[], float]

        def asked_node(self) -> str:
            """Name of the node that the view asks."""

        def want_output(self) -> None:
            """Follow the output of the selected task, if it is shown."""

        def close_log(self) -> None:
            """Close the page with a log."""

        def ask_why(self, task: str) -> None:
            """Ask why a task waits."""

        def carry_out(self, action: actions.Action) -> None:
            """Carry out an action."""

        def pause(self) -> None:
            """Pause or resume the view."""

        def attach(self, node: str) -> None:
            """Show the view of another node."""


MESSAGE_KEPT_S = 8.0
"""How long what came of an action stands in the last line."""
HINTED_ALWAYS = ("help", "quit")
"""The keys that the last line has room for before others."""
BORDER = 2


class Main(Screen[None]):
    """The panes."""

    CSS = """
    Main { background: ansi_default; layers: panes; }
    Main LineList { position: absolute; }
    Main Input { position: absolute; height: 1; border: none; padding: 0; background: ansi_default; color: ansi_default; }
    """
    AUTO_FOCUS = None  # keys are for the panes, until the filter is asked for

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self.owner = owner
        self.look = owner.look
        self.places: dict[str, Place] = {}
        self.menu = ""
        """What the next letter is for: sort or signal, "" for nothing."""
        self.asked: actions.Action | None = None
        self.message: tuple[str, str, float] = ("", "", 0.0)

    def compose(self) -> ComposeResult:
        """A widget for each pane, the first and the last line, and the filter's words."""
        for name in ("header", *PANES.values(), "footer"):
            yield LineList(id=name)
        filter_input = Input(id="filter", compact=True, max_length=FILTER_CHARS_MAX, select_on_focus=False)
        filter_input.display, filter_input.disabled = False, True
        yield filter_input

    # -- drawing -------------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        """Another size."""
        self.place_panes()

    def place_panes(self) -> None:
        """Every pane at its place, then drawn."""
        width, height = self.app.size
        look = self.look
        zoomed = look.focus if look.zoomed else ""
        self.places = layout(
            width, max(height - 2, 0), look.hidden, look.wanted_first, zoomed, nodes=len(self.owner.world.nodes)
        )
        look.refocus(list(self.places))
        for name in PANES.values():
            place = self.places.get(name)
            pane = self.query_one(f"#{name}", LineList)
            pane.display = place is not None
            if place is not None:
                self._put(pane, place.x, place.y + 1, place.width, place.height)
        self._put(self.query_one("#header"), 0, 0, width, 1)
        self._put(self.query_one("#footer"), 0, height - 1, width, 1)
        self._put(self.query_one("#filter"), 9, height - 1, max(width - 9, 1), 1)
        self.paint()

    @staticmethod
    def _put(widget: object, x: int, y: int, width: int, height: int) -> None:
        styles = widget.styles  # type: ignore[attr-defined]
        styles.offset = (x, y)
        styles.width, styles.height = width, height

    def paint(self) -> None:
        """Draw what is known now."""
        if not self.is_mounted:
            return
        owner = self.owner
        now = self.look.paused_at or owner.clock()
        width, _ = self.app.size
        ends = [owner.painter.header(width, now, clock_text), draw.fitted(self._footer(owner.clock()), width)]
        if owner.painter.ascii_only:
            ends = [draw.in_ascii(line) for line in ends]
        self.query_one("#header", LineList).show(ends[:1])
        self.query_one("#footer", LineList).show(ends[1:])
        for name, place in self.places.items():
            lines = owner.painter.pane(name, place.width, place.height, now, clock_text)
            self.query_one(f"#{name}", LineList).show(lines)

    def _footer(self, now: float) -> Line:
        """A question, the letters to sort by, what came of an action, else the keys."""
        if self.query_one("#filter").display:
            return [(" filter: ", "key")]
        if self.asked is not None:
            return [(f" {draw.plain(self.asked.asks)} ", "warn bold"), (" y", "key"), (" yes  ", ""), ("n", "key"),
                    (" no    ", ""), (draw.plain(self.asked.command()), "accent")]  # fmt: skip
        if self.menu == "sort":
            return order_hint(self.look.focus)
        if self.menu == "signal":
            return signal_hint()
        text, style, said_at = self.message
        if text and now - said_at < MESSAGE_KEPT_S:
            return [(" ", ""), (draw.plain(text), style)]
        line: Line = [(" ", "")]
        hints = [*self._hints(), ("1-5", "panes"), ("Tab", "next")]
        room = self.app.size.width + 1  # the last needs no gap after it
        room -= sum(len(shown) + len(hint) + 3 for shown, hint in hints if hint in HINTED_ALWAYS)
        for shown, hint in hints:
            room -= 0 if hint in HINTED_ALWAYS else len(shown) + len(hint) + 3
            if room >= 0 or hint in HINTED_ALWAYS:
                line += [(shown, "key"), (f" {hint}", ""), ("  ", "")]
        return line[:-1]

    def _hints(self) -> list[tuple[str, str]]:
        """The keys that are shown, and the word for each; those that change something only if they may."""
        keys = [key for key in KEYS if key.hint and not (key.changes and self.owner.readonly)]
        return [(key.shown.split()[0].rstrip(","), key.hint) for key in keys]

    def say(self, text: str, style: str = "") -> None:
        """In the last line, for a while."""
        self.message = (text, style, self.owner.clock())
        self.paint()

    # -- keys ----------------------------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        """What a key does is in `keys`."""
        if self.query_one("#filter").display:
            if event.key in ("escape", "ctrl+c"):
                event.stop()
                self._end_filter(keeps=False)
            return
        event.stop()
        event.prevent_default()
        name = event.key if len(event.key) > 1 or not event.character else event.character
        if self.asked is not None:
            self._answer(event.key)
        elif self.menu:
            self._pick(name, event.key)
        elif name in BY_NAME or event.key in BY_NAME:
            key = BY_NAME.get(name) or BY_NAME[event.key]
            if key.does == "toggle":
                self._toggle(name)
            else:
                getattr(self, f"do_{key.does}")()

    def _answer(self, key: str) -> None:
        asked, self.asked = self.asked, None
        if key == "y" and asked is not None:
            self._carry_out(asked)
        else:
            self.say("nothing was done")
        self.paint()

    def _pick(self, letter: str, key: str) -> None:
        """A letter of a menu."""
        menu, self.menu = self.menu, ""
        if menu == "sort" and not self.look.sort(self.look.focus, letter) and key != "escape":
            self.say(f"{letter} sorts by nothing: press o for the letters", "warn")
        elif menu == "signal" and letter in actions.SIGNALS:
            self._propose(actions.send(self.look.acted_on(), actions.SIGNALS[letter]))
        elif menu == "signal" and key != "escape":
            self.say(f"{letter} is no signal: press s for the letters", "warn")
        self.paint()

    def _toggle(self, number: str) -> None:
        pane = PANES[number]
        if pane in self.places and len(self.places) == 1:
            self.say(f"{pane} is the only pane that is left: press the number of another", "warn")
            return
        self.look.zoomed = False
        self.look.toggle(pane, is_visible=pane in self.places)
        self.place_panes()

    def do_quit(self) -> None:
        """Leave."""
        self.app.exit(0)

    def do_focus_next(self, by: int = 1) -> None:
        """The next pane."""
        if self.look.zoomed:
            self.look.refocus(["nodes", "tasks", "events"], by)
            self.place_panes()
        else:
            self.look.refocus(list(self.places), by)
        self._chosen()

    def do_focus_previous(self) -> None:
        """The pane before."""
        self.do_focus_next(-1)

    def do_zoom(self) -> None:
        """One pane alone, or all."""
        self.look.zoomed = not self.look.zoomed
        self.place_panes()

    def do_open(self) -> None:
        """The members of an array; of what has none the pane alone."""
        if self.look.open():
            self._chosen()
        else:
            self.do_zoom()

    def do_escape(self) -> None:
        """Out of whatever it is."""
        pane = self.look.focus
        if pane in TABLES and self.look.filters[pane]:
            self.look.filter(pane, "")
        elif self.look.zoomed:
            self.look.zoomed = False
        elif pane == "tasks":
            self.look.marked.clear()
        self.look.events_up = 0
        self.message = ("", "", 0.0)
        self.place_panes()

    def _page(self) -> int:
        place = self.places.get(self.look.focus)
        return max(place.height - BORDER - 1, 1) if place else 1

    def _move(self, by: int) -> None:
        self.look.move(by)
        self._chosen()

    def do_down(self) -> None:
        """The next row."""
        self._move(1)

    def do_up(self) -> None:
        """The row before."""
        self._move(-1)

    def do_page_down(self) -> None:
        """A page on."""
        self._move(self._page())

    def do_page_up(self) -> None:
        """A page back."""
        self._move(-self._page())

    def do_first(self) -> None:
        """The first row."""
        self._move(-1_000_000)

    def do_last(self) -> None:
        """The last row."""
        self._move(1_000_000)

    def _chosen(self) -> None:
        """Another row may be chosen: its output is wanted now."""
        self.owner.want_output()
        self.paint()

    def do_filter(self) -> None:
        """Type words that rows must have."""
        if self.look.focus not in TABLES:
            self.say("nodes and tasks can be filtered: Tab goes there", "warn")
            return
        field = self.query_one("#filter", Input)
        field.value = self.look.filters[self.look.focus]
        field.cursor_position = len(field.value)
        field.display, field.disabled = True, False
        field.focus()
        self.paint()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Each letter counts at once."""
        if self.query_one("#filter").display:
            self.look.filter(self.look.focus, event.value)
            self.paint()

    def on_input_submitted(self) -> None:
        """The words are kept."""
        self._end_filter(keeps=True)

    def _end_filter(self, *, keeps: bool) -> None:
        field = self.query_one("#filter", Input)
        self.set_focus(None)
        field.display, field.disabled = False, True
        if not keeps:
            self.look.filter(self.look.focus, "")
        self._chosen()

    def do_sort(self) -> None:
        """A letter comes next."""
        if self.look.focus not in TABLES:
            self.say("nodes and tasks can be sorted: Tab goes there", "warn")
            return
        self.menu = "sort"
        self.paint()

    # -- looking closer ------------------------------------------------------------------------------------------------

    def do_help(self) -> None:
        """The keys."""
        title: Line = [("?", "key"), (" help", "title")]
        self.app.push_screen(
            Page(title, help_lines(readonly=self.owner.readonly), ascii_only=self.owner.painter.ascii_only)
        )

    def do_why(self) -> None:
        """Why the task waits, or went where it went."""
        task = self.look.task()
        if task is None:
            self.say("no task is chosen", "warn")
            return
        self.say(f"peerload why {task.get('id')} ...", "accent")
        self.owner.ask_why(str(task.get("id")))

    def do_logs(self) -> None:
        """Its output."""
        task = self.look.task()
        if task is None:
            self.say("no task is chosen", "warn")
            return
        if task.get("array") or task.get("members"):
            self.say("an array: choose one of its members, Enter shows them", "warn")
            return
        name = str(task.get("id"))
        page = LogPage(name, f"peerload logs {draw.plain(name)}", ascii_only=self.owner.painter.ascii_only)
        self.owner.log_page = page
        self.app.push_screen(page, lambda _: self.owner.close_log())
        self.owner.want_output()

    def do_attach(self) -> None:
        """See the cluster from the chosen node."""
        node = self.look.node()
        if node is None or self.look.focus != "nodes":
            self.say("choose a node first: Tab goes to the nodes", "warn")
            return
        if self.look.paused_at:
            self.do_pause()
        self.owner.attach("" if node.facts.get("self") and not self.owner.at else node.name)
        self.say(f"peerload top --at {node.name}", "accent")

    # -- changing things -----------------------------------------------------------------------------------------------

    def do_cancel(self) -> None:
        """Stop the task."""
        self._propose(actions.cancel(self.look.acted_on()))

    def do_hold(self) -> None:
        """Keep it back."""
        self._propose(actions.hold(self.look.acted_on()))

    def do_release(self) -> None:
        """Let it go on, or run it again."""
        self._propose(actions.release(self.look.acted_on()))

    def do_signal(self) -> None:
        """A letter comes next."""
        self.menu = "signal"
        self.paint()

    def do_mark(self) -> None:
        """Act on this one, too."""
        if self.look.focus != "tasks":
            self.say("tasks can be marked: Tab goes there", "warn")
            return
        self.look.mark()
        self._chosen()

    def do_mine(self) -> None:
        """My tasks, or all."""
        self.look.is_mine = not self.look.is_mine
        self.say("only my tasks" if self.look.is_mine else "all tasks that I may see")
        self._chosen()

    def do_pause(self) -> None:
        """Stand still, or go on."""
        self.look.pause(self.owner.clock())
        self.owner.pause()
        self._chosen()

    def do_unmark(self) -> None:
        """Act on the chosen one alone again."""
        self.look.marked.clear()
        self.paint()

    def do_drain(self) -> None:
        """No more tasks for the node, or again."""
        if self.look.focus != "nodes":
            self.say("choose a node first: Tab goes to the nodes", "warn")
            return
        self._propose(actions.drain(self.look.node(), self.owner.asked_node()))

    def _propose(self, action: actions.Action | actions.ActionRefused) -> None:
        if isinstance(action, actions.ActionRefused):
            self.say(action.why, "warn")
        elif self.owner.readonly:
            self.say(f"read only; it would be:  {action.command()}", "warn bold")
        elif action.asks:
            self.asked = action
            self.paint()
        else:
            self._carry_out(action)

    def _carry_out(self, action: actions.Action) -> None:
        self.owner.carry_out(action)
        if action.verb not in ("drain", "undrain"):
            self.look.marked.clear()

    # -- the mouse -----------------------------------------------------------------------------------------------------

    def _pane_at(self, x: int, y: int) -> tuple[str, int]:
        """The pane there, and the row of it (-1: above the first)."""
        for name, place in self.places.items():
            if place.x <= x < place.x + place.width and place.y + 1 <= y < place.y + 1 + place.height:
                return name, y - place.y - 1 - BORDER
        return "", -1

    def on_click(self, event: Click) -> None:
        """Go to a pane and choose a row."""
        name, row = self._pane_at(event.screen_x, event.screen_y)
        if name in ("nodes", "tasks", "events"):
            self.look.focus = name
            self.look.refocus(list(self.places))
            if row >= 0 and name in TABLES and self.look.tops[name] + row < len(self.look.rows(name)):
                self.look.choose(name, self.look.tops[name] + row)
            self._chosen()

    def _wheel(self, x: int, y: int, by: int) -> None:
        name, _ = self._pane_at(x, y)
        if name in ("nodes", "tasks", "events"):
            self.look.focus = name
            self._move(by)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Down."""
        self._wheel(event.screen_x, event.screen_y, 3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Up."""
        self._wheel(event.screen_x, event.screen_y, -3)


def clock_text(moment: float) -> str:
    """``14:02:11``, on this machine's clock."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
