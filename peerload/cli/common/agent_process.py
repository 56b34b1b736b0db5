# ruff: noqa: PTH100, PTH109, PTH118, PTH120, PTH123
# os.path, since pathlib would cost every command its quick start.
"""The processes of one's own agent: start it in the background, restart it, wait for its end, end a launcher whose agent is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import peerload
from peerload.cli.common.agent_flags import as_words, make_private
from peerload.client.connection import Client
from peerload.model.errors import AgentSilent, AgentUnavailable, PeerloadError
from peerload.model.text import printable
from peerload.wire import frame

if TYPE_CHECKING:
    from collections.abc import Sequence

STARTS_WITHIN_S = 60.0
"""An agent with a million tasks reads its database for longer than ten seconds."""
STOPS_WITHIN_S = 30.0
BACK_WITHIN_S = 60.0
"""Patience with an agent that restarts."""
LOOK_EVERY_S = 0.02
LAUNCHER_ANSWERS_WITHIN_S = 5.0
LOG_LINES_SHOWN = 10
LOG_BYTES_READ = 16 << 10


# -- start and restart -------------------------------------------------------------------------------------------------


def start(settings: dict[str, Any], program: Sequence[str] = ()) -> dict[str, Any]:
    """Start an agent in a session of its own and return its answer to `info` as soon as its socket answers.
    ``program``: another program that takes the flags of `peerload agent`.

    Raises PeerloadError with the last lines of its log if it ends before that, or does not answer within a minute (then it is
    stopped).
    """
    make_private(settings["state"])
    make_private(os.path.dirname(settings["socket"]))
    log_path = os.path.join(settings["state"], "agent.log")
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PeerloadError(f"{log_path} cannot be written", why=error.strerror or str(error)) from None
    log_start = os.fstat(log).st_size
    command = [*(program or [*program_words(), "agent"]), *as_words(settings)]
    try:
        process = subprocess.Popen(  # noqa: S603 -- our own program, with our own words
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    finally:
        os.close(log)
    pause = threading.Event()
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        info = _starting(settings["socket"])
        if info is not None:
            process.returncode = 0  # it outlives us: nothing to reap
            return info
        if process.poll() is not None:
            raise ended_at_once(f"it ended with exit code {process.returncode}", log_path, log_start)
        pause.wait(LOOK_EVERY_S)
    process.terminate()
    process.wait()
    raise _failed(f"it did not answer within {STARTS_WITHIN_S:g} s and was stopped", log_path, log_start)


def program_words() -> list[str]:
    """The command line of peerload in a Python that ignores the working directory and PYTHONPATH.

    If this peerload was itself found through one of those (a checkout that is not installed), its path is added.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(peerload.__file__)))
    found_through = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if root not in map(os.path.abspath, found_through):
        return [sys.executable, "-I", "-m", "peerload"]
    start_there = f"import sys; sys.path.insert(0, {root!r}); from peerload.cli.main import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", start_there]


def _starting(socket_path: str) -> dict[str, Any] | None:
    """The answer of the agent just started to `info`; None if there is none yet."""
    try:
        return agent_info(socket_path, STARTS_WITHIN_S)
    except AgentSilent:
        return None


def _last_lines(log_path: str, log_start: int) -> list[str]:
    with open(log_path, "rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(log_start, size - LOG_BYTES_READ))
        return log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES_SHOWN:]


def ended_at_once(reason: str, log_path: str, log_start: int) -> PeerloadError:
    """The error of an agent that has ended: the error that it logged, else ``reason`` with the end of its log."""
    lines = _last_lines(log_path, log_start)
    for number, line in enumerate(lines):
        if line.startswith("peerload: "):
            hint = "".join(lines[number + 1 : number + 2]).strip()
            return PeerloadError("the agent did not start", why=line.removeprefix("peerload: "), hint=hint)
    return _failed(reason, log_path, log_start)


def _failed(reason: str, log_path: str, log_start: int) -> PeerloadError:
    for line in _last_lines(log_path, log_start):
        sys.stderr.write(f"  {printable(line)}\n")
    return PeerloadError("the agent did not start", why=reason, hint=f"its log:  {log_path}")


def agent_info(socket_path: str, within_s: float) -> dict[str, Any] | None:
    """The answer of the agent at this socket to `info`; None if there is no agent. Raises AgentSilent if there is one that does not
    answer in this time: no other can be started."""
    try:
        with Client(socket_path, timeout_s=within_s) as client:
            return client.call("info")
    except AgentSilent:
        raise
    except AgentUnavailable:
        return None


def restart(socket_path: str | None, reason: str) -> dict[str, Any]:
    """Have the agent restart in its process → its answer to `info` then. Raises PeerloadError."""
    with Client(socket_path) as client:
        before = client.call("info")
        client.call("restart", reason=reason)
    pause, deadline = threading.Event(), time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < deadline:
        pause.wait(LOOK_EVERY_S)
        try:
            with Client(socket_path) as client:
                info = client.call("info")
        except AgentUnavailable:
            if not _lives(before.get("pid")):
                break
            continue
        if info.get("boot") != before.get("boot"):
            return info
    log = os.path.join(str(before.get("state")), "agent.log")
    raise PeerloadError("the agent did not restart", why="it was stopped to start as a member", hint=f"its log:  {log}")


def _lives(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


# -- end ---------------------------------------------------------------------------------------------------------------


def watch(pid: object) -> int | None:
    """A descriptor that can be read when this process has ended; None if it has ended already, or is not on this machine."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise


def await_end(descriptor: int, who: str) -> None:
    """Wait until the process of this descriptor has ended, and close the descriptor. Raises PeerloadError if it takes too long."""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(STOPS_WITHIN_S * 1000):
            raise PeerloadError(
                f"{who} has not stopped", why=f"{STOPS_WITHIN_S:g} s have passed", hint="see the end of STATE/agent.log"
            )
    finally:
        os.close(descriptor)


def end_launcher(state: str) -> int | None:
    """Tell the launcher of this state directory to end its tasks and itself → a descriptor that can be read when it has ended; None
    if there is no launcher. Raises PeerloadError if an agent uses that directory."""
    lock = _locked(state)
    if lock is None:
        return None
    try:
        return _stop_launcher(os.path.join(state, "launcher"))
    finally:
        os.close(lock)


def is_worked_in(state: str) -> bool:
    """Whether an agent uses this state directory."""
    try:
        lock = _locked(state)
    except PeerloadError:
        return True
    if lock is not None:
        os.close(lock)
    return False


def _locked(state: str) -> int | None:
    """The agent's lock on its state directory, so that none starts meanwhile; None if no agent ever used it."""
    try:
        lock = os.open(os.path.join(state, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 20).decode("ascii", "replace").strip() or "?"
        os.close(lock)
        raise PeerloadError(
            f"an agent uses {state}",
            why=f"its pid is {pid}, and it listens at another socket",
            hint="name its socket:  peerload down --all --socket PATH",
        ) from None
    return lock


def _stop_launcher(directory: str) -> int | None:
    try:
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as launcher:
            launcher.settimeout(LAUNCHER_ANSWERS_WITHIN_S)
            launcher.connect(f"/proc/self/fd/{place}/launcher.sock")  # a long path does not fit into a socket's name
            credentials = launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            descriptor = os.pidfd_open(struct.unpack("3i", credentials)[0])
            launcher.sendall(frame.pack([{"do": "stop"}]))
            return descriptor
    except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
        return None
    except OSError as error:
        raise PeerloadError("the launcher cannot be told to stop", why=error.strerror or str(error)) from None
    finally:
        os.close(place)
