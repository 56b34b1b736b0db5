"""Measurement of a power profile: spinners keep chosen threads of this machine busy and count their work, while the agent counts
joules."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOADS = ("integer", "memory")
SETTLE_S = 3.0
WINDOW_S = 8.0
LOOK_S = 2.0
FOREIGN_MAX = 0.03
"""Share of the machine that other programs may keep busy."""
TICKS = os.sysconf("SC_CLK_TCK")
_SLOT = struct.Struct("<Q")
_CODE = """\
import mmap, os, struct, sys
path, slot, cpu, load, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
os.sched_setaffinity(0, {cpu})
with open(path, "r+b") as file:
    shared = mmap.mmap(file.fileno(), 0)
count, number = 0, 1
source, target = bytearray(32 << 20), bytearray(32 << 20)
while os.getppid() == parent:
    if load == "integer":
        for _ in range(200_000):
            number = (number * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    else:
        target[:] = source
    count += 1
    struct.pack_into("<Q", shared, 8 * slot, count)
"""


def threads_in_order() -> tuple[list[int], int]:
    """The hardware threads that this process may use, the first thread of every core before any second one; and the number of cores."""
    first: list[int] = []
    others: list[int] = []
    seen: set[str] = set()
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core = (
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
                .read_text(encoding="ascii")
                .strip()
            )
        except OSError:
            core = str(cpu)
        (others if core in seen else first).append(cpu)
        seen.add(core)
    return first + others, len(first)


class Spinners:
    """Busy processes, each on its own hardware thread. They end with this process at the latest."""

    def __init__(self, cpus: list[int]) -> None:
        self._cpus = cpus
        self._running: list[subprocess.Popen[bytes]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="peerload-")
        self._path = Path(self._directory.name, "counts")
        self._path.write_bytes(bytes(_SLOT.size * len(cpus)))
        with self._path.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.spin(0, "")
        self._counts.close()
        self._directory.cleanup()

    def spin(self, count: int, load: str) -> None:
        """Stop the running spinners and start ``count`` new ones."""
        for process in self._running:
            process.kill()
            process.wait()
        self._running = [
            subprocess.Popen(  # noqa: S603 -- our own words
                [sys.executable, "-I", "-S", "-c", _CODE, str(self._path), str(slot), str(cpu), load, str(os.getpid())],
                stdin=subprocess.DEVNULL,
            )
            for slot, cpu in enumerate(self._cpus[:count])
        ]

    def work(self) -> int:
        return sum(count for (count,) in _SLOT.iter_unpack(self._counts[:]))


class Reading(NamedTuple):
    """Total joules of this node at ``at_s``, and the total time without a measurement; busy_s: processor seconds of all cores."""

    at_s: float
    joules: float
    gap_s: float
    busy_s: float


class Bench:
    """Load and power of this machine. ask: the answer of the agent to `power`."""

    def __init__(self, spinners: Spinners, ask: Callable[[], dict[str, Any]]) -> None:
        self.spin, self.work = spinners.spin, spinners.work
        self._ask = ask
        self.wait = time.sleep

    def read(self) -> Reading:
        told = self._ask()
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        busy = sum(int(field) for number, field in enumerate(fields) if number not in (3, 4))  # idle, waiting for disks
        return Reading(float(told["at_s"]), float(told["joules"]), float(told["gap_s"]), busy / TICKS)


def measured(
    bench: Any,  # noqa: ANN401 -- `Bench`, or a simulated one
    levels: Sequence[int],
    threads: int,
    say: Callable[[str], object],
    window_s: float = WINDOW_S,
) -> list[tuple[int, float, float, float]]:
    """(threads, watts, standard deviation, work per second) of each level: the mean of both loads. Raises PeerloadError if other
    programs keep the machine busy, or the sensor reports nothing."""
    _check_quiet(bench, threads)
    found: dict[int, list[tuple[float, float, float]]] = {}
    for load in LOADS:
        for level in levels:
            if not level and found:
                continue  # an idle machine needs only one measurement
            say(f"{level} of {threads} threads busy ({load})")
            bench.spin(level, load)
            bench.wait(SETTLE_S)
            found.setdefault(level, []).append(_window(bench, level, threads, window_s))
    bench.spin(0, "")
    one = found.get(1, [])
    told = []
    for level, windows in sorted(found.items()):
        watts, sds, _ = (sum(values) / len(windows) for values in zip(*windows, strict=True))
        # the loads count different units: each relative to one thread
        rates = [rate / single for (_, _, rate), (_, _, single) in zip(windows, one, strict=False) if single]
        told.append((level, watts, sds, sum(rates) / len(rates) if rates and level else 0.0))
    return told


def _window(bench: Any, level: int, threads: int, window_s: float) -> tuple[float, float, float]:  # noqa: ANN401 -- as above
    began, work, parts = bench.read(), bench.work(), []
    before = began
    while before.at_s - began.at_s < window_s:
        bench.wait(LOOK_S)
        now = bench.read()
        if now.gap_s > began.gap_s:
            raise PeerloadError("the power sensor reports nothing any more", hint="list the sensors:  peerload power")
        if now.at_s > before.at_s:
            parts.append((now.joules - before.joules) / (now.at_s - before.at_s))
            before = now
    seconds = before.at_s - began.at_s
    others = (before.busy_s - began.busy_s) / seconds - level
    if others > FOREIGN_MAX * threads + 0.05:
        raise _busy(others, threads)
    mean = (before.joules - began.joules) / seconds
    deviation = (sum((part - mean) ** 2 for part in parts) / max(len(parts), 1)) ** 0.5
    return mean, deviation, (bench.work() - work) / seconds


def _check_quiet(bench: Any, threads: int) -> None:  # noqa: ANN401 -- as above
    before = bench.read().busy_s
    bench.wait(LOOK_S)
    others = (bench.read().busy_s - before) / LOOK_S
    if others > FOREIGN_MAX * threads:
        raise _busy(others, threads)


def _busy(others: float, threads: int) -> PeerloadError:
    return PeerloadError(
        "this machine is busy, so its power cannot be measured",
        why=f"other programs use {others:.2f} of {threads} threads; at most {FOREIGN_MAX:.0%} may be in use",
        hint="which:  top        no more tasks meanwhile:  peerload drain --wait",
    )
