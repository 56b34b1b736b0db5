"""One suite for both ways of holding the processes of a task together: cgroup2 and bare, where they work.

Freezing and killing are told by what the processes do (they write down that they are alive), not by what the launcher says.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import os
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peerload.launcher.containment import ROOT_PREFIX, cgroup_units
from peerload.launcher.process import NOT_EXECUTABLE
from peerload.launcher.record_log import whole_records
from tests.integration.test_launcher import Agent, Bench, _state
from tests.support import stands_still, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.launcher.containment import Cgroup2

GONE = {"", "Z"}
KINDS = ("cgroup2", "bare")
FAR_S = 1000.0
SOON_S = 0.3
PROBE = "launcher-test"


@functools.cache
def works_here(kind: str) -> bool:
    """Whether this machine has this kind of units for us."""
    if kind == "bare":
        return True
    units = cgroup_units(kind, f"{PROBE}.{os.getpid()}")
    if units is not None:
        units.remove()
    return units is not None


def cgroups_left(run: str) -> list[str]:
    """The cgroups of either version that this run of a launcher has made and not removed."""
    found = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, system, *_ = line.split()
        if system in {"cgroup", "cgroup2"}:
            found += [above for above, names, _ in os.walk(place) if ROOT_PREFIX + run in names]
    return [f"{above}/{ROOT_PREFIX}{run}" for above in found]


@pytest.fixture(name="kind", params=KINDS)
def fixture_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if not works_here(kind):
        pytest.skip(f"no {kind} to be had here")
    return kind


@pytest.fixture(name="bench")
def fixture_bench(kind: str) -> Iterator[Bench]:
    made = Bench(Path(tempfile.mkdtemp(prefix="pl", dir="/tmp")), kind)
    try:
        yield made
    finally:
        made.close()
        for agent in made.agents:
            wait_until(lambda run=agent.run: not cgroups_left(run), what="no cgroup is left behind")  # type: ignore[misc]
        wait_until(lambda: not marked(made.directory), what="no process is left behind")


@pytest.fixture(name="reference")
def fixture_reference() -> Iterator[Beats]:
    """Beats that nobody freezes: a clock that stands still only if this whole machine does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "beats"
        process = subprocess.Popen(["sh", "-c", BEAT, str(path), "reference"])
        try:
            yield Beats(path)
        finally:
            process.kill()
            process.wait()


BEAT = 'while :; do echo "$1 $$" >>"$0"; sleep 0.1; done'
OFFSPRING = f"""
sh -c '{BEAT}' "$0" background &
setsid sh -c '{BEAT}' "$0" session &
(setsid sh -c 'trap "" TERM HUP INT; {BEAT}' "$0" daemon >/dev/null 2>&1 </dev/null &)
"""
FAMILY = f"""
{OFFSPRING}
trap "" TERM
set -- leader
{BEAT}
"""
MEMBERS = {"background", "session", "daemon", "leader"}
"""In the background of its group, in a session of its own, an orphan in another session that ignores signals."""
BEATS_COUNTED = 5
FREEZES = 60
"""Freezes of processes that fork all the time."""


