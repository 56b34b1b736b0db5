"""How fast standard input and output go through `peerload run`, here and to another node, and what that costs the agents.

`python tests/bench/bench_run_stream.py`: beside the same bytes through a bare pipe. Both ways at once: `cat`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.cli.common.agent_process import program_words
from tests.bench.support import Agent, agents, arguments, load_text, pss_bytes, report_taken

MIB = 1 << 20
SIZE_MIB = 100
SAMPLE_S = 0.05
WAYS = {
    "stdin": (["sh", "-c", "wc -c"], True),
    "stdout": (["head", "-c", "{bytes}", "/dev/zero"], False),
    "both": (["cat"], True),
}


class Memory(threading.Thread):
    """The most that agents and launchers took while this ran, in bytes."""

    def __init__(self, started: list[Agent]) -> None:
        super().__init__()
        self._pids = [agent.pids for agent in started]
        self._over = threading.Event()
        self.bytes_max = 0

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes_max = max(self.bytes_max, *(pss_bytes(pids) for pids in self._pids))

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.bytes_max


def through(command: list[str], size_bytes: int, variables: dict[str, str], *, feeds: bool) -> float:
    """So many bytes into the command, or out of it, or both → MB/s. Raises AssertionError if a byte is missing."""
    source = f"head -c {size_bytes if feeds else 0} /dev/zero"
    began_s = time.monotonic()
    with subprocess.Popen(["sh", "-c", source], stdout=subprocess.PIPE) as feeder:
        done = subprocess.run(command, stdin=feeder.stdout, env=variables, capture_output=True, check=True)
    took_s = time.monotonic() - began_s
    came = int(done.stdout) if command[-1] == "wc -c" else len(done.stdout)
    assert came == size_bytes, (command, came, done.stderr)
    return size_bytes / took_s / 1e6


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", rounds=3, mib=(int, SIZE_MIB, "how much each time (default: %(default)s)"))
    size_bytes = options.mib * MIB
    taken: dict[str, list[float]] = {}
    with agents(2, mqtt=True) as started:
        first = started[0]
        variables = {"PATH": "/usr/bin:/bin", "PEERLOAD_SOCKET": first.socket}
        before = max(pss_bytes(agent.pids) for agent in started)
        memory = Memory(started)
        memory.start()
        for _ in range(options.rounds):
            for way, (command, feeds) in WAYS.items():
                words = [word.format(bytes=size_bytes) for word in command]
                for where, run in {
                    "a pipe": [],
                    "run here": [*program_words(), "run", "--node", first.node],
                    "run elsewhere": [*program_words(), "run", "--node", started[1].node],
                }.items():
                    speed = through([*run, *words], size_bytes, variables, feeds=feeds)
                    taken.setdefault(f"{way}, {where}, MB/s", []).append(speed)
        most = memory.stop()
    taken["memory of an agent and its launcher before, MiB"] = [before / MIB]
    taken["the most while that ran, MiB"] = [most / MIB]
    figures: dict[str, Any] = {"mib": options.mib}
    report_taken(f"{options.mib} MiB through `peerload run`; {load_text()}", figures, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
