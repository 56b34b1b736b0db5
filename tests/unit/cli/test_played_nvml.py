"""The GPUs of the demonstration speak as `pynvml` does, as far as they speak."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pynvml
import pytest

from peerload.agent.sensors.nvml import GpuProcess, Nvml
from peerload.cli.demo.gpu_agent import LAG_S, PlayedNvml
from peerload.model.resources import Health

GIB = 1 << 30
GONE = 1 << 30
"""No process has this number."""


class Played:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 10.0
        (directory / "on").mkdir()
        self.machine = {
            "gpus": [{"uuid": f"GPU-{number}", "name": "played", "mem_bytes": 24 * GIB} for number in range(2)],
            "processes": str(directory / "on"),
        }
        self.write()
        self.library = PlayedNvml(directory / "machine", lambda: self.now_s)

    def write(self) -> None:
        (self.directory / "machine").write_text(json.dumps(self.machine))

    def use(self, pid: int, *lines: str) -> None:
        (self.directory / "on" / str(pid)).write_text("\n".join(lines) + "\n")


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path)


def test_it_has_no_function_that_pynvml_has_not(played: Played) -> None:
    names = [name for name in dir(PlayedNvml) if name.startswith("nvml")]
    assert len(names) > 8
    assert [name for name in names if not callable(getattr(pynvml, name, None))] == []


def test_processes_are_on_the_cards_that_their_files_name_while_they_live(played: Played) -> None:
    me = os.getpid()
    played.use(me, f"GPU-0 {2 * GIB} 30", f"GPU-1 {GIB} 5", "not a line", "GPU-9 1 1")
    played.use(GONE, f"GPU-0 {GIB} 30")
    played.use(1, f"GPU-0 {GIB} 90")
    nvml = Nvml(played.library)
    first, second = nvml.find()
    assert (first.mem_bytes, first.index, second.index) == (24 * GIB, 0, 1)
    one, other = nvml.read()
    assert set(one.processes or ()) == {GpuProcess(me, 2 * GIB), GpuProcess(1, GIB)}
    assert (one.mem_used_bytes, one.busy, one.temperature_c) == (3 * GIB, 1.0, 35)
    assert (other.processes, other.mem_used_bytes) == ((GpuProcess(me, GIB),), GIB)


def test_how_busy_a_card_is_is_told_late(played: Played) -> None:
    nvml = Nvml(played.library)
    nvml.find()
    assert nvml.read()[0].busy == 0.0
    played.use(os.getpid(), "GPU-0 1 40")
    assert nvml.read()[0].busy == 0.0
    played.now_s += LAG_S
    assert nvml.read()[0].busy == 0.4


def test_a_card_may_be_lost_and_a_machine_go_away(played: Played) -> None:
    nvml = Nvml(played.library)
    nvml.find()
    played.machine["gpus"][1]["lost"] = True  # type: ignore[index]
    played.write()
    assert [reading.health for reading in nvml.read()] == [Health.OK, Health.SICK]
    for text in ("", "{}", "[]", '{"gpus": 3}'):
        (played.directory / "machine").write_text(text)
        try:
            assert Nvml(played.library).find() == ()
        except OSError as error:
            assert "does not work" in str(error)  # noqa: PT017 -- either is an answer
