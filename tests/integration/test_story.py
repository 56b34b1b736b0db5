"""What the first page promises, typed as it stands there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.main import VERBS
from tests.in_process import cli_in
from tests.integration import forks
from tests.integration.cluster import Cluster, is_alive, program, without_waits
from tests.integration.test_docs_commands import PLAIN
from tests.support import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TASK_KEYS = [
    "id",
    "name",
    "user",
    "state",
    "node",
    "home",
    "argv",
    "cpus",
    "mem_bytes",
    "gpus",
    "attempt",
    "migrations",
    "submitted_at",
    "started_at",
    "ended_at",
    "exit_code",
    "signal",
    "reason",
]
NODE_KEYS = [
    "node",
    "state",
    "load",
    "region",
    "cpus",
    "cpus_busy",
    "cpus_foreign",
    "mem_bytes",
    "mem_used_bytes",
    "tasks_running",
    "tasks_queued",
    "gpus",
    "age_s",
    "incarnation",
    "drained",
]


class Shell:
    """A user's shell: a home of their own, `peerload` on the PATH, nothing configured."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        programs = cluster.directory / "bin"
        programs.mkdir()
        words = " ".join(f"'{word}'" for word in program())
        for name, text in (("peerload", f'exec {words} "$@"'), ("python", f"exec '{sys.executable}' -I \"$@\"")):
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        self.work = cluster.directory / "work"
        self.work.mkdir()
        self.environment = {**cluster.environment, "PATH": f"{programs}:{cluster.environment['PATH']}"}

    def __call__(self, line: str) -> subprocess.CompletedProcess[str]:
        """Type a line; one that means nothing to a shell but its spaces is run without one."""
        words = [*program(), *line.split()[1:]] if PLAIN.fullmatch(line) else ["/bin/sh", "-c", line]
        how: dict[str, Any] = {"cwd": self.work, "env": self.environment, "stdin": subprocess.DEVNULL}
        done = forks.run(words, program(), PATIENCE_S, **how)
        return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())

    def json(self, line: str) -> dict[str, Any]:
        """Type a line that answers with one JSON object."""
        done = self(line)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["v"] == 1
        assert isinstance(told, dict)
        return told


@pytest.fixture
def shell() -> Iterator[Shell]:
    with Cluster() as cluster:
        made = Shell(cluster)
        yield made
        for directory in (cluster.directory / "run/peerload/agent.sock", cluster.directory / "second.sock"):
            if directory.exists():
                made(f"peerload down --all --socket {directory}")


def test_the_story(shell: Shell) -> None:
    done = shell("peerload up && peerload run sh -c 'echo out; echo err >&2; exit 7'")
    assert done.returncode == 7
    assert done.stdout.endswith("out\n")
    assert without_waits(done.stderr.encode()) == b"err\n"

    task = shell.json("peerload submit --json sleep 1")["id"]
    listed = shell.json("peerload ls --json")["tasks"]
    assert {row["id"] for row in listed} >= {task}
    for row in listed:
        assert set(TASK_KEYS) <= set(row)
    (node,) = shell.json("peerload nodes --json")["nodes"]
    assert set(NODE_KEYS) <= set(node)
    assert (node["state"], node["drained"]) == ("alive", False)

    up = shell.json("peerload up --json")
    assert shell.json("peerload up --json") == up, "up twice is up once"
    assert set(up) >= {"pid", "launcher_pid", "socket", "listen", "node"}
    long = shell("peerload submit sh -c 'echo $$; exec sleep 600'").stdout.strip()
    wait_until(lambda: shell(f"peerload logs {long}").stdout, what="the task's pid")
    pid = int(shell(f"peerload logs {long}").stdout)
    os.kill(up["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(up["pid"]), what="the agent to be gone")
    assert shell("peerload ls").returncode == 125
    again = shell.json("peerload up --json")
    assert again["pid"] != up["pid"]
    assert again["launcher_pid"] == up["launcher_pid"]
    states = {row["id"]: row["state"] for row in shell.json("peerload ls --json")["tasks"]}
    assert set(states) >= {task, long}
    assert states[long] == "running"
    assert is_alive(pid)
    assert shell(f"peerload wait {task}").returncode == 0

    assert shell("peerload down").returncode == 0
    assert not is_alive(again["pid"])
    assert is_alive(pid)
    assert shell("peerload up").returncode == 0
    assert shell("peerload down --all").returncode == 0
    assert not is_alive(pid)
    assert not is_alive(again["launcher_pid"])
    wait_until(lambda: not shell.cluster.left_over(), what="nothing to be left")
    assert shell("peerload ls").returncode == 125

    # A task that `down --all` has ended is not acknowledged as done, and never lost: it runs again.
    assert shell("peerload up").returncode == 0
    (row,) = [row for row in shell.json("peerload ls --json")["tasks"] if row["id"] == long]
    assert row["state"] in ("failed", "queued", "leased", "running")
    assert row["reason"]
    assert shell("peerload cancel --wait all").returncode == 0
    assert shell("peerload down").returncode == 0
    wait_until(lambda: not shell.cluster.left_over(), what="the launcher to end, since no task is left")


def test_the_help_names_every_verb(tmp_path: Path) -> None:
    def told(*words: str) -> str:
        done = cli_in(os.environ, str(tmp_path), *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    named = re.findall(r"^  ([a-z]+) ", told("--help"), re.MULTILINE)
    for verb in VERBS:
        assert verb in named
        assert f"peerload {verb}" in told(verb, "--help")
    assert told("--version").startswith("peerload ")
