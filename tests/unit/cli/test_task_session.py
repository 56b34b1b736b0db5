"""`run` and `exec` beside a fake agent: what signals do while it is away or has not answered, and a reconnection."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from peerload.cli.common import task_session
from peerload.client.connection import readable_within
from peerload.model.errors import AgentUnavailable
from peerload.wire import control
from tests.support import stands_still, wait_until
from tests.unit.cli.fake_agent import command_line, environment, fixture_agent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.cli.fake_agent import FakeAgent, Reply

__all__ = ["fixture_agent"]

DONE = {"id": "ws1/1", "state": "done", "exit_code": 0, "signal": None, "node": "ws1", "reason": ""}


@pytest.fixture(name="start")
def fixture_start(agent: FakeAgent) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `peerload WORDS`; what was started does not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        streams: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL}
        started.append(subprocess.Popen(command_line(*words), env=environment(agent), **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def submitted(agent: FakeAgent) -> None:
    """A task runs, and the agent goes away at once."""

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        if len(agent.asked(control.ReadOutput)) == 1:
            reply.more(running={"node": "ws1", "attempt": 1})
            reply.hang_up()
        else:
            reply.ok(**DONE)

    agent.handlers["output"] = output
    agent.answer("submit", id="ws1/1", directory_here=True, placeable=None)
    agent.answer("attend", attended=True)


def test_ctrl_backslash_while_the_agent_is_away_detaches_when_it_is_back(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    submitted(agent)
    is_back = threading.Event()

    def attend(_request: control.Attend, reply: Reply) -> None:
        if is_back.is_set():
            reply.ok(attended=True)
        else:
            reply.hang_up()

    def output(request: control.ReadOutput, reply: Reply) -> None:
        if len(agent.asked(control.ReadOutput)) == 1:
            first(request, reply)

    first = agent.handlers["output"]
    agent.handlers |= {"attend": attend, "output": output}
    agent.answer("detach")
    process = start("run", "true")
    wait_until(lambda: agent.asked(control.Attend), what="it looks for the agent")
    process.send_signal(signal.SIGQUIT)
    tried = len(agent.asked(control.Attend))
    wait_until(
        lambda: len(agent.asked(control.Attend)) > tried + 1 or process.poll() is not None, what="it looks again"
    )
    is_back.set()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, len(agent.asked(control.Detach))) == (131, 1), errors


def test_an_agent_with_too_many_clients_is_asked_again(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    submitted(agent)
    agent.refused = {2}
    _, errors = (process := start("run", "true")).communicate(timeout=60)
    assert process.returncode == 0, errors


def test_a_signal_that_can_wait_costs_no_processor_time_while_the_agent_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[bool] = []

    def at_once(descriptor: int, _seconds: float) -> bool:
        waits.append(readable_within(descriptor, 0))
        return waits[-1]

    away = AgentUnavailable("away")
    monkeypatch.setattr(task_session, "readable_within", at_once)
    monkeypatch.setattr(task_session, "AgentConnection", Mock(side_effect=[away, away, Mock()]))
    with task_session.TaskSession(Mock(), lambda _piece: None) as session:
        os.kill(os.getpid(), signal.SIGWINCH)
        session._reconnect(away)
    assert waits == [True, False, False]


def test_ctrl_z_before_a_command_starts_does_not_stop_its_task(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    goes_on = threading.Event()

    def exec_(_request: control.Exec, reply: Reply) -> None:
        assert goes_on.wait(60)
        reply.more(stream=1, offset=0, data=b"", command="exec-1")
        reply.ok(exit_code=0, signal=0, reason="")

    agent.handlers["exec"] = exec_
    agent.answer("show", tasks=[{"id": "ws1/1", "state": "running", "node": "ws1"}])
    agent.answer("info", node="ws1")
    agent.answer("signal")
    process = start("exec", "ws1/1", "true")
    wait_until(lambda: agent.asked(control.Exec), what="it waits for the answer")
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: stands_still(process.pid), what="it has stopped")
    process.send_signal(signal.SIGCONT)
    goes_on.set()
    assert process.wait(60) == 0
    assert not agent.asked(control.SendSignal)
