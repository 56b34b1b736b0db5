"""`peerload top` on a terminal: samples go into the model, keys change the look, and what differs is drawn."""

from __future__ import annotations

import signal
import time

from textual.app import App
from textual.binding import Binding
from textual.message import Message

from peerload.client.connection import Client
from peerload.model.errors import PeerloadError
from peerload.text.tasks import own_names, why_lines
from peerload.top import actions
from peerload.top import lines as draw
from peerload.top.detail import Tail
from peerload.top.main_screen import Main
from peerload.top.model import ANSWERS_WITHIN_S, LiveSampler, TopModel
from peerload.top.pages import LOG_TAIL_BYTES, LogPage, Page
from peerload.top.panes import Painter
from peerload.top.view_state import ViewState
from peerload.top.watch import Once, Sampler, TailWatcher, UsageWatcher, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar

    from textual.binding import BindingType

    from peerload.top.lines import Line
    from peerload.top.model import Source, TopSample


class Sampled(Message):
    """A sample was taken."""

    def __init__(self, sample: TopSample) -> None:
        super().__init__()
        self.sample = sample


class Lost(Message):
    """The agent did not answer."""

    def __init__(self, why: str, lost_at: float) -> None:
        super().__init__()
        self.why, self.lost_at = why, lost_at


class Output(Message):
    """The end of a task's output, or why there is none."""

    def __init__(self, task: str, pieces: list[dict[str, object]], taken_at: float, why_none: str = "") -> None:
        super().__init__()
        self.task, self.pieces, self.taken_at, self.why_none = task, pieces, taken_at, why_none


class Used(Message):
    """What tasks use."""

    def __init__(self, tasks: list[dict[str, object]]) -> None:
        super().__init__()
        self.tasks = tasks


