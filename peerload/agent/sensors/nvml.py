"""NVIDIA GPUs by NVML (`pynvml`, the module of nvidia-ml-py): the existing GPUs and slices, their links, their current
use, their health, and the owners of their memory.

Abilities of a card are found by queries, never by its model. Every call may fail: a card that cannot report a value
answers with an error; so does a driver that is older than a function, and a lost card. Calls may hang forever: use this in a
separate thread (`gpus.py`). No setting of a card is changed, and no card is cut into slices: existing slices are used.

Errors caused by programs do not count against the health of a card. Any other error counts until the driver is reloaded, even if
the agent restarts (`GpuFaults` are stored in a file).

The driver lists processes and the memory in use. It may omit processes (in containers), or their memory. Use that
no process of ours explains is foreign, and foreign use always counts.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.sensors.processes import MPS
from peerload.model.resources import DEVICES_MAX, GPU, RUNS_SEEN_MAX, Device, DeviceReading, Health, Nearness
from peerload.security.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path


LIBRARY = "libnvidia-ml.so.1"

NOT_THERE = frozenset({15, 16, 28})
"""Errors of a card that is lost, needs a reset, or cannot be found."""
SESSION_OVER = frozenset({1, 9, 18})
"""Errors after the driver was unloaded: not initialized, not loaded, or another version than the library."""
CANNOT_TELL = frozenset({2, 3, 4, 6, 7, 10, 13, 22, 25, 26, 27, 29})
"""Errors that say nothing about a card's health: unsupported, not permitted, or nothing there."""


class SessionOver(Exception):
    """The driver was unloaded. All information about the cards is invalid; call `find` again."""


class Library:
    """The library. module: `pynvml`, or one with the same interface."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 -- a module without types
        self._module = module
        self._too_old: type[Exception] = getattr(module, "NVMLLibraryMismatchError", UnicodeDecodeError)
        self.codes: set[int] = set()
        """Errors since this was last cleared, without those of CANNOT_TELL."""

    def ask(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 -- the function's own type
        """Call the function of this name; None if card, driver or module does not support it. Raises SessionOver."""
        function = getattr(self._module, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._module.NVMLError as error:
            self._note(error)
        except (UnicodeDecodeError, self._too_old):  # invalid text, or a driver older than the module
            return None
        return None

    def ask_newest(self, name: str, versions: tuple[str, ...], *arguments: Any) -> Any:  # noqa: ANN401 -- as above
        """Call the first of these versions that driver and module support. The functions without a version raise another
        error if the driver is older than the module."""
        for version in versions:
            answer = self.ask(name + version, *arguments)
            if answer is not None:
                return answer
        return None

    def begin(self) -> str:
        """Open a session → the reason why this failed, "" if it is open."""
        try:
            self._module.nvmlInit()
        except self._module.NVMLError as error:
            return f"the driver does not work: {error}"
        return ""

    def end(self) -> None:
        try:
            self._module.nvmlShutdown()
        except self._module.NVMLError:
            return  # the session has ended already

    def _note(self, error: Any) -> None:  # noqa: ANN401 -- an exception with a `value`
        code = int(getattr(error, "value", 0))
        if code in SESSION_OVER:
            raise SessionOver(str(error)) from None
        if code not in CANNOT_TELL:
            self.codes.add(code)


def find_library() -> Any:  # noqa: ANN401 -- a module without types
    """Load `pynvml`; None without a driver, since the import would only take memory."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml  # noqa: PLC0415 -- see above

    return pynvml


