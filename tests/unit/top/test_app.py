"""The program on a terminal that is none: keys go in, lines come out. The cluster is played back.

Textual is imported by the tests that run it, not by each process that collects them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from peerload.model.errors import AgentUnavailable
from peerload.top.actions import KEYS
from peerload.top.lines import as_text
from peerload.top.model import TopSample
from tests.each import each
from tests.support import PATIENCE_S
from tests.unit.cli.fake_agent import fixture_agent
from tests.unit.top.given import ESCAPES, NOW, event, node, sample, task
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from textual.pilot import Pilot

    from peerload.top.app import TopApp
    from tests.unit.cli.fake_agent import FakeAgent, Reply

__all__ = ["fixture_agent"]

SIZES = [(80, 24), (120, 40), (200, 60)]
SEEN = sample(
    nodes=[node("ws1", self=True), *(node(f"ws{number}") for number in range(2, 300))],
    tasks=[task(f"ws1/{number}", name="train" if number % 2 else "render") for number in range(1, 41)],
    guests=[task("ws9/1", node="ws1")],
    events=[event(number) for number in range(1, 20)],
)  # fmt: skip


class Scripted:
    """Samples, and errors, one a look; the last again and again."""

    def __init__(self, *looks: TopSample | Exception) -> None:
        self.looks = list(looks)
        self.taken = 0

    def look(self) -> TopSample:
        at = self.looks[min(self.taken, len(self.looks) - 1)]
        self.taken += 1
        if isinstance(at, Exception):
            raise at
        return at

    def close(self) -> None:
        """Nothing is open."""


def screen(app: TopApp) -> list[str]:
    """What the program shows, line by line, as its panes have it."""
    from peerload.top.app import Page
    from peerload.top.lines import LineList

    width, height = app.size
    if isinstance(app.screen, Page):
        return [as_text(line) for line in app.screen.lines.content]
    rows = [[" "] * width for _ in range(height)]
    for widget in app.screen.query(LineList):
        if widget.display:
            for y, line in enumerate(widget._lines):
                at = widget.region.y + y
                text = as_text(line)
                rows[at][widget.region.x : widget.region.x + len(text)] = list(text)
    return ["".join(row) for row in rows]


def play(
    size: tuple[int, int],
    body: Callable[[TopApp, Pilot[int]], Awaitable[None]],
    *looks: TopSample | Exception,
    socket: str = "/nonexistent/socket",
    **options: Any,
) -> TopApp:
    """Run the program without a terminal, and ``body`` beside it, once the first look was taken."""
    from peerload.top.app import TopApp

    app = TopApp(Scripted(*(looks or (SEEN,))), socket, clock=lambda: NOW, **options)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            while not app.world.turn:
                await pilot.pause(0.01)
            await pilot.pause()
            await body(app, pilot)

    asyncio.run(run())
    return app


async def until(pilot: Pilot[int], predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not predicate():
            await pilot.pause(0.02)


@each("size", SIZES)
@each("ascii_only", [False, True])
def test_every_size_is_filled(size: tuple[int, int], ascii_only: bool) -> None:
    async def body(app: TopApp, _: Pilot[int]) -> None:
        lines = screen(app)
        assert "peerload  lab   from ws1" in lines[0]
        assert "quit" in lines[-1]
        assert all(line.endswith(("|", "+") if ascii_only else ("│", "╮", "╯")) for line in lines[1:-1])
        text = "\n".join(lines)
        assert "2 nodes 299" in text
        assert "3 tasks 41" in text
        assert not ascii_only or text.isascii()

    play(size, body, ascii_only=ascii_only)


def test_another_size_is_filled_too() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.resize_terminal(140, 50)
        await until(
            pilot,
            lambda: (
                len(screen(app)) == 50 and all(line.rstrip().endswith(("│", "╮", "╯")) for line in screen(app)[1:-1])
            ),
        )
        assert app.panes["header"].region.width == 140

    play((80, 24), body)


def test_every_key_does_something_or_says_why_not() -> None:
    from peerload.top.app import Page

    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        for key in KEYS:
            if key.does in ("quit", "why", "attach"):
                continue
            for name in key.names:
                await pilot.press(name)
                await pilot.pause()
                if isinstance(app.screen, Page):
                    await pilot.press("escape")
                await pilot.press("escape")

    play((120, 40), body)


def test_numbers_toggle_panes() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        for number, name in (("1", "1 cluster"), ("2", "2 nodes"), ("4", "4 detail"), ("5", "5 events")):
            assert any(name in line for line in screen(app))
            await pilot.press(number)
            assert not any(name in line for line in screen(app))
        await pilot.press("3")
        assert "tasks" not in app.look.hidden
        assert any("3 tasks" in line for line in screen(app))
        await pilot.press("5")
        assert any("5 events" in line for line in screen(app))

    play((120, 40), body)


def test_a_pane_without_room_gets_it_when_it_is_asked_for() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        assert not any("5 events" in line for line in screen(app))
        await pilot.press("5")
        assert any("5 events" in line for line in screen(app))

    play((80, 24), body)


def test_zoom_and_back() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("enter")
        assert list(app.places) == ["tasks"]
        assert sum("ws1/" in line for line in screen(app)) > 30
        await pilot.press("tab")
        assert list(app.places) == ["events"]
        await pilot.press("escape")
        assert len(app.places) == 5

    play((120, 40), body)


def test_the_filter_counts_with_each_letter() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("slash", *"train")
        assert app.look.filters["tasks"] == "train"
        assert any("20 of 41  /train" in line for line in screen(app))
        await pilot.press("backspace", "enter", "j")
        assert app.look.filters["tasks"] == "trai"
        assert app.focused is None
        await pilot.press("slash", "escape")
        assert app.look.filters["tasks"] == ""

    play((120, 40), body)


def test_a_filter_that_nothing_fits() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("slash", *"[/bold]\\", "enter", "j", "k", "G", "c")
        assert app.look.task() is None
        assert app.asked is None

    play((120, 40), body)


def test_the_mouse_chooses() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        place = app.places["nodes"]
        await pilot.click(offset=(place.x + 4, place.y + 1 + 2 + 3))
        assert app.look.focus == "nodes"
        assert app.look.chosen["nodes"] == app.look.rows("nodes")[3].name

    play((120, 40), body)


def test_read_only_says_what_it_would_be() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("c")
        assert "peerload cancel ws1/1" in screen(app)[-1]
        assert app.asked is None

    play((120, 40), body, readonly=True)


def test_a_question_is_answered_with_y_alone() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        for other in ("n", "q", "enter", "c"):
            await pilot.press("c")
            assert "peerload cancel ws1/1" in screen(app)[-1]
            await pilot.press(other)
            assert app.asked is None

    play((120, 40), body)


def test_an_agent_that_goes_and_comes_back() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: "the agent does not answer" in screen(app)[0])
        assert any("ws1/1" in line for line in screen(app))
        app._sampler.switch(Scripted(SEEN))
        await until(pilot, lambda: "from ws1" in screen(app)[0])

    play((120, 40), body, SEEN, AgentUnavailable("the agent disconnected", why="reset"))


def test_what_cannot_be_done_is_said() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("c", "y")
        await until(pilot, lambda: Says.NO_AGENT() in screen(app)[-1])
        await pilot.press("w")
        await until(pilot, lambda: "peerload why ws1/1: no agent" in screen(app)[-1])

    play((120, 40), body)


def test_what_is_foreign_is_no_markup() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        text = "\n".join(screen(app))
        assert "[bold red]markup[/]" in text
        assert "\x1b" not in text
        await pilot.press("l")
        assert "\x1b" not in app.export_screenshot()
        await pilot.press("q", "slash", *"[red]", "enter")
        assert "/[red]" in "\n".join(screen(app))

    play((160, 50), body, sample(tasks=[task("ws1/1", name=ESCAPES, reason=ESCAPES)]))


def test_only_what_differs_is_drawn() -> None:

    drawn: list[int] = []

    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        app._sampler.end()  # no other sample comes in between
        await asyncio.to_thread(app._sampler.join, PATIENCE_S)
        await pilot.pause()
        pane = app.panes["nodes"]
        original = pane.render_line

        def render_line(y: int) -> Any:
            drawn.append(y)
            return original(y)

        pane.render_line = render_line  # type: ignore[method-assign]
        app.paint()
        await pilot.pause()
        assert drawn == []
        app.world.nodes["ws1"].facts["tasks_running"] = 7
        app.paint()
        await pilot.pause()
        assert drawn == [2]

    play((120, 40), body)


def test_every_style_that_is_used_is_there() -> None:
    from peerload.top.lines import STYLES, style_of

    for name in STYLES:
        assert style_of(f"{name} bold")


def test_output_is_fetched_for_what_is_chosen(agent: FakeAgent) -> None:
    from peerload.top.app import Page

    def output(request: Any, reply: Reply) -> None:
        reply.more(stream=1, offset=0, data=f"this is {request.task}\n".encode())
        reply.ok(id=request.task, state="running")

    agent.handlers["output"] = output

    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: any("this is ws1/1" in line for line in screen(app)))
        await pilot.press("j")
        await until(pilot, lambda: any("this is ws1/2" in line for line in screen(app)))
        await pilot.press("l")
        await until(
            pilot, lambda: any("this is ws1/2" in line for line in screen(app)) and isinstance(app.screen, Page)
        )
        await pilot.press("l")
        assert not isinstance(app.screen, Page)

    play((120, 40), body, socket=agent.path)


def test_a_cancel_is_sent_as_the_command_line_would(agent: FakeAgent) -> None:
    agent.answer("output", id="ws1/1", state="running")
    agent.answer("cancel", cancelled=["ws1/1"], already_ended=[])

    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("c", "y")
        await until(pilot, lambda: "peerload cancel ws1/1:  cancelled" in screen(app)[-1])

    play((120, 40), body, socket=agent.path)
    assert [one.tasks for one in agent.requests if type(one).__name__ == "Cancel"] == [("ws1/1",)]  # type: ignore[union-attr]


def test_a_bug_is_raised_not_drawn() -> None:
    from peerload.top.app import TopApp

    class Broken(Scripted):
        def look(self) -> TopSample:
            return TopSample(NOW, {"nodes": 7})

    app = TopApp(Broken(), "/nonexistent")

    async def run() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app._exception is not None)

    with pytest.raises(TypeError):
        asyncio.run(run())


def test_while_it_is_paused_nobody_is_asked_and_the_next_look_goes_on() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        source = Scripted(SEEN)
        app._sampler.switch(source)
        await until(pilot, lambda: source.taken)
        await pilot.press("p")
        assert "paused" in screen(app)[0]
        assert app.look.paused_at == NOW
        taken = source.taken
        app._sampler.sample_now()
        await pilot.press("j", "m", "m")
        assert source.taken <= taken + 1  # one may have been on its way
        await pilot.press("p")
        assert "paused" not in screen(app)[0]
        await until(pilot, lambda: source.taken > taken + 1)

    play((120, 40), body)


def test_the_signal_is_picked_from_a_menu_and_asked_for() -> None:
    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("space", "space", "s")
        assert "KILL" in screen(app)[-1]
        await pilot.press("h")
        assert app.asked is not None
        assert [fields["task"] for fields in app.asked.requests] == ["ws1/1", "ws1/2"]
        assert app.asked.verb == "signal"
        await pilot.press("n", "s", "%")
        assert "not a signal" in screen(app)[-1]
        assert app.look.marked == {"ws1/1", "ws1/2"}

    play((120, 40), body)
