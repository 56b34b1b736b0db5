"""A text that is drawn again each second, on a terminal of its own."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import socket
import sys
import termios
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.common import output, redraw
from peerload.cli.common.redraw import redrawn
from peerload.cli.verbs import ls, nodes
from peerload.model.errors import PeerloadError
from tests.each import each
from tests.unit.cli.fake_agent import FakeAgent, Reply, fixture_agent

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("fixture_agent",)


@contextlib.contextmanager
def at_keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of the terminal that stdin and stdout are."""
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal, "r", closefd=False) as stdin, os.fdopen(terminal, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        yield keyboard
    os.close(terminal)
    os.close(keyboard)


@each("term", ["dumb", "xterm"])
def test_q_quits_and_the_terminal_is_as_before(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    drawn: list[int] = []
    with at_keyboard(monkeypatch) as keyboard:
        before = termios.tcgetattr(sys.stdin.fileno())

        def lines() -> list[str]:
            drawn.append(1)
            os.write(keyboard, b"xq")
            return ["a line"]

        assert redrawn(lines) == 0
        assert termios.tcgetattr(sys.stdin.fileno()) == before
        seen = b""
        while b"a line" not in seen:  # the echo of the keys comes first, perhaps alone
            seen += os.read(keyboard, 1000)
        assert (b"\x1b" in seen) == (term != "dumb")
    assert drawn == [1]


def test_the_view_goes_on_while_the_agent_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[Any] = [["first"], PeerloadError("it is away\x1b"), ["back"], KeyboardInterrupt()]

    def lines() -> list[str]:
        text = texts.pop(0)
        if isinstance(text, BaseException):
            raise text
        return text  # type: ignore[no-any-return]

    monkeypatch.setattr(redraw, "EVERY_S", 0.0)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    assert redrawn(lines) == 0
    first, away, back = shown.getvalue().splitlines()
    assert (first, back) == ("first", "back")
    assert away.startswith("peerload: it is away\\x1b")
    texts[:] = [PeerloadError("it is not there")]
    with pytest.raises(PeerloadError):
        redrawn(lines)


def test_ls_watches_through_a_restart_of_the_agent(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: object, reply: Reply) -> None:
        reply.ok(tasks=[], truncated=False)
        reply.hang_up()

    agent.handlers["tasks"] = answer
    monkeypatch.setattr("peerload.cli.verbs.ls.redrawn", lambda lines: len(lines() + lines()))
    assert ls.ls(["--watch", "--socket", agent.path]) == 2


def test_a_dumb_terminal_is_told_what_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "TERM=dumb" in nodes._lacks_view()
    assert "pip" not in nodes._lacks_view()
    monkeypatch.delenv("TERM")
    assert "pip" not in nodes._lacks_view()
    monkeypatch.setenv("TERM", "xterm")
    assert nodes._lacks_view() == ""
    monkeypatch.setitem(sys.modules, "textual", None)
    assert "pip install" in nodes._lacks_view()


def test_what_is_followed_ends_with_its_reader() -> None:
    agent, client = socket.socketpair()
    reader, writer = os.pipe()
    with agent, client:
        stream = SimpleNamespace(fileno=client.fileno, stream=lambda _verb: iter([{"number": 1}, {"number": 2}]))
        parts = output.followed(stream, "events", dict, stdout=writer)  # type: ignore[arg-type]
        assert next(parts) == {"number": 1}
        agent.send(b"the next part")
        assert next(parts) == {"number": 2}
        client.recv(100)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            next(parts)
    os.close(writer)