def text(value: bytes | str | None) -> str:
    """A text, which some versions of the module return as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


log = logging.getLogger("peerload.gpus")

XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
XID_TEXTS = {
    48: "uncorrectable memory error",
    62: "its controller has stopped",
    63: "memory rows are being replaced",
    64: "memory rows cannot be replaced any more",
    74: "NVLink error",
    79: "it has fallen off the bus",
    92: "many correctable memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its controller does not answer",
    120: "its controller has failed",
    140: "uncorrectable memory error",
}
HELD_DOWN_BITS = 0x08 | 0x20 | 0x40 | 0x80
"""Throttling by the hardware, for heat (software or hardware), or by the power supply. A power cap (0x04) is normal."""
HELD_DOWN_S = 30.0
"""Time of throttling after which a card is degraded."""
RECOVERED_S = 10.0
"""Time without throttling after which a degraded card has recovered."""
ERRORS_MAX = 64
WAS_LOST = "it was lost: its driver has to be reloaded before it is used again"


def xid_text(number: int) -> str:
    return f"error {number}" + (f": {XID_TEXTS[number]}" if number in XID_TEXTS else " (XID)")


class GpuFaults:
    """Errors that cards have reported, by name. boot: id of this boot of the machine. file: where they are stored for
    the next agent, None = nowhere."""

    def __init__(self, boot: str = "", file: Path | None = None) -> None:
        self._boot = boot
        self._file = file
        self._driver = ""
        self._errors: dict[str, str] = {}

    def load(self, driver: str) -> None:
        """Load the errors that were noted for this version of the driver."""
        if driver == self._driver:
            return
        self._driver = driver
        self._errors = self._stored()

    def clear(self) -> None:
        """Clear all errors; the driver was reloaded."""
        self._driver = ""
        if self._errors:
            self._errors = {}
            self._store()

    def add_xid(self, card: str, number: int) -> bool:
        """Record an Xid error of a card → whether it counts."""
        if number in XIDS_OF_PROGRAMS:
            log.info("GPU error caused by a program: gpu=%s error=%s", card, xid_text(number))
            return False
        log.warning("GPU error, no task gets it any more: gpu=%s error=%s", card, xid_text(number))
        self._add(card, xid_text(number))
        return True

    def add_lost(self, card: str) -> None:
        """Record that the driver cannot reach a card. Earlier errors take precedence."""
        if card not in self._errors:
            log.warning("GPU lost, no task gets it any more: gpu=%s", card)
            self._add(card, WAS_LOST)

    def _add(self, card: str, why: str) -> None:
        if len(self._errors) < ERRORS_MAX or card in self._errors:
            self._errors[card] = why
            self._store()

    def error_of(self, *names: str) -> str:
        """The error of one of these names (a slice, and its card); "" if there is none."""
        return next((self._errors[name] for name in names if name in self._errors), "")

    def _stored(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if (kept["boot"], kept["driver"]) == (self._boot, self._driver):
                return {str(name): str(why) for name, why in list(kept["ill"].items())[:ERRORS_MAX]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("cannot read the errors of GPUs: path=%s error=%s", self._file, error)
        return {}

    def _store(self) -> None:
        if self._file is None:
            return
        errors = {"boot": self._boot, "driver": self._driver, "ill": self._errors}
        try:
            write_private(self._file, json.dumps(errors).encode(), is_durable=False)
        except OSError as error:  # a full disk: it is known as long as this agent runs
            log.warning("cannot store the errors of GPUs: path=%s error=%s", self._file, error.strerror)


class ThrottleDetector:
    """Detection of lasting throttling. now_s: any monotonic clock."""

    __slots__ = ("_free_since_s", "_held_since_s", "is_weak")

    def __init__(self) -> None:
        self._held_since_s: float | None = None
        self._free_since_s: float | None = None
        self.is_weak = False

    def take(self, bits: int, now_s: float) -> bool:
        """Process a reading of the throttle reasons → True if the card is throttled now."""
        is_held = bool(bits & HELD_DOWN_BITS)
        if is_held:
            self._free_since_s = None
            if self._held_since_s is None:
                self._held_since_s = now_s
            self.is_weak = self.is_weak or now_s - self._held_since_s >= HELD_DOWN_S
        else:
            self._held_since_s = None
            if self._free_since_s is None:
                self._free_since_s = now_s
            self.is_weak = self.is_weak and now_s - self._free_since_s < RECOVERED_S
        return is_held


def judged(
    ill: str,
    is_there: bool,
    uncorrected: int | None,
    rows: tuple[bool, bool],
    speed: float | None,
) -> tuple[Health, str]:
    """Health of a card, and the reason. ill: an error that it has reported. uncorrected: memory errors since the
    driver was loaded. rows: True if memory rows wait to be replaced, and if they cannot be replaced. speed: 0 … 1
    while it has been throttled for long."""
    pending, failed = rows
    if not is_there:
        return Health.SICK, "it is lost: the driver does not reach it any more"
    if ill:
        return Health.SICK, ill
    if failed:
        return Health.SICK, "memory rows cannot be replaced any more"
    if uncorrected:
        return Health.SICK, f"{uncorrected} uncorrectable memory error{'' if uncorrected == 1 else 's'}"
    if pending:
        return Health.SICK, "memory rows wait to be replaced: it needs a reset when its tasks are done"
    if speed is not None:
        about = round(speed, 1)  # it changes all the time
        return Health.DEGRADED, f"its clocks are held down for heat or power: about {about:.0%} of its speed"
    return Health.OK, ""


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


Shape = tuple[str, ...] | None
"""Names of the slices of a card, None = it is whole."""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process on a card. used_bytes: None if the driver does not report it. is_graphics: it only draws."""

    pid: int
    used_bytes: int | None
    is_graphics: bool = False


