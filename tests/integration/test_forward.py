"""Verbs on tasks of any home, typed at any node: here at n1, about tasks whose home is n2 and that run on n3."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.agent.forwarding import tunnels as forward
from peerload.client.connection import AgentConnection
from peerload.model.errors import BadRequest
from tests.integration.cluster import Agent, Cluster, ended
from tests.support import stands_still, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = 120
"""Clients that ask at the same time."""
LARGE_BYTES = 12 << 20
ANSWERED_S_MAX = 60.0
"""A home that cannot be asked is named within OPEN_S_MAX, on a machine that does not stand still itself."""


@pytest.fixture(name="agents", scope="module")
def fixture_agents() -> Iterator[list[Agent]]:
    with Cluster() as cluster:
        yield cluster.linked(3, slots=8)


def far(agent: Agent, *argv: str, **fields: Any) -> str:
    """A task of this home that runs on n3."""
    return agent.submit(*argv, placement={"node": "n3"}, **fields)


def gated(gate: Path, before: str = "", after: str = "") -> tuple[str, str, str]:
    return "sh", "-c", f"{before}until [ -e {gate} ]; do sleep 0.05; done; {after}"


def of_all(agent: Agent, *words: str) -> dict[str, Any]:
    """What a verb tells of all nodes; one that stood still for too long is missing, and asked again."""
    told: dict[str, Any] = {}

    def asked() -> bool:
        done = agent.cli(*words, "--cluster", "--json")
        told.update(json.loads(done.stdout))
        assert done.returncode == (125 if told["missing"] else 0), done.stderr
        return not told["missing"]

    wait_until(asked, what="all to answer")
    return told


def text(done: subprocess.CompletedProcess[bytes]) -> str:
    """What a verb that went well has printed."""
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


# -- each verb --------------------------------------------------------------------------------------------------------


def test_what_a_task_is_and_says(agents: list[Agent]) -> None:
    here, home, _ = agents
    task = far(home, "sh", "-c", "echo out; echo bad >&2; exit 3")
    assert here.cli("wait", task).returncode == 3
    shown = json.loads(text(here.cli("show", "--json", task)))
    assert (shown["id"], shown["home"], shown["node"], shown["state"]) == (task, "n2", "n3", "failed")
    logs = here.cli("logs", task)
    assert (logs.stdout, logs.stderr) == (b"out\n", b"bad\n")
    assert here.cli("logs", "--err", task).stdout == b""
    assert task in text(here.cli("why", task))
    told = [json.loads(line) for line in text(here.cli("events", "--json", task)).splitlines()]
    assert {event["state"] for event in told} >= {"queued", "leased"}
    assert "attempt" in {
        json.loads(line)["what"] for line in text(here.cli("events", "--json", "--at", "n3")).splitlines()
    }


def test_following_a_task_from_its_wait_to_its_end(agents: list[Agent]) -> None:
    here, home, _ = agents
    gate = home.directory / "follow"
    task = far(home, *gated(gate, "echo first; ", "echo last"), token="")
    home.call("hold", tasks=[task])
    with ended(here.spawn_cli("logs", "-f", task)) as follower:
        here.call("release", tasks=[task])
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"first\n"
        assert here.cli("logs", task).stdout == b"first\n"
        gate.touch()
        assert follower.stdout.read() == b"last\n"
        assert follower.wait(60) == 0


def test_a_task_is_fed_from_another_node(agents: list[Agent]) -> None:
    here, home, _ = agents
    spec = home.cluster.spec("cat", takes_input=True, placement={"node": "n3"})
    with here.client() as client:
        task = client.call("submit", at="n2", token="fed-from-afar", spec=spec, input_ends=False)["id"]
        lines = [b"%d\n" % number for number in range(200)]
        for line in lines:  # all on their way before the first is answered: they stay in order
            client.send("input", task=task, data=line)
        client.send("input", task=task, ends=True)
        ended_ = {task["id"] for task in client.stream("wait", tasks=[task])}
    assert ended_ == {task}
    assert task.startswith("n2/")
    assert here.cli("logs", task).stdout == b"".join(lines)


def test_a_task_is_attached_to_from_another_node(agents: list[Agent]) -> None:
    here, home, _ = agents
    gate = home.directory / "attach"
    task = far(home, *gated(gate, "trap 'echo told' INT; echo first; ", "echo bad >&2; exit 5"))
    home.await_state(task, "running")
    with ended(here.spawn_cli("attach", task)) as joined:
        assert joined.stdout is not None
        assert joined.stdout.readline() == b"first\n"
        joined.send_signal(signal.SIGINT)
        assert joined.stdout.readline() == b"told\n"
        gate.touch()
        rest = joined.communicate(timeout=60)
        assert (joined.returncode, rest) == (5, (b"", b"bad\n"))


def test_what_a_running_task_uses_is_told_everywhere(agents: list[Agent]) -> None:
    """A loop in a child, and 64 MiB in another: also seen from a third node, and from the one that runs it."""
    here, home, there = agents
    memory = "import time; x = bytearray(64 << 20); time.sleep(600)"
    task = far(home, "sh", "-c", f'{sys.executable} -S -c "{memory}" & while :; do :; done')
    home.await_state(task, "running")

    def used(agent: Agent) -> dict[str, Any]:
        found = agent.call("usage", at="n3", tasks=[task])["tasks"]
        return found[0] if found else {}

    wait_until(lambda: used(here).get("memory_bytes", 0) >= 64 << 20, 60, "its memory to be seen")
    wait_until(lambda: used(here).get("cpus_busy"), what="how busy it is to be seen")
    for agent in agents:
        live = json.loads(text(agent.cli("show", "--json", task)))["live"]
        assert live["node"] == "n3"
        assert live["processes"] == 2
        assert live["cpu_s"] > 0
    assert there.call("usage", tasks=[task], at="n3")["tasks"][0]["id"] == task
    assert home.call("usage", tasks=[task])["tasks"] == []  # it runs elsewhere
    assert json.loads(text(here.cli("cancel", "--wait", "--json", task)))["cancelled"] == [task]
    assert json.loads(text(here.cli("show", "--json", task)))["live"] is None
    assert used(here) == {}


def test_what_changes_a_task(agents: list[Agent]) -> None:
    here, home, _ = agents
    task = far(home, "sleep", "60")
    home.await_state(task, "running")
    refused = here.cli("hold", task)
    assert refused.returncode == 125
    assert here.cli("cancel", "--wait", task).returncode == 0
    assert home.show(task)["state"] == "cancelled"
    again = text(here.cli("retry", task)).strip()
    assert again.startswith("n2/")
    assert here.show(again)["retry_of"] == task
    home.await_state(again, "running")
    here.call("signal", task=again, signal=15)
    assert home.wait(again)[again]["signal"] == 15


def test_tasks_of_several_homes_at_once(agents: list[Agent]) -> None:
    gates = [agents[0].directory / f"several{n}" for n in range(3)]
    tasks = [agent.submit(*gated(gate)) for agent, gate in zip(agents, gates, strict=True)]
    with ended(agents[0].spawn_cli("wait", "--any", *tasks)) as waiting:
        gates[1].touch()
        assert waiting.wait(60) == 0
        assert waiting.stdout is not None
        assert waiting.stdout.read().split()[:2] == [tasks[1].encode(), b"done"]

    def is_told() -> bool:  # if n2 is slow to answer, the time is up before
        timed_out = agents[0].cli("wait", "--timeout", "0.3s", *tasks)
        assert timed_out.returncode == 124
        assert timed_out.stdout.split()[:1] in ([], [tasks[1].encode()])
        return bool(timed_out.stdout)

    wait_until(is_told, what="the one that has ended to be told")
    refused = agents[0].cli("show", tasks[0], tasks[1], "n3/999")
    assert b"n3/999" in refused.stderr
    refused = agents[0].cli("cancel", tasks[0], "n3/999")
    assert b"n3/999" in refused.stderr
    assert agents[0].show(tasks[0])["state"] == "cancelled"
    told = json.loads(text(agents[0].cli("cancel", "--json", "@", *tasks)))
    assert sorted(told["cancelled"]) == [tasks[2]]
    assert sorted(told["already_ended"]) == sorted([tasks[0], tasks[1]])
    ids = [json.loads(line)["id"] for line in text(agents[0].cli("show", "--json", *tasks)).splitlines()]
    assert sorted(ids) == tasks


def test_another_node_is_asked(agents: list[Agent]) -> None:
    here, other, _ = agents
    assert "peerload undrain n2" in text(here.cli("drain", "n2", "--reason", "new\x1bdisk"))
    (shown,) = [node for node in other.call("nodes")["nodes"] if node["self"]]
    assert (shown["node"], shown["drained"], shown["drain_reason"]) == ("n2", True, "new\x1bdisk")
    for _ in range(2):
        assert here.cli("undrain", "n2").returncode == 0
        assert not other.call("nodes")["nodes"][0]["drained"]
    assert text(here.cli("nodes", "--at", "n2")).splitlines()[1].split()[0] == "n2"
    assert here.call("info", at="n2")["node"] == "n2"
    before, told, after = agents[2].counters(), here.call("stats", at="n3")["counters"], agents[2].counters()
    assert before.keys() <= told.keys() <= after.keys()
    assert all(before.get(name, 0) <= count <= after[name] for name, count in told.items()), "of n3, which counts on"
    spec = here.cluster.spec("true")
    assert here.call("submit", at="n3", token="0123456789", spec=spec)["id"].startswith("n3/")
    for name in ("nobody", "n1-x"):
        done = here.cli("nodes", "--at", name)
        assert (done.returncode, name in done.stderr.decode()) == (125, True)


def test_my_own_names_stay_mine_wherever_they_are_told(agents: list[Agent]) -> None:
    here = agents[0]
    task = here.submit("sh", "-c", "echo mine", placement={"node": "n3"})
    here.wait(task)
    number = task.partition("/")[2]
    for name in ("@", number):
        lines = text(here.cli("events", "--json", "--at", "n3", name)).splitlines()
        assert (task, "running") in [(event["task"], event["state"]) for event in map(json.loads, lines)]
    refused = here.cli("show", "--at", "n2", "@")
    assert (refused.returncode, task in refused.stderr.decode()) == (125, True)


def test_the_tasks_of_all_nodes(agents: list[Agent]) -> None:
    tasks = [agent.submit("true") for agent in agents]
    for agent, task in zip(agents, tasks, strict=True):
        agent.wait(task)
    listed = of_all(agents[0], "ls", "--limit", "1000")
    assert set(tasks) <= {task["id"] for task in listed["tasks"]}
    assert listed["truncated"] is False
    submitted = [task["submitted_at"] for task in listed["tasks"]]
    assert submitted == sorted(submitted)
    on_n3 = of_all(agents[0], "ls", "--node", "n3")["tasks"]
    assert {task["node"] for task in on_n3} == {"n3"}
    assert set(tasks) <= {task["id"] for task in of_all(agents[0], "history")["tasks"]}
    assert {task["home"] for task in json.loads(text(agents[0].cli("ls", "--at", "n2", "--json")))["tasks"]} == {"n2"}


def test_a_trace_of_all_nodes(agents: list[Agent]) -> None:
    tasks = [agent.submit("true") for agent in agents]
    for agent, task in zip(agents, tasks, strict=True):
        agent.wait(task)
    rows = agents[0].cli("history", "--cluster", "--export", "-").stdout.decode().splitlines()
    assert {task.partition("/")[0] for task in tasks} <= {row.rpartition(",")[2] for row in rows[1:]}
    arrivals = [float(row.partition(",")[0]) for row in rows[1:]]
    assert arrivals == sorted(arrivals)


def test_an_array_of_another_home(agents: list[Agent]) -> None:
    here, home, _ = agents
    array = far(home, "sh", "-c", "echo $PEERLOAD_ARRAY_INDEX", array=[(1, 300, 1)])
    assert (
        len(json.loads(text(here.cli("cancel", "--json", array)))["cancelled"])
        + len([1 for state in home.states().values() if state == "done"])
        >= 300
    )
    shown = here.call("show", tasks=[array])["tasks"]
    assert len(shown) == 300
    assert {task["id"] for task in shown} == {f"{array}.{n}" for n in range(1, 301)}


# -- much, and slowly --------------------------------------------------------------------------------------------------


def test_many_clients_at_once(agents: list[Agent]) -> None:
    here, home, _ = agents
    gate = home.directory / "many"
    tasks = [far(home, *gated(gate)) for _ in range(4)]
    found: list[str] = []

    def wait_for(task: str) -> None:
        with AgentConnection(here.socket, timeout_s=60) as client:
            found.extend(part["id"] for part in client.stream("wait", tasks=[task]))

    threads = [threading.Thread(target=wait_for, args=(tasks[n % 4],)) for n in range(MANY)]
    for thread in threads:
        thread.start()
    with here.client() as client:  # one connection, many requests under way on it
        numbers = {client.send("show", tasks=[tasks[n % 4]]) for n in range(MANY)}
        while numbers:
            number, kind, _ = client.receive()
            assert kind == "ok"
            numbers.discard(number)
    gate.touch()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(tasks * (MANY // 4))


def test_a_large_output_comes_whole_and_a_slow_reader_is_waited_for(agents: list[Agent]) -> None:
    here, home, _ = agents
    task = far(home, "sh", "-c", f"head -c {LARGE_BYTES} /dev/zero | tr '\\0' x; echo; echo end")
    home.wait(task)
    assert len(here.cli("logs", task).stdout) == LARGE_BYTES + 5
    assert here.cli("logs", "--tail", "1", task).stdout == b"end\n"
    with ended(here.spawn_cli("logs", task)) as slow:
        wait_until(lambda: stands_still(slow.pid) or _waits(slow.pid), what="the reader's pipe to be full")
        assert here.cli("show", task).returncode == 0  # nobody else waits for it
        assert slow.stdout is not None
        assert len(slow.stdout.read()) == LARGE_BYTES + 5
        assert slow.wait(60) == 0


def test_a_terminal_is_given_nothing_that_could_harm_it(agents: list[Agent]) -> None:
    here, home, _ = agents
    hostile = r"\033]0;owned\007a\tb\r\n\033[31mred\033[0m \342\200\256exe.\033[2J\n\377"
    task = far(home, "sh", "-c", f"printf '{hostile}'; printf '\\033[1mbad\\n' >&2")
    home.wait(task)
    raw = b"\x1b]0;owned\x07a\tb\r\n\x1b[31mred\x1b[0m \xe2\x80\xaeexe.\x1b[2J\n\xff"
    piped = here.cli("logs", task)
    assert (piped.stdout, piped.stderr) == (raw, b"\x1b[1mbad\n")
    shown = _on_a_terminal(here, "logs", task)
    assert "\\x1b]0;owned\\x07a\tb\n\\x1b[31mred\\x1b[0m \\u202eexe.\\x1b[2J\n\\xff" in shown
    assert "\\x1b[1mbad\n" in shown
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    assert "\x1b[31mred\x1b[0m" in _on_a_terminal(here, "logs", "--raw", task)


def _on_a_terminal(agent: Agent, *words: str) -> str:
    """What a verb writes to a terminal that passes everything on as it is."""
    leader, follower = os.openpty()
    try:
        settings = termios.tcgetattr(follower)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(follower, termios.TCSANOW, settings)
        with ended(agent.spawn_cli(*words, stdout=follower, stderr=follower)) as process:
            os.close(follower)
            follower = -1
            written = b""
            while True:
                try:
                    written += os.read(leader, 1 << 16)
                except OSError:  # nobody has the other end any more
                    break
            assert process.wait(60) == 0
        return written.decode("utf-8", "surrogateescape")
    finally:
        os.close(leader)
        if follower >= 0:
            os.close(follower)


def test_what_the_capture_limit_has_cut_out_is_named(agents: list[Agent]) -> None:
    here, home, _ = agents
    task = far(home, "sh", "-c", "seq 3000000")  # some 22 MB, of which 16 MiB are kept
    home.wait(task)
    told = here.cli("logs", task)
    assert told.stderr
    assert told.stdout.startswith(b"1\n2\n3\n")
    assert told.stdout.endswith(b"\n2999999\n3000000\n")
    assert (15 << 20) < len(told.stdout) <= (16 << 20) + 8192  # the cut is at whole pages
    assert told.stdout.count(b"\0") == 0
    tail = here.cli("logs", "--tail", "2", task)
    assert (tail.stdout, tail.stderr) == (b"2999999\n3000000\n", b"")


def _waits(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0] == "S"


def test_a_client_that_hangs_up_leaves_nothing_behind(agents: list[Agent]) -> None:
    here, home, _ = agents
    task = home.submit("sh", "-c", "echo here; sleep 60", placement={"node": "n2"})
    home.await_state(task, "running")
    before = _sockets(home)
    with contextlib.ExitStack() as followers:
        for _ in range(5):
            follower = followers.enter_context(ended(here.spawn_cli("logs", "-f", task)))
            assert follower.stdout is not None
            assert follower.stdout.readline() == b"here\n"
        made = _sockets(home) - before
        assert len(made) >= 5
    wait_until(lambda: len(made & _sockets(home)) <= len(made) - 5, what="them to be gone")
    home.call("cancel", tasks=[task])


def _sockets(agent: Agent) -> set[str]:
    """Each by its inode: links between the nodes come and go, too."""
    found = set()
    for entry in Path(f"/proc/{agent.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(entry.readlink()))
    return {place for place in found if place.startswith("socket:")}


def test_a_request_that_nobody_waits_for_any_more_ends_there(agents: list[Agent]) -> None:
    here, home, _ = agents
    gates = [home.directory / f"stop{n}" for n in range(2)]
    own, other = here.submit(*gated(gates[0])), home.submit(*gated(gates[1]))
    gates[0].touch()
    home.await_state(other, "running")
    with here.client() as client:
        for _ in range(3):  # the part of n2 is stopped each time, or 1024 of them would be too many
            assert [part["id"] for part in client.stream("wait", tasks=[own, other], any=True)] == [own]
        assert client.call("show", tasks=[other])["tasks"][0]["state"] == "running"
    gates[1].touch()
    home.wait(other)


def test_too_large_a_request_is_refused_in_words(agents: list[Agent]) -> None:
    spec = agents[0].cluster.spec("true", b"x" * (1 << 20))
    with agents[0].client() as client, pytest.raises(BadRequest):
        client.call("submit", at="n2", token="0123456789", spec=spec, each=[[b"y" * (1 << 20)]] * 3)


# -- homes that are away -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_home_that_is_killed_is_named() -> None:
    with Cluster() as cluster:
        here, home, runs = cluster.linked(3)
        task = far(home, "sh", "-c", "echo so far; sleep 60")
        home.await_state(task, "running")
        own = here.submit("sleep", "60")
        following = here.spawn_cli("logs", "-f", task)
        with ended(following), ended(here.spawn_cli("wait", own, task)) as waiting:
            assert following.stdout is not None
            assert following.stdout.readline() == b"so far\n"
            wait_until(lambda: here.counters().get("peer_links_opened_total", 0) > 0)
            home.kill()
            for process in (following, waiting):
                assert process.wait(ANSWERED_S_MAX) == 125
                assert process.stderr is not None
                assert Says.HOME_AWAY(f"peerload: {task}", "n2") in process.stderr.read().decode()
        refused = here.cli("cancel", own, task, timeout_s=ANSWERED_S_MAX)
        assert refused.returncode == 125
        assert Says.HOME_AWAY(task, "n2") in refused.stderr.decode()
        assert here.show(own)["state"] == "running"  # nothing was changed
        # Who runs it can tell of it.
        told = runs.cli("logs", task)
        assert told.stdout == b"so far\n"
        assert Says.HOME_AWAY(task, "n2") in told.stderr.decode()
        shown = json.loads(text(runs.cli("show", "--json", task)))
        assert (shown["state"], shown["node"]) == ("running", "n3")
        assert "n2" in shown["reason"]
        assert here.cli("logs", "--at", "n3", task).stdout == b"so far\n"
        with ended(runs.spawn_cli("attach", task, stdin=subprocess.PIPE)) as attached:
            assert attached.stdout is not None
            assert attached.stderr is not None
            assert attached.stdout.readline() == b"so far\n"
            assert Says.HOME_AWAY(task, "n2").encode() in attached.stderr.readline()
            attached.kill()
        with runs.client() as client:
            follows = client.stream("output", task=task, follow=True, tells_start=True)
            frames = [next(follows) for _ in range(3)]
            assert frames[0]["away"]["home"] == "n2"
            assert frames[1]["running"] == {"node": "n3", "attempt": 1}
            assert frames[2]["data"] == b"so far\n"
        with runs.client() as client:
            assert [piece["data"] for piece in client.stream("output", task=task, tail_bytes=4) if "data" in piece] == [
                b"far\n"
            ]
        steps = [json.loads(line) for line in text(runs.cli("events", "--json", task)).splitlines()]
        assert ("attempt", "running", 1) in [(step["what"], step["state"], step["attempt"]) for step in steps]
        wait_until(lambda: _standing(here, "n2") == "dead", 40, "n2 to be called dead")
        done = here.cli("ls", "--cluster", "--json")
        listed = json.loads(done.stdout)
        assert done.returncode == 125
        assert ("n2", "dead") in [(node["node"], node["state"]) for node in listed["missing"]]
        assert " n2: " in here.cli("ls", "--cluster").stderr.decode()
        assert "(dead)" in here.cli("show", task).stderr.decode()
        home.start()
        home.call("cancel", tasks=[task])


def _standing(agent: Agent, node: str) -> str:
    """What it believes of a node."""
    (state,) = [known["state"] for known in agent.call("nodes")["nodes"] if known["node"] == node]
    return str(state)


@pytest.mark.long
def test_an_output_is_there_when_the_node_that_ran_it_has_gone() -> None:
    with Cluster() as cluster:
        here, home, runs = cluster.linked(3)
        task = far(home, "sh", "-c", "echo out; head -c 200000 /dev/zero; echo bad >&2")
        home.wait(task)
        runs.call("stop", all=True)
        runs.reap()
        told = here.cli("logs", task)
        assert (len(told.stdout), told.stderr) == (200_004, b"bad\n")


@pytest.mark.long
def test_a_home_that_stands_still_is_named() -> None:
    assert max(forward.OPEN_S_MAX, forward.SILENT_S_MAX) <= 5.0, "it is not waited for any longer"
    with Cluster() as cluster:
        here, home = cluster.linked(2)
        task = home.submit("sleep", "60")
        home.await_state(task, "running")
        with ended(here.spawn_cli("logs", "-f", task)) as following:
            wait_until(lambda: here.cli("show", task).returncode == 0)
            home.pause()
            try:
                refused = here.cli("show", task, timeout_s=ANSWERED_S_MAX)
                assert refused.returncode == 125
                assert Says.HOME_AWAY(task, "n2") in refused.stderr.decode()
                listed = here.cli("ls", "--cluster", timeout_s=ANSWERED_S_MAX)
                assert " n2: " in listed.stderr.decode()
                assert following.wait(60) == 125  # as soon as the node counts as dead
            finally:
                home.resume()
        home.call("cancel", tasks=[task])
