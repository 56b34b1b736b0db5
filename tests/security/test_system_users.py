"""Tasks of all users of a machine run as their users and as nobody else (rules X1, X4, X5, X6, X7, F3; S4, S5, S6)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import psutil
import pytest

from tests.integration.cluster import ended, is_alive, program
from tests.integration.test_two_machines import CLAIMS, listening
from tests.security.service import PEERLOAD, PROJECT, ServiceAgent, ServiceCluster, guests, lines
from tests.security.users import ACCOUNTS, GROUP, User, needs_root
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_root


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[ServiceCluster, ServiceAgent, ServiceAgent]]:
    """ws1, where tasks are submitted, and ws2, which runs those of others as guests."""
    with ServiceCluster() as cluster:
        first = cluster.node("ws1").start()
        second = cluster.node("ws2", "--peer", first.listen).start()
        cluster.await_acquainted([first, second])
        yield cluster, first, second


ACCEPTS = 1 << 16
"""Of the flags in /proc/net/unix: somebody listens (__SO_ACCEPTCON)."""
SIMPLE = {"argv": [b"true"], "directory": b"/usr"}
Nodes = tuple[ServiceCluster, ServiceAgent, ServiceAgent]


@pytest.mark.rule("X6", "S4", "S6")
def test_a_task_runs_as_who_submitted_it_and_with_no_more(nodes: Nodes) -> None:
    """All four ids, the groups of the account, no capabilities, none to be had; agent and launcher are two users."""
    cluster, first, _ = nodes
    for user in ("alice", "bob"):
        told = cluster.run(first, user, "cat /proc/self/status; ls /proc/self/fd >&2")
        status = lines(told["out"])
        uid = ACCOUNTS[user]
        assert told["exit_code"] == 0, told
        assert status["Uid"] == status["Gid"] == " ".join([str(uid)] * 4)
        assert {int(group) for group in status["Groups"].split()} == {uid, 20200, PROJECT}
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        assert told["err"].split() == ["0", "1", "2", "3"]


def unix_sockets(pid: int) -> list[str]:
    """Where this process takes connections of its machine, but for its claim of a database; "" for a socket without a name,
    @… for an abstract one."""
    held = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    rows = [line.split(None, 7) for line in Path(f"/proc/{pid}/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    found = ["".join(words[7:]) for words in rows if f"socket:[{words[6]}]" in held and int(words[3], 16) & ACCEPTS]
    return [name for name in found if not name.startswith(CLAIMS)]


@pytest.mark.rule("S2", "L1", "X6")
def test_agent_and_launcher_listen_at_a_socket_each_and_one_address_alone(nodes: Nodes) -> None:
    """The agent, as its user, at the group's socket, and at its address by TCP and UDP. The launcher, as root, at a socket
    that is for the agent's user. Their children nowhere."""
    _, *agents = nodes
    for agent in agents:
        host, _, port = agent.listen.rpartition(":")
        pid, launcher = agent.pid, agent.launcher_pid
        assert (*psutil.Process(pid).uids(), *psutil.Process(launcher).uids()) == (PEERLOAD,) * 3 + (0,) * 3
        assert host == "127.0.0.1"
        assert listening(pid)[0] == {("tcp", host, int(port)), ("udp", host, int(port))}
        assert listening(launcher)[0] == set(), "nothing reaches root over a network"
        [own], [launchers] = unix_sockets(pid), unix_sockets(launcher)
        assert (own, launchers) == (agent.socket, "launcher.sock"), "the latter named from its working directory"
        places = [Path(own), Path(agent.sockets, launchers), Path(agent.sockets)]
        found = [(told.st_uid, told.st_gid, oct(told.st_mode)[-3:]) for told in (place.stat() for place in places)]
        assert found == [(PEERLOAD, GROUP, "660"), (PEERLOAD, 0, "600"), (0, 0, "755")]
        for process in (psutil.Process(pid), psutil.Process(launcher)):
            for child in process.children(recursive=True):
                assert child.pid == launcher or (listening(child.pid)[0], unix_sockets(child.pid)) == (set(), [])


@pytest.mark.rule("X7")
def test_nothing_of_agent_and_launcher_is_open_in_a_task(nodes: Nodes) -> None:
    """Of one's own and of a guest's there are its input and the two files of its output; no socket, no directory."""
    cluster, first, second = nodes
    for agent in (first, second):
        told = cluster.run(
            first, "alice", "readlink /proc/$$/fd/*; exit 0", placement={"node": agent.node}, directory=b"-"
        )
        given, *files = told["out"].splitlines()
        assert given == "/dev/null"
        assert {str(Path(file).parent) for file in files} == {f"{agent.state}/spool"}
        assert [Path(file).suffix for file in files] == [".out", ".err"], told["out"]