class Broke(Message):
    """A bug of ours, in a thread."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Told(Message):
    """What came of something that was asked for; with ``lines`` a page to show."""

    def __init__(self, text: str, style: str = "good", title: str = "", lines: list[str] | None = None) -> None:
        super().__init__()
        self.text, self.style, self.title, self.lines = text, style, title, lines


class TopApp(App[int]):
    """The program. ``source``: where samples come from; ``socket_path``: the agent that carries out what is asked."""

    TITLE = "peerload top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", show=False)]

    def __init__(
        self,
        source: Source,
        socket_path: str | None,
        *,
        node: str = "",
        readonly: bool = False,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ansi_color=True)
        self.at = node
        self.socket_path = socket_path
        self.readonly = readonly
        self.clock = clock
        self.world = TopModel()
        self.look = ViewState(self.world)
        self.look.own = own_names()
        self.tail = Tail()
        self.painter = Painter(self.look, self.tail, ascii_only=ascii_only, readonly=readonly)
        self.log_page: LogPage | None = None
        self.main = Main(self)
        self._nodes_known = 0
        self._sampler = Sampler(
            source,
            lambda sample: self._post(Sampled(sample)),
            lambda why, lost_at: self._post(Lost(why, lost_at)),
            self._broke,
        )
        self._tails = TailWatcher(
            socket_path,
            lambda task, pieces, taken_at: self._post(Output(task, pieces, taken_at)),
            lambda task, why: self._post(Output(task, [], clock(), why)),
            self._broke,
        )
        self._usage = UsageWatcher(socket_path, lambda tasks: self._post(Used(tasks)), self._broke)

    def _post(self, message: Message) -> None:
        """From any thread; dropped when the program is at its end."""
        if self.is_running:
            self.post_message(message)

    def _broke(self, error: Exception) -> None:
        self._post(Broke(error))

    def on_broke(self, event: Broke) -> None:
        """It ends the program, and is told as every bug is."""
        raise event.error

    def on_mount(self) -> None:
        """Begin."""
        self.theme = "ansi-dark"
        self.push_screen(self.main)
        self._sampler.start()
        self._tails.start()
        self._usage.start()

    def on_unmount(self) -> None:
        """End; nobody is waited for."""
        self._sampler.end()
        self._tails.end()
        self._usage.end()

    def _print_error_renderables(self) -> None:
        """What went wrong is raised again by `to_the_end`, and told as it is for every verb."""

    def to_the_end(self) -> int:
        """Run until somebody quits, or a signal says so → the exit code. The terminal is as before then. Raises whatever
        ended it otherwise."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda got, _: self.call_later(self.exit, 128 + got))
        code = self.run()
        if self._exception is not None:
            raise self._exception
        return code or 0

    def asked_node(self) -> str:
        """The node at the socket, which need not be named to do something; "" if it is not the one seen from."""
        return "" if self.at else self.world.node

    # -- what comes ----------------------------------------------------------------------------------------------------

    def on_sampled(self, event: Sampled) -> None:
        """The world has moved on. One that was on its way when somebody paused is taken, too: the next tells only the rest."""
        self.world.take(event.sample)
        self.look.rows("tasks")
        self.look.rows("nodes")
        self.want_output()
        if len(self.world.nodes) != self._nodes_known:
            self._nodes_known = len(self.world.nodes)
            self.main.place_panes()
        elif self.screen is self.main:
            self.main.paint()

    def on_lost(self, event: Lost) -> None:
        """It does not answer: what was known stands, and is marked."""
        self.world.lost(event.why, event.lost_at)
        self.main.paint()

    def on_output(self, event: Output) -> None:
        """Whoever shows this task's output gets it."""
        page = self.log_page
        for tail in (self.tail, *((page.tail,) if page else ())):
            if tail.task == event.task:
                if event.why_none:
                    tail.why_none = event.why_none
                else:
                    tail.take(event.task, event.pieces, event.taken_at)
        if page is not None:
            page.refill()
        else:
            self.main.paint()

    def on_used(self, event: Used) -> None:
        """It is drawn with what comes next."""
        self.world.take_usage(event.tasks)
        for told in event.tasks:
            if told.get("id") == self.tail.task:
                self.tail.uses.take(told)

    def on_told(self, event: Told) -> None:
        """An answer."""
        if event.lines is not None:
            title: Line = [(draw.plain(event.title), "title")]
            content: list[Line] = [
                [(" " + draw.plain(line), "" if number else "bold")] for number, line in enumerate(event.lines)
            ]
            self.push_screen(Page(title, content, ascii_only=self.painter.ascii_only, says=event.text, ends_at="w"))
            self.main.message = ("", "", 0.0)
            return
        self.main.say(event.text, event.style)
        self._sampler.hurry()

    # -- what is asked for ---------------------------------------------------------------------------------------------

    def want_output(self) -> None:
        """Fetch the output of the task that is chosen, if it is shown."""
        page = self.log_page
        task = self.world.task(page.tail.task) if page else self.look.task()
        is_shown = page is not None or ("detail" in self.main.places and self.look.subject == "tasks")
        name = str(task.get("id")) if task and is_shown else page.tail.task if page else ""
        if page is None and name != self.tail.task:
            self.tail.clear(name)
        if task is not None and (task.get("array") or task.get("members")):
            self.tail.why_none = "an array: Enter shows its members, each with its output"
            name = ""
        elif (
            task is not None
            and not task.get("started_at")
            and task.get("state") in ("queued", "held", "promised", "leased")
        ):
            shown = page.tail if page else self.tail
            shown.why_none = "it has not started"
            name = ""
        state = task.get("state") if task is not None else ""
        size = LOG_TAIL_BYTES if page else self.tail.tail_bytes
        is_paused = bool(self.look.paused_at)
        grows = state in ("running", "leased", "unknown") and (page is not None or not is_paused)
        self._tails.want(name, size, grows=grows)
        self._usage.want({} if page is not None or is_paused else self.look.measured())

    def close_log(self) -> None:
        """The page was left."""
        self.log_page = None
        self.want_output()
        self.main.paint()

    def ask_why(self, task: str) -> None:
        """In the background; the answer becomes a page."""

        def work() -> None:
            try:
                with Client(self.socket_path, timeout_s=ANSWERS_WITHIN_S) as client:
                    told = client.call("why", task=task)
                lines = why_lines(told, self.clock())
                self._post(Told(f"peerload why {task}", "accent", f"why {task}", lines))
            except PeerloadError as error:
                self._post(Told(f"peerload why {task}: {reason(error)}", "bad"))

        Once(work, self._broke).start()

    def carry_out(self, action: actions.Action) -> None:
        """In the background; what came of it is said."""
        self.main.say(f"{action.command()} ...", "accent")

        def work() -> None:
            try:
                self._post(Told(f"{action.command()}:  {action.carry_out(self.socket_path)}"))
            except PeerloadError as error:
                self._post(Told(f"{action.command()}:  {reason(error)}", "bad"))

        Once(work, self._broke).start()

    def pause(self) -> None:
        """Take samples as long as the look does not stand still."""
        self._sampler.pause(is_paused=bool(self.look.paused_at))

    def attach(self, node: str) -> None:
        """See the cluster from another node."""
        self.at = node
        self._sampler.switch(LiveSampler(self.socket_path, node, self.clock))


def run(socket_path: str | None, *, node: str = "", readonly: bool = False, ascii_only: bool = False) -> int:
    """Until somebody quits → the exit code."""
    app = TopApp(LiveSampler(socket_path, node), socket_path, node=node, readonly=readonly, ascii_only=ascii_only)
    return app.to_the_end()