class Beats:
    """A file into which processes write that they are alive."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def counts(self) -> collections.Counter[str]:
        """How often each has."""
        text = self.path.read_text(encoding="ascii") if self.path.exists() else ""
        return collections.Counter(line.split()[0] for line in text.splitlines())

    def pids(self) -> set[int]:
        """Of all that ever did."""
        text = self.path.read_text(encoding="ascii") if self.path.exists() else ""
        return {int(line.split()[1]) for line in text.splitlines()}

    def await_more(self, names: set[str]) -> None:
        """All of these go on."""
        before = self.counts()
        wait_until(lambda: all(self.counts()[name] > before[name] for name in names), what=f"{names} go on")


class Family(Beats):
    """A task of several processes that do what they can to get away."""

    def __init__(self, bench: Bench, agent: Agent, key: str = "a", **changed: object) -> None:
        super().__init__(bench.directory / f"{key}.beats")
        agent.spawn(key, b"sh", b"-c", FAMILY.encode(), os.fsencode(self.path), **changed)
        self.key = key
        self.leader = agent.started(key)

    def await_all(self) -> None:
        wait_until(lambda: set(self.counts()) == MEMBERS, what="all have begun")

    def let_lease_end(self, agent: Agent, ts: float) -> None:
        """From here on it has a moment left."""
        self.await_all()
        agent.send({"do": "lease", "key": self.key, "deadline_s": now_s() + SOON_S, "ts": ts})

    def await_frozen(self, reference: Beats) -> None:
        """Nothing of it executes, while others do."""
        wait_until(lambda: all(map(stands_still, self.pids())), what="all stand still")
        before, began = self.counts(), reference.counts()["reference"]
        wait_until(lambda: reference.counts()["reference"] > began + BEATS_COUNTED)
        assert self.counts() == before

    def are_gone(self) -> bool:
        return all(_state(pid) in GONE for pid in self.pids())


GENERATIONS, BARE_GENERATIONS = 2000, 200
"""No bomb goes on for longer than so many forks of each of its lines, whatever becomes of the test."""
FORKED_MIN = 100


def numbers(path: Path) -> list[int]:
    """What was written there, a number a line; the last line may not be whole yet."""
    return [int(line) for line in path.read_text().splitlines()[:-1]] if path.exists() else []


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One such test at a time, of all of this run's processes: each of the bomb's processes is a session, and gets as
    much of the processors as a test does. Of several bombs at a time none spreads before its last generation."""
    with (tmp_path_factory.getbasetemp().parent / "alone.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def marked(directory: Path) -> set[int]:
    """The living processes with this directory on their command line."""
    found = set()
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.fsencode(directory) in (place / "cmdline").read_bytes() and _state(int(place.name)) not in GONE:
                    found.add(int(place.name))
    return found


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def guard_of(launcher: subprocess.Popen[bytes]) -> int:
    """The pid of its guard."""

    def found() -> list[int]:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="ascii").split()
        guards = []
        for child in children:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if b"peerload-guard" in Path(f"/proc/{child}/cmdline").read_bytes():
                    guards.append(int(child))
        return guards

    guards: list[int] = []

    def there_is_one() -> bool:
        guards[:] = found()
        return bool(guards)

    wait_until(there_is_one, what="there is a guard")
    return guards[0]


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def kill_with_guard(launcher: subprocess.Popen[bytes]) -> None:
    """Nobody is left to end its tasks."""
    guard = guard_of(launcher)
    os.kill(launcher.pid, signal.SIGSTOP)  # it cannot replace its guard
    os.kill(guard, signal.SIGKILL)
    kill(launcher)


# -- leases --------------------------------------------------------------------------------------------------------


@pytest.mark.rule("X4")
def test_the_kind_is_told_with_what_it_cannot_hold(bench: Bench, kind: str) -> None:
    bench.launcher()
    listed = bench.agent().listed()
    assert listed["units"] == kind
    assert all(isinstance(word, str) for word in listed["unenforced"])
    assert listed["unenforced"]


def test_what_a_task_uses_is_told(bench: Bench) -> None:
    """Of all its processes, also of the orphan in a session of its own; of what is not there nothing."""
    bench.launcher()
    agent = bench.agent()
    agent.listed()
    family = Family(bench, agent)
    family.await_all()
    agent.spawn("idle", b"sleep", b"60")
    agent.started("idle")

    def used(*keys: str) -> dict[str, list[float]]:
        agent.send({"do": "usage", "id": 7, "keys": list(keys)})
        event = agent.next()
        assert (event["is"], event["id"]) == ("used", 7)
        assert 0 < event["at_s"] <= now_s()
        found: dict[str, list[float]] = event["of"]
        return found

    before = used("a")["a"]
    family.await_more(MEMBERS)
    wait_until(lambda: used("a")["a"][0] > before[0], what="its time to be counted")
    now = used("a", "idle", "nobody")
    assert set(now) == {"a", "idle"}
    assert now["a"][1] > 1 << 20
    assert now["a"][2] >= len(MEMBERS)
    assert now["idle"][2] == 1
    agent.send({"do": "signal", "key": "a", "signal": signal.SIGKILL})
    agent.ended("a")
    assert used("a") == {}


