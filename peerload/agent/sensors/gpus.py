"""The GPU sensors of this node. A separate thread calls the driver: if it hangs, the GPUs become unknown, without any
other effect.

One call is made at a time (`GpuThread`). After a timeout the GPUs are reported as unknown until the call returns.
They are read every second while a task holds one or waits for one, and otherwise less often.

Agents on one machine must not give the same card to different tasks, so each locks the cards that it uses. A lock is on a file that
all agents of the machine know, and ends with the process that holds it. A card that cannot be locked is not used, since another
agent may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import stat
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.runtime import in_own_thread
from peerload.agent.sensors import nvml
from peerload.agent.sensors.processes import ProcessOwners
from peerload.config.loader import configured_devices
from peerload.core.resources.placement import matches_device
from peerload.model.events import DevicesFound, DevicesSampled
from peerload.model.resources import DEVICES_MAX, Device, DeviceReading, Health
from peerload.security.private_files import machine_boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.runtime import EventSink
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.resources.admission import Ledger
    from peerload.model.config import AgentConfig


log = logging.getLogger("peerload.gpus")

PLACES = (Path("/run/lock"), Path("/var/lock"), Path("/run/lock/peerload"), Path("/tmp"))  # noqa: S108 -- FLAGS
"""Directories for locks. Some distributions only let root write to the first ones; deploy/tmpfiles.d makes the third."""
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags against links and pipes that other users have put in the file's place: do not follow or wait for them."""


class DeviceLocks:
    """The locks of this process. place: an existing directory for the files (default: the machine's lock directory)."""

    def __init__(self, place: Path | None = None) -> None:
        self._place = place or _place()
        self._held: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        """Devices that are not used: id → reason."""

    def claim(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Lock devices → the locked ones. New refusals are logged."""
        before, self.refused = self.refused, {}
        found = []
        for device in devices:
            why = "" if device.id in self._held else self._lock(device)
            if not why:
                found.append(device)
                continue
            self.refused[device.id] = why
            if before.get(device.id) != why:
                log.warning("GPU is not used: index=%d id=%s reason=%s", device.index, device.id, why)
        return tuple(found)

    def _lock(self, device: Device) -> str:
        """Lock a device → the reason why this failed, "" if it succeeded."""
        path = self._place / f"peerload-device-{device.mark:08x}"
        try:
            fd = _opened(path)
        except OSError as error:
            return f"it cannot be claimed: {path}: {error.strerror}"
        try:
            why = _locked(fd)
        except OSError as error:
            why = f"it cannot be claimed: {path}: {error.strerror}"
        if why:
            os.close(fd)
            return why
        self._held[device.id] = fd
        with contextlib.suppress(OSError):  # a file of another user, or a full disk: the lock is valid without the pid
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return ""

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held = {}


def _opened(path: Path) -> int:
    """Open the lock file, or create it. An existing file must not be opened with O_CREAT: fs.protected_regular forbids
    that in such directories if the file is another user's. Raises OSError."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | FLAGS)
    before = os.umask(0)  # agents of other users must be able to open it
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o666)
    finally:
        os.umask(before)
    return os.open(path, os.O_RDONLY | FLAGS)  # sufficient for a lock


