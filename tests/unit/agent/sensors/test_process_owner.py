"""Whose a process is: of which attempt, or of nobody here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerload.agent.sensors import processes as module
from peerload.agent.sensors.processes import FOREIGN_KEPT_S, INITIAL_NAMESPACE, ProcessOwners
from tests.support import wait_until

KEY = "0123456789abcdef0123456789abcdef-1"
OTHER = "f" * 32 + "-22"


class Kernel:
    """What /proc and /sys/fs/cgroup say."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroups = root / "cgroup"
        self.now_s = 0.0
        self.owners = ProcessOwners(self.proc, self.cgroups, lambda: self.now_s)

    def process(
        self, pid: int, parent: int = 1, session: int = 0, start: int = 100, environ: bytes = b"", cgroup: str = "0::/"
    ) -> None:
        directory = self.proc / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        rest = " ".join(["S", str(parent), str(pid), str(session or pid), *["0"] * 15, str(start), "0"])
        (directory / "stat").write_text(f"{pid} (a (b) c) {rest}\n")
        (directory / "environ").write_bytes(environ)
        (directory / "cgroup").write_text(cgroup + "\n")

    def cgroup(self, path: str, *pids: int) -> None:
        directory = self.cgroups / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


def mark(key: str) -> bytes:
    return b"A=b\0PEERLOAD_UNIT=run-7/peerload-" + key.encode() + b"\0Z=1\0"


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_by_its_mark(kernel: Kernel) -> None:
    kernel.process(50, environ=mark(KEY))
    assert kernel.owners.key_of(50) == KEY


def test_one_that_is_not_here_is_not_foreign_but_unknown(kernel: Kernel) -> None:
    assert kernel.owners.key_of(50) is None


def test_a_stranger_is_of_none_and_so_is_a_zombie_unknown(kernel: Kernel) -> None:
    kernel.process(50, environ=b"PEERLOAD_UNITS=run/peerload-" + KEY.encode())
    assert kernel.owners.key_of(50) == ""
    kernel.process(51, environ=mark(KEY))
    stat = kernel.proc / "51/stat"
    stat.write_text(stat.read_text().replace(") S", ") Z"))
    assert kernel.owners.key_of(51) is None


def test_by_those_it_descends_from_the_nearest_first(kernel: Kernel) -> None:
    kernel.process(50, environ=mark(OTHER))
    kernel.process(51, parent=50, environ=mark(KEY))
    kernel.process(52, parent=51)
    kernel.process(53, parent=52)
    assert kernel.owners.key_of(53) == KEY


def test_by_the_leader_of_its_session_when_its_parents_are_gone(kernel: Kernel) -> None:
    kernel.process(50, environ=mark(KEY), start=100)
    kernel.process(60, parent=1, session=50, start=200)
    assert kernel.owners.key_of(60) == KEY


def test_a_number_that_was_given_to_another_since_is_no_leader(kernel: Kernel) -> None:
    kernel.process(60, parent=1, session=50, start=200)
    kernel.process(50, environ=mark(KEY), start=300)
    assert kernel.owners.key_of(60) == ""


@pytest.mark.parametrize(
    ("line", "directory"),
    [
        ("0::/user/peerload.ab12/3", "user/peerload.ab12/3"),
        ("7:memory:/peerload.ab12/3", "memory/peerload.ab12/3"),
    ],
)
def test_by_its_cgroup_where_it_has_cleared_its_environment(kernel: Kernel, line: str, directory: str) -> None:
    kernel.process(50, environ=mark(KEY), cgroup=line)
    kernel.process(60, cgroup=line)
    kernel.cgroup(directory, 50, 60)
    assert kernel.owners.key_of(60) == KEY


def test_cgroups_of_others_are_not_looked_into(kernel: Kernel) -> None:
    kernel.process(50, environ=mark(KEY))
    kernel.process(60, cgroup="0::/shared")
    kernel.cgroup("shared", 50, 60)
    assert kernel.owners.key_of(60) == ""


def test_who_owns_a_process_is_looked_into_once(kernel: Kernel) -> None:
    kernel.process(50, environ=mark(KEY))
    kernel.process(60)
    assert [kernel.owners.key_of(pid) for pid in (50, 60)] == [KEY, ""]
    (kernel.proc / "50/environ").write_bytes(b"")
    (kernel.proc / "60/environ").write_bytes(mark(KEY))
    assert [kernel.owners.key_of(pid) for pid in (50, 60)] == [KEY, ""]
    kernel.now_s += FOREIGN_KEPT_S
    assert [kernel.owners.key_of(pid) for pid in (50, 60)] == [KEY, KEY]


def test_a_number_used_again_is_another_process(kernel: Kernel) -> None:
    kernel.process(50, environ=mark(KEY), start=100)
    assert kernel.owners.key_of(50) == KEY
    kernel.process(50, start=101)
    assert kernel.owners.key_of(50) == ""


def test_what_is_remembered_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MAX", 4)
    kernel.owners = ProcessOwners(kernel.proc, kernel.cgroups, lambda: kernel.now_s)
    for pid in range(50, 70):
        kernel.process(pid, environ=mark(KEY))
        kernel.owners.key_of(pid)
    assert len(kernel.owners._known) == 4


def test_whether_this_is_a_container(kernel: Kernel) -> None:
    assert not kernel.owners.is_contained()
    link = kernel.proc / "self/ns/pid"
    link.parent.mkdir(parents=True)
    link.symlink_to("pid:[4026532999]")
    assert kernel.owners.is_contained()
    link.unlink()
    link.symlink_to(INITIAL_NAMESPACE)
    assert not kernel.owners.is_contained()


@pytest.fixture
def real() -> Iterator[subprocess.Popen[str]]:
    """A process with a mark, which has started another that has cleared its environment."""
    inner = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], env={{}})"
    environment = {**os.environ, "PEERLOAD_UNIT": f"run/peerload-{KEY}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_of_real_processes(real: subprocess.Popen[str]) -> None:
    owners = ProcessOwners()
    assert real.stdout is not None
    below = int(real.stdout.readline())
    assert owners.key_of(real.pid) == KEY
    assert owners.key_of(below) == KEY
    assert not owners.key_of(os.getpid())
    assert owners.key_of(1 << 30) is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    wait_until(lambda: owners.key_of(gone.pid) is None)
