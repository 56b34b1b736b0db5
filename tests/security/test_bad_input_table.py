"""The table of bad input (`bad_input.py`), tried on one real agent at each of its doors; more of it is in other files, marked."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from peerload.model.errors import PeerloadError
from peerload.model.messages import Accept, Commit, NotStarted, Offer, Ping, Pong, Query, Result
from peerload.model.task import Exit, TaskSpec
from peerload.security import invitations
from peerload.wire import peer
from peerload.wire.seal import Sealer
from tests.integration.cluster import Agent, Cluster
from tests.integration.fake_peer import FakePeer
from tests.security.bad_input import ENTRIES, tried
from tests.support import cluster_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GARBAGE = secrets.token_bytes(2000)
NOBODY = 61_184
"""A uid that no account has."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Agent]:
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=4)
        yield agent
        log = agent.log.read_text(encoding="utf-8", errors="surrogateescape")
        assert "Traceback" not in log
        assert "a bug" not in log
        assert "\x1b" not in log
        assert all(re.match(r"\d{4}-\d\d-\d\d ", line) for line in log.splitlines() if line.strip()), "a forged line"


@pytest.fixture
def agent(shared: Agent) -> Iterator[Agent]:
    """Whatever a test does, it is the same process afterwards, and runs tasks."""
    pid = shared.pid
    yield shared
    assert shared.call("info")["pid"] == pid == shared.pid
    task = shared.submit("true", placement={"node": "n1"})
    assert shared.wait(task)[task]["exit_code"] == 0


class Rule:
    """How often something was refused for a rule, so far and since."""

    def __init__(self, agent: Agent, *rules: str) -> None:
        self._agent = agent
        self._names = [f'security_events_total{{rule="{rule}"}}' for rule in rules]
        self._before = self._count()

    def _count(self) -> int:
        counters = self._agent.counters()
        return sum(counters.get(name, 0) for name in self._names)

    def await_broken(self, times: int = 1) -> None:
        wait_until(lambda: self._count() >= self._before + times, 60, f"{times} of {self._names}")


def events(agent: Agent) -> list[dict[str, Any]]:
    with agent.client() as client:
        parts = client.stream("events", limit=1000, follow=False, tasks=[], what=["security"])
        return [event for part in parts for event in part["events"]]


def framed(body: object) -> bytes:
    raw: bytes = body if isinstance(body, bytes) else msgpack.packb(body)
    return len(raw).to_bytes(4, "big") + raw


def test_every_entry_is_tried() -> None:
    found = tried()
    assert sorted(ENTRIES) == sorted(found), "an entry without a test, or a test of no entry"


# -- doors ---------------------------------------------------------------------------------------------------------------


def plain(agent: Agent) -> socket.socket:
    host, _, port = agent.listen.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def at_the_control_socket(agent: Agent) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect(agent.socket)
    return sock


def at_the_join_door(agent: Agent) -> socket.socket:
    return invitations._unproven().wrap_socket(plain(agent))


def at_the_launcher(agent: Agent) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect(str(agent.state / "launcher" / "launcher.sock"))
    return sock


def over_a_link(agent: Agent) -> socket.socket:
    return FakePeer(agent.listen, f"m-{secrets.token_hex(4)}", boot="b")._socket


def over_a_stream(agent: Agent) -> socket.socket:
    return FakePeer(agent.listen, f"s-{secrets.token_hex(4)}", boot="b", stream=True)._socket


