"""Three agents that know each other over the peer link alone: tasks go out, their output and exit codes come home."""

from __future__ import annotations

import hashlib
import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster, ended, is_alive, without_waits
from tests.integration.ledger import Ledger
from tests.support import wait_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def agents(shared: list[Agent]) -> list[Agent]:
    """n1 … n3; n2 and n3 were told of n1 only."""
    return shared


def test_knowing_one_is_enough(agents: list[Agent]) -> None:
    agents[0].cluster.await_acquainted(agents)
    wait_until(
        lambda: agents[1].peers_alive() == agents[2].peers_alive() == {"n1", "n2", "n3"}, what="them and no more"
    )
    told = json.loads(agents[1].cli("nodes", "--json").stdout)
    assert [node["node"] for node in told["nodes"]] == ["n2", "n1", "n3"]
    assert all(node["address"] for node in told["nodes"])


def test_a_pinned_task_runs_there_and_its_result_comes_home(agents: list[Agent]) -> None:
    home = agents[0]
    done = home.cli("run", "-w", "n3", "sh", "-c", "echo $PEERLOAD_NODE $PEERLOAD_HOME; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, without_waits(done.stderr)) == (7, b"n3 n1\n", b"err\n")
    task = home.show("@")
    assert (task["state"], task["node"], task["home"], task["attempt"]) == ("failed", "n3", "n1", 1)


def test_output_of_a_task_elsewhere_comes_live_and_apart(agents: list[Agent]) -> None:
    gate = agents[0].directory / "gate"
    script = f"echo first; echo apart >&2; until [ -e {gate} ]; do sleep 0.05; done; echo last"
    with ended(agents[0].spawn_cli("run", "-w", "n2", "sh", "-c", script)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"first\n"
        assert next(filter(without_waits, process.stderr)) == b"apart\n"
        assert process.poll() is None
        agents[0].await_state("@", "running")
        gate.touch()
        assert process.stdout.read() == b"last\n"
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_logs_and_ls_see_a_task_that_runs_elsewhere(agents: list[Agent]) -> None:
    gate = agents[0].directory / "gate-2"
    script = f"echo so far; until [ -e {gate} ]; do sleep 0.05; done"
    task = agents[0].submit("sh", "-c", script, placement={"node": "n2"})
    agents[0].await_state(task, "running")
    wait_until(lambda: agents[0].cli("logs", task).stdout == b"so far\n", what="the output so far")
    listed = json.loads(agents[0].cli("ls", "--json", "--node", "n2", "--state", "running").stdout)
    assert [row["id"] for row in listed["tasks"]] == [task]
    gate.touch()
    assert agents[0].wait(task)[task]["exit_code"] == 0


def test_large_output_comes_home_intact(agents: list[Agent]) -> None:
    script = "head -c 10485760 /dev/zero | tr '\\0' x; head -c 10485760 /dev/zero | tr '\\0' y >&2"
    task = agents[0].submit("sh", "-c", script, placement={"node": "n2"})
    assert agents[0].wait(task)[task]["exit_code"] == 0
    stdout, stderr = agents[0].output(task)
    assert hashlib.sha256(stdout).digest() == hashlib.sha256(b"x" * 10485760).digest()
    assert hashlib.sha256(stderr).digest() == hashlib.sha256(b"y" * 10485760).digest()


def test_large_output_is_followed_whole(agents: list[Agent]) -> None:
    done = agents[0].cli("run", "-w", "n3", "sh", "-c", "seq 1 300000; seq 1 100000 >&2")
    assert done.stdout == b"".join(b"%d\n" % number for number in range(1, 300_001))
    assert without_waits(done.stderr) == b"".join(b"%d\n" % number for number in range(1, 100_001))


def test_ctrl_c_reaches_a_task_elsewhere(agents: list[Agent]) -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    with ended(agents[0].spawn_cli("run", "-w", "n2", "sh", "-c", script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"caught\n"
        assert process.wait(60) == 9


def test_cancel_ends_a_task_elsewhere(agents: list[Agent]) -> None:
    task = agents[0].submit("sh", "-c", "echo $$; exec sleep 600", placement={"node": "n3"})
    agents[0].await_state(task, "running")
    wait_until(lambda: agents[0].output(task)[0], what="the task's pid")
    pid = int(agents[0].output(task)[0])
    assert agents[0].cli("cancel", task).returncode == 0
    assert agents[0].show(task)["state"] == "cancelled"
    wait_until(lambda: not is_alive(pid), what="its process to end")
    wait_until(lambda: agents[2].call("nodes")["nodes"][0]["tasks_running"] == 0, what="its room to be free again")


def test_a_time_limit_holds_elsewhere(agents: list[Agent]) -> None:
    done = agents[0].cli("run", "-w", "n2", "-t", "0.5s", "sleep", "60")
    assert done.returncode == 124


def test_a_missing_command_elsewhere_is_127(agents: list[Agent]) -> None:
    assert agents[0].cli("run", "-w", "n2", "no-such-command-here").returncode == 127


def test_a_burst_at_one_node_spreads(agents: list[Agent]) -> None:
    ledger = Ledger(agents[0].cluster.directory / "burst")
    gate = agents[0].directory / "burst gate"
    tasks = [agents[0].submit(*ledger.argv(3, until=gate)) for _ in range(40)]
    wait_until(lambda: {line.node for line in ledger.lines()} == {"n1", "n2", "n3"}, what="all three to have some")
    gate.touch()
    ended_tasks = agents[0].wait(*tasks)
    assert all(task["state"] == "done" for task in ended_tasks.values())
    ledger.check(tasks)
    assert not ledger.repeated()
    assert all(agents[0].output(task) == (f"out {task}\n".encode(), b"") for task in tasks)


def test_a_local_task_stays(agents: list[Agent]) -> None:
    tasks = [agents[0].submit("sleep", "0.1", placement={"local": True}) for _ in range(12)]
    assert {task["node"] for task in agents[0].wait(*tasks).values()} == {"n1"}


def test_a_shell_on_another_node(agents: list[Agent]) -> None:
    done = agents[0].cli("sh", "n2", stdin=None, input=b"echo $PEERLOAD_NODE; pwd; echo err >&2; exit 3\n")
    node, directory = done.stdout.split()
    assert (done.returncode, node, without_waits(done.stderr)) == (3, b"n2", b"err\n")
    assert directory.startswith(b"/")
    assert agents[0].cli("sh", "-d", "/tmp", "n3", stdin=None, input=b"pwd\n").stdout == b"/tmp\n"


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_command_inside_of_a_running_task(agents: list[Agent], node: str, tmp_path: Path) -> None:
    home = agents[0]
    task = (
        home.cli("submit", "-w", node, "-d", str(tmp_path), "--env", "MINE=yes", "sleep", "600").stdout.decode().strip()
    )
    home.await_state(task, "running")
    script = "pwd; echo $MINE $PEERLOAD_TASK_ID $PEERLOAD_NODE; echo err >&2; exit 3"
    done = home.cli("exec", task, "sh", "-c", script)
    assert (done.returncode, done.stderr) == (3, b"err\n")
    assert done.stdout.decode() == f"{tmp_path}\nyes {task} {node}\n"
    assert home.cli("exec", task, "head", "-c", "300000", "/dev/zero").stdout == bytes(300_000)
    assert home.cli("exec", task, "no-such-program").returncode == 127
    assert home.cli("exec", task, "sha256sum").stdout == hashlib.sha256().hexdigest().encode() + b"  -\n"
    sent = bytes(range(256)) * 40_000
    done = home.cli("exec", task, "sha256sum", stdin=None, input=sent)
    assert (done.returncode, done.stdout.split()[0].decode()) == (0, hashlib.sha256(sent).hexdigest())
    assert home.cli("exec", task, "head", "-1", stdin=None, input=b"line\n" * 1_000_000).stdout == b"line\n"
    done = home.cli("exec", "--pty", task, "sh", "-c", "tty; cat", stdin=None, input=b"")
    assert (done.returncode, b"/dev/pts/" in done.stdout) == (0, True)
    gate = tmp_path / "pid"
    with ended(
        home.spawn_cli("exec", task, "sh", "-c", f"echo $$ > {gate}.new; mv {gate}.new {gate}; exec sleep 600")
    ) as left:
        wait_until(gate.exists, what="the command to run")
        pid = int(gate.read_text(encoding="ascii"))
        left.send_signal(signal.SIGINT)
        assert left.wait(60) == 130
    wait_until(lambda: not is_alive(pid), what="the command to end with its client")
    assert home.show(task)["state"] == "running"
    home.cli("cancel", "--wait", task)
    done = home.cli("exec", task, "true")
    assert (done.returncode, b"is cancelled" in done.stderr) == (125, True)


@pytest.mark.parametrize("asked", [0, 2])
def test_a_signal_reaches_a_task_elsewhere_whoever_asks(agents: list[Agent], asked: int) -> None:
    """At its home, and at a third node, which asks that."""
    script = "trap 'echo got; exit 3' USR1; echo ready; while :; do sleep 0.05; done"
    task = agents[0].submit("sh", "-c", script, placement={"node": "n2"})
    agents[0].await_state(task, "running")
    wait_until(lambda: agents[0].output(task)[0] == b"ready\n", what="it to be ready")
    assert agents[asked].cli("signal", "USR1", task).returncode == 0
    assert agents[0].wait(task)[task]["exit_code"] == 3
    assert agents[0].output(task)[0] == b"ready\ngot\n"


def test_an_excluded_node_is_not_used(agents: list[Agent]) -> None:
    tasks = [agents[0].submit("sleep", "0.1", placement={"exclude": ["n1", "n2"]}) for _ in range(4)]
    assert {task["node"] for task in agents[0].wait(*tasks).values()} == {"n3"}


def test_a_directory_that_no_node_has_is_an_error_unless_one_is_waited_for(agents: list[Agent]) -> None:
    done = agents[0].cli("submit", "-d", "/no/such/directory", "true")
    assert (done.returncode, done.stdout) == (125, b"")
    done = agents[0].cli("submit", "--wait-for-node", "-d", "/no/such/directory", "true")
    assert done.returncode == 0
    assert b"/no/such/directory" in done.stderr
    task = done.stdout.decode().strip()
    assert agents[0].show(task)["state"] == "queued"
    agents[0].cli("cancel", task)


def test_nodes_without_the_directory_are_named_at_once(agents: list[Agent]) -> None:
    home = agents[0]
    only_here = f"/proc/self/task/{home.pid}"  # as the agent of n1 itself sees it, and no other
    lacks = f"no directory {only_here}"

    def who_declines() -> set[str]:
        return {node["node"] for node in home.call("nodes")["nodes"] if lacks in node["declines"]}

    first = home.cli("submit", "--held", "-d", only_here, "true")
    wait_until(lambda: who_declines() == {"n2", "n3"}, what="the others to say that they lack it")
    second = home.cli("submit", "--held", "-d", only_here, "true")
    assert (first.returncode, second.returncode) == (0, 0)
    said = first.stderr + second.stderr  # the second repeats nothing
    assert said.count(b"n2, n3") == 1
    assert b"-d DIR" in said
    home.cli("cancel", first.stdout.decode().strip(), second.stdout.decode().strip())
    assert home.cli("submit", "-w", "n2", "-d", only_here, "true").returncode == 125


@pytest.mark.long
def test_a_node_that_stops_politely_leaves_its_tasks_running() -> None:
    with Cluster() as cluster:
        home, guest = cluster.linked(2)
        ledger = Ledger(cluster.directory / "polite")
        gate = guest.directory / "gate"
        task = home.submit(*ledger.argv(1, 5, gate), placement={"node": "n2"})
        home.await_state(task, "running")
        assert guest.cli("down").returncode == 0
        guest.reap()
        wait_until(lambda: "n2" not in home.peers_alive(), what="n2 to have left")
        guest.start()
        gate.touch()
        assert home.wait(task)[task]["exit_code"] == 5
        ledger.check([task])
        assert not ledger.repeated()
