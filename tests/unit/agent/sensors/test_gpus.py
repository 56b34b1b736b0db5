"""The GPUs of a node over time: the loop's side of the sensors, on the real `pynvml` and a stand-in for the library."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.sensors import gpus as module
from peerload.agent.sensors import nvml
from peerload.agent.sensors.gpus import DeviceLocks, Gpus
from peerload.agent.sensors.nvml import WAS_LOST
from peerload.model.config import AgentConfig, GpuSettings
from peerload.model.events import DevicesFound, DevicesSampled
from peerload.model.resources import DEVICES_MAX, Device, DeviceReading, Health
from tests.fakes.nvml import GIB, Machine, load
from tests.support import PATIENCE_S, PutEvents

MIB = 1 << 20
KEY = "ab12-1"
ROUNDS = 5
"""Readings after which a search was due too (`FIND_EVERY_S` below is less than so many `SAMPLE_S`)."""


class FakeOwners:
    def __init__(self) -> None:
        self.of: dict[int, str | None] = {}

    def is_contained(self) -> bool:
        return False

    def key_of(self, pid: int) -> str | None:
        return self.of.get(pid)


class Bench:
    """One `Gpus` under test, with what it has put."""

    def __init__(self, library: object, *, wants_gpus: bool = True, **more: Any) -> None:
        self.events = PutEvents()
        self.owners = FakeOwners()
        self.granted: dict[str, tuple[str, ...]] = {}
        self.happened: list[tuple[str, str]] = []
        self.waits_for_devices = wants_gpus
        self.gpus = Gpus(
            self.events,
            library,
            owners=self.owners,  # type: ignore[arg-type]
            **more,
        )
        self.rounds = 0
        self._wait = self.gpus._wait
        self.gpus._wait = self._counted_wait  # type: ignore[method-assign]

    async def _counted_wait(self) -> None:
        self.rounds += 1
        await self._wait()

    async def look_again(self) -> None:
        """Return when the driver was read, and searched where it has to be, a few times more."""
        enough = self.rounds + ROUNDS
        await until(lambda: self.rounds >= enough)

    @property
    def ledger(self) -> Any:
        """What stands for the ledger of the node."""
        return self

    @property
    def devices(self) -> SimpleNamespace:
        return SimpleNamespace(holding=self.granted)

    @property
    def event_log(self) -> Any:
        return self

    def record(self, what: str, state: str, *, reason: str) -> None:
        """As the event log does."""
        assert what == "gpu"
        self.happened.append((state, reason))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.gpus.find()
        task = asyncio.create_task(self.gpus.run(self.ledger, self.event_log))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.gpus.close()

    def last(self) -> dict[str, DeviceReading]:
        sampled = [event for event in self.events if isinstance(event, DevicesSampled)]
        return {reading.id: reading for reading in sampled[-1].readings} if sampled else {}

    def healths(self) -> set[Health]:
        return {reading.health for reading in self.last().values()}


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not predicate():  # noqa: ASYNC110 -- nothing tells when
            await asyncio.sleep(0.01)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 110))


def while_running(library: object, story: Callable[[Bench], Awaitable[None]], **more: Any) -> None:
    """``story`` happens to a bench that runs."""

    async def test() -> None:
        bench = Bench(library, **more)
        async with bench.running():
            await story(bench)

    in_loop(test)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> object:
    monkeypatch.setattr(module, "SAMPLE_S", 0.02)
    monkeypatch.setattr(module, "FIND_EVERY_S", 0.05)
    monkeypatch.setattr(module, "FIND_AGAIN_S", 0.05)
    monkeypatch.setattr(module, "READ_S_MAX", PATIENCE_S)  # this machine may stand still; its driver does not hang
    return load(monkeypatch, machine.path)


@pytest.fixture
def impatient(pynvml: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is soon found to hang."""
    monkeypatch.setattr(module, "READ_S_MAX", 0.3)


