from __future__ import annotations

import json
import shlex
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from peerload import __version__
from peerload.cli.common.output import SanitizedOutput
from peerload.wire import control
from tests.each import each
from tests.support import wait_until
from tests.unit.cli.fake_agent import (  # noqa: F401 -- one is a fixture
    ROOT,
    FakeAgent,
    Reply,
    command_line,
    environment,
    fixture_agent,
    peerload,
)
from tests.wording import Says

if TYPE_CHECKING:
    from pathlib import Path

TASK: dict[str, Any] = {
    "id": "ws1/42",
    "name": "sl\x1b[2Jeep",
    "user": "",
    "state": "done",
    "node": "ws2",
    "home": "ws1",
    "argv": ["sleep", "1 2"],
    "cpus": 1.0,
    "mem_bytes": 0,
    "gpus": 0,
    "attempt": 1,
    "migrations": 0,
    "submitted_at": 1000.0,
    "started_at": 1001.0,
    "ended_at": 1003.5,
    "exit_code": 0,
    "signal": 0,
    "reason": "",
}
NODE: dict[str, Any] = {
    "node": "ws1",
    "state": "alive",
    "load": 0.5,
    "region": "underloaded",
    "cpus": 4,
    "cpus_busy": 1.25,
    "mem_bytes": 8 << 30,
    "mem_used_bytes": 1 << 30,
    "tasks_running": 1,
    "tasks_queued": 0,
    "gpus": [],
    "age_s": 0.3,
    "incarnation": 1,
    "drained": False,
    "slots": 2,
    "labels": [],
    "address": "127.0.0.1:1",
    "self": True,
}
ENDED = {"id": "ws1/42", "state": "done", "exit_code": 0, "signal": 0, "node": "ws2", "reason": ""}


# -- the command itself ----------------------------------------------------------------------------------------------


def test_version_and_help_without_argparse() -> None:
    assert peerload("--version").stdout.decode() == f"peerload {__version__}\n"
    done = peerload("--help")
    assert done.returncode == 0
    assert b"submit" in done.stdout
    assert peerload().returncode == 2


@each(
    "verb",
    [
        "up",
        "down",
        "agent",
        "run",
        "submit",
        "ls",
        "history",
        "show",
        "logs",
        "wait",
        "cancel",
        "nodes",
        "leave",
        "forget",
        "policy",
        "top",
    ],
)
def test_every_verb_has_help_socket_and_json(verb: str) -> None:
    done = peerload(verb, "--help")
    assert done.returncode == 0
    assert b"--socket" in done.stdout
    assert b"--json" in done.stdout


def test_unknown_verb_names_a_near_one() -> None:
    done = peerload("sumbit", "x")
    assert done.returncode == 2
    what, hint = done.stderr.decode().splitlines()
    assert what.endswith("'sumbit'")
    assert "peerload submit" in hint


def test_no_agent() -> None:
    done = peerload("ls", "--socket", "/tmp/none/agent.sock")
    assert done.returncode == 125
    what, hint = done.stderr.decode().splitlines()
    assert "/tmp/none/agent.sock" in what
    assert all(command in hint for command in ("peerload up", "peerload doctor"))


def test_down_without_an_agent_does_not_offer_to_start_one() -> None:
    done = peerload("down", "--socket", "/tmp/none/agent.sock")
    assert done.returncode == 125
    assert b"peerload down --all --state DIR" in done.stderr, "where its state is, is not known"
    assert b"peerload up" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    assert b"Traceback" in peerload("--debug", "ls", "--socket", "/tmp/none/agent.sock").stderr


def test_usage_errors_exit_2() -> None:
    for words in (["ls", "--nope"], ["submit"], ["run", "--mem", "8", "x"], ["wait"], ["ls", "--state", "odd"]):
        done = peerload(*words)
        assert done.returncode == 2, words
        assert done.stderr.startswith(b"peerload: "), words
        assert len(done.stderr.splitlines()) == 2, words


@pytest.mark.parametrize(
    "words", [("ls",), ("show", "42"), ("nodes",), ("cancel", "42")]
)  # each on an agent of its own
def test_a_verb_waits_for_room_for_one_more_client(agent: FakeAgent, words: tuple[str, ...]) -> None:
    agent.answer("tasks", tasks=[TASK], truncated=False)
    agent.answer("show", tasks=[TASK])
    agent.answer("nodes", nodes=[NODE])
    agent.answer("cancel", tasks=[])
    agent.refused = {1}
    done = peerload(*words, agent=agent)
    assert (done.returncode, done.stderr) == (0, b"")


def test_refusal_is_escaped(agent: FakeAgent) -> None:
    agent.handlers["show"] = lambda _request, reply: reply.error("no-such-task", "no \x1b[2J", "w", "peerload ls")
    done = peerload("show", "9", agent=agent)
    assert done.returncode == 125
    assert done.stderr.decode() == "peerload: no \\x1b[2J: w\n  peerload ls\n"


# -- looking ---------------------------------------------------------------------------------------------------------