@pytest.mark.rule("X7")
def test_its_output_can_be_written_through_its_descriptors_and_not_read(nodes: Nodes) -> None:
    """``/dev/stderr`` works as ever; the file is the agent's."""
    cluster, first, _ = nodes
    told = cluster.run(first, "alice", "echo one > /dev/stderr; cat /proc/self/fd/2; chmod 777 /proc/self/fd/2; tty")
    assert told["err"].startswith("one\n")
    assert "Permission denied" in told["err"]
    assert "Operation not permitted" in told["err"]
    assert told["out"] == "not a tty\n"


@pytest.mark.rule("S5")
def test_a_directory_is_looked_at_as_its_user(nodes: Nodes) -> None:
    """A home that nobody else may enter, the agent neither, is a fine working directory for whose it is, and none for others."""
    cluster, first, _ = nodes
    home = str(cluster.home("alice")).encode()
    assert cluster.run(first, "alice", "pwd", directory=home)["out"] == f"{home.decode()}\n"
    what = cluster.user(first, "bob").refused(
        "submit",
        token="it is not his",
        spec={"argv": [b"true"], "directory": home, "placement": {"local": True}},
        terms={},
    )
    assert "directory" in " ".join(what)


@pytest.mark.rule("F3", "S5")
def test_result_files_are_written_as_the_user_and_no_link_is_followed(nodes: Nodes) -> None:
    """Into a home, with its user's ids; a name where another has put a link is refused, and what it points to stays."""
    cluster, first, _ = nodes
    home = cluster.home("alice")
    told = cluster.run(first, "alice", "echo result", terms={"output_file": bytes(home / "out-%j")})
    file = home / f"out-{told['id'].rpartition('/')[2]}"
    wait_until(lambda: file.exists() and file.read_text(), 60.0, "the file")
    assert (file.read_text(), file.stat().st_uid, file.stat().st_mode & 0o777) == ("result\n", ACCOUNTS["alice"], 0o644)
    grows = home / "grows"
    waits = f"echo begun; until grep -q begun {grows}; do sleep 0.05; done; echo ended"
    cluster.run(first, "alice", waits, terms={"output_file": bytes(grows)})
    wait_until(lambda: grows.read_text() == "begun\nended\n", 60.0, "the end of what grew while the task ran")
    assert grows.stat().st_uid == ACCOUNTS["alice"]
    victim = cluster.directory / "victim"
    victim.write_text("mine")
    (home / "link").symlink_to(victim)
    spec = {"argv": [b"true"], "directory": b"/"}
    for pattern, says in (
        (home / "link", "it is a link"),
        (cluster.home("bob") / "x", "Permission denied"),
        (cluster.directory / "x", "may not write"),
    ):
        refused = cluster.user(first, "alice").refused(
            "submit", token=f"no-{pattern}", spec=spec, terms={"output_file": bytes(pattern)}
        )
        assert says in " ".join(refused), refused
    assert victim.read_text() == "mine"


def test_a_notice_is_run_as_the_user(nodes: Nodes) -> None:
    """What --notify names is a command of the submitter's."""
    cluster, first, _ = nodes
    said = cluster.home("bob") / "said"
    cluster.run(first, "bob", "true", terms={"notify": f"id -u > {said}".encode()})
    wait_until(lambda: said.exists() and said.read_text(), 60.0, "the notice")
    assert said.read_text() == f"{ACCOUNTS['bob']}\n"


@pytest.mark.rule("X6")
def test_many_errands_at_once_do_not_end_the_launcher() -> None:
    """That a child of it has ended is told to the launcher in two ways; while it is busy, both at once."""
    with ServiceCluster() as cluster:
        agent = cluster.node("ws1")
        agent.launcher_more = ("--units", "bare")
        agent.start()
        told_apart = {"alice": str(cluster.home("bob")).encode(), "bob": str(cluster.home("alice")).encode()}

        def ask_many(name: str, number: int) -> set[str]:
            spec = {"argv": [b"true"], "directory": told_apart[name], "placement": {"local": True}}
            user = User(agent.socket, ACCOUNTS[name])
            try:
                asked = [user.refused("submit", token=f"{number} asks {n}", spec=spec, terms={}) for n in range(100)]
                return {" ".join(what) for what in asked}
            finally:
                user.close()

        launcher = cluster.user(agent, "bob").call("info")["launcher_pid"]
        with ThreadPoolExecutor(6) as pool:
            told = list(pool.map(ask_many, ("alice", "bob") * 3, range(6)))
        assert all("directory" in what for answers in told for what in answers), told
        assert cluster.user(agent, "bob").call("info")["launcher_pid"] == launcher


