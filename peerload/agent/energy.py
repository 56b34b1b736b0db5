"""Energy management of this node: power controls, power-down, and the price feed.

All controls are off unless set: NVML power limits and locked clocks, cpufreq governor and maximum frequency. The previous
values are written to the state directory before each change, and restored when the agent stops, at its next start if
it was killed, or by `peerload power restore`. Each step can be repeated, so that a crash between any two steps leaves no
change behind: the stored values are dropped only when all are restored.

A machine without work for long enough is suspended. Before that, its node notifies its peers, so that they do not declare it
dead. They know the addresses of its network cards: any peer on its network can wake it. If a suspend command fails,
or the machine did not sleep after it, this is logged, and tried again with increasing delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.agent.runtime import in_own_thread, next_tick, run_command
from peerload.agent.sensors.nvml import find_library, text
from peerload.config.loader import load_prices
from peerload.core.resources.placement import matches_device
from peerload.model.errors import ConfigError
from peerload.model.events import MachineSleeping, MachineWoke, PricesRead
from peerload.model.resources import Device
from peerload.security.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerload.agent.runtime import EventSink
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.model.config import EnergySettings
    from peerload.model.resources import Profile


FILE = "power-controls.json"
GPU_LIMIT, GPU_CLOCKS = "gpu power limit", "gpu clocks"
CPU_FILES = {"cpu governor": "scaling_governor", "cpu frequency": "scaling_max_freq"}
CLOCK_MHZ_MIN = 0


class Control(NamedTuple):
    """A power control that was changed. kind: one of the names above; target: a file, or the UUID of a GPU; before: the
    previous value."""

    kind: str
    target: str
    before: str


class PowerControls:
    """The controls of one machine. file: stores the previous values."""

    def __init__(self, file: Path, library: Callable[[], Any] = find_library) -> None:
        """library: loads the interface of `pynvml`; None: there is no driver."""
        self._file = file
        self._library = library
        self._nvml: Any = None
        self._lock = threading.Lock()

    def are_wanted(self, wanted: EnergySettings) -> bool:
        """True if the settings set a control, or one has to be restored."""
        is_set = wanted.gpu_power_w or wanted.gpu_clock_mhz or wanted.cpu_governor or wanted.cpu_max_mhz
        return bool(is_set) or self._file.exists()

    def start(self, settings: EnergySettings, excluded: Sequence[int | str] = ()) -> list[str]:
        """Restore the controls that an earlier start has left, then apply the settings → the failures. excluded: GPUs that are
        not changed."""
        failures = self.restore()
        with self._lock:
            return failures + self._apply(settings, [*map(str, excluded)])

    def restore(self) -> list[str]:
        """Restore all controls → the failures; the failed ones stay stored and are tried again."""
        with self._lock:
            return self._restore()

    def _restore(self) -> list[str]:
        try:
            changed = self._changed()
        except ValueError as error:
            return [_unknown(self._file, error)]
        if not changed:
            return []
        with self._session(any(one.kind.startswith("gpu") for one in changed)):
            left, failures = [], []
            for one in reversed(changed):
                if why := self._set(one.kind, one.target, one.before):
                    left.append(one)
                    failures.append(f"{one.kind} of {one.target} cannot be restored to {one.before}: {why}")
        try:
            self._keep(left[::-1])
        except OSError as error:
            failures.append(f"{self._file} cannot be written: {error.strerror}")
        return failures

    def _apply(self, settings: EnergySettings, excluded: Sequence[str]) -> list[str]:
        failures: list[str] = []
        try:
            changed = self._changed()
        except ValueError:  # reported by `restore`; the previous values would be overwritten
            return ["no power control is set"]
        wants_gpus = bool(settings.gpu_power_w or settings.gpu_clock_mhz)
        with self._session(wants_gpus):
            if wants_gpus and self._nvml is None:
                failures.append("the power of GPUs is not limited: there is no working NVIDIA driver")
            for kind, target, value in [*_cpu_changes(settings), *self._gpu_changes(settings, excluded, failures)]:
                before, why = self._before(kind, target, value)
                if not why and before != value:
                    # Stored before the change, so that an agent that is killed in between leaves no unknown change.
                    noted = [*changed, Control(kind, target, before)]
                    try:
                        self._keep(noted)
                    except OSError as error:
                        why = f"{self._file} cannot be written: {error.strerror}"
                    else:
                        changed = noted
                        why = self._set(kind, target, value)
                if why:
                    failures.append(f"{kind} of {target} cannot be set to {value}: {why}")
        return failures

    # -- wanted changes --------------------------------------------------------------------------------------------------

    def _gpu_changes(
        self, settings: EnergySettings, excluded: Sequence[str], failures: list[str]
    ) -> Iterator[tuple[str, str, str]]:
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetCount() if nvml is not None else 0
        except self._errors as error:
            failures.append(f"the power of GPUs is not limited: {_why(error)}")
            return
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = text(nvml.nvmlDeviceGetUUID(handle))
                card = Device(f"nvidia:{uuid}", index=index, model=text(nvml.nvmlDeviceGetName(handle)))
            except self._errors as error:
                failures.append(f"the power of GPU {index} is not limited: {_why(error)}")
                continue
            if any(matches_device(card, name) for name in excluded):
                continue
            if settings.gpu_power_w:
                yield GPU_LIMIT, uuid, f"{round(settings.gpu_power_w * 1000)}"
            if settings.gpu_clock_mhz:
                yield GPU_CLOCKS, uuid, f"{settings.gpu_clock_mhz}"

    def _before(self, kind: str, target: str, value: str) -> tuple[str, str]:
        """The current value, and the reason why ``value`` cannot be set ("": it can)."""
        try:
            if kind in CPU_FILES:
                path = Path(target)
                before = path.read_text().strip()
                if kind == "cpu governor":
                    known = path.with_name("scaling_available_governors").read_text().split()
                    return before, "" if value in known else f"there are: {' '.join(known)}"
                low, high = (int(path.with_name(f"cpuinfo_{one}_freq").read_text()) for one in ("min", "max"))
                return before, "" if low <= int(
                    value
                ) <= high else f"it is between {low // 1000} and {high // 1000} MHz"
            if kind == GPU_CLOCKS:
                return "", ""  # earlier locks cannot be read: restoring unlocks the clocks
            handle = self._nvml.nvmlDeviceGetHandleByUUID(target)
            low, high = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            before = f"{self._nvml.nvmlDeviceGetPowerManagementLimit(handle)}"
            return before, "" if low <= int(value) <= high else f"it is between {low / 1000:g} and {high / 1000:g} W"
        except self._errors as error:
            return "", _why(error)

    # -- the changes ------------------------------------------------------------------------------------------------------

    def _set(self, kind: str, target: str, value: str) -> str:
        """Set one value → the reason why this failed, "" if it succeeded."""
        try:
            if kind in CPU_FILES:
                Path(target).write_text(value)
                return ""
            if self._nvml is None:
                return "there is no driver now"
            handle = self._nvml.nvmlDeviceGetHandleByUUID(target)
            if kind == GPU_LIMIT:
                self._nvml.nvmlDeviceSetPowerManagementLimit(handle, int(value))
            elif value:
                self._nvml.nvmlDeviceSetGpuLockedClocks(handle, CLOCK_MHZ_MIN, int(value))
            else:
                self._nvml.nvmlDeviceResetGpuLockedClocks(handle)
        except self._errors as error:
            return _why(error)
        return ""

    def _changed(self) -> list[Control]:
        """Controls to restore. For root, who may write everywhere, entries from a file of another user may only name processors and
        GPUs. Raises ValueError if the file cannot be read."""
        try:
            is_own = self._file.stat().st_uid == os.geteuid()
            found = [Control(*map(str, one)) for one in json.loads(self._file.read_text())]
        except FileNotFoundError:
            return []
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(str(error)) from None
        return [one for one in found if one.kind not in CPU_FILES or is_own or _is_of_kernel(one.target)]

    def _keep(self, changed: list[Control]) -> None:
        """Durably write the controls that have to be restored."""
        if not changed:
            self._file.unlink(missing_ok=True)
            return
        write_private(self._file, json.dumps(changed).encode())

    @contextlib.contextmanager
    def _session(self, wants_gpus: bool) -> Iterator[None]:
        """A session with the driver, if it is needed and there is one."""
        nvml: Any = self._library() if wants_gpus else None
        if nvml is not None:
            try:
                nvml.nvmlInit()
                self._nvml = nvml
            except nvml.NVMLError:
                nvml = None
        try:
            yield
        finally:
            self._nvml = None
            if nvml is not None:
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlShutdown()

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (OSError, ValueError) if self._nvml is None else (OSError, ValueError, self._nvml.NVMLError)


def _cpu_changes(settings: EnergySettings) -> Iterator[tuple[str, str, str]]:
    khz = f"{settings.cpu_max_mhz * 1000}" if settings.cpu_max_mhz else ""
    for kind, value in zip(CPU_FILES, (settings.cpu_governor, khz), strict=True):
        if value:
            for policy in sorted(Path(settings.cpufreq).glob("policy*")):
                yield kind, str(policy / CPU_FILES[kind]), value


def _unknown(file: Path, error: Exception) -> str:
    return f"the previous power controls are unknown: {file}: {error}; check the controls, then remove the file"


def _is_of_kernel(target: str) -> bool:
    return target.startswith("/sys/devices/system/cpu/") and "/../" not in target


def _why(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


log = logging.getLogger("peerload.agent")

LOOK_EVERY_S = 1.0
TELL_S = 1.0
"""Time for the messages to peers to be sent."""
SUSPEND_S_MAX = 60.0
"""Time after the suspend command in which the machine has to sleep; otherwise it stayed awake."""
CLOCK_EVERY_S = 0.3
GAP_S = 1.5
"""Minimum pause of the event loop that means that the machine slept."""
RETRIES_FACTOR_MAX = 64
COMMAND_S_MAX = 60.0
NOT_RUN, TIMED_OUT = 126, 124
PORT = 9
NET = Path("/sys/class/net")
CARDS_MAX = 8
ETHERNET_CHARS = 17
"""Length of the address of an Ethernet card, such as 52:54:00:12:34:56; those of InfiniBand are longer."""
NETWORKS_MAX = 16


def cards() -> tuple[str, ...]:
    """Hardware addresses of the Ethernet cards of this machine; interfaces without a device are left out."""
    found = []
    for path in sorted(NET.glob("*/address")):
        with contextlib.suppress(OSError):
            address = path.read_text().strip()
            if (path.parent / "device").exists() and address.strip("0:") and len(address) == ETHERNET_CHARS:
                found.append(address)
    return tuple(found[:CARDS_MAX])


def magic_packet(card: str) -> bytes:
    """The packet that wakes the machine with this network card."""
    return b"\xff" * 6 + bytes.fromhex(card.replace(":", "")) * 16


def _broadcasts() -> list[str]:
    """Broadcast addresses of the networks of this machine. 255.255.255.255 reaches only the one with the default route."""
    import psutil  # noqa: PLC0415 -- costs memory, and few nodes wake others

    found = [one.broadcast for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    return sorted({"255.255.255.255", *filter(None, found)})[:NETWORKS_MAX]


class Waker:
    """Wakes other nodes. resume_cmd: run instead of sending magic packets, with PEERLOAD_NODE in its environment."""

    def __init__(self, resume_cmd: str) -> None:
        self._resume_cmd = resume_cmd
        self._running: set[asyncio.Task[None]] = set()

    def wake(self, profile: Profile) -> None:
        if self._resume_cmd:
            task = asyncio.get_running_loop().create_task(self._resume(profile.node))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return
        why = "there is no network"
        for place in _broadcasts():  # one of the networks may be down
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                    for card in profile.wake:
                        sender.sendto(magic_packet(card), (place, PORT))
                why = ""
            except OSError as error:
                why = why and str(error.strerror)
        if why:
            log.warning("cannot send a magic packet: node=%s error=%s", profile.node, why)

    async def _resume(self, node: str) -> None:
        code = await _run(self._resume_cmd, {"PEERLOAD_NODE": node})
        if code:
            log.warning("resume_cmd failed: node=%s exit_code=%s", node, code)


class PowerDown:
    """Suspends this machine after ``sleep_after_s`` without work."""

    def __init__(
        self, sleep_after_s: float, suspend_cmd: str, node: Node, inbox: EventSink, event_log: EventLog
    ) -> None:
        """sleep_after_s: 0 = never."""
        self._sleep_after_s = sleep_after_s
        self._suspend_cmd = suspend_cmd
        self._node = node
        self._inbox = inbox
        self._event_log = event_log
        self._idle_since_s = time.monotonic()
        self._factor = 1

    async def run(self) -> None:
        """Check every LOOK_EVERY_S whether to suspend, until cancelled."""
        while self._sleep_after_s and self._suspend_cmd:
            await next_tick(LOOK_EVERY_S)
            if self._node.has_work:
                self._idle_since_s, self._factor = time.monotonic(), 1
            elif time.monotonic() - self._idle_since_s >= self._sleep_after_s * self._factor:
                await self.sleep()
                self._idle_since_s = time.monotonic()

    async def sleep(self) -> None:
        """Notify the peers, suspend, and notify them again when the machine is awake."""
        self._inbox.put(MachineSleeping(is_suspended=True))
        await asyncio.sleep(TELL_S)
        if not self._node.state.is_asleep:  # new work has arrived
            return
        try:
            if self._node.has_work:
                return
            self._event_log.record("energy", "asleep", reason=f"nothing to do for {self._sleep_after_s:g} s")
            self._event_log.settle()
            began_s = time.monotonic()
            code, slept_s = await self._suspend()
            if code or not slept_s:
                why = (
                    f"suspend_cmd failed with exit code {code}" if code else "suspend_cmd did not suspend this machine"
                )
                self._event_log.record("energy", "not asleep", reason=why)
                self._factor = min(self._factor * 2, RETRIES_FACTOR_MAX)
            else:
                self._event_log.record("energy", "awake", reason=f"after {slept_s:.0f} s")
                log.info("awake: slept_s=%.1f command_s=%.1f", slept_s, time.monotonic() - began_s)
        finally:
            self._inbox.put(MachineWoke())

    async def _suspend(self) -> tuple[int, float]:
        """Run the command → its exit code, and how long the machine slept (0: it did not). No process runs while it sleeps, so a
        sleep shows as a gap between two checks of the clock."""
        command = asyncio.get_running_loop().create_task(_run(self._suspend_cmd, {}))
        looked_s = began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        slept_s = 0.0
        while not (command.done() and (command.result() or slept_s)) and looked_s - began_s < SUSPEND_S_MAX + slept_s:
            await asyncio.sleep(CLOCK_EVERY_S)
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            slept_s = max(slept_s, now_s - looked_s if now_s - looked_s > GAP_S else 0.0)
            looked_s = now_s
        if not command.done():
            command.cancel()
            return (0 if slept_s else -1), slept_s
        return command.result(), slept_s


async def _run(command: str, variables: dict[str, str]) -> int:
    """Run a line in a shell → its exit code; NOT_RUN if it cannot be started, TIMED_OUT if it had to be killed."""
    try:
        code, _ = await run_command(("/bin/sh", "-c", command), COMMAND_S_MAX, os.environ | variables)
    except TimeoutError:
        return TIMED_OUT
    except OSError as error:  # for example, no process can be made
        log.warning("cannot start a command of [energy]: error=%s", error.strerror)
        return NOT_RUN
    return code


PRICES_EVERY_S = 10.0
FIRST_PRICES_S_MAX = 3.0
"""Maximum time that the agent's start waits for the prices."""


