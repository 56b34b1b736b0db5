from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from peerload.client import connection as client_module
from peerload.client import submission
from peerload.client.connection import AgentConnection, default_socket_path, user_socket_path
from peerload.client.executor import Executor
from peerload.model.errors import (
    AgentGone,
    AgentSilent,
    AgentUnavailable,
    BadRequest,
    NeverRunnable,
    NoSuchTask,
    PeerloadError,
)
from peerload.wire import control, frame
from tests import frames
from tests.each import each
from tests.support import PATIENCE_S
from tests.unit.cli.fake_agent import FakeAgent, Reply, fixture_agent  # noqa: F401 -- a fixture
from tests.wording import Says

if TYPE_CHECKING:
    from pathlib import Path


def test_call_returns_the_reply(agent: FakeAgent) -> None:
    agent.answer("info", node="ws1", pid=7)
    with AgentConnection(agent.path) as client:
        assert client.call("info") == {"node": "ws1", "pid": 7}
        assert client.call("info")["pid"] == 7
    assert [request.id for request in agent.requests] == [1, 2]


def test_an_executor_warns_of_the_nodes_that_will_run_none_of_its_calls(agent: FakeAgent) -> None:
    agent.answer("info", node="ws1")
    agent.answer("submit", id="ws1/1", declining={"ws2": "no directory /x there"})
    agent.handlers["wait"] = lambda _request, reply: reply.error("bad-request", "no such task")
    with Executor(agent.path) as executor, pytest.warns(UserWarning, match="ws2: no directory /x there"):
        executor.submit(pow, 2, 3).exception()


@pytest.mark.parametrize(
    ("failures", "ok"), [([AgentGone("x"), AgentUnavailable("x")], True), ([AgentUnavailable("x")], False)]
)
def test_an_executor_sends_its_files_again_if_the_agent_restarts_meanwhile(
    monkeypatch: pytest.MonkeyPatch, failures: list[AgentUnavailable], ok: bool
) -> None:
    left = list(failures)

    def bring(_path: str) -> None:
        if left:
            raise left.pop(0)

    monkeypatch.setattr(submission, "sender", lambda *_: bring)
    monkeypatch.setattr(client_module, "RECONNECT_EVERY_S", 0.0)
    with contextlib.nullcontext() if ok else pytest.raises(AgentUnavailable):
        Executor("/nowhere", in_=["x"]).shutdown()
    assert not left


def test_stream_yields_parts_and_keeps_the_last(agent: FakeAgent) -> None:
    def wait(request: control.Wait, reply: Reply) -> None:
        for task in request.tasks:
            reply.more(id=task)
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    with AgentConnection(agent.path) as client:
        assert [part["id"] for part in client.stream("wait", tasks=["1", "2"])] == ["1", "2"]
        assert client.last == {"timed_out": False}


@each(
    ("code", "kind"),
    [("no-such-task", NoSuchTask), ("never-runnable", NeverRunnable), ("bad-request", BadRequest), ("new", BadRequest)],
)
def test_refusals_keep_what_why_hint_and_code(agent: FakeAgent, code: str, kind: type[PeerloadError]) -> None:
    agent.handlers["show"] = lambda _request, reply: reply.error(code, "no task 9", "never seen", "peerload ls")
    with AgentConnection(agent.path) as client, pytest.raises(kind) as caught:
        client.call("show", tasks=["9"])
    assert (caught.value.what, caught.value.why, caught.value.hint) == ("no task 9", "never seen", "peerload ls")
    assert caught.value.code == code


def test_malformed_request_is_refused_not_fatal(agent: FakeAgent) -> None:
    agent.answer("info", node="ws1")
    with AgentConnection(agent.path) as client:
        with pytest.raises(BadRequest):
            client.call("show", tasks=[])
        with pytest.raises(BadRequest, match="UTF-8"):
            client.call("show", tasks=["\udcff"])
        with pytest.raises(BadRequest, match="too large"):
            client.call("show", tasks=["x" * (5 << 20)])
        assert client.call("info") == {"node": "ws1"}


def test_no_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    with pytest.raises(AgentUnavailable) as caught:
        AgentConnection(path)
    assert str(path) in str(caught.value)
    assert all(command in caught.value.hint for command in ("peerload up", "peerload doctor"))


