"""Power of a node: what its sensors tell, whatever they print, and what it tells without one."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peerload.agent.sensors import power
from peerload.agent.sensors.power import Hwmon, PowercapCounters, PowerCommand, rated_watts, watts_of
from peerload.agent.views import node as views
from peerload.launcher import powercap
from peerload.launcher.powercap import Powercap
from peerload.model.config import EnergySettings
from peerload.model.events import LoadSampled
from peerload.model.resources import Quality, estimated_curve
from tests.core.given import Given
from tests.each import each
from tests.fakes.power_tree import PowerTree
from tests.support import PATIENCE_S


def zone(root: Path, number: str, name: str, **files: object) -> Path:
    """One zone of a powercap tree."""
    directory = root / number
    directory.mkdir(parents=True)
    for file, content in {"name": name, **files}.items():
        (directory / file).write_text(f"{content}\n")
    return directory


def test_rated_watts_are_those_of_the_packages(tmp_path: Path) -> None:
    settings = EnergySettings(powercap=str(tmp_path))
    assert rated_watts(settings) == 0.0
    zone(tmp_path, "intel-rapl:0", "package-0", constraint_0_max_power_uw=125_000_000)
    zone(tmp_path, "intel-rapl:1", "psys", constraint_0_max_power_uw=600_000_000)
    zone(tmp_path, "intel-rapl:2", "package-1", constraint_0_max_power_uw=125_000_000)
    zone(tmp_path, "intel-rapl:3", "package-2", constraint_0_max_power_uw="")
    (tmp_path / "intel-rapl:4").symlink_to("intel-rapl:0")
    assert rated_watts(settings) == 250.0


def test_watts_of_a_node_are_estimated_from_its_curve() -> None:
    x = Given()
    x.node.own_profile.change(power=estimated_curve(4, peak_w=100.0))
    x.node.handle(x.node.state.now, LoadSampled(4.0, 0.0, 0))
    own: dict[str, Any] = views.nodes(x.node)[0]
    assert (own["watts"], own["watts_quality"]) == (100.0, Quality.ESTIMATED)
    x.node.handle(x.node.state.now, LoadSampled(4.0, 0.0, 0, watts=80.0))
    own = views.nodes(x.node)[0]
    assert (own["watts"], own["watts_quality"]) == (80.0, Quality.MEASURED)


# -- bad input: what a counter tells, and what is made of it -------------------------------------------------------------


class Counting:
    """A machine that draws 50 W, with a clock of its own; `step` lets two seconds pass and reads the counters."""

    def __init__(self, root: Path) -> None:
        self.tree = PowerTree(root)
        self.now_s = 1000.0
        self.powercap = Powercap(str(self.tree.powercap), lambda: self.now_s)
        self.counters = PowercapCounters()
        self.joules = self.gap_s = 0.0

    def step(self, watts: float = 50.0, seconds: float = 2.0) -> None:
        for number in self.tree.counted_uj:
            if (self.tree.powercap / number / "energy_uj").exists():
                self.tree.draw(watts * seconds, number)
        self.look(seconds)

    def look(self, seconds: float = 2.0) -> None:
        self.now_s += seconds
        told = self.counters.take(self.now_s, self.powercap.read())
        self.joules, self.gap_s = self.joules + told.joules, self.gap_s + told.gap_s

    def writes(self, text: str) -> None:
        """The counter tells something else, once; the machine draws on."""
        (self.tree.powercap / "intel-rapl:0" / "energy_uj").write_text(text)
        self.look()
        self.tree.draw(100.0)


def unreadable(machine: Counting) -> None:
    file = machine.tree.powercap / "intel-rapl:0" / "energy_uj"
    file.unlink()
    file.mkdir()
    machine.look()
    file.rmdir()
    machine.tree.draw(100.0)


def vanishes(machine: Counting) -> None:
    shutil.rmtree(machine.tree.powercap / "intel-rapl:0")
    for _ in range(8):
        machine.look()
    assert not machine.counters.is_alive(machine.now_s)
    machine.tree.zone("intel-rapl:0", "package-0", start_uj=7_000_000)
    machine.look(10.0)


def one_of_two_vanishes(machine: Counting) -> None:
    machine.tree.zone("intel-rapl:1", "package-1", start_uj=5)
    machine.step(seconds=12.0)
    machine.step()
    shutil.rmtree(machine.tree.powercap / "intel-rapl:1")
    for _ in range(8):
        machine.step()


def one_of_two_is_never_readable(machine: Counting) -> None:
    (machine.tree.zone("intel-rapl:1", "package-1") / "energy_uj").write_text("")
    machine.tree.counted_uj.pop("intel-rapl:1")
    machine.step(seconds=12.0)
    for _ in range(8):
        machine.step()


def comes_mid_run(machine: Counting) -> None:
    machine.tree.zone("intel-rapl:1", "package-1", start_uj=123_456_789)
    machine.step(seconds=12.0)
    machine.step()


def wraps(machine: Counting) -> None:
    machine.tree.counted_uj["intel-rapl:0"] = machine.tree.range_uj - 50_000_000
    machine.tree.draw(0.0)
    machine.counters.counters = {}
    machine.look()
    machine.step()


def restarts(machine: Counting) -> None:
    machine.tree.counted_uj["intel-rapl:0"] = 0
    machine.step()


def jumps(machine: Counting) -> None:
    machine.tree.draw(5_000.0)
    machine.step()


def draws_five_times_its_rated_power(machine: Counting) -> None:
    machine.step(watts=500.0)


def wraps_twice(machine: Counting) -> None:
    machine.tree.range_uj = 1_000_000_000
    (machine.tree.powercap / "intel-rapl:0/max_energy_range_uj").write_text("1000000000\n")
    machine.step(seconds=10.0)
    machine.step(seconds=30.0)


def clock_steps_back(machine: Counting) -> None:
    machine.now_s -= 300.0
    machine.tree.draw(100.0)
    machine.look()


def platform_has_number_one(machine: Counting) -> None:
    for number, name in (("1", "psys"), ("0:0", "core"), ("0:1", "uncore"), ("mmio:0", "package-0")):
        machine.tree.zone(f"intel-rapl{'-' if 'mmio' in number else ':'}{number}", name)
    machine.step(seconds=12.0)
    machine.step()


@each(
    ("happens", "joules", "gap_s"),
    [
        (unreadable, 500.0, 0.0),
        (lambda machine: machine.writes(""), 500.0, 0.0),
        (lambda machine: machine.writes("-5"), 500.0, 0.0),
        (lambda machine: machine.writes("abc"), 500.0, 0.0),
        (lambda machine: machine.writes("nan"), 500.0, 0.0),
        (lambda machine: machine.writes("9" * 40), 500.0, 0.0),
        (vanishes, 400.0, 0.0),
        (one_of_two_vanishes, 200 + 600 + 200 + 800 + 200.0, 14.0),
        (one_of_two_is_never_readable, 200 + 600 + 800 + 200.0, 14.0),
        (comes_mid_run, 200 + 600 + 200 + 400.0, 0.0),
        (wraps, 200 + 100 + 200.0, 0.0),
        (restarts, 400.0, 2.0),
        (jumps, 400.0, 2.0),
        (draws_five_times_its_rated_power, 400.0 + 1000.0, 0.0),
        (wraps_twice, 200 + 500 + 200.0, 30.0),
        (clock_steps_back, 400.0, 0.0),
        (platform_has_number_one, 200 + 600 + 100 + 200.0, 0.0),
    ],
)
def test_bad_counters(happens: Callable[[Counting], None], joules: float, gap_s: float, tmp_path: Path) -> None:
    machine = Counting(tmp_path)
    machine.tree.zone("intel-rapl:0", "package-0", start_uj=1_000_000, tdp_w=100.0)
    for _ in range(3):  # the first reading counts nothing
        machine.step()
    happens(machine)
    for _ in range(2):
        machine.step()
    assert [machine.joules, machine.gap_s] == pytest.approx([joules, gap_s], abs=0.9)


def test_counters_are_read_once_a_second_at_most(tmp_path: Path) -> None:
    machine = Counting(tmp_path)
    machine.tree.zone("intel-rapl:0", "package-0")
    first = machine.powercap.read()
    machine.tree.draw(5.0)
    machine.now_s += 0.9
    assert machine.powercap.read() == first
    machine.now_s += 0.2
    assert machine.powercap.read() != first


def test_counters_that_only_root_may_read_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Counting(tmp_path)
    machine.tree.zone("intel-rapl:0", "package-0")
    monkeypatch.setattr(powercap, "_counter", lambda _path: powercap.FORBIDDEN)
    machine.step()
    assert "root" in machine.counters.why
    assert not machine.counters.is_alive(machine.now_s)
    assert machine.joules == 0.0


@each(
    ("printed", "watts"),
    [("412", 412.0), ("412.5\n", 412.5), (" 4.1e2 W ", 410.0), ("95 watts\n", 95.0), ("0.4 kW", None), ("nan", None), ("NaN W", None),
     ("inf", None), ("", None), ("-5", None), ("0", None), ("1e9", None), ("power: 95 W", None), ("95 W\n96 W", None), ("\0", None)],
)  # fmt: skip
def test_a_command_prints_watts_and_nothing_else(printed: str, watts: float | None) -> None:
    told = watts_of(printed.encode())
    assert told == watts if watts else isinstance(told, str)


@each(
    ("command", "why"),
    [("sleep 600", "not ended"), ("(sleep 600 &) ; echo 90", "not ended"), ("yes", "y"), ("echo 90; exit 3", "exit code 3"),
     ("/nowhere/at/all", "127"), ("kill -9 $$", "-9"), ("exec >&-; sleep 600", "not ended")],
)  # fmt: skip
def test_a_command_that_fails_is_killed_and_tells_nothing(
    command: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "COMMAND_S_MAX", 0.2 if why == "not ended" else PATIENCE_S)
    sensor = PowerCommand(command)
    asyncio.run(sensor.ask())
    assert why in sensor.why
    assert not sensor.is_alive(time.clock_gettime(time.CLOCK_BOOTTIME))


def test_a_command_that_works_counts() -> None:
    sensor = PowerCommand("echo 90 W")
    asyncio.run(sensor.ask())
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert (sensor.watts, sensor.why, sensor.is_alive(now_s)) == (90.0, "", True)
    assert sensor.take(now_s).gap_s == 0.0
    assert sensor.take(now_s + 10.0).joules == pytest.approx(900.0)
    assert sensor.take(now_s + 1010.0).gap_s == pytest.approx(1000.0 - 25.0, abs=1.0)


def test_a_chip_of_the_whole_machine_is_read_and_no_other(tmp_path: Path) -> None:
    tree = PowerTree(tmp_path)
    chip = Hwmon(str(tree.hwmon))
    chip.read(0.0)
    assert chip.why
    for number, name in enumerate(("amdgpu", "BAT0", "ina226", "power_meter")):
        tree.chip(number, name, 100.0 * number)
    for second in range(40):
        chip.read(float(second))
    assert chip.watts == 300.0
    tree.chip(3, "power_meter", 0.0)
    chip.read(41.0)
    assert (chip.watts, "0" in chip.why) == (300.0, True)  # the last reading, until it is too old
    assert not chip.is_alive(100.0)


def test_a_chip_that_hangs_does_not_hold_up_the_end_of_the_agent(tmp_path: Path) -> None:
    tree, loop = PowerTree(tmp_path), asyncio.new_event_loop()
    tree.chip(0, "power_meter", 100.0)
    file, chip = tree.hwmon / "hwmon0/power1_average", Hwmon(str(tree.hwmon))
    file.unlink()
    os.mkfifo(file)  # to open it waits for a writer
    before = set(threading.enumerate())
    loop.run_until_complete(chip.refresh(0.0))
    (reader,) = set(threading.enumerate()) - before
    assert reader.daemon
    file.write_text("5000000\n")
    reader.join(PATIENCE_S)
    assert chip.watts == 5.0
    loop.close()
