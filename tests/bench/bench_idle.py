"""What an agent costs while nothing happens: processor, memory and wake-ups of agent and launcher together.

`python tests/bench/bench_idle.py --seconds 60`: alone, and with a broker and two peers. Exit code 1 if it costs more
than 0.3 % of a processor or 60 MiB.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import agents, arguments, cpu_s, pss_bytes, report, switches

SECONDS = 60.0
SETTLE_S = 5.0
PEERS = 2
CPU_SHARE_MAX = 0.003
PSS_BYTES_MAX = 60 << 20


def watch(pids: tuple[int, int], seconds: float) -> dict[str, float]:
    """So many seconds of two idle processes."""
    pause = threading.Event()
    pause.wait(SETTLE_S)
    spent, slept = [cpu_s([pid]) for pid in pids], switches(pids)
    began_s = time.perf_counter()
    pause.wait(seconds)
    elapsed_s = time.perf_counter() - began_s
    shares = [(cpu_s([pid]) - earlier) / elapsed_s for pid, earlier in zip(pids, spent, strict=True)]
    return {
        "cpu_share": sum(shares),
        "cpu_share_launcher": shares[1],
        "wakeups_s": (switches(pids) - slept) / elapsed_s,
        "pss_bytes": pss_bytes(pids),
        "pss_bytes_launcher": pss_bytes(pids[1:]),
    }


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", seconds=(float, SECONDS, "how long to watch (default: %(default)s)"))
    text = [f"idle for {options.seconds:g} s: agent and launcher together (of it, the launcher)"]
    figures: dict[str, Any] = {"seconds": options.seconds}
    code = 0
    for name, count, mqtt in (("alone", 1, False), (f"with a broker and {PEERS} peers", 1 + PEERS, True)):
        with agents(count, mqtt=mqtt) as cluster:
            told = watch(cluster[0].pids, options.seconds)
        figures[name] = told
        code |= told["cpu_share"] > CPU_SHARE_MAX or told["pss_bytes"] > PSS_BYTES_MAX
        text.append(
            f"  {name:28} {told['cpu_share']:.3%} of a processor ({told['cpu_share_launcher']:.3%}),"
            f" {told['wakeups_s']:.1f} wake-ups a second,"
            f" {told['pss_bytes'] / 2**20:.1f} MiB PSS ({told['pss_bytes_launcher'] / 2**20:.1f})"
        )
    report(text, figures, as_json=options.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
