"""A process that is forked into its cgroup: it starts there, its launcher stays where it was, and errors are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
from peerload.launcher.containment import cgroup_units
from peerload.launcher.process import CannotStart, spawn
from peerload.launcher.protocol import SpawnRequest

units = cgroup_units("cgroup2", f"peerload.test-{os.getpid()}")
if units is None or not units.prefers_fork():
    sys.exit(75)
own = open("/proc/self/cgroup").read()

def start(key, *argv, out="out"):
    request = SpawnRequest(key, list(argv), {b"PATH": b"/usr/bin:/bin"}, b"/", 0o22, "out", "err", 0.0, 1000)
    request.stdout, request.stderr = f"{sys.argv[1]}/{out}", f"{sys.argv[1]}/err"
    units.enter(key, forks=True)
    try:
        return spawn(request, fork=units.fork)
    finally:
        units.leave()

descriptors = os.listdir("/proc/self/fd")
os.waitpid(start("a", b"cat", b"/proc/self/cgroup"), 0)
codes = []
for key, argv, out in (("b", b"/", "out"), ("c", b"true", "absent/out")):
    try:
        start(key, argv, out=out)
    except CannotStart as failure:
        codes.append(failure.exit_code)
are_closed = os.listdir("/proc/self/fd") == descriptors
found = {"path": units.path("a"), "codes": codes, "are_closed": are_closed, "is_same": open("/proc/self/cgroup").read() == own}
assert all(map(units.close, "abc"))
units.remove()
print(json.dumps(found))
"""


def test_a_forked_process_starts_in_its_unit(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    if done.returncode == 75:
        pytest.skip("no cgroup of version 2 can be written to here")
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    lines = (tmp_path / "out").read_text().splitlines()
    (unified,) = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    assert found["path"].endswith(unified)
    assert found["is_same"]
    assert found["codes"] == [126, 126]
    assert found["are_closed"]
