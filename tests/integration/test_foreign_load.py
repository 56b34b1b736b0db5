"""What other programs keep busy is seen by a real agent, takes its slots, and keeps none of its tasks from starting."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Cluster
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

HOG = ["timeout", "60", "sh", "-c", "while :; do :; done"]


@contextlib.contextmanager
def hogs() -> Iterator[None]:
    """Programs that keep every core busy and are no tasks of anybody."""
    started = [subprocess.Popen(HOG) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait()


@pytest.mark.long
def test_a_machine_that_others_keep_busy_takes_no_guests_and_runs_its_own_tasks() -> None:
    with Cluster() as cluster:
        cluster.environment["PEERLOAD_LOAD_FOREIGN"] = "count"
        agent = cluster.agent(slots=2)
        with hogs():
            wait_until(
                lambda: agent.call("nodes")["nodes"][0]["slots_foreign"] == 2, 60, "foreign load to fill the slots"
            )
            (node,) = agent.call("nodes")["nodes"]
            assert (node["load"], node["region"]) == (1.0, "overloaded")
            assert node["cpus_foreign"] > 0.5
            task = agent.submit("true")
            assert agent.wait(task)[task]["exit_code"] == 0
