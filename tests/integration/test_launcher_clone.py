"""A process that is started directly in its cgroup: it is as one that was started by a move, its launcher stays where it was, and
errors are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.launcher import containment
from peerload.launcher.containment import (
    FORK_PAUSE_S,
    FORKS_IN_A_ROW_MAX,
    SPAWN_PAUSE_S,
    SPAWNS_IN_A_ROW_MAX,
    Cgroup2,
)

PROGRAM = """
import json, os, signal, sys
from peerload.launcher.containment import cgroup_units
from peerload.launcher.process import CannotStart, spawn
from peerload.launcher.protocol import SpawnRequest

way, folder = sys.argv[1:]
units = cgroup_units("cgroup2", f"peerload.test-{os.getpid()}")
if units is None or units.clone is None or (way == "posix_spawn" and not units.clone.can_spawn):
    sys.exit(75)
units.clone.can_spawn = way == "posix_spawn"
own = open("/proc/self/cgroup").read()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

def start(key, *argv, out="out", reads="", **variables):
    environment = {b"PATH": b"/usr/bin:/bin", b"TEXT": b"a=b\\n\\xff"} | {k.encode(): v for k, v in variables.items()}
    request = SpawnRequest(key, list(argv), environment, b"/usr", 0o27, "out", "err", 0.0, 1000)
    request.stdout, request.stderr = f"{folder}/{out}", f"{folder}/err"
    units.enter(key, clones=way != "move")
    try:
        return spawn(request, reads, clone=None if way == "move" else units.clone)
    finally:
        units.leave()

descriptors = os.listdir("/proc/self/fd")
script = b'cat /proc/self/cgroup; umask; pwd; ls -l /proc/self/fd | wc -l; tr "\\\\0" : </proc/self/environ; cat; echo no >&2'
script += b'; grep -E "^Sig(Blk|Ign|Cgt)" /proc/self/status; [ $(ps -o sid= -p $$) = $$ ]'
reading, writing = os.pipe2(os.O_CLOEXEC)
os.write(writing, b"input")
os.close(writing)
ended = [os.waitpid(start("a", b"sh", b"-c", script, reads=reading), 0)[1]]
os.close(reading)
ended.append(os.waitpid(start("b", b"env", out="names", **{"=v": b"1"}), 0)[1])
failures = []
for key, argv, out, variables in (
    ("c", [b"/"], "out", {}),
    ("d", [b"true"], "absent/out", {}),
    ("e", [b"true", b"a\\0b"], "out", {}),
    ("f", [b"true"], "out", {"V": b"a\\0b"}),
    ("g", [b"true"], "out", {"V": 7}),
    ("h", [b"true"], "out", {"V=": b"1"}),
    ("i", [b"true"], "out", {"": b"1"}),
    ("j", [b"true", b"x" * (1 << 20)], "out", {}),
    ("k", [b"absent"], "out", {}),
):
    try:
        start(key, *argv, out=out, **variables)
    except CannotStart as failure:
        failures.append([failure.exit_code, failure.reason if key != "g" else ""])
are_closed = os.listdir("/proc/self/fd") == descriptors
found = {"path": units.path("a"), "ended": ended, "failures": failures, "are_closed": are_closed}
found["is_same"] = open("/proc/self/cgroup").read() == own
assert all(map(units.close, "abcdefghijk"))
units.remove()
print(json.dumps(found))
"""


def started(way: str, folder: Path) -> tuple[dict[str, Any], str]:
    """What starts by this way found, and what the process has written."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode == 75:
        pytest.skip("no cgroup of version 2 can be written to here, or the C library cannot start processes in one")
    assert not done.returncode, done.stderr
    out = (folder / "out").read_text(errors="surrogateescape")
    assert (folder / "err").read_text() == "no\n"
    assert b"=v=1\n" in (folder / "names").read_bytes()
    (folder / "out").unlink()
    (folder / "err").unlink()
    return json.loads(done.stdout), out


@pytest.mark.parametrize("way", ["fork", "posix_spawn"])
def test_a_process_starts_in_its_unit_as_if_it_had_been_moved(tmp_path: Path, way: str) -> None:
    found, out = started(way, tmp_path)
    moved, moved_out = started("move", tmp_path)
    (unified,) = [line.removeprefix("0::") for line in out.splitlines() if line.startswith("0::")]
    assert found["path"].endswith(unified)
    assert found["is_same"]
    assert found["are_closed"]
    assert found["ended"] == [0, 0]
    assert [code for code, _ in found["failures"]] == [126] * 8 + [127]
    assert found["failures"] == moved["failures"]
    assert _without_cgroups(out) == _without_cgroups(moved_out)
    assert "input" in out
    assert "SigBlk:\t0000000000000000" in out


@pytest.mark.parametrize(
    ("can_spawn", "pause_s", "most", "lane"),
    [(True, SPAWN_PAUSE_S, SPAWNS_IN_A_ROW_MAX, True), (False, FORK_PAUSE_S, FORKS_IN_A_ROW_MAX, False)],
)
def test_a_burst_goes_on_by_moves(
    monkeypatch: pytest.MonkeyPatch, *, can_spawn: bool, pause_s: float, most: int, lane: bool
) -> None:
    units = Cgroup2.__new__(Cgroup2)
    vars(units).update(clone=SimpleNamespace(can_spawn=can_spawn), _started_s=0.0, _in_a_row=0)
    now_s = 100.0
    monkeypatch.setattr(containment, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(containment, "_thread", SimpleNamespace(_count=lambda: 0))

    for _ in range(2):
        now_s += 2 * pause_s
        assert [units.prefers_clone() for _ in range(most + 2)] == [True] * most + [False] * 2
    for _ in range(2 * most):  # no burst
        now_s += 2 * pause_s
        assert units.prefers_clone()
    now_s += 2 * pause_s
    assert units.prefers_clone(in_lane=True) == lane
    monkeypatch.setattr(containment, "_thread", SimpleNamespace(_count=lambda: 1))
    now_s += 2 * pause_s
    assert units.prefers_clone() == can_spawn
    vars(units).update(clone=None)
    assert not units.prefers_clone()


def _without_cgroups(out: str) -> list[str]:
    """The lines without that of the cgroup. The signals 32 and 33 are the C library's own: a process may inherit or set that they are
    ignored."""
    lines = [line for line in out.splitlines() if not line.startswith("0::")]
    return [_without_own_signals(line) if line.startswith("SigIgn:") else line for line in lines]


def _without_own_signals(line: str) -> str:
    return f"SigIgn: {int(line.removeprefix('SigIgn:'), 16) & ~(0b11 << 31):016x}"