def test_ls(agent: FakeAgent) -> None:
    agent.answer("tasks", tasks=[TASK, TASK | {"id": "ws1/43", "user": "somebody-else"}], truncated=False)
    done = peerload("ls", "--state", "done,failed", "--node", "ws2", agent=agent)
    assert b"ws1/42  sl\\x1b[2Jeep  done   ws2   2.5s  0" in done.stdout
    assert b"ws1/43" not in done.stdout
    assert b" 1 task " in done.stderr, "one of another user is not shown"
    [request] = agent.asked(control.TasksRequest)
    assert (request.states, request.node) == (("done", "failed"), "ws2")
    shown = json.loads(peerload("ls", "--all", "--json", agent=agent).stdout)
    assert shown["v"] == 1
    assert [task["id"] for task in shown["tasks"]] == ["ws1/42", "ws1/43"]
    assert shown["tasks"][0]["name"] == TASK["name"]


@each("verb", ["ls", "history"])
def test_an_administrator_gets_own_tasks_although_there_are_more_of_others(agent: FakeAgent, verb: str) -> None:
    others = [TASK | {"id": f"ws1/{number}", "user": "somebody-else"} for number in (50, 51)]

    def answer(request: control.TasksRequest | control.History, reply: Reply) -> None:
        reply.ok(tasks=[TASK] if request.own else others, truncated=not request.own)

    agent.handlers["tasks"] = agent.handlers["history"] = answer
    done = peerload(verb, "--limit", "2", agent=agent)
    assert b"ws1/42" in done.stdout
    assert b"ws1/50" not in done.stdout
    assert b" 2 tasks " in done.stderr, "others are not shown"
    assert b"ws1/50" in peerload(verb, "--limit", "2", "--all", agent=agent).stdout


def test_show(agent: FakeAgent) -> None:
    full = TASK | {
        "directory": "/home/a",
        "priority": 5,
        "time_limit_s": 60.0,
        "placement": {"node": None, "labels": ["big"], "local": False},
        "usage": {"user_s": 1.0, "system_s": 0.5, "memory_bytes_max": 1 << 20},
        "stdout_bytes": 5,
        "stderr_bytes": 0,
        "decision": {"policy": "threshold", "choice": "ws2", "reason": "it accepts", "inputs": []},
        "history": [{"at": 1000.0, "state": "queued", "reason": "sub\nmitted", "attempt": 0, "node": ""}],
    }
    agent.answer("show", tasks=[full])
    text = peerload("show", "@", agent=agent).stdout.decode()
    for part in ("sleep '1 2'", "done", "big", "1m00s", "sub\\x0amitted", "0.50 s", "1 MiB"):
        assert part in text
    assert json.loads(peerload("show", "@", "--json", agent=agent).stdout) == {"v": 1, **full, "live": None}
    assert agent.asked(control.Show)[0].tasks == ("@",)


def test_show_asks_the_node_that_runs_a_task_what_it_uses(agent: FakeAgent) -> None:
    running = [{"id": f"ws1/{n}", "state": "running", "node": "ws2", "started_at": 1.0, "argv": []} for n in (1, 2)]
    agent.answer("show", tasks=[*running, {"id": "ws1/3", "state": "queued", "node": None, "argv": []}])
    used = {"id": "ws1/1", "cpus_busy": 1.94, "cpu_s": 12.34, "memory_bytes": 5 << 20, "processes": 3}
    nothing = {"id": "ws1/2", "cpus_busy": "\x1b[31m", "cpu_s": None, "memory_bytes": -1, "processes": [7]}
    agent.answer("usage", tasks=[used, nothing, "\x1b[31m"])
    text = peerload("show", "1", "2", "3", agent=agent).stdout.decode()
    (line,) = (line for line in text.splitlines() if line.strip().startswith("uses now"))
    assert all(fact in line for fact in ("1.9 cpus", "5 MiB", "3 processes", "12.3 s"))
    assert "\x1b" not in text
    (asked,) = agent.asked(control.ReadUsage)
    assert (asked.at, asked.tasks) == ("ws2", ("ws1/1", "ws1/2"))


DEVICES: dict[str, Any] = {
    "gpus": 2,
    "gpu_mem_bytes": 12 << 30,
    "gpu_prefer": ["0", "A100*"],
    "gpu_wait": "queue",
    "gpu_wait_s_max": 600.0,
    "gpu_share": "exclusive",
    "other_devices": {"fpga": 2, "licence": 1},
    "devices": ["nvidia:GPU-a", "nvidia:GPU-b", "fpga:0000:3b:00.0", "fpga:0000:af:00.0", "licence:1"],
}


def test_show_tells_which_devices_are_asked_for_and_given(agent: FakeAgent) -> None:
    agent.answer("show", tasks=[TASK | DEVICES])
    lines = [line.split(maxsplit=1) for line in peerload("show", "@", agent=agent).stdout.decode().splitlines()[1:]]
    told = {line[0]: line[1] for line in lines}
    assert all(need in told["needs"] for need in ("1 cpu", "2 GPUs", "12 GiB", "2 fpga", "1 licence"))
    assert all(fact in told["GPUs"] for fact in ("0, A100*", "queue", "10m00s", "exclusive"))
    assert told["devices"].split(", ") == DEVICES["devices"]


