"""The walk: which files a task passes from `peerload submit` until another node starts its process.

`python -m tests.walk` starts two real agents, keeps the first one busy, submits tasks to it, and traces the calls of all functions
of peerload in the real processes. It prints each distinct file with the lines of the functions that were called, and the spine of
docs/architecture.md in the order of the first visits. Files count that most submissions visit. Callbacks of the event loop that
would run anyway (`BACKGROUND`) are left out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

from tests.integration import cluster as real
from tests.integration import forks
from tests.integration.cluster import ROOT
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

FILES_MAX = 45
SPINE_MAX = 16
SUBMISSIONS = 5
QUIET_S = 2.5
"""Pause between two submissions: gossip about the end of one does not fall into the next one."""
HOME, EXECUTOR = "n1", "n2"
BEFORE_THE_ORDER = ("cli", "home", "executor")
ROLES = (*BEFORE_THE_ORDER, "launcher")
ORDER = ("peerload/agent/launcher/client.py", "spawn")
"""Where the executor's agent orders the process."""
TRIVIAL_LINES_MAX = 12
"""A file of which no more lines can be executed on the walk is a candidate for merging."""
TRACING = ROOT / "tests/tracing"
ARCHITECTURE = ROOT / "docs/architecture.md"


BACKGROUND = (
    "peerload/core/membership/gossip",
    "peerload/agent/peers/membership.py",
    "peerload/agent/sensors/",
    "peerload/agent/systemd.py",
    "peerload/agent/completion/retention.py",
    "peerload/agent/daemon.py watch_memory",
    "peerload/agent/store/disk_space.py watch",
    "peerload/agent/control/connection.py watch",
    "peerload/agent/launcher/mps.py run",
    "peerload/core/sharing/sharing.py pull",
    "peerload/core/sharing/sharing.py give_requested",
)
"""A callback in which such a file, or function of a file, is visited would run anyway: gossip, sensors, watchers, and nodes without
work that ask others for some."""


class Call(NamedTuple):
    """One call of a function: when, in which process and callback, and where the function is."""

    at_ns: int
    pid: int
    callback: int
    file: str
    line: int
    function: str


class Tracer:
    """A call trace of all processes that are started with ``environment``, while it is switched on."""

    def __init__(self, directory: Path) -> None:
        self._switch = directory / "switch"
        self._trace = directory / "trace"
        self._switch.write_bytes(b"0")
        self._trace.touch()
        self.environment = {
            "PYTHONPATH": str(TRACING),
            "PEERLOAD_WALK_SWITCH": str(self._switch),
            "PEERLOAD_WALK_TRACE": str(self._trace),
        }

    @contextlib.contextmanager
    def on(self) -> Iterator[Callable[[], list[Call]]]:
        """Trace meanwhile; the function returns the calls so far."""
        start = self._trace.stat().st_size

        def calls() -> list[Call]:
            lines = self._trace.read_bytes()[start:].decode().splitlines()
            fields = [line.split(" ") for line in lines]
            return sorted(
                Call(int(at), int(pid), int(callback), file, int(line), name)
                for at, pid, callback, file, line, name in fields
            )

        self._set(b"1")
        try:
            yield calls
        finally:
            self._set(b"0")

    def _set(self, value: bytes) -> None:
        with self._switch.open("r+b", buffering=0) as switch:
            switch.write(value)


def walks(count: int) -> list[dict[str, list[Call]]]:
    """Trace this many submissions, one after the other, after one that is not looked at → the calls of each, by role."""
    program = (sys.executable, "-m", "peerload")
    with (
        tempfile.TemporaryDirectory(prefix="pl-walk-") as directory,
        mock.patch.object(real, "program", return_value=program),
        mock.patch.object(forks, "WORKS", new=False),  # a process that is forked reads no sitecustomize
        real.Cluster() as cluster,
    ):
        tracer = Tracer(Path(directory))
        cluster.environment.update(tracer.environment)
        home = cluster.agent(HOME, slots=1)
        executor = cluster.agent(EXECUTOR, "--peer", home.listen, slots=4)
        cluster.await_acquainted([home, executor])
        home.submit("sleep", "600", placement={"local": True})
        wait_until(lambda: "running" in home.states().values(), what="the home to be busy")
        roles = {home.pid: "home", executor.pid: "executor", executor.launcher_pid: "launcher"}
        found = []
        for _ in range(1 + count):
            with tracer.on() as calls:
                command = home.spawn_cli("submit", "true")
                told = command.communicate()[0].decode().strip()
                assert command.returncode == 0, told
                wait_until(
                    lambda: any(call.function == "_event" and call.at_ns > _ordered_ns(calls()) for call in calls())
                )
                traced = calls()
            node = home.wait(told)[told]["node"]
            assert node == EXECUTOR, f"{told} ran on {node}"
            time.sleep(QUIET_S)
            found.append(_by_role(traced, roles | {command.pid: "cli"}))
        return found[1:]


