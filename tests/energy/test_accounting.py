"""Energy accounts of a node: tasks + other + idle = node, over wraps and a kill -9, with a clock of their own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from peerload.agent.sensors import energy
from peerload.agent.sensors.energy import EnergySensors, EnergyStore
from peerload.energy.accounting import DRIFT_S, Drift, IdlePower
from peerload.launcher.protocol import TaskUsage, UsageEvent
from peerload.model.config import AgentConfig, EnergySettings
from peerload.model.errors import StoreError
from peerload.model.events import Instant
from peerload.model.resources import Device, DeviceReading, PowerCurve, Quality, ResourceRequest, estimated_curve
from peerload.model.task import Exit, Usage
from tests.core.given import Given
from tests.each import each
from tests.fakes.power_tree import PowerTree
from tests.support import PutEvents

SAMPLE_S = 2.0
CORES = 8
IDLE_W, CORE_W = 20.0, 9.0
CURVE = PowerCurve((IDLE_W, IDLE_W + CORES * CORE_W), CORES, CORES, quality=Quality.MEASURED)


class Sensors(EnergySensors):
    def _slept_s(self) -> float:
        return float(self._launcher.slept_s)  # type: ignore[attr-defined]


class Machine:
    """A machine with eight cores, each of which draws CORE_W while it is busy, and the agent on it. Tasks and other programs use
    what the test says; its launcher tells of the tasks that run."""

    units: str = "cgroup2"

    def __init__(self, root: Path, curve: PowerCurve | None = CURVE, range_uj: int = 262_143_000_000) -> None:
        self.root = root
        self.at_s = self.slept_s = self.busy_s = self.drawn_j = self.uncounted_j = 0.0
        self.tree = PowerTree(root, range_uj)
        self.cpu_s: dict[str, float] = {}
        self.gpus: Any = SimpleNamespace(devices=(), power={})
        self.x = Given()
        self.ledger = self.x.node.ledger
        self.x.node.own_profile.change(power=curve)
        self.is_silent = False
        self.own_before_s = 0.0  # own cores are counted from the start of an agent
        self.put = PutEvents()
        self.start()

    def start(self, mode: Literal["user", "system"] = "user") -> None:
        """Start the agent, after a kill -9 if one ran."""
        self.is_system = mode == "system"
        self.busy_before_s = self.busy_s
        settings = EnergySettings(powercap=str(self.tree.powercap), hwmon=str(self.tree.hwmon))
        config = AgentConfig(node="n1", state=str(self.root), socket="s", mode=mode, energy=settings)
        store = EnergyStore(self.root / "energy.db")
        clock = lambda: Instant(self.at_s, 1e9 + self.at_s)  # noqa: E731 -- short
        self.agent = Sensors(config, self.x.node, self.gpus, self, store, self.put, clock)

    async def usage(self, keys: Sequence[str], *, brief: bool, counters: bool) -> UsageEvent | None:
        assert brief
        assert counters <= self.is_system
        of = {key: TaskUsage(self.cpu_s[key], -1, -1) for key in keys if key in self.cpu_s}
        told = [("/sys/zone", "package-0", round(self.drawn_j * 1e6), 10**12, 0)] if counters else []
        return None if self.is_silent else UsageEvent(1, self.at_s, of, told)

    def passes(self, seconds: float, other_cores: float = 0.0, **busy: float) -> None:
        """Let time pass in which these tasks keep so many cores busy."""
        cores = other_cores + sum(busy.values())
        for key, used in busy.items():
            self.cpu_s[key] = self.cpu_s.get(key, 0.0) + used * seconds
        self.busy_s += cores * seconds
        self.at_s += seconds
        joules = (IDLE_W + CORE_W * cores) * seconds
        self.drawn_j += joules
        self.uncounted_j += joules

    async def sample(self) -> None:
        if self.tree.counted_uj:
            self.tree.draw(self.uncounted_j)
        self.uncounted_j = 0.0
        await self.agent.sample(self.busy_s, self.busy_s - self.busy_before_s)

    def runs(self, key: str) -> None:
        self.ledger.running[key] = (ResourceRequest(), True)
        self.cpu_s[key] = 0.0

    def ends(self, key: str, ago_s: float = 0.0) -> Usage:
        """→ what its exit tells."""
        used_s, ended_at = self.cpu_s.pop(key), 1e9 + self.at_s - ago_s
        exit_ = self.agent.ended(key, Exit(0, started_at=1e9 - 1, ended_at=ended_at, usage=Usage(user_s=used_s)))
        self.ledger.running.pop(key, None)
        return exit_.usage

    def told(self, since: float = 0.0) -> dict[str, Any]:
        return self.agent.totals(since)


def test_joules_are_conserved_over_wraps_and_a_kill(tmp_path: Path) -> None:
    """Ten minutes, 200 tasks, three wraps, one kill -9 with ten seconds of downtime."""
    asyncio.run(_conserved(tmp_path))


async def _conserved(root: Path) -> None:
    dice = random.Random(7)
    machine = Machine(root, range_uj=8_500_000_000)
    machine.tree.zone("intel-rapl:0", "package-0", tdp_w=100.0)
    lasts = [dice.choice((0.3, 1.0, 4.0, 9.0, 30.0)) * dice.uniform(0.5, 1.5) for _ in range(200)]
    left: dict[str, float] = {}
    told: dict[str, Usage] = {}
    await machine.sample()
    first_j = machine.drawn_j
    tick_s, ticks, kill_at = 0.1, 6000, 2731
    for tick in range(1, ticks + 1):
        while len(told) + len(left) < 200 and len(left) < CORES and dice.random() < 0.2:
            key = f"t{len(told) + len(left)}"
            machine.runs(key)
            left[key] = lasts[len(told) + len(left)]
        machine.passes(tick_s, 0.25 * (tick // 100 % 3), **dict.fromkeys(left, 0.9))
        for key in [key for key, seconds in left.items() if seconds <= tick_s]:
            del left[key]
            used_s = machine.cpu_s[key]
            told[key] = machine.ends(key)
            if used_s >= 5.0:
                joules = told[key].joules
                assert joules == pytest.approx(used_s * CORE_W, rel=0.03), key
                assert (told[key].energy_quality, told[key].energy_scope) == (Quality.DERIVED, "package")
        left = {key: seconds - tick_s for key, seconds in left.items()}
        if tick == kill_at:
            machine.start()
        if tick % 20 == 0 and not kill_at <= tick < kill_at + 100:
            await machine.sample()
    node = machine.told()
    assert len(told) == 200
    drawn_j = machine.drawn_j - first_j
    assert drawn_j > 3 * 8_500
    assert node["joules"] == pytest.approx(drawn_j, rel=1e-3)
    parts = node["tasks_joules"] + node["other_joules"] + node["idle_joules"]
    assert parts == pytest.approx(node["joules"], rel=1e-6)
    assert node["idle_joules"] == pytest.approx(600 * IDLE_W, rel=0.01)
    assert node["tasks_joules"] == pytest.approx(sum(usage.joules or 0.0 for usage in told.values()), rel=0.01)
    assert (node["gap_s"], node["quality"], node["source"]) == (0.0, "measured", "powercap")
    counted = machine.agent.counters()
    assert counted["energy_gap_seconds_total"] == 0.0
    names = [f'energy_joules_total{{of="{name}",quality="measured"}}' for name in ("tasks", "other", "idle")]
    since_the_kill = sum(counted[name] for name in names)
    assert 0.1 * node["joules"] < since_the_kill < node["joules"]
    assert list(machine.agent.gauges()) == ['power_watts{source="powercap",quality="measured"}']


def test_without_a_sensor_joules_are_estimated_from_the_load(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        await machine.sample()
        machine.runs("a")
        for _ in range(10):
            machine.passes(SAMPLE_S, a=2.0)
            await machine.sample()
        usage = machine.ends("a")
        assert usage.joules == pytest.approx(20 * 2 * CORE_W)
        assert usage.energy_quality is Quality.ESTIMATED
        node = machine.told()
        assert node["joules"] == pytest.approx(20 * (IDLE_W + 2 * CORE_W))
        assert (node["quality"], node["source"]) == ("estimated", "model")
        counted = [name for name in machine.agent.counters() if name.startswith("energy_joules_total")]
        assert counted
        assert all('quality="estimated"' in name for name in (*counted, *machine.agent.gauges()))
        assert machine.agent.measured_watts is None

    asyncio.run(run())


@pytest.mark.parametrize("has_counters", [False, True])
def test_the_time_for_which_the_machine_was_suspended_is_a_gap(tmp_path: Path, *, has_counters: bool) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        if has_counters:
            machine.tree.zone("intel-rapl:0", "package-0", start_uj=50_000_000_000)
        for _ in range(5):
            await machine.sample()
            machine.passes(SAMPLE_S)
        machine.at_s += 8 * 3600
        machine.slept_s = 8 * 3600
        machine.tree.counted_uj = dict.fromkeys(machine.tree.counted_uj, 0)  # firmware may start them anew
        for _ in range(3):
            await machine.sample()
            machine.passes(SAMPLE_S)
        node = machine.told()
        assert node["joules"] == pytest.approx((6 if has_counters else 7) * SAMPLE_S * IDLE_W)
        assert node["gap_s"] == pytest.approx(8 * 3600 + (SAMPLE_S if has_counters else 0.0))

    asyncio.run(run())


def test_estimates_go_on_after_a_kill(tmp_path: Path) -> None:
    machine = Machine(tmp_path, estimated_curve(CORES))
    for _ in range(30):
        machine.passes(SAMPLE_S, CORES)
        asyncio.run(machine.sample())
    before = machine.told()["joules"]
    machine.start()
    for _ in range(30):
        machine.passes(SAMPLE_S)
        asyncio.run(machine.sample())
    assert machine.told()["joules"] > before > 0


def test_an_estimate_goes_on_after_a_kill(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        await machine.sample()
        for _ in range(5):
            machine.passes(SAMPLE_S, other_cores=3.0)
            await machine.sample()
        machine.start()
        machine.own_before_s = machine.busy_s
        machine.passes(SAMPLE_S, other_cores=3.0)
        await machine.sample()
        assert machine.told()["joules"] == pytest.approx(6 * SAMPLE_S * (IDLE_W + 3 * CORE_W))

    asyncio.run(run())


def test_tasks_keep_their_joules_over_a_kill_while_a_card_was_never_idle(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        machine.runs("a")
        machine.ledger.devices.holding["a"] = ("gpu0",)
        for _ in range(6):
            machine.gpus.power = {"gpu0": (machine.at_s, DeviceReading("gpu0", power_w=50.0))}
            await machine.sample()
            machine.passes(SAMPLE_S, a=1.0)
        before_j = machine.agent.so_far("a")
        assert before_j
        machine.start()
        assert machine.agent.so_far("a") == pytest.approx(before_j, abs=2 * SAMPLE_S * (CORE_W + 50.0))

    asyncio.run(run())


def test_readings_of_power_say_nothing_of_the_time_before_them(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        machine.tree.chip(0, "power_meter", 50.0)
        for _ in range(6):
            await machine.sample()
            machine.passes(SAMPLE_S)
        machine.passes(20.0)
        machine.start()
        for _ in range(2):
            await machine.sample()
            machine.passes(SAMPLE_S)
        node = machine.told()
        assert node["source"] == "hwmon"
        assert node["joules"] == pytest.approx((4 + 1) * SAMPLE_S * 50.0)
        assert node["gap_s"] == pytest.approx(2 * SAMPLE_S + 20.0)

    asyncio.run(run())


def test_a_sensor_that_falls_silent_is_replaced_and_its_time_is_a_gap(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        zone = machine.tree.zone("intel-rapl:0", "package-0", tdp_w=200.0)
        for _ in range(3):
            machine.passes(SAMPLE_S)
            await machine.sample()
        assert machine.agent.power()["source"] == "powercap"
        (zone / "energy_uj").rename(zone / "away")
        machine.tree.counted_uj.clear()
        for _ in range(10):
            machine.passes(SAMPLE_S)
            await machine.sample()
        told = machine.agent.power()
        assert (told["source"], told["quality"]) == ("model", "estimated")
        node = machine.told()
        assert node["quality"] == "estimated"
        assert node["gap_s"] == pytest.approx(10.0)
        assert node["joules"] == pytest.approx((4.0 + 10.0) * IDLE_W)
        (zone / "away").rename(zone / "energy_uj")
        machine.tree.counted_uj["intel-rapl:0"] = 0
        for _ in range(8):
            machine.passes(SAMPLE_S)
            await machine.sample()
        assert machine.agent.power()["source"] == "powercap"
        assert machine.told()["gap_s"] == pytest.approx(10.0 + SAMPLE_S)  # the first reading counts nothing

    asyncio.run(run())


def test_the_time_for_which_a_last_reading_of_power_holds_is_no_gap(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        machine.tree.chip(0, "power_meter", 50.0)
        await machine.sample()
        (machine.tree.hwmon / "hwmon0/power1_average").unlink()
        for _ in range(30):
            machine.passes(SAMPLE_S)
            await machine.sample()
        node = machine.told()
        assert (node["source"], node["gap_s"]) == ("hwmon+model", 0.0)
        assert node["joules"] == pytest.approx(34.0 * 50.0 + 26.0 * IDLE_W)  # 35 s are over within a sample

    asyncio.run(run())


@pytest.mark.parametrize(("counted_j", "known_s"), [(0.0, 0.0), (None, 35.0)])
def test_a_card_that_falls_silent_has_no_power_and_its_time_is_a_gap(
    counted_j: float | None, known_s: float, tmp_path: Path
) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        machine.tree.zone("intel-rapl:0", "package-0", tdp_w=200.0)
        machine.gpus.power = {"gpu0": (machine.at_s, DeviceReading("gpu0", power_w=300.0, energy_j=counted_j))}
        for _ in range(60):
            await machine.sample()
            machine.passes(SAMPLE_S)
        assert machine.agent.watts == pytest.approx(IDLE_W)
        sources: Any = machine.agent.power()["sources"]
        assert [(one["watts"], bool(one["why"])) for one in sources if one["scope"] == "gpu"] == [(None, True)]
        node = machine.told()
        assert node["joules"] == pytest.approx(59 * SAMPLE_S * IDLE_W + known_s * 300.0)
        assert node["gap_s"] == pytest.approx(59 * SAMPLE_S - known_s, abs=16.0)

    asyncio.run(run())


def test_the_curve_of_a_whole_machine_includes_its_idle_gpus(tmp_path: Path) -> None:
    async def run() -> None:
        card_w, cores = 100.0, 4
        watts = IDLE_W + card_w, IDLE_W + card_w + CORES * CORE_W
        machine = Machine(tmp_path, msgspec.structs.replace(CURVE, watts=watts))
        machine.tree.chip(0, "power_meter", IDLE_W + card_w + cores * CORE_W)
        for _ in range(round(2 * DRIFT_S / SAMPLE_S)):
            machine.gpus.power = {"gpu0": (machine.at_s, DeviceReading("gpu0", power_w=card_w))}
            await machine.sample()
            machine.passes(SAMPLE_S, other_cores=cores)
        assert not machine.agent.is_stale
        node = machine.told()
        assert node["other_joules"] == pytest.approx(2 * DRIFT_S * cores * CORE_W, rel=0.01)
        assert node["joules"] == pytest.approx(2 * DRIFT_S * (IDLE_W + card_w + cores * CORE_W), rel=0.01)

    asyncio.run(run())


def test_idle_power_is_learned_where_no_curve_was_measured(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path, msgspec.structs.replace(CURVE, quality=Quality.ESTIMATED))
        machine.tree.zone("intel-rapl:0", "package-0")
        for _ in range(5):
            machine.passes(SAMPLE_S)
            await machine.sample()
        for _ in range(5):
            machine.passes(SAMPLE_S, other_cores=4.0)
            await machine.sample()
        node = machine.told()
        assert node["idle_joules"] == pytest.approx(18 * IDLE_W, rel=0.01)
        assert node["other_joules"] == pytest.approx(10 * 4 * CORE_W, rel=0.01)

    asyncio.run(run())


@each(
    ("readings", "joules", "gap_s", "quality"),
    [
        ([(0, 100.0, 0), (2, 100.0, 200), (4, 100.0, 400)], 400.0, 0.0, "measured"),
        ([(0, 100.0, None), (2, 100.0, None), (4, 100.0, None)], 400.0, 0.0, "derived"),
        ([(0, 100.0, 900), (2, 100.0, 10), (4, 100.0, 210)], 200.0, 2.0, "measured"),
        ([(0, 100.0, 0), (2, None, None), (4, 100.0, 400)], 400.0, 0.0, "measured"),
        ([(0, 100.0, 0), *((2.0, None, None) for _ in range(9))], 0.0, 16.0, "measured"),
    ],
)
def test_energy_of_a_gpu_goes_to_who_holds_it(
    readings: list[tuple[float, float | None, float | None]], joules: float, gap_s: float, quality: str, tmp_path: Path
) -> None:
    """Energy counted, missing (power is integrated), backwards, missing once, and lost."""

    async def run() -> None:
        machine = Machine(tmp_path)
        machine.tree.zone("intel-rapl:0", "package-0", tdp_w=200.0)
        await machine.sample()
        machine.passes(SAMPLE_S)
        await machine.sample()
        machine.runs("a")
        machine.ledger.devices.holding["a"] = ("gpu0",)
        for at_s, power_w, energy_j in readings:
            read_s = machine.at_s
            machine.gpus.power = {"gpu0": (read_s, DeviceReading("gpu0", power_w=power_w, energy_j=energy_j))}
            await machine.sample()
            assert at_s is not None
            machine.passes(SAMPLE_S)
        del machine.ledger.devices.holding["a"]
        node = machine.told()
        host_j = machine.drawn_j - SAMPLE_S * IDLE_W
        assert node["joules"] - host_j == pytest.approx(joules, abs=1.0)
        assert node["gap_s"] == gap_s
        if joules:
            assert node["tasks_joules"] == pytest.approx(joules, abs=1.0)
            assert "gpu" in node["scope"]
            assert node["quality"] == quality

    asyncio.run(run())


def test_a_task_has_the_joules_of_its_gpu_also_in_the_window_in_which_it_ends(tmp_path: Path) -> None:
    """Without cgroups windows are of ten seconds, and these tasks of four."""

    async def run() -> None:
        machine = Machine(tmp_path)
        machine.units = "bare"
        machine.tree.zone("intel-rapl:0", "package-0", tdp_w=200.0)
        counted_j, tasks_j, idle_w, busy_w = 0.0, 0.0, 50.0, 300.0
        for number in range(30):
            key = f"t{number}"
            if number >= 5:
                machine.runs(key)
                machine.ledger.devices.holding[key] = ("gpu0",)
            watts, cores = (busy_w, {key: 1.0}) if number >= 5 else (idle_w, {})
            for _ in range(2):
                reading = DeviceReading("gpu0", power_w=watts, energy_j=counted_j)
                machine.gpus.power = {"gpu0": (machine.at_s, reading)}
                await machine.sample()
                machine.passes(SAMPLE_S, **cores)
                counted_j += SAMPLE_S * watts
            reading = DeviceReading("gpu0", power_w=watts, energy_j=counted_j)
            machine.gpus.power = {"gpu0": (machine.at_s, reading)}
            await machine.sample()
            if number >= 5:
                tasks_j += machine.ends(key).joules or 0.0
                del machine.ledger.devices.holding[key]
        assert tasks_j == pytest.approx(25 * 2 * SAMPLE_S * (busy_w - idle_w + CORE_W), rel=0.02)

    asyncio.run(run())


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_gpu_counts_for_a_task_until_its_end_and_not_while_the_machine_sleeps(
    tmp_path: Path, *, sleeps: bool
) -> None:
    """An agent was away for eight hours, or its machine asleep; a task ended ten seconds after that began, or before it ended."""

    async def run() -> None:
        machine, away_s, on_s = Machine(tmp_path), 8 * 3600.0, 10.0
        machine.runs("a")
        machine.ledger.devices.holding["a"] = ("gpu0",)
        for _ in range(6):
            reading = DeviceReading("gpu0", power_w=300.0, energy_j=300.0 * machine.at_s)
            machine.gpus.power = {"gpu0": (machine.at_s, reading)}
            await machine.sample()
            machine.passes(SAMPLE_S)
        before_j = machine.agent.so_far("a")
        assert before_j is not None
        machine.at_s += away_s + on_s
        if sleeps:
            machine.slept_s = away_s
        else:
            machine.start()
        joules = machine.ends("a", 0.0 if sleeps else away_s).joules
        assert joules == pytest.approx(before_j + (SAMPLE_S + on_s) * 300.0)

    asyncio.run(run())


def test_cards_of_amd_and_intel_tell_their_power_by_hwmon(tmp_path: Path) -> None:
    """One that tells watts, one that tells joules, one that is part of a processor, one that sleeps."""

    async def story() -> None:
        machine = Machine(tmp_path)
        machine.tree.zone("intel-rapl:0", "package-0", tdp_w=100.0)
        machine.tree.card(
            1, "amdgpu", "0000:03:00.0", power1_average=10_000_000, device_gpu_metrics=bytes((0, 1, 1, 3))
        )
        machine.tree.card(2, "i915", "0000:04:00.0", energy1_input=0)
        machine.tree.card(3, "amdgpu", "0000:05:00.0", power1_average=9_000_000, device_gpu_metrics=bytes((0, 1, 2, 3)))
        machine.tree.card(4, "xe", "0000:06:00.0", energy1_input=7, device_power__runtime_status="suspended")
        machine.gpus.devices = (Device("amd:0000:03:00.0", kind="amd"),)
        machine.runs("a")
        await machine.sample()
        machine.ledger.devices.set_devices(machine.gpus.devices)
        machine.ledger.devices.holding["a"] = ("amd:0000:03:00.0",)
        machine.tree.card(1, "amdgpu", "0000:03:00.0", power1_average=50_000_000)
        for number in range(1, 31):
            machine.tree.card(2, "i915", "0000:04:00.0", energy1_input=number * 2 * 30 * 10**6)
            machine.passes(SAMPLE_S, a=1.0)
            await machine.sample()
        node = machine.told()
        host_j = 60 * (IDLE_W + CORE_W)
        assert node["joules"] == pytest.approx(host_j + 60 * (50.0 + 30.0), rel=0.03)
        assert machine.ends("a").joules == pytest.approx(60 * (CORE_W + 40.0), rel=0.05)
        assert set(node["source"].split("+")) == {"powercap", "hwmon"}
        told = {one["name"]: one["quality"] for one in machine.agent.power()["sources"]}  # type: ignore[attr-defined]
        assert told["hwmon 0000:03:00.0"] == "derived"
        assert told["hwmon 0000:04:00.0"] == "measured"
        assert not [name for name in told if "05:00" in name or "06:00" in name]

    asyncio.run(story())


def test_a_file_that_is_damaged_while_it_is_used_fails_the_request_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with sqlite3.connect(tmp_path / "energy.db") as database:
        database.execute("INSERT INTO totals VALUES (1, 2, 'x', 0, 0, 0, 0, 'no quality', '', '')")
    with pytest.raises(StoreError):
        machine.told()


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "energy.db").write_bytes(b"no database at all, but long enough to look at " * 100)
    store = EnergyStore(tmp_path / "energy.db")
    assert store.totals(0.0) == []
    store.write(b"[]", None)
    assert store.checkpoint() == energy.EnergyCheckpoint()
    store.close()
    with sqlite3.connect(tmp_path / "energy.db") as database:
        assert database.execute("SELECT count(*) FROM totals").fetchone() == (0,)


def test_for_all_users_the_launcher_reads_the_counters(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        machine.start("system")
        for _ in range(4):
            machine.passes(SAMPLE_S, other_cores=1.0)
            await machine.sample()
        assert machine.told()["joules"] == pytest.approx(3 * SAMPLE_S * (IDLE_W + CORE_W))
        assert machine.told()["source"] == "powercap"

    asyncio.run(run())


def test_a_task_that_ends_while_the_launcher_answers_takes_no_joules_of_others(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        machine.tree.zone("intel-rapl:0", "package-0", tdp_w=200.0)
        machine.runs("a")
        machine.runs("b")
        for _ in range(50):
            await machine.sample()
            machine.passes(SAMPLE_S, a=1.0, b=1.0)
        usage, before_j = machine.usage, machine.agent.so_far("b")
        assert before_j is not None

        async def answers_late(*arguments: Any, **options: Any) -> UsageEvent | None:
            told = await usage(*arguments, **options)
            machine.ends("a")
            return told

        machine.usage = answers_late  # type: ignore[method-assign]
        await machine.sample()
        assert machine.agent.so_far("b") == pytest.approx(before_j + SAMPLE_S * CORE_W)

    asyncio.run(run())


def test_a_silent_launcher_makes_the_window_longer(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        await machine.sample()
        machine.runs("a")
        machine.is_silent = True
        for _ in range(5):
            machine.passes(SAMPLE_S, a=1.0)
            await machine.sample()
        machine.is_silent = False
        machine.passes(SAMPLE_S, a=1.0)
        await machine.sample()
        assert machine.told()["tasks_joules"] == pytest.approx(12 * CORE_W)

    asyncio.run(run())


def test_a_curve_is_stale_after_ten_minutes_of_drift() -> None:
    drift = Drift()
    assert not any(drift.take(109.0, 100.0, 2.0) for _ in range(1000))
    taken = [drift.take(112.0, 100.0, 2.0) for _ in range(1000)]
    assert taken.index(True) == pytest.approx(DRIFT_S / 2, abs=5)
    assert not all(drift.take(100.0, 100.0, 2.0) for _ in range(5))


def test_idle_power_is_that_of_the_lowest_load() -> None:
    idle = IdlePower()
    for share, watts in ((0.9, 200.0), (0.5, 120.0), (0.0, 40.0), (0.7, 160.0)):
        idle.take(watts, share, 1.0 if not share else 0.5)
    assert idle.watts == 40.0


def test_a_write_that_fails_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        path = tmp_path / "energy.db"
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON totals BEGIN SELECT RAISE(FAIL, 'disk full'); END")
            for _ in range(100):
                machine.passes(SAMPLE_S, other_cores=1.0)
                await machine.sample()
            assert other.execute("SELECT count(*) FROM totals").fetchone() == (0,)
            other.execute("DROP TRIGGER full")
        joules = machine.told()["joules"]
        await machine.agent.close()
        with contextlib.closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT sum(joules) FROM totals").fetchone()[0] == pytest.approx(joules)

    asyncio.run(run())


def test_accounts_that_cannot_be_opened_now_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "energy.db").mkdir()
    store = EnergyStore(tmp_path / "energy.db")
    store.write(b"{}", None)
    assert store.checkpoint().boot == ""
    assert (tmp_path / "energy.db").is_dir()
