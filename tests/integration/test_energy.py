"""Energy accounts of a real agent on a played tree of counters, over wraps and a kill -9."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from tests.fakes.power_tree import PowerTree
from tests.integration.cluster import Cluster
from tests.support import wait_until

WATTS = 50.0
RANGE_J = 400.0


@pytest.mark.long
@pytest.mark.timed
def test_an_agent_counts_what_is_drawn_over_wraps_and_a_kill() -> None:
    with Cluster() as cluster:
        tree = PowerTree(cluster.directory / "tree", range_uj=int(RANGE_J * 1e6))
        tree.zone("intel-rapl:0", "package-0", tdp_w=40.0)
        config = cluster.directory / "energy.toml"
        config.write_text(tree.settings())
        is_over = threading.Event()
        drawn: list[tuple[float, float]] = []

        def draw() -> None:
            began_s, joules = time.monotonic(), 0.0
            while not is_over.wait(0.05):
                due = (time.monotonic() - began_s) * WATTS - joules
                tree.draw(due)
                joules += due
                drawn.append((time.monotonic(), joules))

        writer = threading.Thread(target=draw)
        writer.start()
        try:
            agent = cluster.agent("n1", "--config", str(config))

            def counted() -> float:
                return float(agent.call("energy")["joules"] or 0.0)

            wait_until(lambda: counted() > 0)
            first_j, first_s = counted(), time.monotonic()
            tasks = [agent.submit("sh", "-c", "timeout 6 yes >/dev/null || true") for _ in range(4)]
            wait_until(lambda: counted() > first_j + 1.2 * RANGE_J)
            os.kill(agent.pid, signal.SIGKILL)
            agent.reap()
            agent.start()
            agent.wait(*tasks)
            wait_until(lambda: counted() > first_j + 3.2 * RANGE_J)
            joules, seconds = counted() - first_j, time.monotonic() - first_s
            told = agent.call("energy")
        finally:
            is_over.set()
            writer.join()
        # What is counted is one sample old at most on either side.
        assert joules == pytest.approx(seconds * WATTS, abs=2 * 2.5 * WATTS)
        parts = told["tasks_joules"] + told["other_joules"] + told["idle_joules"]
        assert parts == pytest.approx(told["joules"], rel=1e-6)
        assert (told["quality"], told["scope"], told["source"]) == ("measured", "package", "powercap")
        assert told["gap_s"] < 0.5  # between the first two looks at the counter
        for task in tasks:
            usage = agent.show(task)["usage"]
            assert usage["joules"] > 0
            assert (usage["energy_quality"], usage["energy_scope"]) == ("derived", "package")
        rows = [json.loads(line) for line in agent.cli("energy", "--task", "--json").stdout.splitlines()]
        assert {row["task"] for row in rows} == set(tasks)
        (user,) = [json.loads(line) for line in agent.cli("energy", "--user", "--json").stdout.splitlines()]
        assert user["joules"] == pytest.approx(sum(row["joules"] for row in rows))
