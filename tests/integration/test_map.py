"""`peerload map` and `submit --each-line` against real agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.in_process import cli
from tests.integration.cluster import Agent, Cluster, ended
from tests.support import wait_until
from tests.wording import Says


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent(slots=4)


def mapped(agent: Agent, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return cli(agent, "map", *words, given=given)


def named(agent: Agent, name: str) -> list[str]:
    """The states of the tasks of this name."""
    return [task["state"] for task in agent.call("tasks")["tasks"] if task["name"] == name]


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_commands_are_made_of_their_inputs(agent: Agent) -> None:
    for words, written in (
        (["-k", "echo {}", ":::", "a b", "$(id)", "'"], b"a b\n$(id)\n'\n"),
        (["-k", "echo", ":::", "a  b", "*"], b"a  b\n*\n"),
        (["-k", "printf", "<%s>", "{}", ":::", "a b", ""], b"<a b><>"),
        (["-k", "echo {#} {1}-{2}", ":::", "a", "b", ":::", "1", "2"], b"1 a-1\n2 a-2\n3 b-1\n4 b-2\n"),
        (["-k", "echo {2}{1}", ":::", "a", "b", "c", ":::+", "1", "2"], b"1a\n2b\n"),
        (["-k", "echo", "{.}", "{/}", "{//}", "{/.}", ":::", "x.d/y z.tar.gz", "n"], b"x.d/y z.tar y z.tar.gz x.d y z.tar\nn n . n\n"),
        (["-k", "--tag", "printf 'x\\ny'; echo z >&2", ":::", "t"], b"t\tx\nt\ty"),
        (["-k", "-s", "echo {} | tr a-z A-Z", ":::", "q"], b"Q\n"),
        (["-k", "awk 'BEGIN {print {}}'", ":::", "7"], b"7\n"),
    ):  # fmt: skip
        done = mapped(agent, *words)
        assert (done.returncode, done.stdout) == (0, written), (words, done.stderr)


def test_lines_of_files_and_of_standard_input(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a b\n\xff\n\nlast")
    done = mapped(agent, "-k", "echo", "<{}>", "::::", str(tmp_path / "lines"))
    assert done.stdout == b"<a b>\n<\xff>\n<>\n<last>\n"
    done = mapped(agent, "-k", "echo", "<{}>", given=b"1\n2")
    assert done.stdout == b"<1>\n<2>\n"
    done = mapped(agent, "-k", "-0", "printf '%s|' {}", given=b"a\nb\0c")
    assert done.stdout == b"a\nb|c|"
    done = mapped(agent, "-k", "echo {1}{2}", "::::", "-", ":::", "x", "y", given=b"1\n2\n")
    assert done.stdout == b"1x\n1y\n2x\n2y\n"
    assert mapped(agent, "echo", given=b"").returncode == 0


def test_outputs_are_whole_and_apart(agent: Agent) -> None:
    done = mapped(agent, "for i in 1 2 3; do echo {}; echo {}{} >&2; sleep 0.02; done", ":::", "a", "b", "c")
    assert sorted(done.stdout.split(b"\n", 9)[:9]) == [b"a"] * 3 + [b"b"] * 3 + [b"c"] * 3
    for name in (b"a", b"b", b"c"):
        assert (name + b"\n") * 3 in done.stdout
        assert (name * 2 + b"\n") * 3 in done.stderr


def test_a_large_output_comes_whole(agent: Agent) -> None:
    done = mapped(agent, "-k", "head -c {} /dev/zero", ":::", "200000", "10", "3000000")
    assert len(done.stdout) == 3200010


def test_outputs_beyond_the_capture_limit_come_whole_and_are_cut_afterwards(agent: Agent) -> None:
    done = mapped(agent, "head -c 40000000 /dev/zero; : {}", ":::", "a", "b")
    assert (done.returncode, len(done.stdout)) == (0, 80_000_000), done.stderr

    def is_cut() -> bool:
        large = [path.stat() for path in (agent.state / "spool").iterdir() if path.stat().st_size == 40_000_000]
        return len(large) == 2 and all(status.st_blocks * 512 < 17 << 20 for status in large)

    wait_until(is_cut, what="what `logs` is to have alone to be left")
    kept = cli(agent, "logs", f"{agent.database('SELECT max(counter) FROM tasks')[0][0]}.1")
    assert kept.returncode == 125, kept.stderr
    assert 0 <= len(kept.stdout) - (16 << 20) < 4096


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_failures_are_named_and_counted(agent: Agent) -> None:
    done = mapped(agent, "kill -{} $$; exit {}", ":::", "0", "9", "0")
    assert done.returncode == 1
    assert b"signal 9  kill -9 $$; exit 9" in done.stderr
    said = mapped(agent, "echo first >&2; echo last words >&2; exit {}", ":::", "3").stderr
    assert b"exit 3  echo first" in said
    assert b"last words" in said
    shown = cli(agent, "ls", "--state", "failed").stdout
    assert b"last words" in shown
    assert agent.show(f"{agent.database('SELECT max(counter) FROM tasks')[0][0]}.1")["error_line"] == "last words"
    (array,) = [line.split()[-5] for line in done.stderr.decode().splitlines() if "retry --failed" in line] or [""]
    assert "/" in done.stderr.decode().rpartition("retry --failed ")[2], array
    assert mapped(agent, "exit 1", ":::", *map(str, range(105))).returncode == 101


def test_halt_now_and_soon(agent: Agent, tmp_path: Path) -> None:
    done = mapped(agent, "--halt", "now,fail=1", "-j", "2", "[ {} = 1 ] && exit 7; sleep 30", ":::", "0", "1", "2", "3")
    assert done.returncode == 7
    gate = tmp_path / "gate"
    command = f"[ {{}} = 1 ] && exit 7; until [ -e {gate} ]; do sleep 0.05; done; echo {{}}"
    with ended(agent.spawn_cli("map", "-J", "soon", "--halt", "soon,fail=1", "-j2", command, ":::", *"01234")) as soon:
        wait_until(lambda: "failed" in named(agent, "soon"), what="the second to fail")
        gate.touch()
        assert soon.communicate(timeout=60)[0] == b"0\n"
        assert soon.returncode == 7
    done = mapped(agent, "--halt", "now,success=1", "sleep {}", ":::", "0", "30", "30")
    assert done.returncode == 0
    assert b"2 tasks cancelled" in done.stderr


def test_the_joblog_is_resumed(agent: Agent, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["--joblog", str(log), "echo {}; exit {}"]
    assert mapped(agent, *command, ":::", "0", "3").returncode == 1
    head, *rows = log.read_text().splitlines()
    assert head.split("\t") == [
        "Seq",
        "Host",
        "Starttime",
        "JobRuntime",
        "Send",
        "Receive",
        "Exitval",
        "Signal",
        "Command",
    ]
    assert {(row[0], row[1], row[5], row[6], row[8]) for row in (line.split("\t") for line in rows)} == {
        ("1", "n1", "2", "0", "echo 0; exit 0"),
        ("2", "n1", "2", "3", "echo 3; exit 3"),
    }
    with log.open("ab") as file:
        file.write(b"3\tn1\t1.0")  # a line that was cut off
    assert mapped(agent, "--resume", *command, ":::", "0", "3", "0").stdout == b"0\n"
    again = mapped(agent, "--resume", *command, ":::", "0", "3", "0")
    assert (again.returncode, again.stdout) == (0, b"")
    assert b"--resume-failed" in again.stderr
    assert mapped(agent, "--resume-failed", *command, ":::", "0", "3", "0").stdout == b"3\n"
    changed = mapped(agent, "--resume", "--joblog", str(log), "echo x{}", ":::", "0")
    assert changed.returncode == 125
    assert b"another command" in changed.stderr
    (tmp_path / "other").write_text("dear diary\n")
    assert mapped(agent, "--resume", "--joblog", str(tmp_path / "other"), "true", ":::", "1").returncode == 2
    assert (tmp_path / "other").read_text() == "dear diary\n"


def test_a_log_is_left_alone_where_nothing_can_run(agent: Agent, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("precious\n")
    nowhere = {"PEERLOAD_SOCKET": str(tmp_path / "sock")}
    assert cli(agent, "map", "--joblog", str(log), "true", ":::", "1", env=nowhere).returncode == 125
    assert mapped(agent, "--joblog", str(log), "true", "::::", "/does/not/exist").returncode == 2
    assert mapped(agent, "--joblog", str(log), "true {2}", ":::", "1").returncode == 2
    assert log.read_text() == "precious\n"


def test_json_and_dry_run(agent: Agent) -> None:
    (line,) = mapped(agent, "--json", "echo {}; exit 4", ":::", "\x1b[2J").stdout.splitlines()
    told = json.loads(line)
    assert (told["seq"], told["exit_code"], told["state"], told["stdout"]) == (1, 4, "failed", "\x1b[2J\n")
    done = mapped(agent, "--json", "-j", "1", "seq {}; seq 9 >&2", ":::", "3", "200000")
    told, large = map(json.loads, done.stdout.splitlines())
    assert (told["stdout"], told["stderr"]) == ("1\n2\n3\n", "".join(f"{n}\n" for n in range(1, 10)))
    assert (large["stdout"], large["stderr"]) == ("".join(f"{n}\n" for n in range(1, 200_001)), told["stderr"])
    assert (done.returncode, "output_missing" in large) == (0, False)
    before = agent.states().keys()
    assert mapped(agent, "--dry-run", "echo {}", ":::", "a b", "c").stdout == b"echo 'a b'\necho c\n"
    assert agent.states().keys() == before


def test_mistakes_have_one_line_and_one_hint(agent: Agent) -> None:
    for words, says in (
        (["echo {%}", ":::", "1"], b"{%} has no meaning here"),
        (["echo {2}", ":::", "1"], b"{2} refers to an input that does not exist"),
        (["--halt", "now", "true", ":::", "1"], b"cannot be understood"),
        (["--halt", "now,fail=0%", "true", ":::", "1"], b"cannot be understood"),
        (["true", "::::"], b"names no file"),
        (["true", "::::", "/does/not/exist"], b"cannot be read"),
        (["true", "::::", "/tmp"], b"cannot be read"),
        (["true", ":::+", "a"], b"needs a source before it"),
        (["--resume", "true", ":::", "1"], b"needs the joblog"),
        ([":::", "1"], b"the command is missing"),
        (["--joblog", "/does/not/exist/log", "true", ":::", "1"], b"cannot be used"),
        (["-j", "0", "true", ":::", "1"], b"not between"),
    ):
        done = mapped(agent, *words)
        assert done.returncode in (2, 125), words
        assert says in done.stderr, words
        assert len(done.stderr.splitlines()) <= 2, words


def test_what_comes_before_a_bad_line_is_run(agent: Agent) -> None:
    done = mapped(agent, "-k", "echo", given=b"a\nb\nc\0d\ne\n")
    assert done.returncode == 125
    assert done.stdout == b"a\nb\n"
    assert b"input 3 has a NUL byte" in done.stderr


# -- many, and interruptions -------------------------------------------------------------------------------------------


def test_inputs_are_taken_at_the_pace_of_the_work(agent: Agent) -> None:
    """An input without end: what is submitted and what is held has a bound."""
    with subprocess.Popen(["yes", "0.1"], stdout=subprocess.PIPE) as endless:
        process = agent.spawn_cli("map", "-J", "endless", "-j", "5", "sleep {}; echo", stdin=endless.stdout)
        assert endless.stdout is not None
        endless.stdout.close()
        wait_until(lambda: named(agent, "endless").count("done") > 20, what="some to end")
        assert sum(state not in ("done", "failed", "cancelled") for state in named(agent, "endless")) <= 5
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        endless.wait(60)
    assert process.returncode == 130
    assert b"cancelled" in errors
    wait_until(lambda: not {"queued", "leased", "running"} & set(agent.states().values()), what="all to be cancelled")


def test_a_first_interrupt_cancels_what_is_left_and_a_second_leaves_at_once(agent: Agent) -> None:
    stubborn = "trap '' TERM INT; echo {}; while :; do sleep 0.05; done"
    process = agent.spawn_cli("map", "-J", "stubborn", stubborn, ":::", "1", "2")
    wait_until(lambda: named(agent, "stubborn") == ["running"] * 2, what="them to run")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130  # they are cancelled; KILL follows in 10 s

    process = agent.spawn_cli("map", "-J", "long", "sleep 60", ":::", *"1234567")
    wait_until(lambda: "running" in named(agent, "long"), what="one to run")
    agent.pause()
    try:
        process.send_signal(signal.SIGINT)
        wait_until(lambda: b"cancelling" in os.read(process.stderr.fileno(), 4096), what="it to say so")  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
    finally:
        agent.resume()
    process.communicate(timeout=60)
    assert process.returncode == 130
    wait_until(lambda: not {"queued", "leased", "running"} & set(agent.states().values()), what="all to be cancelled")


def test_whoever_reads_its_output_may_go(agent: Agent) -> None:
    process = agent.spawn_cli("map", "-j2", "sleep 0.05; echo {}", ":::", *map(str, range(500)))
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    assert process.wait(60) == 141
    wait_until(lambda: not {"queued", "leased", "running"} & set(agent.states().values()), what="all to be cancelled")
    if process.stderr is not None:
        process.stderr.close()


@pytest.mark.long
def test_a_killed_agent_is_waited_for() -> None:
    with Cluster() as cluster:
        agent = cluster.agent(slots=4)
        process = agent.spawn_cli("map", "-k", "sleep 0.05; echo {}", ":::", *map(str, range(400)))
        wait_until(lambda: list(agent.states().values()).count("done") > 20, what="some to end")
        agent.kill()
        agent.start()
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output == b"".join(b"%d\n" % number for number in range(400))
        assert Says.LOST_AGENT().encode() in errors
        assert len(agent.states()) == 400


def test_a_map_that_was_killed_is_resumed(agent: Agent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # the last wait: it is not done before it is killed
    command = f"[ {{}} -lt 50 ] || until [ -e {gate} ]; do sleep 0.05; done; echo {{}}"
    words = ["map", "-J", "resumed", "-j4", "--joblog", str(tmp_path / "log"), command, ":::"]
    words += map(str, range(60))
    process = agent.spawn_cli(*words)
    wait_until(lambda: named(agent, "resumed").count("done") > 15, what="some to end")
    process.kill()
    process.communicate()
    gate.touch()
    done = cli(agent, *words[:1], "--resume", *words[1:])
    assert done.returncode == 0
    rows = (tmp_path / "log").read_text().splitlines()[1:]
    assert sorted(int(row.split("\t")[0]) for row in rows) == list(range(1, 61))
    assert 0 < len(done.stdout.split()) < 60


def test_a_killed_launcher_only_costs_time(agent: Agent) -> None:
    process = agent.spawn_cli("map", "-J", "survivor", "-k", "sleep 0.1; echo {}", ":::", *map(str, range(16)))
    wait_until(lambda: named(agent, "survivor").count("done") > 2, what="some to end")
    os.kill(agent.launcher_pid, signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.split() == [b"%d" % number for number in range(16)]


def test_tasks_end_with_a_map_that_is_killed_unless_they_are_to_be_kept(agent: Agent) -> None:
    kept = ["--keep"]
    for words, number, ends in (
        ([], signal.SIGKILL, "cancelled"),
        (kept, signal.SIGKILL, "done"),
        (kept, signal.SIGHUP, "done"),
    ):
        command, name = f"sleep {1 if words else 60}; echo {{}}", f"w{len(words)}-{number}"
        process = agent.spawn_cli("map", "-J", name, *words, "-j3", command, ":::", *"123456")
        wait_until(lambda name=name: "running" in named(agent, name), what="one to run")  # type: ignore[misc]
        process.send_signal(number)
        process.communicate()
        wait_until(lambda name=name, ends=ends: set(named(agent, name)) == {ends}, what=f"them to be {ends}")  # type: ignore[misc]


def test_each_line_is_a_member(agent: Agent) -> None:
    done = cli(agent, "submit", "--each-line", "-", "echo", "<{}>", given=b"a b\nc\n")
    array = done.stdout.decode().strip()
    agent.wait(array)
    assert [agent.output(f"{array}.{member}")[0] for member in (1, 2)] == [b"<a b>\n", b"<c>\n"]
    assert agent.show(f"{array}.2")["argv"] == ["echo", "<c>"]
    done = cli(agent, "submit", "-s", "echo {} | tr ab ba", "--each-line", "-", given=b"a 'b\n")
    array = done.stdout.decode().strip()
    agent.wait(array)
    assert agent.output(f"{array}.1")[0] == b"b 'a\n"
    for words, says in (
        (["--each-line", "/does/not/exist", "echo"], b"cannot be read"),
        (["--each-line", "/dev/null", "echo"], b"has no lines"),
        (["--each-line", "-", "--array", "1-3", "echo"], b"contradict"),
    ):
        refused = cli(agent, "submit", *words)
        assert refused.returncode == 2
        assert says in refused.stderr


def test_each_member_keeps_its_command_over_a_kill(agent: Agent, tmp_path: Path) -> None:
    gate, count = tmp_path / "gate", 12
    lines = b"".join(b"%d\n" % number for number in range(count))
    command = f"[ {{}} = 0 ] || until [ -e {gate} ]; do sleep 0.05; done; echo {{}}"
    name = cli(agent, "submit", "--each-line", "-", "-s", command, given=lines).stdout.decode().strip()

    def is_at_work() -> bool:
        return {"done", "running", "queued"} <= {task["state"] for task in agent.call("show", tasks=[name])["tasks"]}

    wait_until(is_at_work, what="one to end, some to run, and some to wait")
    agent.kill()
    agent.start()
    gate.touch()
    agent.wait(name)
    assert [agent.output(f"{name}.{member}")[0] for member in range(1, count + 1)] == lines.splitlines(keepends=True)


def test_what_failed_is_queued_again(agent: Agent) -> None:
    agent.call("clean")
    assert cli(agent, "retry", "--failed").stdout == b""  # nothing has
    mapped(agent, "exit {}", ":::", "0", "1", "2")
    single = agent.submit("false")
    cancelled = agent.submit("sleep", "60")
    agent.wait(single)
    cli(agent, "cancel", "--wait", cancelled)
    again = cli(agent, "retry", "--failed").stdout.decode().split()
    assert len(again) == 2
    agent.wait(*again)
    members = {f"{again[0]}.2", f"{again[0]}.3", again[1]}
    assert {task for task in agent.states() if task.partition(".")[0] in again} == members
    done = cli(agent, "retry", "--failed", again[0])  # by name, those of it
    assert len(done.stdout.split()) == 1
    agent.wait(done.stdout.decode().strip())
    assert cli(agent, "retry", "--failed", cancelled).returncode == 125
