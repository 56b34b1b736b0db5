"""NVIDIA GPUs by NVML: which there are (slices too), how they are linked, and what each does now.

Abilities of a card are found by asking it, never by its model. Calls may hang for ever: use this in a thread of its own
(`gpus.py`). Nothing is ever set on a card, and no card is cut into slices: existing slices are used.
"""

from __future__ import annotations

import ctypes
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.sensors.gpu_health import GpuFaults, ThrottleDetector, judged
from peerload.agent.sensors.nvml_library import NOT_THERE, Library, text
from peerload.model.resources import DEVICES_MAX, GPU, Device, Health, Nearness

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("peerload.gpus")

MEMORY_V2 = 0x02000028
"""The structure that separates the driver's reserved memory from memory in use."""
LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
GRAPHICS = LISTS[2]
XID_EVENT = 8
XIDS_READ_MAX = 64
NO_INSTANCE = 0xFFFFFFFF
SLICES_FROM = 100
"""Slice n of GPU i is number SLICES_FROM·(i + 1) + n, so that no whole GPU has the same."""
CLOCK_OF_MULTIPROCESSORS = 1
NVLINK_P2P = 2
NVLINKS_MAX = 36
DOMAIN_DIGITS = 4
NO_NAME = "it has no name"
LEVELS = {
    0: Nearness.INTERNAL,
    10: Nearness.PIX,
    20: Nearness.PXB,
    30: Nearness.PHB,
    40: Nearness.NODE,
    50: Nearness.SYSTEM,
}
"""The common ancestor of two cards in NVML's terms."""
CORES_PER_MULTIPROCESSOR = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""Cores of a multiprocessor by compute capability; 128 with all others so far."""
CORES_PER_MULTIPROCESSOR_ELSE = 128


Shape = tuple[str, ...] | None
"""Names of the slices of a card, None = it is whole."""


class GpuProcess(msgspec.Struct, frozen=True):
    """One process on a card. used_bytes: None if the driver does not report it. is_graphics: it only draws."""

    pid: int
    used_bytes: int | None
    is_graphics: bool = False


class CardReading(msgspec.Struct, frozen=True):
    """The reading of one device; None where it cannot report a value. busy: 0 … 1, of the last moments; power_w, energy_j (since the driver was loaded):
    of the whole card, also for a slice."""

    id: str
    health: Health = Health.OK
    why: str = ""
    busy: float | None = None
    mem_used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = ()
    temperature_c: int | None = None
    is_throttled: bool = False
    power_w: float | None = None
    energy_j: float | None = None


class _Card:
    """A device with its handle. whole: handle and name of the card that a slice is a part of, else its own. instances:
    the numbers of a slice."""

    __slots__ = ("clocks", "device", "handle", "instances", "whole", "whole_name")

    def __init__(self, device: Device, handle: object, whole: object, whole_name: str) -> None:
        self.device = device
        self.handle = handle
        self.whole = whole
        self.whole_name = whole_name
        self.instances: tuple[int, int] | None = None
        self.clocks = ThrottleDetector()

    @property
    def is_slice(self) -> bool:
        return self.instances is not None


class CardsRecut(Exception):
    """The slices of a card (MIG) have changed since they were found; call `find_anew`."""


class Nvml:
    """One session with the driver: `find` opens it, `read` needs it, `close` ends it. module: `pynvml`, or the like.
    now_s: a monotonic clock."""

    def __init__(
        self,
        module: Any,  # noqa: ANN401 -- a module without types
        faults: GpuFaults | None = None,
        now_s: Callable[[], float] = time.monotonic,
        sys: Path = Path("/sys"),
    ) -> None:
        self._library = Library(module)
        self._faults = faults or GpuFaults()
        self._now_s = now_s
        self._sys = sys
        self._cards: list[_Card] = []
        self._events: Any = None
        self._is_open = False
        self._said: set[str] = set()
        self._shapes: dict[str, tuple[object, Shape]] = {}
        self.unusable = 0
        """Number of cards that could not be used at the last search."""
        self.places: set[str] = set()
        """PCI addresses of the cards at the last search, those for slices without any, too."""

    @property
    def awaits_slices(self) -> bool:
        """True if a card in MIG mode had no slices at the last search."""
        return any(slices == () for _, slices in self._shapes.values())

    def find(self) -> tuple[Device, ...]:
        """All GPUs, slices instead of the cards that are cut. New problems with cards are logged. Raises OSError with
        the reason if there can be none, SessionOver if the driver is unloaded meanwhile."""
        if not self._is_open:
            why = self._library.begin()
            if why:
                raise OSError(why)
            self._is_open = True
        self._faults.load(text(self._library.ask("nvmlSystemGetDriverVersion")))
        clocks = {card.device.id: card.clocks for card in self._cards}
        self._cards = []
        self._shapes = {}
        self.places = set()
        count = self._library.ask("nvmlDeviceGetCount") or 0
        wrong = []
        for index in range(min(count, DEVICES_MAX)):
            self._library.codes.clear()
            handle = self._library.ask("nvmlDeviceGetHandleByIndex", index)
            why = NO_NAME if handle is None else self._add(index, handle)
            if why:
                codes = ", ".join(f"NVML error {code}" for code in sorted(self._library.codes))
                wrong.append(f"GPU {index} cannot be used: {codes or why}")
        self.unusable = len(wrong)
        if len(self._cards) > DEVICES_MAX:
            wrong.append(f"of {len(self._cards)} GPUs the first {DEVICES_MAX} are used")
        for words in wrong:
            if words not in self._said:
                log.warning("%s", words)
        self._said = set(wrong)
        del self._cards[DEVICES_MAX:]
        for card in self._cards:
            card.clocks = clocks.get(card.device.id, card.clocks)
        for card in self._cards:
            card.device = msgspec.structs.replace(card.device, links=self._links(card))
        self._listen()
        return tuple(card.device for card in self._cards)

    def find_anew(self) -> tuple[Device, ...]:
        """Find the GPUs in a new session: an open one does not list cards that came after its start."""
        if self._is_open:
            self._hear()
            self._close_session()
        return self.find()

    def close(self, *, is_over: bool = False) -> None:
        """End the session. is_over: the driver was unloaded; problems with its cards are forgotten."""
        if is_over:
            self._faults.clear()
        if self._is_open:
            self._close_session()
            self._cards = []

    def _close_session(self) -> None:
        self._is_open = False
        self._events = None
        self._library.end()

    # -- what is there -------------------------------------------------------------------------------------------------

    def _add(self, index: int, handle: object) -> str:
        """Add a card, or its slices. → why it cannot be used, "" if it can."""
        name = text(self._library.ask("nvmlDeviceGetUUID", handle))
        if not name:
            return NO_NAME
        if bdf := self._bdf(handle):
            self.places.add(bdf)
        slices = self._slices(handle)
        self._shapes[name] = handle, _shape(slices)
        if slices is None:
            self._cards.append(_Card(self._described(index, handle, handle, name), handle, handle, name))
            return ""
        for number, own, part in slices:
            numbered = SLICES_FROM * (index + 1) + number
            card = _Card(self._described(numbered, part, handle, own), part, handle, name)
            card.instances = (
                _or(self._library.ask("nvmlDeviceGetGpuInstanceId", part), NO_INSTANCE),
                _or(self._library.ask("nvmlDeviceGetComputeInstanceId", part), NO_INSTANCE),
            )
            self._cards.append(card)
        return "" if slices else "it is meant for slices (MIG) and has none"

    def _slices(self, handle: object) -> list[tuple[int, str, object]] | None:
        """(number, name, handle) of each slice of a card; None if it is not in MIG mode."""
        ask = self._library.ask
        mode = ask("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return None
        found = []
        for number in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            name = text(ask("nvmlDeviceGetUUID", part)) if part is not None else ""
            if name:
                found.append((number, name, part))
        return found

    def _is_recut(self) -> bool:
        """True if the slices of a card have changed since they were found. A lost card cannot tell."""
        for handle, known in self._shapes.values():
            self._library.codes.clear()
            now = _shape(self._slices(handle))
            if now != known and not self._library.codes & NOT_THERE:
                return True
        return False

    def _described(self, index: int, handle: object, whole: object, name: str) -> Device:
        """The constant facts of a device."""
        ask = self._library.ask
        is_slice = handle is not whole
        bdf = self._bdf(whole)
        major, minor = ask("nvmlDeviceGetCudaComputeCapability", whole) or (0, 0)
        memory = self._memory(handle)
        utilization = None if is_slice else ask("nvmlDeviceGetUtilizationRates", handle)
        checks = (
            ("memory", memory),
            ("utilization", utilization),
            ("temperature", self._temperature(whole)),
            ("proc_list", self._processes(handle)),
            ("proc_util", ask("nvmlDeviceGetProcessUtilization", whole, 0)),
            ("energy_counter", ask("nvmlDeviceGetTotalEnergyConsumption", whole)),
            ("power", ask("nvmlDeviceGetPowerUsage", whole)),
            ("ecc", ask("nvmlDeviceGetTotalEccErrors", whole, 1, 0)),
            ("mig", True if is_slice else None),
        )
        return Device(
            f"nvidia:{name}",
            GPU,
            index,
            text(ask("nvmlDeviceGetName", handle)) or text(ask("nvmlDeviceGetName", whole)) or "GPU",
            mem_bytes=memory[0] if memory is not None else 0,
            is_read=True,
            vendor="nvidia",
            bdf=bdf,
            numa_node=self._numa_node(bdf),
            capability=major + minor / 10,
            multiprocessors=self._multiprocessors(handle, (major, minor), is_slice=is_slice),
            capabilities=tuple(what for what, found in checks if found is not None),
        )

    def _multiprocessors(self, handle: object, capability: tuple[int, int], *, is_slice: bool) -> int:
        """Number of cores; 0 = unknown."""
        if is_slice:
            attributes = self._library.ask_newest("nvmlDeviceGetAttributes", ("_v2", ""), handle)
            return int(getattr(attributes, "multiprocessorCount", 0))
        cores = self._library.ask("nvmlDeviceGetNumGpuCores", handle) or 0
        return int(cores) // CORES_PER_MULTIPROCESSOR.get(capability, CORES_PER_MULTIPROCESSOR_ELSE)

    def _bdf(self, whole: object) -> str:
        pci = self._library.ask_newest("nvmlDeviceGetPciInfo", ("_v3", ""), whole)
        return _short(text(pci.busId)) if pci is not None else ""

    def _numa_node(self, bdf: str) -> int:
        """NUMA node; -1 = unknown, or there is only one."""
        try:
            return int((self._sys / "bus/pci/devices" / bdf / "numa_node").read_text(encoding="ascii")) if bdf else -1
        except (OSError, ValueError):
            return -1

    # -- how near ------------------------------------------------------------------------------------------------------

    def _links(self, card: _Card) -> tuple[tuple[str, int], ...]:
        return tuple((other.device.id, self._nearness(card, other)) for other in self._cards if other is not card)

    def _nearness(self, one: _Card, other: _Card) -> int:
        """Links of a slice; slices communicate over PCI Express, whatever links their cards have."""
        if one.whole_name == other.whole_name:
            return Nearness.INTERNAL
        if not one.is_slice and not other.is_slice and self._has_nvlink(one.whole) and self._has_nvlink(other.whole):
            status = self._library.ask("nvmlDeviceGetP2PStatus", one.whole, other.whole, NVLINK_P2P)
            if status == 0:
                return Nearness.NVLINK
        level = self._library.ask("nvmlDeviceGetTopologyCommonAncestor", one.whole, other.whole)
        return LEVELS.get(_or(level, 50), Nearness.SYSTEM)

    def _has_nvlink(self, handle: object) -> bool:
        for link in range(NVLINKS_MAX):
            state = self._library.ask("nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                return False
            if state:
                return True
        return False

    # -- what it does --------------------------------------------------------------------------------------------------

    def read(self) -> list[CardReading]:
        """Readings of all devices that were found. Raises SessionOver, CardsRecut."""
        self._hear()
        if self._is_recut():
            raise CardsRecut
        return [self._read(card) for card in self._cards]

    def _read(self, card: _Card) -> CardReading:
        ask, handle, codes = self._library.ask, card.handle, self._library.codes
        codes.clear()
        memory = self._memory(handle)
        rates = None if card.is_slice else ask("nvmlDeviceGetUtilizationRates", handle)
        processes = self._processes(handle)
        temperature = self._temperature(card.whole)
        bits = self._library.ask("nvmlDeviceGetCurrentClocksEventReasons", card.whole)
        if bits is None:
            bits = self._library.ask("nvmlDeviceGetCurrentClocksThrottleReasons", card.whole)
        is_throttled = card.clocks.take(bits or 0, self._now_s())
        power, energy = (
            ask("nvmlDeviceGetPowerUsage", card.whole),
            ask("nvmlDeviceGetTotalEnergyConsumption", card.whole),
        )
        health, why = self._health(card)
        if memory is None and health is Health.OK and "memory" in card.device.capabilities:
            health, why = Health.UNKNOWN, "its memory cannot be read just now" + _codes(codes)
        return CardReading(
            card.device.id,
            health,
            why,
            busy=None if rates is None else min(rates.gpu, 100) / 100,
            mem_used_bytes=None if memory is None else memory[1],
            processes=processes,
            temperature_c=temperature,
            is_throttled=is_throttled,
            power_w=None if power is None else power / 1000,
            energy_j=None if energy is None else energy / 1000,
        )

    def _health(self, card: _Card) -> tuple[Health, str]:
        ask, whole = self._library.ask, card.whole
        rows = ask("nvmlDeviceGetRemappedRows", whole) or (0, 0, 0, 0)
        uncorrected = ask("nvmlDeviceGetTotalEccErrors", whole, 1, 0)
        speed = None
        if card.clocks.is_weak:
            now = ask("nvmlDeviceGetClockInfo", whole, CLOCK_OF_MULTIPROCESSORS)
            most = ask("nvmlDeviceGetMaxClockInfo", whole, CLOCK_OF_MULTIPROCESSORS)
            speed = min(now / most, 1.0) if now and most else 1.0
        is_there = not self._library.codes & NOT_THERE
        if not is_there:
            self._faults.add_lost(card.whole_name)
        return judged(
            self._faults.error_of(card.device.name, card.whole_name),
            is_there,
            uncorrected,
            (bool(rows[2]), bool(rows[3])),
            speed,
        )

    def _memory(self, handle: object) -> tuple[int, int] | None:
        """(total, in use) in bytes. The driver's reserved memory is not in use, where it reports that."""
        memory = self._library.ask("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)
        if memory is None:
            memory = self._library.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else (int(memory.total), int(memory.used))

    def _temperature(self, handle: object) -> int | None:
        found = self._library.ask("nvmlDeviceGetTemperature", handle, 0)
        if found is None:
            found = self._library.ask("nvmlDeviceGetTemperatureV", handle, 0)
        return None if found is None else max(int(found), 0)

    def _processes(self, handle: object) -> tuple[GpuProcess, ...] | None:
        """Processes on a card, each once, with its largest reported use; None if they cannot be listed."""
        found: dict[int, GpuProcess] = {}
        can_tell = False
        for name in LISTS:
            listed = self._library.ask_newest(name, ("_v3", "_v2"), handle)
            can_tell = can_tell or (listed is not None and name == LISTS[0])
            for entry in listed or ():
                used = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
                before = found.get(entry.pid)
                if before is None:
                    found[entry.pid] = GpuProcess(entry.pid, used, name == GRAPHICS)
                elif used is not None:
                    found[entry.pid] = GpuProcess(entry.pid, max(before.used_bytes or 0, used), before.is_graphics)
        return tuple(found.values()) if can_tell or found else None

    # -- errors that cards report --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._events is not None:
            self._library.ask("nvmlEventSetFree", self._events)
        self._events = self._library.ask("nvmlEventSetCreate")
        if self._events is None:
            return
        wholes = {card.whole_name: card.whole for card in self._cards}
        for whole in wholes.values():
            kinds = self._library.ask("nvmlDeviceGetSupportedEventTypes", whole) or 0
            if kinds & XID_EVENT:
                self._library.ask("nvmlDeviceRegisterEvents", whole, XID_EVENT, self._events)

    def _hear(self) -> None:
        """Take the errors since the last call; does not wait."""
        for _ in range(XIDS_READ_MAX if self._events is not None else 0):
            event = self._library.ask("nvmlEventSetWait", self._events, 0)
            if event is None:
                return
            if int(event.eventType) == XID_EVENT:
                self._faults.add_xid(self._meant(self._name(event.device), event), int(event.eventData))

    def _name(self, handle: object) -> str:
        """Name of the card of this handle; a lost card does not tell its name."""
        address = _address(handle)
        known = (card.whole_name for card in self._cards if address and _address(card.whole) == address)
        return next(known, "") or text(self._library.ask("nvmlDeviceGetUUID", handle))

    def _meant(self, name: str, event: Any) -> str:  # noqa: ANN401 -- a ctypes structure
        """The slice that an error concerns, where it says so; else the whole card."""
        instances = (
            int(getattr(event, "gpuInstanceId", NO_INSTANCE)),
            int(getattr(event, "computeInstanceId", NO_INSTANCE)),
        )
        for card in self._cards:
            if card.whole_name == name and card.instances == instances and NO_INSTANCE not in instances:
                return card.device.name
        return name


def _shape(slices: list[tuple[int, str, object]] | None) -> Shape:
    return None if slices is None else tuple(name for _, name, _ in slices)


def _or(value: int | None, default: int) -> int:
    return default if value is None else int(value)


def _address(handle: object) -> int:
    """The number of a library handle; 0 if it has none."""
    if not isinstance(handle, ctypes._Pointer):  # noqa: SLF001 -- there is no other name for it
        return 0
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _codes(codes: set[int]) -> str:
    return f" (NVML error {', '.join(map(str, sorted(codes)))})" if codes else ""


def _short(bdf: str) -> str:
    """A PCI address in the form of Linux; NVML's has a domain of eight digits."""
    domain, _, rest = bdf.lower().partition(":")
    return f"{domain[-DOMAIN_DIGITS:]}:{rest}" if rest else ""