class CardReading(msgspec.Struct, frozen=True):
    """The reading of one device; None for values that it cannot report. busy: 0 … 1, recent average; power_w, energy_j (since
    the driver was loaded): of the whole card, even for a slice."""

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
    """A device with its handle. whole: handle and name of the card of a slice, or else its own. instances:
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


class MigLayoutChanged(Exception):
    """The MIG layout of a card has changed since its slices were found; call `find_anew`."""


class Nvml:
    """A session with the driver: `find` opens it, `read` needs it, `close` ends it. module: `pynvml`, or a
    substitute. now_s: a monotonic clock."""

    def __init__(
        self,
        module: Any,  # noqa: ANN401 -- a module without types
        faults: GpuFaults | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._library = Library(module)
        self._faults = faults or GpuFaults()
        self._now_s = now_s
        self._cards: list[_Card] = []
        self._events: Any = None
        self._is_open = False
        self._logged: set[str] = set()
        self._shapes: dict[str, tuple[object, Shape]] = {}
        self.unusable = 0
        """Number of cards that could not be used at the last search."""
        self.places: set[str] = set()
        """PCI addresses of the cards at the last search, including cards in MIG mode without slices."""

    @property
    def awaits_slices(self) -> bool:
        """True if a card in MIG mode had no slices at the last search."""
        return any(slices == () for _, slices in self._shapes.values())

    def find(self) -> tuple[Device, ...]:
        """All GPUs, with slices instead of the cards that have them. New problems with cards are logged. Raises OSError with
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
        problems = []
        for index in range(min(count, DEVICES_MAX)):
            self._library.codes.clear()
            handle = self._library.ask("nvmlDeviceGetHandleByIndex", index)
            why = NO_NAME if handle is None else self._add(index, handle)
            if why:
                codes = ", ".join(f"NVML error {code}" for code in sorted(self._library.codes))
                problems.append(f"GPU {index} cannot be used: {codes or why}")
        self.unusable = len(problems)
        if len(self._cards) > DEVICES_MAX:
            problems.append(f"of {len(self._cards)} GPUs the first {DEVICES_MAX} are used")
        for problem in problems:
            if problem not in self._logged:
                log.warning("GPU problem: reason=%s", problem)
        self._logged = set(problems)
        del self._cards[DEVICES_MAX:]
        for card in self._cards:
            card.clocks = clocks.get(card.device.id, card.clocks)
        for card in self._cards:
            card.device = msgspec.structs.replace(card.device, links=self._links(card))
        self._listen()
        return tuple(card.device for card in self._cards)

    def find_anew(self) -> tuple[Device, ...]:
        """Find the GPUs in a new session: an open one does not list cards that were added after its start."""
        if self._is_open:
            self._read_faults()
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
        """Add a card, or its slices → the reason why it cannot be used, "" if it can."""
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

    def _has_mig_layout_changed(self) -> bool:
        """True if the slices of a card have changed since they were found. Unknown, so False, for a lost card."""
        for handle, known in self._shapes.values():
            self._library.codes.clear()
            now = _shape(self._slices(handle))
            if now != known and not self._library.codes & NOT_THERE:
                return True
        return False

    def _described(self, index: int, handle: object, whole: object, name: str) -> Device:
        ask = self._library.ask
        is_slice = handle is not whole
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
            bdf=self._bdf(whole),
            capability=major + minor / 10,
            capabilities=tuple(what for what, found in checks if found is not None),
        )

    def _bdf(self, whole: object) -> str:
        pci = self._library.ask_newest("nvmlDeviceGetPciInfo", ("_v3", ""), whole)
        return _short(text(pci.busId)) if pci is not None else ""

    # -- how near ------------------------------------------------------------------------------------------------------

    def _links(self, card: _Card) -> tuple[tuple[str, int], ...]:
        return tuple((other.device.id, self._nearness(card, other)) for other in self._cards if other is not card)

    def _nearness(self, one: _Card, other: _Card) -> int:
        """Nearness of two cards. Slices communicate over PCI Express, regardless of the links of their cards."""
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
        """Readings of all devices that were found. Raises SessionOver, MigLayoutChanged."""
        self._read_faults()
        if self._has_mig_layout_changed():
            raise MigLayoutChanged
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
            health, why = Health.UNKNOWN, "its memory cannot be read now" + _codes(codes)
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
        is_supported = False
        for name in LISTS:
            listed = self._library.ask_newest(name, ("_v3", "_v2"), handle)
            is_supported = is_supported or (listed is not None and name == LISTS[0])
            for entry in listed or ():
                used = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
                before = found.get(entry.pid)
                if before is None:
                    found[entry.pid] = GpuProcess(entry.pid, used, name == GRAPHICS)
                elif used is not None:
                    found[entry.pid] = GpuProcess(entry.pid, max(before.used_bytes or 0, used), before.is_graphics)
        return tuple(found.values()) if is_supported or found else None

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

    def _read_faults(self) -> None:
        """Read the errors since the last call; does not wait."""
        for _ in range(XIDS_READ_MAX if self._events is not None else 0):
            event = self._library.ask("nvmlEventSetWait", self._events, 0)
            if event is None:
                return
            if int(event.eventType) == XID_EVENT:
                self._faults.add_xid(self._meant(self._name(event.device), event), int(event.eventData))

    def _name(self, handle: object) -> str:
        """Name of the card with this handle. Works for a lost card, too, which does not report its name."""
        address = _address(handle)
        known = (card.whole_name for card in self._cards if address and _address(card.whole) == address)
        return next(known, "") or text(self._library.ask("nvmlDeviceGetUUID", handle))

    def _meant(self, name: str, event: Any) -> str:  # noqa: ANN401 -- a ctypes structure
        """The slice that an error concerns, if it names one; else the whole card."""
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