def test_at_its_deadline_all_of_a_task_is_frozen_and_a_renewal_thaws_it(bench: Bench, reference: Beats) -> None:
    bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent, deadline_s=now_s() + FAR_S, ts=1.0)
    family.let_lease_end(agent, 2.0)
    agent.close()
    family.await_frozen(reference)
    agent = bench.agent()
    agent.send({"do": "lease", "key": "a", "deadline_s": now_s() + FAR_S, "ts": 3.0})
    family.await_more(MEMBERS)
    agent.send({"do": "lease", "key": "a", "deadline_s": now_s() - 1, "ts": 4.0})
    family.await_frozen(reference)
    agent.send({"do": "signal", "key": "a", "signal": 9})
    assert agent.ended("a")["signal"] == signal.SIGKILL, "a frozen task can be ended"
    assert family.are_gone()


def test_no_command_starts_inside_a_frozen_task(bench: Bench) -> None:
    """Where the kernel holds it frozen, the launcher would wait for it to call exec, and for ever."""
    bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sleep", b"1000", deadline_s=now_s() + FAR_S, ts=1.0)
    agent.started("a")
    agent.send({"do": "lease", "key": "a", "deadline_s": now_s() - 1, "ts": 2.0})
    wait_until(lambda: agent.listed()["leases"][0][2], what="it is frozen")
    agent.spawn("b", b"true", inside="a")
    assert agent.ended("b")["exit_code"] == NOT_EXECUTABLE
    agent.send({"do": "signal", "key": "a", "signal": signal.SIGKILL})
    assert agent.ended("a")["signal"] == signal.SIGKILL


@pytest.mark.parametrize("kind", ["bare"], indirect=True)  # other kinds need no log
def test_nothing_starts_whose_start_cannot_be_logged(bench: Bench) -> None:
    """If the launcher were killed, nobody could tell that the process is a task's, and the task would run twice."""
    launcher = bench.launcher()
    agent = bench.agent()
    resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    agent.spawn("a", b"touch", os.fsencode(bench.directory / "ran"))
    lost = agent.lost("a")
    assert lost["never_started"]
    assert lost["shortage"]
    assert not (bench.directory / "ran").exists()


def test_a_task_without_a_deadline_is_not_frozen_and_a_parked_one_is_thawed(bench: Bench, reference: Beats) -> None:
    bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent)
    family.let_lease_end(agent, 1.0)
    family.await_frozen(reference)
    agent.send({"do": "lease", "key": "a", "deadline_s": 0, "ts": 2.0})
    family.await_more(MEMBERS)
    (lease,) = agent.listed()["leases"]
    assert lease == [2.0, 0.0, False]
    assert agent.froze == [("frozen", "a"), ("thawed", "a")]