class PriceFeed:
    """Puts the prices of one file into the inbox, again after each change. An invalid file leaves the old prices in force."""

    def __init__(self, path: str, inbox: EventSink, event_log: EventLog) -> None:
        """path: "" = no file."""
        self._path = Path(path)
        self._is_given = bool(path)
        self._inbox = inbox
        self._event_log = event_log
        self._seen: object = ()

    async def run(self) -> None:
        """Check the file every PRICES_EVERY_S, until cancelled."""
        while self._is_given:
            if prices := await self.read():
                self._inbox.put(PricesRead(prices))
            await next_tick(PRICES_EVERY_S)

    async def first(self) -> tuple[tuple[float, float], ...]:
        """The prices at the agent's start; () if there are none, or the mount of the file does not answer in time."""
        if self._is_given:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self.read(), FIRST_PRICES_S_MAX)
        return ()

    async def read(self) -> tuple[tuple[float, float], ...]:
        """Read the file if it has changed → the prices; () if there are no new ones. In a separate thread, since a network
        mount may hang."""
        try:
            seen, prices = await in_own_thread(self._changed)
        except BlockingIOError:  # no thread can be made now
            return ()
        self._seen = seen
        if isinstance(prices, ConfigError):
            log.warning("price file refused: error=%s", prices)
            self._event_log.record("energy", "prices refused", reason=f"{prices}{prices.why and f' ({prices.why})'}")
            return ()
        if prices:
            self._event_log.record("energy", "prices read", reason=f"{len(prices) - 2} rows of {self._path}")
        return prices

    def _changed(self) -> tuple[object, tuple[tuple[float, float], ...] | ConfigError]:
        """The current identity of the file, and its prices if it has changed, or the error if they are invalid."""
        try:
            facts = self._path.stat()
            seen: object = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        except OSError as error:
            seen = error.errno
        try:
            return seen, () if seen == self._seen else load_prices(self._path)
        except ConfigError as error:
            return seen, error
