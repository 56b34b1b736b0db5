"""`peerload top` as a person uses it: the real program on a terminal, real agents, keys pressed, the screen read."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster, program
from tests.integration.tmux import SHELL_PROMPT, Terminal
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = "\x1b[31mred\x1b]0;owned\x07[bold red]m[/]\u202egnp\u200b"
PRINTS = 'i=0; while true; do i=$((i+1)); echo "line $i of it"; echo "bad $i" >&2; test $i -lt 5 || sleep 2; done'
"""A few lines at once, then so slowly that it takes half a minute until the first is not on the screen any more."""


@contextlib.contextmanager
def top(agent: Agent, tmux: Path, *flags: str, columns: int = 120, rows: int = 40, **more: str) -> Iterator[Terminal]:
    """The view of an agent, with its first answer on the screen."""
    environment = {**agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket, **more}
    with Terminal(tmux, environment, columns, rows) as terminal:
        terminal.start([*program(), "top", *flags])
        terminal.await_text("from n1" if "--at" not in flags else f"from {flags[flags.index('--at') + 1]}", "alive")
        yield terminal


def quit_top(terminal: Terminal) -> None:
    """It ends well, and the terminal is as before."""
    terminal.press("q")
    terminal.await_text("ended with 0")
    assert terminal.fact("alternate_on") == "0"
    assert terminal.fact("cursor_flag") == "1"
    assert terminal.fact("mouse_any_flag") == "0"


def row(terminal: Terminal, start: str) -> str:
    """The line of the table that begins like this."""
    found = [line for line in terminal.lines() if line[1:].startswith(f"{start} ")]
    return found[0] if found else ""


def fills(terminal: Terminal, width: int, height: int) -> bool:
    """Whether the view is drawn anew for this size."""
    lines = terminal.lines()
    return len(lines) == height and {len(line) for line in lines[1:-1]} == {width} and "quit" in lines[-1]


def is_framed(terminal: Terminal, height: int) -> bool:
    """Whether every line but the first and the last ends with a frame."""
    lines = terminal.lines()
    return len(lines) == height and all(line.endswith(("╮", "│", "╯")) for line in lines[1:-1])


def test_two_nodes_are_seen_sorted_filtered_and_left(tmux: Path) -> None:
    with Cluster() as cluster:
        n1, _ = cluster.linked(2)
        running = n1.submit("sleep", "600", name="train", placement={"node": "n2"})
        ended = n1.submit("true")
        n1.await_state(running, "running")
        n1.await_state(ended, "done")
        with top(n1, tmux) as terminal:
            screen = terminal.await_text("train", "→ n2", "2 alive", "events")
            assert "n1 *" in screen
            assert "on n2, for us" in screen
            terminal.press("o")
            terminal.await_text("sort by")
            terminal.press("i")
            terminal.await_text("ID↓")
            terminal.press("o", "i")
            terminal.await_text("ID↑")
            terminal.press("/")
            terminal.await_text("filter:")
            terminal.type("state:running")
            terminal.await_text("1 of 2", "/state:running")
            terminal.press("Enter")
            terminal.await_none("filter:")
            assert row(terminal, running)
            assert not row(terminal, ended)
            terminal.press("Escape")
            terminal.await_none("/state:running")
            terminal.press("5")
            terminal.await_none("5 events")
            terminal.press("5")
            terminal.await_text("5 events")
            terminal.press("?")
            terminal.await_text("a page down", "quit")
            terminal.press("Escape")
            terminal.await_text("3 tasks")
            quit_top(terminal)


def test_why_and_logs(tmux: Path) -> None:
    with Cluster() as cluster:
        n1, _ = cluster.linked(2)
        task = n1.submit("sh", "-c", PRINTS, name="talks", placement={"node": "n2"})
        n1.await_state(task, "running")
        with top(n1, tmux) as terminal:
            terminal.await_text("line 5 of it", "! bad", "B/s")
            terminal.press("w")
            terminal.await_text(f"why {task}", "It is running on n2", f"peerload why {task}")
            terminal.press("q")
            terminal.await_text("3 tasks")
            terminal.press("l")
            terminal.await_text(f"{task} output", "line 1 of it", f"peerload logs {task}")
            seen = re.findall(r"line \d+", terminal.text())
            wait_until(lambda: re.findall(r"line \d+", terminal.text()) != seen, 10, "it to go on")
            terminal.press("q")
            terminal.await_text("3 tasks")
            quit_top(terminal)
        n1.call("cancel", tasks=[task])
        n1.wait(task)


def test_cancel_hold_release_and_retry_do_what_they_say(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent(slots=1)
        first = n1.submit("sleep", "600")
        n1.await_state(first, "running")
        second = n1.submit("sleep", "601")
        with top(n1, tmux) as terminal:
            terminal.await_text("1 waiting")
            terminal.press("c")
            terminal.await_text(f"cancel {first} ?", f"peerload cancel {first}")
            terminal.press("n")
            terminal.await_text("nothing was done")
            assert n1.show(first)["state"] == "running"
            terminal.press("j", "h")
            terminal.await_text(f"peerload hold {second}:  held")
            assert n1.show(second)["state"] == "held"
            wait_until(lambda: "held" in row(terminal, second), 10, "it to be seen")
            terminal.press("k", "c", "y")
            terminal.await_text(f"peerload cancel {first}:  cancelled")
            n1.await_state(first, "cancelled")
            wait_until(lambda: "cancelled" in row(terminal, first), 10, "it to be seen")
            terminal.press("g", "r")
            terminal.await_text(f"peerload release {second}:  released")
            n1.await_state(second, "running")
            terminal.press("G", "r")
            terminal.await_text(f"run {first} again?", f"peerload retry {first}")
            terminal.press("y")
            terminal.await_text("queued as n1/3")
            assert n1.show("n1/3")["state"] in ("queued", "running")
            quit_top(terminal)
        n1.call("cancel", tasks=[second, "n1/3"])


def test_drain_really_drains_here_and_elsewhere(tmux: Path) -> None:
    with Cluster() as cluster:
        n1, n2 = cluster.linked(2)
        with top(n1, tmux) as terminal:
            terminal.await_text("2 alive")
            terminal.press("d")
            terminal.await_text("choose a node first")
            terminal.press("BTab", "g", "d")
            terminal.await_text("drain n1 ?", "peerload drain")
            terminal.press("y")
            terminal.await_text("peerload drain:  drained")
            wait_until(lambda: n1.call("nodes")["nodes"][0]["drained"], 10, "it to be drained")
            wait_until(lambda: "drained" in row(terminal, "n1 *"), 10, "it to be seen")
            terminal.press("d", "y")
            terminal.await_text("peerload undrain:  takes tasks again")
            terminal.press("j", "d")
            terminal.await_text("peerload drain n2")
            terminal.press("y")
            terminal.await_text("peerload drain n2:  drained")
            wait_until(lambda: n2.call("nodes")["nodes"][0]["drained"], 10, "it to be drained")
            quit_top(terminal)


def test_read_only_changes_nothing(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        task = n1.submit("sleep", "600")
        n1.await_state(task, "running")
        with top(n1, tmux, "--readonly") as terminal:
            assert "read only" in terminal.await_text(task)
            assert "cancel" not in terminal.lines()[-1]
            terminal.press("c")
            terminal.await_text(f"read only; it would be:  peerload cancel {task}")
            terminal.press("y", "BTab", "d")
            terminal.await_text("read only; it would be:  peerload drain")
            quit_top(terminal)
        assert n1.show(task)["state"] == "running"
        assert not n1.call("nodes")["nodes"][0]["drained"]
        n1.call("cancel", tasks=[task])


def test_it_attaches_to_any_node(tmux: Path) -> None:
    with Cluster() as cluster:
        n1, n2 = cluster.linked(2)
        task = n2.submit("sleep", "600", name="of-n2")
        n2.await_state(task, "running")
        with top(n1, tmux, "--at", "n2") as terminal:
            terminal.await_text("of-n2", task, "n2 *")
            terminal.press("c", "y")
            terminal.await_text(f"peerload cancel {task}:  cancelled")
            n2.await_state(task, "cancelled")
            terminal.press("BTab", "g", "a")
            terminal.await_text("from n1", "n1 *", "peerload top --at n1")
            quit_top(terminal)


@pytest.mark.long
def test_an_agent_that_was_killed_is_said_and_found_again(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        task = n1.submit("sleep", "600")
        n1.await_state(task, "running")
        with top(n1, tmux) as terminal:
            terminal.await_text(task)
            n1.kill()
            terminal.await_text("the agent is away", "trying again", task)
            terminal.press("w")
            terminal.await_text(f"peerload why {task}: ")
            n1.start()
            terminal.await_none("the agent is away")
            terminal.await_text("from n1", task, "running")
            n1.kill()
            terminal.await_text("the agent is away")
            quit_top(terminal)
        n1.start()
        n1.call("cancel", tasks=[task])


def test_a_stopped_agent_does_not_keep_anybody_from_leaving(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        with top(n1, tmux) as terminal:
            n1.pause()
            terminal.press("?")
            terminal.await_text("a page down")
            terminal.press("q")
            terminal.await_none("a page down")
            quit_top(terminal)
            n1.resume()


def test_names_and_output_cannot_touch_the_terminal(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        task = n1.submit("sh", "-c", f"printf '%s\\n' '{HOSTILE}'; sleep 600", name=HOSTILE)
        n1.await_state(task, "running")
        with top(n1, tmux, columns=160) as terminal:
            terminal.await_text("\\x1b[31mred", "[bold red]m[/]", "\\u202egnp")
            assert terminal.fact("pane_title") != "owned"
            assert "\u202e" not in terminal.text()
            terminal.press("l")
            terminal.await_text("n1/1 output", "\\x1b[31mred")
            terminal.press("q")
            terminal.await_text("3 tasks")
            terminal.press("w")
            terminal.await_text("why n1/1", "\\x1b[31mred")
            terminal.press("q")
            terminal.await_text("3 tasks")
            quit_top(terminal)
        n1.call("cancel", tasks=[task])


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 60)])
def test_the_smallest_and_the_largest_terminal(tmux: Path, columns: int, rows: int) -> None:
    with Cluster() as cluster:
        n1, _ = cluster.linked(2)
        with top(n1, tmux, columns=columns, rows=rows) as terminal:
            wait_until(functools.partial(is_framed, terminal, rows), what="all of it to be drawn")
            for width, height in ((40, 12), (20, 4), (150, 45), (columns, rows)):
                terminal.resize(width, height)
                wait_until(functools.partial(fills, terminal, width, height), 10, f"it to fill {width}x{height}")
            terminal.await_text("2 nodes", "3 tasks", "quit")
            quit_top(terminal)


def test_plain_characters_and_no_colour(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        with top(n1, tmux, "--ascii", NO_COLOR="1") as terminal:
            terminal.await_text("+- 2 nodes", "cpu")
            assert terminal.text().isascii()
            colours = re.findall(r"\x1b\[([0-9;]*)m", terminal.text(styled=True))
            used = {int(code) for codes in colours for code in codes.split(";") if code}
            assert used
            assert not {code for code in used if 30 <= code <= 49 or 90 <= code <= 107} - {39, 49}
            quit_top(terminal)


def test_ctrl_c_ends_it(tmux: Path) -> None:
    with Cluster() as cluster, top(cluster.agent(), tmux) as terminal:
        terminal.press("C-c")
        terminal.await_text("ended with 0", SHELL_PROMPT)


def test_a_terminal_that_is_closed_leaves_nothing_behind(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        with top(n1, tmux):
            assert [line for line in cluster.left_over().values() if line.rstrip().endswith(" top")]
        wait_until(
            lambda: not any(line.rstrip().endswith(" top") for line in cluster.left_over().values()), 10, "it to end"
        )


def test_without_an_agent_that_is_said_as_everywhere(tmux: Path) -> None:
    with Cluster() as cluster:
        environment = {**cluster.environment, "PEERLOAD_SOCKET": str(cluster.directory / "none")}
        with Terminal(tmux, environment) as terminal:
            terminal.start([*program(), "top"])
            assert "no agent is running here" in terminal.await_text("ended with 125")


def test_without_the_extra_the_text_is_redrawn(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        words = "import sys; sys.modules['textual'] = None; from peerload.cli.main import main; sys.exit(main(['top']))"
        with Terminal(tmux, {**cluster.environment, "PEERLOAD_SOCKET": n1.socket}) as terminal:
            terminal.start([sys.executable, "-I", "-c", words])
            terminal.await_text("seen from n1", "NODE")
            terminal.press("C-c")
            terminal.await_text("ended with 0")


@pytest.mark.parametrize("signal_name", ["TERM", "HUP", "INT"])
def test_a_signal_leaves_the_terminal_as_it_was(tmux: Path, signal_name: str) -> None:
    with Cluster() as cluster, top(cluster.agent(), tmux) as terminal:
        (pid,) = [pid for pid, line in cluster.left_over().items() if line.rstrip().endswith(" top")]
        os.kill(pid, getattr(signal, f"SIG{signal_name}"))
        terminal.await_text("ended with", SHELL_PROMPT)
        assert terminal.fact("alternate_on") == "0"
        assert terminal.fact("cursor_flag") == "1"
        assert terminal.fact("mouse_any_flag") == "0"


def test_a_node_that_is_none_is_said_as_everywhere(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        with Terminal(tmux, {**cluster.environment, "PEERLOAD_SOCKET": n1.socket}) as terminal:
            terminal.start([*program(), "top", "--at", "nobody"])
            assert "nobody" in terminal.await_text("ended with 125")