DOORS: dict[str, tuple[Callable[[Agent], socket.socket], tuple[str, ...]]] = {
    "control": (at_the_control_socket, ("L3",)),
    "before TLS": (plain, ("J3",)),
    "join": (at_the_join_door, ("J2", "J3")),
    "link": (over_a_link, ("P1",)),
    "stream": (over_a_stream, ("P1",)),
    "launcher": (at_the_launcher, ()),
}


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes; what it still says does not matter."""
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset, or an alert of TLS
        return True
    return True


@pytest.mark.bad_input("garbage")
@pytest.mark.rule("P1", "J3", "L3")
@pytest.mark.parametrize("door", DOORS)
def test_garbage(agent: Agent, door: str) -> None:
    knock, rules = DOORS[door]
    broken = Rule(agent, *rules)
    launcher = agent.launcher_pid
    with knock(agent) as sock:
        with contextlib.suppress(OSError):
            for _ in range(3):
                sock.sendall(b"\0\0\0\x40" + GARBAGE[:64])
            sock.sendall(b"\xff" + GARBAGE)
        assert is_closed(sock)
    broken.await_broken() if rules else None
    assert agent.launcher_pid == launcher


@pytest.mark.bad_input("too-long")
@pytest.mark.rule("P1", "L3", "S18")
@pytest.mark.parametrize("door", [door for door in DOORS if door != "before TLS"])
def test_a_frame_that_claims_4_gib(agent: Agent, door: str) -> None:
    knock, rules = DOORS[door]
    broken = Rule(agent, *rules)
    with knock(agent) as sock:
        sock.sendall(b"\xff\xff\xff\xff" + bytes(1000))
        assert is_closed(sock)
    broken.await_broken() if rules else None


@pytest.mark.bad_input("truncated")
@pytest.mark.parametrize("door", DOORS)
def test_a_frame_that_is_cut_off(agent: Agent, door: str) -> None:
    """Who hangs up in the middle leaves nothing: no event either, since networks do that, too."""
    knock, _ = DOORS[door]
    whole = framed({"id": 1, "verb": "info"})
    for size in (1, 4, 5, len(whole) - 1):
        with knock(agent) as sock, contextlib.suppress(OSError):
            sock.sendall(whole[:size])


@pytest.mark.long
@pytest.mark.bad_input("slow-loris")
@pytest.mark.rule("P1", "J3", "L3")
def test_one_byte_a_second(agent: Agent) -> None:
    """At all doors at once: 10 s for who has introduced itself, 5 s for who has not; each is told of."""
    rules = [Rule(agent, "L3"), Rule(agent, "P1"), Rule(agent, "J3")]
    closed: set[str] = set()
    doors = [door for door in DOORS if door != "launcher"]

    def drip(door: str) -> None:
        with DOORS[door][0](agent) as sock:
            sock.settimeout(1.0)
            sock.sendall(b"\x16\x03\x01\x02\x00" if door == "before TLS" else b"\0\0\2\0")
            with contextlib.suppress(OSError):
                while not is_closed(sock):
                    sock.sendall(b"\x91")
            closed.add(door)

    threads = [threading.Thread(target=drip, args=(door,), daemon=True) for door in doors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert closed == set(doors)
    for rule in rules:
        rule.await_broken()


@pytest.mark.bad_input("garbage", "too-long")
@pytest.mark.rule("J5", "P1")
def test_datagrams_that_are_none(agent: Agent) -> None:
    """Of strangers, and of members: sealed as it has to be, with garbage within."""
    host, _, port = agent.listen.rpartition(":")
    member = Sealer(cluster_of().key, cluster_of().id, "m-gossip", "b", purpose="gossip")
    strangers, members = Rule(agent, "J5"), Rule(agent, "P1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for raw in (b"", b"\x01", GARBAGE[:200], b"\xff" * 60_000):
            sock.sendto(raw, (host, int(port)))
        for raw in (b"", GARBAGE[:200], b"\x91" * 500, msgpack.packb([1, 1, [[[]] * 9]])):
            sock.sendto(member.seal(raw, b"n1"), (host, int(port)))
    strangers.await_broken(2)
    members.await_broken(2)


@pytest.mark.bad_input("garbage")
@pytest.mark.rule("P5")
def test_a_datagram_that_comes_again_and_again(agent: Agent) -> None:
    host, _, port = agent.listen.rpartition(":")
    sealed = Sealer(cluster_of().key, cluster_of().id, "m-again", "b", purpose="gossip").seal(
        msgpack.packb([1, 1, []]), b"n1"
    )
    broken = Rule(agent, "P5")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(200):
            sock.sendto(sealed, (host, int(port)))
    broken.await_broken(65)
    wait_until(lambda: any(event["state"] == "P5" for event in events(agent)), 60, "an event")


# -- members that lie ------------------------------------------------------------------------------------------------------


def heard_out(liar: FakePeer) -> None:
    liar.send(Ping(sequence=77))
    liar.expect(Pong)


@pytest.mark.bad_input("foreign-result", "foreign-commit", "id-prefix")
@pytest.mark.rule("P3", "S17")
def test_who_speaks_of_tasks_of_others(agent: Agent) -> None:
    """The name of the liar, `m1`, begins the name of the home, `m10`, and the other way round."""
    task = agent.submit("sleep", "600", placement={"node": "n1"})
    agent.await_state(task, "running")
    ((uid, attempt),) = agent.database(f"SELECT uid, attempt FROM tasks WHERE counter = {task.partition('/')[2]}")
    for liar_name, home in (("m1", "m10"), ("m10", "m1"), ("n10", "n1"), ("n", "n1")):
        broken = Rule(agent, "P3")
        with FakePeer(agent.listen, liar_name, boot=secrets.token_hex(4)) as liar:
            spec = TaskSpec((b"true",), b"-")
            liar.send(Offer(f"{home}/7", secrets.token_bytes(16), 1, spec, 60.0, only=True))
            liar.send(Commit(f"{home}/7", secrets.token_bytes(16), 1, 7, 5.0, 60.0))
            liar.send(Query(f"{home}/7", uid, attempt))
            liar.send(Result(task, uid, attempt, Exit(0), inline=True))
            liar.send(NotStarted(task, uid, attempt + 5))
            liar.send(Accept(task, uid, attempt + 1, 3, 5.0))
            heard_out(liar)
        broken.await_broken(4)
    shown = agent.show(task)
    assert (shown["state"], shown["node"]) == ("running", "n1")
    told = [event for event in events(agent) if event["state"] == "P3"]
    assert {"m1", "m10", "n10", "n"} <= {event["node"] for event in told}
    agent.call("cancel", tasks=[task])


@pytest.mark.bad_input("attempt-2-63", "negative-size")
@pytest.mark.rule("P1", "S18")
def test_numbers_that_are_none(agent: Agent) -> None:
    uid = bytes(16)
    told = {"task": "m3/1", "uid": uid, "attempt": 1}
    wrong: list[dict[str, Any]] = [
        {"t": "query", **told, "attempt": 1 << 63},
        {"t": "query", **told, "attempt": -1},
        {"t": "result", **told, "exit": {"exit_code": 0, "stdout_bytes": -1}},
        {"t": "offer", **told, "spec": {"argv": [b"true"], "directory": b"-", "request": {"mem_bytes": -5}}},
        {"t": "offer", **told, "spec": {"argv": [b"true"], "directory": b"-", "request": {"cpus": float("nan")}}},
        {"t": "renew-ok", "extensions": [{"uid": uid, "attempt": 1, "ts": float("inf"), "lease_s": 60.0}]},
    ]
    for body in wrong:
        with FakePeer(agent.listen, "m3", boot=secrets.token_hex(4)) as liar:
            broken = Rule(agent, "P1")
            envelope = {"v": 1, "cluster": "default", "src": "m3", "src_boot": liar.boot, "seq": 9, "body": body}
            liar.send_raw(framed({**envelope, "dst": "n1"}))
            heard_out(liar)
            broken.await_broken()


@pytest.mark.bad_input("negative-size", "attempt-2-63")
@pytest.mark.rule("L3")
@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("tasks", {"limit": -1}),
        ("tasks", {"limit": 1 << 63}),
        ("output", {"task": "1", "offset": -1}),
        ("submit", {"token": "12345678", "spec": {"argv": [b"true"], "directory": b"/", "request": {"mem_bytes": -1}}}),
    ],
)
def test_numbers_of_a_client_that_are_none(agent: Agent, verb: str, fields: dict[str, Any]) -> None:
    with pytest.raises(PeerloadError), agent.client() as client:
        list(client.stream(verb, **fields))


@pytest.mark.rule("P1")
def test_three_malformed_frames_are_a_ban_of_a_minute(agent: Agent) -> None:
    with FakePeer(agent.listen, "m4", boot="b4") as liar:
        with contextlib.suppress(OSError):
            for _ in range(3):
                liar.send_raw(framed(b"\xc1" * 9))
        assert is_closed(liar._socket)
    with pytest.raises((ConnectionError, ssl.SSLError)), FakePeer(agent.listen, "m4", boot="b4") as again:
        heard_out(again)
    assert agent.counters()['peer_frames_dropped_total{reason="banned"}'] >= 1


@pytest.mark.rule("S18", "P1")
def test_what_nests_deeply_or_is_of_the_worst_kind_is_refused(agent: Agent) -> None:
    """The largest frames that are allowed, of what is dear to read: each is refused by its bounds, and others are served."""
    size = peer.DATA_BYTES_MAX - 200
    header = {"v": 1, "cluster": "default", "src": "m5", "src_boot": "x", "seq": 1, "dst": "n1"}
    packed = msgpack.packb(header)
    start = bytes([packed[0] + 2]) + packed[1:] + msgpack.packb("body") + msgpack.packb({"t": "ping", "sequence": 1})
    start += msgpack.packb("more")
    kinds = {
        "nested": b"\x91" * size,
        "maps": b"\xdd" + (size // 3).to_bytes(4, "big") + b"\x81\xa0\xc0" * (size // 3),
        "text": b"\xdd" + (size // 2).to_bytes(4, "big") + b"\xa1a" * (size // 2),
    }
    for more in kinds.values():
        broken = Rule(agent, "P1")
        with FakePeer(agent.listen, "m5", boot=secrets.token_hex(4)) as liar:
            liar.send_raw(framed(start + more))
            with contextlib.suppress(OSError, AssertionError):
                heard_out(liar)
        broken.await_broken()


# -- tasks -----------------------------------------------------------------------------------------------------------------


def run(agent: Agent, script: str, **fields: Any) -> dict[str, Any]:
    """A shell script as a task of n1, to its end."""
    task = agent.submit("sh", "-c", script, placement={"node": "n1"}, **fields)
    return agent.wait(task, timeout_s=100)[task]


@pytest.mark.bad_input("fork-bomb")
def test_a_task_that_makes_processes(agent: Agent) -> None:
    """Hundreds, in sessions of their own: they end with it, and the agent is none the worse."""
    script = "i=0; while [ $i -lt 200 ]; do setsid sleep 300 & i=$((i+1)); done; echo made; wait"
    task = agent.submit("sh", "-c", script, placement={"node": "n1"})
    wait_until(lambda: agent.output(task)[0] == b"made\n", 60, "its processes")
    agent.call("cancel", tasks=[task], wait=True, timeout_s=60.0)
    assert agent.wait(task)[task]["state"] == "cancelled"


@pytest.mark.bad_input("disk-filler", "tiny-outputs")
@pytest.mark.rule("F2")
def test_a_task_that_writes_a_million_times(agent: Agent) -> None:
    script = "python3 -c 'import os\nfor _ in range(10**6): os.write(1, b\".\")'"
    ended = run(agent, script)
    assert ended["state"] == "done"
    assert agent.call("show", tasks=[ended["id"]])["tasks"][0]["stdout_bytes"] == 10**6


@pytest.mark.long
@pytest.mark.bad_input("stop-own-group")
def test_a_task_that_stops_its_own_group(agent: Agent) -> None:
    task = agent.submit("sh", "-c", "echo stops; kill -STOP 0; echo never", placement={"node": "n1"})
    wait_until(lambda: agent.output(task)[0] == b"stops\n", 60, "its word")
    agent.call("cancel", tasks=[task], wait=True, timeout_s=60.0)
    assert agent.wait(task)[task]["state"] == "cancelled"
    assert agent.output(task)[0] == b"stops\n"


TRACE = """
import ctypes, os, sys
trace, pid = ctypes.CDLL(None).ptrace, int(sys.argv[1])
if trace(16, pid, 0, 0) == 0:  # PTRACE_ATTACH
    os.waitpid(pid, 0x40000000)  # __WALL
    print("attached", trace(17, pid, 0, 0))  # PTRACE_DETACH
