"""The agent as a service: notifications of the service manager (systemd) that started it, the socket that it has passed, health
check, readiness, watchdog keep-alives, and reload of the settings on SIGHUP.

The protocol is a few datagrams (sd_notify(3)) and variables (sd_listen_fds(3)). The variables are removed from the
environment, so that no child process uses them.

Readiness and keep-alives are sent only after the health check has passed: the socket answers, the store commits, the launcher
answers. So an agent whose process runs but does not work is restarted. A SIGHUP reloads the settings: those in LIVE take effect, as
do a new certificate and new statements of the CA; the others are reported as waiting for a restart. A file with a mistake
changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.store.maintenance import CommitProbe
from peerload.model.errors import ConfigError, PeerloadError, StoreError
from peerload.wire import frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from peerload.agent.joining import TrustDistribution
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.model.config import AgentConfig
    from peerload.security.tls import Credentials

    Load = Callable[[], tuple[AgentConfig, dict[str, str]]]


log = logging.getLogger("peerload.agent")

FIRST_FD = 3
FDS_MAX = 16
AGENT_FD = "agent"
"""Name of the socket in its unit (FileDescriptorName=)."""
STATUS_CHARS_MAX = 200
WATCHDOG_S_MIN = 0.2
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class ServiceManager:
    """The service manager that started this process, if any. environment: of this process; VARIABLES are removed from
    it. watchdog_s: interval of the watchdog, 0 = none. Raises ConfigError if the passed socket cannot be used."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        found = {name: environment.pop(name, "") for name in VARIABLES}
        self._address = _address(found["NOTIFY_SOCKET"])
        self.watchdog_s = _watchdog_s(found["WATCHDOG_USEC"], found["WATCHDOG_PID"])
        self._listener = _passed_socket(found["LISTEN_FDS"], found["LISTEN_PID"], found["LISTEN_FDNAMES"])

    @property
    def is_there(self) -> bool:
        return self._address is not None

    def listener(self, path: str) -> socket.socket | None:
        """The passed socket, checked at each use; None if there is none. Raises ConfigError."""
        if self._listener is None:
            return None
        check_passed_socket(self._listener, path)
        return self._listener.dup()

    # -- notifications -------------------------------------------------------------------------------------------------

    def ready(self, status: str) -> None:
        self._notify("READY=1", _status(status))

    def status(self, status: str) -> None:
        self._notify(_status(status))

    def alive(self, status: str) -> None:
        self._notify("WATCHDOG=1", _status(status))

    def reloading(self) -> None:
        """Report that settings are reloaded; `ready` ends it."""
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify("RELOADING=1", f"MONOTONIC_USEC={usec}")

    def stopping(self) -> None:
        self._notify("STOPPING=1", _status("stopping"))

    def _notify(self, *lines: str) -> None:
        """Send one datagram. An unreachable service manager is only logged: it has its own timeouts."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(self._address)
                sock.sendall("\n".join(lines).encode())
        except OSError as error:
            log.warning("cannot notify the service manager: message=%s error=%s", lines[0], error.strerror or error)


def _status(words: str) -> str:
    plain = "".join(c if c.isprintable() else "?" for c in words)
    return f"STATUS={plain[:STATUS_CHARS_MAX]}"


def _address(found: str) -> str | None:
    """The address of the notification socket: a path, or an abstract name, which begins with @; None if it is neither."""
    if found.startswith("@") and len(found) > 1:
        return "\0" + found[1:]
    return found if found.startswith("/") else None


def _watchdog_s(usec: str, pid: str) -> float:
    """The watchdog's interval; 0 if none is set, or it applies to another process."""
    if not usec.isascii() or not usec.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return max(int(usec[:18]) / 1e6, WATCHDOG_S_MIN) if int(usec[:18]) else 0.0


# -- the passed socket -------------------------------------------------------------------------------------------------


def _passed_socket(count: str, pid: str, names: str) -> socket.socket | None:
    """The passed socket named AGENT_FD, or the only one. Others are closed. Raises ConfigError."""
    if pid != str(os.getpid()) or not count.isascii() or not count.isdigit() or not 0 < int(count[:9]) <= FDS_MAX:
        return None
    fds = list(range(FIRST_FD, FIRST_FD + int(count)))
    called = (names.split(":") + [""] * len(fds))[: len(fds)] if names else [""] * len(fds)
    wanted = [fd for fd, name in zip(fds, called, strict=True) if name == AGENT_FD] or fds[: len(fds) == 1]
    for fd in fds:
        os.set_inheritable(fd, False)
        if fd not in wanted[:1]:
            os.close(fd)
    if not wanted:
        raise _unusable(f"of the {len(fds)} files handed over none is called {AGENT_FD!r}")
    if not stat.S_ISSOCK(os.fstat(wanted[0]).st_mode):
        os.close(wanted[0])
        raise _unusable("the inherited descriptor is not a socket")
    return socket.socket(fileno=wanted[0])


