# ruff: noqa: PTH100, PTH102, PTH103, PTH109, PTH111, PTH112, PTH113, PTH118, PTH120, PTH123
# os.path, since pathlib would cost every command its quick start.
"""The user's own agent: its flags, settings and paths; start it in the background, restart it, wait for its end."""

from __future__ import annotations

import contextlib
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
from peerload.cli.common.options import Options, speed, whole
from peerload.client.connection import SYSTEM_SOCKET, AgentConnection, is_alive, user_socket_path
from peerload.model.errors import AgentSilent, AgentUnavailable, ConfigError, PeerloadError
from peerload.model.text import printable
from peerload.wire import frame

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from peerload.model.config import AgentConfig


SYSTEM_STATE = "/var/lib/peerload"
_REPEATABLE = ("peer", "mqtt", "label")


def agent_options(verb: str, says: str) -> Options:
    """The flags of the verb; each of them except --json is a setting of the agent."""
    reader = Options(verb, says)
    reader.flag("--node NAME", help="name of this node (default: the host's)")
    reader.flag("--state DIR", help="directory of tasks and outputs")
    reader.flag("--listen HOST:PORT", help="address for the peers (default 127.0.0.1:0)")
    reader.flag("--advertise HOST:PORT", help="address that others dial, if it differs")
    reader.flag("--cluster DIR", help="the cluster's directory, made by `peerload cluster init`")
    reader.flag("--peer HOST:PORT", help="a member of the cluster to join (repeatable)", action="append")
    reader.flag("--mqtt URL", help="an MQTT broker (repeatable: for fail-over)", action="append")
    reader.flag("--mqtt-ca FILE|system", help="CA of the broker's certificate (default: the cluster's)")
    reader.flag("--mqtt-password-file FILE", help="a private file with USER:PASSWORD, for the broker")
    reader.flag("--slots N", help="tasks at a time (default: as the cpus allow)", type=whole(0, 65_536))
    reader.flag("--policy NAME|FILE", help="the preset of policies")
    reader.flag("--label L", help="a label of this node (repeatable)", action="append")
    reader.flag("--speed F", help="speed relative to the reference machine (default: measured once)", type=speed)
    reader.flag("--record FILE", help="record every event and decision in this file, for `peerload replay`")
    reader.flag("--config FILE", help="a configuration file")
    if verb == "agent":
        reader.switch("--system", help="serve all users of this machine, as its service")
    return reader


def given_settings(flags: Namespace) -> dict[str, Any]:
    """The settings from the flags; repeatable ones as lists, files with absolute paths (an agent's working directory is /)."""
    given = {key: value for key, value in vars(flags).items() if key not in ("json", "system") and value is not None}
    if str(given.get("policy", "")).endswith(".toml"):
        given["policy"] = os.path.abspath(given["policy"])
    for key in ("config", "record", "cluster", "mqtt_ca", "mqtt_password_file"):
        if given.get(key) and given[key] != "system":
            given[key] = os.path.abspath(given[key])
    if any(":" in url.partition("://")[2].rpartition("@")[0] for url in given.get("mqtt", ())):
        why = "every user of this machine can read it there"
        hint = "write USER:PASSWORD into a file, then:  chmod 600 FILE ; peerload up --mqtt mqtts://HOST --mqtt-password-file FILE"
        raise ConfigError("mqtt", "no password on a command line", why=why, hint=hint)
    if getattr(flags, "system", False):
        given["mode"] = "system"
    return given


