"""`events -f`, `wait` and `logs -f` beside a fake agent that goes away under them: they go on where they were."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from peerload.wire import control
from tests.unit.cli.fake_agent import fixture_agent, goes_away_once, peerload

if TYPE_CHECKING:
    import pytest

    from tests.unit.cli.fake_agent import FakeAgent, Reply

__all__ = ["fixture_agent"]

TIMEOUT_S = 1000.0


def ended(reply: Reply, *numbers: int) -> None:
    for number in numbers:
        reply.more(id=f"ws1/{number}", state="done", exit_code=0, signal=None, node="ws1", reason="")


def test_wait_goes_on_after_a_restart_of_the_agent(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1e9, 10.0)  # beyond the clock of the reconnection
    monkeypatch.setattr("peerload.cli.verbs.wait.time", SimpleNamespace(monotonic=lambda: next(clock)))

    def rest(reply: Reply) -> None:
        ended(reply, 1, 2)
        reply.ok(timed_out=False)

    agent.handlers["wait"] = goes_away_once(agent, control.Wait, lambda reply: ended(reply, 1), rest)
    agent.refused = {2}
    done = peerload("wait", "1", "2", "--timeout", f"{TIMEOUT_S:g}s", agent=agent)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [b"ws1/1", b"ws1/2"]
    first, second = agent.asked(control.Wait)
    assert (first.timeout_s, second.timeout_s) == (
        TIMEOUT_S - 10.0,
        TIMEOUT_S - 30.0,
    )  # one connection is refused between


def test_a_wait_whose_time_passes_while_the_agent_is_away_has_timed_out(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("peerload.cli.verbs.wait.time", clock)
    monkeypatch.setattr("peerload.client.connection.time", clock)

    def stay_away(_request: control.Wait, reply: Reply) -> None:
        agent.remove()
        now_s[0] += 40.0
        reply.hang_up()

    agent.handlers["wait"] = stay_away
    done = peerload("wait", "1", "--timeout", "30s", agent=agent)
    assert done.returncode == 124
    assert b"30 s, and the agent is away: " in done.stderr


def test_events_go_on_with_the_next_number(agent: FakeAgent) -> None:
    def event(number: int) -> dict[str, Any]:
        return {"number": number, "what": "agent", "state": "ready"}

    def begin(reply: Reply) -> None:
        reply.more(events=[], begins=6)
        reply.more(events=[event(7), event(9)])

    def rest(reply: Reply) -> None:
        reply.more(events=[], begins=9)
        reply.more(events=[event(12)])
        reply.ok(events=[])

    agent.handlers["events"] = goes_away_once(agent, control.Events, begin, rest)
    done = peerload("events", "-f", "--limit", "2", "--json", agent=agent)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["number"] for line in done.stdout.splitlines()] == [7, 9, 12]
    assert [request.after for request in agent.asked(control.Events)] == [0, 9]


def test_events_of_a_restart_are_shown_although_there_was_none_before(agent: FakeAgent) -> None:
    agent.handlers["events"] = goes_away_once(
        agent, control.Events, lambda reply: reply.more(events=[], begins=6), lambda reply: reply.ok(events=[])
    )
    assert peerload("events", "-f", "--limit", "0", agent=agent).returncode == 0
    assert [(request.after, request.limit > 0) for request in agent.asked(control.Events)] == [(0, False), (6, True)]


def test_logs_show_each_byte_once_and_a_new_attempt_from_its_beginning(agent: FakeAgent) -> None:
    def begin(reply: Reply) -> None:
        reply.more(stream=1, offset=4, data=b"", attempt=1)
        reply.more(stream=1, offset=4, data=b"ef", attempt=1)

    def rest(reply: Reply) -> None:
        reply.more(stream=1, offset=0, data=b"abcdefgh\n", attempt=1)
        reply.more(stream=1, offset=0, data=b"again\n", attempt=2)
        reply.ok(id="ws1/1", state="done", stdout_bytes=6, stderr_bytes=0)

    agent.handlers["output"] = goes_away_once(agent, control.ReadOutput, begin, rest)
    done = peerload("logs", "-f", "--tail", "1", "ws1/1", agent=agent)
    assert (done.returncode, done.stdout) == (0, b"efgh\nagain\n"), done.stderr
    assert [request.tail_lines for request in agent.asked(control.ReadOutput)] == [1, None]


def test_the_last_task_is_the_same_one_after_a_restart(agent: FakeAgent) -> None:
    agent.answer("select", selected=["ws1/5"], count=1, states={})
    agent.handlers["wait"] = goes_away_once(
        agent, control.Wait, lambda _reply: None, lambda reply: reply.ok(timed_out=False)
    )
    assert peerload("wait", "@", agent=agent).returncode == 0
    assert [request.tasks for request in agent.asked(control.Wait)] == [("ws1/5",), ("ws1/5",)]