def test_show_says_nothing_of_devices_that_nobody_asked_for(agent: FakeAgent) -> None:
    usual = {"gpu_wait": "schedule", "gpu_share": "auto", "gpu_prefer": [], "other_devices": {}, "devices": []}
    agent.answer("show", tasks=[TASK | usual, TASK | usual | {"gpus": 0.25, "gpu_mem_bytes": 1 << 30}])
    first, _, second = peerload("show", "42", "43", agent=agent).stdout.decode().partition("\n\n")
    assert "GPU" not in first
    assert "devices" not in first + second
    assert all(fact in second for fact in ("0.25", "GPU", "1 GiB"))


def test_nodes_top(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE, NODE | {"node": "ws2", "state": "dead", "load": None, "drained": True}])
    agent.answer("info", node="ws1", cluster="default", policy="symmetric", mqtt=None)
    agent.answer("tasks", tasks=[TASK | {"state": "running", "ended_at": 0.0}], truncated=False)
    text = peerload("nodes", agent=agent).stdout.decode()
    assert "ws1 *  alive" in text
    assert "dead, drained" in text
    assert json.loads(peerload("nodes", "--json", agent=agent).stdout) == {
        "v": 1,
        "nodes": [NODE, NODE | {"node": "ws2", "state": "dead", "load": None, "drained": True}],
        "unmet": [],
    }
    text = peerload("top", "--once", agent=agent).stdout.decode()
    assert "1 of 2 nodes" in text
    assert "[#####.....]" in text
    assert "ws1/42" in text
    assert {"v", "cluster", "nodes", "tasks"} == set(json.loads(peerload("top", "--json", agent=agent).stdout))


def test_top_counts_waiting_tasks_that_are_not_listed(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE])
    agent.answer("info", node="ws1", cluster="default", policy="symmetric", mqtt=None)
    agent.answer("tasks", tasks=[TASK | {"state": "queued"}], truncated=True, unfinished={"queued": 4997, "held": 9})
    assert json.loads(peerload("top", "--json", agent=agent).stdout)["cluster"]["tasks_waiting_here"] == 4997


def test_nodes_tells_which_directory_a_node_lacks(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE | {"declines": ["no directory /data"]}])
    assert "alive, no directory /data" in peerload("nodes", agent=agent).stdout.decode()


def test_nodes_tells_which_agents_share_a_machine(agent: FakeAgent) -> None:
    shared = [NODE | {"node": name, "machine": "m1"} for name in ("ws1", "ws1b")]
    others = [NODE | {"node": "ws2", "machine": "m2"}, NODE | {"node": "gone", "machine": "m1", "state": "dead"}]
    agent.answer("nodes", nodes=[*shared, *others])
    agent.answer("info", node="ws1", cluster="default", policy="symmetric", mqtt=None)
    agent.answer("tasks", tasks=[], truncated=False)
    for words in (["nodes"], ["top", "--once"]):
        assert "\nws1, ws1b: one machine" in peerload(*words, agent=agent).stdout.decode()
    agent.answer("nodes", nodes=[shared[0], *others])
    assert "one machine" not in peerload("nodes", agent=agent).stdout.decode()


def test_nodes_names_members_that_were_not_met_since_the_start(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE], unmet=["gone", "\x1b[2Jlost"])
    shown = peerload("nodes", agent=agent).stdout.decode()
    assert "peerload forget gone" in shown
    assert "\x1b" not in shown


@each(("foreign", "is_shown"), [(None, False), (0.4, False), (0.5, True), (3.0, True)])
def test_nodes_tells_of_other_programs_that_take_slots(agent: FakeAgent, foreign: float | None, is_shown: bool) -> None:
    agent.answer("nodes", nodes=[NODE, NODE | {"node": "ws2", "cpus_foreign": foreign}])
    assert (b"OTHER CPUS" in peerload("nodes", agent=agent).stdout) is is_shown


def test_nodes_tells_why_a_node_is_drained(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE | {"drained": True, "drain_reason": "a new disk"}])
    assert "alive, drained: a new disk" in peerload("nodes", agent=agent).stdout.decode()


def test_cancel_tells_an_array_in_a_line(agent: FakeAgent) -> None:
    agent.answer("cancel", cancelled=["a.b/7.1", "a.b/7.2", "a.b/8", "a.b/9.3"], already_ended=["a.b/7.3"])
    assert peerload("cancel", "7", "8", "9.3", agent=agent).stdout.decode() == (
        "a.b/7  2 tasks  cancelled\na.b/8  cancelled\na.b/9.3  cancelled\na.b/7.3  had already ended\n"
    )


def test_nodes_tells_the_incarnation(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE | {"incarnation": 41}])
    heading, row = peerload("nodes", "--wide", agent=agent).stdout.decode().splitlines()
    ends = heading.index("INCARNATION") + len("INCARNATION")
    assert row[:ends].split()[-1] == "41"


