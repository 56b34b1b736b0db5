"""`peerload demo` as a user starts it: real agents, a real broker, real commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.common.agent_process import program_words
from peerload.cli.demo import demo
from peerload.cli.demo.broker import find_broker
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO_S_MAX = 300
pytestmark = pytest.mark.timeout(DEMO_S_MAX + 100)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where the demo makes its own directory; short, for the sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pl-") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def broker_here() -> None:
    """A broker must be here, one way or the other."""
    if find_broker() is None:
        pytest.fail("neither mosquitto nor amqtt is installed: make setup")


def _start(directory: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program_words(), "demo", *words],
        env={**os.environ, "TMPDIR": str(directory), "PEERLOAD_SLOTS": "7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _marked(directory: Path) -> list[int]:
    """Living processes that belong to a demo in this directory."""
    found = []
    mark = f"PEERLOAD_DEMO={directory}/".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


def _assert_nothing_left(directory: Path) -> None:
    assert _marked(directory) == []
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("tasks", [8, pytest.param(60, marks=[pytest.mark.long, pytest.mark.timed])])
def test_commands_spread_over_the_nodes_and_come_home(directory: Path, tasks: int) -> None:
    with _start(directory, "--tasks", str(tasks), "--json") as process:
        out, errors = process.communicate(timeout=DEMO_S_MAX)
    assert process.returncode == 0, errors
    told: dict[str, Any] = json.loads(out)
    assert told["v"] == 1
    assert (told["tasks"], told["failed"], told["outputs_right"]) == (tasks, 0, tasks)
    assert sum(one["tasks"] for one in told["nodes"]) == tasks
    assert sum(one["tasks"] > 0 for one in told["nodes"]) >= 2
    assert {one["node"]: one["slots"] for one in told["nodes"]} == {"small": 1, "middle": 2, "large": 3}
    # A task that waited elsewhere may move again, or come home.
    assert told["migrations"] >= sum(one["from_elsewhere"] for one in told["nodes"]) > 0
    assert told["mqtt"]["published"] > 0
    assert told["mqtt"]["received"] > 0
    assert told["handoffs"]["transfers"] >= told["migrations"] > 0
    if tasks > 8:
        assert told["makespan_s"] < told["alone_s"]
    assert told["processes_left"] == 0
    assert told["example"]["output"] == told["example"]["answer"]
    assert re.search(r"none of [1-9]\d* processes is left", errors)
    _assert_nothing_left(directory)


@pytest.mark.long
def test_the_table_fits_a_terminal_and_names_every_node(directory: Path) -> None:
    with _start(directory, "--tasks", "12", "--policy", "threshold") as process:
        out, errors = process.communicate(timeout=DEMO_S_MAX)
    assert process.returncode == 0, errors
    assert "\x1b" not in out + errors
    assert [line for line in (errors + out).splitlines() if len(line) > 80] == []
    for node in ("small", "middle", "large"):
        assert any(line.split()[:1] == [node] for line in out.splitlines())
    assert "12 of 12 ended with exit code 0, 12 outputs are equal" in out
    assert "Policy: threshold." in errors
    _assert_nothing_left(directory)


@pytest.mark.long
def test_the_small_broker_does_as_well(directory: Path) -> None:
    pytest.importorskip("amqtt", reason="the extra 'broker' is not installed")
    with _start(directory, "--tasks", "12", "--broker", "amqtt", "--json") as process:
        out, errors = process.communicate(timeout=DEMO_S_MAX)
    assert process.returncode == 0, errors
    told = json.loads(out)
    assert (told["broker"], told["failed"], told["outputs_right"]) == ("amqtt", 0, 12)
    assert told["mqtt"]["received"] > 0
    _assert_nothing_left(directory)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_leaves_nothing(directory: Path, number: signal.Signals) -> None:
    with _start(directory) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:  # until it tells how they spread
                if "running/done:" in line:
                    break
            assert _marked(directory)
            process.send_signal(number)
            _, errors = process.communicate(timeout=DEMO_S_MAX)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert "processes is left" in errors
    _assert_nothing_left(directory)


def test_stopped_while_agents_start_it_leaves_nothing(directory: Path) -> None:
    with _start(directory) as process:
        try:
            wait_until(lambda: list(directory.glob("*/small/agent.log")), what="the first agent's log")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEMO_S_MAX)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    _assert_nothing_left(directory)


def test_a_policy_that_does_not_exist_is_told_and_leaves_nothing(directory: Path) -> None:
    with _start(directory, "--policy", "thresold") as process:
        _, errors = process.communicate(timeout=DEMO_S_MAX)
    assert process.returncode == 125
    assert "threshold" in errors
    assert "Traceback" not in errors
    _assert_nothing_left(directory)


@pytest.mark.long
def test_each_command_prints_its_answer() -> None:
    for command in {one.name: one for one in demo.commands(30)}.values():
        if command.name.startswith(("read", "sleep")):
            continue
        variables = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
        said = subprocess.run(command.argv, env=variables, stdout=subprocess.PIPE, check=True)
        assert said.stdout.decode().strip() == command.answer(), command.name


def test_list_scheduling_gives_each_task_to_the_slot_that_is_free_first() -> None:
    assert demo.list_schedule_s([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert demo.list_schedule_s([1.0, 1.0, 3.0], 2) == 4.0
    assert demo.list_schedule_s([1.0, 2.0, 3.0], 1) == 6.0


def test_a_task_without_a_start_counts_nothing() -> None:
    task = {
        "id": "small/1",
        "node": None,
        "submitted_at": 10.0,
        "started_at": None,
        "ended_at": 12.0,
        "exit_code": 125,
        "migrations": 0,
        "usage": {"user_s": 0.0, "system_s": 0.0},
    }
    told = demo.account_of([task], {"small": 1}, "small", {"small": {}})
    assert (told["failed"], told["makespan_s"], told["sum_s"]) == (1, 2.0, 0.0)
