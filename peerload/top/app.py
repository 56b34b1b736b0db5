"""`peerload top` on a terminal: applies samples to the model, handles keys and the mouse, and redraws the lines that
changed. Full-screen pages show the help, the explanation of a task, and its output."""

from __future__ import annotations

import signal
import time

from textual.app import App
from textual.binding import Binding
from textual.geometry import Size
from textual.markup import escape
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.widgets import Footer, Input

from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError
from peerload.text.tasks import own_names, why_lines
from peerload.top import actions, model
from peerload.top import lines as draw
from peerload.top.actions import BY_NAME, KEYS
from peerload.top.lines import LineList
from peerload.top.panes import Painter, Tail, layout, output_line
from peerload.top.tables import order_hint, signal_hint
from peerload.top.view_state import FILTER_CHARS_MAX, PANES, TABLES, ViewState

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, ClassVar

    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.events import Click, Key, MouseScrollDown, MouseScrollUp
    from textual.strip import Strip

    from peerload.top.lines import Line
    from peerload.top.panes import Place


# -- pages -------------------------------------------------------------------------------------------------------------

LOG_TAIL_BYTES = 128 << 10
LOG_LINES_KEPT = 5000


class PageLines(ScrollView, can_focus=True):
    """Scrollable lines, with the keys of the tables and Textual's own."""

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
        """Show these lines. ``follows``: scroll to the new end if the old end is visible."""
        follows = follows and self.is_vertical_scroll_end
        self.content = content
        self.virtual_size = Size(max(map(draw.width_of, content), default=0), len(content))
        self.refresh()
        if follows:
            self.scroll_end(animate=False)

    def render_line(self, y: int) -> Strip:
        left, top = self.scroll_offset
        line = self.content[top + y] if top + y < len(self.content) else []
        return draw.strip(line).crop_extend(left, left + self.size.width, None)


class Page(Screen[None]):
    """Framed lines. ``command``: the command line that shows the same; ``closing``: another key that closes the
    page."""

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
        yield self.lines
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.put(self._content)

    def put(self, content: Sequence[Line]) -> None:
        self.lines.show([self._painter.plainer(line) for line in content], follows=self.FOLLOWS)


class LogPage(Page):
    """The end of one task's output; it follows new output until the user scrolls up."""

    FOLLOWS = True

    def __init__(self, task: str, painter: Painter) -> None:
        waits: list[Line] = [[(" asking the agent ...", "dim")]]
        super().__init__(f"{task} output", waits, painter, command=f"peerload logs {task}", closing="l")
        self.tail = Tail(LOG_LINES_KEPT, LOG_TAIL_BYTES)
        self.tail.clear(task)

    def refill(self) -> None:
        tail = self.tail
        if tail.lines:
            lines = [output_line(stream, text, draw.LINE_CHARS_MAX) for stream, text in tail.lines]
        else:
            lines = [[(f" {draw.plain(tail.why_none or 'no output yet')}", "dim")]]
        if max(tail.sizes) > LOG_TAIL_BYTES:
            self.lines.border_subtitle = f"only the end; the whole output:  {self._command}"
        self.put(lines)


def help_lines(*, readonly: bool) -> list[Line]:
    lines: list[Line] = [[]]
    for key in KEYS:
        says = key.says + (" (not with --readonly)" if readonly and key.changes else "")
        lines.append([(draw.padded(f"  {key.shown}", 18), "key"), (says, "dim" if readonly and key.changes else "")])
    lines += [
        [],
        [("  A filter shows the rows that have all its words: ", ""), ("state:running node:gpu !done", "accent")],
        [("  → ws2 runs a task of ours, ← ws2 has a task here; ≈ and dim: old; ? suspect; ! dead or failed", "")],
        [("  The last line shows the command line that does the same as each key.", "")],
    ]
    return lines


# -- the program -------------------------------------------------------------------------------------------------------

MESSAGE_KEPT_S = 8.0
"""Time for which the last line shows the result of an action."""
HINTED_ALWAYS = ("help", "quit")
"""Keys that the last line always shows."""
BORDER = 2
FAR = 1_000_000
"""A step larger than any table."""
CHOOSE_TASK, CHOOSE_NODE = "no task is chosen", "choose a node first: press Tab to go to the nodes"


