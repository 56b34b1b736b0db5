"""`peerload why` with three agents: a home without GPUs, one with four (played), and one that is drained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs_tables import section
from tests.fakes.nvml import environment
from tests.gpu.cards import Cards
from tests.in_process import cli
from tests.integration.cluster import PATH, Agent, Cluster
from tests.integration.shared import end_all
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TYPED = ("submit", "-d", "-", "-G1", "--gpu-mem", "12G", "--gpu-prefer", "0", "--gpu-wait", "schedule", "--")


class Lab:
    """n1: the home, with one slot; gpu1: four GPUs; lab4: drained."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cards = Cards(cluster.directory)
        nothing = environment(Path("/nowhere"))
        cluster.environment |= self.cards.environment
        config = cluster.directory / "gpu1.toml"
        config.write_text("[gpu]\nsettle_s = 3600\n", encoding="utf-8")  # what is alone on a card stays alone
        self.gpu1 = cluster.agent("gpu1", "--config", str(config), slots=8)
        cluster.environment |= nothing
        self.home = cluster.add("n1", "--peer", self.gpu1.listen, slots=1).start()
        self.lab4 = cluster.add("lab4", "--peer", self.gpu1.listen, slots=4).start()
        cluster.await_acquainted([self.home, self.gpu1, self.lab4])
        cli(self.lab4, "drain", "--reason", "new PSU")
        wait_until(lambda: self.node("lab4")["drained"], what="the drain to be heard of")
        wait_until(lambda: len(self.node("gpu1")["gpus"]) == len(self.cards.cards), what="the GPUs to be heard of")
        tools = cluster.directory / "tools"
        tools.mkdir()
        (tools / "nvidia-smi").write_text('#!/bin/sh\necho "GPU $PEERLOAD_GPUS: $1"\n', encoding="utf-8")
        (tools / "nvidia-smi").chmod(0o755)
        self.path = f"{tools}:{PATH}"

    def node(self, name: str) -> dict[str, Any]:
        (found,) = [node for node in self.home.call("nodes")["nodes"] if node["node"] == name]
        assert isinstance(found, dict)
        return found

    def submit(self, *words: str, at: Agent | None = None) -> str:
        done = cli(at or self.home, *words, env={"PATH": self.path})
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def why(self, ref: str = "@") -> list[str]:
        done = cli(self.home, "why", ref)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().splitlines()

    def why_json(self, ref: str = "@") -> dict[str, Any]:
        told = json.loads(cli(self.home, "why", ref, "--json").stdout)
        assert isinstance(told, dict)
        return told

    def reasons(self, ref: str = "@") -> dict[str, tuple[bool | None, bool | None, str]]:
        return {node["node"]: (node["can_ever"], node["now"], node["reason"]) for node in self.why_json(ref)["nodes"]}

    def fill(self, count: int = 4) -> list[str]:
        """As many tasks on gpu1, submitted there, each alone on a card."""
        tasks = [self.gpu1.submit("sleep", "120", request={"gpus": 1}) for _ in range(count)]
        for task in tasks:
            self.gpu1.await_state(task, "running")
        return tasks


@pytest.fixture(name="shared", scope="module")
def fixture_shared() -> Iterator[Lab]:
    with Cluster() as cluster:
        yield Lab(cluster)


@pytest.fixture(name="lab")
def fixture_lab(shared: Lab) -> Iterator[Lab]:
    """The same for all tests, with nothing to do."""
    yield shared
    end_all(shared.home, shared.gpu1)
    wait_until(lambda: not shared.node("gpu1")["tasks_running"], what="gpu1 to be free")
    wait_until(lambda: not any(gpu["tasks"] for gpu in shared.node("gpu1")["gpus"]), what="its GPUs to be free")


def test_where_a_task_went_and_on_which_card(lab: Lab) -> None:
    task = lab.submit(*TYPED, "nvidia-smi", "-L")
    lab.home.wait(task)
    assert lab.home.output(task)[0] == b"GPU 0: -L\n"
    told = lab.why_json()
    page = section("json.md", "## why")
    listed = re.findall(r"^\| `([a-z_ ]+)` \|", page, re.MULTILINE)
    assert set(told) - {"v"} == {key for keys in listed for key in keys.split()}
    assert (told["state"], told["node"], told["devices"], told["nodes"]) == ("done", "gpu1", ["GPU 0 (Fake-A10)"], [])
    said = lab.why()
    assert said[0].startswith(f"{task} ")
    assert "gpu1" in said[1]
    assert "GPU 0 (Fake-A10)" in said[2]
    assert lab.home.show(task)["devices"] == [lab.cards.id(0)]


