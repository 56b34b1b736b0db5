"""A real agent with the real pynvml on cards that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.nvml import environment
from tests.gpu.cards import GIB, Cards, linked, with_cards
from tests.integration.cluster import Agent, Cluster, processes_with
from tests.support import wait_until
from tests.wording import Says

SHOWN = "echo $CUDA_VISIBLE_DEVICES; echo $CUDA_DEVICE_ORDER"


def test_grants_survive_an_agent_that_is_killed(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=8))
    blocking = [agent.submit("sleep", "600", request={"gpus": 1}) for _ in range(4)]
    for task in blocking:
        agent.await_state(task, "running")
    agent.kill()
    with_cards(agent.start())
    for task in blocking:
        agent.await_state(task, "running")
    waits = agent.submit("true", request={"gpus": 1})
    agent.submit("true")
    assert agent.wait(agent.submit("true"))
    assert agent.show(waits)["state"] == "queued"
    agent.call("cancel", tasks=[blocking[1]])
    assert agent.wait(waits)[waits]["exit_code"] == 0
    agent.call("cancel", tasks=blocking)


def test_a_foreign_process_counts(cluster: Cluster, cards: Cards) -> None:
    for number in range(3):
        cards.use(number, 999_000 + number, 20 * GIB)
    agent = with_cards(cluster.agent(slots=8))
    tasks = [agent.submit("sh", "-c", SHOWN, request={"gpus": 1}) for _ in range(3)]
    for how in agent.wait(*tasks).values():
        assert how["exit_code"] == 0
    assert {agent.output(task)[0].split()[0] for task in tasks} == {cards.name(3).encode()}
    small = agent.submit("sh", "-c", SHOWN, request={"gpus": 1, "gpu_mem_bytes": 1 * GIB, "gpu_prefer": ["1"]})
    agent.wait(small)
    assert agent.output(small)[0].split()[0] == cards.name(1).encode()
    only_there = {"gpus": 1, "gpu_mem_bytes": 10 * GIB, "gpu_prefer": ["0"], "gpu_wait": "queue"}
    large = agent.submit("sh", "-c", SHOWN, request=only_there)
    assert agent.show(large)["state"] == "queued"
    cards.use(0, 999_000, -1)  # the foreign process leaves: nothing is kept for it
    assert agent.wait(large)[large]["exit_code"] == 0


def test_a_card_that_another_agent_has_is_left_alone_and_its_tasks_go_there(cluster: Cluster, cards: Cards) -> None:
    first, second = linked(cluster, cards)
    shown = {node["node"]: node for node in second.call("nodes")["nodes"]}
    of_its_own = first.call("nodes")["nodes"][0]["gpus"]
    assert {"id", "model", "util", "mem_bytes", "mem_used_bytes", "tasks"} <= set(of_its_own[0])
    assert [set(gpu) for gpu in shown["n1"]["gpus"]] == [set(gpu) for gpu in of_its_own]
    assert (len(shown["n1"]["gpus"]), len(shown["n2"]["gpus"])) == (4, 0)
    wait_until(lambda: "another agent has it" in second.log_end(), what="n2 to find them taken")
    tasks = [second.submit("sh", "-c", SHOWN, request={"gpus": 1}) for _ in range(6)]
    for task, how in second.wait(*tasks).items():
        assert (how["node"], how["exit_code"]) == ("n1", 0)
        assert second.output(task)[0].startswith(cards.prefix.encode())
    assert first.runs


def test_a_preferred_model_that_is_idle_on_another_node_is_taken_there(cluster: Cluster, cards: Cards) -> None:
    cards.set(3, name="Fake-A100")
    agents: list[Agent] = []
    for name, excluded in (("n1", "[3]"), ("n2", "[0, 1, 2]")):
        agent = cluster.add(name, *(["--peer", agents[0].listen] if agents else []), slots=4)
        config = agent.directory / "gpus.toml"
        config.write_text(f"[gpu]\nexclude = {excluded}\n", encoding="utf-8")
        agent.more += ["--config", str(config)]
        agents.append(agent.start())
    first, second = with_cards(agents[0], 3), with_cards(agents[1], 1)
    cluster.await_acquainted([first, second])

    def is_told() -> bool:
        shown = {node["node"]: node["gpus"] for node in first.call("nodes")["nodes"]}
        return [gpu["health"] for gpu in shown["n2"]] == ["ok"]

    wait_until(is_told, what="n1 to know of the card of n2")
    request = {"gpus": 1, "gpu_prefer": ["*A100*"]}
    holds = first.submit("sleep", "600", request=request)
    first.await_state(holds, "running")
    assert first.show(holds)["node"] == "n2"
    here = first.submit("sh", "-c", SHOWN, request=request)  # that one is taken: another one here
    assert first.wait(here)[here]["node"] == "n1"
    first.call("cancel", tasks=[holds])


def test_what_no_node_can_ever_run_is_refused_with_the_nearest_miss(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=4))
    refused = agent.cli("submit", "-G9", "true")
    assert refused.returncode == 125
    told = refused.stderr.decode()
    assert Says.NEAREST("9 GPUs", "n1: 4 x 24 GiB, asked 9") in told
    assert "--wait-for-node" in told
    waits = agent.cli("submit", "-G9", "--wait-for-node", "true")
    assert waits.returncode == 0
    assert Says.NOBODY_EVER() in waits.stderr.decode()
    large = agent.cli("submit", "-G1", "--gpu-mem", "24G", "true")
    assert "of which tasks may have 21.1 GiB, asked 24 GiB" in large.stderr.decode()


def test_nodes_shows_cards_with_what_is_ours_and_foreign(cluster: Cluster, cards: Cards) -> None:
    cards.use(1, 999_001, 3 * GIB)
    agent = with_cards(cluster.agent(slots=4))
    task = agent.submit("sleep", "600", request={"gpus": 1, "gpu_mem_bytes": GIB, "gpu_prefer": ["0"]})
    agent.await_state(task, "running")

    def gpus() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = agent.call("nodes")["nodes"][0]["gpus"]
        return found

    def sleeping() -> list[int]:
        lines = processes_with(str(cluster.directory))
        return [pid for pid, line in lines.items() if line.strip() == "sleep 600"]

    wait_until(sleeping, what="the task's own program to run")
    (pid,) = sleeping()
    cards.use(0, pid, 2 * GIB)
    wait_until(lambda: gpus()[0]["mem_ours_bytes"] == 2 * GIB, what="the task's memory to be seen")
    wait_until(lambda: gpus()[1]["mem_foreign_bytes"] == 3 * GIB, what="the other's memory to be seen")
    assert [gpu["tasks"] for gpu in gpus()] == [1, 0, 0, 0]
    assert [gpu["mode"] for gpu in gpus()] == ["time", "time", "free", "free"]
    for words in (("nodes",), ("top", "--once")):
        table = agent.cli(*words).stdout.decode().splitlines()
        assert [line.split()[:3] for line in table if line.startswith("n1 ") and "Fake-A10" in line] == [
            ["n1", f"{n}", "Fake-A10"] for n in range(4)
        ]
    (gpu,) = json.loads(agent.cli("show", task, "--json").stdout)["live"]["gpus"]
    assert (gpu["index"], gpu["mem_bytes"], gpu["mem_promised_bytes"], gpu["tasks"]) == (0, 2 * GIB, GIB, 1)
    assert "GPU 0 2 GiB of 1 GiB" in agent.cli("show", task).stdout.decode()
    cards.set(2, lost=1)
    wait_until(lambda: gpus()[2]["health"] == "sick", what="the lost card to be noticed")
    assert agent.wait(agent.submit("true"))  # the cores go on
    agent.call("cancel", tasks=[task])


def test_a_task_whose_card_has_failed_runs_again_on_another(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=4))
    failed = cluster.directory / "failed"
    fails_first = f"test $PEERLOAD_ATTEMPT = 2 || {{ while ! test -e {failed}; do sleep 0.01; done; exit 1; }}"
    request = {"gpus": 1, "gpu_prefer": ["0"]}
    task = agent.submit("sh", "-c", fails_first, request=request)
    once = agent.submit("sh", "-c", fails_first, request=request | {"gpu_prefer": ["1"]}, guarantee="once")
    for one in (task, once):
        agent.await_state(one, "running")
    cards.more = ["xid 0 79 1"]
    cards.set(1, lost=1)
    failed.touch()
    ended = agent.wait(task, once)
    assert ended[task]["exit_code"] == 0
    shown = agent.show(task)
    assert (shown["attempt"], shown["lost"], shown["failures"]) == (2, 1, 0)
    (why,) = [step["reason"] for step in shown["history"] if step["state"] == "queued" and step["attempt"] == 1]
    assert "GPU 0 (Fake-A10)" in why
    assert "error 79" in why
    assert ended[once]["exit_code"] == 1
    assert "GPU 1 (Fake-A10)" in ended[once]["reason"]


def test_other_devices_are_given_one_by_one(cluster: Cluster) -> None:
    agent = cluster.add("n1", slots=8)
    config = agent.directory / "devices.toml"
    config.write_text(
        '[[device]]\nkind = "fpga"\nids = ["a", "b"]\nenv = { BOARDS = "--board={ids}" }\n', encoding="utf-8"
    )
    agent.more += ["--config", str(config)]
    agent.start()
    holds = agent.submit("sleep", "600", request={"devices": [["fpga", 1]]})
    agent.await_state(holds, "running")
    one = agent.submit("sh", "-c", "echo $BOARDS $PEERLOAD_FPGA", request={"devices": [["fpga", 1]]})
    both = agent.submit("sh", "-c", "echo $BOARDS $PEERLOAD_FPGA", request={"devices": [["fpga", 2]]})
    none = agent.submit("sh", "-c", "echo ${PEERLOAD_FPGA-none}")
    agent.wait(one, none)
    assert agent.output(one)[0] == b"--board=b b\n"
    assert agent.output(none)[0] == b"none\n"
    assert agent.show(both)["state"] == "queued"
    agent.call("cancel", tasks=[holds])
    agent.wait(both)
    assert agent.output(both)[0] == b"--board=a,b a,b\n"
    assert agent.cli("submit", "-l", "fpga=3", "true").returncode == 125


def test_an_agent_without_a_driver_is_as_any_other(cluster: Cluster) -> None:
    cluster.environment |= environment(Path("/nowhere"))
    agent = cluster.agent(slots=2)
    assert agent.call("nodes")["nodes"][0]["gpus"] == []
    assert agent.wait(agent.submit("true"))
    wait_until(lambda: "no GPUs: reason=the driver does not work" in agent.log_end(), what="that to be said")
    assert b"no GPU" in agent.cli("submit", "-G1", "true").stderr


def test_a_recording_of_a_node_with_cards_is_decided_again(cluster: Cluster, cards: Cards) -> None:
    recording = cluster.directory / "recording"
    agent = cluster.agent("n1", "--record", str(recording), slots=4)
    with_cards(agent)
    tasks = [agent.submit("true", request={"gpus": 1 + number % 3}) for number in range(6)]
    agent.wait(*tasks)
    agent.cli("down", "--all")
    agent.reap()
    replayed = cluster.cli(agent.socket, "replay", str(recording))
    assert replayed.returncode == 0, replayed.stdout.decode() + replayed.stderr.decode()
