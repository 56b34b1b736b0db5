"""An agent that is stopped (SIGSTOP): nobody who asks it something waits for ever, and who followed goes on with it."""

from __future__ import annotations

import contextlib
import shutil

import pytest

from tests.integration.cluster import Cluster, ended, is_alive
from tests.support import wait_until


@pytest.mark.long
def test_a_stopped_agent_is_named_and_who_follows_waits_on() -> None:
    with Cluster() as cluster, contextlib.ExitStack() as stack:
        agent = cluster.agent("n1")
        gate = agent.directory / "gate"
        held = 'until [ -e "$0" ]; do sleep 0.05; done'
        task = agent.submit("sh", "-c", held, str(gate))
        other = agent.submit("sh", "-c", f"echo started; {held}; echo ended", str(gate))
        wait_until(lambda: agent.output(other)[0])
        following = stack.enter_context(ended(agent.spawn_cli("logs", "-f", other)))
        assert following.stdout is not None
        assert following.stdout.read(8) == b"started\n"
        agent.pause()
        try:
            up = ("up", "--state", str(agent.state))
            asked = [
                stack.enter_context(ended(agent.spawn_cli(*words)))
                for words in (("ls",), ("submit", "true"), ("wait", task), up)
            ]
            for process in asked:
                _out, told = process.communicate(timeout=60)
                assert process.returncode == 125
                assert f"kill -CONT {agent.pid}" in told.decode()
            assert following.poll() is None
            gate.touch()  # they end while it is stopped
        finally:
            agent.resume()
        assert following.communicate(timeout=60) == (b"ended\n", b"")
        assert following.returncode == 0


def test_an_agent_whose_state_directory_is_removed_ends_and_says_why() -> None:
    with Cluster() as cluster:
        agent = cluster.agent()
        gate = agent.directory / "gate"
        task = agent.submit("sh", "-c", 'until [ -e "$0" ]; do sleep 0.05; done', str(gate))
        agent.await_state(task, "running")
        launcher = agent.launcher_pid
        shutil.rmtree(agent.state)
        assert agent.reap() == 125
        assert str(agent.state) in agent.log_end()
        assert "a bug" not in agent.log_end()
        told = agent.cli("ls").stderr.decode()
        assert str(agent.state) in told
        assert f"kill {launcher}" in told
        assert is_alive(launcher)
        gate.touch()
        wait_until(lambda: not is_alive(launcher), what="its launcher to end with the task")
