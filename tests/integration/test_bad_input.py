"""Whatever is said to an agent, it says what is wrong and why, lives on, and loses no acknowledged task."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, BadRequest
from peerload.model.messages import Hello, Ping
from tests.integration import forks
from tests.integration.cluster import Agent, Cluster, is_alive, processes_with, program
from tests.integration.fake_peer import FakePeer
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

GARBAGE_BYTES = 10 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=2)


@pytest.fixture
def agent(shared: Agent) -> Iterator[Agent]:
    """An agent that holds a task; after the test it must be the same process, and the task must still be there."""
    kept = shared.submit("true")
    pid = shared.call("info")["pid"]
    yield shared
    assert shared.call("info")["pid"] == pid == shared.pid
    assert shared.wait(kept)[kept]["state"] == "done"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


def refused(done: subprocess.CompletedProcess[bytes], code: int, *words: str) -> None:
    """It ended with this code, and its one line and its hint have these words."""
    text = done.stderr.decode()
    assert done.returncode == code, text
    assert "Traceback" not in text
    assert text.startswith("peerload: "), text
    for word in words:
        assert word in text, text


def start_and_fail(agent: Agent) -> subprocess.CompletedProcess[bytes]:
    """Start an agent that cannot start: it ends before it has a launcher."""
    log = agent.state / "launcher" / "launcher.log"  # a launcher's first word
    had_launcher = log.exists()
    done = forks.run(agent.words(), program(), 60.0, env=agent.cluster.environment, stdin=subprocess.DEVNULL, cwd="/")
    assert log.exists() == had_launcher
    return done


# -- the command line --------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_read(agent: Agent, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a file")
    done_here = agent.cli("run", "-t", "5s", "--local", "-d", str(text), "true", timeout_s=60)
    assert done_here.returncode != 0
    assert str(text).encode() in done_here.stderr


def test_arguments_up_to_the_limit_travel(agent: Agent) -> None:
    words = ["x" * 100_000] * 10
    task = agent.submit("sh", "-c", 'printf %s "$@" | wc -c', "sh", *words)
    assert agent.wait(task)[task]["exit_code"] == 0
    assert agent.output(task)[0].strip() == b"1000000"


@pytest.mark.rule("L3")
def test_arguments_over_the_limit_are_refused(agent: Agent) -> None:
    refused(agent.cli("run", "true", *["x" * 100_000] * 11), 125, "1 MiB")
    with pytest.raises(BadRequest, match="at most"):
        agent.submit("true", *["x" * 100_000] * 11)
    with pytest.raises(BadRequest):
        agent.submit("true", *["x"] * 40_000)


def test_one_argument_that_the_kernel_does_not_take(agent: Agent) -> None:
    task = agent.submit("true", "x" * 200_000)
    ended = agent.wait(task)[task]
    assert ended["exit_code"] == 126
    assert ended["reason"]


# -- the control socket ------------------------------------------------------------------------------------------------


def raw_client(agent: Agent) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect(agent.socket)
    return sock


def say(sock: socket.socket, data: bytes) -> bytes:
    """Send all of it, or as much as is taken, and read what comes until the other end closes."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    heard = b""
    with contextlib.suppress(OSError):
        while data := sock.recv(1 << 16):
            heard += data
    return heard


def framed(body: object) -> bytes:
    raw: bytes = body if isinstance(body, bytes) else msgpack.packb(body)
    return len(raw).to_bytes(4, "big") + raw


