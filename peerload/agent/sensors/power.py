"""Power sensors of the host, the best first: a command of the administrator, hwmon, powercap, the load of the machine.

Each sensor returns the joules since its last reading, and is read at every sample. The first with a recent reading counts;
the others are only shown. Why without a library: see docs/adr/0040-energy-measured.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.runtime import in_own_thread, next_tick, run_command
from peerload.agent.sensors.processes import read_text_of
from peerload.energy.accounting import HOLD_S, Counter, EnergyDelta, Integral
from peerload.energy.profile import BadProfile, decoded
from peerload.launcher.powercap import FORBIDDEN, zones
from peerload.model.resources import DeviceReading, Quality, estimated_curve
from peerload.security.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.energy.profile import PowerProfile
    from peerload.launcher.powercap import Reading
    from peerload.model.config import AgentConfig, EnergySettings
    from peerload.model.resources import PowerCurve

log = logging.getLogger("peerload.agent")

PROFILE_FILE = "power.json"
PROFILE_BYTES_MAX = 64 << 10
COMMAND_EVERY_S = 10.0
COMMAND_S_MAX = 5.0
READ_S_MAX = 0.2
FIND_EVERY = 30
"""Number of readings between two searches for chips."""
OUTPUT_BYTES_MAX = 4096
SILENT_S = 10.0
"""Time in s without readings after which a counter is no longer a source; the missed time is a gap."""
WATTS_MAX = 1e6
NOT_THE_MACHINE = re.compile(r"amdgpu|radeon|nouveau|i915|xe|nvme|fam15h_power|BAT|AC|ADP|ucsi", re.IGNORECASE)
"""hwmon chips that measure only one device, or the power that flows into the machine."""
WHOLE_MACHINE = ("power_meter", "corsairpsu")
"""Names of chips that measure the whole machine: ACPI's, in servers, and a power supply."""
POWER_FILES = ("power1_input", "power1_average")
"""Files of a chip with its power, in microwatts: most have the first; ACPI chips have only the second."""
FORBIDDEN_TEXT = "only root may read it; see:  peerload doctor"
METRICS_HEAD_BYTES, METRICS_FORMAT, METRICS_OF_CARD = 4, 2, 1
"""Header of `gpu_metrics` of amdgpu: a byte with the format, which is 1 for cards, and larger for parts of a processor."""
BUSY_SHARE = 0.1
_WATTS = re.compile(rb"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(?:W|watts?)?\s*", re.IGNORECASE)


class PowerSource:
    """A sensor of power. why: the reason why it has no reading, "" if it has one; watts: the last reading."""

    name = ""
    quality = Quality.MEASURED
    silent_s = SILENT_S

    def __init__(self, scope: str, why: str = "") -> None:
        self.scope = scope
        self.why = why
        self.watts: float | None = None
        self.known_s = float("-inf")

    def add_reading(self, at_s: float, joules: float, seconds: float) -> None:
        self.known_s, self.why = at_s, ""
        if seconds > 0:
            self.watts = joules / seconds

    def is_alive(self, at_s: float) -> bool:
        """True if there is a recent reading; otherwise the last power is dropped."""
        if at_s - self.known_s <= self.silent_s:
            return True
        self.watts = None
        return False


class _OfReadings(PowerSource):
    """Sensor that reports watts at intervals."""

    silent_s = HOLD_S

    def __init__(self, scope: str, why: str = "") -> None:
        super().__init__(scope, why)
        self._integral = Integral()

    def has_read(self, at_s: float, watts: float) -> None:
        self._integral.read(at_s, watts)
        self.known_s, self.watts, self.why = at_s, watts, ""

    def goes_on_from(self, at_s: float) -> None:
        """Continue from the time at which the earlier agent has stopped counting."""
        self._integral.at_s = at_s

    def take(self, at_s: float) -> EnergyDelta:
        return self._integral.take(at_s)