AVERAGE_S = 5.0
"""Time constant of the exponential average of utilization."""
FOREIGN_BYTES = 50 << 20
FOREIGN_SHARE = 0.001
"""Memory in use, absolute or as a share, that does not indicate a foreign process."""
CONTEXT_BYTES = 32 << 20
"""Memory that the driver takes for each process without reporting it."""
FOREIGN_PEAK_S = 300.0
"""Period of the peaks of foreign processes: each may need its peak of the last one to two periods again."""
FOREIGN_BUSY = 0.1
FOREIGN_READINGS = 3
"""An unused card that is busier than this in this many successive readings has a foreign user."""


class GpuUsage(msgspec.Struct, frozen=True):
    """Use of a card by owner. ours: memory by execution key. foreign_bytes: memory of all others. others: number of other
    processes that compute. drawn_bytes: foreign memory of processes that only draw (a desktop). strangers: memory of each
    foreign process, by pid."""

    ours: dict[str, int] = {}
    foreign_bytes: int = 0
    others: int = 0
    drawn_bytes: int = 0
    strangers: dict[int, int] = {}


def memory_by_owner(
    used_bytes: int | None,
    processes: Iterable[GpuProcess] | None,
    owners: Mapping[int, str | None],
    held: Iterable[str],
    *,
    is_contained: bool,
) -> GpuUsage:
    """The memory of a card by owner. owners: pid → key, from `ProcessOwners.key_of`. held: attempts that hold the
    card. is_contained: pids may belong to another namespace, so that unknown ones may be ours."""
    ours: dict[str, int] = {}
    unreported: list[str] = []
    strange: list[GpuProcess] = []
    for process in processes or ():
        key = owners.get(process.pid)
        if key and key.startswith(MPS):  # the memory of an MPS server is neither that of a task nor foreign
            used_bytes = max((used_bytes or 0) - (process.used_bytes or 0) - CONTEXT_BYTES, 0)
            continue
        if not key:
            strange.append(process)
            continue
        ours[key] = ours.get(key, 0) + (process.used_bytes or 0)
        if process.used_bytes is None:
            unreported.append(key)
    unseen = [key for key in held if key not in ours]
    if processes is None or (is_contained and any(owners.get(process.pid) is None for process in strange)):
        # Unknown owners: count them for attempts that hold the card but do not appear on it.
        strange = [process for process in strange if not unseen or owners.get(process.pid) is not None]
        unreported += unseen
        ours.update(dict.fromkeys(unseen, 0))
    foreign = sum(process.used_bytes or 0 for process in strange)
    rest = max((used_bytes or 0) - sum(ours.values()) - foreign, 0)
    if unreported:  # the rest belongs to processes whose memory is not reported
        for number, key in enumerate(unreported):
            ours[key] += rest // len(unreported) + (number < rest % len(unreported))
        rest = 0
    rest = max(rest - CONTEXT_BYTES * len(ours), 0)
    return GpuUsage(
        ours,
        foreign + rest,
        sum(not process.is_graphics for process in strange),
        sum(process.used_bytes or 0 for process in strange if process.is_graphics),
        {process.pid: process.used_bytes or 0 for process in strange},
    )