def _ordered_ns(calls: Iterable[Call]) -> float:
    """When the order to spawn was given; infinity if it is still to come."""
    return next((call.at_ns for call in calls if (call.file, call.function) == ORDER), float("inf"))


def _by_role(calls: Sequence[Call], roles: dict[int, str]) -> dict[str, list[Call]]:
    """The calls until the order, of the command and the agents; those from there until the process is known, of the launcher."""
    by_role: dict[str, list[Call]] = {role: [] for role in ROLES}
    for call in calls:
        if call.pid in roles:
            by_role[roles[call.pid]].append(call)
    arrived_ns = next(call.at_ns for call in by_role["home"] if call.file.startswith("peerload/agent/control/"))
    ordered_ns = _ordered_ns(by_role["executor"])
    for role in ("home", "executor"):
        within = [call for call in by_role[role] if arrived_ns <= call.at_ns <= ordered_ns]
        background = {call.callback for call in within if f"{call.file} {call.function}".startswith(BACKGROUND)}
        by_role[role] = [call for call in within if call.callback not in background]
    by_role["launcher"] = [call for call in by_role["launcher"] if call.at_ns >= ordered_ns]
    return by_role


@functools.cache
def _spans(file: str) -> dict[int, set[int]]:
    """First line of each function of a file → its lines of code, without the docstring."""
    spans: dict[int, set[int]] = {}
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            spans[first] = {line for part in body for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)}
    return spans


def _lines(calls: Iterable[Call]) -> int:
    """The lines of the functions that are called, which a reader of the walk has to read in a file."""
    lines: set[int] = set()
    for call in calls:
        lines |= _spans(call.file).get(call.line, {call.line})
    return len(lines)


def spine() -> list[str]:
    """The files of the walk in docs/architecture.md, in its order."""
    section = ARCHITECTURE.read_text(encoding="utf-8").partition("## The walk")[2].partition("\n## ")[0]
    return list(dict.fromkeys(re.findall(r"\]\(\.\./((?:peerload|policies)/[\w/]+\.py)\)", section)))


def report(found: Sequence[dict[str, list[Call]]]) -> str:
    """What `python -m tests.walk` prints."""
    visits = {role: Counter(file for walk in found for file in {call.file for call in walk[role]}) for role in ROLES}
    always = {role: {file for file, times in visits[role].items() if 2 * times > len(found)} for role in ROLES}
    together = set.union(*(always[role] for role in BEFORE_THE_ORDER))
    first = min(found, key=lambda walk: sum(map(len, walk.values())))
    calls = {
        file: [call for role in ROLES for call in first[role] if call.file == file]
        for file in dict.fromkeys(call.file for role in ROLES for call in first[role])
        if any(file in always[role] for role in ROLES)
    }
    trivial = [file for file, made in calls.items() if file in together and _lines(made) <= TRIVIAL_LINES_MAX]
    rows = ["files in the order of the first visit: roles, lines of the functions called, calls, file, functions"]
    for file, made in calls.items():
        roles = "".join(role[0] if file in always[role] else "." for role in ROLES)
        names = dict.fromkeys(call.function for call in made if not call.function.startswith("<"))
        mark = "-" if file in trivial else " "
        rows.append(f"  {roles} {_lines(made):4} {len(made):4} {mark} {file}  {' '.join(names)}")
    rows.append("\nthe spine of docs/architecture.md: number of the first visit, file")
    visited = list(calls)
    rows += [f"  {visited.index(file) + 1 if file in visited else 'never visited':>4}  {file}" for file in spine()]
    rows.append("\n" + ", ".join(f"{role} {len(always[role])}" for role in ROLES))
    rows.append(f"distinct files up to the order to start: {len(together)} (aim: at most {FILES_MAX})")
    rows.append(f"of these with at most {TRIVIAL_LINES_MAX} lines to read (marked -): {len(trivial)}")
    rows.append(f"files in the spine: {len(spine())} (aim: at most {SPINE_MAX})")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Walk and print."""
    reader = argparse.ArgumentParser(prog="python -m tests.walk", description=__doc__)
    reader.add_argument(
        "--submissions", type=int, default=SUBMISSIONS, help="how many tasks are traced (default: %(default)s)"
    )
    sys.stdout.write(report(walks(reader.parse_args().submissions)))


if __name__ == "__main__":
    main()
