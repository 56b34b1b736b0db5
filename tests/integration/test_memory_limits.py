"""Agents: a task that takes more memory than it asked for is ended and named, here and elsewhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.in_process import cli
from tests.integration.cluster import Agent, Cluster, without_waits
from tests.integration.shared import restart
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

TAKES = "x = b'1' * (100 << 20)"


@pytest.fixture(scope="module")
def agents() -> Iterator[list[Agent]]:
    with Cluster() as cluster:
        yield cluster.linked(2, slots=2)


@pytest.mark.parametrize("node", ["n1", "n2"])
@pytest.mark.bad_input("memory-bomb")
def test_who_takes_more_than_asked_for_is_named_everywhere(agents: list[Agent], node: str) -> None:
    home, says = agents[0], Says.OUT_OF_MEMORY(node, "64.0 MiB", "")
    done = home.cli("run", "-w", node, "--mem", "64M", "python3", "-c", TAKES)
    # Where groups limit it, it is killed; where each process is limited, it gives up itself.
    assert done.returncode in (1, 137)
    assert says in done.stderr.decode()
    task = home.show("@")
    assert (task["state"], task["node"], task["out_of"], task["attempt"]) == ("failed", node, "memory", 1)
    assert task["reason"].startswith(says)
    assert 0 < task["usage"]["memory_bytes_max"] <= 64 << 20
    name = task["id"]
    for words in (("show", name), ("ls",), ("wait", name), ("events", name)):
        told = cli(home, *words).stdout.decode()
        assert says in told, (words, told)
    assert json.loads(cli(home, "wait", "--json", name).stdout)["out_of"] == "memory"


def test_who_keeps_to_it_is_not_touched(agents: list[Agent]) -> None:
    done = agents[0].cli("run", "--mem", "64M", "sh", "-c", "echo $PEERLOAD_MEM_BYTES")
    assert (done.returncode, done.stdout) == (0, b"%d\n" % (64 << 20))
    done = agents[0].cli("run", "python3", "-c", TAKES)
    assert (done.returncode, without_waits(done.stderr)) == (0, b"")
    task = agents[0].show("@")
    assert (task["out_of"], task["reason"]) == (None, "ended")


def test_the_reason_outlives_agent_and_launcher(agents: list[Agent]) -> None:
    home = agents[0]
    name = home.submit("python3", "-c", TAKES, request={"mem_bytes": 64 << 20})
    home.wait(name)
    before = home.show(name)
    launcher = home.launcher_pid
    restart(agents)
    assert home.launcher_pid == launcher
    assert home.show(name) == before


@pytest.mark.rule("X4")
def test_how_memory_is_limited_is_told(agents: list[Agent]) -> None:
    for agent in agents:
        how = agent.call("info")["memory_limits"]
        assert how in {"cgroup2", "cgroup1", "rlimit"}
        words = f"memory={how}"
        wait_until(lambda log=agent.log, w=words: w in log.read_text(encoding="utf-8"), what="it to be logged")  # type: ignore[misc]
