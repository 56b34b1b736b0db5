"""Power controls of a real agent: put back at its end, at its next start after a kill -9, and by `peerload power restore`."""

from __future__ import annotations

import json
import os
import signal

from tests.energy.test_controls import cpufreq, tree
from tests.integration.cluster import Cluster

SET = {"powersave", "900000"}


def test_settings_are_put_back_however_the_agent_ends() -> None:
    with Cluster() as cluster:
        root = cluster.directory / "cpufreq"
        before = cpufreq(root)
        config = cluster.directory / "energy.toml"
        agent = cluster.add("n1", "--config", str(config))

        def starts(*, controls: bool) -> None:
            wanted = 'cpu_governor = "powersave"\ncpu_max_mhz = 900\n' if controls else ""
            config.write_text(f'[energy]\ncpufreq = "{root}"\n{wanted}')
            agent.start()

        def stops() -> None:
            os.kill(agent.pid, signal.SIGTERM)
            agent.reap()

        starts(controls=True)
        assert {*tree(root).values()} == SET
        stops()
        assert tree(root) == before

        starts(controls=True)
        agent.kill()
        assert {*tree(root).values()} == SET
        starts(controls=False)
        assert tree(root) == before  # before it answers anybody
        stops()

        starts(controls=True)
        agent.kill()
        missed = agent.cli("power", "restore")  # that agent has a state directory of its own
        assert b"PEERLOAD_STATE=DIR" in missed.stderr
        state = {"PEERLOAD_STATE": str(agent.state)}
        told = [json.loads(agent.cli("power", "restore", "--json", env=state).stdout) for _ in range(2)]
        assert [one["restored"] for one in told] == [True, False]
        assert tree(root) == before
