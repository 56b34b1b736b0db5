"""`attach` at a terminal, to one's own tasks and to those of others."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING, Any

import pytest

from tests.terminal import shown_at_a_terminal
from tests.unit.cli.fake_agent import FakeAgent, Reply, command_line, environment, fixture_agent  # noqa: F401 -- a fixture

if TYPE_CHECKING:
    from peerload.wire import control

TITLE = b"\x1b]0;owned\x07"
OWN = pwd.getpwuid(os.getuid()).pw_name


def output(_request: control.ReadOutput, reply: Reply) -> None:
    reply.more(running={"node": "ws1", "attempt": 1})
    reply.more(stream=1, offset=0, data=b"before\n" + TITLE)
    reply.ok(id="ws1/42", state="done", exit_code=0, signal=None, node="ws1", reason="")


@pytest.mark.rule("T1")
@pytest.mark.parametrize("terminal", [None, {"rows": 24, "columns": 80}])
@pytest.mark.parametrize(
    ("user", "home", "mode", "words", "is_raw"),
    [
        (OWN, "ws1", "system", (), True),
        ("somebody", "ws1", "system", (), False),
        ("somebody", "ws1", "system", ("--raw",), True),
        (OWN, "ws2", "system", (), False),
        (OWN, "ws2", "user", (), True),
        ("somebody", "ws1", "user", (), False),
    ],
)
def test_the_output_of_another_users_task_is_made_harmless(
    agent: FakeAgent,
    user: str,
    home: str,
    mode: str,
    words: tuple[str, ...],
    terminal: dict[str, Any] | None,
    *,
    is_raw: bool,
) -> None:
    agent.answer("info", node="ws1", mode=mode)
    agent.answer("show", tasks=[{"id": "ws1/42", "user": user, "home": home, "terminal": terminal}])
    agent.answer("input", ended=True)
    agent.answer("resize")
    agent.handlers["output"] = output
    shown = shown_at_a_terminal(
        [str(word) for word in command_line("attach", *words, "ws1/42")], environment(agent), 24, 80, 60.0
    )
    assert b"before" in shown
    assert (TITLE in shown) is is_raw
    assert (b"\\x1b]0;owned" in shown) is not is_raw
