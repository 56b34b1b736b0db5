"""How fast files travel: to the agent at submit, to another node before a task starts there, and again when nothing has changed.

`python tests/bench/bench_files.py`: one large file, and many small ones, between two agents in network namespaces of their own
(over loopback for who is not root). In the same round and between the same namespaces: a bare copy over a socket (read, sent,
received, written), the same with TLS and BLAKE3, which is the least that this Python can do, and `rsync -a` to its daemon where
it is installed. The last lines hold each figure against its target; of each round the ratio counts, so that another load of the
machine in another round does no harm. The ratios hold on any machine, the seconds do not; processor time for a MiB compares best.
--directory: where files and agents live, such as a tmpfs, to measure processor and not disk.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
from blake3 import blake3

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.cli.common.agent_process import program_words
from peerload.security import cluster_dir
from peerload.security.tls import Credentials
from tests.bench.support import (
    Agent,
    agents,
    arguments,
    inside,
    median_text,
    namespace_address,
    network_namespaces,
    pss_bytes,
    report_taken,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MIB = 1 << 20
SMALL_FILES, SMALL_BYTES, SMALL_IN_DIRECTORY = 10_000, 10_000, 100
SAMPLE_S = 0.2
SETTLED_S = 2.5
"""Files that were changed so shortly before a snapshot are read again by the next one."""
ROUNDS_BEGIN_S_MAX = 240.0
"""No round begins later than this after the first, so that all of them take less than six minutes."""
SUBMITS = 5
"""Submissions of the same unchanged snapshot, and as many without files, in each round."""
RSYNC_PORT = 8730
RSYNC_UP_S_MAX = 30.0


class Memory(threading.Thread):
    """The most that an agent and its launcher grew by while this ran, in bytes."""

    def __init__(self, started: list[Agent]) -> None:
        super().__init__(daemon=True)
        self._before = {agent.pids: pss_bytes(agent.pids) for agent in started}
        self._over = threading.Event()
        self.grown_bytes = 0

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for pids, before in self._before.items():
                with contextlib.suppress(OSError):  # it is being stopped
                    self.grown_bytes = max(self.grown_bytes, pss_bytes(pids) - before)

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.grown_bytes


def bare_copy(source: Path, target: Path, ends: Sequence[str], tls: Credentials | None = None) -> None:
    """Copy the files of a directory over a TCP connection from one network namespace to the other, one process on each side, and
    nothing else; with ``tls``, encrypted as the links are, with the digest of all that came."""
    with inside(ends[1] if ends else ""):
        listener = socket.create_server((namespace_address(1) if ends else "127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        with inside(ends[0] if ends else ""):
            out = socket.create_connection(listener.getsockname())
        with out if tls is None else tls.client.wrap_socket(out) as out:
            for path in sorted(source.iterdir()):
                with path.open("rb", buffering=0) as file:
                    while data := file.read(MIB):
                        out.sendall(data)
        os._exit(0)
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(MIB))
    digest = blake3()
    connection = connection if tls is None else tls.server.wrap_socket(connection, server_side=True)
    with connection, (target / "copy").open("wb", buffering=0) as file:
        while got := connection.recv_into(buffer):
            if tls is not None:
                digest.update(buffer[:got])
            file.write(buffer[:got])
    listener.close()
    os.waitpid(pid, 0)


def make_files(directory: Path, *, large_mib: int, small: int) -> None:
    """Random content, so that no block is another's; dates of yesterday."""
    for number in range(small):
        path = directory / f"d{number // SMALL_IN_DIRECTORY}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(SMALL_BYTES))
    if large_mib:
        with (directory / "large").open("wb") as file:
            for _ in range(large_mib):
                file.write(os.urandom(MIB))
    yesterday = time.time() - 86400
    for path in directory.rglob("*"):
        os.utime(path, (yesterday, yesterday))
    time.sleep(SETTLED_S)
    (directory / ".gitignore").write_text("*.o\n")  # some file of every tree is new


