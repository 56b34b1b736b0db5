"""Controls of power: what was in force is restored, wherever the agent is killed; what may not be set is a message."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peerload.agent.energy import FILE, PowerControls
from peerload.model.config import EnergySettings
from tests.fakes.nvml import Machine, environment, load


class NVMLError(Exception):
    pass


class Driver:
    """`pynvml` with two cards. Before each change of a card it calls ``step``."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.limits = {"GPU-a": 300_000, "GPU-b": 250_000}
        self.clocks = dict.fromkeys(self.limits, 0)
        self.is_allowed = True
        self.step: Callable[[], None] = lambda: None

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.limits)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return [*self.limits][index]

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:  # noqa: N802
        return b"A100"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: str) -> list[int]:  # noqa: N802
        return [100_000, 400_000]

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:  # noqa: N802
        return self.limits[handle]

    def nvmlDeviceSetPowerManagementLimit(self, handle: str, limit: int) -> None:  # noqa: N802
        self._may()
        self.limits[handle] = limit

    def nvmlDeviceSetGpuLockedClocks(self, handle: str, low: int, high: int) -> None:  # noqa: N802
        self._may()
        self.clocks[handle] = high

    def nvmlDeviceResetGpuLockedClocks(self, handle: str) -> None:  # noqa: N802
        self._may()
        self.clocks[handle] = 0

    def _may(self) -> None:
        self.step()
        if not self.is_allowed:
            raise NVMLError("Insufficient Permissions")


def cpufreq(root: Path) -> dict[str, str]:
    """A tree with two policies → its settings."""
    for policy in ("policy0", "policy1"):
        (root / policy).mkdir(parents=True)
        facts = {
            "scaling_governor": "schedutil\n",
            "scaling_available_governors": "performance powersave schedutil\n",
            "scaling_max_freq": "3600000\n",
            "cpuinfo_min_freq": "800000\n",
            "cpuinfo_max_freq": "3600000\n",
        }
        for name, text in facts.items():
            (root / policy / name).write_text(text)
    return tree(root)


def tree(root: Path) -> dict[str, str]:
    return {str(path): path.read_text().strip() for path in sorted(root.rglob("scaling_[gm]*"))}


def settings(root: Path, **changes: Any) -> EnergySettings:
    given: dict[str, Any] = {
        "gpu_power_w": 200.0,
        "gpu_clock_mhz": 1400,
        "cpu_governor": "powersave",
        "cpu_max_mhz": 1800,
    }
    return EnergySettings(cpufreq=str(root), **(given | changes))


def test_controls_are_in_force_until_they_are_restored(tmp_path: Path) -> None:
    before, driver = cpufreq(tmp_path / "cpufreq"), Driver()
    controls = PowerControls(tmp_path / FILE, lambda: driver)
    assert controls.start(settings(tmp_path / "cpufreq")) == []
    assert {*driver.limits.values()} == {200_000}
    assert {*driver.clocks.values()} == {1400}
    assert {*tree(tmp_path / "cpufreq").values()} == {"powersave", "1800000"}
    assert controls.restore() == []
    assert (tree(tmp_path / "cpufreq"), (tmp_path / FILE).exists()) == (before, False)
    assert (driver.limits, {*driver.clocks.values()}) == ({"GPU-a": 300_000, "GPU-b": 250_000}, {0})


@pytest.mark.parametrize("excluded", [(0,), ("gpu-a",)])
def test_a_card_that_is_left_alone_keeps_its_settings(excluded: tuple[int | str, ...], tmp_path: Path) -> None:
    driver = Driver()
    assert PowerControls(tmp_path / FILE, lambda: driver).start(settings(tmp_path), excluded) == []
    assert (driver.limits, driver.clocks) == ({"GPU-a": 300_000, "GPU-b": 200_000}, {"GPU-a": 0, "GPU-b": 1400})


class Killed(BaseException):
    """The process was killed."""


def test_a_kill_at_any_step_leaves_nothing_that_the_next_start_does_not_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed ahead of each step of applying and restoring, and of restoring again, until none is left."""
    left = 0

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def stepping(method: Any) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            step()
            done = method(*words, **named)
            step()
            return done

        return call

    write, replace, unlink = Path.write_text, Path.replace, Path.unlink
    kills = 0
    for number in itertools.count():
        root, driver = tmp_path / f"{number}", Driver()
        before = cpufreq(root / "cpufreq")
        file = root / FILE
        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", lambda _: None)
            for name, method in (("write_text", write), ("replace", replace), ("unlink", unlink)):
                patched.setattr(Path, name, stepping(method))
            driver.step = step
            left, was_killed = number, False
            try:
                controls = PowerControls(file, lambda driver=driver: driver)  # type: ignore[misc]
                controls.start(settings(root / "cpufreq"))
                controls.restore()
            except Killed:
                was_killed = True
            left = number % 7  # the next start is killed, too
            try:
                PowerControls(file, lambda driver=driver: driver).restore()  # type: ignore[misc]
            except Killed:
                was_killed = True
            driver.step = lambda: None
        assert PowerControls(file, lambda driver=driver: driver).restore() == []  # type: ignore[misc]
        assert tree(root / "cpufreq") == before
        assert (driver.limits, {*driver.clocks.values()}) == ({"GPU-a": 300_000, "GPU-b": 250_000}, {0})
        assert not file.exists()
        kills += was_killed
        if not was_killed:
            break
    assert kills >= 40


LOOP = """
import sys
from pathlib import Path
from peerload.agent.energy import PowerControls
from peerload.model.config import EnergySettings
file, root = map(Path, sys.argv[1:])
wanted = EnergySettings(cpufreq=str(root), cpu_governor="powersave", cpu_max_mhz=900, gpu_power_w=200, gpu_clock_mhz=1400)
print("ready", flush=True)
while True:
    assert not PowerControls(file).start(wanted)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.long)])
