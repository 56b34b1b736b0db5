"""GPUs through NVML, NVIDIA's own library, by way of `pynvml` (the module of nvidia-ml-py): what is there, and what it does.

Every call may fail: a card that cannot tell its temperature has none, a library that lacks a function lacks a capability, a
card that is lost is sick. Whatever can be done is found out by doing it, never by the model's name. Calls may also hang,
for ever even: this is used in a thread of its own (`gpus.py`). Nothing is ever set on a card.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.model.devices import DEVICES_MAX, GPU, Device, Health, Nearness

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("peerload.gpus")

LIBRARY = "libnvidia-ml.so.1"
THERMAL_BITS = 0x08 | 0x20 | 0x40
"""Clocks held down by the hardware, or for heat."""
XID_EVENT = 8
XIDS_READ_MAX = 64
XIDS_SERIOUS = {
    48: "uncorrectable memory error",
    62: "its controller has stopped",
    64: "memory rows cannot be replaced any more",
    74: "NVLink error",
    79: "it has fallen off the bus",
    95: "uncontained memory error",
    119: "its controller does not answer",
    120: "its controller has failed",
    140: "uncorrectable memory error",
    154: "it has to be reset",
}
"""Errors after which a card is not to be trusted; others are those of the program that ran."""
LOST = 15
NVLINK_P2P = 2
DOMAIN_DIGITS_MAX = 4
PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
PROCESSES_VERSIONS = ("", "_v3", "_v2")
"""An older driver does not have what the newest binding asks for."""


class CardReading(msgspec.Struct, frozen=True):
    """What was read of one device. used: (pid, bytes) of each process on it, None where bytes cannot be told;
    busy: 0 … 1, None where it cannot be told."""

    id: str
    health: Health = Health.OK
    why: str = ""
    busy: float | None = None
    mem_used_bytes: int = 0
    used: tuple[tuple[int, int | None], ...] = ()
    temperature_c: int = 0
    is_throttled: bool = False


class _Card:
    __slots__ = ("device", "handle", "has_parent")

    def __init__(self, device: Device, handle: object, *, has_parent: bool) -> None:
        self.device = device
        self.handle = handle
        self.has_parent = has_parent


def find_library() -> Any:  # noqa: ANN401 -- a module without types
    """`pynvml`, None where there is no driver: importing it for nothing would cost memory."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml  # noqa: PLC0415 -- see above

    return pynvml


