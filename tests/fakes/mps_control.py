"""Stand-in for `nvidia-cuda-mps-control`: a real daemon with its commands, its servers, and clients of these.

`install(directory)` puts it there under its real name, for PATH. Files in `directory/mps` say what it does (`refuse`, `foreign`,
`fault`), and it notes there what it was told (`verbs`), and its servers. `client` is a program that uses a GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path


def is_alive(pid: int) -> bool:
    """True if a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


VARIABLE = "FAKE_MPS"
NAME = "nvidia-cuda-mps-control"


def install(directory: Path) -> dict[str, str]:
    """The variables with which a process finds it."""
    program, notes = directory / "bin" / NAME, directory / "mps"
    program.parent.mkdir()
    notes.mkdir()
    program.write_text(f'#!/bin/sh\n{VARIABLE}={notes} exec {sys.executable} -I -S {__file__} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def client(directory: Path) -> list[str]:
    """The command of a client: it works until the file `done` is there, and fails if its server ends. Without a daemon it says
    nothing, and works alone, as CUDA does."""
    return [sys.executable, "-I", "-S", __file__, "--client", str(directory / "done")]


def servers(directory: Path) -> list[int]:
    """Process numbers of the servers that run."""
    pids = [int(path.name) for path in (directory / "mps").glob("[0-9]*")]
    return [pid for pid in pids if is_alive(pid)]


def _notes() -> Path:
    return Path(os.environ[VARIABLE])


def _pipe() -> Path:
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent"))


class _Server:
    """A server: a process that clients hold a connection to."""

    def __init__(self, address: str) -> None:
        code = (
            "import socket, sys, threading\n"
            "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(99); print(flush=True)\n"
            "kept = []\n"
            "while True: kept.append(s.accept()[0])\n"
        )
        self.address = address
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, address], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.pid = self.process.pid
        self.clients: dict[int, socket.socket] = {}
        (_notes() / f"{self.pid}").touch()


class _Daemon:
    """The daemon. Everything in it happens under one lock."""

    def __init__(self) -> None:
        self.server: _Server | None = None
        self.lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Answer one line."""
        words = connection.makefile().readline().split()
        with self.lock:
            with (_notes() / "verbs").open("a", encoding="utf-8") as file:
                file.write(" ".join(words) + "\n")
            if self.server is not None and self.server.process.poll() is not None:
                self.server = None
            if words[0] == "client":
                self._adds(int(words[1]), connection)
                return
            if words[0] == "quit" and self.server is not None:
                self.server.process.kill()
                self.server.process.wait()
            connection.sendall(f"{self._answer(words[0])}\n".encode())
            if words[0] == "quit":
                os._exit(0)
        connection.close()

    def _answer(self, verb: str) -> str:
        server = self.server
        return {
            "get_default_active_thread_percentage": "100.0",
            "get_server_list": "" if server is None else f"{server.pid}",
            "get_client_list": "" if server is None else "\n".join(map(str, server.clients)),
            "get_server_status": "FAULT" if (_notes() / "fault").exists() else "ACTIVE",
        }.get(verb, "")

    def _adds(self, pid: int, connection: socket.socket) -> None:
        if self.server is None:
            self.server = _Server(str(_pipe() / f"server{len(list(_notes().iterdir()))}"))
        self.server.clients[pid] = connection
        connection.sendall(f"{self.server.address}\n".encode())
        threading.Thread(target=_until_gone, args=(self.server, pid, connection), daemon=True).start()


def _until_gone(server: _Server, pid: int, connection: socket.socket) -> None:
    connection.recv(1)
    server.clients.pop(pid, None)


def _start() -> None:
    for name, said in (
        ("refuse", "MPS is not supported"),
        ("foreign", "An instance of this daemon is already running"),
    ):
        if (_notes() / name).exists():
            sys.exit(said)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(_pipe() / "control"))
    listener.listen(99)
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    (_pipe() / f"{NAME}.pid").write_text(str(os.getpid()))
    (_notes() / "daemon").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    daemon = _Daemon()
    while True:
        threading.Thread(target=daemon.serve, args=(listener.accept()[0],), daemon=True).start()


def _ask(line: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(_pipe() / "control"))
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    connection.sendall(f"{line}\n".encode())
    return connection


def _client(done: Path) -> None:
    import time

    server = None
    if (_pipe() / "control").exists():
        asked = _ask(f"client {os.getpid()}")
        server = socket.socket(socket.AF_UNIX)
        server.connect(asked.makefile().readline().strip())
        server.setblocking(False)
    _out("under MPS" if server is not None else "without MPS")
    while not done.exists():
        time.sleep(0.02)
        try:
            if server is not None and not server.recv(1):
                sys.exit("CUDA error: the MPS server is gone")
        except BlockingIOError:
            pass


def _out(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """The program itself."""
    if sys.argv[1:2] == ["--client"]:
        _client(Path(sys.argv[2]))
    elif sys.argv[1:] == ["-d"]:
        _start()
    else:
        _out(_ask(sys.stdin.readline().strip()).makefile().read().strip())


if __name__ == "__main__":
    main()
