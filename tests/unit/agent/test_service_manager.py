"""What the service manager is told, and what is believed of what it hands over."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from peerload.agent.systemd import STATUS_CHARS_MAX, ServiceManager, check_passed_socket
from peerload.model.errors import ConfigError
from tests.each import each
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def listening(name: str) -> Iterator[socket.socket]:
    """Where a service manager listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10.0)
        sock.bind(name)
        yield sock


@each("kind", ["path", "abstract"])
def test_what_is_told(tmp_path: Path, kind: str) -> None:
    name = f"{tmp_path}/notify" if kind == "path" else f"@peerload-{os.getpid()}"
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    with listening(name.replace("@", "\0", 1)) as sock:
        manager = ServiceManager(environment)
        assert environment == {"HOME": "/"}, "what the agent starts must not speak in its name"
        assert manager.is_there
        assert manager.watchdog_s == 30.0
        manager.ready("node a\nREADY=0")
        assert sock.recv(4096) == b"READY=1\nSTATUS=node a?READY=0"
        manager.alive("x" * 1000)
        assert sock.recv(4096) == b"WATCHDOG=1\nSTATUS=" + b"x" * STATUS_CHARS_MAX
        manager.reloading()
        first, second = sock.recv(4096).split(b"\n")
        assert first == b"RELOADING=1"
        assert second.removeprefix(b"MONOTONIC_USEC=").isdigit()
        manager.stopping()
        assert sock.recv(4096).startswith(b"STOPPING=1\n")


def test_nobody_is_told_where_there_is_nobody(tmp_path: Path) -> None:
    for told in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:9"}, {"NOTIFY_SOCKET": "@"}):
        manager = ServiceManager(told)
        assert not manager.is_there
        manager.ready("")
    ServiceManager({"NOTIFY_SOCKET": f"{tmp_path}/gone"}).ready("that it cannot be reached ends nothing")


@each("told", [{}, {"WATCHDOG_USEC": "-1"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}])
def test_no_watchdog(told: dict[str, str]) -> None:
    assert ServiceManager(told).watchdog_s == 0.0


def handed(tmp_path: Path, mode: int = 0o600) -> tuple[socket.socket, str]:
    """A socket as a service manager makes it."""
    tmp_path.chmod(0o755)
    path = str(tmp_path / "agent.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, mode)  # noqa: PTH101 -- a name for a socket
    listener.listen()
    return listener, path


@each("mode", [0o600, 0o660])
def test_a_socket_that_is_taken(tmp_path: Path, mode: int) -> None:
    listener, path = handed(tmp_path, mode)
    with listener:
        check_passed_socket(listener, path)


def test_sockets_that_are_not_taken(tmp_path: Path) -> None:
    listener, path = handed(tmp_path)
    with listener:
        with pytest.raises(ConfigError, match="the setting says"):
            check_passed_socket(listener, "/run/other.sock")
        os.chmod(path, 0o666)  # noqa: PTH101 -- as above
        with pytest.raises(ConfigError, match=Says.OPEN_TO_ALL()):
            check_passed_socket(listener, path)
        os.chmod(path, 0o600)  # noqa: PTH101 -- as above
        if os.getuid() == 0:
            os.chown(path, 12345, 12345)
            with pytest.raises(ConfigError, match=Says.NOT_OURS_ALONE()):
                check_passed_socket(listener, path)
            os.chown(path, 0, 0)
        tmp_path.chmod(0o777)
        with pytest.raises(ConfigError, match="replace"):
            check_passed_socket(listener, path)
        tmp_path.chmod(0o755)
        os.unlink(path)  # noqa: PTH108 -- as above
        with pytest.raises(ConfigError, match="No such file"):
            check_passed_socket(listener, path)
        (tmp_path / "agent.sock").write_text("no socket")
        with pytest.raises(ConfigError, match=Says.NOT_OURS_ALONE()):
            check_passed_socket(listener, path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent, pytest.raises(ConfigError, match="not listen"):
        check_passed_socket(silent, path)
    with socket.socket() as other, pytest.raises(ConfigError, match="not a Unix stream"):
        check_passed_socket(other, path)


PROGRAM = """
import os, socket, sys
from peerload.agent.systemd import ServiceManager
from peerload.model.errors import ConfigError
try:
    manager = ServiceManager({"LISTEN_FDS": sys.argv[1], "LISTEN_FDNAMES": sys.argv[2], "LISTEN_PID": str(os.getpid())})
    found = manager.listener(sys.argv[3])
    print(found is not None and found.getsockname(), manager._listener is not None)
except ConfigError as error:
    print("refused:", error.why)
"""


@each(
    ("names", "says"),
    [
        ("agent", "{path} True"),
        ("", "{path} True"),
        ("other:agent", "refused: the inherited descriptor is not a socket"),
        ("agent:other", "{path} True"),
        ("a:b", "refused: of the 2 files handed over none is called 'agent'"),
    ],
)
def test_which_of_what_was_handed_over(tmp_path: Path, names: str, says: str) -> None:
    listener, path = handed(tmp_path)
    with listener, open(os.devnull) as other:  # noqa: PTH123 -- a file to be no socket
        count = max(1, len(names.split(":")))
        script = f'exec "$0" -c "$1" {count} "$2" "$3" 3<&{listener.fileno()} 4<&{other.fileno()}'
        done = subprocess.run(
            ["bash", "-c", script, sys.executable, PROGRAM, names, path],
            pass_fds=(listener.fileno(), other.fileno()),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout.strip() == says.format(path=path), done.stderr


def test_what_is_for_another_process_is_left_alone() -> None:
    assert not ServiceManager({"LISTEN_FDS": "1", "LISTEN_PID": "1"})._listener
    assert not ServiceManager({"LISTEN_FDS": "99999999999", "LISTEN_PID": str(os.getpid())})._listener
    assert not ServiceManager({"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())})._listener