@pytest.mark.rule("X5")
def test_a_guest_has_a_uid_of_its_own_and_is_told_only_what_was_named(nodes: Nodes) -> None:
    """On another node: no account, no home, a clean environment, temporary files of its own."""
    cluster, first, _ = nodes
    script = 'id -u; id -G; env; pwd; touch "$TMPDIR/x" && echo writable'
    told = cluster.run(
        first,
        "alice",
        script,
        placement={"node": "ws2"},
        directory=b"-",
        variables={b"SECRET_OF_ALICE": b"1", b"WANTED": b"yes", b"LD_PRELOAD": b"/nonexistent.so"},
        named=[b"WANTED"],
    )
    uid, groups, *rest = told["out"].splitlines()
    assert told["node"] == "ws2"
    assert guests([int(uid)])
    assert groups == uid
    assert {"WANTED=yes", "HOME=/tmp", "TMPDIR=/tmp", "PEERLOAD_HOME=ws1", "writable", "/tmp/scratch"} <= set(rest)
    assert not [line for line in rest if "ALICE" in line or "LD_PRELOAD" in line or "CLUSTER" in line]


@pytest.mark.rule("X1")
def test_no_two_guests_at_a_time_have_one_uid(nodes: Nodes) -> None:
    """Four at once are four users: each stays until it is cancelled, when all have said who they are."""
    cluster, first, _ = nodes
    alice = cluster.user(first, "alice")
    tasks = [
        cluster.submit(first, "alice", "id -u; exec sleep 600", placement={"node": "ws2"}, directory=b"-")
        for _ in range(4)
    ]

    def said(task: str) -> bytes:
        return b"".join(piece["data"] for piece in alice.stream("output", task=task))

    wait_until(lambda: all(said(task).endswith(b"\n") for task in tasks), 60.0, "all four to run")
    uids = [int(said(task)) for task in tasks]
    alice.call("cancel", tasks=tasks)
    for task in tasks:
        cluster.ended(first, "alice", task)
    assert len(set(uids)) == len(uids)
    assert guests(uids)


def test_tasks_of_users_can_be_cancelled_fed_and_given_a_terminal(nodes: Nodes) -> None:
    """What works for one user's own agent works for all users of a machine."""
    cluster, first, _ = nodes
    task = cluster.submit(first, "alice", "setsid sleep 300 & sleep 300")
    alice = cluster.user(first, "alice")
    wait_until(lambda: alice.call("show", tasks=[task])["tasks"][0]["state"] == "running", 60.0, "it to run")
    alice.call("cancel", tasks=[task])
    assert cluster.ended(first, "alice", task)["state"] == "cancelled"
    assert cluster.run(first, "bob", "tty; stty size", terminal={"rows": 33, "columns": 77})["out"].split()[1:] == [
        "33",
        "77",
    ]
    assert cluster.user(first, "bob").refused("cancel", tasks=[task])[0] == "no-such-task"
    scratch = cluster.run(first, "bob", "pwd; touch x; id -u", directory=b"-")["out"].split()
    assert scratch[1] == str(ACCOUNTS["bob"])


def test_a_task_reads_what_its_user_sends(nodes: Nodes) -> None:
    """By a file of the agent's, which the launcher opens as the agent."""
    cluster, first, _ = nodes
    spec = {"argv": [b"/bin/cat"], "directory": b"/", "takes_input": True}
    fields = {"token": "reads-what-is-sent", "spec": spec, "terms": {}, "input": b"to be read", "input_ends": True}
    task = cluster.user(first, "alice").call("submit", **fields)["id"]
    assert cluster.ended(first, "alice", task)["out"] == "to be read"


@pytest.mark.rule("X6", "L2")
def test_a_command_inside_of_a_task_has_a_terminal_and_its_user(nodes: Nodes) -> None:
    cluster, first, _ = nodes
    task = cluster.submit(first, "alice", "cd /usr; exec sleep 300")
    alice = cluster.user(first, "alice")
    wait_until(lambda: alice.call("show", tasks=[task])["tasks"][0]["state"] == "running", 60.0, "it to run")
    argv = [b"/bin/sh", b"-c", b"id -u; pwd; stty size; echo $TERM"]
    environment = msgpack.packb({b"TERM": b"vt100"})
    told: list[str] = []

    def is_in_its_directory() -> bool:
        asked = {"task": task, "argv": argv, "environment": environment, "terminal": {"rows": 33, "columns": 77}}
        told[:] = b"".join(piece["data"] for piece in alice.stream("exec", **asked)).decode().split()
        return "/usr" in told

    wait_until(is_in_its_directory, 60.0, "its shell to have gone there")
    assert told == [str(ACCOUNTS["alice"]), "/usr", "33", "77", "vt100"]
    assert cluster.user(first, "bob").refused("exec", task=task, argv=argv)[0] == "no-such-task"
    for verb, more in (("signal", {"signal": 9}), ("input", {}), ("resize", {"rows": 1, "columns": 1})):
        assert alice.refused(verb, task=task, command="exec-0", **more)[1] == "no such command"
    alice.call("cancel", tasks=[task])
    cluster.ended(first, "alice", task)