def default_places(settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("mode") == "system":
        return {"state": SYSTEM_STATE, "socket": SYSTEM_SOCKET}
    return {"state": default_state(), "socket": settings.get("socket") or user_socket_path()}


def as_words(settings: dict[str, Any]) -> list[str]:
    words = []
    for key, value in settings.items():
        for one in value if key in _REPEATABLE else [value]:
            words += [f"--{key.replace('_', '-')}", str(one)]
    return words


def located(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `state` and `socket` resolved as the agent resolves them. Raises ConfigError."""
    named = os.environ.get("PEERLOAD_SOCKET")  # clients use it too, also within a task
    config = configured({"socket": named, **settings} if named else settings)
    return {**settings, "state": os.path.abspath(config.state), "socket": os.path.abspath(config.socket)}


def configured(given: dict[str, Any]) -> AgentConfig:
    return configured_with_origins(given)[0]


def settings_of_file(given: dict[str, Any]) -> dict[str, object]:
    """The settings that an agent with these settings would read from the file of `--config`."""
    from peerload.config import loader

    return {
        str(one["key"]): one["value"]
        for one in loader.describe(*configured_with_origins(given))
        if one["origin"] == given["config"]
    }


def configured_with_origins(given: dict[str, Any]) -> tuple[AgentConfig, dict[str, str]]:
    """The settings that an agent started here would have, and the origin of each."""
    from peerload.config import loader

    defaults = {"state": default_state(), "socket": given.get("socket") or user_socket_path()}
    return loader.load_with_origins(given, defaults, dict(os.environ))


def default_state() -> str:
    """`$XDG_STATE_HOME/peerload`, else `~/.local/state/peerload`."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "peerload")


def make_private(directory: str) -> None:
    """Create a directory that only this user can enter, if it does not exist. Raises PeerloadError."""
    try:
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        os.mkdir(directory, 0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.isdir(directory):
            return
        raise PeerloadError(f"{directory} cannot be made", why=error.strerror or str(error)) from None


def node_of(state: str) -> str:
    """The node name stored in this state directory; "" without a database."""
    import sqlite3

    path = os.path.join(state, "peerload.db")
    if not os.access(path, os.R_OK):
        return ""
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            return str(database.execute("SELECT value FROM meta WHERE key = 'node'").fetchone()[0])
    except (sqlite3.Error, TypeError):
        return ""  # the agent reports the error


def compared(
    settings: list[dict[str, Any]], config: AgentConfig | None, origins: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Each active setting as `key value origin now now_origin needs_restart`. now: the value that an agent started now would have.
    A setting from a flag or a variable needs no restart, even if a file differs."""
    from peerload.config import loader

    now = {one["key"]: one for one in (loader.describe(config, origins or {}) if config is not None else settings)}
    rows = []
    for one in settings:
        later = now.get(one["key"], one)
        origin = one["origin"]
        same = later["value"] == one["value"]
        if same and origin == loader.FLAG and one["key"] in ("state", "socket"):
            origin = later["origin"]  # `up` passes both on the agent's command line, whatever their origin
        given = origin in (loader.FLAG, loader.ENVIRONMENT)
        rows.append(
            {
                **one,
                "origin": _named(origin, one["key"]),
                "now": later["value"],
                "now_origin": _named(str(later["origin"]), str(one["key"])),
                "needs_restart": not same and not given,
            }
        )
    return rows


def given_to(settings: list[dict[str, Any]], usual_state: str, environment: dict[str, str]) -> dict[str, Any]:
    """The flags by which an agent with these settings reads its files: `--config`, and `--state` if it differs from ``usual_state``."""
    from peerload.config import loader

    state = next((str(one["value"]) for one in settings if one["key"] == "state"), usual_state)
    usual = {*map(str, loader.files(None, environment))}
    files = [origin for one in settings if (origin := str(one["origin"])).startswith("/") and os.path.isfile(origin)]
    named = [file for file in files if file not in usual and os.path.dirname(file) != state]  # `join` writes one there
    is_other = state != usual_state and os.access(state, os.X_OK)
    return ({"state": state} if is_other else {}) | ({"config": named[0]} if named else {})


def _named(origin: str, key: str) -> str:
    return f"PEERLOAD_{key.upper()}" if origin == "environment" else origin


STARTS_WITHIN_S = 60.0
READS_BYTES_S = 2 << 20
"""An agent gets one more second to start for this many bytes of its database, which it reads first: a million tasks have 400 MiB."""
STOPS_WITHIN_S = 30.0
LOOK_EVERY_S = 0.02
LAUNCHER_ANSWERS_WITHIN_S = 5.0
LOG_LINES_SHOWN = 10
LOG_BYTES_READ = 16 << 10


# -- start and restart -------------------------------------------------------------------------------------------------


def start(settings: dict[str, Any], program: Sequence[str] = ()) -> dict[str, Any]:
    """Start an agent in its own session and return its answer to `info` as soon as its socket answers.
    ``program``: another program that accepts the flags of `peerload agent`.

    Raises PeerloadError with the last lines of its log if it exits before that, or does not answer within a minute plus the
    time to read its database (then it is stopped).
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
    within_s = _starts_within_s(settings["state"])
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        info = _starting(settings["socket"], within_s)
        if info is not None and info.get("pid") == process.pid:  # else another agent was first, and ours will report it
            process.returncode = 0  # it outlives us: nothing to reap
            return info
        if process.poll() is not None:
            raise ended_at_once(f"it ended with exit code {process.returncode}", log_path, log_start)
        pause.wait(LOOK_EVERY_S)
    process.terminate()
    process.wait()
    raise _failed(f"it did not answer within {within_s:.0f} s and was stopped", log_path, log_start)


def _starts_within_s(state: str) -> float:
    """The start timeout of an agent with this state directory: a minute plus the time to read its database."""
    try:
        with os.scandir(state) as files:
            size = sum(file.stat().st_size for file in files if file.name in ("peerload.db", "peerload.db-wal"))
    except OSError:
        size = 0  # the directory of another user
    return STARTS_WITHIN_S + size / READS_BYTES_S


def program_words() -> list[str]:
    """The command line of peerload in a Python that ignores the working directory and PYTHONPATH.

    If this peerload was itself found through the working directory or PYTHONPATH, its path is added.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(peerload.__file__)))
    found_through = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if root not in map(os.path.abspath, found_through):
        return [sys.executable, "-I", "-m", "peerload"]
    start_there = f"import sys; sys.path.insert(0, {root!r}); from peerload.cli.main import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", start_there]


def _starting(socket_path: str, within_s: float) -> dict[str, Any] | None:
    """The answer of the agent just started to `info`; None if it does not answer yet."""
    try:
        return agent_info(socket_path, within_s)
    except AgentSilent:
        return None


def _last_lines(log_path: str, log_start: int) -> list[str]:
    with open(log_path, "rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(log_start, size - LOG_BYTES_READ))
        return log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES_SHOWN:]


def ended_at_once(reason: str, log_path: str, log_start: int) -> PeerloadError:
    """The error of an agent that has exited: the error in its log, else ``reason`` with the end of the log."""
    lines = _last_lines(log_path, log_start)
    for number, line in enumerate(lines):
        if line.startswith("peerload: "):
            hint = "".join(lines[number + 1 : number + 2]).strip()
            return PeerloadError("the agent did not start", why=line.removeprefix("peerload: "), hint=hint)
    return _failed(reason, log_path, log_start)


def _failed(reason: str, log_path: str, log_start: int) -> PeerloadError:
    for line in _last_lines(log_path, log_start):
        sys.stderr.write(f"  {printable(line)}\n")
    state = os.path.dirname(log_path)
    if os.statvfs(state).f_bavail == 0:
        reason += f", and the disk of {state} is full"
    return PeerloadError("the agent did not start", why=reason, hint=f"its log:  {log_path}")


def agent_info(socket_path: str, within_s: float) -> dict[str, Any] | None:
    """The answer of the agent at this socket to `info`; None if no agent listens. Raises AgentSilent if one listens but does not
    answer in this time: then no other agent can be started."""
    try:
        with AgentConnection(socket_path, timeout_s=within_s) as client:
            return client.call("info")
    except AgentSilent:
        raise
    except AgentUnavailable:
        return None


def restart(socket_path: str | None, reason: str) -> dict[str, Any]:
    """Let the agent restart in its process → the answer of the new one to `info`. Raises PeerloadError."""
    with AgentConnection(socket_path) as client:
        before = client.call("info")
        client.call("restart", reason=reason)
    pause, deadline = threading.Event(), time.monotonic() + _starts_within_s(str(before.get("state")))
    while time.monotonic() < deadline:
        pause.wait(LOOK_EVERY_S)
        try:
            with AgentConnection(socket_path) as client:
                info = client.call("info")
        except AgentUnavailable:
            if not is_alive(before["pid"]):
                break
            continue
        if info.get("boot") != before.get("boot"):
            return info
    log = os.path.join(str(before.get("state")), "agent.log")
    raise PeerloadError("the agent did not restart", why="it was stopped to start as a member", hint=f"its log:  {log}")


# -- end ---------------------------------------------------------------------------------------------------------------


def watch(pid: object) -> int | None:
    """A descriptor that becomes readable when this process has ended; None if it has ended or is not on this machine."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise


def await_end(descriptor: int, who: str, within_s: float = STOPS_WITHIN_S) -> None:
    """Wait until the process of this descriptor has ended, and close the descriptor. Raises PeerloadError if it takes too long."""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(within_s * 1000):
            raise PeerloadError(
                f"{who} has not stopped", why=f"{within_s:g} s have passed", hint="see the end of STATE/agent.log"
            )
    finally:
        os.close(descriptor)


def end_launcher(state: str) -> int | None:
    """Tell the launcher of this state directory to end its tasks and itself → a descriptor that becomes readable when it has ended;
    None without a launcher. Raises PeerloadError if an agent uses that directory."""
    lock = _locked(state)
    if lock is None:
        return None
    try:
        return _stop_launcher(os.path.join(state, "launcher"))
    finally:
        os.close(lock)


def is_worked_in(state: str) -> bool:
    try:
        lock = _locked(state)
    except PeerloadError:
        return True
    if lock is not None:
        os.close(lock)
    return False


def _locked(state: str) -> int | None:
    """Take the agent's lock on its state directory, so that none starts meanwhile; None if no agent ever used it."""
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
            launcher.connect(f"/proc/self/fd/{place}/launcher.sock")  # keeps a long path below the limit
            credentials = launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            descriptor = os.pidfd_open(struct.unpack("3i", credentials)[0])
            launcher.sendall(frame.pack([{"do": "stop"}]))
            return descriptor
    except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
        return None
    except OSError as error:
        raise PeerloadError(
            "the request to stop did not reach the launcher", why=error.strerror or str(error)
        ) from None
    finally:
        os.close(place)
