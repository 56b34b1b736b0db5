"""`peerload demo gpu` as a user starts it: a real agent and real tasks on simulated GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerload.cli.common.agent_process import program_words
from tests.support import wait_until

DEMO_S_MAX = 300
pytestmark = pytest.mark.timeout(DEMO_S_MAX + 100)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pl-") as name:
        yield Path(name)


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program_words(), "demo", "gpu", *words],
        env={**os.environ, "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_each_task_goes_where_the_experiment_says(directory: Path) -> None:
    with start(directory, "--json") as process:
        out, errors = process.communicate(timeout=DEMO_S_MAX)
    assert process.returncode == 0, errors
    told = json.loads(out)
    assert (told["as_published"], told["processes_left"]) == (True, 0)
    given = [(task["mode"], task["given"]) for task in told["tasks"]]
    assert given[:5] == [("queue", [0])] * 5
    assert given[5][0] == "schedule"
    assert given[5][1] in ([1], [2], [3])
    assert list(directory.iterdir()) == []


@pytest.mark.long
def test_it_is_told_in_two_tables(directory: Path) -> None:
    with start(directory) as process:
        out, errors = process.communicate(timeout=DEMO_S_MAX)
    assert process.returncode == 0, errors
    heading = "STATUS ID MODE PREFERRED GIVEN MEMORY REGISTERED STARTED ENDED"
    assert [" ".join(line.split()) for line in errors.splitlines() if "STATUS" in line] == [heading]
    assert [" ".join(line.split()) for line in out.splitlines() if "STATUS" in line] == [heading]
    assert "queued   gpus/5" in errors
    assert out.count("done ") == 6
    assert "each task ran where expected" in out


def test_interrupted_it_leaves_nothing(directory: Path) -> None:
    with start(directory) as process:
        wait_until(lambda: list(directory.glob("*/gpus.sock")), 30.0, "the agent")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEMO_S_MAX)
    assert process.returncode == 130, errors
    assert list(directory.iterdir()) == []
