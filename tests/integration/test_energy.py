"""Energy accounts of a real agent on a played tree of counters, over wraps and a kill -9."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time

import pytest

from tests.fakes.power_tree import PowerTree
from tests.integration.cluster import Agent, Cluster
from tests.integration.shared import restart
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


BUSY = "trap '' TERM; echo up; while :; do :; done"


def is_busy(home: Agent, task: str) -> bool:
    return bool(home.output(task)[0])


@pytest.mark.long
def test_what_cancelled_tasks_used_is_theirs_also_elsewhere_and_over_a_kill() -> None:
    """One here and one elsewhere end after their home was killed, two more while it is there."""
    with Cluster() as cluster:
        home, other = cluster.linked(2, slots=2)
        where: dict[str, str] = {}
        for _ in range(2):
            tasks = [home.submit("sh", "-c", BUSY, placement={"node": agent.node}) for agent in (home, other)]
            for task in tasks:
                wait_until(functools.partial(is_busy, home, task), what="it to be busy")
            where |= dict(zip(tasks, (home.node, other.node), strict=True))
            if len(where) == 2:
                home.cli("cancel", *tasks)  # they do not obey before they are killed
                restart([home, other])
            else:
                home.cli("cancel", "--wait", "--force", *tasks)

        def used() -> dict[str, float]:
            rows = [json.loads(line) for line in home.cli("energy", "--task", "--json").stdout.splitlines()]
            return {row["task"]: row["joules"] for row in rows if row["joules"] is not None}

        wait_until(lambda: set(used()) == set(where), what="the joules of all four to be known")
        assert min(used().values()) > 0
        for task, node in where.items():
            shown = home.show(task)
            assert (shown["state"], shown["exit_code"], shown["node"]) == ("cancelled", None, node)
            assert shown["usage"]["user_s"] + shown["usage"]["system_s"] > 0
            assert shown["usage"]["energy_quality"] == "estimated"