class TopApp(App[int]):
    """The application. ``source``: the source of samples; ``socket_path``: the agent that gets the requests; ``node``:
    the node whose view is shown; ``wide``: also show the columns that explain decisions of the policy."""

    TITLE = "peerload top"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None  # keys go to the panes until the filter is opened
    CSS = """
    Screen { background: ansi_default; layers: panes; }
    .pane { position: absolute; }
    Input { position: absolute; height: 1; border: none; padding: 0; background: ansi_default; color: ansi_default; }
    """

    def __init__(
        self,
        source: model.Source,
        socket_path: str | None,
        *,
        node: str = "",
        readonly: bool = False,
        ascii_only: bool = False,
        wide: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self.at = node
        self.socket_path = socket_path
        self.readonly = readonly
        self.clock = clock
        self.world = model.TopModel()
        self.look = ViewState(self.world)
        self.look.own = own_names()
        self.tail = Tail()
        self.painter = Painter(self.look, self.tail, clock_text, ascii_only=ascii_only, readonly=readonly, wide=wide)
        self.log_page: LogPage | None = None
        self.places: dict[str, Place] = {}
        self.menu = ""
        """The menu that receives the next letter: sort or signal, "" for none."""
        self.asked: actions.Action | None = None
        self.message: tuple[str, str, float] = ("", "", 0.0)
        self.panes = {name: LineList(name) for name in ("header", *PANES.values(), "footer")}
        self.filter_input = Input(compact=True, max_length=FILTER_CHARS_MAX, select_on_focus=False)
        self._nodes_known = 0
        broke = self._later(self._broke)
        self._sampler = model.Sampler(source, self._later(self._sampled), self._later(self._lost), broke)
        usage = model.UsageReader(socket_path, self._later(self._used))
        self._usage = model.Poller("usage", usage.read, bool, broke)
        output = self._later(self._output)
        self._tails = model.Poller(
            "tail", lambda wanted: model.read_tail(socket_path, wanted, output), lambda wanted: wanted[2], broke
        )

    def _later(self, method: Callable[..., None]) -> Callable[..., None]:
        """Wrap a method for other threads, so that it is called in the event loop, and not after the end of the
        program."""

        def post(*args: object) -> None:
            if self.is_running:
                self.call_later(method, *args)

        return post

    def compose(self) -> ComposeResult:
        self.filter_input.display, self.filter_input.disabled = False, True
        yield from self.panes.values()
        yield self.filter_input

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        for watcher in (self._sampler, self._tails, self._usage):
            watcher.start()

    def on_unmount(self) -> None:
        for watcher in (self._sampler, self._tails, self._usage):
            watcher.end()

    def _print_error_renderables(self) -> None:
        """Print nothing: `to_the_end` raises the error again, and it is reported as for every verb."""

    def to_the_end(self) -> int:
        """Run until the user quits or a signal arrives → the exit code; restore the terminal. Raises the error that
        ended the program."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda got, _: self.call_later(self.exit, 128 + got))
        code = self.run()
        if self._exception is not None:
            raise self._exception
        return code or 0

    # -- results of the threads ----------------------------------------------------------------------------------------

    @staticmethod
    def _broke(error: Exception) -> None:
        raise error  # a bug ends the program

    def _sampled(self, sample: model.TopSample) -> None:
        """Apply a sample, even after a pause, since the next sample has only later changes."""
        self.world.take(sample)
        self.look.rows("tasks")
        self.look.rows("nodes")
        self.want_output()
        if len(self.world.nodes) != self._nodes_known:
            self._nodes_known = len(self.world.nodes)
            self.place_panes()
        else:
            self.paint()

    def _lost(self, why: str, lost_at: float) -> None:
        self.world.lost(why, lost_at)
        self.paint()

    def _output(self, task: str, pieces: list[dict[str, Any]], why_none: str) -> None:
        """Show the end of a task's output, or the reason why there is none."""
        page = self.log_page
        for tail in (self.tail, *((page.tail,) if page else ())):
            if tail.task == task:
                if why_none:
                    tail.why_none = why_none
                else:
                    tail.take(task, pieces, self.clock())
        if page is not None:
            page.refill()
        else:
            self.paint()

    def _used(self, tasks: list[dict[str, Any]]) -> None:
        """Store the usage of tasks; the next sample draws it."""
        self.world.take_usage(tasks)
        for told in tasks:
            if told.get("id") == self.tail.task:
                self.tail.uses.take(told)

    def _done(self, text: str, style: str) -> None:
        """Show the result of an action, and take a new sample immediately."""
        self.say(text, style)
        self._sampler.sample_now()

    def _explained(self, command: str, lines: Sequence[str]) -> None:
        content: list[Line] = [
            [(" " + draw.plain(line), "" if number else "bold")] for number, line in enumerate(lines)
        ]
        self.push_screen(Page(command.removeprefix("peerload "), content, self.painter, command=command, closing="w"))
        self.message = ("", "", 0.0)

    # -- requests ------------------------------------------------------------------------------------------------------

    def want_output(self) -> None:
        """Request the output of the chosen task, if it is shown, and the usage of the visible tasks."""
        page = self.log_page
        task = self.world.task(page.tail.task) if page else self.look.task()
        is_shown = page is not None or ("detail" in self.places and self.look.subject == "tasks")
        name = str(task.get("id")) if task and is_shown else page.tail.task if page else ""
        if page is None and name != self.tail.task:
            self.tail.clear(name)
        state = task.get("state") if task is not None else ""
        if task is not None and (task.get("array") or task.get("members")):
            self.tail.why_none = "an array: Enter shows its members, each with its output"
            name = ""
        elif task is not None and not task.get("started_at") and state in ("queued", "held", "promised", "leased"):
            (page.tail if page else self.tail).why_none = "it has not started"
            name = ""
        is_paused = bool(self.look.paused_at)
        grows = bool(name) and state in ("running", "leased", "unknown") and (page is not None or not is_paused)
        self._tails.want((name, LOG_TAIL_BYTES if page else self.tail.tail_bytes, grows))
        self._usage.want({} if page is not None or is_paused else self.look.measured())

    def _in_background(self, command: str, work: Callable[[], None]) -> None:
        """Send requests to the agent in a separate thread; an error becomes the result of the command."""

        def guarded() -> None:
            try:
                work()
            except PeerloadError as error:
                self._later(self._done)(f"{command}: {model.reason(error)}", "bad")

        self.say(f"{command} ...", "accent")
        model.Watcher("request", guarded, self._later(self._broke)).start()

    def carry_out(self, action: actions.Action) -> None:
        command = action.command()
        done = self._later(self._done)
        self._in_background(command, lambda: done(f"{command}:  {action.carry_out(self.socket_path)}", "good"))
        if action.verb not in ("drain", "undrain"):
            self.look.marked.clear()

    # -- drawing -------------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        """Place the panes after this event; the app has its new size only then."""
        self.call_next(self.place_panes)

    def place_panes(self) -> None:
        width, height = self.size
        look = self.look
        zoomed = look.focus if look.zoomed else ""
        self.places = layout(
            width, max(height - 2, 0), look.hidden, look.wanted_first, zoomed, nodes=len(self.world.nodes)
        )
        look.refocus(list(self.places))
        for name in PANES.values():
            place = self.places.get(name)
            self.panes[name].display = place is not None
            if place is not None:
                _put(self.panes[name], place.x, place.y + 1, place.width, place.height)
        _put(self.panes["header"], 0, 0, width, 1)
        _put(self.panes["footer"], 0, height - 1, width, 1)
        _put(self.filter_input, 9, height - 1, max(width - 9, 1), 1)
        self.paint()

    def paint(self) -> None:
        if self.panes["header"].is_mounted:
            now = self.look.paused_at or self.clock()
            width = self.size.width
            self.panes["header"].show([self.painter.header(width, now)])
            self.panes["footer"].show([self.painter.plainer(draw.fitted(self._footer(self.clock()), width))])
            for name, place in self.places.items():
                self.panes[name].show(self.painter.pane(name, place.width, place.height, now))

    def _footer(self, now: float) -> Line:
        """The last line: a question, the letters of a menu, the result of an action, else the keys."""
        if self.filter_input.display:
            return [(" filter: ", "key")]
        if self.asked is not None:
            return [(f" {draw.plain(self.asked.asks)} ", "warn bold"), (" y", "key"), (" yes  ", ""), ("n", "key"),
                    (" no    ", ""), (draw.plain(self.asked.command()), "accent")]  # fmt: skip
        if self.menu:
            return order_hint(self.look.focus) if self.menu == "sort" else signal_hint()
        text, style, said_at = self.message
        if text and now - said_at < MESSAGE_KEPT_S:
            return [(" ", ""), (draw.plain(text), style)]
        keys = [key for key in KEYS if key.hint and not (key.changes and self.readonly)]
        hints = [(key.shown.split()[0].rstrip(","), key.hint) for key in keys] + [("1-5", "panes"), ("Tab", "next")]
        line: Line = [(" ", "")]
        room = self.size.width + 1  # the last needs no gap after it
        room -= sum(len(shown) + len(hint) + 3 for shown, hint in hints if hint in HINTED_ALWAYS)
        for shown, hint in hints:
            room -= 0 if hint in HINTED_ALWAYS else len(shown) + len(hint) + 3
            if room >= 0 or hint in HINTED_ALWAYS:
                line += [(shown, "key"), (f" {hint}", ""), ("  ", "")]
        return line[:-1]

    def say(self, text: str, style: str = "") -> None:
        self.message = (text, style, self.clock())
        self.paint()

    # -- keys ----------------------------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        """Dispatch a key by `KEYS`; pages and the filter have their own keys."""
        if isinstance(self.screen, Page):
            return
        if self.filter_input.display:
            if event.key in ("escape", "ctrl+c"):
                event.stop()
                self._end_filter(keeps=False)
            return
        event.stop()
        event.prevent_default()
        name = event.key if len(event.key) > 1 or not event.character else event.character
        key = BY_NAME.get(name) or BY_NAME.get(event.key)
        page = self.places[self.look.focus].height - BORDER - 1 if self.look.focus in self.places else 1
        steps = {"down": 1, "up": -1, "page_down": page, "page_up": -page, "first": -FAR, "last": FAR}
        if self.asked is not None:
            self._answer(event.key)
        elif self.menu:
            self._pick(name, event.key)
        elif key is not None and key.does in steps:
            self._move(steps[key.does])
        elif key is not None and key.does == "toggle":
            self._toggle(name)
        elif key is not None and key.does in actions.ON_TASKS:
            self._propose(actions.ON_TASKS[key.does](self.look.acted_on()))
        elif key is not None:
            getattr(self, f"_do_{key.does}")()

    def _answer(self, key: str) -> None:
        asked, self.asked = self.asked, None
        if key == "y" and asked is not None:
            self.carry_out(asked)
        else:
            self.say("cancelled")

    def _pick(self, letter: str, key: str) -> None:
        menu, self.menu = self.menu, ""
        if menu == "sort" and not self.look.sort(self.look.focus, letter) and key != "escape":
            self.say(f"{letter} is not a column to sort by: press o for the letters", "warn")
        elif menu == "signal" and letter in actions.SIGNALS:
            self._propose(actions.send(self.look.acted_on(), actions.SIGNALS[letter]))
        elif menu == "signal" and key != "escape":
            self.say(f"{letter} is not a signal: press s for the letters", "warn")
        self.paint()

    def _toggle(self, number: str) -> None:
        pane = PANES[number]
        if pane in self.places and len(self.places) == 1:
            self.say(f"{pane} is the only visible pane: press the number of another first", "warn")
            return
        self.look.zoomed = False
        self.look.toggle(pane, is_visible=pane in self.places)
        self.place_panes()

    def _do_quit(self) -> None:
        self.exit(0)

    def _do_focus_next(self, by: int = 1) -> None:
        if self.look.zoomed:
            self.look.refocus(["nodes", "tasks", "events"], by)
            self.place_panes()
        else:
            self.look.refocus(list(self.places), by)
        self._chosen()

    def _do_focus_previous(self) -> None:
        self._do_focus_next(-1)

    def _do_zoom(self) -> None:
        self.look.zoomed = not self.look.zoomed
        self.place_panes()

    def _do_open(self) -> None:
        if self.look.open():
            self._chosen()
        else:
            self._do_zoom()

    def _do_escape(self) -> None:
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

    def _move(self, by: int) -> None:
        self.look.move(by)
        self._chosen()

    def _chosen(self) -> None:
        """Fetch the output of the chosen row, which may have changed, and redraw."""
        self.want_output()
        self.paint()

    def _do_filter(self) -> None:
        if self.look.focus not in TABLES:
            self.say("only nodes and tasks can be filtered: press Tab", "warn")
            return
        field = self.filter_input
        field.value = self.look.filters[self.look.focus]
        field.cursor_position = len(field.value)
        field.display, field.disabled = True, False
        field.focus()
        self.paint()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.filter_input.display:
            self.look.filter(self.look.focus, event.value)
            self.paint()

    def on_input_submitted(self) -> None:
        self._end_filter(keeps=True)

    def _end_filter(self, *, keeps: bool) -> None:
        self.screen.set_focus(None)
        self.filter_input.display, self.filter_input.disabled = False, True
        if not keeps:
            self.look.filter(self.look.focus, "")
        self._chosen()

    def _do_sort(self) -> None:
        if self.look.focus not in TABLES:
            self.say("only nodes and tasks can be sorted: press Tab", "warn")
            return
        self.menu = "sort"
        self.paint()

    def _do_help(self) -> None:
        self.push_screen(Page("? help", help_lines(readonly=self.readonly), self.painter))

    def _do_why(self) -> None:
        task = self.look.task()
        if task is None:
            self.say(CHOOSE_TASK, "warn")
            return
        name, explained = str(task.get("id")), self._later(self._explained)
        command = f"peerload why {name}"

        def ask() -> None:
            with AgentConnection(self.socket_path, timeout_s=model.ANSWERS_WITHIN_S) as client:
                told = client.call("why", task=name)
            explained(command, why_lines(told, self.clock()))

        self._in_background(command, ask)

    def _do_logs(self) -> None:
        task = self.look.task()
        if task is None:
            self.say(CHOOSE_TASK, "warn")
            return
        if task.get("array") or task.get("members"):
            self.say("an array: choose one of its members, Enter shows them", "warn")
            return
        self.log_page = LogPage(str(task.get("id")), self.painter)
        self.push_screen(self.log_page, lambda _: self._close_log())
        self.want_output()

    def _close_log(self) -> None:
        self.log_page = None
        self._chosen()

    def _do_attach(self) -> None:
        node = self.look.node()
        if node is None or self.look.focus != "nodes":
            self.say(CHOOSE_NODE, "warn")
            return
        if self.look.paused_at:
            self._do_pause()
        self.at = "" if node.facts.get("self") and not self.at else node.name
        self._sampler.switch(model.LiveSampler(self.socket_path, self.at, self.clock))
        self.say(f"peerload top --at {node.name}", "accent")

    def _do_signal(self) -> None:
        self.menu = "signal"
        self.paint()

    def _do_mark(self) -> None:
        if self.look.focus != "tasks":
            self.say("only tasks can be marked: press Tab", "warn")
            return
        self.look.mark()
        self._chosen()

    def _do_unmark(self) -> None:
        self.look.marked.clear()
        self.paint()

    def _do_mine(self) -> None:
        self.look.is_mine = not self.look.is_mine
        self.say("only my tasks" if self.look.is_mine else "all tasks that I may see")
        self._chosen()

    def _do_pause(self) -> None:
        self.look.pause(self.clock())
        self._sampler.pause(is_paused=bool(self.look.paused_at))
        self._chosen()

    def _do_drain(self) -> None:
        if self.look.focus != "nodes":
            self.say(CHOOSE_NODE, "warn")
            return
        asked = "" if self.at else self.world.node  # requests to the agent at the socket need no node name
        self._propose(actions.drain(self.look.node(), asked))

    def _propose(self, action: actions.Action | actions.ActionRefused) -> None:
        if isinstance(action, actions.ActionRefused):
            self.say(action.why, "warn")
        elif self.readonly:
            self.say(f"read-only; the command would be:  {action.command()}", "warn bold")
        elif action.asks:
            self.asked = action
            self.paint()
        else:
            self.carry_out(action)

    # -- the mouse -----------------------------------------------------------------------------------------------------

    def _pane_at(self, x: int, y: int) -> tuple[str, int]:
        """The focusable pane at this position, and the row in it (-1: above the first)."""
        for name in ("nodes", "tasks", "events") if not isinstance(self.screen, Page) else ():
            place = self.places.get(name)
            if place and place.x <= x < place.x + place.width and place.y + 1 <= y < place.y + 1 + place.height:
                return name, y - place.y - 1 - BORDER
        return "", -1

    def on_click(self, event: Click) -> None:
        name, row = self._pane_at(event.screen_x, event.screen_y)
        if name:
            self.look.focus = name
            self.look.refocus(list(self.places))
            if row >= 0 and name in TABLES and self.look.tops[name] + row < len(self.look.rows(name)):
                self.look.choose(name, self.look.tops[name] + row)
            self._chosen()

    def _wheel(self, x: int, y: int, by: int) -> None:
        name, _ = self._pane_at(x, y)
        if name:
            self.look.focus = name
            self._move(by)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self._wheel(event.screen_x, event.screen_y, 3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self._wheel(event.screen_x, event.screen_y, -3)


def _put(widget: LineList | Input, x: int, y: int, width: int, height: int) -> None:
    widget.styles.offset = (x, y)
    widget.styles.width, widget.styles.height = width, height


def clock_text(moment: float) -> str:
    """``14:02:11``, on this machine's clock."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
