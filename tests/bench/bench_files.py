"""How fast files travel: to the agent at submit, to another node before a task starts there, and again when nothing has changed.

`python tests/bench/bench_files.py`: one large file, and many small ones; beside them, in the same round, a bare copy over a
socket (read, sent, received, written), the same with TLS and SHA-256, which is the least that this Python can do, and
`rsync -a` where there is one. The ratios hold on any machine, the seconds do not; processor time for a MiB compares best.
--directory: where files and agents live, such as a tmpfs, to measure processor and not disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.cli.common.agent_process import program_words
from peerload.security import cluster_dir
from peerload.security.tls import Credentials
from tests.bench.support import Agent, agents, arguments, pss_bytes, report_taken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB = 1 << 20
SMALL_FILES, SMALL_BYTES, SMALL_IN_DIRECTORY = 10_000, 10_000, 100
SAMPLE_S = 0.2
SETTLED_S = 2.5
"""Files that were changed so shortly before a snapshot are read again by the next one."""


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


def bare_copy(source: Path, target: Path, tls: Credentials | None = None) -> None:
    """Copy the files of a directory over a TCP connection, one process on each side, and nothing else; with ``tls``, encrypted
    as the links are, with the digest of all that came."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        out = socket.create_connection(listener.getsockname())
        with out if tls is None else tls.client.wrap_socket(out) as out:
            for path in sorted(source.iterdir()):
                with path.open("rb", buffering=0) as file:
                    while data := file.read(MIB):
                        out.sendall(data)
        os._exit(0)
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(MIB))
    digest = hashlib.sha256()
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

    def bare(self, name: str, act: Callable[[Path], object]) -> None:
        """Do the same without us."""
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


def rsync(source: Path, target: Path) -> None:
    subprocess.run(["rsync", "-a", f"{source}/", f"{target}/"], check=True)


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
    grown: list[float] = []
    tempfile.tempdir = options.directory
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="pl-bench-") as own, agents(2, mqtt=True) as started:
            tls = Credentials(cluster_dir.make(Path(own) / "cluster", "bare"), "bare", Path(own) / "tls")
            memory = Memory(started)
            memory.start()
            for name, large_mib, small in (("large", options.mib, 0), ("small", 0, options.files)):
                directory = Path(own) / name / "tree"
                directory.mkdir(parents=True)
                make_files(directory, large_mib=large_mib, small=small)
                trip = Trip(directory, started, name, taken)
                trip.go("first")
                trip.go("again")
                if name == "large":
                    trip.bare("bare socket copy", lambda target, tree=directory: bare_copy(tree, target))  # type: ignore[misc]
                    copy = functools.partial(bare_copy, directory, tls=tls)
                    trip.bare("bare copy with TLS and SHA-256", copy)
                if shutil.which("rsync"):
                    trip.bare("rsync -a", lambda target, tree=directory: rsync(tree, target))  # type: ignore[misc]
                shutil.rmtree(directory)
            grown.append(memory.stop() / MIB)
    taken["an agent and its launcher grew by, MiB"] = grown
    head = f"{options.mib} MiB in one file, {options.files} files of {SMALL_BYTES} bytes; medians of {options.rounds}"
    report_taken(head, {}, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
