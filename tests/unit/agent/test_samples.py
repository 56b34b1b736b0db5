"""The ring of samples: sums over live nodes, its bound, the file, a date that jumps, a disk that is full."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peerload.agent.runtime import now
from peerload.agent.views.agent import KEYS, SAMPLES_MAX, Samples
from peerload.core.membership.peers import PeerState
from peerload.model.resources import GPU, Device, DeviceLoad, LoadReport


@dataclasses.dataclass
class FakePeer:
    state: PeerState
    name: str

    @property
    def identity(self) -> Any:
        return SimpleNamespace(node=self.name)

    @property
    def profile(self) -> Any:
        return SimpleNamespace(cpus=8, devices=[GPU0])


GPU0 = Device("nvidia:x", GPU, 0, mem_bytes=8 << 30)
REPORT = LoadReport(
    running=2,
    waiting=1,
    cpus_busy=3.5,
    cpus_foreign=0.5,
    devices=(DeviceLoad(GPU0.mark, busy_percent=50, used_mib=2048),),
)


class FakeMembership(list[FakePeer]):
    def last_report(self, name: str) -> Any:
        return SimpleNamespace(report=REPORT) if name != "mute" else None


def samples_in(directory: Path) -> Samples:
    peers = FakeMembership(
        [FakePeer(PeerState.ALIVE, "n2"), FakePeer(PeerState.DEAD, "n3"), FakePeer(PeerState.ALIVE, "mute")]
    )
    state = SimpleNamespace(profile=SimpleNamespace(cpus=4, devices=[]))
    node: Any = SimpleNamespace(state=state, sharing=SimpleNamespace(shown=lambda: REPORT), membership=peers)
    return Samples(node, directory)


def ages(samples: Samples) -> list[float]:
    told: Any = samples.to_dict(0.0)["samples"]
    return [sample[0] for sample in told]


def test_a_sample_sums_the_nodes_that_live(tmp_path: Path) -> None:
    samples = samples_in(tmp_path)
    samples.take(100.0)
    told: Any = samples.to_dict(0.0)
    assert dict(zip(told["keys"], told["samples"][0], strict=True)) == {
        "at": 100.0, "nodes": 3, "cpus": 20, "cpus_busy": 7.0, "cpus_foreign": 1.0, "running": 4, "waiting": 2, "gpus": 2,
        "gpus_busy": 0.5, "gpu_mem_share": 0.25,
    }  # fmt: skip
    assert not samples.to_dict(100.0)["samples"]


def test_the_ring_is_bounded_and_survives_a_restart(tmp_path: Path) -> None:
    samples = samples_in(tmp_path)
    for number in range(SAMPLES_MAX + 5):
        samples.take(1000.0 + number)
    samples.write()
    again = samples_in(tmp_path)
    again._ring = again._read()
    assert ages(again) == ages(samples) == [1005.0 + number for number in range(SAMPLES_MAX)]
    assert (tmp_path / "samples").stat().st_size < 80_000
    assert len(KEYS) == 9  # a longer sample needs another version of the file


def test_samples_of_a_date_that_was_ahead_go(tmp_path: Path) -> None:
    samples = samples_in(tmp_path)
    for at in (100.0, 130.0, 9e9, 160.0):
        samples.take(at)
    assert ages(samples) == [100.0, 130.0, 160.0]
    samples.take(now().wall_s + 1e6)
    samples.write()
    assert [sample[0] for sample in samples_in(tmp_path)._read()] == [100.0, 130.0, 160.0]


def test_a_damaged_file_is_begun_anew_and_a_full_disk_costs_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "samples").write_bytes(b"peerload samples 1\nx")
    assert samples_in(tmp_path)._read() == []
    (tmp_path / "samples").unlink()
    (tmp_path / "samples").symlink_to("/dev/full")
    (tmp_path / f".samples.{os.getpid()}").mkdir()  # as a full disk: it cannot be written
    samples = samples_in(tmp_path)
    samples.take(1.0)
    samples.write()
    assert ages(samples) == [1.0]