def check_passed_socket(listener: socket.socket, path: str) -> None:
    """Raises ConfigError unless this is a listening Unix stream socket at ``path``, and only root or this user can write to it
    or replace it."""
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM:
        raise _unusable("it is not a Unix stream socket")
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise _unusable("it does not listen")
    name = listener.getsockname()
    if name != path:
        raise _unusable(f"it is at {name!r}, and the setting says {path}", hint="--socket")
    try:
        status, above = Path(path).lstat(), Path(path).parent.stat()
    except OSError as error:
        raise _unusable(f"{path}: {error.strerror}") from None
    ours = (0, os.getuid())
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid not in ours or status.st_mode & 0o002:
        raise _unusable(f"{path} is not ours alone, or open to everybody", hint="SocketUser=peerload SocketMode=0660")
    if above.st_uid not in ours or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise _unusable(f"other users may replace {path}", hint=f"chmod 755 {Path(path).parent}")


def _unusable(why: str, hint: str = "") -> ConfigError:
    what = "the socket that the service manager has handed over cannot be used"
    return ConfigError("socket", what, why=why, hint=hint or "systemctl cat peerload.socket")


ANSWER_BYTES_MAX = 1 << 20
REQUEST_ID = 1
LOOK_S = 0.5
"""Interval at which a commit that waits for disk space is noticed."""


class HealthCheck:
    """The checks of one agent. socket: path of the socket for clients."""

    def __init__(self, socket: str, store: Store, launcher: LauncherLink) -> None:
        self._socket = socket
        self._store = store
        self._launcher = launcher

    async def trouble(self, within_s: float) -> str:
        """The reason why this agent does not work, "" if it does. Each check may take ``within_s`` seconds."""
        checks = {
            "its socket does not answer": _socket_answers(self._socket),
            "its store does not commit": _store_commits(self._store),
            "its launcher does not answer": self._launcher.answers(within_s),
        }
        found = await asyncio.gather(*(_within(within_s, check) for check in checks.values()))
        return "; ".join(f"{says}{why}" for says, why in zip(checks, found, strict=True) if why is not None)


async def _within(within_s: float, check: Awaitable[bool]) -> str | None:
    """Run a check with a time limit → None if it passed, else the end of its message."""
    try:
        async with asyncio.timeout(within_s):
            return None if await check else ""
    except TimeoutError:
        return f" within {within_s:g} s"
    except (OSError, ValueError, StoreError) as error:
        return f" ({getattr(error, 'strerror', None) or error})"


