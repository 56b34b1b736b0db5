"""One suite for every way of limiting a task's memory: by its cgroup, by a group of its own, by process."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.launcher.containment import cgroup_units, memory_limits
from tests.integration.test_launcher import Agent, Bench, _state
from tests.integration.test_launcher_units import (
    GONE,
    cgroups_left,
    guard_of,
    kill,
    kill_with_guard,
    works_here,
)
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.launcher.containment import Units

KINDS = (
    ("cgroup2", "cgroup2"),
    ("cgroup2", "cgroup1"),
    ("bare", "rlimit"),
    *(pytest.param(pair, marks=pytest.mark.long) for pair in (("bare", "cgroup1"), ("cgroup2", "rlimit"))),
)
"""(units, memory); neither cgroups of the first version nor limits of processes care for what holds these."""
MIB = 1 << 20
LIMIT_BYTES = 64 * MIB
LIMIT = {"memory_bytes_max": LIMIT_BYTES, "node": "ws1"}
TAKE = "x = b'1' * (int(__import__('sys').argv[1]) << 20)"
"""Have so many MiB, and write to all of them."""
FILL = """
import os, sys, time
from peerload.launcher.containment import own_cgroup
is_first = sys.argv[1] == "cgroup1"
place = own_cgroup(b"memory" if is_first else b"")
names = ("memory.usage_in_bytes", "memory.limit_in_bytes") if is_first else ("memory.current", "memory.max")
used, limit = (os.open(f"{place}/{name}", os.O_RDONLY) for name in names)
most = int(os.read(limit, 100)) - (100 << 10)
memory = os.memfd_create("full")
while int(os.pread(used, 100, 0)) < most:
    os.write(memory, bytes(4096))