class GpuAverages:
    """Averages of one device over its readings. gap_s: time since the last one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._busy: float | None = None
        self._unexplained = 0
        self._peaks: dict[int, tuple[int, int]] = {}
        self._peaks_age_s = 0.0

    def reading(self, card: CardReading, tenants: GpuUsage, held: Iterable[str], gap_s: float) -> DeviceReading:
        """The reading to report. A desktop on a card does not make it foreign: its memory is not free, but tasks may
        have the rest exclusively, unless the card is kept busy."""
        busy = self._average(card.busy, gap_s)
        is_idle_for_us = not tenants.ours and not any(True for _ in held)
        if is_idle_for_us and (card.busy or 0.0) > FOREIGN_BUSY:
            self._unexplained += 1
        else:
            self._unexplained = 0
        limit = max(FOREIGN_BYTES, int(FOREIGN_SHARE * self._device.mem_bytes))
        is_there = tenants.foreign_bytes - tenants.drawn_bytes > limit or self._unexplained >= FOREIGN_READINGS
        return DeviceReading(
            card.id,
            card.health,
            card.why,
            busy,
            card.mem_used_bytes or 0,
            tenants.foreign_bytes,
            max(tenants.others, 1) if is_there else 0,
            tuple(sorted(tenants.ours.items())[:RUNS_SEEN_MAX]),
            card.temperature_c or 0,
            card.is_throttled,
            power_w=card.power_w,
            energy_j=card.energy_j,
            mem_foreign_peak_bytes=self._foreign_peak(tenants, gap_s),
        )

    def _foreign_peak(self, tenants: GpuUsage, gap_s: float) -> int:
        """Sum of the recent peaks of the running foreign processes. For each process, the peaks of this period and of the
        last one are kept."""
        self._peaks_age_s += gap_s
        is_next = self._peaks_age_s >= FOREIGN_PEAK_S
        if is_next:
            self._peaks_age_s = 0.0
        before, self._peaks = self._peaks, {}
        for pid, used_bytes in tenants.strangers.items():
            last, this = before.get(pid, (0, 0))
            self._peaks[pid] = (this, used_bytes) if is_next else (last, max(this, used_bytes))
        unexplained_bytes = tenants.foreign_bytes - sum(tenants.strangers.values())
        return unexplained_bytes + sum(max(peaks) for peaks in self._peaks.values())

    def _average(self, now: float | None, gap_s: float) -> float:
        if now is None:
            return 0.0
        if self._busy is None:
            self._busy = now
        self._busy += (1.0 - math.exp(-gap_s / AVERAGE_S)) * (now - self._busy)
        return min(max(self._busy, 0.0), 1.0)
