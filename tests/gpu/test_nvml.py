"""The sensors on cards that are not there: the real pynvml on the stand-in library, or a stand-in of pynvml."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from peerload.agent.sensors.claims import Claims
from peerload.agent.sensors.gpus import Gpus
from peerload.agent.sensors.listed import listed, variables
from peerload.agent.sensors.nvml import Nvml
from peerload.agent.sensors.owners import Owners
from peerload.model.config import DeviceConfig
from peerload.model.devices import Device, DeviceReading, Health, Nearness
from peerload.model.errors import ConfigError
from peerload.model.events import DevicesFound, DevicesSampled
from tests.gpu.cards import GIB, Cards, library

ROOT = Path(__file__).resolve().parents[2]
READ = """
import json, sys, msgspec
from peerload.agent.sensors.nvml import Nvml, find_library
nvml = Nvml(find_library())
devices = nvml.find()
for line in sys.stdin:
    print(json.dumps(msgspec.to_builtins([devices, nvml.read()])), flush=True)
"""


class Reader:
    """A process with the real pynvml, asked for a reading whenever one is wanted."""

    def __init__(self, cards: Cards, directory: Path | None = None) -> None:
        environment = {**os.environ, **cards.environment}
        if directory is not None:
            environment["LD_LIBRARY_PATH"] = str(directory)
        self.process = subprocess.Popen(
            [sys.executable, "-c", READ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        devices, readings = json.loads(self.process.stdout.readline())
        return devices, readings


def test_what_there_is_and_what_it_does(tmp_path: Path) -> None:
    cards = Cards(tmp_path, count=3)
    cards.set(0, util=40, temp=61, cc="8.6")
    cards.use(0, 4711, 5 * GIB)
    cards.more = ["link 0 1 10", "link 0 2 50"]
    cards.write()
    with Reader(cards) as reader:
        devices, readings = reader.read()
    first = devices[0]
    assert (first["id"], first["model"], first["mem_bytes"]) == (cards.id(0), "Fake-A10", 24 * GIB)
    assert (first.get("index", 0), first["capability"], first["is_read"]) == (0, 8.6, True)
    assert {"proc_list", "energy_counter", "power", "utilization"} <= set(first["capabilities"])
    assert dict(first["links"]) == {cards.id(1): Nearness.INTERNAL, cards.id(2): Nearness.SYSTEM}
    assert (readings[0]["busy"], readings[0]["temperature_c"]) == (0.4, 61)
    assert (readings[0]["mem_used_bytes"], readings[0]["used"]) == (5 * GIB, [[4711, 5 * GIB]])
    assert readings[1]["used"] == []


def test_cards_fall_ill_each_in_its_way(tmp_path: Path) -> None:
    cards = Cards(tmp_path, count=5)
    with Reader(cards) as reader:
        assert {reading["health"] for reading in reader.read()[1]} == {Health.OK}
        cards.set(0, lost=1)
        cards.set(1, remap=9)
        cards.set(2, ecc=2)
        cards.set(3, throttle=0x40)
        cards.more = ["xid 4 79 1"]
        cards.write()
        readings = reader.read()[1]
        health = [(reading["health"], reading["why"]) for reading in readings]
        assert [kind for kind, _ in health] == [Health.SICK, Health.SICK, Health.DEGRADED, Health.DEGRADED, Health.SICK]
        assert health[0][1].startswith("it cannot be read: GPU is lost")
        assert health[1][1] == "memory rows cannot be replaced any more"
        assert health[2][1] == "2 uncorrectable memory errors"
        assert health[3][1] == "its clocks are held down for heat"
        assert health[4][1] == "error 79: it has fallen off the bus"
        cards.set(0, lost=0)
        cards.more = ["xid 2 13 2"]  # a program's own fault
        cards.write()
        readings = reader.read()[1]
        assert (readings[0]["health"], readings[2]["health"]) == (Health.OK, Health.DEGRADED)
        assert readings[4]["health"] == Health.SICK


def test_what_a_card_cannot_tell_it_does_not(tmp_path: Path) -> None:
    cards = Cards(tmp_path, count=16)
    cards.set(0, noenergy=1, noprocmem=1)
    cards.use(0, 4711, GIB)
    with Reader(cards) as reader:
        devices, readings = reader.read()
    assert len(devices) == len(readings) == 16
    assert "energy_counter" not in devices[0]["capabilities"]
    assert readings[0]["used"] == [[4711, None]]


@pytest.mark.parametrize(
    "missing",
    [
        ("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState"),
        ("nvmlDeviceGetMemoryInfo_v2", "nvmlEventSetWait_v2", "nvmlEventSetCreate", "nvmlDeviceGetMigMode"),
        ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetTotalEccErrors"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
    ],
)
def test_a_library_without_some_functions_lacks_a_capability(tmp_path: Path, missing: tuple[str, ...]) -> None:
    source = (ROOT / "tests/gpu/fake_nvml.c").read_text(encoding="utf-8")
    for name in missing:
        assert name in source
        source = source.replace(f"R {name}(", f"R absent_{name}(")
    (tmp_path / "fake.c").write_text(source, encoding="utf-8")
    name = "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run(["cc", *flags, "-o", str(tmp_path / name), str(tmp_path / "fake.c")], check=True)
    with Reader(Cards(tmp_path, count=2), tmp_path) as reader:
        devices, readings = reader.read()
    assert [device["mem_bytes"] for device in devices] == [24 * GIB] * 2
    assert [reading["health"] for reading in readings] == [Health.OK] * 2


def test_a_driver_that_is_not_loaded_is_no_card(tmp_path: Path) -> None:
    code = "from peerload.agent.sensors.nvml import Nvml, find_library\nNvml(find_library()).find()"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library()), "FAKE_NVML_STATE": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "OSError: the GPUs' driver does not work: Driver Not Loaded" in done.stderr


# -- a stand-in of pynvml ----------------------------------------------------------------------------------------------


class Fault(Exception):
    pass


class Facts:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


class Library:
    """One card of 24 GiB; what it is asked for can be made to hang."""

    NVMLError = Fault

    def __init__(self, slices: int = 0) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.slices = slices
        self.processes: list[tuple[int, int | None]] = []
        self.used = 0
        self.busy = 0
        self.error: Exception | None = None
        self.reads = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.go_on.wait()

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return "GPU-0"

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:  # noqa: N802
        return (int(self.slices > 0), 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, number: int) -> str:  # noqa: N802
        if number >= self.slices:
            raise Fault
        return f"MIG-{number}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Facts:  # noqa: N802
        self.reads += 1
        self.go_on.wait()
        if self.error is not None:
            raise self.error
        return Facts(total=24 * GIB, used=self.used)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Facts:  # noqa: N802
        return Facts(gpu=self.busy, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Facts]:  # noqa: N802
        return [Facts(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def nvmlEventSetCreate(self) -> None:  # noqa: N802
        raise Fault


def test_slices_are_devices_of_their_own_and_a_card_to_be_cut_is_none() -> None:
    assert [device.id for device in Nvml(Library(slices=2)).find()] == ["nvidia:MIG-0", "nvidia:MIG-1"]
    cut = Library(slices=1)
    cut.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 0  # type: ignore[method-assign]
    assert Nvml(cut).find() == ()


class Watched:
    """`Gpus` on a stand-in, with what it puts."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.put: list[Any] = []
        self.gpus = Gpus(self.put.append, library)

    def readings(self) -> list[DeviceReading]:
        return [event.readings[0] for event in self.put if isinstance(event, DevicesSampled)]

    async def until(self, predicate: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not predicate():
                self.gpus.look()
                await asyncio.sleep(0.01)


def watched(play: Callable[[Watched], Any], library_: Library | None = None) -> None:
    async def run() -> None:
        found = Watched(library_ or Library())
        await found.gpus.find()
        running = asyncio.get_running_loop().create_task(found.gpus.run())
        try:
            await play(found)
        finally:
            found.library.go_on.set()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await found.gpus.close()

    asyncio.run(run())


def test_a_driver_that_hangs_makes_its_cards_unknown_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.agent.sensors.gpus.DEADLINE_S", 0.1)

    async def play(found: Watched) -> None:
        await found.until(found.readings)
        found.library.go_on.clear()
        await found.until(lambda: found.readings()[-1].health is Health.UNKNOWN)
        reads = found.library.reads
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert found.library.reads == reads  # nobody else calls it meanwhile
        found.library.go_on.set()
        await found.until(lambda: found.readings()[-1].health is Health.OK)

    watched(play)


def test_a_driver_that_hangs_at_the_start_is_waited_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.agent.sensors.gpus.DEADLINE_S", 0.1)
    hanging = Library()
    hanging.go_on.clear()

    async def play(found: Watched) -> None:
        assert found.gpus.devices == ()
        found.library.go_on.set()
        await found.until(lambda: any(isinstance(event, DevicesFound) for event in found.put))
        await found.until(found.readings)

    watched(play, hanging)


def test_a_driver_that_talks_nonsense_makes_its_cards_unknown() -> None:
    async def play(found: Watched) -> None:
        await found.until(found.readings)
        found.library.error = ValueError("nonsense")
        await found.until(lambda: found.readings()[-1].health is Health.UNKNOWN)
        found.library.error = None
        await found.until(lambda: found.readings()[-1].health is Health.OK)

    watched(play)


def test_whose_memory_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {1: "", 2: f"{7:032x}-1", 3: f"{8:032x}-1"}
    monkeypatch.setattr(Owners, "key_of", lambda _self, pid: keys.get(pid, ""))

    async def play(found: Watched) -> None:
        card = found.library

        async def seen(used: int, *processes: tuple[int, int | None]) -> DeviceReading:
            card.used, card.processes = used, list(processes)
            before = len(found.put)
            await found.until(lambda: len(found.put) > before + 2)
            return found.readings()[-1]

        mixed = await seen(10 * GIB, (1, 4 * GIB), (2, 5 * GIB))
        assert (mixed.ours, mixed.foreign, mixed.mem_foreign_bytes) == (((keys[2], 5 * GIB),), 1, 5 * GIB)
        hidden = await seen(9 * GIB, (2, 5 * GIB))  # of another container: memory without a process
        assert (hidden.foreign, hidden.mem_foreign_bytes) == (1, 4 * GIB)
        untold = await seen(9 * GIB, (1, GIB), (2, None), (3, None))
        assert (dict(untold.ours), untold.mem_foreign_bytes) == ({keys[2]: 4 * GIB, keys[3]: 4 * GIB}, GIB)
        little = await seen(20 << 20)
        assert little.foreign == 0
        card.busy = 80
        await found.until(lambda: found.readings()[-1].foreign == 1)

    watched(play)


# -- whose, whose turn, what else --------------------------------------------------------------------------------------


def test_a_process_is_of_the_attempt_that_its_environment_cgroup_or_ancestor_names(tmp_path: Path) -> None:
    key = f"{5:032x}-2"

    def process(pid: int, parent: int, *, environ: bytes = b"", cgroup: bytes = b"") -> None:
        (tmp_path / str(pid)).mkdir()
        stat = b"%d (a b) c) S %d " % (pid, parent) + b"0 " * 17 + b"777 0"
        for name, raw in (("stat", stat), ("environ", environ), ("cgroup", cgroup)):
            (tmp_path / str(pid) / name).write_bytes(raw)

    process(10, 1, environ=b"A=1\0PEERLOAD_UNIT=0badcafe/peerload-%s\0B=2" % key.encode())
    process(11, 10)
    process(12, 1, cgroup=b"0::/peerload-0badcafe/peerload-%s\n" % key.encode())
    process(13, 1, environ=b"NOT_PEERLOAD_UNIT=x/peerload-%s" % key.encode())
    owners = Owners(tmp_path)
    assert [owners.key_of(pid) for pid in (10, 11, 12, 13, 99)] == [key, key, key, "", ""]


def test_a_card_is_claimed_by_one_agent(tmp_path: Path) -> None:
    cards = tuple(Device(f"nvidia:GPU-fake-{number}", index=number) for number in range(2))
    first, second = Claims(tmp_path), Claims(tmp_path)
    assert first.claim(cards[:1]) == cards[:1]
    assert second.claim(cards) == cards[1:]
    assert second.refused == {"nvidia:GPU-fake-0": f"process {os.getpid()}"}
    assert first.claim(cards) == cards[:1]
    first.close()
    assert second.claim(cards) == cards
    second.close()


def test_devices_of_the_config() -> None:
    config = (
        DeviceConfig(kind="fpga", ids=("a", "b"), env={"FPGAS": "{ids}"}),
        DeviceConfig(kind="licence", ids=("1",)),
    )
    assert [device.id for device in listed(config)] == ["fpga:a", "fpga:b", "licence:1"]
    told = variables(("nvidia:GPU-1", "nvidia:GPU-2", "fpga:b"), config)
    assert told == {
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PEERLOAD_FPGA": "b",
        "FPGAS": "b",
    }
    for bad in ((DeviceConfig(kind="gpu", ids=("0",)),), (DeviceConfig(kind="fpga", ids=("a", "a")),)):
        with pytest.raises(ConfigError):
            listed(bad)
