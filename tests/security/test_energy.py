"""Energy in the service for all users: root reads the counters, users see watts, and only administrators change the power profile."""

from __future__ import annotations

import pytest

from peerload.model.errors import NotAllowed
from tests.fakes.power_tree import PowerTree
from tests.security.users import ADMINS, SystemCluster, needs_root
from tests.support import wait_until

pytestmark = needs_root


@pytest.mark.long
def test_counters_that_the_agent_cannot_read_come_from_its_launcher() -> None:
    with SystemCluster() as cluster:
        tree = PowerTree(cluster.directory / "tree")
        counter = tree.zone("intel-rapl:0", "package-0", tdp_w=100.0) / "energy_uj"
        agent = cluster.system("n1", settings='[energy]\npowercap = "/nonexistent"\nhwmon = "/nonexistent"\n')
        agent.launcher_more = ("--powercap", str(tree.powercap))
        agent.start()
        alice, carol = cluster.user(agent, "alice"), cluster.user(agent, "carol", (ADMINS,))

        def is_measured() -> bool:
            tree.draw(0.05)
            counter.chmod(0o400)
            return alice.call("power")["source"] == "powercap" and (alice.call("energy")["joules"] or 0.0) > 0

        wait_until(is_measured)
        assert alice.call("energy")["quality"] == "measured"
        profile = {"measured": [(0, 10.0, 0.0, 0.0), (2, 20.0, 0.0, 2.0)], "cores": 2, "threads": 2}
        assert alice.refused("power-profile", **profile)[0] == NotAllowed.code
        assert carol.call("power-profile", **profile)["watts"] == [10.0, 20.0]
        wait_until(lambda: alice.call("power")["curve"]["quality"] == "measured")