@pytest.mark.rule("L1", "S6")
def test_a_user_whose_name_is_a_number_is_that_user(nodes: Nodes) -> None:
    """Names are names: 1234567 has the uid 20077."""
    cluster, first, _ = nodes
    assert cluster.run(first, "20077", "id -u")["out"] == "20077\n"


@pytest.mark.long
@pytest.mark.rule("X6")
def test_doctor_looks_at_a_service_for_all_users(nodes: Nodes) -> None:
    """As root, where the accounts are the machine's: all holds but what its unit would add."""
    cluster, first, _ = nodes
    task = cluster.submit(first, "alice", "sleep 300")
    alice = cluster.user(first, "alice")
    wait_until(lambda: alice.call("show", tasks=[task])["tasks"][0]["state"] == "running", 60.0, "it to run")
    pid = alice.call("info")["pid"]
    done = subprocess.run(
        ["nsenter", "--mount", "--target", str(pid), *program(), "doctor", "--security", "--json"],
        env={**cluster.environment, "PEERLOAD_SOCKET": first.socket},
        capture_output=True,
        cwd="/",
        check=False,
    )
    alice.call("cancel", tasks=[task])
    told = json.loads(done.stdout)
    found = {check["name"]: check for check in told["checks"]}
    assert told["mode"] == "system"
    assert [name for name, check in found.items() if check["result"] == "fail"] == ["hardening"], found
    assert "by its unit" in found["hardening"]["fix"]
    looked_at = ("agent", "state", "cluster", "settings", "socket", "certificate", "users")
    assert {found[name]["result"] for name in looked_at} == {"ok"}, found


@pytest.mark.long
@pytest.mark.rule("X1", "X2")
def test_the_map_and_what_it_may_not_name() -> None:
    """The same name where that is the policy, the account of a map where there is one; root and the system's never; everybody else is
    told why not, and the task waits."""
    with ServiceCluster() as cluster:
        first = cluster.node("ws1").start()
        peers = ("--peer", first.listen)
        same = cluster.node("same", *peers, settings='users = "same-name"\n').start()
        users = '{ "ws1:alice" = "bob", "ws1:bob" = "service" }'
        mapped = cluster.node("mapped", *peers, settings=f"users = {users}\n").start()
        closed = cluster.node("closed", *peers, settings="accept_foreign = false\n").start()
        cluster.await_acquainted([first, same, mapped, closed])
        for node, uid in (("same", ACCOUNTS["alice"]), ("mapped", ACCOUNTS["bob"])):
            told = cluster.run(first, "alice", "id -u; id -G", placement={"node": node}, directory=b"-")
            assert told["out"].split()[0] == str(uid)
            assert str(PROJECT) in told["out"].split()
            assert told["node"] == node
        for user, node, says in (
            ("bob", "mapped", "account of the system"),
            ("alice", "closed", "no tasks of other"),
            ("carol", "same", "an administrator here"),
        ):
            task = cluster.submit(first, user, "id", placement={"node": node}, directory=b"-")
            asker = cluster.user(first, user)
            wait_until(
                lambda asker=asker, task=task: "policy" in repr(asker.call("why", task=task)),  # type: ignore[misc]
                60.0,
                f"{says}: {asker.call('why', task=task)}",
            )
            asker.call("cancel", tasks=[task])


def test_an_agent_waits_for_its_launcher_and_goes_on_with_the_next_one(nodes: Nodes) -> None:
    """A launcher that is killed takes its tasks with it; its service starts another, which the agent finds by itself."""
    cluster, first, _ = nodes
    before = first.launcher_pid
    task = cluster.submit(first, "alice", 'echo $PEERLOAD_ATTEMPT; test "$PEERLOAD_ATTEMPT" != 1 || exec sleep 600')
    alice = cluster.user(first, "alice")
    wait_until(lambda: alice.call("show", tasks=[task])["tasks"][0]["state"] == "running", 60.0, "it to run")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_alive(before), 60.0, "the launcher to be gone")
    refused = cluster.user(first, "bob").refused("submit", token="while it is away", spec=SIMPLE, terms={})
    assert "launcher" in " ".join(refused)
    log = (cluster.directory / "second.log").open("ab")
    enter = ("nsenter", "-t", str(first.pid), "-m", *first.launcher_words())
    with log, ended(subprocess.Popen(enter, stderr=log, env=cluster.environment)):
        told = cluster.ended(first, "alice", task)
        assert told["out"].split() == ["2"]
        assert first.launcher_pid != before