def _locked(fd: int) -> str:
    """Lock the file → the reason why this failed, "" if it succeeded. Raises OSError."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return "it cannot be claimed: something else is in the place of the claim's file"
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        who = f"process {holder}" if holder.isdecimal() and Path("/proc", holder).exists() else "it does not say who"
        return f"another agent has it ({who})"
    return ""


def _place() -> Path:
    """The first directory that all users may write to, so that agents of different users, including root, choose the same. If
    there is none, the last one, where claims will be refused."""
    for place in PLACES:
        with contextlib.suppress(OSError):
            mode = place.stat().st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_IWOTH and os.access(place, os.W_OK):
                return place
    return PLACES[-1]


class GpuThread:
    """Runner of driver calls, one at a time, each in a thread that does not keep the process alive."""

    def __init__(self) -> None:
        self._done: asyncio.Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        return self._done is not None and not self._done.done()

    async def do(self, call: Callable[[], Any], seconds_max: float) -> Any:  # noqa: ANN401 -- what the call returns
        """The result of the call, or its exception. Raises TimeoutError if it does not return in time, or the previous call
        has not returned; BlockingIOError if no thread can be made."""
        if self.is_busy:
            raise TimeoutError
        self._done = in_own_thread(call)
        self._done.add_done_callback(_looked_at)
        async with asyncio.timeout(seconds_max):
            return await asyncio.shield(self._done)

    async def idle(self) -> None:
        """Return when the last call has returned."""
        if self._done is not None:
            await asyncio.wait((self._done,))


def _looked_at(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()


READ_S_MAX = 2.0
"""Timeout of reading all cards."""
START_S_MAX = 2.0
"""Timeout of the search at the agent's start; a driver that has to wake its cards takes seconds."""
SAMPLE_S = 1.0
"""Interval of readings while a task has a GPU or waits for one."""
IDLE_SAMPLE_S = 5.0
"""Interval of readings otherwise, and of searches for slices if the only cards are in MIG mode without slices."""
LOOK_AGAIN_S = 0.05
"""Interval of readings shortly after an attempt has left a GPU."""
LOOK_S = 2.0
"""Duration of these readings, since memory may be freed shortly after the end of its process."""
FIND_EVERY_S = 60.0
"""Interval of the search for a driver or card if there is none, and for a card that is missing, unusable, or used
by another agent."""
FIND_AGAIN_S = 2.0
"""Interval of the search for a driver that was unloaded."""
SEEN_MAX = 2 * DEVICES_MAX
"""Maximum number of remembered cards, present or missing."""
REPORT_BYTES = 16 << 20
REPORT_BUSY = 0.05
"""Smaller changes are not reported."""
HANGS = "its driver does not answer"
AWAY = "its driver has been unloaded"
GONE = "its driver does not list it any more"
UNREADABLE = "it cannot be read"
NO_SLICES = "the only cards are meant for slices (MIG) and have none"
NOT_INSTALLED = f"no {nvml.LIBRARY}: the driver is not installed"
"""The reason on most machines without GPUs."""

FAULTS_FILE = "gpus"
"""File of STATE with the errors that GPUs have reported."""

Read = list[tuple[nvml.CardReading, dict[int, str | None]]]


