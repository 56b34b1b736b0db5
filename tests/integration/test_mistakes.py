"""Mistakes as people make them, one row each: what was typed, the exit code, what is said of it, and what to type next.

Every answer is two lines, what and why and then the next command; nothing is changed by any of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from peerload.model.errors import BadRequest
from tests.in_process import cli
from tests.integration.cluster import Cluster, ended, program, without_waits
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.cluster import Agent

USAGE, CANNOT = 2, 125


class Mistake(NamedTuple):
    """typed: after `peerload`; says, next_command: parts of the first and the second line."""

    typed: list[str]
    code: int
    says: str
    next_command: str


MISTAKES = [
    # verbs and flags
    Mistake(["sumbit", "x"], USAGE, "no such verb: 'sumbit'", "did you mean  peerload submit ?"),
    Mistake(["status"], USAGE, "no such verb: 'status'", "peerload nodes"),
    Mistake(["queue"], USAGE, "no such verb: 'queue'", "peerload submit"),
    Mistake(["add", "true"], USAGE, "no such verb: 'add'", "peerload submit"),
    Mistake(["help", "lst"], USAGE, "no such verb: 'lst'", "peerload ls"),
    Mistake(["-v"], USAGE, "no such option: '-v'", "peerload --version"),
    Mistake(["--socket", "/x", "ls"], USAGE, "no such option: '--socket'", "a verb's own flags come after it"),
    Mistake(["ls", "--sate", "done"], USAGE, "no such flag: --sate", "did you mean --state ?"),
    Mistake(["ls", "--stat=done"], USAGE, "no such flag: --stat", "did you mean --state ?"),
    Mistake(["nodes", "n1"], USAGE, "unexpected argument: 'n1'", "peerload nodes --help"),
    Mistake(["why", "1", "2"], USAGE, "unexpected argument: '2'", "peerload why --help"),
    Mistake(["show"], USAGE, "missing argument: ID", "peerload show --help"),
    Mistake(["ls", "--socket"], USAGE, "--socket: expected one argument", "peerload ls --help"),
    # numbers, sizes, times
    Mistake(["submit", "--mem", "8", "true"], USAGE, "8G is 8 GiB, 8M is 8 MiB; which is meant?", "submit --help"),
    Mistake(["submit", "-t", "30", "true"], USAGE, "30m is 30 minutes, 30s is 30 seconds", "submit --help"),
    Mistake(["submit", "-t", "5:30", "true"], USAGE, "can be read in two ways", "submit --help"),
    Mistake(["submit", "--mem", "lots", "true"], USAGE, "not a size; such as 8G", "submit --help"),
    Mistake(["submit", "-c", "two", "true"], USAGE, "'two' is not a number of cpus", "submit --help"),
    Mistake(["submit", "--prio", "high", "true"], USAGE, "'high' is not a whole number", "submit --help"),
    Mistake(["submit", "--array", "9-1", "true"], USAGE, "the start is greater than the end", "--array 1-100"),
    Mistake(["submit", "--array", "1-99999999", "true"], USAGE, "more than 1000000 members", "one more for the rest"),
    Mistake(["submit", "--lease", "0.1s", "true"], USAGE, "not between 1 second and 24 hours", "submit --help"),
    Mistake(["wait", "1", "--timeout", "5"], USAGE, "5m is 5 minutes, 5s is 5 seconds", "wait --help"),
    Mistake(["history", "--since", "yesterday"], USAGE, "or a day or moment: 2026-11-20", "history --help"),
    # what is to be run, and where
    Mistake(["submit"], USAGE, "the command is missing", "peerload submit hostname"),
    Mistake(["run", "--local"], USAGE, "the command is missing", "peerload run hostname"),
    Mistake(["submit", "-s", "a | b", "c"], USAGE, "both a command and --shell are given", "quote the whole line"),
    Mistake(
        ["submit", "--env", "FOO", "true"], USAGE, "--env takes NAME=VALUE or a lock file, not 'FOO'", "--export FOO"
    ),
    Mistake(["submit", "--once", "--fast", "true"], USAGE, "contradict each other", "never started twice"),
    Mistake(["submit", "-J", "x" * 200, "true"], USAGE, "has 200 characters", "--name NAME"),
    Mistake(["submit", "-w", "N1", "true"], USAGE, "is not a valid node name", "did you mean n1 ?"),
    Mistake(["submit", "-w", "n2", "true"], CANNOT, "no node n2 is known here", "peerload nodes"),
    Mistake(["submit", "-x", "n1", "true"], CANNOT, "n1: the task excludes it", "--wait-for-node"),
    Mistake(["submit", "-c", "5000", "true"], CANNOT, "n1: 2 cpus, asked 5000", "--wait-for-node"),
    Mistake(["submit", "--mem", "9000G", "true"], CANNOT, "asked 9000.0 GiB", "--wait-for-node"),
    Mistake(["submit", "-G", "8", "true"], CANNOT, "asked 8 GPUs, nearest is n1: no GPU", "--wait-for-node"),
    Mistake(
        ["submit", "-G3", "--gpu-mem", "48G", "-C", "amd", "train"],
        CANNOT,
        "asked 3 GPUs with 48 GiB and label amd, nearest is n1: no GPU, no label amd",
        "--wait-for-node",
    ),
    Mistake(["submit", "-d", "/nowhere", "true"], CANNOT, "no directory /nowhere", "-d -"),
    Mistake(["submit", "-d", "/etc/passwd", "true"], CANNOT, "is a file, not a directory", "-d -"),
    Mistake(["run", "--local", "-w", "n2", "true"], CANNOT, "the task is for n2", "leave one of them out"),
    Mistake(["submit", "--mem", "-1G", "true"], USAGE, "'-1G' is not a size", "submit --help"),
    Mistake(["submit", "--array", "1-1000001", "true"], USAGE, "more than 1000000 members", "--array 1-1000000"),
    Mistake(["cluster", "invite"], USAGE, "unknown action: 'invite'", "peerload invite"),
    # tasks and nodes that are not there
    Mistake(["show", "999"], CANNOT, "no such task: 999", "peerload ls"),
    Mistake(["logs", "99.7"], CANNOT, "no such task: 99.7", "peerload ls"),
    Mistake(["events", "999"], CANNOT, "no such task: 999", "peerload ls"),
    Mistake(["events", "one"], CANNOT, "'one' is not a task id", "peerload ls"),
    Mistake(["events", ""], CANNOT, "'' is not a task id", "peerload ls"),
    Mistake(["events", "@"], CANNOT, "your last task, and there is none yet", "peerload submit"),
    Mistake(["events", "other/7"], CANNOT, "other", ""),
    Mistake(["cancel", "one"], CANNOT, "'one' is not a task id", "peerload ls"),
    Mistake(
        ["show", ""], CANNOT, "'' is not a task id: ids look like 42, 42.7, 42.3-9, ws1/42, @ or @~1", "peerload ls"
    ),
    Mistake(["why", "9" * 90], CANNOT, "is not a task id", "peerload ls"),
    Mistake(["retry", "@"], CANNOT, "your last task, and there is none yet", "peerload submit"),
    Mistake(["cancel", "1", "--signal", "FOO"], USAGE, "'FOO' is not a signal; such as TERM", "cancel --help"),
    Mistake(["ls", "--state", "Running"], USAGE, "no such state: 'Running'", "held queued"),
    Mistake(["ls", "77"], CANNOT, "no such task: 77", "peerload ls"),
    Mistake(["events", "--what", "tasks"], USAGE, "no such kind: 'tasks'", "task attempt node"),
    Mistake(["forget", "n1"], CANNOT, "n1 is this node itself", "peerload leave"),
    Mistake(["forget", "gone"], CANNOT, "no node gone is known here", "peerload nodes"),
    Mistake(["drain", "nowhere"], CANNOT, "no node nowhere is known here", "peerload nodes"),
    # many tasks
    Mistake(["submit", "--after", "999", "true"], CANNOT, "no such task: n1/999", "peerload ls"),
    Mistake(["submit", "--after-ok", "first", "true"], CANNOT, "'first' is not a task id", "peerload ls"),
    Mistake(["submit", "--group", "bad group!", "true"], USAGE, "is not a valid name of a group", "letters, digits"),
    Mistake(["submit", "--retries", "-1", "true"], USAGE, "-1 is not between 0 and 100", "submit --help"),
    Mistake(["submit", "-o", "/nowhere/x", "true"], CANNOT, "there is no directory /nowhere", "mkdir -p /nowhere"),
    Mistake(["submit", "--each-line", "/nowhere", "echo", "{}"], USAGE, "/nowhere cannot be read", "--each-line FILE"),
    Mistake(["submit", "--notify", "", "true"], USAGE, "--notify needs a command", "--notify"),
    Mistake(["prio", "high", "1"], USAGE, "'high' is not a whole number", "prio --help"),
    Mistake(["prio", "5"], USAGE, "prio: which tasks?", "prio --help"),
    Mistake(["group", "pause", "nosuch"], CANNOT, "there is no group nosuch", "peerload group set nosuch --slots N"),
    Mistake(["group", "set", "g"], USAGE, "--slots is missing", "--slots none"),
    Mistake(["map"], USAGE, "the command is missing", "peerload map 'gzip {}' ::: *.log"),
    Mistake(["map", "echo {3}", ":::", "a"], USAGE, "{3} refers to an input that does not exist", ":::"),
    Mistake(["map", "--halt", "soon", "echo", ":::", "a"], USAGE, "--halt 'soon' cannot be", "--halt now,fail=1"),
    Mistake(["map", "--resume", "echo", ":::", "a"], USAGE, "--resume needs the joblog", "--joblog FILE --resume"),
    Mistake(
        ["map", "--joblog", "/nowhere/log", "echo", ":::", "a"], USAGE, "/nowhere/log cannot be used", "map --help"
    ),
    Mistake(["clean"], USAGE, "nothing is deleted by default", "peerload clean --older 7d"),
    Mistake(["clean", "--older", "5"], USAGE, "'5' has no unit", "clean --help"),
    Mistake(["clean", "--state", "running"], USAGE, "is not a state in which tasks end", "done failed cancelled"),
    # agents, clusters, files
    Mistake(["ls", "--socket", "/nowhere"], CANNOT, "no agent is running here (no socket at /nowhere)", "peerload up"),
    Mistake(["ls", "--socket", "/etc/passwd"], CANNOT, "nothing listens at /etc/passwd", "peerload doctor"),
    Mistake(["cluster", "init"], USAGE, "cluster init takes one directory", "cluster --help"),
    Mistake(["cluster", "init", "/tmp"], CANNOT, "no cluster was created in /tmp: it exists", "name another directory"),
    Mistake(["cluster", "show", "/nowhere"], CANNOT, "/nowhere cannot be used", "peerload cluster init /nowhere"),
    Mistake(["policy", "show", "thresold"], CANNOT, "no preset and no policy named 'thresold'", "threshold"),
    Mistake(["policy", "check", "mine"], USAGE, "'mine' is not a preset", ".toml"),
    Mistake(["config", "check", "/nowhere"], CANNOT, "/nowhere cannot be read", "config show"),
    Mistake(["config", "set"], USAGE, "unknown action: 'set'", "peerload config show | check"),
    Mistake(["completions", "tcsh"], USAGE, "no such shell: 'tcsh'", "bash | zsh | fish"),
    Mistake(["replay", "/nowhere"], CANNOT, "/nowhere cannot be read", "peerload up --record"),
    Mistake(["sim", "--nodes", "0"], USAGE, "0 is not between 1 and", "sim --help"),
    Mistake(["agent", "--listen", "nowhere"], CANNOT, "'nowhere' is not HOST:PORT", "127.0.0.1:7117"),
]


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1")


def answered_wrongly(agent: Agent, mistake: Mistake) -> str:
    """What is wrong with the answer to a mistake, "" if nothing is."""
    done = cli(agent, *mistake.typed)
    lines = done.stderr.decode().splitlines()
    if (
        (done.returncode, done.stdout, len(lines)) == (mistake.code, b"", 2)
        and lines[0].startswith("peerload: ")
        and lines[1].startswith("  ")
        and mistake.says in lines[0]
        and mistake.next_command in lines[1]
    ):
        return ""
    return f"peerload {' '.join(mistake.typed)}: exit code {done.returncode}, stdout {done.stdout!r}, stderr {lines}"


def test_what_why_and_the_next_command() -> None:
    """Of an agent that nobody has given a task."""
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        assert not [wrong for mistake in MISTAKES if (wrong := answered_wrongly(agent, mistake))]
        assert agent.call("tasks")["tasks"] == []


def test_a_command_in_quotes_is_told_at_once(agent: Agent) -> None:
    done = agent.cli("run", "echo a b")
    assert done.returncode == 127
    told = done.stderr.decode()
    assert "'echo a b' is one word" in told
    assert "peerload run echo a b" in told
    assert agent.cli("run", "sh", "-c", "echo a b").stdout == b"a b\n"
    for words in (["echo a | cat"], ["echo", "a", "|", "cat"], ["echo|cat"]):
        told = agent.cli("run", *words).stderr.decode()
        assert f"peerload run -s '{' '.join(words)}'" in told
        assert "without the quotes" not in told, "the pipe would be the shell's that it is typed in"
    found = agent.cli("run", "find", "/dev/null", "-name", "none", "-exec", "ls", "{}", ";")
    assert without_waits(found.stderr) == b""
    task = agent.call("tasks")["tasks"][0]["id"]
    assert agent.cli("release", task).returncode == 0  # nothing to release is no mistake, and said
    agent.call("clean", tasks=[each["id"] for each in agent.call("tasks")["tasks"]])


def test_an_agent_that_is_there_already_keeps_its_settings(agent: Agent) -> None:
    done = agent.cli("up", "--slots", "9", "--node", "other", "--socket", agent.socket)
    assert done.returncode == CANNOT
    assert b"--node --slots not applied: the agent is already running" in done.stderr
    assert agent.call("info")["node"] == "n1"
    again = agent.cli("up", "--node", "n1", "--socket", agent.socket)
    assert (again.returncode, again.stderr) == (0, b"")


def test_up_without_a_name_goes_on_as_the_node_whose_tasks_are_there() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        assert agent.cli("down").returncode == 0
        agent.reap()
        up = cluster.cli(None, "up", "--json", "--state", str(agent.state), "--socket", agent.socket)
        assert up.returncode == 0, up.stderr
        assert json.loads(up.stdout)["node"] == "n1"
        assert agent.cli("down", "--all").returncode == 0


def test_a_file_of_settings_is_told_only_if_it_is_not_in_force(tmp_path: Path) -> None:
    same, other = tmp_path / "same.conf", tmp_path / "other.conf"
    same.write_text('slots = 3\nlabel = ["big"]\n')
    other.write_text("slots = 4\n")
    with Cluster() as cluster:
        agent = cluster.agent("n1", "--config", str(same), slots=None)
        for file, code, told in ((same, 0, b""), (other, CANNOT, b"--config not applied")):
            again = agent.cli("up", "--config", str(file), "--socket", agent.socket)
            assert (again.returncode, told in again.stderr) == (code, True), again.stderr
        back = agent.cli("down").stdout.decode().partition("Start it again:  peerload up ")[2].split()
        agent.reap()
    assert back[back.index("--config") + 1] == str(same)


def test_of_two_that_start_an_agent_at_once_both_have_it(tmp_path: Path) -> None:
    with Cluster() as cluster:
        words = [*program(), "up", "--state", str(tmp_path / "s"), "--socket", str(tmp_path / "a")]
        both = [
            subprocess.Popen(words, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(2)
        ]
        try:
            told = sorted(process.communicate(timeout=100) for process in both)
        finally:
            cluster.cli(None, "down", "--all", "--socket", str(tmp_path / "a"))
    assert [process.returncode for process in both] == [0, 0], told
    assert [out.partition(b":")[0] for out, _ in told] == [b"agent started", b"an agent is already running"]


def test_a_closed_pipe_is_no_error(agent: Agent) -> None:
    def happens() -> bool:
        agent.call("drain")
        agent.call("undrain")
        return follower.poll() is not None

    with ended(agent.spawn_cli("events", "-f", "--limit", "0")) as follower:
        assert follower.stdout is not None
        follower.stdout.close()
        wait_until(happens, what="it to notice")
        assert follower.returncode == 141
        assert follower.stderr is not None
        assert follower.stderr.read() == b""


ODD_IDS = [
    "",
    "@",
    "@.7",
    "@@",
    "/",
    "n1/",
    "/1",
    "1.",
    ".1",
    "n1/1.",
    "1.2.3",
    "-1",
    "n1/-1",
    "٣",
    "1\x00",
    "x" * 256,
    "9" * 18,
    "9" * 19,
    f"n1/{'9' * 18}.{'9' * 9}",
    "other/1",
    f"{'o' * 40}/{'9' * 18}",
    "OTHER/1",
    "1 2",
    "1\n",
]


def test_no_id_however_odd_stops_the_agent(agent: Agent) -> None:
    one: dict[str, dict[str, Any]] = {
        "why": {},
        "output": {},
        "signal": {"signal": 15},
        "retry": {"token": "a-token-of-mine"},
    }
    many = ("show", "events", "wait", "cancel", "hold", "release", "clean")
    asked: list[tuple[str, dict[str, Any]]] = [
        (verb, {"task": name, **more}) for name in ODD_IDS for verb, more in one.items()
    ]
    asked += [(verb, {"tasks": [name]}) for name in ODD_IDS for verb in many]
    asked += [("prio", {"tasks": [name], "priority": 1}) for name in ODD_IDS]
    asked += [(verb, {"tasks": ["other/1", name, "n1/1"]}) for name in ODD_IDS for verb in many]
    with agent.client() as client:
        for at in ("", "n1", "other"):
            for verb, fields in asked:
                with contextlib.suppress(BadRequest):
                    client.call(verb, **fields, **({"at": at} if at else {}))
    assert agent.runs
    assert "bug" not in agent.log_end()


@pytest.mark.parametrize("typed", [["ls"], ["run", "echo", "x"], ["submit", "true"], ["map", "echo {}", ":::", "1"]])
def test_an_output_that_cannot_be_written_is_no_bug(agent: Agent, typed: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*program(), typed[0], "--socket", agent.socket, *typed[1:]],
            env=agent.cluster.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    said = done.stderr.decode()
    assert done.returncode == CANNOT, said
    assert Says.STANDARD_OUTPUT_FAILED(os.strerror(errno.ENOSPC)) in said
    assert "bug" not in said
    assert ("was submitted" in said) == (typed[0] == "submit")


def test_down_says_how_to_come_back_as_it_was() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1", "--label", "big", "--mqtt-ca", "system", slots=1)
        said = agent.cli("down").stdout.decode()
        agent.reap()
    back = said.partition("Start it again:  peerload up ")[2].split()
    assert back[:2] == ["--node", "n1"]
    assert {"--slots", "1", "--label", "big", "--mqtt-ca", "system", "--state", str(agent.state)} <= {*back}
