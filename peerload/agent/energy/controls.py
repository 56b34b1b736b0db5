"""Controls of power, all off unless set: NVML power limits and locked clocks, cpufreq governor and greatest frequency.

What was in force before is written to the state directory ahead of each change, and put back when the agent stops, at its next
start if it was killed, or by `peerload power restore`. Each step can be repeated, so that a crash between any two of them leaves
nothing behind: what is restored is forgotten only when all of it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.agent.sensors.nvml_library import find_library, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peerload.model.config import EnergySettings

FILE = "power-controls.json"
GPU_LIMIT, GPU_CLOCKS = "gpu power limit", "gpu clocks"
CPU_FILES = {"cpu governor": "scaling_governor", "cpu frequency": "scaling_max_freq"}
CLOCK_MHZ_MIN = 0


class Control(NamedTuple):
    """A change. kind: one of the names above; target: a file, or the UUID of a card; before: what was in force there."""

    kind: str
    target: str
    before: str


class PowerControls:
    """The controls of one machine. file: what was in force before."""

    def __init__(self, file: Path, library: Callable[[], Any] = find_library) -> None:
        """library: loads the interface of `pynvml`; None: there is no driver."""
        self._file = file
        self._library = library
        self._nvml: Any = None
        self._lock = threading.Lock()

    def are_wanted(self, wanted: EnergySettings) -> bool:
        """True if there is anything to set, or to put back."""
        is_set = wanted.gpu_power_w or wanted.gpu_clock_mhz or wanted.cpu_governor or wanted.cpu_max_mhz
        return bool(is_set) or self._file.exists()

    def start(self, settings: EnergySettings) -> list[str]:
        """Put back what an earlier start has left, then apply the settings. → what could not be done."""
        said = self.restore()
        with self._lock:
            return said + self._apply(settings)

    def restore(self) -> list[str]:
        """Put all back. → what could not be; it is kept, and tried again."""
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
            left, said = [], []
            for one in reversed(changed):
                if why := self._set(one.kind, one.target, one.before):
                    left.append(one)
                    said.append(f"{one.kind} of {one.target} is not put back to {one.before}: {why}")
        try:
            self._keep(left[::-1])
        except OSError as error:
            said.append(f"{self._file} cannot be written: {error.strerror}")
        return said

    def _apply(self, settings: EnergySettings) -> list[str]:
        said: list[str] = []
        try:
            changed = self._changed()
        except ValueError:  # `restore` has said it; a change now would be taken for what was in force before
            return ["no power control is set"]
        wants_gpus = bool(settings.gpu_power_w or settings.gpu_clock_mhz)
        with self._session(wants_gpus):
            if wants_gpus and self._nvml is None:
                said.append("the power of GPUs is not limited: there is no NVIDIA driver that works")
            for kind, target, value in [*_cpu_changes(settings), *self._gpu_changes(settings, said)]:
                before, why = self._before(kind, target, value)
                if not why and before != value:
                    # Noted ahead of the change: who dies in between has changed nothing that is not noted.
                    noted = [*changed, Control(kind, target, before)]
                    try:
                        self._keep(noted)
                    except OSError as error:
                        why = f"{self._file} cannot be written: {error.strerror}"
                    else:
                        changed = noted
                        why = self._set(kind, target, value)
                if why:
                    said.append(f"{kind} of {target} is not set to {value}: {why}")
        return said

    # -- what is to be set -----------------------------------------------------------------------------------------------

    def _gpu_changes(self, settings: EnergySettings, said: list[str]) -> Iterator[tuple[str, str, str]]:
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetCount() if nvml is not None else 0
        except self._errors as error:
            said.append(f"the power of GPUs is not limited: {_why(error)}")
            return
        for index in range(count):
            try:
                uuid = text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
            except self._errors as error:
                said.append(f"the power of GPU {index} is not limited: {_why(error)}")
                continue
            if settings.gpu_power_w:
                yield GPU_LIMIT, uuid, f"{round(settings.gpu_power_w * 1000)}"
            if settings.gpu_clock_mhz:
                yield GPU_CLOCKS, uuid, f"{settings.gpu_clock_mhz}"

    def _before(self, kind: str, target: str, value: str) -> tuple[str, str]:
        """The value in force, and the reason why another cannot be set there ("": it can)."""
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
                return "", ""  # what was locked before cannot be read: they are free again
            handle = self._nvml.nvmlDeviceGetHandleByUUID(target)
            low, high = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            before = f"{self._nvml.nvmlDeviceGetPowerManagementLimit(handle)}"
            return before, "" if low <= int(value) <= high else f"it is between {low / 1000:g} and {high / 1000:g} W"
        except self._errors as error:
            return "", _why(error)

    # -- the changes ------------------------------------------------------------------------------------------------------

    def _set(self, kind: str, target: str, value: str) -> str:
        """Set one value. → why that failed."""
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
        """Controls to put back. For root, who may write everywhere, the file of another user names nothing but processors and
        cards. Raises ValueError if the file cannot be read."""
        try:
            is_own = self._file.stat().st_uid == os.geteuid()
            found = [Control(*map(str, one)) for one in json.loads(self._file.read_text())]
        except FileNotFoundError:
            return []
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(str(error)) from None
        return [one for one in found if one.kind not in CPU_FILES or is_own or _is_of_kernel(one.target)]

    def _keep(self, changed: list[Control]) -> None:
        """Write what has to be put back, durably."""
        if not changed:
            self._file.unlink(missing_ok=True)
            return
        new = self._file.with_suffix(".new")
        with new.open("w") as file:
            json.dump(changed, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._file)
        directory = os.open(self._file.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

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
    return f"what power controls were in force before is not known: {file}: {error}; remove it after a look at them"


def _is_of_kernel(target: str) -> bool:
    return target.startswith("/sys/devices/system/cpu/") and "/../" not in target


def _why(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)