def test_processes_that_are_killed_in_the_middle_leave_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Each start puts back what the one before, which was killed at any moment, has left: of processors, and of cards by the
    stand-in for NVIDIA's library."""
    before, chance = cpufreq(tmp_path / "cpufreq"), random.Random(7)
    file, cards = tmp_path / FILE, Machine(tmp_path / "cards")
    cards.gpu(0)
    cards.gpu(1)
    pynvml = load(monkeypatch, cards.path)
    changed = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(file), str(tmp_path / "cpufreq")],
            stdout=subprocess.PIPE,
            env=os.environ | environment(cards.path),
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(chance.random() / 10)  # the moment at which it is killed
            process.send_signal(signal.SIGKILL)
        changed += tree(tmp_path / "cpufreq") != before or cards.settings(0) != (400_000, 0)
        assert PowerControls(file, lambda: pynvml).restore() == []
        assert tree(tmp_path / "cpufreq") == before
        assert (cards.settings(0), cards.settings(1), file.exists()) == ((400_000, 0), (400_000, 0), False)
    assert changed or kills < 10


def test_the_drivers_settings_are_put_back_and_no_permission_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Machine(tmp_path / "cards")
    cards.gpu(0)
    cards.gpu(1, noset=1)
    pynvml = load(monkeypatch, cards.path)
    controls = PowerControls(tmp_path / FILE, lambda: pynvml)
    said = controls.start(EnergySettings(gpu_power_w=200.0, gpu_clock_mhz=1400))
    assert len(said) == 2
    assert all("Insufficient Permissions" in words for words in said)
    assert (cards.settings(0), cards.settings(1)) == ((200_000, 1400), (400_000, 0))
    cards.gpu(1, noset=0)
    assert controls.restore() == []
    assert cards.settings(0) == (400_000, 0)
    assert len(controls.start(EnergySettings(gpu_power_w=50.0))) == 2  # outside of what a card allows
    assert cards.settings(0) == (400_000, 0)


def test_what_may_not_be_set_is_told_and_changes_nothing(tmp_path: Path) -> None:
    before, driver = cpufreq(tmp_path / "cpufreq"), Driver()
    driver.is_allowed = False
    controls = PowerControls(tmp_path / FILE, lambda: driver)
    wrong = settings(tmp_path / "cpufreq", gpu_power_w=50.0, cpu_governor="turbo", cpu_max_mhz=9000)
    said = controls.start(wrong)
    assert len(said) == 8  # two cards, two policies: a limit, clocks, a governor and a frequency of each
    assert sum("between 100 and 400 W" in words for words in said) == 2
    assert sum("Insufficient Permissions" in words for words in said) == 2
    assert sum("there are: performance powersave schedutil" in words for words in said) == 2
    assert sum("between 800 and 3600 MHz" in words for words in said) == 2
    assert tree(tmp_path / "cpufreq") == before
    driver.is_allowed = True
    assert controls.restore() == []


def test_without_a_driver_the_rest_is_set(tmp_path: Path) -> None:
    cpufreq(tmp_path / "cpufreq")
    controls = PowerControls(tmp_path / FILE, lambda: None)
    said = controls.start(settings(tmp_path / "cpufreq"))
    assert len(said) == 1
    assert {*tree(tmp_path / "cpufreq").values()} == {"powersave", "1800000"}


def test_a_damaged_note_is_told_and_nothing_is_set_over_it(tmp_path: Path) -> None:
    before, driver = cpufreq(tmp_path / "cpufreq"), Driver()
    (tmp_path / FILE).write_text("[[")
    controls = PowerControls(tmp_path / FILE, lambda: driver)
    assert FILE in controls.start(settings(tmp_path / "cpufreq"))[0]
    assert tree(tmp_path / "cpufreq") == before
    assert {*driver.clocks.values()} == {0}
    assert (tmp_path / FILE).read_text() == "[["


def test_what_cannot_be_noted_is_not_set(tmp_path: Path) -> None:
    before, driver = cpufreq(tmp_path / "cpufreq"), Driver()
    controls = PowerControls(tmp_path / "gone" / FILE, lambda: driver)
    assert len(controls.start(settings(tmp_path / "cpufreq"))) == 8  # two controls of two cards and of two policies
    assert tree(tmp_path / "cpufreq") == before
    assert {*driver.clocks.values()} == {0}
