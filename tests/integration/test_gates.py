"""Groups, tasks that wait for others, and tasks that are tried again, with real agents that are killed in between."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from peerload.model.errors import PeerloadError
from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOTES = r"""
exec 9>>"$0"
echo "$PEERLOAD_TASK_ID $PEERLOAD_ATTEMPT start" >&9
if [ -p "$1" ]; then read _ <"$1"; else sleep "$1"; fi
echo "$PEERLOAD_TASK_ID $PEERLOAD_ATTEMPT stop" >&9
exit "${2:-0}"
"""
"""Appends a line to the ledger when it starts and when it stops: the order of the lines is that of what happened. In between
it sleeps for so many seconds, or waits for a line from a named pipe."""


@pytest.fixture(name="cluster")
def fixture_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def submit(
    agent: Agent, ledger: Path, seconds: float | str, *more: str, node: str = "", held: bool = False, **terms: object
) -> str:
    placement = {"node": node} if node else {}
    spec = agent.cluster.spec("sh", "-c", NOTES, str(ledger), str(seconds), *more, placement=placement)
    return str(agent.call("submit", token=secrets.token_hex(16), spec=spec, terms=terms, held=held)["id"])


def noted(ledger: Path) -> list[tuple[str, str]]:
    """(task, start or stop), in the order in which it happened."""
    if not ledger.exists():
        return []
    return [(line.split()[0], line.split()[2]) for line in ledger.read_text(encoding="ascii").splitlines()]


def most_at_a_time(ledger: Path) -> int:
    running = most = 0
    for _, what in noted(ledger):
        running += 1 if what == "start" else -1
        most = max(most, running)
    return most


@pytest.mark.long
def test_a_group_of_two_over_three_nodes_never_has_more_at_work(cluster: Cluster) -> None:
    home, other, _ = cluster.linked(3, slots=2)
    ledger = cluster.directory / "ledger"
    home.call("group", name="render", slots=2)
    tasks = [submit(home, ledger, 0.3, node=f"n{number % 3 + 1}", group="render") for number in range(20)]
    wait_until(lambda: len(noted(ledger)) >= 6, 30, "some to run")
    home.kill()
    other.kill()
    other.start()
    home.start()
    assert {task["state"] for task in home.wait(*tasks, timeout_s=120).values()} == {"done"}
    assert most_at_a_time(ledger) == 2
    assert set(Counter(noted(ledger)).values()) == {1}
    (group,) = home.call("groups")["groups"]
    assert (group["slots"], group["taken"], group["waiting"]) == (2, 0, 0)


@pytest.mark.long
def test_a_chain_over_three_homes_with_kills_in_between(cluster: Cluster) -> None:
    agents = cluster.linked(3)
    ledger = cluster.directory / "ledger"
    first = submit(agents[0], ledger, 2.0, held=True)
    chain = [first]
    for number in range(1, 6):
        chain.append(submit(agents[number % 3], ledger, 0.1, node=f"n{3 - number % 3}", after_ok=[chain[-1]]))
    last = agents[(len(chain) - 1) % 3]
    reason = f"waits for {chain[-2]} (queued)"
    wait_until(lambda: last.show(chain[-1])["reason"] == reason, what="its home to have been told")
    agents[0].call("release", tasks=[first])
    wait_until(lambda: noted(ledger), what="the first to run")
    for agent in agents:
        agent.kill()
    for agent in reversed(agents):
        agent.spawn()
    for agent in agents:
        agent.await_ready()
    for number, task in enumerate(chain):
        assert agents[number % 3].wait(task, timeout_s=100)[task]["state"] == "done"
    starts = [task for task, what in noted(ledger) if what == "start"]
    assert starts == chain
    order = noted(ledger)
    for before, after in itertools.pairwise(chain):
        assert order.index((before, "stop")) < order.index((after, "start"))


def test_a_failure_cancels_what_needed_its_success_on_another_home(cluster: Cluster) -> None:
    one, two = cluster.linked(2)
    ledger = cluster.directory / "ledger"
    gate = cluster.directory / "gate"
    os.mkfifo(gate)
    fails = submit(one, ledger, str(gate), "3")
    needs = submit(two, ledger, 0.1, after_ok=[fails])
    needs_that = submit(one, ledger, 0.1, after_ok=[needs])
    whatever = submit(two, ledger, 0.1, after=[fails])
    gate.write_text("go on\n", encoding="ascii")
    ended = two.wait(needs)[needs]
    assert (ended["state"], fails in ended["reason"]) == ("cancelled", True)
    ended = one.wait(needs_that)[needs_that]
    assert (ended["state"], needs in ended["reason"]) == ("cancelled", True)
    assert two.wait(whatever, timeout_s=60)[whatever]["state"] == "done"


@pytest.mark.long
def test_a_home_that_is_away_is_waited_for_and_one_that_is_forgotten_holds_what_waits(cluster: Cluster) -> None:
    one, two = cluster.linked(2)
    ledger = cluster.directory / "ledger"
    long = submit(two, ledger, 600.0)
    waits = submit(one, ledger, 0.1, after=[long])
    two.kill()
    wait_until(lambda: "its home n2 is" in one.show(waits)["reason"], 30, "n2 to be missed")
    with pytest.raises(PeerloadError, match="only n2 can"):
        submit(one, ledger, 0.1, after=[f"n2/{int(long.partition('/')[2]) + 7}"])
    wait_until(lambda: "dead" in one.show(waits)["reason"], 60, "n2 to be called dead")
    one.call("forget", node="n2")
    held = one.await_state(waits, "held")
    assert {"n2", long} <= set(held["reason"].replace(",", "").split())
    one.call("release", tasks=[waits])
    assert one.wait(waits)[waits]["state"] == "done"


@pytest.mark.long
def test_retries_count_attempts_across_nodes_and_restarts_and_keep_the_last_output(cluster: Cluster) -> None:
    home, _ = cluster.linked(2)
    count = cluster.directory / "count"
    script = 'echo x >>"$0"; n=$(wc -l <"$0"); echo "attempt $n is $PEERLOAD_ATTEMPT"; [ $n -ge 3 ]'
    spec = cluster.spec("sh", "-c", script, str(count), placement={"node": "n2"})
    reply = home.call("submit", token=secrets.token_hex(16), spec=spec, terms={"retries": 5})
    task = str(reply["id"])
    wait_until(lambda: count.exists() and len(count.read_text()) >= 2, 30, "it to fail once")
    home.kill()
    home.start()
    assert home.wait(task, timeout_s=60)[task]["state"] == "done"
    assert home.output(task)[0] == b"attempt 3 is 3\n"
    shown = home.show(task)
    assert (shown["retries"], shown["failures"]) == (5, 2)
    assert sum("retry " in step["reason"] for step in shown["history"]) == 2


@pytest.mark.long
def test_the_time_limit_counts_for_each_attempt_and_each_member(cluster: Cluster) -> None:
    home, _ = cluster.linked(2)
    spec = cluster.spec("sleep", "600", placement={"node": "n2"}, time_limit_s=0.5)
    reply = home.call("submit", token=secrets.token_hex(16), spec=spec, terms={"retries": 1}, array=[(1, 2, 1)])
    ended = home.wait(str(reply["id"]), timeout_s=60)
    assert {task["exit_code"] for task in ended.values()} == {124}
    assert {home.show(task)["attempt"] for task in ended} == {2}


@pytest.mark.long
def test_a_priority_reaches_what_another_node_has_queued(cluster: Cluster) -> None:
    home = cluster.agent("n1", slots=1)
    there = cluster.agent("n2", "--peer", home.listen, slots=1)
    cluster.await_acquainted([home, there])
    ledger, go = cluster.directory / "ledger", cluster.directory / "go"
    words = ["sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; echo $PEERLOAD_TASK_ID >>{ledger}"]
    first = home.submit(*words, placement={"node": "n2"})
    home.await_state(first, "running", timeout_s=60)
    second, third = (home.submit(*words, placement={"node": "n2"}) for _ in range(2))
    wait_until(lambda: {home.show(task)["state"] for task in (second, third)} == {"leased"}, 60, "n2 to have them")
    said = there.cli("prio", "9", third, first).stdout.decode()
    assert f"{third}  priority 9; " in said
    assert f"{first}  " in said
    later = home.submit("true", placement={"node": "n2"})
    home.await_state(later, "leased")  # n2 has answered what it was told after the priority
    go.touch()
    home.wait(first, second, third)
    assert ledger.read_text().split() == [first, third, second]


def test_pausing_a_group_and_priorities_survive_a_crash(cluster: Cluster) -> None:
    home = cluster.agent(slots=1)
    ledger = cluster.directory / "ledger"
    assert home.cli("group", "set", "g", "--slots", "1").returncode == 0
    gate = cluster.directory / "gate"
    os.mkfifo(gate)
    first, second, third = (submit(home, ledger, seconds, group="g") for seconds in (str(gate), 0.1, 0.1))
    home.await_state(first, "running")
    assert home.cli("group", "pause", "g").returncode == 0
    assert home.cli("prio", "7", third, second, env={}).returncode == 0
    assert json.loads(home.cli("prio", "--json", "9", third).stdout)["changed"] == [third]
    gate.write_text("go on\n", encoding="ascii")
    home.wait(first)
    home.kill()
    home.start()
    assert (home.show(second)["state"], "group g" in home.show(second)["reason"]) == ("queued", True)
    assert home.show(third)["priority"] == 9
    assert "peerload group resume g" in os.fsdecode(home.cli("why", third).stdout)
    assert home.cli("group", "resume", "g").returncode == 0
    home.wait(second, third)
    assert [task for task, what in noted(ledger) if what == "start"] == [first, third, second]


def test_mistakes_are_named_with_what_to_do(cluster: Cluster) -> None:
    home = cluster.agent()
    task = home.submit("true")
    home.wait(task)
    wrong = {
        ("submit", "--after", "n1/2", "true"): "n1/2",
        ("submit", "--after", "n1/99", "true"): "n1/1",
        ("submit", "--after", "n1/1.5", "true"): "n1/1.5",
        ("submit", "--after", "n9/1", "true"): "n9",
        ("submit", "--after-ok", "../x", "true"): "../x",
        ("submit", "--group", "\x1b[31m", "true"): "\\x1b",
        ("submit", "--retries", "101", "true"): "100",
        ("submit", "--once", "--retries", "1", "true"): "--once",
        ("group", "set", "g"): "--slots",
        ("group", "set", "g", "--slots", "-1"): "-1",
        ("group", "pause", "g"): "g",
        ("group", "rm", "g"): "g",
        ("group", "paus", "g"): "paus",
        ("prio", "high", "1"): "high",
        ("prio", "5", "77"): "77",
    }
    for words, named in wrong.items():
        done = home.cli(*words)
        said = os.fsdecode(done.stderr)
        assert done.returncode in (2, 125), words
        assert named in said, (words, said)
        assert "\x1b" not in said
        assert len(said.splitlines()) <= 2, said
    assert set(home.states()) == {task}
