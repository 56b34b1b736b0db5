"""The agent of `peerload demo gpu`: a normal agent with simulated GPUs. It replaces the functions of `pynvml` by a simulation that a
file describes.

Arguments: that file, then the flags of `peerload agent`. The file is JSON, read again at each call:
``{"gpus": [{"uuid", "name", "mem_bytes"}], "processes": DIRECTORY}``; ``"lost": true`` marks a GPU as lost. A live process uses
the GPUs listed in ``DIRECTORY/PID``, one a line (``UUID BYTES PERCENT``). Like the real library, it reports utilization late.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peerload.cli.common.agent_process import agent_options, default_state, given_settings
from peerload.client.connection import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable


DRIVER = "played"
LAG_S = 0.5
"""Delay with which utilization is reported."""
TEMPERATURE_C = 35
INVALID, NOT_SUPPORTED, DRIVER_NOT_LOADED, LOST = 2, 3, 9, 15
PROCESSES_MAX = 4096
WORDS = 3
"""Number of words in a line of a process's file."""


class PlayedError(Exception):
    """Error like `pynvml.NVMLError`: ``value`` is the number of the error."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Memory(NamedTuple):
    """Memory of a card, in bytes."""

    total: int
    free: int
    used: int


class Rates(NamedTuple):
    """Utilization in the last moments, in percent."""

    gpu: int
    memory: int


class ProcessInfo(NamedTuple):
    """Process on a card."""

    pid: int
    usedGpuMemory: int  # noqa: N815 -- as pynvml names it


class Pci(NamedTuple):
    """PCI address of a card."""

    busId: str  # noqa: N815 -- as pynvml names it


class PlayedNvml:
    """Simulated driver of one machine; ``now_s``: a clock that only goes forward."""

    NVMLError = PlayedError

    def __init__(self, file: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._now_s = now_s
        self._busy: dict[int, tuple[float, int, int]] = {}

    # The names are those of pynvml. Missing functions are not supported by this driver.

    def nvmlInit(self) -> None:  # noqa: N802 -- as above
        self._machine()

    def nvmlShutdown(self) -> None:  # noqa: N802 -- as above
        """Do nothing."""

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802 -- as above
        """Version of the driver: not a number, so that it cannot be mistaken for a real one."""
        return DRIVER

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 -- as above
        return len(self._gpus())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 -- as above
        self._gpu(index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802 -- as above
        return str(self._gpu(handle)["uuid"])

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802 -- as above
        return str(self._gpu(handle)["name"])

    def nvmlDeviceGetPciInfo_v3(self, handle: int) -> Pci:  # noqa: N802 -- as above
        self._gpu(handle)
        return Pci(f"00000000:{handle + 1:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int = 0) -> Memory:  # noqa: N802 -- as above
        del version
        total = int(str(self._gpu(handle)["mem_bytes"]))
        used = min(sum(size for _, size, _ in self._processes(handle)), total)
        return Memory(total, total - used, used)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: int) -> list[ProcessInfo]:  # noqa: N802 -- as above
        return [ProcessInfo(pid, size) for pid, size, _ in self._processes(handle)]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Rates:  # noqa: N802 -- as above
        now_s, busy = self._now_s(), min(sum(percent for *_, percent in self._processes(handle)), 100)
        since_s, before, last = self._busy.get(handle, (now_s - LAG_S, busy, busy))
        if busy != last:
            since_s, before, last = now_s, before if now_s < since_s + LAG_S else last, busy
        self._busy[handle] = (since_s, before, last)
        return Rates(before if now_s < since_s + LAG_S else last, 0)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802 -- as above
        del sensor
        self._gpu(handle)
        return TEMPERATURE_C

    # -- the machine ---------------------------------------------------------------------------------------------------

    def _machine(self) -> dict[str, object]:
        try:
            machine = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise PlayedError(DRIVER_NOT_LOADED) from None
        if not isinstance(machine, dict):
            raise PlayedError(DRIVER_NOT_LOADED)
        return machine

    def _gpus(self) -> list[dict[str, object]]:
        gpus = self._machine().get("gpus")
        return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []

    def _gpu(self, handle: int) -> dict[str, object]:
        gpus = self._gpus()
        if not 0 <= handle < len(gpus):
            raise PlayedError(INVALID)
        if gpus[handle].get("lost"):
            raise PlayedError(LOST)
        return gpus[handle]

    def _processes(self, handle: int) -> list[tuple[int, int, int]]:
        """(pid, bytes, percent) of each live process on a card."""
        uuid, directory = self._gpu(handle)["uuid"], Path(str(self._machine().get("processes", "")))
        found = []
        try:
            names = sorted(name for name in os.listdir(directory) if name.isdecimal())[:PROCESSES_MAX]  # noqa: PTH208 -- names are all it takes
        except OSError:
            return []
        for name in names:
            if not is_alive(int(name)):
                continue
            try:
                lines = (directory / name).read_text(encoding="utf-8").splitlines()
            except OSError:  # the process has just ended
                continue
            told = [words for words in map(str.split, lines) if len(words) == WORDS and words[0] == uuid]
            found += [(int(name), int(words[1]), int(words[2])) for words in told]
        return found


def main() -> int:
    """Run the agent until a request or signal stops it."""
    from peerload.agent.main import run

    machine, *words = sys.argv[1:]
    settings = given_settings(agent_options("agent", "The agent of a demonstration.").read(words))
    defaults = {"state": default_state(), "socket": settings["socket"]}
    return run(settings, defaults, PlayedNvml(Path(machine)))
