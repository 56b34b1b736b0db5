"""MPS: a control daemon of NVIDIA's Multi-Process Service for each GPU that tasks share by it, run as the user of the tasks.

States: off → starting → up → off, when no task has needed it for IDLE_S; failed: it could not be started, or a server has ended
with clients, for a time that grows with each successive failure (BACKOFF_S). A process of the launcher keeps the daemon
(`launcher/mps_keeper.py`) and outlives this agent; the next agent adopts it. The compute mode of a GPU is never changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.agent.runtime import next_tick
from peerload.agent.sensors.processes import MPS, ProcessOwners
from peerload.launcher.process import MPS_KEEPER
from peerload.launcher.protocol import MPS_CONTROL
from peerload.model.actions import SpawnTask
from peerload.model.events import MpsReported, TaskEnded, TaskLost
from peerload.model.resources import DeviceMode, GpuShare
from peerload.model.task import TaskSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.runtime import Inbox
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.core.resources.devices import DeviceGrant, DeviceState
    from peerload.model.config import AgentConfig
    from peerload.model.events import Event
    from peerload.model.task import Exit

log = logging.getLogger("peerload.gpus")

START_S_MAX = 15.0
IDLE_S = 60.0
LOOK_S = 2.0
LOOK_S_MAX = 4.0
POLL_S = 0.05
WITHOUT_LOOKS = 2
"""Number of successive checks in which a task used its GPU without being a client: it runs without MPS, unreported by CUDA."""
BACKOFF_S = (60.0, 300.0, 1800.0)
STATE_BYTES_MAX = 1 << 20


Place = Annotated[str, Meta(pattern=r"^/[!-~]{1,200}\Z")]


class KeeperState(msgspec.Struct, frozen=True):
    """State of a daemon as reported by its keeper (`launcher/mps_keeper.py`). The keeper runs as a user, so none of it is
    trusted."""

    device: Annotated[str, Meta(max_length=128)]
    owner: Annotated[str, Meta(max_length=128)] = ""
    at: float = 0.0
    places: dict[Literal["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"], Place] = {}
    clients: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 22)], ...], Meta(max_length=4096)] = ()
    faults: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    why: Annotated[str, Meta(max_length=300)] = ""


NO_STATUS = KeeperState("")


class _Daemon:
    """A daemon and its keeper. ready: reason why it could not be started, "" if it was. used_s: last time of need by a task."""

    def __init__(self, key: str, device: str, owner: str) -> None:
        self.key, self.device, self.owner = key, device, owner
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.used_s = time.monotonic()
        self.faults = 0
        self.status = NO_STATUS


class MpsDaemons:
    """The daemons of one agent, at most one for each GPU."""

    PREFIX = MPS

    def __init__(
        self,
        config: AgentConfig,
        node: Node,
        launcher: LauncherLink,
        inbox: Inbox,
        event_log: EventLog,
        idle_s: float = IDLE_S,
    ) -> None:
        self._config = config
        self._node = node
        self._launcher = launcher
        self._inbox = inbox
        self._event_log = event_log
        self._idle_s = idle_s
        self._directory = Path(config.state) / "mps"
        self._by_device: dict[str, _Daemon] = {}
        self._begun = asyncio.Event()
        self._failures: dict[str, int] = {}
        self._owners = ProcessOwners()
        self._without: dict[str, int] = {}
        """Number of successive checks in which an attempt used its GPU without being an MPS client, by attempt."""

    def _held(self, key: str) -> tuple[DeviceState, DeviceGrant] | None:
        """The GPU that this attempt has under MPS, and its grant."""
        for state in self._node.ledger.devices.of_grant(key):
            if key in state.grants and state.grants[key].mode is DeviceMode.MPS:
                return state, state.grants[key]
        return None

    def _of(self, key: str) -> _Daemon | None:
        held = self._held(key)
        daemon = self._by_device.get(held[0].id) if held is not None else None
        return daemon if daemon is not None and held is not None and daemon.owner == held[1].ask.owner else None

    # -- before the start ----------------------------------------------------------------------------------------------

    def is_awaited(self, key: str) -> bool:
        """True if an attempt has to run under MPS, and its daemon does not run yet."""
        daemon = self._of(key)
        return self._held(key) is not None and (daemon is None or not daemon.status.places)

    async def start(self, action: SpawnTask) -> str:
        """Start the daemon for an attempt, or wait for it → the reason why the attempt cannot start now, "" if it can."""
        held = self._held(action.key)
        if held is None:
            return ""
        daemon = self._of(action.key) or self._begin(held[0], held[1].ask.owner or "", action)
        why = await asyncio.shield(daemon.ready)
        if why and action.spec.request.gpu_share is not GpuShare.MPS:
            while self._held(action.key) is not None:
                await next_tick(POLL_S)  # the core is notified of the failure later
            return ""
        return why

    def _begin(self, state: DeviceState, owner: str, action: SpawnTask) -> _Daemon:
        before = self._by_device.pop(state.id, None)
        if before is not None:
            self._stop(before)
        daemon = _Daemon(f"{MPS}{state.device.index}x{secrets.token_hex(4)}-0", state.id, owner)
        self._by_device[state.id] = daemon
        self._begun.set()
        control = shutil.which(MPS_CONTROL)
        if control is None:
            self._failed(daemon, f"there is no {MPS_CONTROL} in PATH", is_fault=False)
            return daemon
        task = self._node.home.by_id.get(action.task)
        spec = TaskSpec(
            (*MPS_KEEPER, *(word.encode() for word in (control, state.id, owner))),
            b"/",
            action.spec.environment,
            user=action.spec.user,
        )  # fmt: skip
        extra = {b"CUDA_VISIBLE_DEVICES": state.device.name.encode(), b"CUDA_DEVICE_ORDER": b"PCI_BUS_ID"}
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:  # for example, a full disk
            self._failed(daemon, f"{self._directory} cannot be made: {error.strerror}", is_fault=False)
            return daemon
        self._launcher.spawn(
            SpawnTask(daemon.key, action.task, 1, action.home, spec),
            self._file(daemon.key),
            self._file(daemon.key).with_suffix(".err"),
            extra,
            "",
            -1 if task is None else task.terms.owner,
        )
        asyncio.get_running_loop().call_later(START_S_MAX, self._is_late, daemon)
        return daemon

    def _is_late(self, daemon: _Daemon) -> None:
        if not daemon.ready.done():
            self._failed(daemon, f"it did not answer within {START_S_MAX:g} s", is_fault=False)
            self._stop(daemon)

    def variables(self, key: str) -> dict[str, str]:
        """The variables with which an attempt finds its daemon; {} without a daemon."""
        daemon = self._of(key)
        return {str(name): place for name, place in daemon.status.places.items()} if daemon is not None else {}

    # -- while it runs -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            if not self._by_device:
                self._begun.clear()
                await self._begun.wait()
            waits = any(not daemon.ready.done() for daemon in self._by_device.values())
            await next_tick(POLL_S if waits else LOOK_S)
            for daemon in list(self._by_device.values()):
                self._read(daemon)
                if not waits and daemon.ready.done():
                    self._check(daemon)

    def _read_status(self, key: str) -> KeeperState:
        """The state in the file of a keeper; NO_STATUS while the file is incomplete."""
        try:
            with self._file(key).open("rb") as file:
                return _decoder.decode(file.read(STATE_BYTES_MAX))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return NO_STATUS

    def _read(self, daemon: _Daemon) -> None:
        status = self._read_status(daemon.key)
        if status is NO_STATUS:
            return
        daemon.status = status
        if status.why:
            self._failed(daemon, status.why, is_fault=daemon.ready.done())
        elif status.places and not daemon.ready.done():
            self._event_log.record("gpu", "mps", reason=f"daemon of {self._name(daemon)} is up")
            daemon.ready.set_result("")
        if status.faults > daemon.faults:
            daemon.faults = status.faults
            if self._grants(daemon):
                self._failed(daemon, "its server has ended, or failed", is_fault=True)
                self._stop(daemon)

    def _grants(self, daemon: _Daemon) -> list[str]:
        state = self._node.ledger.devices.states.get(daemon.device)
        grants = state.grants.items() if state is not None else ()
        return [key for key, grant in grants if grant.mode is DeviceMode.MPS and grant.ask.owner == daemon.owner]

    def _check(self, daemon: _Daemon) -> None:
        """End a daemon that no task needs, and report tasks that run without MPS."""
        keys = self._grants(daemon)
        self._without = {key: number for key, number in self._without.items() if key in self._node.ledger.running}
        if keys:
            daemon.used_s = time.monotonic()
            self._failures.pop(daemon.device, None)
        elif time.monotonic() - daemon.used_s >= self._idle_s:
            del self._by_device[daemon.device]
            self._stop(daemon)
            return
        state = self._node.ledger.devices.states.get(daemon.device)
        seen = dict(state.reading.ours) if state is not None else {}
        clients = {self._owners.key_of(pid) for pid in daemon.status.clients}
        for key in keys:
            if key in clients or key not in seen or clients & {"", None}:  # the owner of some processes is unknown
                self._without[key] = 0
                continue
            self._without[key] = self._without.get(key, 0) + 1
            if self._without[key] == WITHOUT_LOOKS:
                self._event_log.record("gpu", "mps-unused", reason=f"{key} uses {self._name(daemon)} without MPS")

    def is_client(self, key: str) -> bool | None:
        """True if an attempt is a client of its daemon; None if it needs no daemon, or has not used its GPU yet."""
        return None if key not in self._without else self._without[key] < WITHOUT_LOOKS

    async def look(self, key: str) -> None:
        """Check the daemon of a failed attempt, which may have failed before it."""
        daemon, now_s = self._of(key), time.clock_gettime(time.CLOCK_BOOTTIME)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S_MAX):
                while daemon is not None and daemon is self._of(key) and daemon.status.at <= now_s:
                    await asyncio.sleep(POLL_S)
                    self._read(daemon)

    # -- its end -------------------------------------------------------------------------------------------------------

    def _failed(self, daemon: _Daemon, why: str, *, is_fault: bool) -> None:
        if self._by_device.get(daemon.device) is daemon:
            del self._by_device[daemon.device]
        failures = self._failures[daemon.device] = self._failures.get(daemon.device, 0) + 1
        pause_s = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
        log.warning("MPS failed: device=%s reason=%s again_s=%g", daemon.device, why, pause_s)
        self._event_log.record("gpu", "mps-failed", reason=f"{self._name(daemon)}: {why}; again in {pause_s:g} s")
        self._inbox.put(MpsReported(daemon.device, why, is_fault=is_fault))
        asyncio.get_running_loop().call_later(pause_s, self._inbox.put, MpsReported(daemon.device))
        if not daemon.ready.done():
            daemon.ready.set_result(why)

    def _stop(self, daemon: _Daemon) -> None:
        self._launcher.signal(daemon.key, signal.SIGTERM)

    def _file(self, key: str) -> Path:
        return self._directory / key

    def _name(self, daemon: _Daemon) -> str:
        state = self._node.ledger.devices.states.get(daemon.device)
        return f"GPU {state.device.index}" if state is not None else daemon.device

    def event_received(self, event: Event) -> None:
        if isinstance(event, TaskEnded | TaskLost):
            key = event.key
            daemon = next((one for one in self._by_device.values() if one.key == key), None)
            if daemon is not None:
                self._read(daemon)  # the keeper has reported the reason
            if daemon is not None and self._by_device.get(daemon.device) is daemon:
                self._failed(daemon, "its keeper has ended", is_fault=daemon.ready.done())
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._launcher.forget(key)
        for path in (self._file(key), self._file(key).with_suffix(".err")):
            path.unlink(missing_ok=True)

    def listed(self, running: AbstractSet[str], ended: Mapping[str, Exit]) -> None:
        """Adopt the keepers of an earlier agent."""
        for daemon in list(self._by_device.values()):
            if daemon.key not in running:
                self.event_received(TaskLost(daemon.key, "the launcher was lost"))
        for key in running - {daemon.key for daemon in self._by_device.values()}:
            status = self._read_status(key)
            daemon = _Daemon(key, status.device, status.owner)
            if daemon.device and daemon.device not in self._by_device:
                self._by_device[daemon.device] = daemon
                self._begun.set()
            else:
                self._stop(daemon)
        for key in ended:
            self._forget(key)

    def close(self) -> None:
        """End the daemons that no task uses."""
        for daemon in self._by_device.values():
            if not self._grants(daemon):
                self._stop(daemon)


_decoder = msgspec.json.Decoder(KeeperState)