class PowerCommand(_OfReadings):
    """`power_cmd`, run as a child every COMMAND_EVERY_S with a time limit. It blocks nothing."""

    name = "power_cmd"

    def __init__(self, command: str) -> None:
        super().__init__("node", "" if command else "not set")
        self._command = command

    async def run(self) -> None:
        while self._command:
            await self.ask()
            await next_tick(COMMAND_EVERY_S)

    async def ask(self) -> None:
        command = ("/bin/sh", "-c", self._command)
        try:
            code, output = await run_command(command, COMMAND_S_MAX, output_bytes_max=OUTPUT_BYTES_MAX)
        except TimeoutError:
            self.why = f"it has not ended within {COMMAND_S_MAX:g} s"
            return
        except OSError as error:
            self.why = str(error.strerror or error)
            return
        has_answered = not code or len(output) > OUTPUT_BYTES_MAX
        watts = watts_of(output) if has_answered else f"it ended with exit code {code}"
        if isinstance(watts, float):
            self.has_read(time.clock_gettime(time.CLOCK_BOOTTIME), watts)
        else:
            self.why = watts


def watts_of(output: bytes) -> float | str:
    """The watts that a command has printed, or the reason why they are invalid."""
    found = _WATTS.fullmatch(output[: OUTPUT_BYTES_MAX + 1])
    watts = float(found[1]) if found is not None else 0.0
    if 0.0 < watts <= WATTS_MAX:
        return watts
    shown = output[:40].decode("ascii", "replace").strip()
    return f"it prints {shown!r}, not a number of watts"


class Hwmon(_OfReadings):
    """A chip of hwmon that measures the power of the whole machine (POWER_FILES)."""

    name = "hwmon"

    def __init__(self, place: str) -> None:
        super().__init__("node", "no chip measures the power of the machine")
        self._place = Path(place)
        self.cards = GpuChips(place)
        self._file: Path | None = None
        self._find_in = 0
        self._reading: asyncio.Future[None] | None = None

    async def refresh(self, at_s: float) -> None:
        """Read in a thread, since firmware may be slow. A hanging reading blocks nothing, not even the end of the agent, and no
        other is started meanwhile. Without a chip, a reading is started only from time to time."""
        if self._file is None and not self.cards.chips and self._find_in > 0:
            self._find_in -= 1
            return
        if self._reading is None or self._reading.done():
            self._reading = in_own_thread(lambda: self.read(at_s))
        await asyncio.wait({self._reading}, timeout=READ_S_MAX)

    def read(self, at_s: float) -> None:
        """Take a reading; search for chips from time to time."""
        self._find_in -= 1
        if self._find_in < 0:
            self._find_in = FIND_EVERY
            self.cards.find()
            self._file = self._file or self._found()
        self.cards.read(at_s)
        if self._file is None:
            return
        try:
            text = self._file.read_text(encoding="ascii").strip()
            watts = int(text) / 1e6
        except (OSError, ValueError):
            self._file, self.why = None, "it cannot be read"
            return
        if 0.0 < watts <= WATTS_MAX:
            self.has_read(at_s, watts)
        else:
            self.why = f"its value is {text!r}"

    def _found(self) -> Path | None:
        chips = []
        for file in (file for name in POWER_FILES for file in self._place.glob(f"hwmon*/{name}")):
            chip = read_text_of(file.parent / "name")
            if not NOT_THE_MACHINE.match(chip):
                chips.append((chip not in WHOLE_MACHINE, file))
        return min(chips)[1] if chips else None


class GpuChips:
    """hwmon chips of AMD's and Intel's cards (amdgpu, i915, xe): address of the card → time of the reading, and the reading.
    A suspended card is not woken by a reading. A GPU that is part of a processor is counted with the processor."""

    def __init__(self, place: str) -> None:
        self._place = Path(place)
        self.chips: tuple[Path, ...] = ()
        self.power: dict[str, tuple[float, DeviceReading]] = {}

    def find(self) -> None:
        chips = sorted(path.parent for path in self._place.glob("hwmon*/name"))
        self.chips = tuple(chip for chip in chips if _is_card(chip))

    def read(self, at_s: float) -> None:
        for chip in self.chips:
            device = chip / "device"
            watts = _micro(chip / "power1_average")
            watts = _micro(chip / "power1_input") if watts is None else watts
            joules = _micro(chip / "energy1_input", most=1e12)
            if (watts is None and joules is None) or read_text_of(device / "power/runtime_status") == "suspended":
                continue
            percent = read_text_of(device / "gpu_busy_percent")
            busy = min(int(percent), 100) / 100 if percent.isdecimal() else 0.0
            place = device.resolve().name
            reading = DeviceReading(place, busy=busy, foreign=busy > BUSY_SHARE, power_w=watts, energy_j=joules)
            self.power[place] = at_s, reading


