"""Copies of a state directory: never two agents with the same database, and no task that runs on beside its second copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.broker_fixtures import broker, short_directory  # noqa: F401 -- fixtures
from tests.integration.cluster import Agent, Cluster, is_alive
from tests.integration.shared import bring_back
from tests.support import wait_until

if TYPE_CHECKING:
    from peerload.cli.demo.broker import BrokerProcess

AS_ON_ANOTHER_MACHINE = (  # the claim on the database is one machine's
    "from peerload.agent import preflight;"
    " preflight.claim = lambda *_: None; preflight.end_foreign_launcher = lambda *_: False"
)


def _copy(state: Path, to: Path) -> None:
    """While an agent commits, files that belong together would be copied at different times."""
    subprocess.run(["cp", "-a", str(state), str(to)], check=True)


def _copy_at_rest(agent: Agent, to: Path, *others: Agent) -> None:
    """Copy the state of an agent that runs, which is killed for that and started again. others: who shares with it."""
    agent.kill()
    _copy(agent.state, to)
    bring_back([agent, *others])


def _begins_with(agent: Agent, code: str) -> None:
    """Have this agent execute some Python first."""
    words = agent.words()
    code = f"import sys; {code}; from peerload.cli.main import main; sys.exit(main())"
    agent.words = lambda: [sys.executable, "-I", "-c", code, *words[words.index("agent") :]]  # type: ignore[method-assign]


def test_an_agent_with_a_copy_of_the_state_of_another_is_refused_on_the_same_machine_and_on_another() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=1)
        held = agent.call("submit", token="a token of its own", spec=cluster.spec("true"), held=True)["id"]
        copy = cluster.add("copy", slots=1)
        copy.node = "n1"
        _copy_at_rest(agent, copy.state)
        machine = cluster.directory / "machine-id"
        machine.write_text("f" * 32, encoding="ascii")
        _begins_with(
            copy,
            f"import pathlib; from peerload.agent import preflight; preflight.MACHINE_ID = pathlib.Path({str(machine)!r})",
        )
        copy.spawn()
        assert copy.reap() != 0
        assert "another machine" in copy.log_end()
        (copy.state / "origin").unlink()
        copy.spawn()
        assert copy.reap() != 0
        assert str(agent.pid) in copy.log_end()
        assert agent.show(held)["state"] == "held"
        agent.kill()
        copy.start()  # the only one that is left
        assert copy.show(held)["state"] == "held"


def test_tasks_that_ran_when_an_older_copy_was_put_back_are_ended_first_and_nothing_is_promised_about_them() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=1)
        backup = cluster.directory / "backup"
        _copy_at_rest(agent, backup)
        runs = agent.submit("sh", "-c", f"echo $$ > {cluster.directory}/pid; exec sleep 600")
        file = cluster.directory / "pid"
        wait_until(lambda: file.exists() and file.read_text(encoding="ascii").strip(), what=f"{runs} to run")
        pid = int(file.read_text(encoding="ascii"))
        store = agent.database("SELECT value FROM meta WHERE key = 'store_id'")
        agent.kill()
        shutil.rmtree(agent.state)
        _copy(backup, agent.state)
        agent.start()
        assert not is_alive(pid)
        assert any("copy" in notice for notice in agent.call("info")["notices"])
        assert agent.database("SELECT value FROM meta WHERE key = 'store_id'") != store


def test_of_two_agents_with_copies_of_one_state_on_two_machines_the_younger_ends() -> None:
    with Cluster() as cluster:
        first, other = cluster.linked(2, slots=1)
        first.wait(first.submit("true"))
        copy = cluster.add("copy", "--peer", other.listen, slots=1)
        copy.node = "n1"
        _copy_at_rest(first, copy.state, other)
        _begins_with(copy, AS_ON_ANOTHER_MACHINE)
        copy.spawn()
        assert copy.reap() != 0
        assert "copy of" in copy.log_end()
        assert first.runs
        wait_until(
            lambda: any("copy of" in notice for notice in first.call("info")["notices"]), what="the first to say so"
        )
        wait_until(lambda: {"n1", "n2"} <= other.peers_alive(), what="the first to be back")
        first.wait(first.submit("true"))


def test_of_two_agents_with_copies_of_one_state_that_share_a_broker_alone_the_younger_ends(
    broker: BrokerProcess,  # noqa: F811
) -> None:
    with Cluster() as cluster:
        first = cluster.agent("n1", "--mqtt", broker.url, slots=1)
        copy = cluster.add("copy", "--mqtt", broker.url, slots=1)
        copy.node = "n1"
        _copy_at_rest(first, copy.state)
        _begins_with(copy, AS_ON_ANOTHER_MACHINE)
        copy.spawn()
        assert copy.reap() != 0
        assert "copy of" in copy.log_end()
        wait_until(
            lambda: any("copy of" in notice for notice in first.call("info")["notices"]), what="the first to say so"
        )
        first.wait(first.submit("true"))