class Gpus:
    """Puts DevicesFound when the set of GPUs has changed, and DevicesSampled when readings have changed
    noticeably.

    library: a module like `pynvml`; None: the driver of this machine is searched. others: this node's devices of other
    kinds, reported along with the GPUs. usable(devices): the GPUs that this agent may use.
    """

    _ledger: Ledger
    _event_log: EventLog

    def __init__(
        self,
        inbox: EventSink,
        library: Any = None,  # noqa: ANN401 -- a module without types
        others: tuple[Device, ...] = (),
        usable: Callable[[tuple[Device, ...]], tuple[Device, ...]] = lambda devices: devices,
        faults: nvml.GpuFaults | None = None,
        owners: ProcessOwners | None = None,
    ) -> None:
        self._inbox = inbox
        self._library = library
        self._others = others
        self._usable = usable
        self._faults = faults
        self._owners = owners or ProcessOwners()
        self._is_contained = self._owners.is_contained()
        self._nvml: nvml.Nvml | None = None
        self._thread: GpuThread | None = None
        self._wanted = asyncio.Event()
        self._look_until_s = 0.0
        self._wait_for_reading: list[asyncio.Future[None]] = []
        self._read_s = 0.0
        self._gpus: dict[str, nvml.GpuAverages] = {}
        self._reported: dict[str, DeviceReading] = {}
        self.power: dict[str, tuple[float, DeviceReading]] = {}
        """Time (CLOCK_BOOTTIME) and value of the last reading, by the address of each card, or its id."""
        self._is_away = False
        self._has_failed = False
        self._seen: tuple[Device, ...] = ()
        self._ever_seen: dict[str, str] = {}
        self._is_short = False
        self._is_late = False
        self._has_mig_layout_changed = False
        self._look_for_more_at_s = 0.0
        self._why_none = ""
        self.devices: tuple[Device, ...] = others

    @property
    def why_none(self) -> str:
        """Reason why this node has no GPUs; "" if it has some, even if their driver does not answer."""
        return "" if self._gpus else self._why_none

    async def find(self, seconds_max: float = START_S_MAX) -> tuple[Device, ...]:
        """Find all devices of this node; without the GPUs if their driver does not answer in time (they are reported
        later)."""
        self._thread = self._thread or GpuThread()
        try:
            gpus, why = await self._thread.do(self._find, seconds_max)
        except TimeoutError:
            self._log_none(f"the driver has not answered within {seconds_max:g} s")
        except Exception as error:  # noqa: BLE001 -- whatever goes wrong with a driver, the rest of the node works
            self._failed("find", error)
            self._log_none(f"they cannot be looked for: {error}")
        else:
            self._has_failed = False
            self._take(gpus, why)
        return self.devices

    def look(self) -> None:
        """Read all cards now, and often for a short time: an attempt has left a GPU, or needs one."""
        self._look_until_s = time.monotonic() + LOOK_S
        self._wanted.set()

    def wake(self) -> None:
        """Read all cards now: an attempt has got a GPU."""
        self._wanted.set()

    async def read_anew(self) -> None:
        """Return when a reading that began after this call was reported, if it has changed; immediately if the driver does
        not answer."""
        if not self._gpus or self._is_away:
            return
        over = asyncio.get_running_loop().create_future()
        self._wait_for_reading.append(over)
        self._wanted.set()
        await asyncio.wait((over,), timeout=READ_S_MAX)

    async def run(self, ledger: Ledger, event_log: EventLog) -> None:
        """Run until cancelled, for the tasks of this ledger. event_log: gets an event when a GPU is found or its health changes."""
        self._ledger, self._event_log = ledger, event_log
        while True:
            await self._wait()
            if not self._gpus or self._is_away:
                await self._find_again()
                continue
            if time.monotonic() >= self._look_for_more_at_s:
                self._look_for_more_at_s = time.monotonic() + FIND_EVERY_S
                await self._look_for_more()
            if not self._is_away:
                await self._sample()

    async def close(self) -> None:
        """Close the driver; a hanging thread is abandoned."""
        if self._thread is None:
            return
        if self._nvml is not None and not self._thread.is_busy:
            try:
                await self._thread.do(self._nvml.close, READ_S_MAX)
            except TimeoutError:
                log.warning("GPU driver does not answer")

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _find(self, *, is_anew: bool = False) -> tuple[tuple[Device, ...], str]:
        """The GPUs, or none and the reason. is_anew: also find cards that were added after the first search."""
        library = self._library or nvml.find_library()
        if library is None:
            return (), NOT_INSTALLED
        if self._nvml is None:
            self._nvml = nvml.Nvml(library, self._faults)
        try:
            gpus = self._nvml.find_anew() if is_anew else self._nvml.find()
        except OSError as error:
            return (), str(error)
        except nvml.SessionOver as error:
            self._nvml.close(is_over=True)
            return (), f"the driver was unloaded: {error}"
        if not gpus:
            self._nvml.close()
        why = NO_SLICES if self._nvml.awaits_slices else "the driver has no card that can be used"
        return gpus, "" if gpus else why

    def _read(self) -> Read | None:
        """The readings with the owner of each process; None if the driver was unloaded."""
        assert self._nvml is not None
        try:
            cards = self._nvml.read()
        except nvml.SessionOver as error:
            log.warning("GPU driver was unloaded: error=%s", error)
            self._nvml.close(is_over=True)
            return None
        return [
            (card, {process.pid: self._owners.key_of(process.pid) for process in card.processes or ()})
            for card in cards
        ]

    # -- in the loop ---------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        if self._is_away:
            pause_s = FIND_AGAIN_S
        elif not self._gpus:
            # Waits for a driver that was late at the start, or that still hangs.
            if self._thread is not None and self._thread.is_busy:
                await self._thread.idle()
                return
            awaits_slices = self._nvml is not None and self._nvml.awaits_slices
            pause_s = IDLE_SAMPLE_S if awaits_slices else FIND_EVERY_S
        elif time.monotonic() < self._look_until_s:
            pause_s = LOOK_AGAIN_S
        else:
            pause_s = SAMPLE_S if self._ledger.devices.holding or self._ledger.waits_for_devices else IDLE_SAMPLE_S
        try:
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
        except TimeoutError:
            return
        self._wanted.clear()

    async def _find_again(self) -> None:
        before, was_away = self.devices, self._is_away
        if self._thread is not None and self._thread.is_busy:
            return
        await self.find(READ_S_MAX)
        if was_away and not self._gpus:  # missing GPUs stay known: tasks may still hold them
            return
        if self.devices != before:
            self._inbox.put(DevicesFound(self.devices))

    async def _look_for_more(self) -> None:
        """Search again: cards of other agents may have become free, missing ones may be back."""
        gpus, why_none = self._seen, ""
        if self._is_short or self._has_mig_layout_changed:
            assert self._thread is not None
            why, is_anew = AWAY, not self._is_late
            self._is_late = self._has_mig_layout_changed = False
            try:
                gpus, why_none = await self._thread.do(functools.partial(self._find, is_anew=is_anew), READ_S_MAX)
            except TimeoutError:  # the driver may be waking its cards: check the result when it returns
                self._is_late = True
                self._look_for_more_at_s = 0.0
                return
            except Exception as error:  # noqa: BLE001 -- as in `find`
                self._failed("find", error)
                gpus, why = (), UNREADABLE
            if not gpus and why_none != NO_SLICES:
                self._go_away(why)
                return
        missing = tuple(gpu for gpu in self.devices if gpu.id in self._gpus and self._is_missing(gpu.id, gpu.bdf, gpus))
        before = self.devices
        self._take((*gpus, *missing), why_none)
        self._note_seen(gpus)
        if self.devices != before:
            self._inbox.put(DevicesFound(self.devices))

    def _take(self, gpus: tuple[Device, ...], why: str) -> None:
        self._note_seen(gpus)
        found = self._usable(gpus)[: DEVICES_MAX - len(self._others)]
        if not found:
            self._log_none(why or "all of them are left alone")
            if self._is_away:
                return
        elif self.devices != (*found, *self._others) or self._is_away:
            log.info("GPUs found: count=%d models=%s", len(found), ", ".join(gpu.model for gpu in found))
            self._why_none = ""
        if found and (self._is_away or {gpu.id for gpu in found} != self._gpus.keys()):
            self._wanted.set()  # new cards are read at once
        self._is_away = False
        kept = {device.id: self._gpus[device.id] for device in self.devices if device in found}
        self._gpus = {gpu.id: kept.get(gpu.id) or nvml.GpuAverages(gpu) for gpu in found}
        self.devices = (*found, *self._others)
        self._look_for_more_at_s = time.monotonic() + FIND_EVERY_S

    def _note_seen(self, gpus: tuple[Device, ...]) -> None:
        self._seen = gpus
        ever_seen = {gpu.id: gpu.bdf for gpu in gpus} | {
            name: bdf for name, bdf in self._ever_seen.items() if self._is_missing(name, bdf, gpus)
        }
        self._ever_seen = dict(islice(ever_seen.items(), SEEN_MAX))
        unusable = self._nvml.unusable if self._nvml is not None else 0
        self._is_short = unusable > 0 or len(self._ever_seen) > len(gpus)

    def _is_missing(self, name: str, bdf: str, gpus: tuple[Device, ...]) -> bool:
        """True if a known device is no longer listed, neither as a whole card nor in slices."""
        is_listed = self._nvml is not None and bdf in self._nvml.places
        return not is_listed and all(gpu.id != name for gpu in gpus)

    def _log_none(self, why: str) -> None:
        if self._why_none != why:
            log.info("no GPUs: reason=%s", why)
        self._why_none = why

    def _failed(self, what: str, error: Exception) -> None:
        if not self._has_failed:
            log.error("GPU driver call failed: call=%s", what, exc_info=error)
        self._has_failed = True

    def _go_away(self, why: str) -> None:
        """Report all GPUs as unknown, and search for them until they are found."""
        self._is_away = True
        self._report_unknown(why)

    async def _sample(self) -> None:
        waiting, self._wait_for_reading = self._wait_for_reading, []
        try:
            await self._read_all()
        finally:
            for over in waiting:
                if not over.done():
                    over.set_result(None)

    async def _read_all(self) -> None:
        assert self._thread is not None
        read_s, began_s = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
        is_wanted = began_s < self._look_until_s
        try:
            cards = await self._thread.do(self._read, READ_S_MAX)
        except TimeoutError:
            log.warning("GPU driver timeout, GPUs are unknown until it answers: seconds=%g", READ_S_MAX)
            self._report_unknown(HANGS)
            await self._thread.idle()
            log.warning("GPU driver answers again")
            return  # its answer is outdated
        except nvml.MigLayoutChanged:
            log.info("slices of a GPU have changed, searching again")
            self._has_mig_layout_changed = True
            self._look_for_more_at_s = 0.0
            self._wanted.set()
            return
        except Exception as error:  # noqa: BLE001 -- as in `find`
            if not self._has_failed:
                self._report_unknown(UNREADABLE)
            self._failed("read", error)
            return
        self._has_failed = False
        if cards is None:
            self._go_away(AWAY)
            return
        gap_s, self._read_s = began_s - self._read_s, began_s
        readings = self._readings(cards, gap_s)
        places = {device.id: device.bdf or device.id for device in self.devices}
        self.power = {places[reading.id]: (read_s, reading) for reading in readings if reading.id in places}
        if is_wanted or any(_has_changed(self._reported.get(reading.id), reading) for reading in readings):
            self._report(read_s, readings)

    def _readings(self, cards: Read, gap_s: float) -> tuple[DeviceReading, ...]:
        by_device: dict[str, list[str]] = {}
        for key, names in self._ledger.devices.holding.items():
            for name in names:
                by_device.setdefault(name, []).append(key)
        readings = []
        for card, owners in cards:
            averaged = self._gpus.get(card.id)
            if averaged is None:  # used by another agent, or excluded
                continue
            held = by_device.get(card.id, [])
            tenants = nvml.memory_by_owner(
                card.mem_used_bytes, card.processes, owners, held, is_contained=self._is_contained
            )
            readings.append(averaged.reading(card, tenants, held, gap_s))
        read = {card.id for card, _ in cards}
        readings += [
            msgspec.structs.replace(self._reported.get(name, DeviceReading(name)), health=Health.SICK, why=GONE)
            for name in self._gpus
            if name not in read
        ]
        return tuple(readings)

    def _report(self, read_s: float, readings: tuple[DeviceReading, ...]) -> None:
        for reading in readings:
            self._note_health(self._reported.get(reading.id), reading)
        self._reported = {reading.id: reading for reading in readings}
        self._inbox.put(DevicesSampled(read_s, readings))

    def _note_health(self, before: DeviceReading | None, now: DeviceReading) -> None:
        if before is not None and before.health is now.health and (before.why == now.why or now.health.is_usable):
            return
        device = next(device for device in self.devices if device.id == now.id)
        description = f"GPU {device.index} ({device.model})" + (f": {now.why}" if now.why else "")
        is_new = before is None and now.health is Health.OK
        self._event_log.record("gpu", "found" if is_new else now.health.name.lower(), reason=description)

    def _report_unknown(self, why: str) -> None:
        unknown = tuple(
            msgspec.structs.replace(self._reported.get(name, DeviceReading(name)), health=Health.UNKNOWN, why=why)
            for name in self._gpus
        )
        self._report(time.clock_gettime(time.CLOCK_BOOTTIME), unknown)