def _is_card(chip: Path) -> bool:
    name = read_text_of(chip / "name")
    if name != "amdgpu":
        return name in ("i915", "xe")
    try:
        with (chip / "device/gpu_metrics").open("rb") as file:
            return file.read(METRICS_HEAD_BYTES)[METRICS_FORMAT] == METRICS_OF_CARD
    except (OSError, IndexError):
        return True  # an old kernel


def _micro(file: Path, most: float = WATTS_MAX) -> float | None:
    """The number in a file, in millionths; None if it is invalid."""
    try:
        value = int(file.read_text(encoding="ascii")) / 1e6
    except (OSError, ValueError):
        return None
    return value if 0.0 <= value <= most else None


class PowercapCounters(PowerSource):
    """The sum of powercap zones: packages and memory; or the one of the whole platform."""

    name = "powercap"

    def __init__(self, *, is_platform: bool = False) -> None:
        super().__init__("platform" if is_platform else "package", "there are no energy counters")
        self._is_platform = is_platform
        self.counters: dict[str, Counter] = {}
        self._sampled_s = 0.0

    def take(self, at_s: float, readings: Iterable[Reading]) -> EnergyDelta:
        zones = [reading for reading in readings if (reading[1] == "psys") is self._is_platform]
        is_read = any(value >= 0 for _, _, value, _, _ in zones)
        if is_read:
            self.scope = (
                "platform"
                if self._is_platform
                else "+".join(sorted({name.partition("-")[0] for _, name, *_ in zones}, reverse=True))
            )
        before_s, self._sampled_s = self._sampled_s, at_s
        if before_s - self.known_s > SILENT_S:
            self.counters = {}
        joules = gap_s = 0.0
        for path, _, value, most, rated in zones:
            counter = self.counters.setdefault(path, Counter(at_s=at_s))
            part = counter.take(at_s, value / 1e6 if value >= 0 else None, most / 1e6, rated / 1e6)
            joules, gap_s = joules + part.joules, max(gap_s, part.gap_s)
        for path, counter in list(self.counters.items()):
            if is_read and min(before_s, at_s) - counter.at_s > SILENT_S:  # without this zone the sum is unknown
                gap_s = max(gap_s, at_s - counter.at_s)
                del self.counters[path]
        if is_read:
            self.add_reading(at_s, joules, at_s - before_s if joules else 0.0)
        elif zones:
            self.why = FORBIDDEN_TEXT if any(value == FORBIDDEN for _, _, value, _, _ in zones) else "it cannot be read"
        return EnergyDelta(joules, gap_s)


class PowerModel(PowerSource):
    """Power estimated only from the load, by the power curve of the node."""

    name = "model"
    quality = Quality.ESTIMATED


def rated_watts(settings: EnergySettings) -> float:
    """Sum of the long-term power limits of the processor packages; 0 = unknown."""
    packages = [path for path, name in zones(settings.powercap).items() if name.startswith("package")]
    found = [read_text_of(Path(path, "constraint_0_max_power_uw")) for path in packages]
    return sum(int(text) for text in found if text.isdecimal()) / 1e6


def processor(root: Path = Path("/")) -> str:
    """Name of the processor of this machine, and its number of threads."""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*: (.+)$", _cpu_info(root), re.MULTILINE)
    return f"{found[1].strip() if found is not None else platform.machine()}, {os.cpu_count()} threads"


def _cpu_info(root: Path) -> str:
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        return file.read(OUTPUT_BYTES_MAX)
    return ""


def own_curve(config: AgentConfig, threads: int) -> PowerCurve:
    """The measured power curve of this machine, or else an estimated one. An invalid one is logged."""
    path = Path(config.state) / PROFILE_FILE
    try:
        return decoded(path.read_bytes()[:PROFILE_BYTES_MAX], processor()).curve
    except FileNotFoundError:
        pass
    except (OSError, BadProfile) as error:
        log.warning("cannot use the stored power profile: path=%s error=%s", path, error)
    return estimated_curve(threads, peak_w=rated_watts(config.energy))


def store_profile(state: Path, profile: PowerProfile) -> None:
    write_private(state / PROFILE_FILE, msgspec.json.encode(profile), is_durable=False)