class Nvml:
    """One session with the library; `find` opens it, and again after `close`. ``library`` is `pynvml`, or speaks like it."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401 -- a module without types
        self._library = library
        mismatch = getattr(library, "NVMLLibraryMismatchError", AttributeError)
        self._errors: tuple[type[Exception], ...] = (library.NVMLError, AttributeError, mismatch)
        self._cards: list[_Card] = []
        self._sick: dict[str, str] = {}
        self._events: Any = None
        self._is_open = False

    def find(self) -> tuple[Device, ...]:
        """All GPUs, slices of GPUs in their place. Raises OSError saying why there can be none."""
        library = self._library
        if not self._is_open:
            try:
                library.nvmlInit()
            except library.NVMLError as error:
                raise OSError(f"the GPUs' driver does not work: {error}") from None
            self._is_open = True
        self._cards = []
        count = self._try(library.nvmlDeviceGetCount, default=0)
        for index in range(min(count, DEVICES_MAX)):
            try:
                handle = library.nvmlDeviceGetHandleByIndex(index)
                self._add(index, handle)
            except self._errors as error:
                log.warning("GPU %d cannot be used: %s", index, error)
        del self._cards[DEVICES_MAX:]
        self._link()
        self._listen()
        return tuple(card.device for card in self._cards)

    def close(self) -> None:
        """End the session."""
        if self._is_open:
            self._is_open = False
            self._events = None
            self._try(self._library.nvmlShutdown, default=None)

    # -- what is there -------------------------------------------------------------------------------------------------

    def _add(self, index: int, handle: object) -> None:
        slices = self._slices(handle)
        if slices is None:
            self._cards.append(_Card(self._described(index, handle), handle, has_parent=False))
        for number, part in enumerate(slices or ()):
            device = self._described(index * 100 + number, part, parent=handle)
            self._cards.append(_Card(device, part, has_parent=True))

    def _slices(self, handle: object) -> list[object] | None:
        """The MIG slices of a card that is to be cut into some, used as they are; none, and it cannot be used. None: it is
        whole."""
        library = self._library
        mode = self._try(lambda: library.nvmlDeviceGetMigMode(handle)[0], default=0)
        if not mode:
            return None
        found = []
        for number in range(self._try(lambda: library.nvmlDeviceGetMaxMigDeviceCount(handle), default=0)):
            part = self._try(lambda number=number: library.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))  # type: ignore[misc]
            if part is not None:
                found.append(part)
        return found

    def _described(self, index: int, handle: object, parent: object = None) -> Device:
        """What does not change. Raises NVMLError if not even its name can be read."""
        library, whole = self._library, handle if parent is None else parent
        bdf = self._try(lambda: _text(library.nvmlDeviceGetPciInfo(whole).busId), default="")
        major, minor = self._try(lambda: library.nvmlDeviceGetCudaComputeCapability(whole), default=(0, 0))
        memory = self._memory(handle)
        checks: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("proc_list", lambda: self._listed(PROCESSES[0], handle)),
            ("energy_counter", lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle)),
            ("power", lambda: library.nvmlDeviceGetPowerUsage(handle)),
            ("utilization", lambda: library.nvmlDeviceGetUtilizationRates(handle)),
        )
        works = [name for name, call in checks if self._try(call, default=None) is not None]
        return Device(
            f"nvidia:{_text(library.nvmlDeviceGetUUID(handle))}",
            GPU,
            index,
            self._try(lambda: _text(library.nvmlDeviceGetName(handle)), default="GPU"),
            mem_bytes=0 if memory is None else int(memory.total),
            is_read=True,
            vendor="nvidia",
            bdf=bdf,
            numa_node=_numa_node(bdf),
            capability=major + minor / 10,
            multiprocessors=0,
            capabilities=(*works, *(["mig"] if parent is not None else [])),
        )

    def _link(self) -> None:
        """How near each is to each other."""
        whole = [card for card in self._cards if not card.has_parent]
        for card in whole:
            links = tuple(
                (other.device.id, self._nearness(card.handle, other.handle)) for other in whole if other is not card
            )
            card.device = msgspec.structs.replace(card.device, links=links)

    def _nearness(self, one: object, other: object) -> int:
        library = self._library
        level: int = self._try(lambda: library.nvmlDeviceGetTopologyCommonAncestor(one, other), default=Nearness.SYSTEM)
        links = self._try(lambda: library.nvmlDeviceGetNvLinkState(one, 0), default=0)
        if links and self._try(lambda: library.nvmlDeviceGetP2PStatus(one, other, NVLINK_P2P), default=1) == 0:
            return Nearness.NVLINK
        return level

    # -- what it does --------------------------------------------------------------------------------------------------

    def read(self) -> list[CardReading]:
        """Every device that was found."""
        self._hear()
        return [self._read(card) for card in self._cards]

    def _read(self, card: _Card) -> CardReading:
        library, handle = self._library, card.handle
        try:
            memory = self._memory_or_error(handle)
        except self._errors as error:
            return CardReading(card.device.id, Health.SICK, f"it cannot be read: {error}")
        health, why = self._health(card)
        rates = self._try(lambda: library.nvmlDeviceGetUtilizationRates(handle))
        throttled = self._try(lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(handle), default=0)
        is_throttled = bool(throttled & THERMAL_BITS)
        if is_throttled and health is Health.OK:
            health, why = Health.DEGRADED, "its clocks are held down for heat"
        return CardReading(
            card.device.id,
            health,
            why,
            busy=None if rates is None else min(rates.gpu, 100) / 100,
            mem_used_bytes=int(memory.used),
            used=self._processes(handle),
            temperature_c=self._try(lambda: library.nvmlDeviceGetTemperature(handle, 0), default=0),
            is_throttled=is_throttled,
        )

    def _health(self, card: _Card) -> tuple[Health, str]:
        if card.device.id in self._sick:
            return Health.SICK, self._sick[card.device.id]
        library, handle = self._library, card.handle
        _, _, pending, failed = self._try(lambda: library.nvmlDeviceGetRemappedRows(handle), default=(0, 0, 0, 0))
        if failed:
            return Health.SICK, "memory rows cannot be replaced any more"
        errors = self._try(lambda: library.nvmlDeviceGetTotalEccErrors(handle, 1, 0), default=0)
        if errors:
            return Health.DEGRADED, f"{errors} uncorrectable memory errors"
        return (Health.DEGRADED, "memory rows wait for a reset") if pending else (Health.OK, "")

    def _processes(self, handle: object) -> tuple[tuple[int, int | None], ...]:
        """Who uses it, each process once with the most that is said of it."""
        found: dict[int, int | None] = {}
        for name in PROCESSES:
            for process in self._listed(name, handle) or ():
                used = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
                before = found.get(process.pid)
                found[process.pid] = used if before is None else max(before, used or 0)
        return tuple(found.items())

    def _listed(self, name: str, handle: object) -> Any:  # noqa: ANN401 -- a list of ctypes structures
        """What one of these functions lists, in the newest version that the driver has; None if it has none."""
        for version in PROCESSES_VERSIONS:
            call = getattr(self._library, name + version, None)
            found = None if call is None else self._try(lambda call=call: call(handle))  # type: ignore[misc]
            if found is not None:
                return found
        return None

    def _memory(self, handle: object) -> Any:  # noqa: ANN401 -- a ctypes structure
        return self._try(lambda: self._memory_or_error(handle))

    def _memory_or_error(self, handle: object) -> Any:  # noqa: ANN401 -- a ctypes structure
        """Without what the driver keeps for itself, where it says so."""
        library = self._library
        version = getattr(library, "nvmlMemory_v2", None)
        if version is not None:
            memory = self._try(lambda: library.nvmlDeviceGetMemoryInfo(handle, version=version))
            if memory is not None:
                return memory
        return library.nvmlDeviceGetMemoryInfo(handle)

    # -- errors that cards report --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        library = self._library
        self._events = self._try(library.nvmlEventSetCreate)
        for card in self._cards:
            if self._events is not None and not card.has_parent:
                self._try(lambda card=card: library.nvmlDeviceRegisterEvents(card.handle, XID_EVENT, self._events))  # type: ignore[misc]

    def _hear(self) -> None:
        """Errors since the last time; it does not wait for any."""
        library = self._library
        for _ in range(XIDS_READ_MAX if self._events is not None else 0):
            event = self._try(lambda: library.nvmlEventSetWait(self._events, 0))
            if event is None:
                return
            name = self._try(lambda event=event: _text(library.nvmlDeviceGetUUID(event.device)), default="")  # type: ignore[misc]
            number = int(event.eventData)
            log.warning("GPU %s reports error %d", name, number)
            if number in XIDS_SERIOUS:
                self._sick[f"nvidia:{name}"] = f"error {number}: {XIDS_SERIOUS[number]}"

    def _try(self, call: Callable[[], Any], default: Any = None) -> Any:  # noqa: ANN401 -- the call's own type
        """What it returns; the default if this card, or this library, cannot."""
        try:
            return call()
        except self._errors:
            return default


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _numa_node(bdf: str) -> int:
    """Of a PCI address as NVML writes it, with a domain of 8 digits."""
    domain, _, rest = bdf.lower().partition(":")
    try:
        return int(
            Path(f"/sys/bus/pci/devices/{domain[-DOMAIN_DIGITS_MAX:]}:{rest}/numa_node").read_text(encoding="ascii")
        )
    except (OSError, ValueError):
        return -1