print("full", flush=True)
time.sleep(1000)
"""
"""Use up the memory of the task, and none of that by what it has mapped."""
PYTHON = os.fsencode(sys.executable)


@functools.cache
def limits_here(units: str, memory: str) -> bool:
    """Whether this machine has this combination for us."""
    if not works_here(units):
        return False
    made: Units | None = cgroup_units(units, f"memory-test.{os.getpid()}") if units != "bare" else None
    try:
        limits = memory_limits(memory, made, f"memory-test.{os.getpid()}")  # type: ignore[arg-type]
        limits.remove()
    finally:
        if made is not None:
            made.remove()
    return limits.name == memory


@pytest.fixture(name="kinds", params=KINDS, ids="-".join)
def fixture_kinds(request: pytest.FixtureRequest) -> tuple[str, str]:
    units, memory = request.param
    if not limits_here(units, memory):
        pytest.skip(f"no {memory} with {units} to be had here")
    return units, memory


@pytest.fixture(name="bench")
def fixture_bench(kinds: tuple[str, str]) -> Iterator[Bench]:
    made = Bench(Path(tempfile.mkdtemp(prefix="pl", dir="/tmp")), *kinds)
    try:
        yield made
    finally:
        made.close()
        for agent in made.agents:
            wait_until(lambda run=agent.run: not cgroups_left(run), what="no cgroup is left behind")  # type: ignore[misc]


@pytest.fixture(name="is_whole")
def fixture_is_whole(kinds: tuple[str, str]) -> bool:
    """Whether the whole of a task is counted."""
    return kinds[1] != "rlimit"


def take(agent: Agent, key: str, size_mib: int, **changed: Any) -> dict[str, Any]:
    """Run what takes this much; its exit."""
    agent.spawn(key, PYTHON, b"-c", TAKE.encode(), b"%d" % size_mib, **changed)
    return agent.ended(key)


def test_the_kind_is_told_with_what_it_cannot_hold(bench: Bench, kinds: tuple[str, str], *, is_whole: bool) -> None:
    bench.launcher()
    listed = bench.agent().listed()
    assert listed["memory"] == kinds[1]
    assert any("memory" in word for word in listed["unenforced"]) is not is_whole


def test_who_takes_more_than_the_limit_ends_with_words_and_others_go_on(bench: Bench, *, is_whole: bool) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.spawn("other", b"sleep", b"1000", **LIMIT)
    other = agent.started("other")
    exit_ = take(agent, "a", 100, **LIMIT)
    assert exit_["out_of"] == "memory"
    assert exit_["reason"].startswith(Says.OUT_OF_MEMORY("ws1", "64.0 MiB", ""))
    peak_bytes = exit_["usage"]["memory_bytes_max"]
    if is_whole:
        assert exit_["signal"] == signal.SIGKILL
        assert 0.97 * LIMIT_BYTES <= peak_bytes <= LIMIT_BYTES
    else:
        assert exit_["exit_code"] == 1, "it is refused memory, and gives up itself"
        assert peak_bytes <= LIMIT_BYTES
        assert exit_["reason"].endswith(Says.REFUSED_MEMORY())
    assert _state(other) not in GONE


def test_who_stays_under_the_limit_is_left_alone_and_so_is_who_has_none(bench: Bench, *, is_whole: bool) -> None:
    bench.launcher()
    agent = bench.agent()
    for key, size_mib, limit in (("under", 30, LIMIT), ("free", 100, {})):
        exit_ = take(agent, key, size_mib, **limit)
        assert (exit_["exit_code"], exit_.get("out_of", ""), exit_.get("reason", "")) == (0, "", "")
        assert exit_["usage"]["memory_bytes_max"] >= size_mib * MIB
        assert not is_whole or not limit or exit_["usage"]["memory_bytes_max"] <= LIMIT_BYTES


def test_each_task_has_its_own_limit_and_its_own_peak(bench: Bench, *, is_whole: bool) -> None:
    """Whatever counts is not used again with what was counted."""
    bench.launcher()
    agent = bench.agent()
    assert take(agent, "a", 100, **LIMIT)["out_of"] == "memory"
    assert take(agent, "b", 100, memory_bytes_max=1 << 30)["exit_code"] == 0
    small = take(agent, "c", 1, **LIMIT)
    assert (small["exit_code"], small.get("out_of", "")) == (0, "")
    assert not is_whole or small["usage"]["memory_bytes_max"] < 40 * MIB
    assert take(agent, "d", 100)["exit_code"] == 0


def test_the_children_of_a_task_count(bench: Bench, *, is_whole: bool) -> None:
    if not is_whole:
        pytest.skip("each process counts by itself")
    bench.launcher()
    agent = bench.agent()
    child = f"{TAKE}; print('has', flush=True); __import__('time').sleep(1000)"
    script = f'for i in 1 2 3; do "$0" -c "{child}" 30 & done; wait; exec sleep 1000'
    agent.spawn("a", b"sh", b"-c", script.encode(), PYTHON, **LIMIT)
    exit_ = agent.ended("a")
    assert (exit_["signal"], exit_["out_of"]) == (signal.SIGKILL, "memory")


def test_all_of_a_task_ends_when_a_child_takes_too_much(bench: Bench, *, is_whole: bool) -> None:
    """The main process may wait for that child for ever."""
    if not is_whole:
        pytest.skip("who is refused memory is told so, and may go on")
    bench.launcher()
    agent = bench.agent()
    script = f'"$0" -c "{TAKE}" 100; sleep 1000'
    agent.spawn("a", b"sh", b"-c", script.encode(), PYTHON, **LIMIT)
    pid = agent.started("a")
    exit_ = agent.ended("a")
    assert (exit_["signal"], exit_["out_of"]) == (signal.SIGKILL, "memory")
    assert _state(pid) in GONE


def test_an_end_that_has_nothing_to_do_with_memory_is_not_named(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    for key, script, code in (("fails", b"exit 3", 3), ("is killed", b"kill -9 $$", 137), ("is not found", b"", 127)):
        argv = (b"sh", b"-c", script) if script else (b"there-is-no-such-command",)
        agent.spawn(key, *argv, **LIMIT)
        exit_ = agent.ended(key)
        assert (exit_["exit_code"], exit_.get("out_of", "")) == (code, "")
    agent.spawn("ended", b"sleep", b"1000", **LIMIT)
    agent.started("ended")
    agent.send({"do": "signal", "key": "ended", "signal": 9})
    exit_ = agent.ended("ended")
    assert (exit_["signal"], exit_.get("out_of", ""), exit_.get("reason", "")) == (signal.SIGKILL, "", "")


def test_a_limit_too_small_for_any_program_ends_that_program_alone(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    for limit_bytes in (1, 4096, 1 * MIB):
        exit_ = take(agent, f"a{limit_bytes}", 100, memory_bytes_max=limit_bytes, node="ws1")
        assert exit_["exit_code"], (
            "an rlimit below what the launcher has itself may come when a quick program has its first MiB"
        )
    assert launcher.poll() is None
    assert take(agent, "b", 30, **LIMIT)["exit_code"] == 0


def test_a_command_inside_of_a_task_without_memory_left_does_not_end_the_launcher(
    bench: Bench, kinds: tuple[str, str], *, is_whole: bool
) -> None:
    if not is_whole:
        pytest.skip("a command has memory of its own")
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", PYTHON, b"-c", FILL.encode(), kinds[1].encode(), **LIMIT)
    agent.started("a")
    wait_until(lambda: (bench.directory / "a.out").exists() and (bench.directory / "a.out").read_bytes(), what="full")
    for number in range(10):
        agent.spawn(f"b{number}", b"true", inside="a")
        while agent.next()["key"] != f"b{number}":
            continue
    assert launcher.poll() is None


def test_a_limit_that_is_none_is_no_request(bench: Bench) -> None:
    launcher = bench.launcher()
    for limit in (-1, 1 << 60, "much", None):
        agent = bench.agent()
        agent.spawn("a", b"true", memory_bytes_max=limit)
        with pytest.raises(ConnectionError):
            agent.next()
    assert launcher.poll() is None
    assert bench.agent().listed()["running"] == []


def test_what_was_told_of_memory_is_told_again_by_the_next_launcher(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    told = take(agent, "a", 100, **LIMIT)
    kill(launcher)
    bench.launcher()
    assert bench.agent().listed()["ended"] == [["a", told]]


@pytest.mark.parametrize("guard_is", ["alive", "killed"])
def test_of_a_killed_launcher_nothing_is_left(bench: Bench, guard_is: str) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sleep", b"1000", **LIMIT)
    pid = agent.started("a")
    guard_of(launcher)
    if guard_is == "killed":
        kill_with_guard(launcher)
    else:
        kill(launcher)
        wait_until(lambda: not cgroups_left(agent.run), what="its guard has tidied up")
    bench.launcher()
    assert _state(pid) in GONE
    assert not cgroups_left(agent.run)
