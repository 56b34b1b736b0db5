"""What became of a task's memory, from the kernel's files, and in words."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from peerload.agent.launcher.client import exit_of
from peerload.launcher import containment
from peerload.launcher.containment import Cgroup2Memory, MemoryUse
from peerload.launcher.protocol import ExitRecord, ResourceUsage, decode_exit
from peerload.launcher.task import with_shortage
from tests.each import each
from tests.wording import Says

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


class Unit:
    """A directory with the files of a cgroup, that nothing happens in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        for name in ("memory.oom.group", "memory.max"):
            (path / name).touch()
        self.events(0, 0)

    def path(self, _: str) -> str:
        return str(self._path)

    def events(self, oom: int, oom_kill: int, peak_bytes: int = 0) -> None:
        (self._path / "memory.events").write_text(f"low 0\nmax 7\noom {oom}\noom_kill {oom_kill}\noom_group_kill 0\n")
        (self._path / "memory.peak").write_text(f"{peak_bytes}\n")

    def text(self, name: str) -> str:
        return (self._path / name).read_text()


def limited(unit: Unit, limit_bytes: int) -> Cgroup2Memory:
    made = Cgroup2Memory(unit)  # type: ignore[arg-type]
    made.enter("a", limit_bytes)
    made.leave()
    return made


@each("has_swap", [True, False])
def test_a_unit_gets_its_limit_without_swap(tmp_path: Path, *, has_swap: bool) -> None:
    unit = Unit(tmp_path)
    if has_swap:
        (tmp_path / "memory.swap.max").touch()
    assert limited(unit, 2 * GIB).limit("a", 1, 2 * GIB)
    assert (unit.text("memory.max"), unit.text("memory.oom.group")) == (str(2 * GIB), "1")
    assert (tmp_path / "memory.swap.max").exists() is has_swap
    assert not has_swap or unit.text("memory.swap.max") == "0"


