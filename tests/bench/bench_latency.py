"""From `submit` to the task's own first clock read, and from `submit` to knowing that it has ended, on an idle agent.

`python tests/bench/bench_latency.py`: from a connected client, and from a command line started for it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.cli.common.agent_process import program_words
from tests.bench.support import Agent, agents, arguments, percentile, report, summary

SAMPLES = 60
PAUSE_S = 0.05
"""Between two samples, so that each meets an idle agent."""

_STAMP_C = r"""
#include <stdio.h>
#include <time.h>
int main(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    printf("%lld\n", (long long)now.tv_sec * 1000000000LL + now.tv_nsec);
    return 0;
}
"""
_STAMP_PYTHON = f"#!{sys.executable} -IS\nimport time\nprint(time.time_ns())\n"


def stamp_program(directory: Path) -> str:
    """A program that prints the time in ns as soon as it runs: of C where a compiler is, else of Python."""
    program = directory / "stamp"
    compiler = shutil.which("cc")
    if compiler is None:
        program.write_text(_STAMP_PYTHON)
        program.chmod(0o755)
    else:
        subprocess.run([compiler, "-O1", "-x", "c", "-o", str(program), "-"], input=_STAMP_C.encode(), check=True)
    return str(program)


def stamped_ns(agent: Agent, task: str) -> int:
    """What the task has printed."""
    return int(b"".join(piece["data"] for piece in agent.client.stream("output", task=task, follow=True, streams=[1])))


def measure(agent: Agent, stamp: str, samples: int) -> dict[str, list[float]]:
    """Everything in turn, in ms."""
    pause = threading.Event()
    taken: dict[str, list[float]] = {}

    def note(name: str, began_ns: int, ended_ns: int) -> None:
        taken.setdefault(name, []).append((ended_ns - began_ns) / 1e6)
        pause.wait(PAUSE_S)

    variables = {"PEERLOAD_SOCKET": agent.socket, "PATH": "/usr/bin:/bin"}
    for _ in range(samples):
        began_ns = time.time_ns()
        task = agent.submit(stamp)
        answered_ns = time.time_ns()
        note("submit, answered", began_ns, answered_ns)
        note("submit to start", began_ns, stamped_ns(agent, task))
        began_ns = time.time_ns()
        agent.wait(agent.submit("/bin/true"))
        note("submit and wait", began_ns, time.time_ns())
        began_ns = time.time_ns()
        done = subprocess.run(
            [*program_words(), "submit", stamp], env=variables, capture_output=True, text=True, check=True
        )
        note("`peerload submit` to start", began_ns, stamped_ns(agent, done.stdout.strip()))
        began_ns = time.time_ns()
        subprocess.run([*program_words(), "run", "/bin/true"], env=variables, check=True)
        note("`peerload run true`", began_ns, time.time_ns())
        began_ns = time.time_ns()
        subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
        note("a bare `python -I -c pass`", began_ns, time.time_ns())
    return taken


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", samples=(int, SAMPLES, "how many of each (default: %(default)s)"))
    with tempfile.TemporaryDirectory(prefix="pl-bench-") as name, agents(1) as (agent,):
        taken = measure(agent, stamp_program(Path(name)), options.samples)
    text = [f"latency in ms, {options.samples} samples on an idle agent", f"  {'':28} {'p50':>7} {'p95':>7} {'max':>7}"]
    figures: dict[str, Any] = {"samples": options.samples}
    for what, values in taken.items():
        text.append(f"  {what:28} {percentile(values, 0.5):7.2f} {percentile(values, 0.95):7.2f} {max(values):7.2f}")
        figures[what] = summary(values)
    report(text, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
