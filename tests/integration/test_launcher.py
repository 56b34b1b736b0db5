"""The launcher as a process of its own: what it starts, limits, freezes, records and survives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from peerload.launcher.protocol import ALREADY_RUNS
from peerload.launcher.record_log import process_start
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = str(Path(__file__).resolve().parents[2])
CODE = (
    f"import sys; sys.path[:0] = [{ROOT!r}, {str(Path(msgpack.__file__).parent.parent)!r}];"
    " from peerload.launcher.server import main; main()"
)
PATIENT = CODE.replace("; main()", "; from peerload.launcher import server; server.WAIT_S_MAX = 60.0; main()")
"""A launcher that leaves tasks in their lanes while the machine stands still."""
LIMIT_BYTES = 1 << 20


class Agent:
    """The other end of the launcher's socket, blocking."""

    def __init__(self, directory: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(60)
        self._sock.connect(str(directory / "launcher.sock"))
        self._directory = directory
        self.events: list[dict[str, Any]] = []
        self.froze: list[tuple[str, str]] = []
        self.run = ""

    def send(self, *requests: dict[str, Any]) -> None:
        raw = msgpack.packb(list(requests))
        self._sock.sendall(len(raw).to_bytes(4, "big") + raw)

    def send_raw(self, raw: bytes) -> None:
        self._sock.sendall(raw)

    def _exactly(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            part = self._sock.recv(size - len(raw))
            if not part:
                raise ConnectionError("the launcher hung up")
            raw += part
        return raw

    def next(self) -> dict[str, Any]:
        """The next event that is not for people alone."""
        while not self.events:
            told = msgpack.unpackb(self._exactly(int.from_bytes(self._exactly(4), "big")))
            self.froze += [(event["is"], event["key"]) for event in told if event["is"] in ("frozen", "thawed")]
            for event in told:
                if event.get("with_start"):  # whoever ran so short has no pid any more
                    start = {"is": "started", "key": event["key"], "pid": 0, "started_at": event["exit"]["started_at"]}
                    self.events.append(start)
                if event["is"] not in ("frozen", "thawed"):
                    self.events.append(event)
        return self.events.pop(0)

    def listed(self) -> dict[str, Any]:
        self.send({"do": "list"})
        event = self.next()
        assert event["is"] == "listed"
        self.run = event["run"]
        return event

    def spawn(self, key: str, *argv: bytes, **changed: object) -> None:
        request: dict[str, Any] = {
            "do": "spawn",
            "key": key,
            "argv": list(argv),
            "environment": {b"PATH": b"/usr/bin:/bin"},
            "directory": b"/tmp",
            "umask": 0o022,
            "stdout": str(self._directory / f"{key}.out"),
            "stderr": str(self._directory / f"{key}.err"),
            "deadline_s": 0,
            "output_bytes_max": LIMIT_BYTES,
        }
        self.send(request | changed)

    def ended(self, key: str) -> dict[str, Any]:
        """The exit of this task; what comes before it is let go."""
        while True:
            event = self.next()
            if event["is"] == "ended" and event["key"] == key:
                exit_: dict[str, Any] = event["exit"]
                return exit_

    def lost(self, key: str) -> dict[str, Any]:
        """What is told of a task that has no exit; what comes before it is let go."""
        while True:
            event = self.next()
            assert (event["is"], event["key"]) != ("ended", key), event
            if event["is"] == "expired" and event["key"] == key:
                return event

    def started(self, key: str) -> int:
        event = self.next()
        assert (event["is"], event["key"]) == ("started", key), event
        return int(event["pid"])

    def close(self) -> None:
        self._sock.close()


class Bench:
    """One directory, the launchers that were started in it, and the agents that spoke to them."""

    def __init__(self, directory: Path, units: str = "", memory: str = "") -> None:
        self.directory = directory
        self.code = CODE
        self._flags = ["--directory", str(directory)]
        for flag, kind in (("--units", units), ("--memory", memory)):
            self._flags += [flag, kind] if kind else []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.agents: list[Agent] = []

    def start(self, *before: str) -> subprocess.Popen[bytes]:
        """Another launcher; ``before``: the command that is to run it."""
        process = subprocess.Popen(
            [*before, sys.executable, "-I", "-S", "-c", self.code, *self._flags], stderr=subprocess.PIPE
        )
        self.processes.append(process)
        return process

    def launcher(self) -> subprocess.Popen[bytes]:
        process = self.start()
        wait_until(self._answers, what="the launcher answers")
        return process

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.directory / "launcher.sock"))
            except OSError:
                return False
        return True

    def agent(self) -> Agent:
        agent = Agent(self.directory)
        self.agents.append(agent)
        assert agent.listed()["pid"]
        return agent

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
            process.wait(60)
            if process.stderr is not None:
                process.stderr.close()
        shutil.rmtree(self.directory)


