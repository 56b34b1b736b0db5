from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import shlex
import signal
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import msgpack
import pytest

from peerload.cli.common import command, task_session
from peerload.client import connection
from peerload.model.errors import AgentSilent
from peerload.wire import control
from tests.each import each
from tests.support import wait_until
from tests.unit.cli.fake_agent import (  # noqa: F401 -- one is a fixture
    FakeAgent,
    Reply,
    command_line,
    environment,
    fixture_agent,
    peerload,
)
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TASK = {"id": "ws1/42", "state": "done"}
A = {"stream": 1, "offset": 0, "data": b"a"}
ENDED = {"id": "ws1/42", "state": "done", "exit_code": 0, "signal": 0, "node": "ws2", "reason": ""}


def submitted(agent: FakeAgent, **more: Any) -> None:
    agent.answer("submit", **({"id": "ws1/42", "members": None, "directory_here": True, "placeable": None} | more))
    agent.answer("why", summary="")


def produces(agent: FakeAgent, *pieces: dict[str, Any], **ended: Any) -> None:
    def output(_request: control.ReadOutput, reply: Reply) -> None:
        for piece in pieces:
            reply.more(**piece)
        reply.ok(**(ENDED | ended))

    agent.handlers["output"] = output


def on_a_terminal(agent: FakeAgent, *words: str, code: int = 0, **variables: str) -> str:
    """Run a verb on a terminal to its end → all that it has said there."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command_line(*words), env=environment(agent, **variables), stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    said = bytearray()
    with os.fdopen(leader, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # the end, of a terminal
        while piece := terminal.read(4096):
            said += piece
    assert process.wait(60) == code
    return said.decode()


# -- submit ----------------------------------------------------------------------------------------------------------


def test_submit_prints_only_the_id_in_a_pipe(agent: FakeAgent, tmp_path: Path) -> None:
    submitted(agent)
    done = subprocess.run(
        command_line(
            "submit", "-c", "2", "--mem", "1G", "-t", "1h", "-w", "ws2", "-x", "a,b", "-C", "big", "cmd", "-x", b"\xff"
        ),
        env=environment(agent, MY_TOKEN="s", KEEP="k") | {"HERE": os.fsdecode(b"\xfe")},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"ws1/42\n"
    assert done.stderr == b""
    [request] = agent.asked(control.Submit)
    spec = request.spec
    assert spec.argv == (b"cmd", b"-x", b"\xff")
    assert spec.directory == os.fsencode(tmp_path)
    assert spec.name == "cmd"
    assert (spec.request.cpus, spec.request.mem_bytes, spec.time_limit_s) == (2.0, 1 << 30, 3600.0)
    assert (spec.placement.node, spec.placement.exclude, spec.placement.labels) == ("ws2", ("a", "b"), ("big",))
    sent = msgpack.unpackb(spec.environment)
    assert sent[b"KEEP"] == b"k"
    assert sent[b"HERE"] == b"\xfe"
    assert b"MY_TOKEN" not in sent
    assert b"PEERLOAD_SOCKET" not in sent


def test_one_client_too_many_waits_for_room(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RECONNECT_EVERY_S", 0.0)
    submitted(agent)
    produces(agent, A)
    agent.refused = {1, 2, 4}
    assert peerload("submit", "true", agent=agent).stdout == b"ws1/42\n"
    assert peerload("run", "true", agent=agent).stdout == b"a"
    clock = itertools.count(1000.0, 20.0)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    agent.refused = set(range(100))
    refused = peerload("submit", "true", agent=agent)
    assert (refused.returncode, refused.stdout) == (125, b"")
    assert next(clock) >= 1000.0 + connection.RECONNECT_S_MAX


def test_submit_json_array_and_shell(agent: FakeAgent) -> None:
    submitted(agent, members=["ws1/42.1", "ws1/42.2"])
    done = peerload(
        "submit", "--array", "1-2", "--json", "-d", "-", "--migrations", "0", "--local", "-s", "a | b", agent=agent
    )
    assert json.loads(done.stdout) == {"v": 1, "id": "ws1/42", "members": ["ws1/42.1", "ws1/42.2"]}
    [request] = agent.asked(control.Submit)
    assert request.array == ((1, 2, 1),)
    assert request.spec.argv == (b"/bin/sh", b"-c", b"a | b")
    assert request.spec.directory == b"-"
    assert request.spec.placement.migrations_max == 0
    assert request.spec.placement.local


def test_submit_directory_is_made_absolute(agent: FakeAgent, tmp_path: Path) -> None:
    submitted(agent)
    subprocess.run(
        command_line("submit", "-d", "../x", "true"),
        env=environment(agent),
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert agent.asked(control.Submit)[0].spec.directory == os.fsencode(tmp_path.parent / "x")


@pytest.mark.rule("X5")
def test_submit_on_a_terminal_says_what_was_left_out(agent: FakeAgent) -> None:
    submitted(agent)
    text = on_a_terminal(agent, "submit", "true", MY_TOKEN="s")
    assert "--export MY_TOKEN" in text
    assert "ws1/42  true  queued" in text


def test_submit_on_a_terminal_says_why_it_waits(agent: FakeAgent) -> None:
    submitted(agent)
    agent.answer("why", summary="gpu1: 5 of 8 GPUs busy: lab3/2 (3), \x1b[2J (2)")
    text = on_a_terminal(agent, "submit", "--array", "3-5", "-G8", "--export", "none", "big.py")
    assert "big.py  waiting: gpu1: 5 of 8 GPUs busy: lab3/2 (3), \\x1b[2J (2)" in text
    assert "why:  peerload why ws1/42" in text
    assert [request.task for request in agent.asked(control.ExplainTask)] == ["ws1/42.3"]


def test_submit_to_an_agent_that_cannot_say_why(agent: FakeAgent) -> None:
    submitted(agent)
    agent.handlers["why"] = lambda _request, reply: reply.error("bad-message", "not a request this agent understands")
    assert "ws1/42  true  queued" in on_a_terminal(agent, "submit", "--export", "none", "true")


def test_submit_says_why_nothing_can_run_it(agent: FakeAgent) -> None:
    submitted(agent, placeable="no node has 8 free GPUs")
    done = peerload("submit", "-G8", "x", agent=agent)
    assert done.stdout == b"ws1/42\n"
    assert b"no node has 8 free GPUs\n" in done.stderr
    assert b"peerload why ws1/42" in done.stderr


def test_submit_says_that_the_directory_is_nowhere(agent: FakeAgent) -> None:
    submitted(agent, directory_here=False)
    agent.answer("wait", timed_out=True)
    agent.answer("show", tasks=[TASK | {"state": "queued", "reason": "ws2 has no such directory"}])
    done = peerload("submit", "-d", "/nowhere", "x", agent=agent)
    assert all(fact in done.stderr for fact in (b"/nowhere", b"ws2 has no such directory"))
    assert b"-d -" in done.stderr


def test_submit_is_silent_if_another_node_has_the_directory(agent: FakeAgent) -> None:
    submitted(agent, directory_here=False)
    agent.answer("wait", timed_out=True)
    agent.answer("show", tasks=[TASK | {"state": "leased"}])
    assert peerload("submit", "-d", "/nowhere", "x", agent=agent).stderr == b""


@each("verb", ["submit", "run"])
def test_the_nodes_that_decline_are_named_by_reason(agent: FakeAgent, verb: str) -> None:
    produces(agent)
    many = {f"n{number}": "no directory /x there" for number in range(6)}
    submitted(agent, declining=many | {"gpu1": "its policy runs no tasks of me"})
    told = peerload(verb, "x", agent=agent).stderr
    assert b"ws1/42 cannot run on n0, n1, n2, n3 and 2 more: no directory /x there\n  another directory:" in told
    assert b"-d -" in told
    assert told.endswith(b"ws1/42 cannot run on gpu1: its policy runs no tasks of me\n")
    submitted(agent, declining=many, declining_told=True)
    assert b"cannot run" not in peerload(verb, "x", agent=agent).stderr


def test_run_says_in_a_pipe_too_that_its_environment_is_being_built(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(agent)
    told = threading.Event()

    def why(_request: control.ExplainTask, reply: Reply) -> None:
        reply.ok(summary="", says="its environment is being built on n1", staging={"builds": True})
        told.set()

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        assert told.wait(60)
        reply.ok(**ENDED)

    agent.handlers |= {"why": why, "output": output}
    monkeypatch.setattr(task_session, "WHY_AFTER_S", 0.0)
    assert b"its environment is being built on n1\n" in peerload("run", "x", agent=agent).stderr


def test_a_task_for_a_node_that_has_left_is_refused_in_words(agent: FakeAgent) -> None:
    agent.handlers["submit"] = lambda _request, reply: reply.error(
        "never-runnable", "no node", "ws1: not ws2", "-d DIR"
    )
    agent.answer("nodes", nodes=[{"node": "ws1", "state": "alive"}, {"node": "ws2", "state": "left"}])
    told = peerload("submit", "-w", "ws2", "x", agent=agent).stderr.decode()
    assert "ws2" in told.splitlines()[0]
    assert "it has left; there are ws1\n" in told
    assert "-d DIR" not in told


def test_dry_run_submits_nothing(agent: FakeAgent) -> None:
    done = peerload("submit", "--dry-run", "--json", "-c", "2", "x", agent=agent, MY_TOKEN="s")
    shown = json.loads(done.stdout)
    assert shown["v"] == 1
    assert shown["argv"] == ["x"]
    assert shown["left_out"] == ["MY_TOKEN"]
    assert agent.requests == []
    assert peerload("run", "--dry-run", "x", agent=agent).returncode == 0
    assert agent.requests == []


def test_argv_too_large_is_refused(agent: FakeAgent) -> None:
    done = peerload("submit", "x", *["y" * 100_000] * 11, agent=agent)
    assert done.returncode == 125
    assert b"12 words of 1.05 MiB" in done.stderr


# -- run -------------------------------------------------------------------------------------------------------------


def test_run_passes_bytes_and_exit_code_through(agent: FakeAgent) -> None:
    submitted(agent)
    produces(
        agent,
        {"stream": 1, "offset": 0, "data": b"a\xff\x1b"},
        {"stream": 2, "offset": 0, "data": b"err"},
        {"stream": 1, "offset": 3, "data": b"b"},
        state="failed",
        exit_code=3,
    )
    done = peerload("run", "cmd", agent=agent)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"a\xff\x1bb", b"err")


@each(
    ("ended", "code", "says"),
    [
        ({"state": "failed", "exit_code": 137, "signal": 9}, 137, b""),
        ({"state": "failed", "exit_code": None, "signal": 11}, 139, b""),
        (
            {"state": "failed", "exit_code": 137, "out_of": "memory", "reason": "out of memory on x"},
            137,
            b"out of memory",
        ),
        ({"state": "failed", "exit_code": 127, "reason": "command not found: x"}, 127, b"command not found: x"),
        ({"state": "failed", "exit_code": 124, "reason": "time limit of 1 s"}, 124, b"time limit"),
        ({"state": "failed", "exit_code": None, "reason": "lost 5 times"}, 125, b"failed: lost 5 times"),
        ({"state": "cancelled", "exit_code": None, "reason": ""}, 125, b"cancelled"),
    ],
)
def test_run_exit_codes(agent: FakeAgent, ended: dict[str, Any], code: int, says: bytes) -> None:
    submitted(agent)
    produces(agent, **ended)
    done = peerload("run", "x", agent=agent)
    assert done.returncode == code
    assert says in done.stderr


def test_run_names_the_node_of_a_failure_on_a_terminal_alone(agent: FakeAgent) -> None:
    submitted(agent)
    agent.answer("input", offset=0, wanted=True, ended=False)
    produces(agent, state="failed", exit_code=3)
    assert "ws1/42 failed on ws2" in on_a_terminal(agent, "run", "x", code=3)
    assert peerload("run", "x", agent=agent).stderr == b""


def test_run_says_what_was_cut_out(agent: FakeAgent) -> None:
    submitted(agent)
    produces(agent, {"stream": 1, "offset": 0, "data": b"a"}, {"stream": 1, "offset": 1025, "data": b"b"})
    done = peerload("run", "x", agent=agent)
    assert done.stdout == b"ab"
    assert b"1 KiB" in done.stderr
    assert done.returncode == 125, "it is no success to who reads what run passes on"


@each("verb", [("run", "x"), ("run", "--json", "x"), ("logs", "42"), ("logs", "--err", "42")])
def test_what_is_missing_at_the_end_is_no_success(agent: FakeAgent, verb: tuple[str, ...]) -> None:
    submitted(agent)
    produces(agent, *([] if "--err" in verb else [A]), stdout_bytes=1, stderr_bytes=2048)
    done = peerload(*verb, agent=agent)
    assert done.returncode == 125
    assert b"2 KiB" in done.stderr


def test_map_names_the_task_whose_output_is_not_complete(agent: FakeAgent) -> None:
    submitted(agent, members=1)
    ended = {"id": "ws1/42.1", "state": "done", "exit_code": 0, "stdout_bytes": 70_000, "stderr_bytes": 0}

    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(**ended)
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    produces(agent, {"stream": 1, "offset": 0, "data": b"a"}, stdout_bytes=70_000)
    done = peerload("map", "true {}", ":::", "1", agent=agent)
    assert (done.returncode, done.stdout) == (125, b"a")
    assert b"ws1/42.1  68.4 KiB" in done.stderr


def test_map_waits_for_its_files_and_names_the_task_whose_file_is_not_complete(agent: FakeAgent) -> None:
    submitted(agent, members=1)

    def wait(request: control.Wait, reply: Reply) -> None:
        reply.more(id="ws1/42.1", state="done", exit_code=0, stdout_bytes=0, stderr_bytes=0)
        if request.files:
            reply.more(files={"id": "ws1/42.1", "state": state, "why": "No space left on device"})
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    state = "saved"
    assert peerload("map", "-o", "out-%a", "true {}", ":::", "1", agent=agent).returncode == 0
    state = "postponed"
    done = peerload("map", "-o", "out-%a", "true {}", ":::", "1", agent=agent)
    assert done.returncode == 125
    assert b"ws1/42.1  not saved: No space left on device" in done.stderr
    assert peerload("map", "true {}", ":::", "1", agent=agent).returncode == 0


def test_map_waits_for_its_files_again_when_the_agent_is_back(agent: FakeAgent) -> None:
    submitted(agent, members=1)
    agent.answer("info", node="ws1")

    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(id="ws1/42.1", state="done", exit_code=0, stdout_bytes=0, stderr_bytes=0)
        if len(agent.asked(control.Wait)) == 1:
            reply.hang_up()
            return
        reply.more(files={"id": "ws1/42.1", "state": "abandoned", "why": "Read-only file system"})
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    done = peerload("map", "-o", "out-%a", "true {}", ":::", "1", agent=agent)
    assert (done.returncode, b"Read-only file system" in done.stderr) == (125, True)


def test_attach_tells_of_a_file_that_is_not_complete(agent: FakeAgent) -> None:
    agent.answer("info", node="ws1", mode="user")
    agent.answer("show", tasks=[TASK | {"home": "ws1", "user": "", "output_file": "/full/x"}])
    agent.answer("input", ended=True)
    produces(agent, {"running": {"node": "ws2", "attempt": 1}})

    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(**ENDED)
        reply.more(files={"id": "ws1/42", "state": "incomplete", "why": "7 bytes are missing"})
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    done = peerload("attach", "42", agent=agent)
    assert (done.returncode, b"is not saved: 7 bytes are missing" in done.stderr) == (125, True)


def test_a_submission_without_an_answer_can_be_repeated(agent: FakeAgent) -> None:
    agent.handlers["submit"] = lambda _request, reply: reply.hang_up()
    done = peerload("submit", "true", agent=agent)
    assert (done.returncode, Says.QUEUED_UNKNOWN().encode() in done.stderr) == (125, True)
    (first,) = agent.asked(control.Submit)
    assert f"peerload submit --token {first.token} ".encode() in done.stderr
    submitted(agent)
    assert peerload("submit", "--token", first.token, "true", agent=agent).returncode == 0
    assert {request.token for request in agent.asked(control.Submit)} == {first.token}
    assert peerload("submit", "--token", "short", "true", agent=agent).returncode == 2


def test_of_an_agent_that_is_silent_it_is_not_known_whether_the_task_is_queued() -> None:
    client = Mock()
    client.call.side_effect = AgentSilent("the agent does not answer", hint="kill -CONT 7")
    with pytest.raises(AgentSilent, match=Says.QUEUED_UNKNOWN()) as caught:
        command.submit(client, {"directory": b"/"}, {}, token="0123456789")
    assert "--token 0123456789" in caught.value.hint
    assert "kill -CONT 7" in caught.value.hint


@each(
    ("when", "says"),
    [("files", "nothing was submitted"), ("submit", "it is not known"), ("why", "ws1/42 was submitted")],
)
def test_an_interrupted_submit_says_how_it_stands(agent: FakeAgent, tmp_path: Path, when: str, says: str) -> None:
    submitted(agent, placeable="no room", directory_here=False)
    agent.answer("show", tasks=[TASK | {"state": "queued"}])
    agent.answer("files", missing=[])
    over = threading.Event()

    def stall(_request: object, _reply: Reply) -> None:
        over.wait(60)

    agent.handlers["wait" if when == "why" else when] = stall
    awaited = {"files": control.Files, "submit": control.Submit, "why": control.Wait}[when]
    words = ["--snapshot"] if when == "files" else []
    (tmp_path / "a").write_text("b")
    process = subprocess.Popen(
        command_line("submit", *words, "true"),
        env=environment(agent),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _started.append(process)
    wait_until(lambda: agent.asked(awaited), what="it waits")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    over.set()
    assert (process.returncode, f"interrupted: {says}" in errors.decode()) == (130, True)


def test_map_goes_on_with_an_output_where_it_was_when_the_agent_is_back(agent: FakeAgent) -> None:
    submitted(agent, members=1)
    agent.answer("info", node="ws1")
    agent.answer("attend", attended=True)

    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(id="ws1/42.1", state="done", exit_code=0, stdout_bytes=6, stderr_bytes=0)
        reply.ok(timed_out=False)

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        if len(agent.asked(control.ReadOutput)) == 1:
            reply.more(stream=1, offset=0, data=b"abc")
            reply.hang_up()
            return
        reply.more(stream=1, offset=0, data=b"abcdef")
        reply.ok(**(ENDED | {"stdout_bytes": 6}))

    agent.handlers |= {"wait": wait, "output": output}
    done = peerload("map", "true {}", ":::", "1", agent=agent)
    assert (done.returncode, done.stdout) == (0, b"abcdef"), done.stderr


def test_run_looks_for_an_agent_that_goes_away_until_it_is_interrupted(agent: FakeAgent) -> None:
    submitted(agent)
    agent.handlers["output"] = lambda _request, reply: reply.hang_up()
    agent.answer("attend", attended=True)
    process = start_run(agent, "x")
    wait_until(lambda: len(agent.asked(control.Attend)) > 1, what="it comes back, and again")
    agent.handlers["attend"] = lambda _request, reply: reply.hang_up()
    asked = len(agent.asked(control.Attend))
    wait_until(lambda: len(agent.asked(control.Attend)) > asked + 1, what="the agent to be away at each attempt")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 125
    assert b"peerload attach ws1/42" in errors


@pytest.mark.parametrize("words", [("run", "x"), ("run", "--keep", "x")])
def test_signals_reach_a_task_that_waits_after_the_agent_is_back(agent: FakeAgent, words: tuple[str, ...]) -> None:
    """The agent says nothing of the task, which waits."""
    submitted(agent)
    agent.answer("info", node="ws1")
    agent.answer("attend", attended=True)
    over = threading.Event()

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        if len(agent.asked(control.ReadOutput)) == 1:
            reply.hang_up()
        elif over.wait(60):
            reply.ok(**(ENDED | {"state": "cancelled", "exit_code": None}))

    def cancel(_request: control.Cancel, reply: Reply) -> None:
        reply.ok(cancelled=["ws1/42"], already_ended=[])
        over.set()

    agent.handlers |= {"output": output, "cancel": cancel}
    agent.handlers["signal"] = lambda _request, reply: reply.error("bad-request", "it is not running")
    process = start(agent, *words)
    wait_until(lambda: len(agent.asked(control.ReadOutput)) == 2, what="it follows the task again")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert (process.returncode, over.is_set()) == (130, True)


def test_run_goes_on_where_it_was_when_the_agent_is_back(agent: FakeAgent) -> None:
    submitted(agent)
    agent.answer("attend", attended=True)
    agent.answer("input", offset=0, wanted=True, ended=False)

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        reply.more(running={"node": "ws2", "attempt": 1})
        reply.more(stream=1, offset=0, data=b"abc")
        if len(agent.asked(control.ReadOutput)) == 1:
            reply.hang_up()
            return
        reply.more(stream=1, offset=3, data=b"def")
        reply.ok(**ENDED)

    agent.handlers["output"] = output
    done = peerload("run", "x", agent=agent)
    assert (done.returncode, done.stdout) == (0, b"abcdef")
    assert agent.asked(control.Submit)[0].attended


def test_run_sends_its_input_piece_by_piece_and_again_what_was_not_answered(agent: FakeAgent) -> None:
    submitted(agent)
    agent.answer("attend", attended=True)
    kept = bytearray()
    over = threading.Event()

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        if over.wait(60):
            reply.ok(**ENDED)

    def input_(request: control.Input, reply: Reply) -> None:
        assert request.offset is not None
        offset = request.offset
        with taken:
            if not lost:
                lost.append(request.id)
                reply.hang_up()
                return
            assert taken.wait_for(lambda: len(kept) >= offset, 60)  # pieces are taken in their order
            if offset == len(kept):
                kept.extend(request.data)
                taken.notify_all()
            reply.ok(offset=len(kept), wanted=True, ended=request.ends)
        if request.ends:
            over.set()

    taken = threading.Condition()
    lost: list[int] = []
    agent.handlers |= {"output": output, "input": input_}
    done = subprocess.run(
        command_line("run", "cat"), env=environment(agent), input=b"data", capture_output=True, check=True, timeout=60
    )
    assert done.stderr == b""
    assert bytes(kept) == b"data"
    (submission,) = agent.asked(control.Submit)
    assert submission.spec.takes_input
    assert not submission.input_ends


def test_run_detaches_at_a_key(agent: FakeAgent) -> None:
    submitted(agent)
    over = threading.Event()

    def until_over(_request: Any, _reply: Reply) -> None:
        over.wait(60)

    agent.handlers["output"] = until_over
    agent.answer("detach")
    process = start_run(agent, "x")
    wait_until(lambda: agent.asked(control.ReadOutput), what="the run follows its task")
    process.send_signal(signal.SIGQUIT)
    _, errors = process.communicate(timeout=60)
    over.set()
    assert process.returncode == 131
    assert b"peerload attach ws1/42" in errors
    assert agent.asked(control.Detach)


_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """What `start` started does not outlive its test."""
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def start_run(agent: FakeAgent, *words: str, **settings: Any) -> subprocess.Popen[bytes]:
    return start(agent, "run", *words, **settings)


def start(agent: FakeAgent, *words: str, **settings: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command_line(*words),
        env=environment(agent),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **settings,
    )
    _started.append(process)
    return process


def test_first_interrupt_reaches_the_task_second_cancels(agent: FakeAgent) -> None:
    submitted(agent)
    over = threading.Event()

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        over.wait(60)
        reply.ok(**(ENDED | {"state": "cancelled", "exit_code": 130, "signal": 2}))

    def cancel(_request: control.Cancel, reply: Reply) -> None:
        reply.ok(cancelled=["ws1/42"], already_ended=[])
        over.set()

    agent.handlers |= {"output": output, "cancel": cancel, "signal": lambda _request, reply: reply.ok()}
    process = start_run(agent, "x")
    wait_until(lambda: agent.asked(control.ReadOutput), what="the run follows its task")
    before_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    wait_until(lambda: agent.asked(control.SendSignal), what="SIGINT reaches the task")
    assert agent.asked(control.SendSignal)[0].signal == signal.SIGINT
    assert agent.asked(control.Cancel) == []
    while True:
        heard, sent_s = len(agent.asked(control.SendSignal)), time.monotonic()
        process.send_signal(signal.SIGINT)
        wait_until(
            lambda heard=heard: agent.asked(control.Cancel) or len(agent.asked(control.SendSignal)) > heard,  # type: ignore[misc]
            what="the second one to be heard",
        )
        if agent.asked(control.Cancel):
            break
        # one that comes too late, when the machine stood still, is a first one again
        assert time.monotonic() - before_s > 2.0, "the second within 2 s cancels"
        before_s = sent_s
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"cancelling ws1/42" in errors


def test_interrupt_of_a_task_that_waits_cancels_it(agent: FakeAgent) -> None:
    submitted(agent)
    over = threading.Event()

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        over.wait(60)
        reply.ok(**(ENDED | {"state": "cancelled", "exit_code": None}))

    def cancel(_request: control.Cancel, reply: Reply) -> None:
        reply.ok(cancelled=["ws1/42"], already_ended=[])
        over.set()

    agent.handlers |= {"output": output, "cancel": cancel}
    agent.handlers["signal"] = lambda _request, reply: reply.error("bad-request", "it is not running")
    process = start_run(agent, "x")
    wait_until(lambda: agent.asked(control.ReadOutput), what="the run follows its task")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("words", "signals"),
    [(("run", "yes"), [signal.SIGPIPE]), (("run", "--keep", "yes"), []), (("attach", "ws1/42"), [])],
)
def test_a_reader_that_goes_ends_only_a_task_that_ends_with_the_command(
    agent: FakeAgent, words: tuple[str, ...], signals: list[int]
) -> None:
    submitted(agent)
    agent.answer("info", node="ws1", mode="user")
    agent.answer("show", tasks=[TASK | {"home": "ws1", "user": ""}])
    over = threading.Event()

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        offset = 0
        while not over.is_set():
            reply.more(stream=1, offset=offset, data=b"y\n" * 4096)
            offset += 8192

    def cancel(_request: control.Cancel, reply: Reply) -> None:
        over.set()
        reply.ok(cancelled=["ws1/42"], already_ended=[])

    agent.handlers |= {"output": output, "cancel": cancel}
    process = start(agent, *words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert [request.signal for request in agent.asked(control.Cancel)] == signals


def test_run_json_is_all_json(agent: FakeAgent) -> None:
    submitted(agent)
    produces(agent, {"stream": 1, "offset": 0, "data": b"hi\xff"}, exit_code=0)
    done = peerload("run", "--json", "x", agent=agent)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == {"v": 1, "stream": 1, "offset": 0, "data": "hi\\xff"}
    assert lines[1]["id"] == "ws1/42"
    assert lines[1]["exit_code"] == 0


def test_submit_whose_answer_is_lost_says_so(agent: FakeAgent) -> None:
    agent.handlers["submit"] = lambda _request, reply: reply.hang_up()
    done = peerload("submit", "x", agent=agent)
    assert done.returncode == 125
    assert done.stdout == b""
    assert done.stderr


def test_closed_standard_streams_do_no_harm(agent: FakeAgent) -> None:
    submitted(agent)
    produces(agent, {"stream": 2, "offset": 0, "data": b"x" * 100}, exit_code=7)
    line = " ".join(map(shlex.quote, map(str, command_line("run", "x"))))
    done = subprocess.run(["sh", "-c", f"{line} <&- >&- 2>&-"], env=environment(agent), check=False)
    assert done.returncode == 7
    asked = [type(request) for request in agent.requests]
    assert [kind for kind in asked if kind is not control.ExplainTask] == [
        control.Submit,
        control.ReadOutput,
    ]  # Why: if it took long
