"""What an agent costs while nothing happens: processor, memory and wake-ups of agent and launcher together.

`python tests/bench/bench_idle.py --seconds 60`: alone, and with a broker and two peers. Exit code 1 if it costs more
than 0.3 % of a processor or 60 MiB. ``--nodes 30`` compares clusters of 3, 10, 30 and 100 nodes, up to that many, instead, idle and
under a light stream of tasks, each submitted at the next node: what a node costs as there are more of them.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import agents, arguments, cpu_s, pss_bytes, report, switches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.support import Agent

SECONDS = 60.0
CLUSTERS = (3, 10, 30, 100)
STREAM_TASKS_S = 0.2
"""Tasks a second that are submitted at each node."""
MESSAGES = "gossip_datagrams_sent_total", "mqtt_messages_", "peer_messages_sent_total"
"""How the names of counted messages begin; of MQTT those that were published and received."""
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


def a_node(cluster: Sequence[Agent], seconds: float, *, streams: bool) -> dict[str, float]:
    """So many seconds of a cluster, idle or under a stream of STREAM_TASKS_S tasks a second and node → the mean of a node."""
    pids, pause, count, submitted = [pid for agent in cluster for pid in agent.pids], threading.Event(), len(cluster), 0

    def state() -> tuple[float, ...]:
        told = [agent.counters() for agent in cluster]
        sums = (sum(n for one in told for name, n in one.items() if name.startswith(begin)) for begin in MESSAGES)
        return (cpu_s(pids), float(switches(pids)), *map(float, sums))

    pause.wait(SETTLE_S)
    before, began_s = state(), time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        if streams and submitted <= elapsed_s * STREAM_TASKS_S * count:
            cluster[submitted % count].submit("true")
            submitted += 1
        pause.wait(min(1 / (2 * STREAM_TASKS_S * count), seconds) if streams else seconds)
    taken = [(after - earlier) / count / elapsed_s for after, earlier in zip(state(), before, strict=True)]
    told = {"cpu_share": taken[0], "wakeups_s": taken[1], "pss_bytes": pss_bytes(pids) / count}
    return told | dict(zip(("gossip_s", "mqtt_s", "peer_s"), taken[2:], strict=True)) | {"tasks": submitted}


def clusters(largest: int, seconds: float) -> tuple[list[str], dict[str, Any]]:
    """A table of what a node costs in clusters of up to so many, and its figures."""
    text = [
        "| nodes | | % of a processor | wake-ups/s | PSS, MiB | datagrams/s | MQTT messages/s | peer messages/s |",
        "|---:|---|" + "---:|" * 6,
    ]
    figures: dict[str, Any] = {"seconds": seconds}
    for count in (size for size in CLUSTERS if size <= largest):
        with agents(count, mqtt=True, policy="adaptive") as cluster:
            for streams, name in ((False, "idle"), (True, f"{STREAM_TASKS_S:g} tasks/s each")):
                told = figures[f"{count} {name}"] = a_node(cluster, seconds, streams=streams)
                text.append(
                    f"| {count} | {name} | {told['cpu_share'] * 100:.2f} | {told['wakeups_s']:.1f}"
                    f" | {told['pss_bytes'] / 2**20:.1f} | {told['gossip_s']:.2f} | {told['mqtt_s']:.2f} | {told['peer_s']:.2f} |"
                )
    return text, figures


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        seconds=(float, SECONDS, "how long to watch (default: %(default)s)"),
        nodes=(int, 0, "clusters of up to so many nodes instead"),
    )
    if options.nodes:
        report(*clusters(options.nodes, options.seconds), as_json=options.json)
        return 0
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
