"""A verb that is forked is for its caller and for /proc what a process of its own is."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration import forks
from tests.integration.cluster import Agent, Cluster, ended, program, without_waits

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not forks.WORKS, reason="nothing is forked here")


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1")


def test_its_streams_and_exit_code_are_those_of_a_process(agent: Agent, tmp_path: Path) -> None:
    words = [*program(), "run", "sh", "-c", "cat; pwd; echo $MINE; umask; echo bad >&2; exit 7"]
    environment = {**agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket, "MINE": "grüß"}
    how = {"env": environment, "cwd": tmp_path, "umask": 0o027}
    done = forks.run(words, program(), 60.0, b"given\n", **how)
    plain = subprocess.run(words, input=b"given\n", capture_output=True, check=False, **how)  # type: ignore[call-overload]
    assert (done.returncode, done.stdout, without_waits(done.stderr)) == (
        plain.returncode,
        plain.stdout,
        without_waits(plain.stderr),
    )
    assert done.stdout == f"given\n{tmp_path}\ngrüß\n0027\n".encode()


def test_proc_shows_it_as_a_process(agent: Agent) -> None:
    def shown(name: str) -> set[bytes]:
        return {word for word in Path(f"/proc/{agent.pid}/{name}").read_bytes().split(b"\0") if word}

    assert shown("cmdline") == {os.fsencode(word) for word in agent.words()}
    assert shown("environ") == {f"{name}={value}".encode() for name, value in agent.cluster.environment.items()}
    assert os.getsid(agent.pid) == agent.pid


def test_it_is_waited_for_signalled_and_killed(agent: Agent) -> None:
    with ended(agent.spawn_cli("run", "sh", "-c", "echo ready; exec sleep 600")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    with ended(agent.spawn_cli("events", "-f")) as process:
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        agent.cli("events", "-f", timeout_s=0.1)
