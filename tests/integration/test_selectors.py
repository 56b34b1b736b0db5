"""Selectors on the verbs that take tasks, tags and sweeps, against a real agent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.in_process import cli
from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", name="agent")
def fixture_agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=4)


def typed(agent: Agent, *words: str) -> str:
    done = cli(agent, *words)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def submitted(agent: Agent, *words: str) -> str:
    return typed(agent, "submit", *words).strip()


def states(agent: Agent, array: str) -> dict[str, str]:
    with agent.client() as client:
        return {str(task["id"]): task["state"] for task in client.call("show", tasks=[array])["tasks"]}


def selected(agent: Agent, **fields: Any) -> list[str]:
    with agent.client() as client:
        found: list[str] = client.call("select", **fields)["selected"]
        return found


def ids(agent: Agent, *words: str) -> list[str]:
    return [task["id"] for task in json.loads(typed(agent, "ls", "--json", *words))["tasks"]]


def test_ranges_and_places_from_the_last(agent: Agent) -> None:
    array = submitted(agent, "--held", "--array", "1-12", "true")
    last = submitted(agent, "--held", "true")
    answer = json.loads(typed(agent, "release", "--json", f"{array}.3-5,7"))
    assert answer["released"] == [f"{array}.{member}" for member in (3, 4, 5, 7)]
    assert len(typed(agent, "wait", "--json", "@~1.3-5,7").splitlines()) == 4
    assert ids(agent, f"{array}.1-4", "--state", "done") == [f"{array}.3", f"{array}.4"]
    json.loads(typed(agent, "cancel", "--json", "@~1.11-99,1"))
    ended = {f"{array}.{member}": "cancelled" for member in (1, 11, 12)}
    assert {task: state for task, state in states(agent, array).items() if state == "cancelled"} == ended
    typed(agent, "cancel", "@", "@~1")
    assert states(agent, last) == {last: "cancelled"}
    for words in (("cancel", "@~999999"), ("cancel", f"{array}.9-3"), ("cancel", f"{array}.40-50")):
        assert cli(agent, *words).returncode == 125


def test_tags_names_groups_and_states_select(agent: Agent) -> None:
    first = submitted(agent, "--held", "-J", "train-a", "--group", "gpu", "--tag", "p=x", "--tag", "seed=1", "true")
    second = submitted(agent, "--held", "-J", "train-b", "--tag", "p=x", "--array", "1-3", "true")
    other = submitted(agent, "--held", "-J", "other", "--tag", "p=y=z", "--tag", "p=y", "true")
    assert agent.show(first)["tags"] == {"p": "x", "seed": "1"}
    assert selected(agent, tags=["p=x"]) == [first, second]
    assert selected(agent, tags=["p=x", "seed"]) == [first]
    assert selected(agent, tags=["p"], name="*[!ab]") == [other]
    assert selected(agent, group="gpu", states=["held"]) == [first]
    assert ids(agent, "--name", "train-?", "--tag", "p") == [first, *(f"{second}.{n}" for n in (1, 2, 3))]
    typed(agent, "prio", "7", "--tag", "p=x")
    assert [agent.show(task)["priority"] for task in (first, f"{second}.2", other)] == [7, 7, 0]
    typed(agent, "cancel", f"{second}.2")
    assert selected(agent, tags=["p=x"], states=["held"]) == [first, f"{second}.1,3"]
    assert json.loads(typed(agent, "release", "--json", "--tag", "p"))["released"] == [
        first, f"{second}.1", f"{second}.3", other
    ]  # fmt: skip
    assert cli(agent, "wait", "--tag", "p").returncode == 125  # one is cancelled
    assert selected(agent, tags=["p"], states=["done"]) == [first, f"{second}.1,3", other]
    assert Says.NO_MATCH() in cli(agent, "cancel", "all", "--tag", "p").stderr.decode()
    typed(agent, "clean", "--tag", "p", "--name", "train*")
    assert selected(agent, tags=["p"]) == [other]
    for words in (
        ("submit", "--tag", "p", "true"),
        ("submit", "--tag", "-=1", "true"),
        ("cancel",),
        ("hold", "all", "3"),
    ):
        assert cli(agent, *words).returncode == 2


def test_all_is_what_the_verb_can_do_something_with(agent: Agent) -> None:
    held = submitted(agent, "--held", "true")
    failed = submitted(agent, "--array", "1-4", "--tag", "t=all", "sh", "-c", "exit $((PEERLOAD_ARRAY_INDEX % 2))")
    assert cli(agent, "wait", failed).returncode == 1
    again = typed(agent, "retry", "--tag", "t=all").split()
    assert len(again) == 1
    assert states(agent, again[0]).keys() == {f"{again[0]}.1", f"{again[0]}.3"}
    assert agent.show(f"{again[0]}.1")["retry_of"] == failed
    assert cli(agent, "wait", "@").returncode == 1
    assert json.loads(typed(agent, "release", "--json", "all"))["released"] == [held]
    agent.wait(held)
    assert json.loads(typed(agent, "cancel", "--json", "all")) == {
        "v": 1,
        "cancelled": [],
        "already_ended": [],
        "unreachable": [],
    }


def test_a_wait_for_a_tag_counts_what_failed_before_it_began(agent: Agent) -> None:
    failed = submitted(agent, "--tag", "w=1", "--group", "w", "-J", "waited", "sh", "-c", "exit 3")
    agent.wait(failed)
    for words in (("--tag", "w=1"), ("--group", "w"), ("all", "--name", "waited")):
        assert cli(agent, "wait", *words).returncode == 3
    assert cli(agent, "wait", "--tag", "w=2").returncode == 125
    assert cli(agent, "wait", "--tag", "w=1", "--state", "running").returncode == 0
    assert cli(agent, "wait", "--node", "n1").returncode == 0
    assert cli(agent, "wait", "all").returncode == 0


def test_a_signal_goes_to_what_runs_and_to_nothing_else(agent: Agent, tmp_path: Path) -> None:
    script = f"trap 'touch {tmp_path}/got-$PEERLOAD_ARRAY_INDEX; exit 3' USR1; touch {tmp_path}/ready-$PEERLOAD_ARRAY_INDEX; "
    array = submitted(agent, "--array", "1-3", "--tag", "s=1", "sh", "-c", script + "while :; do sleep 0.05; done")
    held = submitted(agent, "--held", "true")
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, what="all three to run")
    wait_until(lambda: set(states(agent, array).values()) == {"running"}, what="all three to be seen to run")
    done = agent.cli("signal", "--json", "usr1", f"{array}.2", held)
    assert done.returncode == 125
    told = {"v": 1, "signal": 10, "signalled": [f"{array}.2"], "not_running": [held], "unreachable": []}
    assert json.loads(done.stdout) == told
    assert agent.wait(f"{array}.2")[f"{array}.2"]["exit_code"] == 3
    assert typed(agent, "signal", "10", "--tag", "s") == f"{array}  2 tasks  signalled\n"
    assert {agent.wait(f"{array}.{n}")[f"{array}.{n}"]["exit_code"] for n in (1, 3)} == {3}
    assert {path.name for path in tmp_path.glob("got-*")} == {"got-1", "got-2", "got-3"}
    for words in (array, "all --tag s", "999999"):
        assert agent.cli("signal", "USR1", *words.split()).returncode == 125
    for words in ("", "USR1", f"NO {held}", f"{held} USR1"):
        assert agent.cli("signal", *words.split()).returncode == 2
    typed(agent, "cancel", held)


def test_the_outputs_of_several(agent: Agent) -> None:
    array = submitted(agent, "--array", "1-3", "sh", "-c", "echo $PEERLOAD_ARRAY_INDEX")
    typed(agent, "wait", array)
    assert typed(agent, "logs", array) == "1\n2\n3\n"
    assert typed(agent, "logs", "@.2-3") == "2\n3\n"
    assert typed(agent, "logs", f"{array}.2") == "2\n"
    assert cli(agent, "logs", "999999").returncode == 125


def test_wait_sums_an_array_up_and_names_its_failures(agent: Agent) -> None:
    array = submitted(agent, "--array", "1-30", "sh", "-c", "exit $((PEERLOAD_ARRAY_INDEX == 7 ? 5 : 0))")
    done = cli(agent, "wait", array)
    assert (done.returncode, done.stderr) == (5, b"")
    assert done.stdout.decode() == f"{array}.7  failed  exit 5  n1\n{array}: 30 tasks ended: 29 done, 1 failed\n"
    assert typed(agent, "wait", f"{array}.3") == f"{array}.3  done  exit 0  n1\n"
    assert len(cli(agent, "wait", "--json", array).stdout.splitlines()) == 30


def test_a_sweep_is_an_array_with_a_member_for_each_combination(agent: Agent, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text('shape,note\n3,"a, b"\n4,c\n')
    words = ("--param", "lr=0.1,0.01", "--param-file", str(table), "echo", "{lr}", "{shape}:{note}")
    sweep = submitted(agent, *words)
    typed(agent, "wait", sweep)
    assert typed(agent, "logs", sweep) == "0.1 3:a, b\n0.1 4:c\n0.01 3:a, b\n0.01 4:c\n"
    assert agent.show(f"{sweep}.2")["argv"] == ["echo", "0.1", "4:c"]


def test_a_list_counts_rows_not_members(agent: Agent) -> None:
    array = submitted(agent, "--held", "--array", "1-300", "--tag", "t=rows", "true")
    last = submitted(agent, "--held", "--tag", "t=rows", "true")
    done = cli(agent, "ls", "--tag", "t=rows", "--limit", "2")
    assert done.stderr == b""
    assert [line.split()[0] for line in done.stdout.decode().splitlines()] == ["ID", f"{array}.1-300", last]
    assert Says.ROWS_MAX(2).encode() in cli(agent, "ls", "--members", "--tag", "t=rows", "--limit", "2").stderr
    typed(agent, "cancel", "--tag", "t=rows")
