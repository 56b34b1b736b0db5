"""GPUs as the real `pynvml` tells of them, on a stand-in for NVIDIA's library."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from peerload.agent.sensors.nvml import HELD_DOWN_S, RECOVERED_S, CardReading, GpuFaults, GpuProcess, Nvml, SessionOver
from peerload.model.resources import Health, Nearness
from tests.fakes.nvml import GIB, Machine, load

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> object:
    return load(monkeypatch, machine.path)


def only(nvml: Nvml) -> CardReading:
    (reading,) = nvml.read()
    return reading


# -- what is there -----------------------------------------------------------------------------------------------------


def test_a_card_is_described_as_far_as_it_tells(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-aa", name="NVIDIA H200", total=141 * GIB, cc="9.0", sm=132, power=70_000, temp=33)
    nvml = Nvml(pynvml)
    (device,) = nvml.find()
    assert (device.id, device.kind, device.index, device.model) == ("nvidia:GPU-aa", "gpu", 0, "NVIDIA_H200")
    assert (device.mem_bytes, device.capability) == (141 * GIB, 9.0)
    assert (device.bdf, device.is_read) == ("0000:01:00.0", True)
    assert set(device.capabilities) == {
        "memory", "utilization", "temperature", "proc_list", "energy_counter", "power", "ecc",
    }  # fmt: skip
    reading = only(nvml)
    assert reading.power_w == 70.0
    assert reading.energy_j is not None
    assert msgspec.structs.replace(reading, power_w=None, energy_j=None) == CardReading(
        "nvidia:GPU-aa", busy=0.0, mem_used_bytes=0, processes=(), temperature_c=33, is_throttled=False
    )
    nvml.close()


@pytest.mark.parametrize(
    ("lacks", "capability"),
    [("nomem", "memory"), ("noutil", "utilization"), ("notemp", "temperature"), ("noprocs", "proc_list"),
     ("noenergy", "energy_counter")],
)  # fmt: skip
def test_what_a_card_cannot_tell_is_missing_and_never_zero(
    machine: Machine, pynvml: object, lacks: str, capability: str
) -> None:
    machine.gpu(0, power=70_000, util=50, **{lacks: 1})
    nvml = Nvml(pynvml)
    (device,) = nvml.find()
    assert capability not in device.capabilities
    assert len(device.capabilities) == 6
    reading = only(nvml)
    assert reading.health is Health.OK
    assert (reading.mem_used_bytes is None) == (lacks == "nomem")
    assert (reading.busy is None) == (lacks == "noutil")
    assert (reading.temperature_c is None) == (lacks == "notemp")
    assert (reading.processes is None) == (lacks == "noprocs")


@pytest.mark.parametrize("without", [("V3",), ("MEMORY_V2",), ("EVENT_REASONS", "ECC")])
def test_an_older_driver_lacks_a_function_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, without: tuple[str, ...]
) -> None:
    machine.gpu(0, reserved=400 * MIB, throttle=0x8)
    machine.process("0", 77, 2 * GIB)
    nvml = Nvml(load(monkeypatch, machine.path, *without))
    (_device,) = nvml.find()
    reading = only(nvml)
    assert reading.health is Health.OK
    assert reading.processes == (GpuProcess(77, 2 * GIB),)
    assert reading.is_throttled
    assert reading.mem_used_bytes == 2 * GIB + (400 * MIB if "MEMORY_V2" in without else 0)


def test_how_near_cards_are(machine: Machine, pynvml: object) -> None:
    for index in range(5):
        machine.gpu(index, uuid=f"GPU-{index}")
    machine.say("link 0 1 10", "nvlink 0 1", "link 0 2 20", "link 0 3 40", "link 2 3 0")
    nvml = Nvml(pynvml)
    near = {device.index: {int(name[-1]): level for name, level in device.links} for device in nvml.find()}
    assert near[0] == {1: Nearness.NVLINK, 2: Nearness.PXB, 3: Nearness.NODE, 4: Nearness.SYSTEM}
    assert near[2][3] == Nearness.INTERNAL
    assert all(near[one][other] == near[other][one] for one in near for other in near[one])


def test_slices_are_devices_in_the_place_of_their_card(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0", mig=1, temp=50, power=1, util=90)
    machine.gpu(1, uuid="GPU-1")
    machine.gpu(2, uuid="GPU-2", mig=1)
    machine.slice(0, 0, uuid="MIG-a", sm=14)
    machine.slice(0, 1, uuid="MIG-b", sm=28, total=10 * GIB)
    machine.say("proc 0.1 55 1048576")
    nvml = Nvml(pynvml)
    devices = nvml.find()
    assert [(device.id, device.index) for device in devices] == [
        ("nvidia:MIG-a", 100), ("nvidia:MIG-b", 101), ("nvidia:GPU-1", 1),
    ]  # fmt: skip
    part = devices[1]
    assert (part.mem_bytes, part.bdf) == (10 * GIB, "0000:01:00.0")
    assert "mig" in part.capabilities
    assert "utilization" not in part.capabilities
    assert dict(part.links) == {"nvidia:MIG-a": Nearness.INTERNAL, "nvidia:GPU-1": Nearness.SYSTEM}
    first, second, _ = nvml.read()
    assert (first.processes, second.processes) == ((), (GpuProcess(55, MIB),))
    assert (second.busy, second.temperature_c) == (None, 50)


def test_sixteen_cards(machine: Machine, pynvml: object) -> None:
    for index in range(16):
        machine.gpu(index, uuid=f"GPU-{index:02}")
    nvml = Nvml(pynvml)
    assert [device.index for device in nvml.find()] == list(range(16))
    assert len(nvml.read()) == 16


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_of_every_kind_are_listed_once(machine: Machine, pynvml: object) -> None:
    machine.gpu(0)
    machine.say(f"proc 0 10 {GIB}", f"draw 0 10 {GIB // 2}", f"draw 0 11 {MIB}", f"mps 0 12 {2 * MIB}")
    nvml = Nvml(pynvml)
    nvml.find()
    assert set(only(nvml).processes or ()) == {
        GpuProcess(10, GIB), GpuProcess(11, MIB, is_graphics=True), GpuProcess(12, 2 * MIB),
    }  # fmt: skip


def test_memory_of_processes_that_is_not_told_is_not_none(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, noprocmem=1)
    machine.process("0", 10, GIB)
    nvml = Nvml(pynvml)
    nvml.find()
    reading = only(nvml)
    assert reading.processes == (GpuProcess(10, None),)
    assert reading.mem_used_bytes == GIB


def test_many_processes_come_and_go(machine: Machine, pynvml: object) -> None:
    machine.gpu(0)
    nvml = Nvml(pynvml)
    nvml.find()
    for count in (1, 40, 3, 0):
        machine.unsay("proc")
        machine.say(*(f"proc 0 {pid} {MIB}" for pid in range(1000, 1000 + count)))
        assert len(only(nvml).processes or ()) == count


# -- health ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
def test_errors_of_programs_do_not_count(machine: Machine, pynvml: object, code: int) -> None:
    machine.gpu(0)
    nvml = Nvml(pynvml)
    nvml.find()
    machine.xid(0, code)
    assert only(nvml).health is Health.OK


def test_an_error_of_the_card_makes_it_sick_until_the_driver_is_loaded_anew(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.gpu(1, uuid="GPU-1")
    nvml = Nvml(pynvml)
    nvml.find()
    machine.xid(1, 79)
    first, second = nvml.read()
    assert (first.health, second.health) == (Health.OK, Health.SICK)
    assert "error 79" in second.why
    assert nvml.read()[1].health is Health.SICK
    machine.say("init 9")
    with pytest.raises(SessionOver):
        nvml.read()
    nvml.close(is_over=True)
    machine.unsay("init")
    nvml.find()
    assert [reading.health for reading in nvml.read()] == [Health.OK, Health.OK]


def test_an_error_of_a_slice_is_that_slice_s_and_of_a_card_all_slices(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0", mig=1)
    machine.slice(0, 0, uuid="MIG-a", gi=3, ci=0)
    machine.slice(0, 1, uuid="MIG-b", gi=4, ci=0)
    nvml = Nvml(pynvml)
    nvml.find()
    machine.xid(0, 48, "4 0")
    assert [reading.health for reading in nvml.read()] == [Health.OK, Health.SICK]
    machine.xid(0, 95)
    assert [reading.health for reading in nvml.read()] == [Health.SICK, Health.SICK]


def test_a_sick_card_is_known_after_a_restart_of_the_agent(machine: Machine, pynvml: object, tmp_path: Path) -> None:
    kept = tmp_path / "gpus"
    machine.gpu(0)
    nvml = Nvml(pynvml, GpuFaults("boot-1", kept))
    nvml.find()
    machine.xid(0, 74)
    assert only(nvml).health is Health.SICK
    nvml.close()
    for boot, driver, health in (
        ("boot-1", "580.0-fake", Health.SICK),
        ("boot-2", "580.0-fake", Health.OK),
        ("boot-1", "590.1", Health.OK),
    ):
        machine.unsay("driver")
        machine.say(f"driver {driver}")
        again = Nvml(pynvml, GpuFaults(boot, kept))
        again.find()
        assert only(again).health is health, (boot, driver)
        again.close()


def test_what_was_kept_of_cards_may_be_spoilt(machine: Machine, pynvml: object, tmp_path: Path) -> None:
    machine.gpu(0)
    for spoilt in ("", "[]", "{", '{"boot": "b", "driver": "580.0-fake", "ill": 3}', "\0"):
        (tmp_path / "gpus").write_text(spoilt)
        nvml = Nvml(pynvml, GpuFaults("b", tmp_path / "gpus"))
        nvml.find()
        assert only(nvml).health is Health.OK
        nvml.close()


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"ecc": 1}, "1 uncorrectable memory error"),
        ({"ecc": 2}, "2 uncorrectable memory errors"),
        ({"failed": 1}, "memory rows cannot be replaced any more"),
        ({"pending": 1}, "memory rows wait to be replaced: it needs a reset when its tasks are done"),
        ({"lost": 1}, "it is lost: the driver does not reach it any more"),
    ],
)
def test_damage_makes_a_card_sick(machine: Machine, pynvml: object, values: dict[str, int], why: str) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.gpu(1, uuid="GPU-1")
    nvml = Nvml(pynvml)
    nvml.find()
    machine.gpu(1, **values)
    first, second = nvml.read()
    assert first.health is Health.OK
    assert (second.health, second.why) == (Health.SICK, why)


def test_a_card_that_is_lost_from_the_start_is_not_there(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0", lost=1)
    machine.gpu(1, uuid="GPU-1")
    nvml = Nvml(pynvml)
    assert [device.id for device in nvml.find()] == ["nvidia:GPU-1"]


def test_a_card_that_cannot_be_read_for_no_known_reason_is_unknown(machine: Machine, pynvml: object) -> None:
    machine.gpu(0)
    nvml = Nvml(pynvml)
    nvml.find()
    machine.gpu(0, broken=1)
    reading = only(nvml)
    assert (reading.health, "NVML error 999" in reading.why) == (Health.UNKNOWN, True)
    machine.gpu(0, broken=0)
    assert only(nvml).health is Health.OK


@pytest.mark.parametrize(("bits", "counts"), [(0x8, True), (0x20, True), (0x40, True), (0x80, True), (0x4, False)])
def test_clocks_held_down_for_long_are_a_weakness(machine: Machine, pynvml: object, bits: int, counts: bool) -> None:
    clock = Clock()
    machine.gpu(0, throttle=bits, clock=990)
    nvml = Nvml(pynvml, now_s=clock)
    nvml.find()
    reading = only(nvml)
    assert (reading.is_throttled, reading.health) == (counts, Health.OK)
    clock.now_s += HELD_DOWN_S
    reading = only(nvml)
    assert reading.health is (Health.DEGRADED if counts else Health.OK)
    if counts:
        assert "50%" in reading.why
    machine.gpu(0, throttle=0)
    assert only(nvml).health is reading.health
    clock.now_s += RECOVERED_S
    assert only(nvml).health is Health.OK


# -- the driver --------------------------------------------------------------------------------------------------------


def test_a_driver_that_does_not_work_says_why(machine: Machine, pynvml: object) -> None:
    machine.say("init 9")
    with pytest.raises(OSError, match="Driver Not Loaded"):
        Nvml(pynvml).find()


def test_a_driver_without_cards_has_none(machine: Machine, pynvml: object) -> None:
    machine.write()
    assert Nvml(pynvml).find() == ()