def test_socket_path_too_long() -> None:
    with pytest.raises(AgentUnavailable, match="107"):
        AgentConnection("/tmp/" + "x" * 120)


def test_agent_gone(agent: FakeAgent) -> None:
    agent.handlers["info"] = lambda _request, reply: reply.hang_up()
    with AgentConnection(agent.path) as client, pytest.raises(AgentUnavailable):
        client.call("info")


def test_agent_that_never_answers(agent: FakeAgent) -> None:
    agent.handlers["info"] = lambda _request, _reply: None
    says = rf"the agent \(pid {os.getpid()}\) does not answer: nothing from it for 0.05 s"
    with AgentConnection(agent.path, timeout_s=0.05) as client, pytest.raises(AgentSilent, match=says) as caught:
        client.call("info")
    assert f"kill -CONT {os.getpid()}" in caught.value.hint


def listened_at_by_one_that_is_gone(path: Path) -> socket.socket:
    """A socket as a service manager holds it after an agent has ended."""
    held = socket.socket(socket.AF_UNIX)
    held.bind(str(path))
    listen = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).listen()"
    words = [sys.executable, "-c", listen, str(held.fileno())]
    subprocess.run(words, pass_fds=[held.fileno()], check=True)
    return held


def test_one_that_does_not_come_up_is_looked_for_at_the_service_manager(tmp_path: Path) -> None:
    """Doctor does not wait for it, and no process is named that is gone."""
    path = tmp_path / "agent.sock"
    with (
        listened_at_by_one_that_is_gone(path),
        AgentConnection(str(path), timeout_s=0.05, awaits_start=False) as client,
        pytest.raises(AgentSilent) as caught,
    ):
        client.call("info")
    assert "pid" not in str(caught.value)
    assert "systemctl status peerload" in caught.value.hint


def test_one_that_is_being_started_is_waited_for(tmp_path: Path) -> None:
    """Who has listened there is gone, and the socket is not: whoever holds it starts another."""
    path = tmp_path / "agent.sock"
    with listened_at_by_one_that_is_gone(path) as held, AgentConnection(str(path), timeout_s=0.05) as client:

        def answer() -> None:
            connection, _ = held.accept()
            with connection:
                frames.read(connection)  # what was asked first
                frames.read(connection)  # who it is: the client is out of patience by then
                connection.sendall(frame.pack({"id": 1, "ok": {"node": "ws1"}}))

        thread = threading.Thread(target=answer)
        thread.start()
        assert client.call("info") == {"node": "ws1"}
        thread.join()


