"""What is kept of ended tasks: by age, number and size; `clean`; and what a kill in the middle leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from peerload.model.errors import BadRequest, NoSuchTask
from tests.in_process import cli
from tests.integration.cluster import ROOT, Agent, Cluster, program
from tests.integration.shared import end_all
from tests.support import wait_until


@pytest.fixture(name="cluster")
def fixture_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.environment["PEERLOAD_RETENTION_EVERY_S"] = "0.1"
        yield cluster


@pytest.fixture(name="shared", scope="module")
def fixture_shared() -> Iterator[Agent]:
    with Cluster() as cluster:
        cluster.environment["PEERLOAD_RETENTION_EVERY_S"] = "0.1"
        yield cluster.agent("n1")


@pytest.fixture(name="agent")
def fixture_agent(shared: Agent) -> Iterator[Agent]:
    """An agent that keeps what has ended for as long as usual, and has nothing yet."""
    yield shared
    end_all(shared)
    wait_until(lambda: shared.call("clean") and not kept(shared), what="all that has ended to go")
    wait_until(lambda: not files(shared), what="its files to go")


def files(agent: Agent) -> list[str]:
    return sorted(path.name for path in (agent.state / "spool").iterdir())


def kept(agent: Agent) -> list[str]:
    return sorted(task["id"] for task in agent.call("history", limit=None)["tasks"])


def says(agent: Agent, size_bytes: int = 3) -> str:
    """A task that has written so much, ended."""
    task = agent.submit("sh", "-c", f"head -c {size_bytes} /dev/zero")
    agent.wait(task)
    return task


def reasons(agent: Agent) -> list[str]:
    events = agent.call("events", what=["store"])["events"]
    return [event["reason"] for event in events if event["state"] == "removed"]


def database(agent: Agent, table: str) -> int:
    return int(agent.database(f"SELECT count(*) FROM {table}")[0][0])


def test_of_many_the_oldest_go_with_their_files_and_never_one_that_has_not_ended(cluster: Cluster) -> None:
    cluster.environment["PEERLOAD_ENDED_TASKS_MAX"] = "3"
    agent = cluster.agent("n1", slots=4)
    waits = agent.submit("sleep", "600")
    agent.await_state(waits, "running")
    array = agent.submit("sh", "-c", "test $PEERLOAD_ARRAY_INDEX = 1 || exec sleep 600", array=[(1, 2, 1)])
    agent.await_state(f"{array}.1", "done")
    ended = [says(agent) for _ in range(6)]
    wait_until(lambda: len(kept(agent)) == 4, what="all but three and the array's to go")
    assert kept(agent) == sorted([f"{array}.1", *ended[-3:]])  # of an array that has not ended nothing goes
    wait_until(lambda: database(agent, "doomed") == 0)
    uids = {uid.hex() for (uid,) in agent.database("SELECT uid FROM tasks")}
    assert {name.partition("-")[0] for name in files(agent)} <= uids
    assert all(len(agent.output(task)[0]) == 3 for task in ended[-3:])
    with pytest.raises(NoSuchTask) as unknown:
        agent.show(ended[0])
    assert "removed" in unknown.value.why
    wait_until(lambda: any("more than 3 ended tasks" in reason for reason in reasons(agent)))
    agent.kill()
    agent.start()
    assert len(kept(agent)) == 4
    assert agent.submit("true").endswith("/9")
    agent.call("cancel", tasks=[array, waits], force=True)


def test_old_ones_go_and_no_number_is_given_twice(cluster: Cluster) -> None:
    cluster.environment["PEERLOAD_ENDED_KEPT_S"] = "0.5"
    agent = cluster.agent("n1")
    last = agent.submit("sh", "-c", "head -c 3 /dev/zero")  # it may be gone before anybody can wait for its end
    wait_until(lambda: database(agent, "tasks") == 0 and not kept(agent) and not files(agent))
    assert database(agent, "submissions") == 1  # its token is remembered for a week
    with pytest.raises(NoSuchTask):
        agent.show("@")
    agent.kill()
    agent.start()
    assert last == "n1/1"
    assert agent.submit("true") == "n1/2"


def test_beyond_their_size_the_oldest_outputs_go_and_the_tasks_stay(cluster: Cluster) -> None:
    cluster.environment["PEERLOAD_ENDED_OUTPUT_BYTES_MAX"] = str(250_000)
    agent = cluster.agent("n1")
    tasks = [says(agent, 100_000) for _ in range(4)]
    wait_until(lambda: agent.show(tasks[1])["output_gone_at"])
    assert [bool(agent.show(task)["output_gone_at"]) for task in tasks] == [True, True, False, False]
    assert agent.show(tasks[0])["output_gone_why"] == "retention"
    assert len(agent.output(tasks[2])[0]) == 100_000
    told = cli(agent, "logs", tasks[0])
    assert told.returncode == 125
    assert told.stdout == b""
    assert tasks[0].encode() in told.stderr
    assert b"(retention)" in told.stderr
    assert cli(agent, "logs", tasks[3]).returncode == 0


def test_clean_drops_what_it_is_told_and_says_so(agent: Agent) -> None:
    done = [says(agent, 5000) for _ in range(3)]
    failed = agent.submit("false")
    agent.wait(failed)
    waits = agent.submit("sleep", "600")
    agent.await_state(waits, "running")
    assert cli(agent, "clean").returncode == 2
    tried = cli(agent, "clean", "--all", "--dry-run", "--json")
    assert {key: json.loads(tried.stdout)[key] for key in ("removed", "outputs", "output_bytes", "dry_run")} == {
        "removed": 4, "outputs": 3, "output_bytes": 3 * 8192, "dry_run": True,
    }  # fmt: skip
    assert len(kept(agent)) == 4
    assert json.loads(cli(agent, "clean", "--failed", "--json").stdout)["tasks"] == [failed]
    assert json.loads(cli(agent, "clean", "--older", "1h", "--json").stdout)["removed"] == 0
    assert cli(agent, "clean", "--outputs", done[0]).returncode == 0
    assert agent.show(done[0])["output_gone_why"] == "peerload clean"
    said = json.loads(cli(agent, "clean", "--keep", "1", "--json").stdout)
    assert said == {
        "v": 1, "tasks": done[:2], "removed": 2, "outputs": 1, "output_bytes": 8192, "in_use": 0, "dry_run": False,
    }  # fmt: skip
    assert kept(agent) == [done[2]]
    with pytest.raises(BadRequest):
        agent.call("clean", tasks=[waits])
    assert cli(agent, "clean", "--done").returncode == 0
    assert not kept(agent)
    wait_until(lambda: len(files(agent)) == 2)  # those of the one that runs
    assert agent.states() == {waits: "running"}
    agent.call("cancel", tasks=[waits], force=True)


def test_what_a_client_waits_for_is_not_dropped(agent: Agent) -> None:
    first = agent.submit("sleep", "600")
    second = says(agent)
    with agent.client() as client:
        request = client.send("wait", tasks=[first, second])
        assert client.receive()[0] == request  # the second has ended: told
        first_end = agent.submit("sh", "-c", "exit 0")
        agent.wait(first_end)
        said = agent.call("clean")
        assert (said["removed"], said["in_use"]) == (2, 0)  # of what has ended nothing more will be told
        agent.call("cancel", tasks=[first], force=True)
        assert client.receive()[2]["id"] == first


class InSmallParts(Agent):
    """An agent that removes a few tasks at a time, so that there is a middle of it for some seconds."""

    def words(self) -> list[str]:
        start = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from peerload.agent.completion import retention; "
            "retention.AT_A_TIME = 4; from peerload.cli.main import main; sys.exit(main())"
        )
        return [sys.executable, "-I", "-c", start, *super().words()[len(program()) :]]


@pytest.mark.long
def test_a_kill_in_the_middle_leaves_neither_files_nor_rows_without_them(cluster: Cluster) -> None:
    agent = InSmallParts(cluster, "n1", ["--slots", "8"], None)
    cluster.agents["n1"] = agent
    agent.start()
    array = agent.submit("sh", "-c", "echo $PEERLOAD_ARRAY_INDEX", array=[(1, 400, 1)])
    agent.wait(array, timeout_s=100)
    assert len(files(agent)) == 400
    with agent.client() as client:
        client.send("clean", tasks=[array])
        client.receive()  # a first part has gone
        agent.kill()
    agent.start()
    wait_until(lambda: database(agent, "doomed") == 0, what="the files of what was removed to go")
    left = kept(agent)
    assert 0 < len(left) < 400
    assert len(files(agent)) == len(left)
    for task in left[:: max(len(left) // 5, 1)]:
        assert agent.output(task)[0] == task.partition(".")[2].encode() + b"\n"
    agent.call("clean", tasks=[array])
    assert not files(agent)


def test_a_directory_in_place_of_an_input_stops_neither_the_removal_nor_the_agent(agent: Agent) -> None:
    task = agent.submit(
        "sh", "-c", 'out=$(readlink /proc/$$/fd/1); mkdir "${out%.out}.in" && touch "${out%.out}.in/file"'
    )
    agent.wait(task)
    assert [name for name in files(agent) if name.endswith(".in")]
    assert agent.call("clean", tasks=[task])["removed"] == 1
    wait_until(lambda: not files(agent))
    assert database(agent, "doomed") == 0
    agent.kill()
    agent.start()
    assert agent.call("history", limit=None)["tasks"] == []
