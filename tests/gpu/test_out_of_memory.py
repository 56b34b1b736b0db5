"""A real agent on cards that are not there, and a task that takes more of one than it was promised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.cards import GIB, Cards, linked, with_cards
from tests.integration.cluster import Agent, Cluster, processes_with
from tests.support import wait_until
from tests.wording import Says

PROGRAM = """
import os, pathlib, sys, time
attempt = int(os.environ["PEERLOAD_ATTEMPT"])
directory = pathlib.Path(sys.argv[1])
written = directory / f"written-{attempt}"
written.write_text(os.environ.get("PEERLOAD_GPU_MEM_MB", ""), encoding="ascii")
written.rename(directory / f"begun-{attempt}")
while not (directory / f"end-{attempt}").exists():
    time.sleep(0.01)
if attempt <= int(sys.argv[2]):
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", file=sys.stderr)
    sys.exit(1)
print("trained")
"""


class Training:
    """A task that says how far each attempt is, and ends when it may; the first ``fails`` have too little."""

    def __init__(self, agent: Agent, cluster: Cluster, cards: Cards, fails: int, *flags: str) -> None:
        self.agent, self.cards, self.directory = agent, cards, cluster.directory
        program = cluster.directory / "train.py"
        program.write_text(PROGRAM, encoding="utf-8")
        words = ("submit", "-G1", *flags, "--", "python3", str(program), str(self.directory), str(fails))
        done = agent.cli(*words)
        assert done.returncode == 0, done.stderr
        self.task = done.stdout.decode().split()[0]
        self.program = str(program)

    def begun(self, attempt: int) -> int:
        """→ its process."""
        wait_until((self.directory / f"begun-{attempt}").exists, 20, f"attempt {attempt} to start")
        return next(pid for pid, line in processes_with(self.program).items() if line.startswith("python3"))

    def promised_mib(self, attempt: int) -> int:
        return int((self.directory / f"begun-{attempt}").read_text(encoding="ascii"))

    def use(self, pid: int, gib: float, card: int = 0) -> None:
        """It takes so much, and that has been read."""
        self.cards.use(card, pid, int(gib * GIB))

        def seen() -> bool:
            gpus: list[dict[str, Any]] = self.agent.call("nodes")["nodes"][0]["gpus"]
            return any(gpu["mem_ours_bytes"] >= gib * GIB * 0.99 for gpu in gpus)

        wait_until(seen, 20, "its memory to be read")

    def end(self, attempt: int, pid: int, card: int = 0) -> None:
        self.cards.use(card, pid, -1)
        (self.directory / f"end-{attempt}").touch()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cards(cluster: Cluster) -> Cards:
    cards = Cards(cluster.directory, 2)
    cluster.environment |= cards.environment
    return cards


def test_a_task_that_runs_out_of_gpu_memory_runs_again_with_more(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=4), 2)
    training = Training(agent, cluster, cards, 1, "--gpu-mem", "8G", "--gpu-prefer", "0", "--gpu-wait", "queue")
    pid = training.begun(1)
    training.use(pid, 9)
    training.end(1, pid)
    pid = training.begun(2)
    assert training.promised_mib(2) == 13.5 * 1024
    training.use(pid, 12)
    training.end(2, pid)
    assert agent.wait(training.task)[training.task]["exit_code"] == 0
    assert agent.output(training.task)[0] == b"trained\n"
    shown = agent.show(training.task)
    assert (shown["attempt"], shown["memory_retries"], shown["lost"]) == (2, 1, 0)
    assert (shown["usage"]["gpu_memory_bytes_max"], shown["usage"]["gpu_model"]) == (12 * GIB, "Fake-A10")
    assert (shown["gpu_mem_learned_bytes"], shown["gpu_runs_learned"]) == (int(12 * GIB * 1.1) + GIB // 4, 1)
    words = "attempt 1 on n1 ran out of GPU memory on gpu0: limit 8.0 GiB, peak 9.0; again with 13.5 GiB"
    assert [step["reason"] for step in shown["history"] if step["state"] == "queued"] == ["submitted", words]
    told = agent.cli("show", training.task).stdout.decode()
    assert words in told
    assert "out of GPU memory once\n" in told
    assert " of one GPU (Fake-A10)" in told


@pytest.mark.long
def test_what_an_agent_that_was_killed_meanwhile_still_knows_is_enough(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=4), 2)
    training = Training(agent, cluster, cards, 1, "--gpu-mem", "8G")
    pid = training.begun(1)
    training.use(pid, 9)
    agent.kill()
    training.end(1, pid)
    wait_until(lambda: pid not in processes_with(training.program), 20, "the first attempt to end")
    agent.start()
    pid = training.begun(2)
    assert training.promised_mib(2) == 12 * 1024  # of what was seen nothing is left; it had 8
    agent.kill()
    agent.start()
    training.end(2, pid)
    assert agent.wait(training.task)[training.task]["exit_code"] == 0
    reasons = [step["reason"] for step in agent.show(training.task)["history"]]
    assert f"attempt 1 on n1 ran {Says.OUT_OF_GPU_MEMORY('gpu0', 8.0, 'not seen')}; {Says.MORE_MEMORY(12.0)}" in reasons


def test_a_home_hears_of_it_from_the_node_that_has_the_card(cluster: Cluster, cards: Cards) -> None:
    executor, home = linked(cluster, cards)
    training = Training(home, cluster, cards, 1, "--gpu-mem", "8G", "--gpu-prefer", "1", "--gpu-wait", "queue")
    training.agent = executor
    pid = training.begun(1)
    training.use(pid, 8.5, card=1)
    training.end(1, pid, card=1)
    pid = training.begun(2)
    assert training.promised_mib(2) == 12.75 * 1024
    training.end(2, pid, card=1)
    assert home.wait(training.task)[training.task]["exit_code"] == 0
    assert home.output(training.task)[0] == b"trained\n"
    shown = home.show(training.task)
    words = "attempt 1 on n1 ran out of GPU memory on gpu1: limit 8.0 GiB, peak 8.5; again with 12.8 GiB"
    assert words in [step["reason"] for step in shown["history"]]
    assert (shown["node"], shown["attempt"], shown["lost"]) == ("n1", 2, 0)


@pytest.mark.long
def test_a_home_that_was_killed_meanwhile_hears_of_it_when_it_is_back(cluster: Cluster, cards: Cards) -> None:
    executor, home = linked(cluster, cards)
    training = Training(home, cluster, cards, 1, "--gpu-mem", "8G", "--gpu-prefer", "0", "--gpu-wait", "queue")
    training.agent = executor
    pid = training.begun(1)
    training.use(pid, 8)
    home.kill()
    training.end(1, pid)
    wait_until(lambda: pid not in processes_with(training.program), 20, "the first attempt to end")
    home.start()
    pid = training.begun(2)
    home.kill()
    home.start()
    training.end(2, pid)
    assert home.wait(training.task, timeout_s=60)[training.task]["exit_code"] == 0
    shown = home.show(training.task)
    words = "attempt 1 on n1 ran out of GPU memory on gpu0: limit 8.0 GiB, peak 8.0; again with 12.0 GiB"
    assert [step["reason"] for step in shown["history"]].count(words) == 1
    assert (shown["attempt"], shown["memory_retries"], shown["lost"]) == (2, 1, 0)


def test_what_no_card_has_ends_in_words(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=4), 2)
    training = Training(agent, cluster, cards, 9)
    pid = training.begun(1)
    training.use(pid, 24)
    training.end(1, pid)
    ended = agent.wait(training.task)[training.task]
    words = "out of GPU memory on gpu0: limit 24.0 GiB, peak 24.0"
    assert (ended["exit_code"], ended["reason"]) == (1, f"{words}; {Says.NO_MORE_MEMORY()}")
    assert b"CUDA out of memory" in agent.output(training.task)[1]
    assert json.loads(agent.cli("show", training.task, "--json").stdout)["memory_retries"] == 0


def test_who_wants_no_second_try_gets_none(cluster: Cluster, cards: Cards) -> None:
    agent = with_cards(cluster.agent(slots=4), 2)
    training = Training(agent, cluster, cards, 9, "--gpu-mem", "8G", "--gpu-oom-retries", "0")
    pid = training.begun(1)
    training.use(pid, 8)
    training.end(1, pid)
    ended = agent.wait(training.task)[training.task]
    assert ended["reason"] == Says.OUT_OF_GPU_MEMORY("gpu0", 8.0, 8.0)
