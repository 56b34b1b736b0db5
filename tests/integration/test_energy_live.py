"""Real agents: a gate without cores places by energy, says what it compared, and wakes a node that is asleep."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from peerload.agent.peers.membership import ADDRESS_FILE, AddressFile
from peerload.agent.sensors.power import PROFILE_FILE, processor
from peerload.energy.profile import PowerProfile
from peerload.model.resources import PowerCurve, Quality
from tests.integration.cluster import Cluster
from tests.support import wait_until

if TYPE_CHECKING:
    from tests.integration.cluster import Agent

ENERGY = ("--policy", "energy")


def with_curve(agent: Agent, *watts: float) -> Agent:
    """A node whose profile was measured: these watts from idle to full load."""
    threads = max(os.cpu_count() or 1, 1)
    curve = PowerCurve(watts, threads, threads, quality=Quality.MEASURED)
    agent.state.mkdir(mode=0o700)
    (agent.state / PROFILE_FILE).write_bytes(msgspec.json.encode(PowerProfile(curve, processor())))
    return agent


def configured(cluster: Cluster, node: str, *more: str, toml: str, **how: Any) -> Agent:
    agent = cluster.add(node, *more, **how)
    path = agent.directory / "energy.toml"
    path.write_text(f"[energy]\n{toml}", encoding="utf-8")
    agent.more += ["--config", str(path)]
    return agent


@pytest.mark.long
def test_a_gate_places_by_the_joules_of_its_peers_and_wakes_one_that_sleeps() -> None:
    with Cluster() as cluster:
        pid_file = cluster.directory / "stopped"
        gate = configured(
            cluster, "gate", *ENERGY, slots=0, toml=f'resume_cmd = "kill -CONT $(cat {pid_file})"\n'
        ).start()
        dear = with_curve(cluster.add("dear", *ENERGY, "--peer", gate.listen), 10.0, 90.0).start()
        cheap = with_curve(
            configured(
                cluster,
                "cheap",
                *ENERGY,
                "--peer",
                gate.listen,
                toml=f'sleep_after = "3s"\nsuspend_cmd = "echo $PPID > {pid_file}; kill -STOP $PPID"\n',
            ),
            10.0,
            20.0,
        ).start()
        cluster.await_acquainted([gate, dear, cheap])

        def state(node: str) -> object:
            return next(one["state"] for one in gate.call("nodes")["nodes"] if one["node"] == node)

        task = gate.submit("true")
        assert gate.wait(task)[task]["node"] == "cheap"
        compared = {one["node"]: one for one in gate.call("why", task=task)["decision"]["compared"]}
        assert compared["cheap"]["joules"] < compared["dear"]["joules"]
        assert {one["quality"] for one in compared.values()} == {"measured"}
        wait_until(lambda: state("cheap") == "asleep", 60, "the idle node to sleep")
        dear.kill()
        wait_until(lambda: state("dear") == "dead", 60, "the other to be called dead")
        assert state("cheap") == "asleep"
        wait_until(lambda: AddressFile(gate.state / ADDRESS_FILE).asleep, 60, "it to be written down who sleeps")
        gate.kill()
        gate.start()  # nobody else can tell of it
        assert state("cheap") == "asleep"
        task = gate.submit("true")
        assert gate.wait(task)[task]["node"] == "cheap"
        os.kill(cheap.pid, signal.SIGCONT)  # if it has gone to sleep again