def test_nodes_tells_what_only_policies_use_if_it_is_asked_for(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE])
    plain, wide = (
        set(peerload("nodes", *words, agent=agent).stdout.decode().splitlines()[0].split())
        for words in ((), ("--wide",))
    )
    assert wide - plain == {"OTHER", "WATTS", "LOAD", "REGION", "INCARNATION"}


def test_nodes_tells_what_other_programs_keep_busy(agent: FakeAgent) -> None:
    agent.answer("nodes", nodes=[NODE | {"cpus_foreign": 3.26}, NODE])
    heading, *rows = peerload("nodes", "--wide", agent=agent).stdout.decode().splitlines()
    ends = heading.index("OTHER CPUS") + len("OTHER CPUS")
    assert [row[:ends].split()[-1] for row in rows] == ["3.3", "-"]


def test_forget(agent: FakeAgent) -> None:
    agent.answer("forget", node="ws2", was="dead", ended=2)
    told = peerload("forget", "ws2", agent=agent).stdout
    assert told.startswith(b"ws2 ")
    assert b"2 tasks" in told
    assert agent.asked(control.Forget)[0].node == "ws2"
    assert json.loads(peerload("forget", "ws2", "--json", agent=agent).stdout) == {
        "v": 1,
        "node": "ws2",
        "was": "dead",
        "ended": 2,
    }
    assert peerload("forget", agent=agent).returncode == 2
    refused = peerload("forget", "bad name!", agent=agent)
    assert refused.returncode == 2
    assert b"'bad name!'" in refused.stderr
    assert refused.stderr.endswith(b"peerload nodes\n")


def test_hold_tells_what_it_did_with_each(agent: FakeAgent) -> None:
    agent.answer("hold", held=["a/1"], already_held=["a/2"], not_waiting=["a/3"])
    agent.answer("show", tasks=[{"id": "a/3", "state": "running"}])
    done = peerload("hold", "1", "2", "3", agent=agent)
    assert done.returncode == 125
    lines = done.stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == ["a/1", "a/2", "a/3"]
    assert lines[2].endswith("peerload cancel")
    agent.answer("hold", held=[], already_held=[], not_waiting=["a/3"])
    agent.answer("show", tasks=[{"id": "a/3", "state": "done"}])
    done = peerload("hold", "3", agent=agent)
    assert (done.returncode, done.stdout.endswith(b"peerload retry\n")) == (125, True)


@each(
    ("became", "code"),
    [
        ({"ended": ["ws1/42"]}, 125),
        ({"ended": ["ws1/42"], "changed": ["ws1/43"]}, 125),
        ({"elsewhere": ["ws1/42"]}, 0),
    ],
)
def test_prio_of_a_task_that_has_ended_is_no_success(agent: FakeAgent, became: dict[str, Any], code: int) -> None:
    agent.answer("prio", **became)
    assert peerload("prio", "5", "42", agent=agent).returncode == code


def test_undrain_of_a_node_that_was_not_drained(agent: FakeAgent) -> None:
    agent.answer("undrain", was_drained=False)
    assert json.loads(peerload("undrain", "--json", agent=agent).stdout) == {"v": 1, "was_drained": False}


@each(("mode", "again"), [("user", b"peerload up --peer h:2\n"), ("system", b"  sudo systemctl restart peerload\n")])
def test_leave_waits_until_the_agent_has_gone(agent: FakeAgent, mode: str, again: bytes) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:

        def leave(request: control.Leave, reply: Reply) -> None:
            assert request.force
            reply.ok(node="ws1", pid=process.pid)
            process.terminate()
            process.wait()

        agent.answer("info", node="ws1", pid=process.pid, mode=mode)
        agent.answer("checkup", peers=[{"state": "left", "address": "h:1"}, {"state": "alive", "address": "h:2"}])
        agent.handlers["leave"] = leave
        done = peerload("leave", "--force", agent=agent)
    assert (done.returncode, done.stdout.startswith(b"ws1 ")) == (0, True)
    assert done.stdout.endswith(again)
    assert b"h:2" in done.stdout


def test_logs(agent: FakeAgent) -> None:
    def output(request: control.ReadOutput, reply: Reply) -> None:
        for stream, data in ((1, b"one\x1b[31m\n"), (2, b"x\ny\n")):
            if stream in request.streams:
                reply.more(stream=stream, offset=0, data=data)
        reply.ok(**ENDED, stdout_bytes=9, stderr_bytes=4)

    agent.handlers["output"] = output
    done = peerload("logs", "42", agent=agent)
    assert (done.stdout, done.stderr) == (b"one\x1b[31m\n", b"x\ny\n")
    done = peerload("logs", "42", "--err", agent=agent)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"x\ny\n")
    peerload("logs", "ws2/42", "-f", "--tail", "1", "--at", "ws3", agent=agent)
    asked = agent.asked(control.ReadOutput)[-1]
    assert (asked.task, asked.follow, asked.tail_lines, asked.at) == ("ws2/42", True, 1, "ws3")
    lines = [json.loads(line) for line in peerload("logs", "42", "--json", agent=agent).stdout.splitlines()]
    assert lines[1] == {"v": 1, "stream": 2, "offset": 0, "data": "x\ny\n"}


