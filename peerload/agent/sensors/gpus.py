"""The GPUs of this node, looked at in a thread of their own: a driver that hangs makes the GPUs unknown, and nothing else.

The thread is given one thing to do at a time (`gpu_thread.py`). What it has not done in time is waited for no longer: the
GPUs are told as unknown until it comes back. They are read every second while a task holds one or waits for one, and less
often when nothing here needs to know.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from peerload.agent.sensors.gpu_health import GpuFaults
from peerload.agent.sensors.gpu_thread import GpuThread
from peerload.agent.sensors.gpu_usage import Averaged, shared_out
from peerload.agent.sensors.nvml import CardReading, CardsRecut, Nvml
from peerload.agent.sensors.nvml_library import LIBRARY, SessionOver, find_library
from peerload.agent.sensors.process_owner import ProcessOwners
from peerload.config.configured_devices import configured_devices
from peerload.core.resources.placement import is_meant
from peerload.model.devices import DEVICES_MAX, Device, DeviceReading, Health
from peerload.model.events import DevicesFound, DevicesSampled
from peerload.security.private_files import machine_boot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from peerload.agent.sensors.device_locks import DeviceLocks
    from peerload.core.resources.admission import Ledger
    from peerload.model.config import AgentConfig
    from peerload.model.events import Event

log = logging.getLogger("peerload.gpus")

READ_S_MAX = 2.0
"""A driver that has not told all of its cards within this hangs."""
START_S_MAX = 2.0
"""An agent's start waits for the GPUs no longer; a driver that wakes its cards only then takes seconds."""
SAMPLE_S = 1.0
"""While a task has a GPU, or waits for one, they are read this often, …"""
IDLE_SAMPLE_S = 5.0
"""… else this often; so often, too, slices are looked for where the only cards are meant for slices and have none."""
LOOK_AGAIN_S = 0.05
"""After an attempt has left a GPU it is read this often, for …"""
LOOK_S = 2.0
"""… so long, since memory may be given back a moment after its process is gone."""
FIND_EVERY_S = 60.0
"""Where there is no driver, or no card, it is looked for this often, and so is a card that is missing, cannot be used, or
that another agent has."""
FIND_AGAIN_S = 2.0
"""A driver that went away under us is looked for this often."""
SEEN_MAX = 2 * DEVICES_MAX
"""So many cards are remembered, those that are there and those that may come back."""
TELL_BYTES = 16 << 20
TELL_BUSY = 0.05
"""Smaller changes are not worth an event."""
HANGS = "its driver does not answer"
AWAY = "its driver has been unloaded"
GONE = "its driver does not list it any more"
UNREADABLE = "it cannot be read"
NO_SLICES = "the only cards are meant for slices (MIG) and have none"
NOT_INSTALLED = f"no {LIBRARY}: the driver is not installed"
"""Of most machines without GPUs."""

FAULTS_FILE = "gpus"
"""File of STATE that keeps what GPUs have reported."""

Read = list[tuple[CardReading, dict[int, str | None]]]


class GpuHost(Protocol):
    """The node, as far as the GPU sensors have to do with it."""

    def holding(self) -> Mapping[str, tuple[str, ...]]:
        """Ids of the devices that each attempt holds."""

    def wants_gpus(self) -> bool:
        """Whether a task holds a GPU or waits for one."""

    def gpu_changed(self, state: str, words: str) -> None:
        """A GPU was found, or its health has changed."""


class NoHost:
    """The host of GPUs that no node uses yet."""

    def holding(self) -> Mapping[str, tuple[str, ...]]:
        """Nothing is held."""
        return {}

    def wants_gpus(self) -> bool:
        """True: the sensors read often."""
        return True

    def gpu_changed(self, state: str, words: str) -> None:
        """Nobody is told."""


