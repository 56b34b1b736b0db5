"""An agent that answers as a test says: a real Unix socket, real frames, requests checked as the real one does."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.model.errors import BadMessage
from peerload.wire import control, frame
from tests import frames
from tests.in_process import cli_in
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[3]


class Reply:
    """Where a handler says its answers to one request."""

    def __init__(self, connection: socket.socket, lock: threading.Lock, request: int) -> None:
        self._connection, self._lock, self._request = connection, lock, request

    def _send(self, kind: str, body: dict[str, Any]) -> None:
        with self._lock:
            self._connection.sendall(control.encode({"id": self._request, kind: body}))

    def more(self, **body: Any) -> None:
        self._send("more", body)

    def ok(self, **body: Any) -> None:
        self._send("ok", body)

    def error(self, code: str, what: str, why: str = "", hint: str = "") -> None:
        self._send("error", {"code": code, "what": what, "why": why, "hint": hint})

    def hang_up(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)


class FakeAgent:
    """`handlers[verb](request, reply)`, each called in a thread of its own; `requests` is what was asked; `refused` are the
    numbers of the connections, from 1, that it refuses to have."""

    def __init__(self, directory: str) -> None:
        self.path = f"{directory}/agent.sock"
        self.requests: list[control.Request] = []
        self.refused: set[int] = set()
        self.handlers: dict[str, Callable[[Any, Reply], object]] = {}
        self.answer("usage", tasks=[])
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def asked(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    def answer(self, verb: str, **body: Any) -> None:
        self.handlers[verb] = lambda _request, reply: reply.ok(**body)

    def close(self) -> None:
        for sock in (self._listener, *self._connections):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                assert sock.fileno() != -1  # the other end has gone already
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for sock in (self._listener, *self._connections):
            sock.close()

    def remove(self) -> None:
        """Nobody can connect from now on."""
        Path(self.path).unlink()

    def _accept(self) -> None:
        for number in itertools.count(1):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if number in self.refused:
                with connection:
                    Reply(connection, threading.Lock(), 0).error("slow-down", "too many clients")
                continue
            self._connections.append(connection)
            self._start(self._serve, connection)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        lock = threading.Lock()
        while True:
            try:
                raw = frames.read_raw(connection)
            except OSError:
                return
            try:
                request = control.decode_request(raw)
            except BadMessage as error:
                Reply(connection, lock, frame.unpack(raw)["id"]).error("bad-message", error.what, error.why)
                continue
            self.requests.append(request)
            self._start(self._handle, request, Reply(connection, lock, request.id))

    def _handle(self, request: control.Request, reply: Reply) -> None:
        verb = type(request).__struct_config__.tag
        try:
            self.handlers[str(verb)](request, reply)
        except OSError:
            return  # the client has hung up


def goes_away_once(
    agent: FakeAgent, kind: type, before: Callable[[Reply], None], after: Callable[[Reply], None]
) -> Any:
    """A handler that answers ``before`` and closes the connection, and ``after`` to whoever asks again."""

    def handler(_request: control.Request, reply: Reply) -> None:
        if len(agent.asked(kind)) == 1:
            before(reply)
            reply.hang_up()
        else:
            after(reply)

    return handler


@pytest.fixture(name="agent")
def fixture_agent() -> Iterator[FakeAgent]:
    directory = tempfile.mkdtemp(dir="/tmp", prefix="pl-")
    fake = FakeAgent(directory)
    yield fake
    fake.close()
    shutil.rmtree(directory)


def command_line(*words: str | bytes) -> list[str | bytes]:
    return [sys.executable, "-P", "-c", "import sys; from peerload.cli.main import main; sys.exit(main())", *words]


def environment(fake: FakeAgent | None = None, **more: str) -> dict[str, str]:
    base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
    if fake is not None:
        base["PEERLOAD_SOCKET"] = fake.path
    return base | more


def peerload(*words: str, agent: FakeAgent | None = None, **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run `peerload WORDS` in this process, with these variables and nothing to read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the end of a process closes what is open
        return cli_in(environment(agent, **more), str(Path.cwd()), *words, given=None)