@pytest.fixture(name="bench")
def fixture_bench() -> Iterator[Bench]:
    made = Bench(Path(tempfile.mkdtemp(prefix="pl", dir="/tmp")))
    try:
        yield made
    finally:
        made.close()


PF_EXITING = 4
"""A process with this flag has let go of its memory and its files, or is about to; it will not execute again."""


def _state(pid: int) -> str:
    """The letter of a process's state, "" if there is none, or it is on its way out."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] != "Z" and int(fields[6]) & PF_EXITING else fields[0]


def test_a_task_runs_with_its_environment_directory_and_umask(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    script = b"pwd; umask; echo $WHO; ls /proc/self/fd | wc -l; echo no >&2; exit 3"
    agent.spawn(
        "a",
        b"sh",
        b"-c",
        script,
        environment={b"PATH": b"/usr/bin:/bin", b"WHO": b"\xff"},
        umask=0o077,
        directory=b"/usr",
    )
    agent.started("a")
    exit_ = agent.ended("a")
    out = (bench.directory / "a.out").read_bytes()
    assert exit_["exit_code"] == 3
    assert out == b"/usr\n0077\n\xff\n4\n"  # 0, 1, 2 and the one ls reads the directory with
    assert (exit_["stdout_bytes"], exit_["stderr_bytes"]) == (len(out), 3)
    assert exit_["ended_at"] >= exit_["started_at"] > 0
    assert exit_["usage"]["memory_bytes_max"] > 0


@pytest.mark.rule("X7")
def test_it_leads_a_session_of_its_own_and_a_signal_reaches_its_whole_group(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sh", b"-c", b"sleep 1000 & echo $!; wait")
    pid = agent.started("a")
    out = bench.directory / "a.out"
    wait_until(lambda: out.exists() and out.read_bytes().endswith(b"\n"))
    child = int(out.read_bytes())
    assert os.getsid(pid) == pid
    agent.send({"do": "signal", "key": "a", "signal": 15})
    exit_ = agent.ended("a")
    assert (exit_["exit_code"], exit_["signal"]) == (128 + 15, 15)
    wait_until(lambda: _state(child) in {"", "Z"}, what="its child has ended too")


def test_empty_output_leaves_no_file(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"true")
    exit_ = agent.ended("a")
    assert (exit_["stdout_bytes"], exit_["stderr_bytes"]) == (0, 0)
    assert not (bench.directory / "a.out").exists()
    assert not (bench.directory / "a.err").exists()


def test_what_cannot_be_started_ends_as_a_shell_would_show_it(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    plain = bench.directory / "plain"
    plain.write_text("no program")
    agent.spawn("none", b"no-such-command")
    agent.spawn("path", b"/no/such/command")
    agent.spawn("mode", os.fsencode(plain))
    agent.spawn("folder", b"true", directory=b"/no/such/directory")
    agent.spawn("long", b"true", b"x" * (200 << 10))  # one word may have 128 KiB
    agent.spawn("nul", b"true", b"a\0b")
    exits = {}
    for _ in range(6):
        event = agent.next()
        assert event["is"] == "ended"
        exits[event["key"]] = (event["exit"]["exit_code"], event["exit"]["reason"])
    assert exits["none"] == (127, Says.COMMAND_MISSING("no-such-command"))
    assert exits["path"] == (127, Says.COMMAND_MISSING("/no/such/command"))
    assert exits["mode"] == (126, Says.CANNOT_EXECUTE(plain, os.strerror(errno.EACCES)))
    assert exits["folder"] == (126, Says.CANNOT_ENTER("/no/such/directory", os.strerror(errno.ENOENT)))
    assert exits["long"][0] == 126
    assert "too long" in exits["long"][1]
    assert exits["nul"][0] == 126


def test_a_mebibyte_of_arguments(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sh", b"-c", b"echo $#", *[b"x" * 1023] * 1024)
    assert agent.ended("a")["exit_code"] == 0
    assert (bench.directory / "a.out").read_bytes() == b"1023\n"


def test_a_key_is_started_once(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sh", b"-c", b"echo once; exec sleep 1000")
    pid = agent.started("a")
    agent.spawn("a", b"sh", b"-c", b"echo twice")
    assert agent.started("a") == pid
    out = bench.directory / "a.out"
    wait_until(lambda: out.exists() and out.stat().st_size)
    agent.send({"do": "signal", "key": "a", "signal": 9})
    first = agent.ended("a")
    agent.spawn("a", b"sh", b"-c", b"echo twice")
    assert agent.ended("a") == first
    assert out.read_bytes() == b"once\n"


def test_a_task_outlives_its_agent_and_its_end_is_told_to_the_next(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    go = bench.directory / "go"
    os.mkfifo(go)
    agent.spawn("a", b"sh", b"-c", f"read x < {go}; exit 7".encode())
    agent.started("a")
    agent.close()
    agent = bench.agent()
    assert [key for key, _ in agent.listed()["running"]] == ["a"]
    agent.close()
    go.write_text("now\n")
    wait_until(lambda: (bench.directory / "exits.log").stat().st_size, what="its exit is recorded")
    listed = bench.agent().listed()
    assert listed["running"] == []
    assert [(key, exit_["exit_code"]) for key, exit_ in listed["ended"]] == [("a", 7)]


def test_a_newer_agent_replaces_the_older(bench: Bench) -> None:
    bench.launcher()
    old = bench.agent()
    bench.agent()
    with pytest.raises(ConnectionError):
        old.next()


def test_an_end_of_a_launcher_is_an_end_of_its_tasks(bench: Bench) -> None:
    first = bench.launcher()
    agent = bench.agent()
    agent.spawn("done", b"true")
    agent.ended("done")
    agent.spawn("a", b"sleep", b"1000")
    pid = agent.started("a")
    wait_until(
        lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"), what="it has let go of our socket"
    )
    first.kill()
    first.wait()
    bench.start()
    wait_until(bench._answers)
    assert _state(pid) in {"", "Z"}, "left-overs are ended before anybody is answered"
    listed = bench.agent().listed()
    assert listed["running"] == []
    assert [key for key, _ in listed["ended"]] == ["done"]  # "a" is in neither: it has died


def test_without_an_agent_it_ends_with_its_last_task(bench: Bench) -> None:
    launcher, gate = bench.launcher(), bench.directory / "gate"
    agent = bench.agent()
    agent.spawn("a", b"sh", b"-c", b"until [ -e %s ]; do sleep 0.05; done; exit 3" % bytes(gate))
    agent.started("a")
    agent.send({"do": "retire"})
    agent.close()
    again = bench.agent()  # it is wanted after all
    again.spawn("b", b"true")
    again.ended("b")
    assert launcher.poll() is None
    again.send({"do": "retire"}, {"do": "ping"})
    while again.next()["is"] != "pong":
        pass
    again.close()
    assert launcher.poll() is None, "a runs"
    gate.touch()
    assert launcher.wait(60) == 0
    bench.launcher()
    assert {key: fields["exit_code"] for key, fields in bench.agent().listed()["ended"]} == {"a": 3, "b": 0}


def test_forgotten_records_do_not_come_back(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"true")
    agent.ended("a")
    agent.send({"do": "forget", "key": "a"})
    assert agent.listed()["ended"] == []


def test_a_torn_tail_of_the_exit_log_is_ignored(bench: Bench) -> None:
    launcher, keys = bench.launcher(), ["first"]
    agent = bench.agent()
    agent.spawn("first", b"true")
    agent.ended("first")
    for number, tail in enumerate((b"\0\0", b"\0\0\0\5aaaahello", b"\xff" * 100)):
        launcher.kill()
        launcher.wait()
        with (bench.directory / "exits.log").open("ab") as file:
            file.write(tail)
        launcher = bench.launcher()
        agent = bench.agent()
        keys.append(f"next{number}")
        agent.spawn(keys[-1], b"true")
        agent.ended(keys[-1])
        assert [key for key, _ in agent.listed()["ended"]] == keys


def test_what_comes_after_its_lease_is_not_started(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    made = bench.directory / "made"
    for number in range(20):
        past_s = time.clock_gettime(time.CLOCK_BOOTTIME) - 1
        agent.spawn(f"late{number}", b"touch", str(made).encode(), deadline_s=past_s)
        event = agent.next()
        assert (event["is"], event["key"]) == ("expired", f"late{number}")
    agent.spawn("now", b"true")
    agent.started("now")
    agent.ended("now")
    assert not made.exists()


def test_output_over_the_limit_keeps_its_head_and_its_tail(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    size = 100 << 20
    agent.spawn("a", b"sh", b"-c", b"echo first; head -c 104857600 /dev/zero | tr '\\0' x; echo; echo last")
    exit_ = agent.ended("a")
    out = bench.directory / "a.out"
    assert exit_["stdout_bytes"] == out.stat().st_size == size + 12
    assert out.stat().st_blocks * 512 <= LIMIT_BYTES + (64 << 10)
    with out.open("rb") as file:
        assert file.read(LIMIT_BYTES // 2) == b"first\n" + b"x" * (LIMIT_BYTES // 2 - 6)
        file.seek(-LIMIT_BYTES // 2, os.SEEK_END)
        assert file.read() == b"x" * (LIMIT_BYTES // 2 - 6) + b"\nlast\n"


@pytest.mark.rule("X6")
def test_garbage_costs_the_connection_alone(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sleep", b"1000")
    pid = agent.started("a")
    for raw in (
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\0\0\0\1\xc1",
        b"\0\0\0\1\x01",
        b"\0\0\0\2\x91\x01",
        b"\0\0\0\2\x91\x80",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        agent.send_raw(raw)
        with pytest.raises(ConnectionError):
            agent.next()
        agent = bench.agent()
        assert [key for key, _ in agent.listed()["running"]] == ["a"]
    assert launcher.poll() is None
    assert _state(pid) in {"R", "S", "D"}


def test_a_full_disk_ends_no_task(bench: Bench) -> None:
    """Neither the logs nor the output take another byte: events are told all the same."""
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sleep", b"1000")
    agent.started("a")
    agent.spawn("b", b"cat", input=str(bench.directory / "b.in"))
    agent.started("b")
    resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    agent.send({"do": "input", "key": "b", "size": 0, "ends": True})
    assert agent.ended("b")["exit_code"] == 0
    assert [key for key, _ in bench.agent().listed()["running"]] == ["a"]  # and the log takes no line about it
    assert launcher.poll() is None
    assert (bench.directory / "exits.log").stat().st_size == 0


def test_there_is_one_launcher_of_a_directory(bench: Bench) -> None:
    bench.launcher()
    second = bench.start()
    assert second.wait(60) == ALREADY_RUNS
    assert second.stderr is not None
    assert Says.SECOND_LAUNCHER().encode() in second.stderr.read()


def held(agent: Agent, bench: Bench) -> Path:
    """A task that ends when the file is there, and two that wait for it in a lane."""
    gate = bench.directory / "gate"
    agent.spawn("a", b"sh", b"-c", b'until [ -e "$0" ]; do sleep 0.01; done', os.fsencode(gate))
    agent.spawn("b", b"echo", b"b", after="a")
    agent.spawn("c", b"echo", b"c", after="b")
    return gate


def test_a_task_that_was_given_ahead_starts_when_the_one_before_has_ended(bench: Bench) -> None:
    bench.code = PATIENT
    bench.launcher()
    agent = bench.agent()
    gate = held(agent, bench)
    agent.spawn("d", b"true", after="unknown")  # nothing is before it
    assert agent.ended("d")["exit_code"] == 0
    assert not (bench.directory / "b.out").exists()
    gate.touch()
    exits = [agent.ended(key) for key in ("a", "b", "c")]
    assert all(before["ended_at"] <= after["started_at"] for before, after in itertools.pairwise(exits))
    assert (bench.directory / "c.out").read_bytes() == b"c\n"


def test_what_waits_behind_a_task_that_takes_long_is_given_back_and_never_started(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    gate = held(agent, bench)
    assert [agent.lost(key)["never_started"] for key in ("b", "c")] == [True, True]
    gate.touch()
    agent.ended("a")
    agent.spawn("d", b"true", after="a")
    agent.ended("d")
    assert not (bench.directory / "b.out").exists()


def test_a_lease_is_moved_of_a_task_that_was_given_ahead_and_decides_when_its_turn_comes(bench: Bench) -> None:
    bench.code = PATIENT
    bench.launcher()
    agent = bench.agent()
    gate = held(agent, bench)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    agent.send({"do": "lease", "key": "b", "deadline_s": now_s - 1.0, "ts": 2.0})
    agent.send({"do": "lease", "key": "c", "deadline_s": now_s + 600.0, "ts": 3.0})
    agent.send({"do": "lease", "key": "c", "deadline_s": now_s - 1.0, "ts": 2.0})  # an older one
    gate.touch()
    assert agent.lost("b")["never_started"]
    assert agent.ended("c")["exit_code"] == 0
    assert not (bench.directory / "b.out").exists()


def test_a_signal_ends_a_task_that_was_given_ahead_before_its_turn(bench: Bench) -> None:
    bench.code = PATIENT
    bench.launcher()
    agent = bench.agent()
    gate = held(agent, bench)
    agent.send({"do": "signal", "key": "b", "signal": signal.SIGTERM})
    assert agent.ended("b")["signal"] == signal.SIGTERM
    gate.touch()
    assert agent.ended("c")["exit_code"] == 0
    assert not (bench.directory / "b.out").exists()


def test_an_agent_that_connects_hears_that_waiting_tasks_run_and_then_their_ends(bench: Bench) -> None:
    bench.code = PATIENT
    bench.launcher()
    gate = held(bench.agent(), bench)
    agent = bench.agent()
    assert {key for key, _ in agent.listed()["running"]} == {"a", "b", "c"}
    gate.touch()
    told: dict[str, str] = {}
    while told.keys() != {"a", "b", "c"}:
        event = agent.next()
        told |= {event["key"]: event["is"]} if event["is"] != "started" else {}
    assert set(told.values()) == {"ended"}


@pytest.mark.parametrize("by_signal", [True, False])
def test_stop_ends_every_task_and_itself(bench: Bench, by_signal: bool) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("soft", b"sleep", b"1000")
    agent.spawn("hard", b"sh", b"-c", b"trap '' TERM; echo ready; while :; do sleep 1000; done")
    out = bench.directory / "hard.out"
    wait_until(lambda: out.exists() and out.stat().st_size)
    if by_signal:
        launcher.terminate()
    else:
        agent.send({"do": "stop"})
    assert agent.ended("soft")["signal"] == signal.SIGTERM
    assert agent.ended("hard")["signal"] == signal.SIGKILL
    assert launcher.wait(60) == 0


@pytest.mark.long
def test_it_is_small(bench: Bench) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"true")
    agent.ended("a")
    lines = Path(f"/proc/{launcher.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    assert next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) < 14_000


@pytest.mark.rule("X6", "S11")
def test_its_socket_is_private_and_its_lock_held(bench: Bench) -> None:
    launcher = bench.launcher()
    assert (bench.directory / "launcher.sock").stat().st_mode & 0o777 == 0o600
    assert process_start(launcher.pid) > 0
    with (bench.directory / "launcher.lock").open("rb") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pytest.fail("the lock is not held")
