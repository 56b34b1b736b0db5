"""What a node learns of its commands and of itself decides, and outlives its agent."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Cluster
from tests.support import wait_until

if TYPE_CHECKING:
    from pathlib import Path

PRESET = """
load = { policy = "distribution" }
selection = { policy = "longest" }
transfer = { threshold = 1.0 }
location = { receiver = { policy = "poll", retry_rate = 1.0 } }
"""
SHORT, LONG = ("sleep", "0.05"), ("sleep", "1")
SHORT_RUNS, LONG_RUNS = 12, 3
"""The mean of so many stays below that of the others, though the machine stands still during one for some seconds."""
MEASURED_WITHIN_S = 60.0


@pytest.mark.long
def test_the_command_known_to_take_longest_goes_also_after_a_crash() -> None:
    with Cluster() as cluster:
        preset = cluster.directory / "longest.toml"
        preset.write_text(PRESET, encoding="utf-8")
        first = cluster.agent("n1", "--policy", str(preset), slots=1)
        for command in (SHORT,) * SHORT_RUNS + (LONG,) * LONG_RUNS:
            first.wait(first.submit(*command), timeout_s=60)
        first.kill()
        first.start()
        blocker = first.submit("sleep", "600")
        first.await_state(blocker, "running")
        waiting = [first.submit(*command) for command in (SHORT, LONG, SHORT)]
        cluster.agent("n2", "--peer", first.listen, "--policy", str(preset), slots=1)
        first.wait(*waiting, timeout_s=60)
        shown = [first.show(task) for task in waiting]
        assert {task["node"] for task in shown} == {"n2"}
        started = sorted(shown, key=lambda task: float(task["started_at"]))
        assert [task["id"] for task in started] == [waiting[1], waiting[0], waiting[2]]
        assert first.call("stats")["counters"].get("policy_errors_total", 0) == 0
        first.call("cancel", tasks=[blocker], force=True)
        first.await_state(blocker, "cancelled")


def hastened(cluster: Cluster) -> bool:
    """Let a measurement compete with whatever else this machine does; no is the answer."""
    for pid, line in cluster.left_over().items():
        if "agent.speed" in line:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, pid, 0)
    return False


@pytest.mark.long
def test_the_speed_is_measured_once_kept_and_told() -> None:
    with Cluster() as cluster:
        del cluster.environment["PEERLOAD_SPEED"]
        first, second = cluster.linked(2)

        def speeds(socket: str) -> dict[str, float]:
            nodes = json.loads(cluster.cli(socket, "nodes", "--json").stdout)["nodes"]
            return {node["node"]: node["speed"] for node in nodes}

        def measured(state: Path) -> float:
            return float((state / "speed").read_text(encoding="ascii"))

        at_first = speeds(first.socket)
        for agent in (first, second):
            assert at_first[agent.node] == 1.0 or (agent.state / "speed").exists()
        second.kill()
        (second.state / "speed").write_text("2.5\n", encoding="ascii")
        second.start()
        wait_until(
            lambda: hastened(cluster) or (first.state / "speed").exists(), MEASURED_WITHIN_S, "n1 to be measured"
        )
        found = measured(first.state)
        wait_until(lambda: speeds(first.socket)["n1"] == found, what="n1 to know")
        written_at = (first.state / "speed").stat().st_mtime_ns
        wait_until(lambda: speeds(second.socket)["n1"] == found, what="n2 to hear of it")
        wait_until(lambda: speeds(first.socket)["n2"] == 2.5, what="n1 to hear of n2's")
        first.kill()
        first.start()
        assert speeds(first.socket)["n1"] == found
        assert (first.state / "speed").stat().st_mtime_ns == written_at
        first.kill()
        first.more += ["--speed", "4"]
        first.start()
        assert speeds(first.socket)["n1"] == 4.0
        assert measured(first.state) == found
