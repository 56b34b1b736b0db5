"""The agent as a service: health check, readiness, watchdog keep-alives, and reload of the settings on SIGHUP.

Readiness and keep-alives are sent only after the health check has passed: the socket answers, the store commits, the launcher
answers. So an agent that merely has a process is restarted. A SIGHUP reloads the settings: those in LIVE take effect, and so
do a new certificate and new statements of the CA; the others are reported to wait for a restart. A file with a mistake
changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.store.maintenance import CommitProbe
from peerload.model.errors import ConfigError, PeerloadError, StoreError
from peerload.wire import frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from peerload.agent.joining.distribution import TrustDistribution
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.agent.systemd.notify import ServiceManager
    from peerload.core.node import Node
    from peerload.model.config import AgentConfig
    from peerload.security.tls import Credentials

    Load = Callable[[], tuple[AgentConfig, dict[str, str]]]

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
        """Why this agent does not do its work, "" if it does. Each check may take so many seconds."""
        checks = {
            "its socket does not answer": _socket_answers(self._socket),
            "its store does not commit": _store_commits(self._store),
            "its launcher does not answer": self._launcher.answers(within_s),
        }
        found = await asyncio.gather(*(_within(within_s, check) for check in checks.values()))
        return "; ".join(f"{says}{why}" for says, why in zip(checks, found, strict=True) if why is not None)


async def _within(within_s: float, check: Awaitable[bool]) -> str | None:
    """None if the check passed, else what to add to its message."""
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
    """True if a row reaches the disk. A commit that waits for disk space passes: it is meant to wait, is reported
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


log = logging.getLogger("peerload.agent")

LIVE = (
    "certificate_s",
    "clients_max",
    "ended_kept_s",
    "ended_output_bytes_max",
    "ended_submissions_kept",
    "ended_tasks_max",
    "retention_every_s",
)
"""The settings that take effect on reload."""
CHECK_S = 10.0
"""Timeout of a health check without a watchdog."""
SERVICE_HINT = "systemctl start peerload        for yourself:  peerload up"
AGAIN_S = 1.0
"""Pause before the next check of an agent that is not ready."""
SIGNS_PER_WATCHDOG = 2
"""Keep-alives in each interval of the watchdog."""


class Service:
    """The service of one agent, from the moment at which it serves. settings: None if there is nothing to reload."""

    def __init__(
        self,
        manager: ServiceManager,
        health: HealthCheck,
        info: AgentInfo,
        node: Node,
        settings: SettingsReload | None,
    ) -> None:
        self._manager = manager
        self._health = health
        self._info = info
        self._node = node
        self._settings = settings
        self._last_trouble = ""

    def start(self) -> None:
        """Reload on SIGHUP from now on. For an agent in a terminal SIGHUP keeps its meaning: it ends with the terminal."""
        if self._settings is not None and not _has_terminal():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    async def run(self) -> None:
        """Notify the service manager, until cancelled."""
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
        """Reload the settings, and notify the service manager."""
        assert self._settings is not None
        self._manager.reloading()
        says = self._settings.reload()
        self._manager.ready(f"{self._status()}; {says}")


@dataclass(eq=False, repr=False)
class SettingsReload:
    """Reload of the settings (``load`` reads them), of the certificate, and of the CA's statements."""

    _load: Load
    _info: AgentInfo
    _tls: Credentials
    _trust: TrustDistribution
    _journal: EventLog

    def reload(self) -> str:
        """Reload everything. What cannot be used changes nothing. → what was done, for people."""
        try:
            says = self._reloaded()
        except PeerloadError as error:
            hint = f" ({error.hint})" if error.hint else ""
            says = f"not reloaded, what was in force stays: {error}{hint}"
            log.error("%s; look:  peerload config check", says)  # noqa: TRY400 -- theirs, and no bug of ours
            self._journal.record("agent", "not reloaded", reason=str(error))
        else:
            log.info("%s", says)
            self._journal.record("agent", "reloaded", reason=says)
        return says

    def _reloaded(self) -> str:
        info = self._info
        config, origins = self._load()
        differ = [key for key in config.__struct_fields__ if getattr(config, key) != getattr(info.config, key)]
        live = {key: getattr(config, key) for key in differ if key in LIVE}
        waits = [key for key in differ if key not in LIVE]
        renewed = self._tls.read_again()
        heard = self._trust.read_again()
        info.config = msgspec.structs.replace(info.config, **live)
        self._tls.set_life(info.config.certificate_s)
        info.origins.update({key: origins[key] for key in live})
        says = [f"in force now: {', '.join(live)}"] if live else []
        says += ["another certificate"] if renewed else []
        says += [f"{heard} words of the CA"] if heard else []
        says += [f"from the next start on: {', '.join(waits)}"] if waits else []
        return f"reloaded: {'; '.join(says) or 'nothing is new'}"


def _has_terminal() -> bool:
    """True if this process has a terminal, whose end a SIGHUP reports."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def check_service_places(config: AgentConfig, manager: ServiceManager, service_state: str) -> None:
    """Check an agent in system mode: it must not be root where its service's files are (``service_state``), and must be
    able to write its state and to make its socket, unless that was passed. Raises ConfigError before anything is made.
    """
    if config.mode != "system":
        return
    if os.geteuid() == 0 and config.state == service_state:
        why = f"what it wrote to {config.state} would be root's, and its service could not read it"
        raise ConfigError("mode", "the agent of all users does not run as root", why=why, hint=SERVICE_HINT)
    _check("state", Path(config.state))
    handed_over = manager.listener(config.socket)
    if handed_over is not None:
        handed_over.close()
    else:
        _check("socket", Path(config.socket).parent)


def _check(key: str, directory: Path) -> None:
    """Raises ConfigError if the directory can neither be written nor made."""
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110 -- what may not be looked at counts as not there
    if not os.access(there, os.W_OK | os.X_OK):
        what = f"{directory} cannot be {'used' if there == directory else 'made'}"
        raise ConfigError(key, what, why=f"{there}: Permission denied for uid {os.geteuid()}", hint=SERVICE_HINT)