class Gpus:
    """Puts DevicesFound when other GPUs are there than before, and DevicesSampled when readings have changed noticeably.

    library: what speaks like `pynvml`; None: the driver of this machine is looked for. others: this node's devices of
    other kinds, told along with the GPUs. usable(devices): those of the GPUs found that this agent may use.
    """

    def __init__(
        self,
        put: Callable[[Event], None],
        library: Any = None,  # noqa: ANN401 -- a module without types
        others: tuple[Device, ...] = (),
        usable: Callable[[tuple[Device, ...]], tuple[Device, ...]] = lambda devices: devices,
        faults: GpuFaults | None = None,
        owners: ProcessOwners | None = None,
    ) -> None:
        self._put = put
        self._library = library
        self._others = others
        self._usable = usable
        self._faults = faults
        self._owners = owners or ProcessOwners()
        self._is_contained = self._owners.is_contained()
        self._host: GpuHost = NoHost()
        self._nvml: Nvml | None = None
        self._thread: GpuThread | None = None
        self._wanted = asyncio.Event()
        self._look_until_s = 0.0
        self._wait_for_reading: list[asyncio.Future[None]] = []
        self._read_s = 0.0
        self._gpus: dict[str, Averaged] = {}
        self._told: dict[str, DeviceReading] = {}
        self._is_away = False
        self._has_failed = False
        self._seen: tuple[Device, ...] = ()
        self._ever_seen: dict[str, str] = {}
        self._is_short = False
        self._is_late = False
        self._is_recut = False
        self._look_for_more_at_s = 0.0
        self._why_none = ""
        self.devices: tuple[Device, ...] = others

    @property
    def why_none(self) -> str:
        """Why there are no GPUs, in words; "" if there are some, though their driver may be away."""
        return "" if self._gpus else self._why_none

    async def find(self, seconds_max: float = START_S_MAX) -> tuple[Device, ...]:
        """All devices of this node; without the GPUs if their driver does not answer in time (they are told later)."""
        self._thread = self._thread or GpuThread()
        try:
            gpus, why = await self._thread.do(self._find, seconds_max)
        except TimeoutError:
            self._say_none(f"the driver has not answered within {seconds_max:g} s")
        except Exception as error:  # noqa: BLE001 -- whatever goes wrong with a driver, the rest of the node works
            self._failed("looked for", error)
            self._say_none(f"they cannot be looked for: {error}")
        else:
            self._has_failed = False
            self._take(gpus, why)
        return self.devices

    def look(self) -> None:
        """An attempt has left a GPU, or wants one: read them all now, and again for a moment."""
        self._look_until_s = time.monotonic() + LOOK_S
        self._wanted.set()

    def wake(self) -> None:
        """An attempt has been given a GPU: read them now, and from now on more often."""
        self._wanted.set()

    async def read_anew(self) -> None:
        """Return when a reading that began after this call was told, if it was any news; at once, or before that, if the driver
        does not answer."""
        if not self._gpus or self._is_away:
            return
        over = asyncio.get_running_loop().create_future()
        self._wait_for_reading.append(over)
        self._wanted.set()
        await asyncio.wait((over,), timeout=READ_S_MAX)

    async def run(self, host: GpuHost) -> None:
        """Look for ever, for the tasks of this host."""
        self._host = host
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
        """Let go of the driver; a thread that hangs is left to itself."""
        if self._thread is None:
            return
        if self._nvml is not None and not self._thread.is_busy:
            try:
                await self._thread.do(self._nvml.close, READ_S_MAX)
            except TimeoutError:
                log.warning("the driver of the GPUs does not answer")
        self._thread.stop()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _find(self, *, is_anew: bool = False) -> tuple[tuple[Device, ...], str]:
        """The GPUs, or none and why. ``is_anew``: also those that came after they were first looked for."""
        library = self._library or find_library()
        if library is None:
            return (), NOT_INSTALLED
        if self._nvml is None:
            self._nvml = Nvml(library, self._faults)
        try:
            gpus = self._nvml.find_anew() if is_anew else self._nvml.find()
        except OSError as error:
            return (), str(error)
        except SessionOver as error:
            self._nvml.close(is_over=True)
            return (), f"the driver went away: {error}"
        if not gpus:
            self._nvml.close()
        why = NO_SLICES if self._nvml.awaits_slices else "the driver has no card that can be used"
        return gpus, "" if gpus else why

    def _read(self) -> Read | None:
        """What was read, and whose each process is; None if the driver went away."""
        assert self._nvml is not None
        try:
            cards = self._nvml.read()
        except SessionOver as error:
            log.warning("the driver of the GPUs went away: %s", error)
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
            # One that was late at the start is waited for; a hung one for as long as it hangs.
            if self._thread is not None and self._thread.is_busy:
                await self._thread.idle()
                return
            awaits_slices = self._nvml is not None and self._nvml.awaits_slices
            pause_s = IDLE_SAMPLE_S if awaits_slices else FIND_EVERY_S
        elif time.monotonic() < self._look_until_s:
            pause_s = LOOK_AGAIN_S
        else:
            pause_s = SAMPLE_S if self._host.wants_gpus() else IDLE_SAMPLE_S
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
        if was_away and not self._gpus:  # what is away stays known: its tasks may still hold it
            return
        if self.devices != before:
            self._put(DevicesFound(self.devices))

    async def _look_for_more(self) -> None:
        """What another agent had may be free by now, what is missing may have come back, and be of use."""
        gpus, why_none = self._seen, ""
        if self._is_short or self._is_recut:
            assert self._thread is not None
            why, is_anew = AWAY, not self._is_late
            self._is_late = self._is_recut = False
            try:
                gpus, why_none = await self._thread.do(functools.partial(self._find, is_anew=is_anew), READ_S_MAX)
            except (
                TimeoutError
            ):  # a driver that wakes its cards only now: look at once what it has found when it is back
                self._is_late = True
                self._look_for_more_at_s = 0.0
                return
            except Exception as error:  # noqa: BLE001 -- as in `find`
                self._failed("looked for", error)
                gpus, why = (), UNREADABLE
            if not gpus and why_none != NO_SLICES:
                self._go_away(why)
                return
        missing = tuple(gpu for gpu in self.devices if gpu.id in self._gpus and self._is_missing(gpu.id, gpu.bdf, gpus))
        before = self.devices
        self._take((*gpus, *missing), why_none)
        self._note_seen(gpus)
        if self.devices != before:
            self._put(DevicesFound(self.devices))

    def _take(self, gpus: tuple[Device, ...], why: str) -> None:
        """These were found."""
        self._note_seen(gpus)
        found = self._usable(gpus)
        if not found:
            self._say_none(why or "all of them are left alone")
            if self._is_away:
                return
        elif self.devices != (*found, *self._others) or self._is_away:
            log.info("%d GPU%s: %s", len(found), "s" * (len(found) > 1), ", ".join(gpu.model for gpu in found))
            self._why_none = ""
        if found and (self._is_away or {gpu.id for gpu in found} != self._gpus.keys()):
            self._wanted.set()  # they are read at once
        self._is_away = False
        kept = {device.id: self._gpus[device.id] for device in self.devices if device in found}
        self._gpus = {gpu.id: kept.get(gpu.id) or Averaged(gpu) for gpu in found}
        self.devices = (*found, *self._others)
        self._look_for_more_at_s = time.monotonic() + FIND_EVERY_S

    def _note_seen(self, gpus: tuple[Device, ...]) -> None:
        """The driver tells of these."""
        self._seen = gpus
        ever_seen = {gpu.id: gpu.bdf for gpu in gpus} | {
            name: bdf for name, bdf in self._ever_seen.items() if self._is_missing(name, bdf, gpus)
        }
        self._ever_seen = dict(islice(ever_seen.items(), SEEN_MAX))
        unusable = self._nvml.unusable if self._nvml is not None else 0
        self._is_short = unusable > 0 or len(self._ever_seen) > len(gpus)

    def _is_missing(self, name: str, bdf: str, gpus: tuple[Device, ...]) -> bool:
        """True if a known device is no longer listed, nor its card as a whole or in slices."""
        is_listed = self._nvml is not None and bdf in self._nvml.places
        return not is_listed and all(gpu.id != name for gpu in gpus)

    def _say_none(self, why: str) -> None:
        if self._why_none != why:
            log.info("no GPUs: %s", why)
        self._why_none = why

    def _failed(self, what: str, error: Exception) -> None:
        """It is told once, with all that is known."""
        if not self._has_failed:
            log.error("the GPUs cannot be %s", what, exc_info=error)
        self._has_failed = True

    def _go_away(self, why: str) -> None:
        """They are looked for from now on; until they are found they are unknown."""
        self._is_away = True
        self._tell_unknown(why)

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
        is_asked = began_s < self._look_until_s
        try:
            cards = await self._thread.do(self._read, READ_S_MAX)
        except TimeoutError:
            log.warning(
                "the driver of the GPUs has not answered within %g s: they are unknown until it does", READ_S_MAX
            )
            self._tell_unknown(HANGS)
            await self._thread.idle()
            log.warning("the driver of the GPUs answers again")
            return  # what it has come back with is old
        except CardsRecut:
            log.info("a GPU was cut into other slices: they are looked for anew")
            self._is_recut = True
            self._look_for_more_at_s = 0.0
            self._wanted.set()
            return
        except Exception as error:  # noqa: BLE001 -- as in `find`
            if not self._has_failed:
                self._tell_unknown(UNREADABLE)
            self._failed("read", error)
            return
        self._has_failed = False
        if cards is None:
            self._go_away(AWAY)
            return
        gap_s, self._read_s = began_s - self._read_s, began_s
        readings = self._readings(cards, gap_s)
        if is_asked or any(_is_news(self._told.get(reading.id), reading) for reading in readings):
            self._tell(read_s, readings)

    def _readings(self, cards: Read, gap_s: float) -> tuple[DeviceReading, ...]:
        by_device: dict[str, list[str]] = {}
        for key, names in self._host.holding().items():
            for name in names:
                by_device.setdefault(name, []).append(key)
        readings = []
        for card, owners in cards:
            averaged = self._gpus.get(card.id)
            if averaged is None:  # another agent's, or left alone
                continue
            held = by_device.get(card.id, [])
            tenants = shared_out(card.mem_used_bytes, card.processes, owners, held, is_contained=self._is_contained)
            readings.append(averaged.reading(card, tenants, held, gap_s))
        read = {card.id for card, _ in cards}
        readings += [
            msgspec.structs.replace(self._told.get(name, DeviceReading(name)), health=Health.SICK, why=GONE)
            for name in self._gpus
            if name not in read
        ]
        return tuple(readings)

    def _tell(self, read_s: float, readings: tuple[DeviceReading, ...]) -> None:
        for reading in readings:
            self._note(self._told.get(reading.id), reading)
        self._told = {reading.id: reading for reading in readings}
        self._put(DevicesSampled(read_s, readings))

    def _note(self, before: DeviceReading | None, now: DeviceReading) -> None:
        """What people should see of it."""
        if before is not None and before.health is now.health and (before.why == now.why or now.health.is_usable):
            return
        device = next(device for device in self.devices if device.id == now.id)
        words = f"GPU {device.index} ({device.model})" + (f": {now.why}" if now.why else "")
        is_new = before is None and now.health is Health.OK
        self._host.gpu_changed("found" if is_new else now.health.name.lower(), words)

    def _tell_unknown(self, why: str) -> None:
        unknown = tuple(
            msgspec.structs.replace(self._told.get(name, DeviceReading(name)), health=Health.UNKNOWN, why=why)
            for name in self._gpus
        )
        self._tell(time.clock_gettime(time.CLOCK_BOOTTIME), unknown)


