"""Helpers for all tests: waiting without sleeping, private ports and addresses, clusters and credentials, and the state
of a process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent.store.write_ahead import SecurityEvents
from peerload.security import cluster_dir
from peerload.security.tls import Credentials

if TYPE_CHECKING:
    import sqlite3
    from collections import Counter
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from peerload.security.cluster_dir import ClusterDirectory


PAUSE_S_MIN, PAUSE_S_MAX = 0.01, 0.1
"""Interval between checks of a wait: short at first, then longer, to limit the load on the agents under test."""
PATIENCE_S = 60.0
"""Minimum timeout of a wait: a busy machine may stall longer than expected, so a shorter one would fail at random."""


class PutEvents(list[Any]):
    """An `EventSink` that is the list of its events."""

    def put(self, event: object) -> None:
        self.append(event)


def wait_until(predicate: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """Return as soon as ``predicate()`` is true; fail after ``timeout_s`` (at least PATIENCE_S), naming ``what`` in the
    error."""
    timeout_s = max(timeout_s, PATIENCE_S)
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    pause_s = PAUSE_S_MIN
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or predicate}")
        pause.wait(pause_s)
        pause_s = min(1.5 * pause_s, PAUSE_S_MAX)


def own_loopback() -> str:
    """A loopback address that only this process uses, so that its free ports stay free."""
    return str(ipaddress.IPv4Address("127.64.0.0") + os.getpid())


@contextlib.contextmanager
def kept_port(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A reserved TCP port, which the system gives to no other socket, unlike a free one that was closed. A server with
    SO_REUSEADDR, as servers set it, can listen there; while none does, connections are refused."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((address, port))
        yield keeper.getsockname()[1]


@functools.cache
def _scratch() -> Path:
    """A directory for the duration of the tests."""
    directory = Path(tempfile.mkdtemp(prefix="pl-clusters-", dir="/tmp"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@functools.cache
def _cluster(name: str) -> ClusterDirectory:
    return cluster_dir.make(_scratch() / name, name)


def cluster_of(name: str = "default") -> ClusterDirectory:
    """The cluster of this name, created once for all tests."""
    return _cluster(name)


@functools.cache
def _credentials(node: str, name: str) -> Credentials:
    return Credentials(_cluster(name), node, _scratch() / f"{name}-{node}")


def credentials_of(node: str, name: str = "default") -> Credentials:
    """The credentials of a node of that cluster."""
    return _credentials(node, name)


def local_credentials_of(node: str) -> Credentials:
    """The credentials of a node of a cluster that never leaves this machine."""
    return Credentials(cluster_of()._replace(is_local=True), node, _scratch() / f"default-{node}")


def total(counters: Mapping[str, int], name: str) -> int:
    """The sum of a counter over all values of its label."""
    return sum(count for key, count in counters.items() if key.partition("{")[0] == name)


def _state(pid: int) -> str:
    """One letter as in /proc; X if the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return text[text.rindex(")") + 2]


def in_short(cases: Iterable[object], every: int) -> list[Any]:
    """Every ``every``-th of many cases, from the first on, in the gate; the others are for test-long."""
    return [
        case if number % every == 0 else pytest.param(case, marks=pytest.mark.long) for number, case in enumerate(cases)
    ]


def stands_still(pid: int) -> bool:
    """True if this process executes nothing: stopped by a signal, waiting for a child that was stopped before its exec
    (vfork), or frozen by its cgroup."""
    if _state(pid) in "Tt":
        return True
    if _state(pid) == "D":
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        if any(_state(int(child)) in "Tt" for child in children):
            return True
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for _, place, system, *_ in mounts:
            if not controllers and system == "cgroup2" and path != "/":
                return "frozen 1" in Path(place + path, "cgroup.events").read_text(encoding="ascii")
    return False


def steps_of(connection: sqlite3.Connection, work: Callable[[], object]) -> int:
    """Number of steps of SQLite's virtual machine that ``work`` takes on this connection."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    connection.set_progress_handler(step, 1)
    work()
    connection.set_progress_handler(None, 1)
    return steps


def security_events(counters: Counter[str], kept: list[tuple[str, str, str]] | None = None) -> SecurityEvents:
    """Security events that are counted, and appended to ``kept``, if given, as (rule, who, what)."""

    def record(_: str, rule: str, *, node: str = "", reason: str = "") -> None:
        if kept is not None:
            kept.append((rule, node, reason))

    return SecurityEvents(counters, cast("Any", SimpleNamespace(record=record)))
