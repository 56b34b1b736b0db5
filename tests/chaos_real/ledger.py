"""What tasks really did, as they told it themselves, line by line in the order of the kernel."""

from __future__ import annotations

import collections
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

BUILD_S_MAX = 60.0


class Run(NamedTuple):
    """One process of one attempt: the numbers of its first and last line in the ledger, what it said and when
    (CLOCK_MONOTONIC)."""

    task: str
    attempt: int
    node: str
    begun_ns: int
    first: int
    last: int
    words: tuple[str, ...]
    times_ns: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end."""
        return "stop" in self.words

    def __str__(self) -> str:
        told = ", ".join(f"{count} {word}" for word, count in collections.Counter(self.words).items())
        return f"attempt {self.attempt} at {self.node}: lines {self.first}-{self.last} ({told})"


def build(directory: Path, name: str, *flags: str) -> Path:
    """A C file of this directory, compiled. Raises AssertionError with the compiler's complaint."""
    made = directory / name
    source = Path(__file__).with_name(f"{name}.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    done = subprocess.run(
        [compiler, "-O1", "-Wall", *flags, "-o", str(made), str(source)],
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return made


class Ledger:
    """The file that every task of every machine appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._read_to = 0
        self.stopped: set[str] = set()
        """Tasks of which some run has come to its end, as far as `follow` has read."""

    def follow(self) -> None:
        """Read on from where the last call ended."""
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read_to += len(whole) + len(end)
        self.stopped |= {line.split(b" ", 1)[0].decode() for line in whole.split(b"\n") if b" stop " in line}

    def runs(self) -> dict[str, list[Run]]:
        """task → its runs, in the order in which they began."""
        found: dict[tuple[str, int, str, int], list[tuple[int, str, int]]] = {}
        with self.path.open(encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                task, attempt, node, word, at_ns, begun_ns, _ = line.split()
                found.setdefault((task, int(attempt), node, int(begun_ns)), []).append((number, word, int(at_ns)))
        runs: dict[str, list[Run]] = {}
        for key, lines in found.items():
            numbers, words, times_ns = zip(*lines, strict=True)
            run = Run(*key, numbers[0], numbers[-1], words, times_ns)
            runs.setdefault(run.task, []).append(run)
        return {task: sorted(those, key=lambda run: run.first) for task, those in runs.items()}


def overlapping(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs of one task of which the later began before the earlier had done its last.

    A run that was frozen says nothing; if it goes on after another has begun it has outlived its lease, whether or not
    the other still ran: home has given the task away, and nobody may thaw what is left of it.
    """
    pairs = []
    ordered = sorted(runs, key=lambda run: run.first)
    for one, other in itertools.combinations(ordered, 2):
        if other.first < one.last:
            pairs.append((one, other))
    return pairs