def timed(act: Callable[[], object]) -> float:
    """Elapsed seconds."""
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def spent_of(pids: Sequence[int]) -> float:
    """Processor time of these processes so far, in seconds: that of threads which have ended, too."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


class Trip:
    """One directory that travels from the first agent to the second: each step is timed, and what it costs both agents."""

    def __init__(self, directory: Path, started: list[Agent], name: str, taken: dict[str, list[float]]) -> None:
        self._directory = directory
        self._home, self._other = started
        self._pids = [pid for agent in started for pid in agent.pids]
        self._name = name
        self._taken = taken
        self._variables = {
            **os.environ,
            "PEERLOAD_SOCKET": self._home.socket,
            "XDG_CACHE_HOME": str(directory.parent / "cache"),
        }

    def go(self, which: str) -> None:
        """Submit it, held; release it; see it start."""
        words = ["submit", "--held", "--snapshot", "--node", self._other.node, "true"]
        self._step(f"{which}, to the agent", lambda: self._types(*words))
        task = self._task
        self._step(f"{which}, to the node", lambda: self._run(task))

    def submit_again(self) -> None:
        """Submit the same unchanged snapshot, and tasks without files, in turn: what the snapshot adds."""
        taken_s: dict[bool, list[float]] = {False: [], True: []}
        spent_s: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * SUBMITS):
            has_files = number % 2 == 1
            words = ["submit", "--held", *(["--snapshot"] if has_files else []), "true"]
            before_s = sum(os.times()[2:4]) + spent_of(self._pids)
            taken_s[has_files].append(timed(functools.partial(self._types, *words)))
            spent_s[has_files].append(sum(os.times()[2:4]) + spent_of(self._pids) - before_s)
        for what, each in (("more than without files", taken_s), ("more processor time than without files", spent_s)):
            more_s = statistics.median(each[True]) - statistics.median(each[False])
            self._taken.setdefault(f"{self._name}, unchanged, {what} s", []).append(more_s)

    def bare(self, name: str, act: Callable[[Path], object]) -> None:
        """Do the same without us. Processor time: without that of a daemon."""
        with tempfile.TemporaryDirectory(dir=self._directory.parent) as target:
            spent = os.times()
            took_s = timed(lambda: act(Path(target)))
            cpu = sum(after - before for after, before in zip(os.times()[:4], spent[:4], strict=True))
            self._taken.setdefault(f"{self._name}, {name} s", []).append(took_s)
            self._taken.setdefault(f"{self._name}, {name}, processor s", []).append(cpu)

    def _types(self, *words: str) -> None:
        done = subprocess.run(
            [*program_words(), *words],
            cwd=self._directory,
            env=self._variables,
            capture_output=True,
            text=True,
            check=True,
        )
        self._task = done.stdout.strip()

    def _run(self, task: str) -> None:
        self._home.client.call("release", tasks=[task])
        self._home.wait(task)

    def _step(self, what: str, act: Callable[[], object]) -> None:
        spent_s = spent_of(self._pids)
        took_s = timed(act)
        self._taken.setdefault(f"{self._name}, {what} s", []).append(took_s)
        self._taken.setdefault(f"{self._name}, {what}, agents' processor s", []).append(spent_of(self._pids) - spent_s)


@contextlib.contextmanager
def rsync_daemon(directory: Path, ends: Sequence[str]) -> Iterator[Callable[[Path, Path], None] | None]:
    """A daemon of rsync at the second end, which may write beneath the directory → a function that copies a directory to another
    over the link; None where rsync is not installed."""
    program = shutil.which("rsync")
    if program is None:
        yield None
        return
    address = namespace_address(1) if ends else "127.0.0.1"
    config = directory / "rsyncd.conf"
    owner = f"uid = {os.getuid()}\ngid = {os.getgid()}\n"
    config.write_text(f"use chroot = no\n{owner}[all]\npath = {directory}\nread only = no\n")
    at = [["ip", "netns", "exec", name, program] for name in ends] or [[program]] * 2
    words = [*at[1], "--daemon", "--no-detach", f"--config={config}", f"--address={address}", f"--port={RSYNC_PORT}"]

    def answers() -> bool:
        with contextlib.suppress(OSError), inside(ends[0] if ends else ""):
            socket.create_connection((address, RSYNC_PORT)).close()
            return True
        return False

    def copy(source: Path, target: Path) -> None:
        there = f"rsync://{address}:{RSYNC_PORT}/all/{target.relative_to(directory)}/"
        subprocess.run([*at[0], "-a", f"{source}/", there], check=True)

    with subprocess.Popen(words) as daemon:
        try:
            wait_until(answers, RSYNC_UP_S_MAX)
            yield copy
        finally:
            daemon.terminate()


class Target(NamedTuple):
    """One figure of each round, and the bound that it is held against."""

    figure: str
    rounds: Sequence[float]
    bound: float
    is_least: bool = False

    def __str__(self) -> str:
        middle = statistics.median(self.rounds)
        holds = middle >= self.bound if self.is_least else middle <= self.bound
        words = f"{'at least' if self.is_least else 'at most'} {self.bound:g}"
        return f"  {self.figure}: {median_text(self.rounds, '.2f')}, {words}: {'holds' if holds else 'MISSED'}"


def targets(taken: Mapping[str, Sequence[float]]) -> list[Target]:
    """The figures that have a target."""

    def ratio(name: str, floor: str) -> list[float]:
        return [one / least for one, least in zip(taken[name], taken[floor], strict=True)]

    found = [
        Target(
            "large: share of a bare socket copy",
            ratio("large, bare socket copy s", "large, first, to the node s"),
            0.6,
            is_least=True,
        ),
        Target("large: second time, seconds", taken["large, again, to the node s"], 2.0),
        Target("small: second time, seconds", taken["small, again, to the node s"], 1.0),
        Target(
            "small: submit of an unchanged snapshot, seconds more",
            taken["small, unchanged, more than without files s"],
            0.15,
        ),
        Target("growth of an agent and its launcher, MiB", taken["an agent and its launcher grew by, MiB"], 50.0),
    ]
    if "small, rsync -a s" in taken:
        found.insert(
            2, Target("small: multiple of rsync -a", ratio("small, first, to the node s", "small, rsync -a s"), 2.0)
        )
    return found


def one_round(mib: int, files: int, ends: Sequence[str], taken: dict[str, list[float]]) -> None:
    """Measure everything once, with agents that have nothing yet."""
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pl-bench-")))
        started = stack.enter_context(agents(2, mqtt=not ends, namespaces=ends))
        rsync = stack.enter_context(rsync_daemon(own, ends))
        tls = Credentials(cluster_dir.make(own / "cluster", "bare"), "bare", own / "tls")
        memory = Memory(started)
        memory.start()
        for name, large_mib, small in (("large", mib, 0), ("small", 0, files)):
            directory = own / name / "tree"
            directory.mkdir(parents=True)
            make_files(directory, large_mib=large_mib, small=small)
            trip = Trip(directory, started, name, taken)
            trip.go("first")
            trip.go("again")
            if name == "large":
                trip.bare("bare socket copy", functools.partial(bare_copy, directory, ends=ends))
                trip.bare("bare copy with TLS and BLAKE3", functools.partial(bare_copy, directory, ends=ends, tls=tls))
            else:
                trip.submit_again()
            if rsync is not None:
                trip.bare("rsync -a", functools.partial(rsync, directory))
            shutil.rmtree(directory)
        taken.setdefault("an agent and its launcher grew by, MiB", []).append(memory.stop() / MIB)


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        rounds=3,
        mib=(int, 1024, "size of the large file (default: %(default)s)"),
        files=(int, SMALL_FILES, "number of small files (default: %(default)s)"),
        directory=(str, tempfile.gettempdir(), "where the files and the agents live (default: %(default)s)"),
    )
    taken: dict[str, list[float]] = {}
    tempfile.tempdir = options.directory
    began_s, rounds = time.monotonic(), 0
    with network_namespaces() as ends:
        while rounds < options.rounds and time.monotonic() - began_s < ROUNDS_BEGIN_S_MAX:
            one_round(options.mib, options.files, ends, taken)
            rounds += 1
    found = targets(taken)
    where = "between two network namespaces" if ends else "over loopback"
    took_s = time.monotonic() - began_s
    lines = [
        f"{options.mib} MiB in one file, {options.files} files of {SMALL_BYTES} bytes, {where}",
        f"  medians of {rounds} rounds, which took {took_s:.0f} s",
        *map(str, found),
    ]
    if shutil.which("rsync") is None:
        lines.append("  small: not compared with rsync -a, which is not installed")
    report_taken("\n".join(lines), {one.figure: [*one.rounds] for one in found}, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
