"""One agent in a process of its own: what a user of a single machine types, sees and gets back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import pytest

from peerload.model.errors import BadRequest
from tests.integration.cluster import MARK, PATH, Agent, Cluster, ended, is_alive, without_waits
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=4)


def test_a_background_child_does_not_hold_up_its_task(agent: Agent) -> None:
    gate = agent.directory / "child may go"
    task = agent.submit("sh", "-c", 'until [ -e "$0" ]; do sleep 0.05; done & echo started', str(gate))
    try:
        assert agent.wait(task)[task]["exit_code"] == 0
        assert agent.output(task)[0] == b"started\n"
    finally:
        gate.touch()


def test_run_passes_both_streams_and_the_exit_code(agent: Agent) -> None:
    done = agent.cli("run", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, without_waits(done.stderr)) == (7, b"out\n", b"err\n")


def test_run_passes_every_byte(agent: Agent) -> None:
    done = agent.cli("run", "sh", "-c", r"printf 'a\000b\377\n no newline'; printf '\200' >&2")
    assert (done.returncode, done.stdout, without_waits(done.stderr)) == (0, b"a\0b\xff\n no newline", b"\x80")


def test_submit_wait_logs_show_ls(agent: Agent) -> None:
    task = agent.cli("submit", "-J", "shown", "sh", "-c", "echo told; exit 3").stdout.decode().strip()
    assert task.startswith("n1/")
    assert agent.cli("wait", task).returncode == 3
    logs = agent.cli("logs", "@")
    assert logs.stdout == b"told\n"
    listed = json.loads(agent.cli("ls", "--json").stdout)
    (row,) = [row for row in listed["tasks"] if row["id"] == task]
    assert listed["v"] == 1
    assert (row["name"], row["state"], row["exit_code"], row["node"], row["attempt"]) == ("shown", "failed", 3, "n1", 1)
    assert row["submitted_at"] <= row["started_at"] <= row["ended_at"]
    shown = agent.cli("show", task).stdout.decode()
    assert task in shown
    assert "failed" in shown
    states = [line["state"] for line in agent.show(task)["history"]]
    assert states == ["queued", "leased", "running", "failed"]


def test_an_array_is_a_set_of_tasks(agent: Agent) -> None:
    script = "echo member $PEERLOAD_ARRAY_INDEX; exit $PEERLOAD_ARRAY_INDEX"
    reply = json.loads(agent.cli("submit", "--json", "--array", "0-4:2,7", "sh", "-c", script).stdout)
    waited = agent.cli("wait", "--json", reply["id"])
    in_order = [json.loads(line)["exit_code"] for line in waited.stdout.splitlines()]
    assert waited.returncode == next(filter(None, in_order)), "the code of the member that failed first"
    assert agent.output(f"{reply['id']}.7")[0] == b"member 7\n"
    codes = {
        task["id"].partition(".")[2]: task["exit_code"] for task in agent.call("show", tasks=[reply["id"]])["tasks"]
    }
    assert codes == {"0": 0, "2": 2, "4": 4, "7": 7}


def test_cancel_ends_the_process(agent: Agent) -> None:
    task = agent.submit("sh", "-c", "echo $$; exec sleep 60")
    wait_until(lambda: agent.output(task)[0], what="the task's pid")
    pid = int(agent.output(task)[0])
    assert is_alive(pid)
    assert agent.cli("cancel", task).returncode == 0
    assert agent.show(task)["state"] == "cancelled"
    wait_until(lambda: not is_alive(pid), what="its process to end")
    again = agent.cli("cancel", task)
    assert b"Traceback" not in again.stderr


def test_cancel_of_what_ignores_the_signal_can_be_forced(agent: Agent) -> None:
    task = agent.submit("sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.1; done")
    wait_until(lambda: agent.output(task)[0], what="the task's pid")
    pid = int(agent.output(task)[0])
    agent.cli("cancel", task)
    assert is_alive(pid)
    agent.cli("cancel", "--force", task)
    wait_until(lambda: not is_alive(pid), what="its process to end")


def test_cancel_of_a_queued_task_never_starts_it(agent: Agent) -> None:
    busy = agent.submit("sleep", "600", request={"cpus": 4.0})
    agent.await_state(busy, "running")
    waiting = agent.submit("touch", str(agent.directory / "never"))
    agent.cli("cancel", waiting)
    agent.cli("cancel", busy)
    assert agent.wait(waiting)[waiting]["state"] == "cancelled"
    assert not (agent.directory / "never").exists()


def test_a_signal_is_told_as_128_and_its_number(agent: Agent) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV):
        assert agent.cli("run", "sh", "-c", f"kill -{int(number)} $$").returncode == 128 + number


def test_a_time_limit_is_124(agent: Agent) -> None:
    done = agent.cli("run", "-t", "0.5s", "sleep", "60")
    assert done.returncode == 124


def test_a_command_that_is_not_there_is_127(agent: Agent) -> None:
    done = agent.cli("run", "no-such-command-here")
    assert done.returncode == 127
    assert b"no-such-command-here" in done.stderr


def test_a_file_that_cannot_be_executed_is_126(agent: Agent) -> None:
    path = agent.directory / "text"
    path.write_text("no program\n")
    done = agent.cli("run", str(path))
    assert done.returncode == 126
    assert done.stderr


def test_a_scratch_directory_is_fresh_and_goes_away(agent: Agent) -> None:
    first = agent.cli("run", "-d", "-", "sh", "-c", "ls -A; pwd; touch left").stdout.decode().split()
    second = agent.cli("run", "-d", "-", "sh", "-c", "ls -A; pwd; touch left").stdout.decode().split()
    assert len(first) == len(second) == 1
    assert first != second
    wait_until(lambda: not Path(first[0]).exists() and not Path(second[0]).exists(), what="the directories to go")


def test_directory_environment_umask_and_argv_arrive(agent: Agent, tmp_path: Path) -> None:
    script = 'pwd; umask; echo "$GREETING"; echo "$PEERLOAD_TASK_ID $PEERLOAD_NODE $PEERLOAD_HOME"; printf %s "$1" "$2"'
    argv: list[str | bytes] = ["run", "--env", "GREETING=grüß dich", "sh", "-c", script, "sh", b"\xff\xfe raw", ""]
    done = agent.cli(*argv, cwd=tmp_path, umask=0o027)
    lines = done.stdout.split(b"\n")
    assert lines[0] == os.fsencode(tmp_path)
    assert lines[1] == b"0027"
    assert lines[2] == "grüß dich".encode()
    assert lines[3].startswith(b"n1/")
    assert lines[3].endswith(b" n1 n1")
    assert lines[4] == b"\xff\xfe raw"


def test_environment_bytes_arrive(agent: Agent) -> None:
    variables = {b"PATH": PATH.encode(), MARK.encode(): str(agent.cluster.directory).encode(), b"ODD": b"\xff=\n\x01"}
    task = agent.submit("sh", "-c", 'printf %s "$ODD"', environment=msgpack.packb(variables))
    assert agent.wait(task)[task]["exit_code"] == 0
    assert agent.output(task)[0] == b"\xff=\n\x01"


@pytest.mark.rule("X7")
def test_a_task_has_no_descriptors_of_ours_and_reads_nothing(agent: Agent) -> None:
    done = agent.cli("run", "sh", "-c", "ls /proc/$$/fd; cat")
    assert done.stdout.split() == [b"0", b"1", b"2"]


def test_run_streams_while_the_task_runs(agent: Agent) -> None:
    gate = agent.directory / "gate"
    script = f"echo first; echo apart >&2; until [ -e {gate} ]; do sleep 0.05; done; echo last"
    with ended(agent.spawn_cli("run", "sh", "-c", script)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"first\n"
        assert next(filter(without_waits, process.stderr)) == b"apart\n"
        assert process.poll() is None
        gate.touch()
        assert process.stdout.read() == b"last\n"
        assert process.wait(60) == 0


def test_ctrl_c_reaches_the_task(agent: Agent) -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    with ended(agent.spawn_cli("run", "sh", "-c", script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"caught\n"
        assert process.wait(60) == 9


def test_a_run_whose_reader_goes_away_ends_its_task(agent: Agent) -> None:
    with ended(agent.spawn_cli("run", "sh", "-c", "echo $$; while echo y; do :; done")) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.stdout.close()
        process.stdout = None
        assert process.wait(60) != 0
        wait_until(lambda: not is_alive(pid), 20, "the task to end")


def test_logs_follow_to_the_end(agent: Agent) -> None:
    task = agent.submit("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.1; done")
    done = agent.cli("logs", "-f", task)
    assert done.stdout == b"1\n2\n3\n"
    assert agent.cli("logs", "--tail", "1", task).stdout == b"3\n"


def test_wait_can_be_timed_and_can_take_the_first(agent: Agent) -> None:
    long, short = agent.submit("sleep", "600"), agent.submit("true")
    assert agent.cli("wait", "--any", long, short).returncode == 0
    assert agent.cli("wait", "--timeout", "0.2s", long).returncode == 124
    agent.cli("cancel", long)


def test_the_same_token_is_the_same_task(agent: Agent) -> None:
    token = "token-of-one-task"
    first = agent.submit("true", token=token)
    assert agent.submit("true", token=token) == first
    agent.wait(first)
    assert agent.submit("true", token=token) == first


def test_the_same_token_for_something_else_is_refused(agent: Agent) -> None:
    first = agent.submit("true", token="token-used-twice")
    with pytest.raises(BadRequest):
        agent.submit("false", token="token-used-twice")
    assert agent.wait(first)[first]["exit_code"] == 0


def test_output_over_the_limit_keeps_head_and_tail() -> None:
    with Cluster() as cluster:
        config = cluster.directory / "small.toml"
        config.write_text("output_bytes_max = 65536\n")
        agent = cluster.agent("n1", "--config", str(config))
        script = "echo head; i=0; while [ $i -lt 40000 ]; do echo 0123456789; i=$((i+1)); done; echo tail"
        task = agent.submit("sh", "-c", script)
        agent.wait(task)
        pieces = []
        with agent.client() as client:
            pieces = list(client.stream("output", task=task))
        data = b"".join(piece["data"] for piece in pieces)
        assert data.startswith(b"head\n")
        assert data.endswith(b"tail\n")
        assert len(data) < 2 * 65536 + 8192
        assert agent.show(task)["stdout_bytes"] == 5 + 40000 * 11 + 5


def test_slots_bound_what_runs_at_a_time() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=2)
        gate = agent.directory / "gate"
        held = ("sh", "-c", 'until [ -e "$0" ]; do sleep 0.05; done', str(gate))
        tasks = [agent.submit(*held) for _ in range(2)] + [agent.submit("sleep", "0.3") for _ in range(6)]
        most = 0

        def at_a_time() -> int:
            nonlocal most
            count = sum(state in ("running", "leased") for state in agent.states().values())
            most = max(most, count)
            return count

        wait_until(lambda: at_a_time() == 2, what="two to run")
        gate.touch()
        wait_until(lambda: not at_a_time() and set(agent.states().values()) == {"done"}, what="all tasks to end")
        assert most == 2
        assert len(agent.states()) == len(tasks)
