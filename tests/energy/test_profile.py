"""Power profiles: measured by spinners, fitted, kept and refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerload.agent.sensors.power import own_curve, processor
from peerload.cli.common import power_bench
from peerload.cli.common.power_bench import Reading, Spinners, measured
from peerload.energy.profile import BadProfile, Level, PowerProfile, decoded, fitted, levels_of
from peerload.model.config import AgentConfig, EnergySettings
from peerload.model.errors import BadRequest, PeerloadError
from peerload.model.resources import POINTS_MAX, PowerCurve, Quality, estimated_curve
from peerload.wire import control
from tests.each import each
from tests.energy.test_accounting import Machine
from tests.support import wait_until
from tests.wording import Says

CPU = "Some Processor, 64 threads"


class PlayedBench:
    """A machine of known watts and work rates, with a clock of its own: half the threads are second ones of a core."""

    def __init__(self, cores: int, noise_w: float = 0.0, others: float = 0.0, gap_at: int = 999) -> None:
        self.cores, self.threads, self.noise_w, self.others, self.gap_at = cores, 2 * cores, noise_w, others, gap_at
        self.at_s = self.joules = self.busy_s = self.units = 0.0
        self.level, self.load, self.waits = 0, "", 0

    def rate(self, level: float) -> float:
        """All-core factor 0.7, 1.3 times as much with both threads of each core."""
        if level <= self.cores:
            return level * (1.0 - 0.3 * level / self.cores)
        return 0.7 * (self.cores + 0.3 * (level - self.cores))

    def watts(self, level: float) -> float:
        """S-shaped, as servers are."""
        share = self.rate(level) / self.rate(self.threads)
        watts: float = 100.0 + 180.0 * share**0.75 + 120.0 * share**3
        return watts

    def spin(self, count: int, load: str) -> None:
        self.level, self.load = count, load

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.at_s += seconds
        noise_w = self.noise_w * (-1) ** self.waits
        self.joules += (self.watts(self.level) * (0.97 if self.load == "integer" else 1.03) + noise_w) * seconds
        self.busy_s += (self.level + self.others) * seconds
        self.units += self.rate(self.level) * seconds * (7.0 if self.load == "integer" else 40.0)

    def read(self) -> Reading:
        return Reading(self.at_s, self.joules, float(self.waits > self.gap_at), self.busy_s)

    def work(self) -> float:
        return self.units


def profile_of(bench: PlayedBench) -> PowerCurve:
    found = measured(bench, levels_of(bench.threads), bench.threads, lambda _words: None)
    return fitted([Level(*level) for level in found], bench.cores, bench.threads)


@each("cores", [1, 2, 4, 32, 96])
def test_a_profile_is_right_where_it_was_not_measured(cores: int) -> None:
    bench = PlayedBench(cores, noise_w=2.0)
    curve = profile_of(bench)
    assert len(curve.watts) <= POINTS_MAX
    assert curve.quality is Quality.MEASURED
    for level in range(bench.threads + 1):
        assert curve.watts_at(level) == pytest.approx(bench.watts(level), rel=0.05), level
    assert curve.smt_gain == pytest.approx(1.3, abs=0.02)
    if cores > 1:
        assert curve.all_core == pytest.approx(0.7, abs=0.02)
    assert bench.at_s < 330.0


def test_a_busy_machine_is_refused_before_and_meanwhile() -> None:
    with pytest.raises(PeerloadError, match="busy"):
        profile_of(PlayedBench(4, others=0.5))
    bench = PlayedBench(4)
    wait = bench.wait

    def becomes_busy(seconds: float) -> None:
        bench.others = 2.0 * (bench.level >= 3)
        wait(seconds)

    bench.wait = becomes_busy  # type: ignore[method-assign]
    with pytest.raises(PeerloadError, match="busy"):
        profile_of(bench)


def test_a_sensor_that_falls_silent_ends_the_measurement() -> None:
    with pytest.raises(PeerloadError, match="sensor"):
        profile_of(PlayedBench(4, gap_at=20))


def test_power_that_falls_with_load_is_levelled() -> None:
    curve = fitted([Level(0, 50.0), Level(1, 80.0), Level(2, 70.0), Level(4, 100.0)], 4, 4)
    assert list(curve.watts) == sorted(curve.watts)
    assert curve.watts_at(1) == curve.watts_at(2) == pytest.approx(75.0)


def test_two_threads_that_do_four_times_the_work_lose_nothing() -> None:
    levels = [Level(0, 50.0), Level(1, 60.0, 0.0, 1.0), Level(2, 70.0, 0.0, 4.0)]
    assert fitted(levels, 2, 2).all_core == 1.0


@each(
    "levels",
    [
        [],
        [(0, 50.0)],
        [(1, 50.0), (4, 90.0)],
        [(0, 50.0), (2, 90.0)],
        [(0, float("nan")), (4, 90.0)],
        [(0, 0.0), (4, 90.0)],
        [(0, 50.0), (4, 90.0, 0.0, float("inf"))],
        [(0, 50.0), (4, 90.0, 0.0, -1.0)],
    ],
)
def test_levels_that_make_no_curve(levels: list[tuple[Any, ...]]) -> None:
    with pytest.raises(BadProfile):
        fitted([Level(*level) for level in levels], 4, 4)


def document(cpu: str = CPU, **changes: Any) -> bytes:
    curve = {"watts": [50.0, 80.0, 100.0], "cores": 4, "threads": 4} | changes
    return msgspec.json.encode({"curve": curve, "cpu": cpu})


@each(
    ("text", "why"),
    [
        (document(watts=[50.0]), "one point"),
        (document(watts=[50.0, 40.0]), "falls"),
        (document().replace(b"80.0", b"NaN"), "not a number"),
        (document(watts=[50.0, "x"]), "not a number"),
        (document(watts=[50.0, None]), "not a number"),
        (document(watts=[0.0, 40.0]), "nothing"),
        (document(cpu="Another, 64 threads"), "another processor"),
        (document(cores=0), "cores"),
        (b"", "not a power profile"),
        (b"[]", "not a power profile"),
        (b'{"cpu": "x"}', "not a power profile"),
        (b"\xff\xfe", "not a power profile"),
    ],
)
def test_bad_profiles_are_refused_with_the_reason(text: bytes, why: str) -> None:
    with pytest.raises(BadProfile, match=why):
        decoded(text, CPU)


def test_an_agent_keeps_a_profile_and_starts_with_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tree.zone("intel-rapl:0", "package-0", tdp_w=100.0)
    settings = EnergySettings(powercap=str(machine.tree.powercap))
    config = AgentConfig(node="n1", state=str(tmp_path), socket="s", energy=settings)
    assert own_curve(config, 4).quality is Quality.ESTIMATED
    threads = os.cpu_count() or 1
    levels = ((0, 50.0, 1.0, 0.0), (threads, 150.0, 1.0, float(threads)))
    told: dict[str, Any] = machine.agent.take_profile(
        control.KeepPowerProfile(measured=levels, cores=threads, threads=threads)
    )
    assert told["cpu"] == processor()
    assert list(told["watts"]) == [50.0, 150.0]
    (event,) = machine.put
    machine.x.node.handle(machine.x.node.state.now, event)
    assert machine.agent.curve.watts[0] == 50.0
    curve = own_curve(config, 4)
    assert (curve, curve.quality) == (event.curve, Quality.MEASURED)
    assert curve.cap_w == 0.0  # the rated power bounds nothing: turbo clocks exceed it
    stored = msgspec.json.decode((tmp_path / "power.json").read_bytes(), type=PowerProfile)
    (tmp_path / "power.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(stored, cpu="another")))
    assert own_curve(config, 4).quality is Quality.ESTIMATED
    with pytest.raises(BadRequest, match=Says.CANNOT_BE_USED()):
        machine.agent.take_profile(control.KeepPowerProfile(document=(tmp_path / "power.json").read_bytes()))


def test_without_a_profile_the_curve_is_that_of_a_typical_server_and_says_so() -> None:
    rated, unknown = estimated_curve(4, peak_w=100.0), estimated_curve(4)
    assert [round(watts, 1) for watts in rated.watts] == [
        21.9,
        34.3,
        39.4,
        44.6,
        50.0,
        55.3,
        61.7,
        68.9,
        77.8,
        88.9,
        100.0,
    ]
    assert unknown.watts[-1] - unknown.watts[0] == pytest.approx(4 * 4.0)  # 4 W a thread
    assert rated.quality is unknown.quality is Quality.ESTIMATED


def test_a_profile_from_which_power_drifts_is_stale(tmp_path: Path) -> None:
    async def run() -> None:
        machine = Machine(tmp_path)
        machine.x.node.own_profile.change(power=msgspec.structs.replace(machine.agent.curve, watts=(23.0, 100.0)))
        machine.tree.zone("intel-rapl:0", "package-0")
        for _ in range(400):
            machine.passes(2.0)
            await machine.sample()
        assert machine.agent.is_stale
        (event,) = machine.put
        machine.x.node.handle(machine.x.node.state.now, event)
        told: dict[str, Any] = machine.agent.power()
        assert (told["curve"]["stale"], told["curve"]["quality"]) == (True, "estimated")

    asyncio.run(run())


def test_spinners_work_and_leave_nothing_behind() -> None:
    cpus, cores = power_bench.threads_in_order()
    assert 1 <= cores <= len(cpus)
    with Spinners(cpus[:1]) as spinners:
        for load in power_bench.LOADS:
            spinners.spin(1, load)
            before = spinners.work()
            wait_until(lambda before=before: spinners.work() > before)  # type: ignore[misc]
        process = spinners._running[0]
    assert process.returncode is not None
