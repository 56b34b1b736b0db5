"""`run` whose reader is slow: its command waits for it, and nothing of the output is missing, wherever it runs."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster, ended
from tests.support import stands_still, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = ["n1", "n2"]
PIECES_MAX = 2000
SCRIPT = f"""
echo $$ >pid; i=0
until [ -e go ] || [ $i = {PIECES_MAX} ]; do head -c 1M /dev/zero; i=$((i+1)); done
echo $i >count; exit 7
"""
"""It writes until it is told to end, which it is once it was held back: on a busy machine it is not at once."""
PIECES_UNREAD = 600
"""More than is kept for a reader; it is written before a home asks again."""
WITHIN_S = 60.0
WHOLE_BYTES = 1_000_000_000


@pytest.fixture(scope="module", name="agents")
def fixture_agents() -> Iterator[list[Agent]]:
    with Cluster() as cluster:
        yield cluster.linked(2)


def start(home: Agent, node: str, directory: Path, script: str = SCRIPT) -> subprocess.Popen[bytes]:
    return home.spawn_cli("run", "--node", node, "-d", str(directory), "sh", "-c", script, stdout=subprocess.PIPE)


def stopped(directory: Path) -> int:
    """The task's process, once it is held back."""
    file = directory / "pid"
    wait_until(lambda: file.exists() and file.read_text().strip(), WITHIN_S, "it to begin")
    pid = int(file.read_text())
    wait_until(lambda: stands_still(pid), WITHIN_S, "it to be held back")
    return pid


def comes_whole(process: subprocess.Popen[bytes], directory: Path) -> bool:
    """Let it end → whether all that it has written comes, with its exit code."""
    (directory / "go").touch()
    size, code = rest_of(process)
    return (size, code) == (int((directory / "count").read_text()) << 20, 7)


def rest_of(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """How much more comes, and the exit code."""
    assert process.stdout is not None
    size = 0
    while piece := process.stdout.read(1 << 20):
        size += len(piece)
    return size, process.wait(WITHIN_S)


def test_a_command_waits_for_who_reads_it(agents: list[Agent], tmp_path: Path) -> None:
    with ended(start(agents[0], "n2", tmp_path)) as process:
        stopped(tmp_path)
        assert comes_whole(process, tmp_path)


def test_a_command_elsewhere_waits_for_a_home_that_starts_anew(agents: list[Agent], tmp_path: Path) -> None:
    with ended(start(agents[0], "n2", tmp_path)) as process:
        stopped(tmp_path)
        agents[0].kill()
        wait_until(
            lambda: agents[1].call("nodes")["nodes"][1]["state"] != "alive", WITHIN_S, "the other node to miss it"
        )
        stopped(tmp_path)
        agents[0].start()
        assert comes_whole(process, tmp_path)


@pytest.mark.long
def test_a_command_elsewhere_waits_for_its_home_when_its_agent_starts_anew(agents: list[Agent], tmp_path: Path) -> None:
    script = SCRIPT.replace(f"{PIECES_MAX}", f"{PIECES_UNREAD}")
    with ended(start(agents[0], "n2", tmp_path, script)) as process:
        stopped(tmp_path)
        agents[1].kill()
        agents[1].start()
        assert rest_of(process) == (PIECES_UNREAD << 20, 7)


def test_a_reader_that_leaves_lets_its_command_go_on(agents: list[Agent], tmp_path: Path) -> None:
    with ended(start(agents[0], "n1", tmp_path)) as process:
        pid = stopped(tmp_path)
        task = agents[0].show("@")["id"]
        process.kill()
        wait_until(lambda: agents[0].show(task)["state"] == "cancelled", WITHIN_S, "it to end with its client")
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), WITHIN_S, "its process to end")


@pytest.mark.long
def test_a_cancel_reaches_a_command_that_is_held_back(agents: list[Agent], tmp_path: Path) -> None:
    script = f"trap 'echo $? >told; exit 3' TERM; {SCRIPT}"
    with ended(start(agents[0], "n1", tmp_path, script)) as process:
        stopped(tmp_path)
        agents[0].call("cancel", tasks=[agents[0].show("@")["id"]])
        wait_until((tmp_path / "told").exists, what="it to take the signal before it is killed")
        assert rest_of(process)[1] == 125


@pytest.mark.long
def test_an_agent_that_is_started_again_lets_it_go_on(tmp_path: Path) -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        with ended(start(agent, "n1", tmp_path)) as process:
            stopped(tmp_path)
            agent.kill()
            agent.start()
            assert comes_whole(process, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("node", NODES)
def test_a_gigabyte_comes_whole(agents: list[Agent], tmp_path: Path, node: str) -> None:
    script = f"echo $$ >pid; yes | head -c {WHOLE_BYTES}; exit 7"
    with ended(start(agents[0], node, tmp_path, script)) as process:
        stopped(tmp_path)
        assert process.stdout is not None
        digest = hashlib.sha256()
        while piece := process.stdout.read(1 << 20):
            digest.update(piece)
        assert process.wait(WITHIN_S) == 7
    whole = hashlib.sha256()
    for first in range(0, WHOLE_BYTES, 1 << 20):
        whole.update((b"y\n" * (1 << 19))[: min(1 << 20, WHOLE_BYTES - first)])
    assert digest.digest() == whole.digest()