def test_output_for_a_terminal_can_do_it_no_harm() -> None:
    shown = SanitizedOutput()
    hostile = "ok\ttab\r\n\x1b]0;title\x07\x9b31m\u202egnp.exe\u2028 é\x00\x08\rover\n".encode() + b"\xff\xc3"
    whole = b"".join(shown.of(bytes((byte,))) for byte in hostile) + shown.of(b"", final=True)
    assert whole.decode() == (
        "ok\ttab\n\\x1b]0;title\\x07\\x9b31m\\u202egnp.exe\\u2028 é\\x00\\x08\\x0dover\n\\xff\\xc3"
    )
    shown = SanitizedOutput()
    assert shown.of(b"a\r") + shown.of(b"\nb\r") + shown.of(b"", final=True) == b"a\nb\\x0d"


def test_where_a_node_is_named(agent: FakeAgent) -> None:
    agent.answer("drain", returned=1, running=2)
    agent.answer("undrain", was_drained=True)
    done = peerload("drain", "ws2", agent=agent)
    assert all(fact in done.stdout for fact in (b"1 task ", b"2 tasks ", b" ws2\n", b"peerload undrain ws2\n"))
    assert peerload("undrain", "ws2", agent=agent).stdout.startswith(b"ws2 ")
    assert [request.at for request in agent.requests] == ["ws2", "ws2"]
    refused = peerload("drain", "No Such", agent=agent)
    assert refused.returncode == 2
    assert b"No Such" in refused.stderr


def test_the_tasks_of_all_nodes(agent: FakeAgent) -> None:
    found = [
        TASK | {"id": f"ws{n}/1", "submitted_at": 100.0 - n, "state": "done" if n == 1 else "queued"} for n in (1, 2, 3)
    ]
    missing = [{"node": "ws4\x1b", "state": "dead", "why": "it was last heard of 40 s ago (dead)"}]
    agent.answer("tasks", tasks=found, truncated=False, missing=missing)
    done = peerload("ls", "--cluster", "--all", agent=agent)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [b"ws3/1", b"ws2/1", b"ws1/1"]
    assert (done.returncode, b"ws4\\x1b" in done.stderr) == (125, True)
    told = json.loads(peerload("ls", "--cluster", "--all", "--limit", "2", "--json", agent=agent).stdout)
    assert ([task["id"] for task in told["tasks"]], told["truncated"]) == (["ws3/1", "ws2/1"], True)
    assert told["missing"] == missing


def test_tasks_of_other_homes_on_this_node(agent: FakeAgent) -> None:
    agent.answer("remote", tasks=[TASK | {"user": "somebody"}], truncated=False)
    told = json.loads(peerload("ls", "--remote", "--at", "ws2", "--json", agent=agent).stdout)
    assert ([task["id"] for task in told["tasks"]], told["truncated"]) == (["ws1/42"], False)
    assert agent.asked(control.Remote)[0].at == "ws2"
    assert peerload("ls", "--remote", "--cluster", agent=agent).returncode == 2
    agent.answer("cancel_remote", cancelled=["ws1/42"], already_ended=[])
    assert peerload("cancel", "--remote", "--force", "ws1/42", agent=agent).stdout == b"ws1/42  cancelled\n"
    (asked,) = agent.asked(control.CancelRemote)
    assert (asked.guests, asked.force) == (("ws1/42",), True)
    assert peerload("cancel", "--remote", "--wait", "ws1/42", agent=agent).returncode == 2


# -- waiting and stopping --------------------------------------------------------------------------------------------


def ends(agent: FakeAgent, *tasks: dict[str, Any], timed_out: bool = False) -> None:
    def wait(_request: control.Wait, reply: Reply) -> None:
        for task in tasks:
            reply.more(**(ENDED | task))
        reply.ok(timed_out=timed_out)

    agent.handlers["wait"] = wait


def test_wait(agent: FakeAgent) -> None:
    ends(
        agent,
        {},
        {"id": "ws1/43", "state": "failed", "exit_code": 4},
        {
            "id": "ws1/44",
            "state": "failed",
            "exit_code": 137,
            "signal": 9,
            "out_of": "memory",
            "reason": "out of memory",
        },
    )
    done = peerload("wait", "42", "43", "44", agent=agent)
    assert done.returncode == 4
    lines = done.stdout.decode().splitlines()
    assert lines[:2] == ["ws1/42  done  exit 0  ws2", "ws1/43  failed  exit 4  ws2"]
    assert lines[2] == "ws1/44  failed  signal 9 (out of memory)  ws2"
    done = peerload("wait", "--json", "--any", "42", agent=agent)
    first = json.loads(done.stdout.splitlines()[0])
    keys = {"v": 1, "id": "ws1/42", "state": "done", "exit_code": 0, "signal": 0, "node": "ws2", "out_of": None}
    assert first == keys
    assert agent.asked(control.Wait)[1].any