def _has_changed(last: DeviceReading | None, now: DeviceReading) -> bool:
    if last is None:
        return True
    if (last.health, last.why, last.foreign, last.is_throttled) != (now.health, now.why, now.foreign, now.is_throttled):
        return True
    if abs(last.busy - now.busy) >= REPORT_BUSY or abs(last.mem_used_bytes - now.mem_used_bytes) >= REPORT_BYTES:
        return True
    if abs(last.mem_foreign_peak_bytes - now.mem_foreign_peak_bytes) >= REPORT_BYTES:
        return True
    before, after = dict(last.ours), dict(now.ours)
    return before.keys() != after.keys() or any(abs(before[key] - after[key]) >= REPORT_BYTES for key in after)


def _is_or_is_of(device: Device, name: str) -> bool:
    """True if a selector of GPUs matches this device or, by its number, the card of this slice."""
    is_of = name.isdecimal() and device.index // nvml.SLICES_FROM == int(name) + 1
    return is_of or matches_device(device, name)


def node_gpus(
    config: AgentConfig,
    inbox: EventSink,
    claims: DeviceLocks,
    library: Any = None,  # noqa: ANN401 -- a module without types
) -> Gpus:
    """The GPU sensors as configured. library: a module with the interface of `pynvml` and simulated cards of this agent
    alone; None: the driver of this machine is searched."""
    excluded = tuple(map(str, config.gpu.exclude))

    def usable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """The GPUs without excluded ones, and without those that another agent of this machine uses."""
        left = tuple(device for device in devices if not any(map(functools.partial(_is_or_is_of, device), excluded)))
        return claims.claim(left) if library is None else left

    faults = nvml.GpuFaults(machine_boot_id(), Path(config.state) / FAULTS_FILE)
    return Gpus(inbox, library, configured_devices(config.device), usable, faults)