"""


@pytest.mark.bad_input("ptrace")
def test_a_task_that_traces_the_agent(agent: Agent, tmp_path: Path) -> None:
    """In user mode they are the same user's, and the kernel may let it, as it lets `kill -STOP`: agent and launcher go on
    when it lets go of them. (A guest of system mode is refused: test_escapes.py.)"""
    (tmp_path / "trace.py").write_text(TRACE, encoding="utf-8")
    for pid in (agent.pid, agent.launcher_pid):
        assert run(agent, f"python3 {tmp_path}/trace.py {pid}")["state"] == "done"


@pytest.mark.bad_input("agent-socket")
@pytest.mark.rule("L1")
def test_a_task_that_writes_to_the_agents_socket(agent: Agent) -> None:
    """Its own user's task may ask what its user may; garbage is refused. Another user's does not get so far."""
    broken = Rule(agent, "L3")
    say = "import socket; s = socket.socket(1); s.connect(p); s.sendall(b'\\\\0\\\\0\\\\0\\\\4\\\\xc1\\\\xc1\\\\xc1\\\\xc1'); s.recv(99)"
    ended = run(agent, f"python3 -c \"p = '{agent.socket}'; {say}\"")
    assert ended["exit_code"] == 0
    broken.await_broken()
    if os.getuid() == 0:
        for path in (agent.socket, agent.state / "launcher" / "launcher.sock"):
            script = f"python3 -c \"import os; os.setgid({NOBODY}); os.setuid({NOBODY}); p = '{path}'; {say}\""
            ended = run(agent, f"{script} 2>&1")
            assert ended["exit_code"] == 1
            assert b"PermissionError" in agent.output(ended["id"])[0]


@pytest.mark.bad_input("kill-launcher")
def test_a_task_that_kills_its_launcher(agent: Agent) -> None:
    """All its tasks end with it; there is another one at once; what may run once only is not run again."""
    launcher = agent.launcher_pid
    task = agent.submit("sh", "-c", f"kill -9 {launcher}; sleep 60", placement={"node": "n1"}, guarantee="once")
    agent.await_state(task, "unknown", "failed", timeout_s=60)
    wait_until(lambda: agent.launcher_pid not in (0, launcher), 60, "another launcher")


@pytest.mark.bad_input("swapped-link", "hard-link", "fifo")
@pytest.mark.rule("F1")
def test_a_task_that_puts_something_else_in_the_place_of_its_files(agent: Agent, tmp_path: Path) -> None:
    """Of its output and its scratch directory: nothing outside is touched, nobody waits for it for ever."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept", encoding="utf-8")
    spool = agent.state / "spool"
    find = f"me=$(ls -t {spool} | head -1); f={spool}/$me; "
    swaps = {
        "link": f"ln -sf {victim}/kept $f",
        "hard link": f"rm -f $f; ln {victim}/kept $f",
        "fifo": "rm -f $f; mkfifo $f",
        "directory": "rm -f $f; mkdir $f",
    }
    for swap in swaps.values():
        ended = run(agent, f"echo out; {find}{swap}; true")
        assert ended["state"] in ("done", "failed")
        with contextlib.suppress(PeerloadError):
            agent.output(ended["id"])
    ended = run(agent, f'd=$(pwd); cd /; rmdir "$d" && ln -s {victim} "$d"', directory=b"-")
    assert ended["exit_code"] == 0
    assert (victim / "kept").read_text(encoding="utf-8") == "kept"
    assert sorted(path.name for path in victim.iterdir()) == ["kept"]


@pytest.mark.bad_input("terminal-escape", "log-newline")
@pytest.mark.rule("T1")
def test_names_that_would_speak_to_a_terminal_or_forge_a_line(agent: Agent) -> None:
    evil = "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\u202e\n2026-01-01 00:00:00 CRITICAL forged: line"
    with pytest.raises(PeerloadError), agent.client() as client:
        client.call("show", tasks=[evil])
    task = agent.submit("true", evil, placement={"node": "n1"})
    agent.wait(task)
    for verb in ("show", "why"):
        said = agent.cli(verb, task).stdout
        assert b"\x1b" not in said
        assert b"\ncritical forged" not in said.lower()
    assert b"\x1b" not in agent.cli("events", "--limit", "1000").stdout
