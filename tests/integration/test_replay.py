"""Real agents under load, one of them killed and started again: what each decided comes out the same, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.policy.registry import load_preset, presets
from tests.in_process import cli_in
from tests.integration.broker_fixtures import broker, short_directory  # noqa: F401 -- fixtures
from tests.integration.cluster import ROOT, Agent, Cluster
from tests.integration.test_docs_commands import keys_told
from tests.support import wait_until

if TYPE_CHECKING:
    from peerload.cli.demo.broker import BrokerProcess

REPLAY = "import sys; from peerload.cli.main import main; sys.exit(main(['replay', *sys.argv[1:]]))"


def replay(path: Path, *words: str, hash_seed: int = 4711) -> subprocess.CompletedProcess[str]:
    """`peerload replay` under a hash seed of its own."""
    return subprocess.run(
        [sys.executable, "-c", REPLAY, *words, str(path)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def objects(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def recorded(cluster: Cluster, url: str, policy: str, slots: int = 2) -> list[Agent]:
    names = ("n1", "n2", "n3")
    more = ("--mqtt", url, "--policy", policy)
    agents = [
        cluster.add(n, *more, "--record", str(cluster.directory / f"{n}.rec"), slots=slots).spawn() for n in names
    ]
    for agent in agents:
        agent.await_ready()
    cluster.await_acquainted(agents)
    return agents


def ended_at(home: Agent) -> int:
    return sum(state == "done" for state in home.states().values())


IN_SHORT = ("adaptive",)
LIVE = [name for name in presets() if not load_preset(name).is_central]


@pytest.mark.parametrize("broker", ["mosquitto", pytest.param("amqtt", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize(
    "policy", [*IN_SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LIVE if name not in IN_SHORT)]
)
def test_decisions_come_out_again(policy: str, broker: BrokerProcess) -> None:  # noqa: F811
    with Cluster() as cluster:
        agents = recorded(cluster, broker.url, policy)
        home, other, third = agents
        third.wait(*[third.submit("sleep", "0.05", name="as-it-was") for _ in range(3)])
        tasks = [home.submit("sh", "-c", "echo told; sleep 0.1") for _ in range(20)]
        spec = cluster.spec("true", directory=b"/no/such/directory")
        nowhere = home.call("submit", token="nowhere-at-all", spec=spec, wait_for_node=True)["id"]
        home.call("cancel", tasks=[*tasks[-3:], nowhere])
        wait_until(lambda: ended_at(home) > 3, what="some to end")
        other.kill()
        other.start()
        tasks += [home.submit("sleep", "0.05") for _ in range(8)]
        wait_until(lambda: ended_at(home) > 15, what="more to end")
        home.kill()
        home.start()
        home.wait(*tasks)
        for agent in agents:
            agent.call("stop", all=True)
            agent.reap()
        starts = {}
        for agent in agents:
            done = replay(cluster.directory / f"{agent.node}.rec", "--json")
            assert done.returncode == 0, done.stdout + done.stderr
            starts[agent.node] = objects(done)
        assert [len(starts[agent.node]) for agent in agents] == [2, 2, 1]
        for start in (start for each in starts.values() for start in each):
            assert start["difference"] is None
            assert start["events_agreed"] == start["events"] > 0
            assert start["policy"] == policy
        assert sum(start["actions_agreed"] for start in starts["n1"]) > 50
        assert [start["ended"] for start in starts["n2"]] == [
            "incomplete: the agent was killed, or still runs",
            "the agent stopped",
        ]
        is_told_where_it_was_changed(cluster.directory / "n3.rec")


def is_told_where_it_was_changed(path: Path) -> None:
    """A recording of one start, in which a decision was forged."""
    data = path.read_bytes()
    events = objects(replay(path, "--events"))
    assert {"v", *keys_told("json.md", "`replay --events`")[0]} == set(events[0])
    assert events[0]["event"]["type"] == "AgentStarted"
    submitted = [event for event in events if event["event"]["type"] == "TaskSubmitted"]
    assert submitted[0]["event"]["spec"]["environment"].endswith(" bytes")
    # What was decided about the first of these tasks: its name in an action, not in the event before.
    first = data.index(b"as-it-was")
    second = data.index(b"as-it-was", first + 1)
    path.write_bytes(data[:second] + b"as-it-got" + data[second + 9 :])
    done = replay(path, "--json")
    assert done.returncode == 1
    (start,) = objects(done)
    assert {"v", *keys_told("json.md", "`replay`")[0]} == set(start)
    difference = start["difference"]
    assert difference["event_number"] == submitted[0]["number"] == start["events_agreed"] + 1
    assert "as-it-got" in str(difference["recorded"])
    assert "as-it-was" in str(difference["replayed"])
    text = replay(path).stdout
    assert f" event {difference['event_number']}, action {difference['action_number']}:" in text


def test_an_agent_with_more_slots_than_cpus_too() -> None:
    with Cluster() as cluster:
        path = cluster.directory / "recording"
        agent = cluster.agent("n1", "--record", str(path), slots=1000)
        agent.wait(agent.submit("true", array=[(1, 20, 1)]))
        agent.call("stop", all=True)
        agent.reap()
        done = replay(path)
        assert done.returncode == 0, done.stdout


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    for name, content, why in (
        ("empty", b"", "it is empty"),
        ("other", b"no recording\n", "not a recording"),
        ("newer", b"peerload recording 9\n", "another version"),
        ("missing", None, ""),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        done = cli_in(os.environ, str(tmp_path), "replay", str(tmp_path / name))
        assert (done.returncode, done.stdout) == (125, b""), name
        assert why in done.stderr.decode(), name


def test_an_agent_that_cannot_record_does_not_start(tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("dear reader")
    with Cluster() as cluster:
        agent = cluster.add("n1", "--record", str(letter)).spawn()
        assert agent.reap() == 125
        assert "record: " in agent.log_end()
        assert "choose another file" in agent.log_end()
