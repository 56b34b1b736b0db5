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

from tests.in_process import cli
from tests.integration.cluster import Agent, Cluster, program
from tests.integration.shared import end_all
from tests.integration.tmux import SHELL_PROMPT, Terminal
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = "\x1b[31mred\x1b]0;owned\x07[bold red]m[/]\u202egnp\u200b"
PRINTS = """
for i in 1 2 3 4 5; do echo "line $i of it"; echo "bad $i" >&2; done
until [ -e "$0" ]; do sleep 0.1; done; echo "line 6 of it"; exec sleep 600
"""
"""A few lines at once, and another when the file is there that it is called with."""


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


@pytest.fixture(name="pair", scope="module")
def fixture_pair() -> Iterator[list[Agent]]:
    """n1 and n2, which know each other."""
    with Cluster() as cluster:
        yield cluster.linked(2)


@pytest.fixture(name="agents")
def fixture_agents(pair: list[Agent]) -> Iterator[list[Agent]]:
    """The same, with nothing to do and nothing to be seen of other tests."""
    yield pair
    end_all(*pair)
    for agent in pair:
        agent.call("undrain")
        agent.call("clean")


def drains_both(terminal: Terminal, n1: Agent, n2: Agent) -> None:
    """Drain this node and take that back, then drain the other, whose row is chosen afterwards."""
    terminal.press("BTab", "g", "d")
    terminal.await_text("drain n1 ?", "peerload drain")
    terminal.press("y")
    terminal.await_text("peerload drain:  drained")
    wait_until(lambda: n1.call("nodes")["nodes"][0]["drained"], what="it to be drained")
    wait_until(lambda: "drained" in row(terminal, "n1 *"), what="it to be seen")
    terminal.press("d", "y")
    terminal.await_text("peerload undrain:  takes tasks again")
    terminal.press("j", "d")
    terminal.await_text("peerload drain n2")
    terminal.press("y")
    terminal.await_text("peerload drain n2:  drained")
    wait_until(lambda: n2.call("nodes")["nodes"][0]["drained"], what="it to be drained")


def test_two_nodes_are_seen_sorted_filtered_drained_visited_and_left(agents: list[Agent], tmux: Path) -> None:
    n1, n2 = agents
    gate = n1.directory / "gate"
    running = n1.submit("sh", "-c", PRINTS, str(gate), name="talks", placement={"node": "n2"})
    of_n2 = n2.submit("sleep", "600", placement={"local": True})
    ended = n1.submit("true")
    n1.await_state(running, "running")
    n1.await_state(ended, "done")
    with top(n1, tmux) as terminal:
        terminal.await_text("talks", "→ n2", "2 alive", "events", "n1 *", "on n2, for us")
        terminal.press("o")
        terminal.await_text("sort by")
        terminal.press("i")
        terminal.await_text("ID↓")
        terminal.press("/")
        terminal.await_text("filter:")
        terminal.type("state:running")
        terminal.await_text("/state:running")
        terminal.press("Enter")
        terminal.await_none("filter:")
        wait_until(lambda: row(terminal, running) and not row(terminal, ended), what="one of both")
        terminal.press("Escape")
        terminal.await_none("/state:running")
        for width, height in ((20, 4), (200, 60), (120, 40)):
            terminal.resize(width, height)
            wait_until(functools.partial(fills, terminal, width, height), what=f"it to fill {width}x{height}")
        terminal.await_text("line 5 of it", "! bad", "B/s")
        terminal.press("w")
        terminal.await_text(f"why {running}", f"peerload why {running}")
        terminal.press("q")
        terminal.await_none(f"why {running}")
        terminal.press("l")
        terminal.await_text(f"{running} output", "line 1 of it", f"peerload logs {running}")
        gate.touch()
        terminal.await_text("line 6 of it")
        terminal.press("q")
        terminal.await_none(f"{running} output")
        drains_both(terminal, n1, n2)
        terminal.press("a")
        terminal.await_text("from n2", "n2 *", "peerload top --at n2", of_n2)
        quit_top(terminal)


def test_cancel_hold_release_and_retry_do_what_they_say_and_a_terminal_that_is_closed_ends_it(tmux: Path) -> None:
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
            terminal.await_text("cancelled")
            assert n1.show(first)["state"] == "running"
            terminal.press("j", "h")
            terminal.await_text(f"peerload hold {second}:  held")
            assert n1.show(second)["state"] == "held"
            wait_until(lambda: "held" in row(terminal, second), what="it to be seen")
            terminal.press("k", "c", "y")
            terminal.await_text(f"peerload cancel {first}:  cancelled")
            n1.await_state(first, "cancelled")
            wait_until(lambda: "cancelled" in row(terminal, first), what="it to be seen")
            terminal.press("g", "r")
            terminal.await_text(f"peerload release {second}:  released")
            n1.await_state(second, "running")
            terminal.press("G", "r")
            terminal.await_text(f"run {first} again?", f"peerload retry {first}")
            terminal.press("y")
            terminal.await_text("queued as n1/3")
            assert n1.show("n1/3")["state"] in ("queued", "running")
            assert views(cluster)
        wait_until(lambda: not views(cluster), what="it to end with its terminal")
        n1.call("cancel", tasks=[second, "n1/3"])


