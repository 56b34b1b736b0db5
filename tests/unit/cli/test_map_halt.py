"""`map --halt` where tasks were sent to the agent, and it has not answered yet."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from peerload.wire import control
from tests.unit.cli.fake_agent import fixture_agent, peerload

if TYPE_CHECKING:
    from tests.unit.cli.fake_agent import FakeAgent, Reply

__all__ = ["fixture_agent"]


@pytest.mark.parametrize("when", ["now", "soon"])
def test_what_is_submitted_while_it_halts_is_stopped_too(agent: FakeAgent, when: str) -> None:
    """The second batch is answered only when the failure that halts it all has been told."""
    told = threading.Event()
    cancelled = threading.Event()
    names = iter(("n1/1", "n1/2"))
    sent = threading.Event()

    def ends(reply: Reply, task: str, state: str, exit_code: int | None) -> None:
        body: dict[str, Any] = {"id": task, "state": state, "exit_code": exit_code, "signal": None, "node": "n1"}
        reply.more(**body, stdout=b"", stderr=b"")

    def submit(request: control.Submit, reply: Reply) -> None:
        name = next(names)
        if name == "n1/2":
            sent.set()
            assert told.wait(60)
        reply.ok(id=name, members=len(request.each), directory_here=True, placeable=None)

    def wait(request: control.Wait, reply: Reply) -> None:
        if request.tasks == ("n1/1",):
            ends(reply, "n1/1.1", "done", 0)
            assert sent.wait(60)
            ends(reply, "n1/1.2", "failed", 7)
            told.set()
        else:
            assert cancelled.wait(60)
            ends(reply, "n1/2.1", "cancelled", None)
        reply.ok(timed_out=False)

    def cancel(request: control.Cancel, reply: Reply) -> None:
        assert any(task.startswith("n1/2") for task in request.tasks)
        reply.ok(cancelled=list(request.tasks))
        cancelled.set()

    def tasks(request: control.TasksRequest, reply: Reply) -> None:
        held = [*(f"n1/0.{number}" for number in range(5000)), "n1/2.1"]  # most of them older ones
        asked = [task for task in held if not request.tasks or task.partition(".")[0] in request.tasks]
        reply.ok(tasks=[{"id": task, "state": "held"} for task in asked[: request.limit]])

    agent.handlers |= {"submit": submit, "wait": wait, "cancel": cancel, "tasks": tasks}
    agent.answer("hold", held=["n1/2.1"])
    agent.answer("info", node="n1")
    done = peerload("map", "--halt", f"{when},fail=1", "-j2", "true {}", ":::", "1", "2", "3", agent=agent)
    assert b"Traceback" not in done.stderr
    assert cancelled.is_set(), done.stderr


def test_what_is_refused_while_it_halts_is_not_wanted_any_more(agent: FakeAgent) -> None:
    """A quota refuses the third task only when the failure that halts it all has been told."""
    sent, told = threading.Event(), threading.Event()

    def submit(request: control.Submit, reply: Reply) -> None:
        if len(agent.asked(control.Submit)) == 1:
            reply.ok(id="n1/1", members=len(request.each), directory_here=True, placeable=None)
        else:
            sent.set()
            assert told.wait(60)
            reply.error("slow-down", "too many tasks of one user")

    def wait(_request: control.Wait, reply: Reply) -> None:
        ended: dict[str, Any] = {"signal": None, "node": "n1", "stdout": b"", "stderr": b""}
        reply.more(id="n1/1.1", state="done", exit_code=0, **ended)
        assert sent.wait(60)
        reply.more(id="n1/1.2", state="failed", exit_code=7, **ended)
        told.set()
        reply.ok(timed_out=False)

    agent.handlers |= {"submit": submit, "wait": wait}
    agent.answer("cancel", cancelled=[], already_ended=[])
    agent.answer("info", node="n1")
    done = peerload("map", "--halt", "now,fail=1", "-j2", "true {}", ":::", "1", "2", "3", agent=agent)
    assert done.returncode == 7, done.stderr


def test_it_halts_also_while_the_agent_has_too_many_clients(agent: FakeAgent) -> None:
    """The connection over which tasks are held is refused at first."""

    def submit(request: control.Submit, reply: Reply) -> None:
        reply.ok(id="n1/1", members=len(request.each), directory_here=True, placeable=None)

    def wait(_request: control.Wait, reply: Reply) -> None:
        ended: dict[str, Any] = {"signal": None, "node": "n1", "stdout": b"", "stderr": b""}
        reply.more(id="n1/1.1", state="failed", exit_code=7, **ended)
        assert cancelled.wait(60)
        reply.more(id="n1/1.2", state="cancelled", exit_code=None, **ended)
        reply.ok(timed_out=False)

    def cancel(request: control.Cancel, reply: Reply) -> None:
        reply.ok(cancelled=list(request.tasks))
        cancelled.set()

    cancelled = threading.Event()
    agent.refused = {3}  # after those that look for the agent and submit
    agent.handlers |= {"submit": submit, "wait": wait, "cancel": cancel}
    agent.answer("tasks", tasks=[{"id": "n1/1.2", "state": "held"}])
    agent.answer("hold", held=["n1/1.2"])
    agent.answer("info", node="n1")
    done = peerload("map", "--halt", "soon,fail=1", "true {}", ":::", "1", "2", agent=agent)
    assert done.returncode == 7, done.stderr