@each(
    ("ended", "says"),
    [
        ({"exit_code": 124, "signal": 15, "reason": "time limit"}, "signal 15 (time limit)"),
        ({"exit_code": 127, "reason": "command not found: x"}, "exit 127 (command not found: x)"),
        ({"exit_code": 3, "reason": "exit code 3"}, "exit 3"),
        ({"exit_code": 4, "reason": "exit code 4; it was tried 3 times"}, "exit 4 (it was tried 3 times)"),
        ({"exit_code": None, "signal": 9, "reason": "ended by signal 9 (KILL)"}, "signal 9"),
        ({"exit_code": None, "reason": "lost once"}, "lost once"),
    ],
)
def test_wait_says_why_a_task_failed(agent: FakeAgent, ended: dict[str, Any], says: str) -> None:
    ends(agent, {"state": "failed"} | ended)
    assert peerload("wait", "42", agent=agent).stdout.decode() == f"ws1/42  failed  {says}  ws2\n"


def test_wait_timeout(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.cli.verbs.wait.time", SimpleNamespace(monotonic=lambda: 7.0))
    ends(agent, {}, timed_out=True)
    done = peerload("wait", "--timeout", "2s", "42", "43", agent=agent)
    assert done.returncode == 124
    assert agent.asked(control.Wait)[0].timeout_s == 2.0


@each(
    ("node", "is_named"),
    [("ws2", True), (None, False)],
)
def test_wait_for_one_whose_outcome_is_unknown(agent: FakeAgent, node: str | None, is_named: bool) -> None:
    ends(agent, {"state": "unknown", "node": node, "reason": "it may run once only"}, timed_out=True)
    done = peerload("wait", "--timeout", "1s", "42", agent=agent)
    assert done.returncode == 124
    assert b"ws1/42" in done.stderr
    assert (b"ws2" in done.stderr) is is_named


def test_wait_for_one_that_never_ran(agent: FakeAgent) -> None:
    ends(agent, {"state": "cancelled", "exit_code": None, "node": "", "reason": "by you"})
    done = peerload("wait", "42", agent=agent)
    assert done.returncode == 125
    assert done.stdout == b"ws1/42  cancelled  by you\n"
    ends(agent, {"state": "cancelled", "exit_code": None, "node": "", "reason": "cancelled"})
    assert peerload("wait", "42", agent=agent).stdout == b"ws1/42  cancelled\n"


@each("words", [[], ["--tail", "3"], ["--err"]])
def test_logs_of_a_node_that_cannot_be_asked_are_no_success(agent: FakeAgent, words: list[str]) -> None:
    agent.answer("output", **(ENDED | {"state": "leased", "exit_code": None}), behind="ws2 does not answer")
    done = peerload("logs", *words, "42", agent=agent)
    assert (done.returncode, b"ws2 does not answer" in done.stderr) == (125, True)


def test_cancel(agent: FakeAgent) -> None:
    agent.answer("cancel", cancelled=["ws1/42"], already_ended=["ws1/41"])
    done = peerload("cancel", "--signal", "INT", "--force", "41", "42", agent=agent)
    assert done.stdout.decode() == "ws1/42  cancelled\nws1/41  had already ended\n"
    [request] = agent.asked(control.Cancel)
    assert (request.tasks, request.signal, request.force) == (("41", "42"), 2, True)
    assert json.loads(peerload("cancel", "--json", "1", agent=agent).stdout) == {
        "v": 1,
        "cancelled": ["ws1/42"],
        "already_ended": ["ws1/41"],
        "unreachable": [],
    }


def test_cancel_names_the_nodes_that_do_not_answer(agent: FakeAgent) -> None:
    silent = [{"id": f"ws1/{number}", "node": "ws\x1b2", "state": "dead"} for number in (42, 43)]
    agent.answer("cancel", cancelled=["ws1/42", "ws1/43", "ws1/44"], already_ended=[], unreachable=silent)
    done = peerload("cancel", "42", "43", "44", agent=agent)
    assert (done.returncode, done.stdout.count(b"cancelled")) == (125, 3)
    assert b"the processes of 2 tasks may run on at ws\\x1b2, which does not answer (dead)" in done.stderr
    told = peerload("cancel", "--json", "42", agent=agent)
    assert (told.returncode, json.loads(told.stdout)["unreachable"]) == (125, ["ws1/42", "ws1/43"])


def test_wait_names_each_loss_after_a_failure_too(agent: FakeAgent) -> None:
    def wait(_request: control.Wait, reply: Reply) -> None:
        reply.more(**(ENDED | {"state": "failed", "exit_code": 4}))
        reply.more(**(ENDED | {"id": "ws1/43", "missing_bytes": 7, "reason": "its disk is full"}))
        reply.more(files={"id": "ws1/44", "state": "postponed", "why": "No space left on device"})
        reply.ok(timed_out=False)

    agent.handlers["wait"] = wait
    done = peerload("wait", "42", "43", "44", agent=agent)
    assert done.returncode == 4
    assert b"ws1/43 succeeded, but part of its output is missing: its disk is full" in done.stderr
    assert b"the output of ws1/44 is not saved: No space left on device" in done.stderr


@each("words", [["ls"], ["ls", "--json"], ["--help"], ["run", "x"]])
def test_a_closed_stdout_is_an_error(agent: FakeAgent, words: list[str]) -> None:
    agent.answer("tasks", tasks=[TASK], truncated=False)
    agent.answer("submit", id="ws1/42", members=None)

    def output(_request: control.ReadOutput, reply: Reply) -> None:
        reply.more(stream=1, offset=0, data=b"x")
        reply.ok(**ENDED)

    agent.handlers["output"] = output
    line = " ".join(map(shlex.quote, map(str, command_line(*words))))
    done = subprocess.run(
        ["sh", "-c", f"{line} >&-"], env=environment(agent), stderr=subprocess.PIPE, check=False, timeout=60
    )
    assert (done.returncode, Says.STANDARD_OUTPUT_FAILED("Bad file descriptor").encode() in done.stderr) == (125, True)


def test_output_to_a_closed_pipe_is_quiet(agent: FakeAgent) -> None:
    agent.answer("tasks", tasks=[TASK] * 2000, truncated=False)
    process = subprocess.Popen(
        command_line("ls"),
        env=environment(agent),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 141


# -- up and down -----------------------------------------------------------------------------------------------------


def test_up_finds_the_one_that_runs(agent: FakeAgent) -> None:
    agent.answer("info", node="ws1", pid=1, launcher_pid=2, listen="127.0.0.1:9", cpus=4, mem_bytes=8 << 30, peers=0)
    done = peerload("up", agent=agent)
    assert done.returncode == 0
    assert b" ws1, 4 cpus, 8 GiB. " in done.stdout
    assert json.loads(peerload("up", "--json", agent=agent).stdout) == {
        "v": 1,
        "pid": 1,
        "launcher_pid": 2,
        "socket": agent.path,
        "listen": "127.0.0.1:9",
        "node": "ws1",
    }


@each(
    ("told", "says"),
    [
        ({"peers": 0, "remembered": 0}, "A cluster of one."),
        ({"peers": 0, "remembered": 0, "sought": {"h:1": ""}}, "No peer met yet."),
        ({"peers": 2, "remembered": 0}, "3 nodes known."),
        ({"peers": 0, "remembered": 1}, "2 nodes known, looking for 1 of them."),
        ({"peers": 1, "remembered": 2}, "4 nodes known, looking for 2 of them."),
    ],
)
def test_up_counts_the_members_of_earlier_starts(agent: FakeAgent, told: dict[str, Any], says: str) -> None:
    agent.answer("info", node="ws1", listen="127.0.0.1:9", cpus=4, **told)
    agent.answer("nodes", nodes=[])
    assert peerload("up", agent=agent).stdout.decode().partition("\n")[0].endswith(f" 4 cpus. {says}")


@each(
    ("told", "says"),
    [
        (
            {"listen": "127.0.0.1:9", "cluster_local": True},
            "peerload invite        another agent here:  peerload up --peer 127.0.0.1:9 …",
        ),
        (
            {"listen": "127.0.0.1:9", "cluster_local": False, "issuer": True},
            "peerload invite        other machines can reach it after:  peerload up --listen ADDRESS:PORT",
        ),
        ({"listen": "10.0.0.1:9", "cluster_local": False, "issuer": True}, "peerload invite"),
        (
            {"listen": "10.0.0.1:9", "cluster_local": False, "issuer": False},
            "peerload invite, on the machine where the cluster was made",
        ),
    ],
)
def test_up_says_how_to_add_a_node_by_the_cluster_it_is_of(agent: FakeAgent, told: dict[str, Any], says: str) -> None:
    agent.answer("info", node="ws1", peers=0, **told)
    assert f"Add a machine:  {says}\n" in peerload("up", agent=agent).stdout.decode()


def test_up_says_why_an_agent_does_not_start(tmp_path: Path) -> None:
    settings = tmp_path / "bad.toml"
    settings.write_text("no_such_key = 1\n")
    words = ["up", "--config", str(settings), "--state", str(tmp_path / "state"), "--socket", str(tmp_path / "s")]
    done = subprocess.run(
        command_line(*words),
        env=environment(XDG_RUNTIME_DIR=str(tmp_path)),
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 125
    assert b"no_such_key" in done.stderr


def test_down_waits_until_the_agent_has_gone(agent: FakeAgent) -> None:
    stand_in = subprocess.Popen(["sleep", "60"])

    def stop(request: control.Stop, reply: Reply) -> None:
        assert request.all
        reply.ok()
        stand_in.terminate()
        stand_in.wait()

    agent.answer("info", node="ws1", pid=stand_in.pid, launcher_pid=None)
    agent.handlers["stop"] = stop
    done = peerload("down", "--all", agent=agent)
    assert (done.returncode, b"ws1" in done.stdout) == (0, True)
    wait_until(lambda: stand_in.poll() is not None, what="the thread that ended it to have noticed")


@each(
    ("words", "running", "says"),
    [
        ([], 0, "no task was running"),
        ([], 1, "1 running task goes on"),
        ([], 2, "2 running tasks go on"),
        ([], None, "its running tasks go on"),
        (["--all"], 0, "no task was running"),
        (["--all"], 3, "3 running tasks were ended"),
    ],
)
def test_down_says_what_becomes_of_the_tasks(
    agent: FakeAgent, words: list[str], running: int | None, says: str
) -> None:
    agent.answer("info", node="ws1", pid=None, launcher_pid=None)
    agent.answer("settings", settings=[])
    agent.answer("stop", running=running)
    assert says in peerload("down", *words, agent=agent).stdout.decode()
    assert json.loads(peerload("down", "--json", *words, agent=agent).stdout)["running"] == running


def test_config_file_says_where_the_agent_is(tmp_path: Path) -> None:
    settings = tmp_path / "peerload.toml"
    settings.write_text("state = 7 7\n")
    done = peerload("up", "--config", str(settings))
    assert done.returncode == 125
    assert str(settings).encode() in done.stderr
    assert str(tmp_path / "none").encode() in peerload("up", "--config", str(tmp_path / "none")).stderr


STEP: dict[str, Any] = {"at": 1.0, "state": "queued", "reason": "", "attempt": 1, "node": "n3"}
OF_OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "trace": {
        "show": {
            "tasks": [
                {"id": "ESC", "name": "ESC", "state": "ESC", "home": "n3", "node": "n4", "history": [STEP]}
                | {"trace": {"trace_id": "ESC", "span_id": "ESC", "parent_id": "ESC"}, "started_at": 0, "attempt": 1}
            ]
        },
        "events": {"events": [STEP | {"what": "attempt", "state": "ESC", "node": "n4"}]},
    },
    "power": {
        "power": {
            "node": "ESC", "watts": 1.0, "quality": "ESC", "source": "ESC", "sources": [],
            "curve": {"quality": "ESC", "watts": [1.0], "threads": "ESC"},
        }
    },
    "files": {
        "files": {
            "size_bytes": 1, "limit_bytes": 1, "blocks": 1, "environments": [], "removed_bytes": 0,
            "snapshots": [{"id": "ESC", "bytes": 1, "files": 1, "used_at": 1.0, "in_use": False}],
        }
    },
}  # fmt: skip
"""Answers that come from other nodes, by verb."""


@pytest.mark.rule("T1")
@each("verb", OF_OTHERS)
def test_what_another_node_says_of_itself_reaches_no_terminal(agent: FakeAgent, verb: str) -> None:
    for name, body in OF_OTHERS[verb].items():
        agent.answer(name, **json.loads(json.dumps(body).replace("ESC", "\\u001b[2J")))
    words = (verb, "n3/1") if verb == "trace" else (verb,)
    done = peerload(*words, "--at", "n3", agent=agent)
    assert done.returncode == 0
    assert b"\\x1b[2J" in done.stdout
    assert b"\x1b" not in done.stdout


def test_trace_of_an_array_does_not_read_all_its_members(agent: FakeAgent) -> None:
    agent.handlers["show"] = lambda _, reply: reply.more(tasks=[{"id": f"n1/16.{member}"} for member in (1, 2)])
    done = peerload("trace", "16", agent=agent)
    assert done.returncode == 2
    assert b"peerload trace n1/16.1" in done.stderr


def test_completions_offer_an_array_once(agent: FakeAgent) -> None:
    some = {"members": {"spans": [[1, 700, 1]], "count": 700, "nodes": 0}, "state": "held"}
    ended = {"members": {"spans": [[701, 900, 1]], "count": 200, "nodes": 0}, "state": "done"}
    arrays = [TASK | {"id": "a.b/7.701"} | ended, TASK | {"id": "a.b/7.1"} | some]
    agent.answer("tasks", tasks=[*arrays, TASK | {"id": "a.b/8"}], truncated=False)
    done = peerload("completions", "answer", "tab", "show", "", agent=agent)
    assert [line.split()[:2] for line in done.stdout.decode().splitlines()[1:]] == [
        ["a.b/8", "done"],
        ["a.b/7", "held"],
    ]
    assert agent.asked(control.TasksRequest)[0].gathered


@each("form", ["plain", "colon", "tab"])
def test_completions_offer_nothing_that_a_shell_would_interpret(agent: FakeAgent, form: str) -> None:
    labels = ["x$(reboot)", "`reboot`", "a;b", "a b", "\x1b[2J", "n\no", "~", "*", "big-1.5"]
    agent.answer("nodes", nodes=[NODE | {"labels": labels}])
    done = peerload("completions", "answer", form, "submit", "-C", "", agent=agent)
    assert done.stdout.decode() == "big-1.5\n"