@pytest.mark.parametrize("kind", ["bare"], indirect=True)  # the kind takes no part in it
def test_the_newest_word_on_a_lease_counts_and_is_told_to_the_next_agent(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    deadline_s = now_s() + FAR_S
    agent.spawn("a", b"sleep", b"1000", deadline_s=deadline_s, ts=5.0)
    pid = agent.started("a")
    agent.send({"do": "lease", "key": "a", "deadline_s": 1.0, "ts": 4.0})  # older: it comes too late
    assert bench.agent().listed()["leases"] == [[5.0, deadline_s, False]]
    assert not stands_still(pid)
    agent = bench.agent()
    agent.send({"do": "lease", "key": "a", "deadline_s": 0, "ts": 5.0})  # as old counts as new
    agent.send({"do": "lease", "key": "a", "deadline_s": deadline_s, "ts": 6.5})
    assert bench.agent().listed()["leases"] == [[6.5, deadline_s, False]]


@pytest.mark.parametrize("kind", ["bare"], indirect=True)  # the kind takes no part in it
def test_deadlines_are_of_the_clock_that_counts_suspend(bench: Bench) -> None:
    """In a namespace where that clock alone is set ahead."""
    ahead_s = 100_000
    shift = ("unshare", "--time", "--boottime", str(ahead_s))
    if subprocess.run([*shift, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespaces to be had here")
    bench.start(*shift)
    wait_until(bench._answers)
    agent = bench.agent()
    agent.spawn("late", b"true", deadline_s=now_s() + FAR_S)
    assert agent.lost("late")["never_started"] is True
    agent.spawn("a", b"sleep", b"1000", deadline_s=now_s() + ahead_s + FAR_S, ts=1.0)
    pid = agent.started("a")
    agent.send({"do": "lease", "key": "a", "deadline_s": now_s() + ahead_s + SOON_S, "ts": 2.0})
    wait_until(lambda: stands_still(pid), what="it is frozen")
    agent.send({"do": "lease", "key": "a", "deadline_s": now_s() + ahead_s + FAR_S, "ts": 3.0})
    wait_until(lambda: not stands_still(pid), what="it is thawed")


def test_what_is_frozen_stays_so_though_its_user_continues_it(bench: Bench, reference: Beats) -> None:
    bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent)
    family.let_lease_end(agent, 1.0)
    family.await_frozen(reference)
    for pid in family.pids():
        os.kill(pid, signal.SIGCONT)
    family.await_frozen(reference)


def _is_whole(units: Cgroup2, key: str) -> bool:
    return "frozen 1" in Path(units.path(key), "cgroup.events").read_text(encoding="ascii")


@pytest.mark.long
def test_what_forks_all_the_time_stands_still_each_time(kind: str) -> None:
    units = None if kind == "bare" else cgroup_units(kind, f"{PROBE}.{os.getpid()}")
    if units is None:
        pytest.skip("it is a matter of the kernel's units")
    units.enter("a")
    forking = [subprocess.Popen(["sh", "-c", "while :; do sleep 0.002; done"]) for _ in range(8)]
    units.leave()
    try:
        for _ in range(FREEZES):
            time.sleep(0.01)
            units.freeze("a")
            wait_until(lambda: _is_whole(units, "a"))
            wait_until(lambda: {_state(pid) for pid in units.processes("a")} <= (GONE | set("DS")))
            units.thaw("a")
    finally:
        units.kill("a")
        for process in forking:
            process.wait()
        wait_until(lambda: units.close("a"))
        units.remove()


def test_a_task_frozen_for_too_long_is_killed_and_that_is_no_exit(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent, frozen_s_max=0.5)
    family.let_lease_end(agent, 1.0)
    event = agent.lost("a")
    assert event["never_started"] is False
    assert "frozen" in event["reason"]
    assert family.are_gone()
    listed = agent.listed()
    assert (listed["running"], listed["ended"]) == ([], [])


def test_a_frozen_task_whose_room_is_needed_is_ended_and_that_is_no_exit(bench: Bench, reference: Beats) -> None:
    bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent)
    agent.send({"do": "evict", "key": "a", "reason": "too early"})  # it runs: nothing happens
    family.let_lease_end(agent, 1.0)
    family.await_frozen(reference)
    agent.send({"do": "evict", "key": "a", "reason": Says.ROOM_OF_FROZEN()})
    event = agent.lost("a")
    assert (event["never_started"], event["reason"]) == (False, Says.ROOM_OF_FROZEN())
    assert family.are_gone()
    listed = agent.listed()
    assert (listed["running"], listed["ended"]) == ([], [])


def test_what_comes_after_a_frozen_task_runs(bench: Bench) -> None:
    """Whatever holds a task is used again, and is not frozen then."""
    bench.launcher()
    agent = bench.agent()
    for number in range(3):
        key = f"frozen{number}"
        agent.spawn(key, b"sleep", b"1000", deadline_s=now_s() + FAR_S, ts=1.0)
        pid = agent.started(key)
        agent.send({"do": "lease", "key": key, "deadline_s": now_s() + 0.1, "ts": 2.0})
        wait_until(lambda pid=pid: stands_still(pid), what="it is frozen")  # type: ignore[misc]
        agent.send({"do": "signal", "key": key, "signal": 9})
        agent.ended(key)
        agent.spawn(f"next{number}", b"true", deadline_s=now_s() + FAR_S)
        assert agent.ended(f"next{number}")["exit_code"] == 0


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_kill_ends_all_of_a_task(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent)
    family.await_all()
    agent.send({"do": "signal", "key": "a", "signal": 15})
    agent.send({"do": "signal", "key": "a", "signal": 9})
    assert agent.ended("a")["signal"] == signal.SIGKILL
    assert family.are_gone()


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_a_kill_ends_what_forks_all_the_time(bench: Bench, kind: str) -> None:
    """Where there is no cgroup, who forks into sessions of its own faster than it is found is ended when it comes to rest, and
    its end is not told before."""
    generations = BARE_GENERATIONS if kind == "bare" else GENERATIONS
    bench.launcher()
    agent = bench.agent()
    # Each lives for a moment and has left a successor long before that; it writes down the how-manieth it is.
    bomb, started = bench.directory / "bomb.sh", bench.directory / "started"
    bomb.write_text(
        f'trap "" TERM HUP; echo $1 >> {started}; [ $1 -lt {generations} ] || exit; setsid sh "$0" $(($1+1)) & sleep 0.03\n'
    )
    agent.spawn("a", b"sh", b"-c", b'for i in 1 2 3 4 5 6 7 8; do sh "$0" 0 & done; sleep 1000', os.fsencode(bomb))
    agent.started("a")
    wait_until(lambda: len(numbers(started)) > FORKED_MIN, what="it has spread")
    agent.send({"do": "signal", "key": "a", "signal": 9})
    assert agent.ended("a")["signal"] == signal.SIGKILL
    assert not marked(bomb)
    assert kind == "bare" or max(numbers(started)) < generations  # it has not come to its own end


def test_what_an_ended_task_leaves_is_ended_before_its_end_is_told(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    path = bench.directory / "a.beats"
    script = (
        OFFSPRING
        + """
until grep -q daemon "$0" && grep -q session "$0" && grep -q background "$0"; do sleep 0.01; done
exit 3
"""
    )
    agent.spawn("a", b"sh", b"-c", script.encode(), os.fsencode(path))
    assert agent.ended("a")["exit_code"] == 3
    beats = Beats(path)
    assert set(beats.counts()) == MEMBERS - {"leader"}
    assert all(_state(pid) in GONE for pid in beats.pids())


@pytest.mark.parametrize("kind", ["bare"], indirect=True)  # the kind takes no part in it
def test_an_exit_is_on_record_before_it_is_told_and_a_torn_record_is_none(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    log = bench.directory / "exits.log"
    for key in ("a", "b"):
        agent.spawn(key, b"true", once=key == "b")
        agent.ended(key)
        assert [row[0] for row in whole_records(str(log))[0]][-1] == key
    kill(launcher)
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 1)
    bench.launcher()
    listed = bench.agent().listed()
    assert [key for key, _ in listed["ended"]] == ["a"]
    assert listed["running"] == []


def test_a_stop_ends_all_and_does_not_let_the_frozen_ones_go_on(bench: Bench, reference: Beats) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    frozen = Family(bench, agent, "frozen")
    frozen.let_lease_end(agent, 1.0)
    frozen.await_frozen(reference)
    running = Family(bench, agent, "running")
    running.await_all()
    before = frozen.counts()
    agent.send({"do": "stop"})
    assert agent.lost("frozen")["never_started"] is False
    assert agent.ended("running")["signal"] == signal.SIGKILL
    assert launcher.wait(60) == 0
    assert frozen.are_gone()
    assert running.are_gone()
    assert frozen.counts() == before


# -- the end of a launcher -----------------------------------------------------------------------------------------


def test_a_killed_launcher_takes_its_tasks_with_it_though_no_agent_lives(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    families = [Family(bench, agent, key) for key in ("a", "b")]
    for family in families:
        family.await_all()
    agent.close()
    kill(launcher)
    wait_until(lambda: all(family.are_gone() for family in families), what="all are ended")
    wait_until(lambda: not cgroups_left(agent.run))


def test_a_killed_guard_is_replaced(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent)
    family.await_all()
    first = guard_of(launcher)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: _state(first) == "" and guard_of(launcher) != first, what="there is another")
    family.await_more(MEMBERS)
    kill(launcher)
    wait_until(family.are_gone, what="all are ended")


def test_a_launcher_killed_with_its_guard_is_cleaned_up_after_by_the_next_before_it_answers(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent)
    family.await_all()
    kill_with_guard(launcher)
    family.await_more(MEMBERS)  # nobody ends them
    bench.launcher()
    assert family.are_gone()
    assert not cgroups_left(agent.run)
    listed = bench.agent().listed()
    assert (listed["running"], listed["ended"]) == ([], [])


def test_what_is_left_of_a_group_whose_leader_has_gone_is_ended_too(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    family = Family(bench, agent)
    family.await_all()
    kill_with_guard(launcher)
    os.kill(family.leader, signal.SIGKILL)
    wait_until(lambda: _state(family.leader) in GONE)
    family.await_more(MEMBERS - {"leader"})
    bench.launcher()
    assert family.are_gone()


@pytest.mark.parametrize("kind", ["bare"], indirect=True)  # the kind takes no part in it
def test_what_was_ordered_of_an_earlier_launcher_is_not_started(bench: Bench) -> None:
    launcher = bench.launcher()
    earlier = bench.agent()
    kill(launcher)
    bench.launcher()
    agent = bench.agent()
    assert agent.run != earlier.run
    agent.spawn("a", b"true", run=earlier.run)
    agent.spawn("b", b"true", run=agent.run)
    agent.started("b")
    agent.ended("b")
    listed = agent.listed()
    assert [key for key, _ in listed["running"] + listed["ended"]] == ["b"]


def test_a_service_manager_may_tidy_up_what_is_empty(bench: Bench, kind: str) -> None:
    if kind == "bare":
        pytest.skip("there is nothing to tidy up")
    bench.launcher()
    agent = bench.agent()
    for number in range(3):
        agent.spawn(f"k{number}", b"true", memory_bytes_max=1 << 30)
        assert agent.ended(f"k{number}")["exit_code"] == 0
        for root in cgroups_left(agent.run):
            for path in Path(root).iterdir():
                if path.is_dir():
                    path.rmdir()
            if number:
                Path(root).rmdir()


def test_a_task_may_make_cgroups_of_its_own(bench: Bench, kind: str) -> None:
    if kind == "bare":
        pytest.skip("there are none")
    bench.launcher()
    agent = bench.agent()
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    mount = next(line.split()[1] for line in mounts if line.split()[2] == "cgroup2")
    beats = Beats(bench.directory / "a.beats")
    script = f"""
mine={mount}$(grep 0:: /proc/self/cgroup | cut -d: -f3)
mkdir "$mine/own" "$mine/own/deeper"
echo $$ > "$mine/own/deeper/cgroup.procs"
set -- leader
{BEAT}
"""
    agent.spawn("a", b"sh", b"-c", script.encode(), os.fsencode(beats.path), deadline_s=now_s() + FAR_S)
    pid = agent.started("a")
    wait_until(beats.counts)
    assert Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").count("own/deeper") == 1
    agent.send({"do": "signal", "key": "a", "signal": 9})
    agent.ended("a")
    assert _state(pid) in GONE
    agent.spawn("b", b"true")
    assert agent.ended("b")["exit_code"] == 0


def test_a_command_inside_of_a_task_has_its_place_and_ends_with_it(bench: Bench, kind: str, tmp_path: Path) -> None:
    bench.launcher()
    agent = bench.agent()
    changed = {"environment": {b"PATH": b"/usr/bin:/bin", b"MINE": b"yes"}, "directory": os.fsencode(tmp_path)}
    agent.spawn("a", b"sleep", b"1000", **changed)
    outer = agent.started("a")
    script = b'pwd; echo "$MINE"; [ "$1" ] || exec sleep 1000; exit 3'
    agent.spawn("b", b"sh", b"-c", script, b"sh", b"ends", inside="a")
    assert agent.ended("b")["exit_code"] == 3
    assert (bench.directory / "b.out").read_text(encoding="utf-8") == f"{tmp_path}\nyes\n"
    agent.spawn("c", b"sh", b"-c", script, inside="a")
    inner = agent.started("c")
    if kind == "bare":
        agent.send({"do": "signal", "key": "c", "signal": signal.SIGKILL})
        assert agent.ended("c")["signal"] == signal.SIGKILL
    else:
        places = [
            line
            for pid in (outer, inner)
            for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
            if line.startswith("0::")
        ]
        assert places[1].startswith(places[0] + "/")
        agent.send({"do": "signal", "key": "a", "signal": signal.SIGKILL})
        ends = {event["key"] for event in (agent.next(), agent.next()) if event["is"] == "ended"}
        assert ends == {"a", "c"}
        wait_until(lambda: _state(inner) in GONE, what="it ends with the task")
    agent.spawn("d", b"true", inside="gone")
    assert agent.ended("d")["reason"] == Says.INSIDE_ENDED()