def views(cluster: Cluster) -> list[int]:
    """The processes of `top`."""
    return [pid for pid, line in cluster.left_over().items() if line.rstrip().endswith(" top")]


def test_read_only_in_plain_characters_with_hostile_names_beside_an_agent_that_stops(
    agents: list[Agent], tmux: Path
) -> None:
    """Nothing is changed, nothing foreign touches the terminal, and nobody is kept from leaving."""
    n1 = agents[0]
    task = n1.submit("sh", "-c", f"printf '%s\\n' '{HOSTILE}'; sleep 600", name=HOSTILE, placement={"local": True})
    n1.await_state(task, "running")
    with top(n1, tmux, "--readonly", "--ascii", columns=160, NO_COLOR="1") as terminal:
        screen = terminal.await_text(
            "+- 2 nodes", "cpu", task, "read only", "\\x1b[31mred", "[bold red]m[/]", "\\u202egnp"
        )
        assert screen.isascii()
        assert terminal.fact("pane_title") != "owned"
        assert "cancel" not in terminal.lines()[-1]
        colours = re.findall(r"\x1b\[([0-9;]*)m", terminal.text(styled=True))
        used = {int(code) for codes in colours for code in codes.split(";") if code}
        assert used
        assert not {code for code in used if 30 <= code <= 49 or 90 <= code <= 107} - {39, 49}
        terminal.press("c")
        terminal.await_text(f"read-only; the command would be:  peerload cancel {task}")
        terminal.press("y", "BTab", "d")
        terminal.await_text("read-only; the command would be:  peerload drain")
        terminal.press("Tab", "l")
        terminal.await_text(f"{task} output", "\\x1b[31mred")
        terminal.press("q")
        terminal.await_none(f"{task} output")
        assert n1.show(task)["state"] == "running"
        assert not n1.call("nodes")["nodes"][0]["drained"]
        n1.pause()
        try:
            terminal.press("?")
            terminal.await_text("a page down")
            terminal.press("q")
            terminal.await_none("a page down")
            quit_top(terminal)
        finally:
            n1.resume()


@pytest.mark.long
def test_an_agent_that_was_killed_is_said_and_found_again(tmux: Path) -> None:
    with Cluster() as cluster:
        n1 = cluster.agent()
        task = n1.submit("sleep", "600")
        n1.await_state(task, "running")
        with top(n1, tmux) as terminal:
            terminal.await_text(task)
            n1.kill()
            terminal.await_text("the agent does not answer", "trying again", task)
            terminal.press("w")
            terminal.await_text(f"peerload why {task}: ")
            n1.start()
            terminal.await_none("the agent does not answer")
            terminal.await_text("from n1", task, "running")
            n1.kill()
            terminal.await_text("the agent does not answer")
            quit_top(terminal)
        n1.start()
        n1.call("cancel", tasks=[task])


def test_a_signal_leaves_the_terminal_as_it_was_and_ctrl_c_ends_it(agents: list[Agent], tmux: Path) -> None:
    with top(agents[0], tmux) as terminal:
        (pid,) = views(agents[0].cluster)
        os.kill(pid, signal.SIGTERM)
        terminal.await_text("ended with", SHELL_PROMPT)
        assert terminal.fact("alternate_on") == "0"
        assert terminal.fact("cursor_flag") == "1"
        assert terminal.fact("mouse_any_flag") == "0"
        terminal.start([*program(), "top"])
        terminal.await_text("from n1", "alive")
        terminal.press("C-c")
        terminal.await_text("ended with 0", SHELL_PROMPT)


def test_without_an_agent_or_a_node_of_that_name_it_ends(agents: list[Agent]) -> None:
    nobody = cli(agents[0], "top", "--at", "nobody")
    assert nobody.returncode == 125
    assert b"nobody" in nobody.stderr
    alone = cli(agents[0], "top", env={"PEERLOAD_SOCKET": str(agents[0].directory / "none")})
    assert alone.returncode == 125


def test_without_the_extra_the_text_is_redrawn(agents: list[Agent], tmux: Path) -> None:
    words = "import sys; sys.modules['textual'] = None; from peerload.cli.main import main; sys.exit(main(['top']))"
    with Terminal(tmux, {**agents[0].cluster.environment, "PEERLOAD_SOCKET": agents[0].socket}) as terminal:
        terminal.start([sys.executable, "-I", "-c", words])
        terminal.await_text("seen from n1", "NODE")
        terminal.press("C-c")
        terminal.await_text("ended with 0")
