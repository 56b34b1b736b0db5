"""Energy of a GPU as peerload's sensors and as zeus count it, on the stand-in for NVIDIA's library that draws known watts.

zeus is no dependency: install it into an environment of its own, and name that environment's Python.

    python3 -m venv /tmp/zeus && /tmp/zeus/bin/pip install zeus
    .venv/bin/python tests/bench/bench_zeus.py /tmp/zeus/bin/python
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fakes.nvml import Machine, environment

ROOT = Path(__file__).resolve().parents[2]
WINDOW_S, WATTS = 10.0, 250.0
TELL = """
import json, resource, time
used = resource.getrusage(resource.RUSAGE_SELF)
children = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu_s = used.ru_utime + used.ru_stime + children.ru_utime + children.ru_stime
print(json.dumps({"joules": joules, "seconds": seconds, "cpu_s": cpu_s, "rss_mib": used.ru_maxrss / 1024}))
"""
OURS = """
import time, pynvml
from peerload.agent.sensors.nvml import Nvml
from peerload.energy.accounting import Counter
nvml, counter, joules = Nvml(pynvml), Counter(), 0.0
nvml.find()
began_s = time.monotonic()
while True:
    at_s = time.monotonic()
    joules += counter.take(at_s, nvml.read()[0].energy_j).joules
    if at_s - began_s >= WINDOW_S:
        break
    time.sleep(1.0)
seconds = at_s - began_s
"""
ZEUS = """
import time
from zeus.monitor import ZeusMonitor
monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])
monitor.begin_window("all", sync_execution=False)
time.sleep(WINDOW_S)
told = monitor.end_window("all", sync_execution=False)
joules, seconds = sum(told.gpu_energy.values()), told.time
"""


def measured(python: str, code: str, cards: Path) -> dict[str, float]:
    """What a program has counted, and what it took."""
    done = subprocess.run(
        [python, "-c", f"WINDOW_S = {WINDOW_S}\n{code}{TELL}"],
        env=os.environ | environment(cards) | {"PYTHONPATH": str(ROOT) if python == sys.executable else ""},
        stdout=subprocess.PIPE,
        check=True,
    )
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    """Both, one after the other."""
    with tempfile.TemporaryDirectory(prefix="pl-bench-zeus-") as directory:
        cards = Machine(Path(directory) / "cards")
        cards.gpu(0, power=WATTS * 1000, energy=0)
        for name, python, code in (("peerload", sys.executable, OURS), ("zeus", sys.argv[1], ZEUS)):
            one = measured(python, code, cards.path)
            off = one["joules"] / (WATTS * one["seconds"]) - 1.0
            sys.stdout.write(
                f"{name:9} {one['joules']:8.1f} J, {off:+.2%} of what was drawn; "
                f"{one['cpu_s']:.2f} s of CPU, {one['rss_mib']:.0f} MiB\n"
            )


if __name__ == "__main__":
    main()