def _is_news(told: DeviceReading | None, now: DeviceReading) -> bool:
    if told is None:
        return True
    if (told.health, told.why, told.foreign, told.is_throttled) != (now.health, now.why, now.foreign, now.is_throttled):
        return True
    if abs(told.busy - now.busy) >= TELL_BUSY or abs(told.mem_used_bytes - now.mem_used_bytes) >= TELL_BYTES:
        return True
    if abs(told.mem_foreign_peak_bytes - now.mem_foreign_peak_bytes) >= TELL_BYTES:
        return True
    before, after = dict(told.ours), dict(now.ours)
    return before.keys() != after.keys() or any(abs(before[key] - after[key]) >= TELL_BYTES for key in after)


class NodeGpuHost:
    """The `GpuHost` of an agent. report(state, words): writes down that a GPU has changed."""

    def __init__(self, ledger: Ledger, report: Callable[[str, str], None]) -> None:
        self._ledger = ledger
        self._report = report

    def holding(self) -> Mapping[str, tuple[str, ...]]:
        """See `GpuHost`."""
        return self._ledger.devices.holding

    def wants_gpus(self) -> bool:
        """See `GpuHost`."""
        return bool(self.holding()) or self._ledger.waits_for_devices

    def gpu_changed(self, state: str, words: str) -> None:
        """See `GpuHost`."""
        self._report(state, words)


def node_gpus(
    config: AgentConfig,
    put: Callable[[Event], None],
    claims: DeviceLocks,
    library: Any = None,  # noqa: ANN401 -- a module without types
) -> Gpus:
    """The GPU sensors as configured. library: what speaks like `pynvml` and plays cards that are this agent's alone; None: this
    machine's driver is looked for."""
    excluded = tuple(map(str, config.gpu.exclude))

    def usable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Without those that the config excludes, and those that another agent of this machine has."""
        left = tuple(device for device in devices if not any(is_meant(device, name) for name in excluded))
        return claims.claim(left) if library is None else left

    faults = GpuFaults(machine_boot_id(), Path(config.state) / FAULTS_FILE)
    return Gpus(put, library, configured_devices(config.device), usable, faults)