class Hasty:
    """For a client, half of its patience is over at once, and the other half, when it has asked again, takes a minute: an
    agent that answers is heard, however busy this machine is."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._waits_ms = [0.0]

    def register(self, descriptor: socket.socket, events: int) -> None:
        self._poll.register(descriptor, events)

    def poll(self, _timeout_ms: float) -> list[tuple[int, int]]:
        return self._poll.poll(self._waits_ms.pop() if self._waits_ms else PATIENCE_S * 1000)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "select", SimpleNamespace(poll=Hasty, POLLIN=select.POLLIN))


@pytest.mark.usefixtures("hasty")
def test_a_request_may_take_longer_while_the_agent_answers_others(agent: FakeAgent) -> None:
    alive = threading.Event()

    def info(_request: control.Info, reply: Reply) -> None:
        reply.ok(node="ws1")
        if len(agent.asked(control.Info)) > 2:
            alive.set()

    def show(_request: control.Show, reply: Reply) -> None:
        assert alive.wait(60)
        reply.ok(tasks=[])

    agent.handlers |= {"info": info, "show": show}
    with AgentConnection(agent.path, timeout_s=0.5) as client:
        assert client.call("show", tasks=["1"]) == {"tasks": []}
    assert len(agent.asked(control.Info)) > 2


def test_who_follows_waits_for_nobody_who_never_answered(agent: FakeAgent) -> None:
    agent.handlers["wait"] = lambda _request, _reply: None
    agent.handlers["info"] = lambda _request, _reply: None
    with AgentConnection(agent.path, timeout_s=0.05) as client, pytest.raises(AgentSilent):
        next(client.stream("wait", tasks=["1"]))  # an agent that was stopped before


@pytest.mark.usefixtures("hasty")
def test_who_follows_waits_on_once_it_was_answered(agent: FakeAgent) -> None:
    asked = threading.Event()

    def info(_request: control.Info, reply: Reply) -> None:
        reply.ok(node="ws1")
        asked.set()

    def wait(_request: control.Wait, reply: Reply) -> None:
        assert asked.wait(60)
        assert not threading.Event().wait(0.4)  # it is stopped for longer than any patience, and goes on
        reply.ok(timed_out=False)

    agent.handlers |= {"info": info, "wait": wait}
    with AgentConnection(agent.path, timeout_s=0.1) as client:
        assert list(client.stream("wait", tasks=["1"])) == []
        assert client.last == {"timed_out": False}


def test_an_agent_that_has_answered_may_stop_reading_for_a_while(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    body = "x" * (2 << 20)  # more than the socket holds
    found: list[object] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                frames.read(connection)
                connection.sendall(frame.pack({"id": 1, "ok": {}}))
                assert not threading.Event().wait(0.4)  # it is stopped for longer than any patience, and goes on
                found.append(frames.read(connection))

        thread = threading.Thread(target=serve)
        thread.start()
        with AgentConnection(path, timeout_s=0.1) as client:
            client.call("info")
            request = client.send("input", data=body)
            thread.join()
    assert found == [{"id": request, "verb": "input", "data": body}]


def test_nobody_is_let_in(tmp_path: Path) -> None:
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        listener.listen(0)
        stack.enter_context(AgentConnection(path, timeout_s=0.05))
        with pytest.raises(AgentSilent, match=Says.NO_REPLY()):
            AgentConnection(path, timeout_s=0.05)


def test_answers_to_other_requests_are_skipped(agent: FakeAgent) -> None:
    agent.answer("info", node="ws1")
    agent.answer("stats", counters={})
    with AgentConnection(agent.path) as client:
        client.send("stats")
        assert client.call("info") == {"node": "ws1"}


def test_where_the_socket_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client_module, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    monkeypatch.delenv("PEERLOAD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    own = tmp_path / "peerload" / "agent.sock"
    assert default_socket_path() == user_socket_path() == str(own)
    (tmp_path / "system.sock").touch()
    assert default_socket_path() == str(tmp_path / "system.sock")
    own.parent.mkdir()
    own.touch()
    assert default_socket_path() == str(own)
    settings = tmp_path / "peerload" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for text, found in (('socket = "/named"', "/named"), ("socket = 7", str(own)), ("socket = [", str(own))):
        settings.write_text(text, encoding="utf-8")
        assert default_socket_path() == found
    settings.write_text('socket = "/named"', encoding="utf-8")
    monkeypatch.setenv("PEERLOAD_SOCKET", "/elsewhere")
    assert default_socket_path() == "/elsewhere"


def test_a_private_directory_of_others_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    modes: dict[str, int | None] = {}
    monkeypatch.setattr(client_module, "_mode_if_ours", modes.get)
    monkeypatch.setattr(os.path, "lexists", lambda _path: True)
    private = f"/tmp/peerload-{os.getuid()}"
    modes[private] = 0o700
    assert user_socket_path() == f"{private}/agent.sock"
    for mode in (None, 0o755, 0o770):
        modes[private] = mode
        with pytest.raises(PeerloadError, match=Says.UNTRUSTED()):
            user_socket_path()


def test_imports_nothing_slow() -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import peerload.client.connection, peerload.cli.verbs.submit, peerload.cli.verbs.run;"
        "slow = {'msgspec', 'asyncio', 'json', 'dataclasses', 'tomllib', 'subprocess', 'importlib.metadata',"
        " 'pathlib', 'logging', 'ssl', 'cryptography'};"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_agent_that_had_to_end_has_left_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    (tmp_path / "agent.sock.why").write_text("another agent is called ws1\npeerload up --node NAME\n", encoding="utf-8")
    with pytest.raises(AgentUnavailable) as refused:
        AgentConnection(str(path))
    assert Says.NAME_TAKEN("ws1") in str(refused.value)
    assert "peerload up --node" in refused.value.hint
    (tmp_path / "agent.sock.why").unlink()
    (tmp_path / "agent.sock.why").symlink_to("/etc/passwd")
    with pytest.raises(AgentUnavailable, match=rf"^{Says.NO_AGENT()} \(no socket at"):
        AgentConnection(str(path))