def test_what_is_there_is_found_and_changes_are_told(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")
    other = Device("fpga:f0", "fpga")

    async def test() -> None:
        bench = Bench(pynvml, others=(other,))
        bench.owners.of = {10: KEY, 11: ""}
        bench.granted = {KEY: ("nvidia:GPU-0",)}
        async with bench.running():
            assert [device.id for device in bench.gpus.devices] == ["nvidia:GPU-0", "fpga:f0"]
            await until(lambda: bench.events)
            machine.process("0", 10, 2 * GIB)
            machine.process("0", 11, GIB)

            def told() -> tuple[object, ...]:
                reading = bench.last()["nvidia:GPU-0"]
                return reading.mem_used_bytes, reading.ours, reading.mem_foreign_bytes, reading.foreign

            await until(lambda: told() == (3 * GIB, ((KEY, 2 * GIB),), GIB, 1))
            count = len(bench.events)
            await bench.look_again()
            assert len(bench.events) == count  # nothing new

    in_loop(test)


@pytest.mark.usefixtures("impatient")
def test_a_driver_that_hangs_makes_gpus_unknown_and_nothing_else(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.gpu(1, uuid="GPU-1")
    threads = threading.active_count()

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})
        machine.say("hang")
        turns = 0
        while bench.healths() != {Health.UNKNOWN}:
            await asyncio.sleep(0.005)  # the loop goes on
            turns += 1
        assert turns
        assert all(reading.why for reading in bench.last().values())
        for _ in range(20):
            bench.gpus.look()
            await asyncio.sleep(0.01)
        assert threading.active_count() <= threads + 1
        machine.unsay("hang")
        await until(lambda: bench.healths() == {Health.OK})

    while_running(pynvml, story)