@pytest.mark.bad_input("garbage")
def test_garbage_on_the_control_socket(agent: Agent) -> None:
    with raw_client(agent) as sock:
        say(sock, random.Random(1).randbytes(GARBAGE_BYTES))
    with raw_client(agent) as sock:
        say(sock, b"\0\0\0\x20" * (GARBAGE_BYTES // 4))
    with raw_client(agent) as sock:
        say(sock, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")


@pytest.mark.rule("L3")
def test_a_frame_that_claims_4_gib(agent: Agent) -> None:
    with raw_client(agent) as sock:
        assert b"frame-too-large" in say(sock, b"\xff\xff\xff\xff" + b"x" * 1000)


def spool_bytes(agent: Agent) -> int:
    return sum(path.stat().st_size for path in (agent.state / "spool").iterdir())


NO_REQUESTS: list[dict[str, Any]] = [
    {"id": 7, "verb": "no-such-verb"},
    {"id": 7},
    {"id": 7, "verb": "submit"},
    {"id": 7, "verb": "submit", "token": "x" * 16, "spec": {"argv": [], "directory": b"/"}},
    {"id": 7, "verb": "wait", "tasks": []},
    {"id": 7, "verb": "show", "tasks": ["x" * 100]},
    {"id": 7, "verb": "cancel", "tasks": ["1"], "signal": 99},
    {"id": 7, "verb": "info", "unheard": 1},
    {"id": 7, "verb": "wait", "tasks": ["1"], "timeout_s": float("nan")},
    {"id": 7, "verb": "tasks", "ended_within_s": float("inf")},
]


def test_a_request_that_is_none_is_answered(agent: Agent) -> None:
    for body in NO_REQUESTS:
        with raw_client(agent) as sock:
            sock.sendall(framed(body) + framed({"id": 8, "verb": "info"}))
            heard = b""  # each is answered when it can be, as long as its client is there
            while not (b"bad-request" in heard and b"launcher_pid" in heard) and (data := sock.recv(1 << 16)):
                heard += data
        assert b"bad-request" in heard, body
        assert b"launcher_pid" in heard, "the next request is answered all the same"


WRONG_SPECS: list[dict[str, Any]] = [
    {"argv": [b"a\0b"]},
    {"argv": [b""]},
    {"directory": b"relative"},
    {"directory": b"/tmp\0"},
    {"environment": b"no map at all"},
    {"environment": b"\xc1"},
    {"environment": msgpack.packb({b"A": 1})},
    {"environment": msgpack.packb({"text": "text"})},
    {"environment": msgpack.packb({b"A=B": b"c"})},
    {"environment": msgpack.packb({b"": b"c"})},
    {"environment": msgpack.packb({b"A": b"b\0c"})},
    {"environment": msgpack.packb([1])},
    {"umask": 0o7777},
    {"time_limit_s": -1.0},
    {"request": {"cpus": 0.0}},
    {"request": {"cpus": float("nan")}},
    {"name": "x" * 1000},
    {"placement": {"node": "No Such Name!"}},
]


@pytest.mark.rule("L3")
def test_a_spec_with_something_wrong_in_it(agent: Agent) -> None:
    """Refused, or ended with a reason; what must not be is an agent or a launcher that stumbles over it."""
    launcher = agent.launcher_pid
    for change in WRONG_SPECS:
        try:
            task = agent.submit("true", **change)
        except BadRequest:
            continue  # the plainest answer
        ended = agent.wait(task)[task]
        assert ended["exit_code"] in (0, 126, 127), change
        assert ended["exit_code"] == 0 or ended["reason"], change
    assert agent.launcher_pid == launcher


def test_a_client_that_hangs_up_in_the_middle(agent: Agent) -> None:
    task = agent.submit("sleep", "0.5")
    for verb in ("wait", "output"):
        with raw_client(agent) as sock:
            fields = {"tasks": [task]} if verb == "wait" else {"task": task, "follow": True}
            sock.sendall(framed({"id": 1, "verb": verb, **fields}) + b"\0\0")
    with raw_client(agent) as sock:
        sock.sendall(framed({"id": 1, "verb": "submit", "token": "t" * 16, "spec": agent.cluster.spec("true")}))
    assert agent.wait(task)[task]["state"] == "done"


def test_a_client_that_never_reads_holds_up_only_itself(cluster: Cluster) -> None:
    agent = cluster.agent("n1", slots=2)
    gate = agent.directory / "gate"
    script = f"until [ -e {gate} ]; do head -c 1000000 /dev/zero; sleep 0.01; done"
    task = agent.submit("sh", "-c", script)
    large = agent.submit("true", "x" * 500_000)
    agent.wait(large)
    with raw_client(agent) as sock:
        sock.sendall(framed({"id": 1, "verb": "output", "task": task, "follow": True}))
        sock.sendall(framed({"id": 3, "verb": "show", "tasks": [large]}) * 400)
        flood = framed({"id": 2, "verb": "policy"}) * 3000
        sock.settimeout(2)
        with contextlib.suppress(TimeoutError):
            sock.sendall(flood)
        agent.call("info")
        wait_until(lambda: spool_bytes(agent) > 12 << 20, what="much output")
        agent.call("info")
    gate.touch()
    assert agent.wait(task)[task]["exit_code"] == 0


@pytest.mark.rule("L3")
def test_more_clients_than_there_is_room_for(cluster: Cluster) -> None:
    config = cluster.directory / "few.toml"
    config.write_text("clients_max = 4\n")
    agent = cluster.agent("n1", "--config", str(config))
    with contextlib.ExitStack() as stack:
        held: list[AgentConnection] = []

        def holds_one_more() -> bool:
            """Those that asked whether it is ready may not be forgotten yet."""
            client = agent.client()
            try:
                client.call("info")
            except (BadRequest, AgentUnavailable):
                client.close()
                return False
            held.append(stack.enter_context(client))
            return True

        for _ in range(4):
            wait_until(holds_one_more, what="room for a client")
        with pytest.raises(BadRequest, match=Says.CLIENTS_MAX()), agent.client() as one_more:
            one_more.call("info")
        refused(agent.cli("ls"), 125, Says.CLIENTS_MAX())
        held.pop().close()
        wait_until(lambda: agent.cli("ls").returncode == 0, what="room for a client")


# -- the peer port -----------------------------------------------------------------------------------------------------


def peer_socket(agent: Agent) -> socket.socket:
    host, _, port = agent.listen.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.bad_input("garbage")
def test_garbage_on_the_peer_port(agent: Agent) -> None:
    for data in (
        random.Random(2).randbytes(GARBAGE_BYTES),
        b"\xff\xff\xff\xff" + b"x" * 1000,
        b"\0\0\0\x08" + b"\xc1" * 8,
        framed({"v": 1, "cluster": "default", "src": "x", "src_boot": "b", "seq": 1, "body": {"t": "ping"}}),
        framed([[[[[[]]]]]] * 100),
        framed(b"\x91" * 100_000),
    ):
        with peer_socket(agent) as sock:
            say(sock, data)
    assert agent.peers_alive() == {"n1"}


def test_garbage_after_an_introduction(agent: Agent) -> None:
    with FakePeer(agent.listen, "liar", boot="b1") as liar:
        for _ in range(5):
            with contextlib.suppress(OSError):
                liar.send_raw(framed(b"\xc1" * 50))
        with pytest.raises(OSError):
            liar.expect(Hello)  # it was said already: nothing but the end can come
    with FakePeer(agent.listen, "honest", boot="b2") as honest:
        honest.send(Ping(1))
        honest.receive()
    # Otherwise the two could come back and have the memory that other tests ask for.
    wait_until(lambda: agent.cli("forget", "liar").returncode == 0, what="the one to be forgotten")
    wait_until(lambda: agent.cli("forget", "honest").returncode == 0, what="the other to be forgotten")


def test_somebody_who_takes_our_name(agent: Agent) -> None:
    with contextlib.suppress(OSError), FakePeer(agent.listen, "n1", boot="impostor") as impostor:
        impostor.send(Ping(1))
    assert agent.call("info")["node"] == "n1"
    assert agent.call("nodes")["nodes"][0]["self"]


def test_many_silent_connections(agent: Agent) -> None:
    silent = [peer_socket(agent) for _ in range(100)]
    try:
        assert agent.cli("run", "echo", "on").stdout == b"on\n"
    finally:
        for sock in silent:
            sock.close()


# -- starting ----------------------------------------------------------------------------------------------------------


def test_a_second_agent_on_the_same_state(cluster: Cluster) -> None:
    first = cluster.agent("n1")
    second = cluster.add("n2")
    second.state = first.state
    refused(start_and_fail(second), 125)
    second.node = "n1"
    refused(start_and_fail(second), 125, str(first.state))
    launcher = first.launcher_pid
    assert is_alive(launcher)
    assert first.cli("run", "echo", "on").stdout == b"on\n"


def test_a_second_agent_on_the_same_socket(cluster: Cluster) -> None:
    first = cluster.agent("n1")
    second = cluster.add("n2")
    second.socket = first.socket
    refused(start_and_fail(second), 125, first.socket)
    assert first.call("info")["pid"] == first.pid


def test_a_port_that_another_agent_has(cluster: Cluster) -> None:
    first = cluster.agent("n1")
    refused(start_and_fail(cluster.add("n2", "--listen", first.listen)), 125, "listen", first.listen)


@pytest.mark.bad_input("duplicate-node")
def test_the_same_name_twice(cluster: Cluster) -> None:
    first = cluster.agent("n1")
    twin = cluster.add("n2", "--peer", first.listen)
    twin.node = "n1"
    twin.spawn()
    wait_until(lambda: not twin.runs, what="it to be turned away")
    assert first.cli("run", "echo", "on").stdout == b"on\n"
    assert [node["node"] for node in first.call("nodes")["nodes"]] == ["n1"]
    assert "--node" in twin.log_end()
    refused(twin.cli("ls"), 125, "n1", "peerload up --node")


def test_a_name_that_a_third_knows_another_by(cluster: Cluster) -> None:
    first, second = cluster.linked(2)
    place = cluster.directory / "twin"
    place.mkdir(mode=0o700)
    where = ["--state", str(place / "state"), "--socket", str(place / "sock")]
    done = cluster.cli(str(place / "sock"), "up", *where[:2], "--node", second.node, "--peer", first.listen)
    refused(done, 125, second.node, "--node NAME")
    wait_until(lambda: not processes_with(str(place)), what="neither the agent nor its launcher to be left")
    assert first.cli("run", "--node", second.node, "echo", "on").stdout == b"on\n"
    assert second.runs


def test_an_agent_at_work_is_not_ended_by_a_clash(cluster: Cluster) -> None:
    first, second = cluster.linked(2)
    twin = cluster.add("twin", "--peer", second.listen)
    twin.node = first.node
    twin.spawn()
    assert twin.reap() == 125
    assert first.runs
    late = cluster.add("late")
    late.node = second.node
    late.start()
    task = late.submit("sleep", "600")
    late.call("hold", tasks=[late.submit("true")])
    late.kill()
    late.more += ["--peer", first.listen]
    late.start()
    wait_until(lambda: late.call("checkup")["refused_by"], what="the refusal")
    late.await_state(task, "running")
    wait_until(lambda: any(second.node in notice for notice in late.call("info")["notices"]), what="a notice")
    late.call("stop", all=True)
    late.reap()


@pytest.mark.long
def test_an_agent_that_comes_back_is_not_ended_by_a_clash(cluster: Cluster) -> None:
    first, second = cluster.linked(2)
    back = cluster.add("back")
    back.node = second.node
    back.start()
    back.wait(back.submit("true"))
    back.kill()
    back.more += ["--peer", first.listen]
    back.start()
    wait_until(lambda: back.call("checkup")["refused_by"], 20, "the refusal")
    assert back.runs


@pytest.mark.rule("S11")
def test_a_state_directory_that_anybody_may_write_to(cluster: Cluster) -> None:
    agent = cluster.add("n1")
    agent.state.mkdir()
    agent.state.chmod(0o777)
    refused(start_and_fail(agent), 125, str(agent.state), "chmod 700")


@pytest.mark.rule("S11")
def test_a_state_directory_of_somebody_else(cluster: Cluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    agent = cluster.add("n1")
    agent.state.mkdir(mode=0o700)
    os.chown(agent.state, 12345, 12345)
    refused(start_and_fail(agent), 125, str(agent.state))


@pytest.mark.rule("S11")
def test_a_state_directory_that_is_a_file_or_a_link(cluster: Cluster) -> None:
    agent = cluster.add("n1")
    agent.state.write_text("a file")
    refused(start_and_fail(agent), 125, str(agent.state))
    agent.state.unlink()
    agent.state.symlink_to(tempfile.gettempdir())
    refused(start_and_fail(agent), 125, str(agent.state))


def test_a_database_that_is_none(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    for _ in range(3):
        agent.submit("true")
    agent.call("stop", all=True)
    agent.reap()
    path = agent.state / "peerload.db"
    raw = path.read_bytes()
    for damaged in (b"no database\n" * 1000, raw[: len(raw) // 2], raw[:100] + b"\xff" * 4000):
        path.write_bytes(damaged)
        refused(start_and_fail(agent), 125, str(path))
        assert path.read_bytes() == damaged, "what is left of it is not touched"


def test_a_socket_path_that_is_too_long(cluster: Cluster) -> None:
    agent = cluster.add("n1")
    agent.socket = str(agent.directory / ("s" * 120))
    refused(start_and_fail(agent), 125, "socket")
    refused(cluster.cli(agent.socket, "ls"), 125, "107")


@pytest.mark.rule("S15")
def test_a_node_name_that_cannot_be_used(cluster: Cluster) -> None:
    agent = cluster.add("n1")
    for name in ("UPPER", "with space", "dot.ted", "x" * 41, "", "ünïcode", "a/b"):
        agent.node = name
        refused(start_and_fail(agent), 125, "node")
    agent.node = "-"
    agent.start()


WRONG_SETTINGS = {
    "slots = -1": "slots",
    "slotz = 1": "slots",
    "slots = 'many'": "slots",
    "policy = 7": "policy",
    "policy = 'no-such-preset'": "no-such-preset",
    "listen = 'nowhere'": "listen",
    "peer = ['x']": "peer",
    "mqtt = ['http://x']": "mqtt",
    "lease_s = 0.0": "lease_s",
    "lease_s = nan": "lease_s",
    "this is = = no toml": "TOML",
}
"""text of a config file → what is named"""


def test_a_config_file_with_something_wrong_in_it(cluster: Cluster) -> None:
    config = cluster.directory / "bad.toml"
    agent = cluster.add("n1", "--config", str(config), slots=None)
    for text, word in WRONG_SETTINGS.items():
        config.write_text(text + "\n")
        refused(start_and_fail(agent), 125, word)


def test_a_mistake_in_a_preset_is_told_with_its_key(cluster: Cluster) -> None:
    preset = cluster.directory / "mine.toml"
    preset.write_text("# mine\n[location.sender]\npolicy = 'threshold'\nprobes = 65\n")
    says = f"{preset}: location.sender.probes: 65 "
    refused(start_and_fail(cluster.add("n1", "--policy", str(preset))), 125, says)
    refused(cluster.cli(None, "policy", "check", str(preset)), 125, says)
    state, socket_path = cluster.directory / "state", cluster.directory / "sock"
    done = cluster.cli(None, "up", "--state", str(state), "--socket", str(socket_path), "--policy", str(preset))
    assert (done.returncode, says in done.stderr.decode()) == (125, True)


@pytest.mark.rule("J6", "S2")
def test_listening_to_the_world_is_refused_without_a_cluster_directory(cluster: Cluster) -> None:
    del cluster.environment["PEERLOAD_CLUSTER"]
    agent = cluster.add("n0", "--listen", "0.0.0.0:0")
    refused(start_and_fail(agent), 125, "listen", "peerload invite")
    for address in ("0.0.0.0:0", "[::]:0", ":0", "127.0.0.1:99999", "127.0.0.1"):
        refused(start_and_fail(cluster.add(f"n{len(cluster.agents)}", "--listen", address)), 125, "listen")


def test_up_tells_why_an_agent_does_not_start(cluster: Cluster) -> None:
    state = cluster.directory / "open"
    state.mkdir()
    state.chmod(0o777)
    done = cluster.cli(None, "up", "--state", str(state), "--socket", str(cluster.directory / "sock"))
    assert done.returncode == 125
    assert b"chmod 700" in done.stderr


def test_no_agent_is_there(cluster: Cluster) -> None:
    none = str(cluster.directory / "none")
    for verb in (["ls"], ["nodes"], ["run", "true"], ["submit", "true"], ["top", "--once"]):
        refused(cluster.cli(none, *verb), 125, "peerload up")
    refused(cluster.cli(none, "down"), 125, "peerload down --all")


def test_an_agent_that_answers_nonsense(cluster: Cluster) -> None:
    path = str(cluster.directory / "odd")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as odd:
        odd.bind(path)
        odd.listen()
        with AgentConnection(path, timeout_s=60) as client:
            served, _ = odd.accept()
            with served:
                served.sendall(b"\xff\xff\xff\xff")
            with pytest.raises(AgentUnavailable):
                client.call("info")


def test_an_agent_that_has_refused_us_before_we_asked_is_understood(cluster: Cluster) -> None:
    path = str(cluster.directory / "odd")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as odd:
        odd.bind(path)
        odd.listen()
        with AgentConnection(path, timeout_s=60, room_s=0.0) as client:
            served, _ = odd.accept()
            with served:
                served.sendall(framed({"id": 0, "error": {"code": "slow-down", "what": Says.CLIENTS_MAX()}}))
            with pytest.raises(BadRequest, match=Says.CLIENTS_MAX()):
                client.call("info")


@pytest.mark.long
def test_a_full_spool_directory_is_no_end(cluster: Cluster) -> None:
    """The spool's directory is taken away from under a running agent: a task fails with a reason, the agent lives."""
    agent = cluster.agent("n1")
    shutil.rmtree(agent.state / "spool")
    task = agent.submit("echo", "out")
    ended = agent.wait(task)[task]
    assert ended["exit_code"] == 126
    assert "spool" in ended["reason"]
    assert agent.call("info")["pid"] == agent.pid
