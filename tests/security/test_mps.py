"""MPS in the service for all users: the daemon of a GPU runs as the user of its tasks, whom no other user joins."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.fakes import mps_control, nvml
from tests.gpu.cards import GIB, Cards, with_cards
from tests.security.service import ServiceCluster
from tests.security.users import ACCOUNTS, needs_root
from tests.support import wait_until

pytestmark = needs_root


@pytest.mark.long
def test_the_daemon_of_a_gpu_runs_as_the_user_of_its_tasks() -> None:
    with ServiceCluster() as cluster:
        cards = Cards(cluster.directory, count=1)
        nvml.library().parent.chmod(0o755)
        cluster.environment |= cards.environment | mps_control.install(cluster.directory)
        (cluster.directory / "mps").chmod(0o777)
        agent = cluster.node("ws1").start()
        with_cards(agent, 1)
        request: dict[str, Any] = {"gpus": 1, "gpu_mem_bytes": GIB, "gpu_share": "mps"}
        script = 'stat -c "%u %a" "$CUDA_MPS_PIPE_DIRECTORY"; ' + " ".join(mps_control.client(cluster.directory))
        task = cluster.submit(agent, "alice", script, request=request)
        wait_until(lambda: mps_control.servers(cluster.directory), what="a server")
        other = cluster.submit(agent, "bob", script, request=request)
        bob = cluster.user(agent, "bob")
        wait_until(lambda: "another user" in str(bob.call("why", task=other)), what="bob to wait")
        (cluster.directory / "done").touch()
        for user, one in (("alice", task), ("bob", other)):
            told = cluster.ended(agent, user, one)
            assert (told["exit_code"], told["out"].split("\n")[:2]) == (0, [f"{ACCOUNTS[user]} 700", "under MPS"])


@pytest.mark.long
@pytest.mark.rule("X2")
def test_a_task_of_another_node_has_its_daemon_where_only_chosen_programs_may_run() -> None:
    with ServiceCluster() as cluster:
        cards = Cards(cluster.directory, count=1)
        nvml.library().parent.chmod(0o755)
        cluster.environment |= mps_control.install(cluster.directory)
        (cluster.directory / "mps").chmod(0o777)
        first = cluster.node("ws1").start()
        cluster.environment |= cards.environment
        chosen = json.dumps([os.path.realpath("/bin/sh")])
        settings = f'users = "same-name"\nexec_allow = {chosen}\n'
        second = cluster.node("ws2", "--peer", first.listen, settings=settings).start()
        with_cards(second, 1)
        cluster.await_acquainted([first, second])
        request: dict[str, Any] = {"gpus": 1, "gpu_mem_bytes": GIB, "gpu_share": "mps"}
        (cluster.directory / "done").touch()
        script = " ".join(mps_control.client(cluster.directory))
        told = cluster.run(first, "alice", script, request=request, placement={"node": "ws2"}, directory=b"-")
        assert (told["exit_code"], told["node"], told["out"]) == (0, "ws2", "under MPS\n"), told