def test_an_agent_starts_and_ends_while_the_driver_hangs(
    machine: Machine, pynvml: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.say("hang")

    async def test() -> None:
        bench = Bench(pynvml)
        assert await bench.gpus.find(0.05) == ()
        assert bench.gpus.why_none
        await bench.gpus.close()
        machine.unsay("hang")  # so that the thread ends

    in_loop(test)


def test_gpus_that_were_late_at_the_start_are_told_when_they_come(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.say("hang")

    async def test() -> None:
        bench = Bench(pynvml)
        assert await bench.gpus.find(0.05) == ()
        task = asyncio.create_task(bench.gpus.run(bench.ledger, bench.event_log))
        await until(lambda: bench.rounds)
        assert bench.events == []
        machine.unsay("hang")
        await until(lambda: len(bench.events) >= 2)
        assert isinstance(bench.events[0], DevicesFound)
        assert [device.id for device in bench.events[0].devices] == ["nvidia:GPU-0"]
        assert bench.gpus.why_none == ""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bench.gpus.close()

    in_loop(test)


def test_a_driver_that_is_unloaded_and_loaded_again(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})
        machine.xid(0, 79)
        await until(lambda: bench.healths() == {Health.SICK})
        machine.say("init 9")
        await until(lambda: bench.last()["nvidia:GPU-0"].why == "its driver has been unloaded")
        assert bench.healths() == {Health.UNKNOWN}
        await bench.look_again()
        assert [event for event in bench.events if isinstance(event, DevicesFound)] == []  # its tasks may hold it
        machine.gpu(1, uuid="GPU-1")
        machine.unsay("init")  # last: a session tells of no card that comes after its beginning
        await until(lambda: len(bench.last()) == 2)
        assert bench.healths() == {Health.OK}
        (found,) = [event for event in bench.events if isinstance(event, DevicesFound)]
        assert len(found.devices) == 2

    while_running(pynvml, story)


@pytest.mark.parametrize(
    ("lines", "why"),
    [(("init 9",), "the driver does not work: Driver Not Loaded"), ((), "the driver has no card that can be used")],
)
def test_why_there_are_none_is_said_once(
    machine: Machine, pynvml: object, lines: tuple[str, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine.say(*lines)
    caplog.set_level("INFO", "peerload.gpus")

    async def story(bench: Bench) -> None:
        assert bench.gpus.why_none == why
        await bench.look_again()
        assert [record.message for record in caplog.records] == [f"no GPUs: reason={why}"]
        machine.unsay("init")
        machine.gpu(0)
        await until(lambda: bench.gpus.devices)

    while_running(pynvml, story)


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml-that-is-nowhere.so.1")

    async def test() -> None:
        bench = Bench(None)
        assert await bench.gpus.find() == ()
        assert bench.gpus.why_none
        await bench.gpus.close()

    in_loop(test)


def test_a_card_that_is_lost_in_the_middle_leaves_the_others_alone(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.gpu(1, uuid="GPU-1")

    async def test() -> None:
        bench = Bench(pynvml)
        async with bench.running():
            await until(lambda: bench.healths() == {Health.OK})
            machine.gpu(0, lost=1)
            await until(lambda: bench.last()["nvidia:GPU-0"].health is Health.SICK)
            assert bench.last()["nvidia:GPU-1"].health is Health.OK
            machine.gpu(0, lost=0)
            await until(lambda: bench.last()["nvidia:GPU-0"].why == WAS_LOST)
            assert bench.last()["nvidia:GPU-0"].health is Health.SICK
            machine.say("init 9")
            await until(lambda: bench.healths() == {Health.UNKNOWN})
            machine.unsay("init")
            await until(lambda: bench.healths() == {Health.OK})
        happened = [(what, words.partition(":")[0]) for what, words in bench.happened]
        assert happened[:3] == [("found", "GPU 0 (Fake)"), ("found", "GPU 1 (Fake)"), ("sick", "GPU 0 (Fake)")]
        assert happened[-1] == ("ok", "GPU 1 (Fake)")

    in_loop(test)


def test_a_card_that_is_cut_into_slices_and_made_whole_again_is_noticed(
    machine: Machine, pynvml: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIND_EVERY_S", 3600.0)  # it is the reading that notices
    monkeypatch.setattr(module, "IDLE_SAMPLE_S", 0.02)
    machine.gpu(0, uuid="GPU-0")
    machine.gpu(1, uuid="GPU-1")

    async def story(bench: Bench) -> None:
        async def until_there_are(*names: str) -> None:
            ids = [f"nvidia:{name}" for name in names]
            await until(lambda: [device.id for device in bench.gpus.devices] == ids)
            await until(lambda: all(name in bench.last() for name in ids))
            assert {bench.last()[name].health for name in ids} <= {Health.OK}

        await until_there_are("GPU-0", "GPU-1")
        machine.gpu(0, mig=1)
        await until_there_are("GPU-1")
        machine.slice(0, 0, uuid="MIG-a")
        machine.slice(0, 1, uuid="MIG-b")
        await until_there_are("MIG-a", "MIG-b", "GPU-1")
        machine.slices.pop("0 0")
        machine.write()
        await until_there_are("MIG-b", "GPU-1")
        machine.slices.clear()
        machine.gpu(1, mig=1)
        await until_there_are()
        assert "have none" in bench.gpus.why_none
        machine.slice(1, 3, uuid="MIG-c")
        await until_there_are("MIG-c")
        machine.slices.clear()
        machine.gpu(0, mig=0)
        machine.gpu(1, mig=0)
        await until_there_are("GPU-0", "GPU-1")
        found = [event for event in bench.events if isinstance(event, DevicesFound)]
        assert [device.id for device in found[-1].devices] == ["nvidia:GPU-0", "nvidia:GPU-1"]

    while_running(pynvml, story)


def test_cards_that_are_left_alone_are_not_told(machine: Machine, pynvml: object) -> None:
    for index in range(3):
        machine.gpu(index, uuid=f"GPU-{index}")

    async def story(bench: Bench) -> None:
        await until(lambda: bench.events)
        assert list(bench.last()) == ["nvidia:GPU-1"]

    while_running(pynvml, story, usable=lambda devices: devices[1:2])


def test_the_slices_of_a_card_that_is_left_alone_are_not_told(machine: Machine, pynvml: object, tmp_path: Path) -> None:
    machine.gpu(0, uuid="GPU-0", mig=1)
    machine.slice(0, 0, uuid="MIG-a")
    machine.gpu(1, uuid="GPU-1")
    config = AgentConfig(node="n1", state=str(tmp_path), socket="s", gpu=GpuSettings(exclude=(0,)))
    gpus = module.node_gpus(config, PutEvents(), DeviceLocks(tmp_path), pynvml)
    assert [device.name for device in asyncio.run(gpus.find(PATIENCE_S))] == ["GPU-1"]


def test_gpus_and_other_devices_are_no_more_than_a_profile_holds(machine: Machine, pynvml: object) -> None:
    for index in range(40):
        machine.gpu(index, uuid=f"GPU-{index}")
    others = tuple(Device(f"fpga:{index}", "fpga", index) for index in range(32))
    found = asyncio.run(Bench(pynvml, others=others).gpus.find(PATIENCE_S))
    assert (len(found), found[32:]) == (DEVICES_MAX, others)


def test_it_looks_less_often_when_nothing_needs_to_know(
    machine: Machine, pynvml: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpu(0, uuid="GPU-0")
    monkeypatch.setattr(module, "IDLE_SAMPLE_S", 3600.0)

    async def story(bench: Bench) -> None:
        await until(lambda: bench.events)
        machine.gpu(0, used=GIB)
        await asyncio.sleep(0.1)
        assert len(bench.events) == 1
        bench.gpus.look()
        await until(lambda: len(bench.events) > 1)

    while_running(pynvml, story, wants_gpus=False)


def test_a_reading_that_is_asked_for_is_told_before_that_returns(
    machine: Machine, pynvml: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpu(0, uuid="GPU-0")
    monkeypatch.setattr(module, "SAMPLE_S", 3600.0)

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})
        machine.xid(0, 79)
        await bench.gpus.read_anew()
        assert bench.healths() == {Health.SICK}
        machine.say("init 9")
        await bench.gpus.read_anew()
        assert bench.healths() == {Health.UNKNOWN}
        await bench.gpus.read_anew()  # there is nobody to answer: it is not waited for

    while_running(pynvml, story)


def test_after_an_attempt_has_left_every_reading_is_told(
    machine: Machine, pynvml: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpu(0, uuid="GPU-0")
    monkeypatch.setattr(module, "SAMPLE_S", 3600.0)
    monkeypatch.setattr(module, "LOOK_S", PATIENCE_S)

    async def story(bench: Bench) -> None:
        bench.gpus.look()
        await until(lambda: len(bench.events) >= 3)

    while_running(pynvml, story)


def test_a_bug_in_reading_ends_nothing(machine: Machine, pynvml: object, caplog: pytest.LogCaptureFixture) -> None:
    machine.gpu(0, uuid="GPU-0")

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})

        def wrong(pid: int) -> str:
            raise ZeroDivisionError

        right, bench.owners.key_of = bench.owners.key_of, wrong  # type: ignore[method-assign]
        machine.process("0", 10, GIB)
        await until(lambda: bench.healths() == {Health.UNKNOWN})
        bench.owners.key_of = right  # type: ignore[method-assign]
        await until(lambda: bench.healths() == {Health.OK})

    while_running(pynvml, story)
    assert [record.levelname for record in caplog.records if "GPU" in record.message]


class Meddled:
    """A library of which one function goes wrong in a way that no driver should."""

    def __init__(self, library: object, **functions: Callable[..., object]) -> None:
        self._library = library
        self.functions = functions

    def __getattr__(self, name: str) -> object:
        return self.functions.get(name) or getattr(self._library, name)


def test_a_driver_that_answers_with_nonsense_is_no_driver(
    machine: Machine, pynvml: object, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpu(0, uuid="GPU-0")

    def count() -> int:
        raise TypeError("no number")

    library = Meddled(pynvml, nvmlDeviceGetCount=count)

    async def story(bench: Bench) -> None:
        assert bench.gpus.devices == ()
        assert "no number" in bench.gpus.why_none
        await bench.look_again()
        assert len([record for record in caplog.records if record.exc_info]) == 1
        library.functions.clear()
        await until(lambda: bench.healths() == {Health.OK})

    while_running(library, story)


def test_nonsense_after_the_driver_was_loaded_anew_ends_nothing(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")
    library = Meddled(pynvml)

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})
        library.functions["nvmlDeviceGetCount"] = lambda: "many"
        machine.say("init 9")
        await until(lambda: bench.healths() == {Health.UNKNOWN})
        machine.unsay("init")
        await bench.look_again()
        assert [device.id for device in bench.gpus.devices] == ["nvidia:GPU-0"]
        library.functions.clear()
        await until(lambda: bench.healths() == {Health.OK})

    while_running(library, story)


def test_a_driver_that_is_away_is_no_reason_to_have_no_gpus(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})
        machine.say("init 9")
        await until(lambda: bench.healths() == {Health.UNKNOWN})
        await bench.look_again()
        assert bench.gpus.why_none == ""

    while_running(pynvml, story)


def test_a_card_that_another_agent_had_is_found_beside_those_that_are_ours(machine: Machine, pynvml: object) -> None:
    for index in range(2):
        machine.gpu(index, uuid=f"GPU-{index}")
    ours = {"nvidia:GPU-0"}

    async def story(bench: Bench) -> None:
        await until(lambda: list(bench.last()) == ["nvidia:GPU-0"])
        await bench.look_again()
        assert not [event for event in bench.events if isinstance(event, DevicesFound)]
        ours.add("nvidia:GPU-1")
        await until(lambda: list(bench.last()) == ["nvidia:GPU-0", "nvidia:GPU-1"])
        assert [len(event.devices) for event in bench.events if isinstance(event, DevicesFound)] == [2]

    while_running(pynvml, story, usable=lambda devices: tuple(device for device in devices if device.id in ours))


def test_a_card_that_comes_back_after_the_driver_is_found(machine: Machine, pynvml: object) -> None:
    for index in range(2):
        machine.gpu(index, uuid=f"GPU-{index}")

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})
        machine.say("init 9")
        await until(lambda: bench.healths() == {Health.UNKNOWN})
        lost = machine.gpus.pop("1")
        machine.unsay("init")
        await until(lambda: list(bench.last()) == ["nvidia:GPU-0"])
        await bench.look_again()
        assert len(bench.gpus.devices) == 1
        machine.gpu(1, **lost)
        await until(lambda: list(bench.last()) == ["nvidia:GPU-0", "nvidia:GPU-1"])
        assert bench.healths() == {Health.OK}
        found = [len(event.devices) for event in bench.events if isinstance(event, DevicesFound)]
        assert found == [1, 2]

    while_running(pynvml, story)


def test_a_card_that_cannot_be_used_is_looked_for_until_it_can(
    machine: Machine, pynvml: object, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.gpu(1, uuid="GPU-1")
    whole = getattr(pynvml, "nvmlDeviceGetUUID")  # noqa: B009 -- a module without types
    seen: list[object] = []

    def no_name(handle: object) -> object:
        name = whole(handle)
        seen.append(name)
        return "" if name == "GPU-1" else name

    library = Meddled(pynvml, nvmlDeviceGetUUID=no_name)

    async def story(bench: Bench) -> None:
        await until(lambda: seen.count("GPU-1") > 3)
        assert ["GPU 1 " in record.message for record in caplog.records] == [True]
        assert bench.healths() == {Health.OK}
        library.functions.clear()
        await until(lambda: list(bench.last()) == ["nvidia:GPU-0", "nvidia:GPU-1"])
        count = len(seen)
        await bench.look_again()
        assert len(seen) == count  # there is nothing more to look for

    while_running(library, story)


def test_a_card_of_ours_that_is_listed_no_more_stays_known(machine: Machine, pynvml: object) -> None:
    """Others are looked for meanwhile: a task may hold it."""
    for index in range(3):
        machine.gpu(index, uuid=f"GPU-{index}")
    ours = {"nvidia:GPU-0", "nvidia:GPU-1"}
    whole = getattr(pynvml, "nvmlDeviceGetUUID")  # noqa: B009 -- a module without types
    library = Meddled(pynvml, nvmlDeviceGetUUID=lambda handle: name if (name := whole(handle)) != "GPU-2" else "")

    async def story(bench: Bench) -> None:
        await until(lambda: len(bench.last()) == 2)
        library.functions["nvmlDeviceGetUUID"] = lambda handle: name if (name := whole(handle)) == "GPU-0" else ""
        await until(lambda: bench.last()["nvidia:GPU-1"].health is Health.SICK)
        assert bench.last()["nvidia:GPU-1"].why
        assert len(bench.gpus.devices) == 2
        library.functions.clear()
        await until(lambda: bench.healths() == {Health.OK})

    while_running(library, story, usable=lambda devices: tuple(device for device in devices if device.id in ours))


@pytest.mark.usefixtures("impatient")
def test_a_driver_that_wakes_slowly_while_more_is_looked_for_is_waited_for(machine: Machine, pynvml: object) -> None:
    machine.gpu(0, uuid="GPU-0")
    machine.gpu(1, uuid="GPU-1")
    whole = getattr(pynvml, "nvmlDeviceGetUUID")  # noqa: B009 -- a module without types
    wakes = getattr(pynvml, "nvmlInit")  # noqa: B009 -- a module without types
    library = Meddled(pynvml, nvmlDeviceGetUUID=lambda handle: name if (name := whole(handle)) != "GPU-1" else "")

    def slow() -> object:
        threading.Event().wait(module.READ_S_MAX * 2)
        return wakes()

    async def story(bench: Bench) -> None:
        await until(lambda: bench.healths() == {Health.OK})
        library.functions["nvmlInit"] = slow
        await until(lambda: bench.healths() == {Health.UNKNOWN})
        del library.functions["nvmlDeviceGetUUID"]
        await until(lambda: list(bench.last()) == ["nvidia:GPU-0", "nvidia:GPU-1"])
        await until(lambda: bench.healths() == {Health.OK})

    while_running(library, story)
