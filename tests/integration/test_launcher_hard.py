"""The launcher at its worst moments: what it leaves behind, what tasks do to their own output, and how it grows."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import pytest

from peerload.launcher.containment import OPEN_MAX
from peerload.launcher.record_log import RecordLog, machine_boot, process_start
from tests.integration.test_launcher import CODE, LIMIT_BYTES, Bench, _state, fixture_bench  # noqa: F401 -- a fixture
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKED = {b"PATH": b"/usr/bin:/bin", b"PEERLOAD_TASK_ID": b"n/1"}
GONE = {"", "Z"}
GOES_ON = {"R", "S", "D"}


@pytest.fixture
def strangers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are nobody's task."""
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


def printed(bench: Bench, name: str, lines: int = 1) -> list[bytes]:
    """The lines of an output file, once there are so many."""
    path = bench.directory / name

    def all_there() -> bool:
        return path.exists() and path.read_bytes().count(b"\n") >= lines

    wait_until(all_there, what=f"{lines} lines in {name}")
    return path.read_bytes().split()


def kill_launcher(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def memory_kib(pid: int, kind: str) -> int:
    """Pss: its share of what it has in common with others, which grows when they end; Anonymous: its own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def wake_ups(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# -- left-overs ----------------------------------------------------------------------------------------------------


def test_grandchildren_are_ended_before_the_next_launcher_answers(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sh", b"-c", b"(sleep 1000 & sleep 1000 & echo $!; wait) & echo $!; wait")
    leader = agent.started("a")
    group = [leader, *map(int, printed(bench, "a.out", 2))]
    kill_launcher(launcher)
    bench.launcher()
    assert [_state(pid) in GONE for pid in group] == [True] * 3


def test_a_process_with_a_pid_used_again_is_left_alone(bench: Bench, strangers: list[subprocess.Popen[bytes]]) -> None:
    other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan_parent = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!"], start_new_session=True, stdout=subprocess.PIPE
    )
    strangers.append(other)
    assert orphan_parent.stdout is not None
    with orphan_parent.stdout:
        orphan = int(orphan_parent.stdout.readline())
    orphan_parent.wait()
    try:
        log = RecordLog(str(bench.directory / "spawns.log"))
        boot = machine_boot()
        log.append([["a", other.pid, process_start(other.pid) - 1, boot, [], "run"]])
        log.append([["b", other.pid, process_start(other.pid), "another boot", [], "run"]])
        log.append([["c", orphan_parent.pid, 1, boot, [], "run"]])  # its group bears no mark of a task
        log.append([["d", 0, 0, boot, ["/no/such/output"], "run"]])
        log.close()
        bench.launcher()
        assert _state(other.pid) in GOES_ON
        assert _state(orphan) in GOES_ON
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_spawn_that_was_cut_in_two_is_found_by_its_output(
    bench: Bench, strangers: list[subprocess.Popen[bytes]]
) -> None:
    """The launcher was killed after it had made the process and before it had written down its pid."""
    output = bench.directory / "a.out"
    with output.open("wb") as stdout:
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=stdout)
    strangers.append(process)
    log = RecordLog(str(bench.directory / "spawns.log"))
    log.append([["a", 0, 0, machine_boot(), [str(output), str(bench.directory / "a.err")], "run"]])
    log.close()
    bench.launcher()
    assert process.wait(60) == -signal.SIGKILL


# -- output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o777, 0o277, 0o022])
def test_output_can_be_read_whatever_the_umask(bench: Bench, umask: int) -> None:
    bench.launcher()
    agent = bench.agent()
    made = bench.directory / "made"
    agent.spawn("a", b"sh", b"-c", f"umask; : > {made}".encode(), umask=umask)
    assert agent.ended("a")["exit_code"] == 0
    out = bench.directory / "a.out"
    assert out.stat().st_mode & 0o600 == 0o600
    assert int(out.read_bytes(), 8) == umask
    assert made.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("script", "stdout_bytes"),
    [
        ("rm {out}; mkdir {out}", None),
        ("rm {out}; mkfifo {out}", 0),
        ("rm {out}; ln -s /dev/zero {out}", 0),
        ("rm {out}", 0),
        ("truncate -s 5000G {out}; rm {err}", 5000 << 30),
    ],
)
@pytest.mark.bad_input("fifo")
def test_a_task_that_spoils_its_output_harms_itself_alone(bench: Bench, script: str, stdout_bytes: int | None) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    words = script.format(out=bench.directory / "a.out", err=bench.directory / "a.err")
    agent.spawn("a", b"sh", b"-c", words.encode())
    exit_ = agent.ended("a")
    assert exit_["exit_code"] == 0
    assert stdout_bytes is None or exit_["stdout_bytes"] == stdout_bytes
    agent.spawn("b", b"true")
    assert agent.ended("b")["exit_code"] == 0
    assert launcher.poll() is None


@pytest.mark.rule("F2")
@pytest.mark.bad_input("disk-filler", "growing-file")
def test_output_is_bounded_while_it_is_written_and_again_after_the_task_has_emptied_it(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    out = bench.directory / "a.out"
    gates = [bench.directory / name for name in ("first", "second")]
    for gate in gates:
        os.mkfifo(gate)
    first, second = 40_000_000, 30_000_000
    write = "head -c {} /dev/zero | tr '\\0' x; read x < {}"
    script = f"{write.format(first, gates[0])}; : > {out}; {write.format(second, gates[1])}"
    agent.spawn("a", b"sh", b"-c", script.encode())

    def is_bounded(size: int) -> bool:
        return out.stat().st_size == size and out.stat().st_blocks * 512 <= LIMIT_BYTES + (64 << 10)

    agent.started("a")
    wait_until(lambda: is_bounded(first), what="what is over the limit is given back to the disk")
    gates[0].write_text("on\n")
    wait_until(lambda: is_bounded(second), what="the new output is bounded too")
    gates[1].write_text("on\n")
    assert agent.ended("a")["stdout_bytes"] == second


# -- requests ------------------------------------------------------------------------------------------------------


def test_what_only_the_operating_system_finds_wrong_ends_with_a_reason(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("nul", b"true", directory=b"/tmp\0x")
    agent.spawn("folder", b"true", directory=b"/" + b"x" * 5000)
    agent.spawn("file", b"true", directory=b"/dev/null")
    agent.spawn("none", b"true", environment=None)
    agent.spawn("variable", b"/bin/true", environment={b"A=B": b"x"})
    agent.spawn("number", b"/bin/true", environment={b"A": 1})
    agent.spawn("big", b"/bin/true", environment={b"A%d" % n: b"x" * 100_000 for n in range(30)})
    agent.spawn("interpreter", os.fsencode(bench.directory / "script"))
    exits = [agent.next() for _ in range(8)]
    assert [event["exit"]["exit_code"] for event in exits] == [126] * 7 + [127]
    assert all(event["exit"]["reason"] for event in exits)
    assert exits[3]["exit"]["reason"] == Says.CANNOT_EXECUTE("true", Says.NO_ENVIRONMENT())
    assert launcher.poll() is None
    assert Path(f"/proc/{launcher.pid}/cwd").readlink() == Path("/"), "it keeps no directory from being unmounted"


def test_half_a_frame_harms_nobody_and_a_frame_in_pieces_is_read(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.send_raw(b"\0\0\1\0half")
    agent.close()
    agent = bench.agent()
    body = msgpack.packb([{"do": "list"}])
    for byte in len(body).to_bytes(4, "big") + body:
        agent.send_raw(bytes([byte]))
    assert agent.next()["is"] == "listed"


def test_a_burst_comes_in_few_frames_and_each_end_once(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    keys = [f"k{number}" for number in range(300)]
    one = {
        "do": "spawn", "argv": [b"/no/such"], "environment": {}, "directory": b"/", "umask": 0, "deadline_s": 0,
        "output_bytes_max": 1 << 20, "stdout": str(bench.directory / "o"), "stderr": str(bench.directory / "e"),
    }  # fmt: skip
    agent.send(*[{**one, "key": key} for key in keys])
    frame_end = agent.next()
    assert [frame_end["key"], *[event["key"] for event in agent.events]] == keys, "all in one frame"
    agent.events.clear()
    assert [key for key, _ in agent.listed()["ended"]] == keys


def test_so_many_tasks_at_a_time_as_there_are_descriptors(bench: Bench) -> None:
    launcher = bench.start("sh", "-c", 'ulimit -S -n 70 && exec "$@"', "sh")
    wait_until(bench._answers)
    agent = bench.agent()
    for number in range(8):
        agent.spawn(f"k{number}", b"sleep", b"1000")
    events = [agent.next() for _ in range(8)]
    assert [event["is"] for event in events] == ["started"] * 6 + ["expired"] * 2
    assert events[-1]["never_started"]
    assert Says.NO_MORE_TASKS(6) in events[-1]["shortage"]
    assert launcher.poll() is None
    assert not list(bench.directory.glob("k7.*"))


# -- growth --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_idle_launcher_sleeps(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"true")
    agent.ended("a")
    agent.listed()

    def sleeps(for_s: int) -> bool:
        before = (wake_ups(launcher.pid), cpu_ticks(launcher.pid))
        subprocess.run(["sleep", str(for_s)], check=True)
        return _state(launcher.pid) == "S" and (wake_ups(launcher.pid), cpu_ticks(launcher.pid)) == before

    wait_until(lambda: sleeps(1), what="it to have done what was still to be done")
    # The kernel may still move it about; what it must not do is wake up by itself: nothing is due in its poll.
    assert any(sleeps(5) for _ in range(3)), "it sleeps for five seconds"


@pytest.mark.long
def test_its_logs_stay_bounded(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    long_name = b"/no/such/" + b"x" * 180
    for turn in range(30):
        for number in range(200):
            key = f"k{turn}-{number}"
            agent.spawn(key, long_name)
            agent.ended(key)
            agent.send({"do": "forget", "key": key})
    agent.listed()
    assert (bench.directory / "exits.log").stat().st_size <= (1 << 20) + (64 << 10)
    assert (bench.directory / "spawns.log").stat().st_size <= (1 << 20) + (64 << 10)
    kill_launcher(launcher)
    bench.launcher()
    assert len(bench.agent().listed()["ended"]) < 6000


def test_records_that_are_of_use_survive_a_rewriting(bench: Bench) -> None:
    small = " from peerload.launcher import record_log; record_log.LOG_BYTES_MAX = 1 << 16;"
    bench.code = CODE.replace(" main()", f"{small} main()")
    launcher = bench.launcher()
    agent = bench.agent()
    kept = []
    for number in range(1000):
        key = f"k{number}"
        agent.spawn(key, b"/no/such/" + b"x" * 180)
        agent.ended(key)
        if number % 100:
            agent.send({"do": "forget", "key": key})
        else:
            kept.append(key)
    agent.listed()
    assert (bench.directory / "exits.log").stat().st_size < 1 << 17, "it was rewritten"
    kill_launcher(launcher)
    bench.launcher()
    ended = dict(bench.agent().listed()["ended"])
    assert set(kept) <= set(ended)
    assert all(ended[key]["exit_code"] == 127 for key in kept)


@pytest.mark.long
def test_it_does_not_grow_with_the_tasks_it_has_run(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()

    def run(first: int, count: int) -> None:
        for start in range(first, first + count, 50):
            keys = [f"k{number}" for number in range(start, start + 50)]
            for key in keys:
                agent.spawn(key, b"/bin/true")
            waiting = set(keys)
            while waiting:
                event = agent.next()
                if event["is"] == "ended":
                    waiting.discard(event["key"])
                    agent.send({"do": "forget", "key": event["key"]})

    run(0, 200)
    before = memory_kib(launcher.pid, "Anonymous")
    run(1000, 1800)
    assert memory_kib(launcher.pid, "Anonymous") < before + 512
    assert memory_kib(launcher.pid, "Pss") < 14_000
    descriptors = len(list(Path(f"/proc/{launcher.pid}/fd").iterdir()))
    assert descriptors < 16 + 3 * OPEN_MAX, (
        "it keeps those of the next tasks' cgroups, and none of a task that has ended"
    )