@pytest.mark.long
def test_a_task_that_runs_elsewhere_shows_its_cards_at_home_also_after_a_restart(lab: Lab) -> None:
    task = lab.home.submit("sleep", "120", request={"gpus": 2}, directory=b"-")
    shown = lab.home.await_state(task, "running")
    assert shown["device_names"] == ["GPU 0 (Fake-A10)", "GPU 1 (Fake-A10)"]
    assert ", ".join(shown["device_names"]) in shown["reason"]
    (listed,) = json.loads(cli(lab.home, "ls", "--json").stdout)["tasks"]
    assert listed["device_names"] == shown["device_names"]
    lab.home.kill()
    lab.home.start()
    lab.home.await_state(task, "running")
    wait_until(lambda: lab.home.show(task)["device_names"] == shown["device_names"], what="the cards to be told again")
    lab.home.call("cancel", tasks=[task])


def test_a_reason_for_every_node(lab: Lab) -> None:
    blocking = lab.fill(count=3)
    own = lab.home.submit("sleep", "120", request={"gpus": 1}, directory=b"-")
    lab.home.await_state(own, "running")
    wait_until(lambda: all(gpu["tasks"] for gpu in lab.node("gpu1")["gpus"]), what="the full GPUs to be heard of")
    task = lab.submit(*TYPED, "nvidia-smi", "-L")
    wait_until(lambda: lab.why_json()["node"] == "gpu1", what="it to be handed over")
    found = lab.reasons()
    assert found["n1"] == (False, None, "no GPU")
    assert found["lab4"] == (False, None, "no GPU, drained")
    assert found["gpu1"][:2] == (True, False)
    assert "4 of 4 GPUs" in found["gpu1"][2]
    assert found["gpu1"][2].endswith(f"{own} (1)")
    told = lab.why_json()
    assert told["could_ever"] == 1
    assert told["oldest_s"] >= told["freshest_s"] >= 0.0
    said = lab.why()
    assert [line.split()[0] for line in said[1:5]] == ["accepted", "NODE", "n1", "gpu1"]
    assert sum("waits" in line for line in said) == 1
    lab.gpu1.call("cancel", tasks=[blocking[2]])
    lab.home.wait(task)
    assert lab.home.output(task)[0] == b"GPU 2: -L\n"
    lab.gpu1.call("cancel", tasks=blocking)
    lab.home.call("cancel", tasks=[own])


@pytest.mark.long
def test_drained_dead_and_full(lab: Lab) -> None:
    blocking = lab.submit("submit", "-d", "-", "--local", "sleep", "120")
    lab.home.await_state(blocking, "running")
    lab.submit("submit", "-d", "-", "-x", "gpu1", "true")
    found = lab.reasons()
    assert (found["n1"][:2], found["lab4"][:2], found["gpu1"][:2]) == ((True, False), (True, False), (False, None))
    assert found["n1"][2].endswith(blocking)
    assert "new PSU" in found["lab4"][2]
    assert lab.why_json()["change"] == {"words": "without -x gpu1", "node": "gpu1"}
    lab.lab4.kill()
    wait_until(lambda: lab.reasons()["lab4"][2].startswith(("suspect", "dead")), what="its loss to be noticed")
    assert lab.reasons()["lab4"][:2] == (True, False)
    lab.lab4.start()
    wait_until(lambda: lab.node("lab4")["state"] == "alive", what="it to be back")


def test_an_array_what_is_held_and_what_is_no_task(lab: Lab) -> None:
    blocking = lab.submit("submit", "-d", "-", "--local", "sleep", "120")
    lab.home.await_state(blocking, "running")
    array = lab.submit("submit", "-d", "-", "--array", "1-5", "--local", "true")
    told = lab.why_json()
    (group,) = told["array"].pop("groups")
    assert told["array"] == {"id": array, "looked_at": 5, "more_groups": 0}
    assert (group["state"], group["tasks"]) == ("queued", 5)
    assert told["id"] == f"{array}.1"
    assert told["summary"].endswith(blocking)
    assert lab.why(f"{array}.3")[2].endswith(blocking)
    cli(lab.home, "hold", f"{array}.2")
    assert lab.why_json(f"{array}.2")["state"] == "held"
    assert [(group["state"], group["tasks"]) for group in lab.why_json()["array"]["groups"]] == [
        ("queued", 4),
        ("held", 1),
    ]
    lab.home.call("cancel", tasks=[blocking, array])
    assert lab.why_json(f"{array}.1")["state"] == "cancelled"
    for ref in ("999", "gpu1/999", "n99/1", "x y"):
        assert cli(lab.home, "why", ref).returncode == 125
