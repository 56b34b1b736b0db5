"""`map` as a process beside a fake agent: signals, its log, what happens where outputs cannot be printed or the agent goes away."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.map.run import HEADER
from peerload.wire import control
from tests.support import wait_until
from tests.unit.cli.fake_agent import command_line, environment, fixture_agent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.unit.cli.fake_agent import FakeAgent, Reply

__all__ = ["fixture_agent"]


@pytest.fixture(name="start")
def fixture_start(agent: FakeAgent) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `peerload map WORDS`, after the words of ``within``; what was started does not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, within: Sequence[str] = (), **settings: Any) -> subprocess.Popen[bytes]:
        streams: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL}
        streams |= settings
        started.append(subprocess.Popen([*within, *command_line("map", *words)], env=environment(agent), **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def submitted(agent: FakeAgent) -> None:
    """Each submission is an array of its own: ws1/1, ws1/2 …"""

    def submit(request: control.Submit, reply: Reply) -> None:
        number = len(agent.asked(control.Submit))
        reply.ok(id=f"ws1/{number}", members=len(request.each), directory_here=True, placeable=None)

    agent.handlers["submit"] = submit
    agent.answer("info", node="ws1")
    agent.answer("attend", attended=True)


def done(task: str, output: bytes = b"out\n") -> dict[str, Any]:
    sizes = {"stdout_bytes": len(output), "stderr_bytes": 0}
    return {"id": task, "state": "done", "exit_code": 0, "signal": None, "stdout": output, "stderr": b"", **sizes}


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("-k",), ("--json",)])
def test_a_task_whose_output_cannot_be_printed_is_not_in_the_log(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, words: tuple[str, ...]
) -> None:
    submitted(agent)

    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(**done("ws1/1.1"))
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    log = tmp_path / "log"
    with Path("/dev/full").open("wb") as full:
        assert start(*words, "--joblog", str(log), "true {}", ":::", "1", stdout=full).wait(60)
    assert log.read_bytes() == HEADER


def test_a_task_whose_output_waits_for_its_turn_is_not_in_the_log(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The agent goes away for good while the output of the second task waits for that of the first."""
    submitted(agent)

    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(**done("ws1/1.2"))
        agent.handlers["info"] = lambda _request, reply: reply.hang_up()
        reply.hang_up()

    agent.handlers["wait"] = wait
    log = tmp_path / "log"
    process = start("-k", "--joblog", str(log), "true {}", ":::", "1", "2")
    wait_until(lambda: agent.asked(control.Info), what="it looks for the agent")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 125
    assert log.read_bytes() == HEADER


def test_a_task_whose_output_cannot_be_fetched_is_not_in_the_log(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    submitted(agent)
    agent.handlers |= {"wait": fetched, "output": lambda _request, reply: reply.error("bad-request", "no such output")}
    log = tmp_path / "log"
    assert start("--joblog", str(log), "true {}", ":::", "1").wait(60) == 125
    assert log.read_bytes() == HEADER


# -- an agent that goes away -------------------------------------------------------------------------------------------


def test_inputs_that_come_after_a_restart_are_run(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """The agent goes away while no task is left and more inputs may come."""
    submitted(agent)

    def wait(request: control.Wait, reply: Reply) -> None:
        (array,) = request.tasks
        reply.more(**done(f"{array}.1", f"{array}\n".encode()))
        reply.ok(timed_out=False)
        if array == "ws1/1":
            reply.hang_up()

    agent.handlers["wait"] = wait
    process = start("true {}", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"1\n")
    process.stdin.flush()
    wait_until(lambda: agent.asked(control.Info) or process.poll() is not None, what="it looks for the agent")
    out, errors = process.communicate(b"2\n", timeout=60)
    assert (process.returncode, out) == (0, b"ws1/1\nws1/2\n"), errors


# -- an agent that takes no more now -----------------------------------------------------------------------------------


def test_what_a_quota_refuses_is_tried_again_in_smaller_parts(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """All are refused at once, as by a quota that is smaller than the map; nothing of the map runs then."""
    submitted(agent)
    submit = agent.handlers["submit"]
    sizes: dict[str, int] = {}

    def within_quota(request: control.Submit, reply: Reply) -> None:
        if len(request.each) > 2:
            reply.error("slow-down", "too many tasks of one user")
            return
        sizes[f"ws1/{len(agent.asked(control.Submit))}"] = len(request.each)
        submit(request, reply)

    def wait(request: control.Wait, reply: Reply) -> None:
        (array,) = request.tasks
        for member in range(1, sizes[array] + 1):
            reply.more(**done(f"{array}.{member}"))
        reply.ok(timed_out=False)

    agent.handlers |= {"submit": within_quota, "wait": wait}
    out, errors = (process := start("true {}", ":::", "1", "2", "3")).communicate(timeout=60)
    assert (process.returncode, out) == (0, b"out\n" * 3), errors
    assert sorted(sizes.values()) == [1, 2]


def fetched(_request: control.Wait, reply: Reply) -> None:
    """The end of a task whose output is not told with it."""
    reply.more(id="ws1/1.1", state="done", exit_code=0, signal=None, stdout_bytes=4, stderr_bytes=0)
    reply.ok(timed_out=False)


def test_an_output_is_fetched_when_the_agent_has_room_for_one_more_client(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    submitted(agent)

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        reply.more(stream=1, offset=0, data=b"out\n")
        reply.ok(id="ws1/1.1", state="done", stdout_bytes=4, stderr_bytes=0)

    agent.handlers |= {"wait": fetched, "output": output}
    agent.refused = {3}  # after those that look for the agent and submit
    out, errors = (process := start("true {}", ":::", "1")).communicate(timeout=60)
    assert (process.returncode, out) == (0, b"out\n"), errors


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--halt", "now,success=1"), ("--halt", "now,done=1")])
def test_incomplete_output_is_no_success(
    agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]], words: tuple[str, ...]
) -> None:
    submitted(agent)

    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(**done("ws1/1.1"), missing_bytes=7)
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    agent.answer("cancel", cancelled=[], already_ended=[])
    process = start(*words, "true {}", ":::", "1")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, b"ws1/1.1" in errors) == (125, True)


# -- signals -----------------------------------------------------------------------------------------------------------


def test_ignored_signals_stay_ignored(agent: FakeAgent, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """As under nohup, and in the background of a script."""
    submitted(agent)
    signalled = threading.Event()

    def wait(_request: control.Wait, reply: Reply) -> None:
        assert signalled.wait(60)
        reply.more(**done("ws1/1.1"))
        reply.ok(timed_out=False)

    def cancel(_request: control.Cancel, reply: Reply) -> None:
        reply.error("bad-request", "it must not be cancelled")

    agent.handlers |= {"wait": wait, "cancel": cancel}
    process = start("true {}", ":::", "1", within=["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"])
    wait_until(lambda: agent.asked(control.Wait), what="it waits for its task")
    for number in (signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
    signalled.set()
    assert process.wait(60) == 0
    assert not agent.asked(control.Cancel)