@each(
    ("limit_bytes", "oom", "peak_bytes", "is_own"),
    [
        (GIB, 1, GIB // 2, True),  # the kernel counts that the limit was reached
        (GIB, 0, GIB, True),
        (GIB, 0, GIB // 2, False),  # the machine's end, or that of a group above
        (0, 0, GIB, False),
    ],
)
def test_who_was_killed_for_whose_limit(
    tmp_path: Path, limit_bytes: int, oom: int, peak_bytes: int, *, is_own: bool
) -> None:
    unit = Unit(tmp_path)
    unit.events(0, 3)
    memory = limited(unit, limit_bytes)  # kills of those that were there before are not its own
    assert memory.used("a").kills == 0
    unit.events(oom, 5, peak_bytes)
    use = memory.used("a")
    assert (use.kills, use.is_own, use.limit_bytes) == (2, is_own, limit_bytes)
    assert use.peak_bytes == (peak_bytes if limit_bytes else 0), "where others were before, the peak may be theirs"


@each("system", ["with a cgroup for the agent", "without", "where memory is not to be had"])
def test_memory_is_divided_beside_the_agent_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str) -> None:
    """A cgroup with processes in it cannot be divided: plain files stand for the kernel's."""
    service = tmp_path / "peerload.service"
    own = service / containment.SUBGROUP if system == "with a cgroup for the agent" else service
    own.mkdir(parents=True)
    (service / "cgroup.procs").write_text("" if own != service else "17\n")
    (service / "cgroup.controllers").write_text("pids" if system.endswith("had") else "memory pids")
    if own != service:
        (service / "cgroup.subtree_control").touch()
    made = containment.Cgroup2.__new__(containment.Cgroup2)
    assert made._place(str(own)) == str(service)
    assert made.has_memory is (own != service)
    assert own == service or (service / "cgroup.subtree_control").read_text() == "+memory"


def record(exit_code: int, number: int = 0, peak_bytes: int = 20 * MIB) -> ExitRecord:
    return ExitRecord(exit_code, 1.0, 2.0, usage=ResourceUsage(0.0, 0.0, peak_bytes), signal=number)


def noted(made: ExitRecord, use: MemoryUse, stderr: str = "/dev/null") -> tuple[str, str]:
    exit_ = exit_of(with_shortage(made, use, "ws1", stderr))
    return exit_.out_of, exit_.reason


def test_a_task_killed_for_its_limit_is_named_with_the_figures() -> None:
    use = MemoryUse(2 * GIB, 2 * GIB - 5, 1, is_own=True)
    made = record(137, signal.SIGKILL)
    assert noted(made, use) == ("memory", Says.OUT_OF_MEMORY("ws1", "2.0 GiB", "2.0 GiB"))
    assert exit_of(with_shortage(made, use, "ws1", "/dev/null")).usage.memory_bytes_max == 2 * GIB - 5
    assert noted(record(3), use)[0] == "memory", "its main process has told that a child of it was killed"
    assert "peak" not in noted(record(137, 9), MemoryUse(2 * GIB, 0, 1, is_own=True))[1]


def test_a_task_killed_for_the_machine_is_told_so() -> None:
    for use in (MemoryUse(kills=1), MemoryUse(2 * GIB, GIB, 1)):
        assert noted(record(137, signal.SIGKILL), use)[0] == "memory"


def test_who_succeeds_though_a_process_was_killed_has_succeeded() -> None:
    out_of, reason = noted(record(0), MemoryUse(200 * MIB, 200 * MIB, 1, is_own=True))
    assert out_of == ""
    assert all(fact in reason for fact in ("ended", "ws1", "limit 200.0 MiB", "peak 200.0 MiB"))


@each(
    ("made", "says", "is_named"),
    [
        (record(1, peak_bytes=98 * MIB), b"", True),
        (record(1), b"Traceback ...\nMemoryError\n", True),
        (record(134, signal.SIGABRT), b"terminate called ... what():  std::bad_alloc\n", True),
        (record(12), b"Out of memory!\npanic: in the ship's log\n", True),
        (record(134, signal.SIGABRT), b"FATAL ERROR: JavaScript heap out of memory\n", False),
        (record(139, signal.SIGSEGV), b"", False),
        (record(1), b"ValueError: no\n", False),
        (record(1), b"MemoryError\n" + b"and so on\n" * 1000, False),
        (record(1), b"torch.OutOfMemoryError: CUDA out of memory.\n", False),
        (record(0, peak_bytes=99 * MIB), b"MemoryError, but I went on\n", False),
        (record(137, signal.SIGKILL, peak_bytes=99 * MIB), b"MemoryError\n", False),
        (record(143, signal.SIGTERM, peak_bytes=99 * MIB), b"", False),
    ],
)
def test_of_who_is_refused_memory_only_what_can_be_told_is(
    tmp_path: Path, made: ExitRecord, says: bytes, *, is_named: bool
) -> None:
    stderr = tmp_path / "err"
    stderr.write_bytes(says)
    use = MemoryUse(100 * MIB, is_refused=True)
    assert noted(made, use, str(stderr))[0] == ("memory" if is_named else "")
    assert noted(made, MemoryUse(is_refused=True), str(stderr)) == ("", ""), "it had no limit"


def test_an_output_that_is_no_file_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "err")
    (tmp_path / "err").write_text("MemoryError")
    for path in (tmp_path, tmp_path / "link", tmp_path / "missing"):
        assert noted(record(1), MemoryUse(100 * MIB, is_refused=True), str(path)) == ("", "")


def test_what_a_newer_launcher_finds_short_is_read_all_the_same() -> None:
    told = {"exit_code": 1, "started_at": 1.0, "ended_at": 2.0, "out_of": "patience", "reason": "out of patience"}
    assert exit_of(decode_exit(told)).reason == "out of patience"
    assert exit_of(decode_exit(told)).out_of == ""