async def _socket_answers(path: str) -> bool:
    """True if the agent answers; any answer counts, even a refusal."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frame.pack({"id": REQUEST_ID, "verb": "info"}))
        size = int.from_bytes(await reader.readexactly(frame.HEADER_BYTES), "big")
        if size > ANSWER_BYTES_MAX:
            return False
        return isinstance(msgspec.msgpack.decode(await reader.readexactly(size)), dict)
    except (asyncio.IncompleteReadError, msgspec.DecodeError):
        return False
    finally:
        writer.close()


async def _store_commits(store: Store) -> bool:
    """True if a row reaches the disk. A commit that waits for disk space passes: the wait is intended and reported
    elsewhere, and a restart would not help."""
    if store.is_stalled:
        return True
    kept = asyncio.Event()
    store.persist([CommitProbe(time.time())], kept.set)
    waits = asyncio.create_task(kept.wait())
    try:
        while not waits.done() and not store.is_stalled:
            await asyncio.wait([waits], timeout=LOOK_S)
    finally:
        waits.cancel()
    return True


LIVE = (
    "accept_foreign",
    "allow_root_tasks",
    "certificate_s",
    "clients_max",
    "ended_kept_s",
    "ended_output_bytes_max",
    "ended_submissions_kept",
    "ended_tasks_max",
    "exec_allow",
    "guest_bytes_max",
    "guest_memory_bytes_max",
    "guest_network",
    "guest_uids",
    "map_administrators",
    "retention_every_s",
    "task_processes_max",
)
"""The settings that take effect on reload. The system launcher itself reads changed settings about users."""
CHECK_S = 10.0
"""Timeout of a health check without a watchdog."""
SERVICE_HINT = "systemctl start peerload        for yourself:  peerload up"
AGAIN_S = 1.0
"""Pause before the next check of an agent that is not ready."""
SIGNS_PER_WATCHDOG = 2
"""Number of keep-alives in each interval of the watchdog."""


@dataclass(eq=False, repr=False)
class Service:
    """The service of one agent, from the time when it is up. settings: None if there is nothing to reload."""

    _manager: ServiceManager
    _health: HealthCheck
    _info: AgentInfo
    _node: Node
    _settings: SettingsReload | None
    _last_trouble: str = ""

    def start(self) -> None:
        """Reload on SIGHUP from now on. In a terminal, SIGHUP keeps its meaning: the agent ends with the terminal."""
        if self._settings is not None and not _has_terminal():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    async def run(self) -> None:
        """Notify the service manager until cancelled."""
        if not self._manager.is_there:
            return
        every_s = self._manager.watchdog_s / SIGNS_PER_WATCHDOG
        while not await self._is_healthy(min(every_s, CHECK_S) if every_s else CHECK_S):  # noqa: ASYNC110 -- nobody tells
            await asyncio.sleep(AGAIN_S)
        self._manager.ready(self._status())
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while every_s:
            due_s = max(due_s + every_s, loop.time())
            within_s = min(every_s / 2, CHECK_S)
            await asyncio.sleep(due_s - within_s - loop.time())
            if await self._is_healthy(within_s):
                self._manager.alive(self._status())

    async def _is_healthy(self, within_s: float) -> bool:
        """True if the health check passes. Changes are logged; a failure is reported each time."""
        trouble = await self._health.trouble(within_s)
        if trouble != self._last_trouble:
            self._last_trouble = trouble
            if trouble:
                log.error("health check failed: %s", trouble)
            else:
                log.info("health check recovered")
        if trouble:
            self._manager.status(f"health check failed: {trouble}")
        return not trouble

    def _status(self) -> str:
        runs, peers = len(self._node.ledger.running), len(list(self._node.membership))
        return f"node {self._info.config.node}: {runs} running, {peers} peers known"

    def reload(self) -> None:
        assert self._settings is not None
        self._manager.reloading()
        outcome = self._settings.reload()
        self._manager.ready(f"{self._status()}; {outcome}")


@dataclass(eq=False, repr=False)
class SettingsReload:
    """Reload of the settings (``load`` reads them), of the certificate, and of the CA's statements."""

    _load: Load
    _info: AgentInfo
    _tls: Credentials
    _trust: TrustDistribution
    _journal: EventLog

    def reload(self) -> str:
        """Reload everything. Invalid input changes nothing. → a description of the outcome."""
        try:
            outcome = self._reloaded()
        except PeerloadError as error:
            hint = f" ({error.hint})" if error.hint else ""
            outcome = f"not reloaded, the previous settings stay in force: {error}{hint}"
            log.error("settings not reloaded: error=%s hint=%s", error, error.hint or "peerload config check")  # noqa: TRY400 -- an error of the user
            self._journal.record("agent", "not reloaded", reason=str(error))
        else:
            log.info("settings reloaded: outcome=%s", outcome)
            self._journal.record("agent", "reloaded", reason=outcome)
        return outcome

    def _reloaded(self) -> str:
        info = self._info
        config, origins = self._load()
        differ = [key for key in config.__struct_fields__ if getattr(config, key) != getattr(info.config, key)]
        live = {key: getattr(config, key) for key in differ if key in LIVE}
        waits = [key for key in differ if key not in LIVE]
        renewed = self._tls.read_again()
        statements = self._trust.read_again()
        info.config = msgspec.structs.replace(info.config, **live)
        self._tls.set_life(info.config.certificate_s)
        info.origins.update({key: origins[key] for key in live})
        changes = [f"in force now: {', '.join(live)}"] if live else []
        changes += ["another certificate"] if renewed else []
        changes += [f"{statements} statements of the CA"] if statements else []
        changes += [f"from the next start on: {', '.join(waits)}"] if waits else []
        return f"reloaded: {'; '.join(changes) or 'nothing is new'}"


def _has_terminal() -> bool:
    """True if this process has a terminal, whose end is reported by SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def check_service_places(config: AgentConfig, manager: ServiceManager, service_state: str) -> None:
    """Check an agent in system mode: it must not be root if its service's files are there (``service_state``), and must be
    able to write its state and make its socket, unless the socket was passed. Raises ConfigError before anything is made.
    """
    if config.mode != "system":
        return
    if os.geteuid() == 0 and config.state == service_state:
        why = f"its files in {config.state} would belong to root, and its service could not read them"
        raise ConfigError("mode", "the agent of all users does not run as root", why=why, hint=SERVICE_HINT)
    _check("state", Path(config.state))
    handed_over = manager.listener(config.socket)
    if handed_over is not None:
        handed_over.close()
    else:
        _check("socket", Path(config.socket).parent)


def _check(key: str, directory: Path) -> None:
    """Check that a directory can be written, or made. Raises ConfigError."""
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110 -- what may not be looked at counts as not there
    if not os.access(there, os.W_OK | os.X_OK):
        what = f"{directory} cannot be {'used' if there == directory else 'made'}"
        raise ConfigError(key, what, why=f"{there}: Permission denied for uid {os.geteuid()}", hint=SERVICE_HINT)
