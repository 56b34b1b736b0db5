"""Tasks that share a GPU under MPS, by a stand-in for NVIDIA's control daemon (tests/fakes/mps_control.py)."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest

from tests.fakes import mps_control
from tests.gpu.cards import GIB, Cards, with_cards
from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until

ASKED: dict[str, object] = {"gpus": 1, "gpu_mem_bytes": GIB, "gpu_share": "mps"}


@pytest.fixture
def mps(cluster: Cluster, cards: Cards) -> Path:
    cluster.environment |= mps_control.install(cluster.directory)
    return cluster.directory


def modes(agent: Agent) -> list[str]:
    return [gpu["mode"] for gpu in agent.call("nodes")["nodes"][0]["gpus"]]


def told(agent: Agent, state: str, words: str = "") -> bool:
    events = agent.call("events")["events"]
    return any(one["what"] == "gpu" and one["state"] == state and words in one["reason"] for one in events)


def clients(file: Path) -> int:
    """How many clients a keeper has told of."""
    try:
        return len(json.loads(file.read_text(encoding="ascii"))["clients"])
    except (OSError, ValueError):
        return 0


def test_tasks_share_a_daemon_of_their_own_and_none_is_left(cluster: Cluster, cards: Cards, mps: Path) -> None:
    agent = with_cards(cluster.agent(slots=8))
    command = [*mps_control.client(mps)]
    tasks = [agent.submit(*command, request={**ASKED, "gpu_prefer": ["1"], "gpu_pct": 30}) for _ in range(3)]
    for task in tasks:
        agent.await_state(task, "running")
    wait_until(lambda: len(mps_control.servers(mps)) == 1, what="one server")
    assert modes(agent) == ["free", "mps", "free", "free"]
    agent.kill()  # the daemon goes on, and so do its clients
    agent.start()
    with_cards(agent)
    wait_until(lambda: modes(agent)[1] == "mps", what="the GPU to be held under MPS again")
    assert len(mps_control.servers(mps)) == 1
    (mps / "done").touch()
    assert [one["exit_code"] for one in agent.wait(*tasks).values()] == [0, 0, 0]
    assert all(agent.output(task)[0] == b"under MPS\n" for task in tasks)
    assert agent.cli("down", "--all").returncode == 0
    wait_until(lambda: not mps_control.servers(mps), what="the server to be gone")


def test_a_task_sees_the_daemon_and_its_bounds(cluster: Cluster, cards: Cards, mps: Path) -> None:
    agent = with_cards(cluster.agent(slots=8))
    task = agent.submit("env", request={**ASKED, "gpu_pct": 25})
    assert agent.wait(task)[task]["exit_code"] == 0
    seen = dict(line.split("=", 1) for line in agent.output(task)[0].decode().splitlines() if "=" in line)
    assert (seen["PEERLOAD_GPU_MODE"], seen["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("mps", "25")
    assert seen["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1024M"
    assert len(seen["CUDA_MPS_PIPE_DIRECTORY"]) < 100
    assert Path(seen["CUDA_MPS_PIPE_DIRECTORY"]).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [4, pytest.param(10, marks=pytest.mark.long)])
def test_a_server_that_is_killed_is_charged_to_no_task(cluster: Cluster, cards: Cards, mps: Path, number: int) -> None:
    agent = with_cards(cluster.agent(slots=16))
    # Those that ask for MPS alone would wait for a minute; these share in turns until then.
    request = {"gpus": 1, "gpu_mem_bytes": GIB // 8, "gpu_fraction": 0.1}
    tasks = [agent.submit(*mps_control.client(mps), request=request) for _ in range(number)]
    for task in tasks:
        agent.await_state(task, "running")
    assert all(agent.show(task)["attempt"] == 1 for task in tasks)
    keepers = Path(agent.state) / "mps"
    wait_until(lambda: sum(map(clients, keepers.glob("*-0"))) == number, what="the daemons to know their clients")
    for pid in mps_control.servers(mps):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: told(agent, "mps-failed"), what="the failure to be told")
    wait_until(lambda: all(agent.show(task)["attempt"] == 2 for task in tasks), what="second attempts")
    (mps / "done").touch()
    assert [one["exit_code"] for one in agent.wait(*tasks).values()] == [0] * number
    assert [agent.show(task)["failures"] for task in tasks] == [0] * number


@pytest.mark.parametrize("how", ["refuse", "foreign"])
def test_without_a_daemon_tasks_share_in_turns_unless_they_ask_for_mps(
    cluster: Cluster, cards: Cards, mps: Path, how: str
) -> None:
    (mps / "mps" / how).touch()
    agent = with_cards(cluster.agent(slots=8))
    (mps / "done").touch()
    task = agent.submit(*mps_control.client(mps), request={"gpus": 1, "gpu_mem_bytes": GIB})
    assert agent.wait(task)[task]["exit_code"] == 0
    assert agent.output(task)[0] == b"without MPS\n"
    assert told(agent, "mps-failed")
    waits = agent.submit(*mps_control.client(mps), request={**ASKED, "gpu_prefer": ["0"], "gpu_wait": "queue"})
    wait_until(lambda: "MPS" in str(agent.call("why", task=waits)), what="the reason")
    assert agent.show(waits)["state"] == "queued"


def test_a_task_that_runs_without_its_daemon_is_told(cluster: Cluster, cards: Cards, mps: Path) -> None:
    agent = with_cards(cluster.agent(slots=8))
    task = agent.submit("sh", "-c", "echo $$; exec sleep 600", request={**ASKED, "gpu_prefer": ["0"]})
    wait_until(lambda: agent.output(task)[0], what="its process number")
    cards.use(0, int(agent.output(task)[0]), GIB)
    wait_until(lambda: told(agent, "mps-unused"), what="the event")
    assert agent.call("usage", tasks=[task])["tasks"][0]["gpus"][0]["mps"] is False


def test_a_daemon_that_dies_or_a_server_with_a_fault_is_told_and_harms_no_task_that_works(
    cluster: Cluster, cards: Cards, mps: Path
) -> None:
    agent = with_cards(cluster.agent(slots=8))
    keepers = Path(agent.state) / "mps"
    for how in ("dies", "fault"):
        number = ["dies", "fault"].index(how)
        task = agent.submit(*mps_control.client(mps), request={**ASKED, "gpu_prefer": [str(number)]})
        wait_until(lambda: sum(map(clients, keepers.glob("*-0"))) == 1, what="the daemon to know its client")
        if how == "dies":
            os.kill(int((mps / "mps" / "daemon").read_text(encoding="ascii")), signal.SIGKILL)
        else:
            (mps / "mps" / "fault").touch()
        wait_until(functools.partial(told, agent, "mps-failed", f"GPU {number}"), what="the failure")
        if how == "dies":
            (mps / "done").touch()
            assert agent.wait(task)[task]["exit_code"] == 0
            (mps / "done").unlink()


def test_a_task_that_is_cancelled_while_its_daemon_is_started_never_runs(
    cluster: Cluster, cards: Cards, mps: Path
) -> None:
    control, held, ran = mps / "bin" / mps_control.NAME, mps / "held", mps / "ran"
    wait = f"while [ -e {held} ]; do sleep 0.1; done"
    control.write_text(control.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{wait}\n"))
    held.touch()
    agent = with_cards(cluster.agent(slots=8))
    task = agent.submit("touch", str(ran), request=ASKED)
    wait_until(lambda: list((agent.state / "mps").glob("*-0")), what="the daemon to be started")
    assert agent.cli("cancel", task).returncode == 0
    held.unlink()
    wait_until(lambda: told(agent, "mps"), what="the daemon to be up")
    assert agent.cli("cancel", "--wait", task).returncode == 0
    assert modes(agent)[0] == "free"
    assert (agent.show(task)["state"], ran.exists()) == ("cancelled", False)


def test_a_daemon_that_has_no_place_is_a_failure_of_mps_and_no_bug(cluster: Cluster, cards: Cards, mps: Path) -> None:
    agent = with_cards(cluster.agent(slots=8))
    (agent.state / "mps").write_text("")  # as a full disk, no directory can be made
    task = agent.submit("true", request={"gpus": 1, "gpu_mem_bytes": GIB})
    assert agent.wait(task)[task]["exit_code"] == 0
    assert told(agent, "mps-failed", "cannot be made")
