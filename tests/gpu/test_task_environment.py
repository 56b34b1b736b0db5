"""What tasks see of the devices they were given, and what is said when they use others."""

from __future__ import annotations

import json

import pytest

from tests.gpu.cards import GIB, Cards, with_cards
from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until
from tests.wording import Says

SHOW = (
    "import json, os; names = ('CUDA_', 'PEERLOAD_GPU', 'XLA', 'TF_', 'OMP');"
    "print(json.dumps({name: value for name, value in os.environ.items() if name.startswith(names)}))"
)
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@pytest.fixture
def cards(cards: Cards, cluster: Cluster) -> Cards:
    (cluster.directory / "on").mkdir()
    cards.more = [f"procs {cluster.directory / 'on'}"]
    cards.write()
    return cards


def seen(agent: Agent, request: dict[str, object]) -> dict[str, str]:
    task = agent.submit("python3", "-c", SHOW, request=request)
    assert agent.wait(task)[task]["exit_code"] == 0, agent.output(task)
    found: dict[str, str] = json.loads(agent.output(task)[0])
    return found


def test_a_task_sees_what_it_was_given_and_how(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=8))
    none = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "", "PEERLOAD_GPUS": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert seen(agent, {}) == none
    asked = {"gpus": 2, "gpu_mem_bytes": 6 * GIB, "gpu_prefer": ["3", "1"], "cpus": 2.5}
    assert seen(agent, asked) == {
        **none, **SHARED, "CUDA_VISIBLE_DEVICES": f"{cards.name(3)},{cards.name(1)}", "PEERLOAD_GPUS": "3,1",
        "PEERLOAD_GPU_MEM_MB": "6144", "PEERLOAD_GPU_MODE": "time", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25",
        "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    alone = seen(agent, {"gpus": 1, "gpu_share": "exclusive", "gpu_prefer": ["2"]})
    assert (alone["PEERLOAD_GPU_MODE"], alone["CUDA_VISIBLE_DEVICES"]) == ("exclusive", cards.name(2))
    assert not SHARED.keys() & alone.keys()


def test_cpu_work_goes_on_while_the_driver_hangs_and_the_agent_stops(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=8))
    assert seen(agent, {"gpus": 1})["PEERLOAD_GPUS"]
    cards.more.append("hang")
    cards.write()
    asks = agent.submit("true", request={"gpus": 1})
    cards.use(0, 999_999, GIB)
    wait_until(lambda: agent.call("nodes")["nodes"][0]["gpus"][0]["health"] == "unknown", 20.0, "unknown")
    for _ in range(3):
        assert seen(agent, {})["CUDA_VISIBLE_DEVICES"] == ""
    cards.more.remove("hang")
    cards.write()
    assert agent.wait(asks)[asks]["exit_code"] == 0
    cards.more.append("hang")
    cards.write()
    assert agent.submit("true", request={"gpus": 4, "gpu_mem_bytes": GIB})
    wait_until(lambda: agent.call("nodes")["nodes"][0]["gpus"][0]["health"] == "unknown", what="unknown again")
    assert agent.cli("down", "--all").returncode == 0
    assert agent.reap() == 0


def test_why_there_are_no_gpus_is_shown(cluster: Cluster, cards: Cards) -> None:
    cards.more.append("init 9")
    cards.write()
    agent = cluster.agent(slots=2)
    why = "the driver does not work: Driver Not Loaded"
    wait_until(lambda: agent.call("info")["no_gpus_because"] == why, what="the driver to have answered")
    assert f"n1 has no GPUs: {why}" in agent.cli("nodes").stdout.decode()
    assert agent.wait(agent.submit("true"))


@pytest.mark.long
def test_a_driver_that_hangs_at_the_start_is_waited_for_while_others_work(cluster: Cluster, cards: Cards) -> None:
    cards.more.append("hang")
    cards.write()
    agent = cluster.agent(slots=8)
    assert seen(agent, {})["CUDA_VISIBLE_DEVICES"] == ""
    assert Says.DRIVER_LATE().encode() in agent.cli("nodes").stdout
    agent.kill()  # nor does it keep an agent from being killed and started
    agent.start()
    assert seen(agent, {})["CUDA_VISIBLE_DEVICES"] == ""
    cards.more.remove("hang")
    cards.write()
    wait_until(lambda: len(agent.call("nodes")["nodes"][0]["gpus"]) == 4, 60.0, "the GPUs")
    assert seen(agent, {"gpus": 4})["PEERLOAD_GPUS"] == "0,1,2,3"


@pytest.mark.long
def test_gpus_whose_driver_is_unloaded_are_there_and_unknown(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=2))
    task = agent.submit("sleep", "600", request={"gpus": 1})
    agent.await_state(task, "running")
    cards.more.append("init 9")
    cards.write()
    wait_until(lambda: agent.call("nodes")["nodes"][0]["gpus"][0]["health"] == "unknown", 20.0, "unknown")
    wait_until(lambda: b"its driver has been unloaded" in agent.cli("events").stdout, 20.0, "that to be told")
    wait_until(lambda: "no GPUs: " in agent.log_end(), 20.0, "it to be looked for again")
    node = agent.call("nodes")["nodes"][0]
    assert (len(node["gpus"]), node["no_gpus_because"]) == (4, None)
    assert "has no GPUs" not in agent.cli("nodes").stdout.decode()
    cards.more.remove("init 9")
    cards.write()
    wait_until(lambda: agent.call("nodes")["nodes"][0]["gpus"][0]["health"] == "ok", 20.0, "the driver to be back")
    agent.call("cancel", tasks=[task])
