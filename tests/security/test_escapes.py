"""A hostile guest tries to get out: each attempt is made for real, from inside a task, and has to fail (the figure of rules X3,
X4; S4, S5, S6, S9).

`escapes.py` is what it runs. What can only be seen from outside, its daemon, its files, its victims, is looked at afterwards.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.integration.cluster import is_alive
from tests.security.service import ServiceCluster
from tests.security.users import needs_root
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.security.service import ServiceAgent

pytestmark = [needs_root, pytest.mark.rule("X3")]
PYTHON = Path("/usr/bin/python3")
ESCAPES = Path(__file__).with_name("escapes.py")
NAMES = tuple(
    line.removeprefix("def ").removesuffix("():")
    for before, line in zip(
        ESCAPES.read_text(encoding="utf-8").splitlines(),
        ESCAPES.read_text(encoding="utf-8").splitlines()[1:],
        strict=False,
    )
    if before == "@attempt"
)
_FIRST_UID = 1_000_000 + os.getpid() % 10_000 * 1000
GUEST_UIDS = range(_FIRST_UID, _FIRST_UID + 1000)
"""Of the guests here alone: other tests that run meanwhile have theirs."""
SETTINGS = (
    f"guest_uids = [{GUEST_UIDS[0]}, {GUEST_UIDS[-1]}]\n"
    "guest_bytes_max = 8388608\ntask_processes_max = 64\noutput_bytes_max = 1048576\n"
)
PRIVILEGED = "/mnt/id"
LEFT = f"left-by-a-guest-{secrets.token_hex(8)}"
"""What files are called that it leaves where all may write, as the tests of other processes do."""
SHARED = ("/tmp", "/var/tmp", "/dev/shm")
OPEN_TO_USERS = frozenset(
    {
        "ask_the_agent",
        "see_other_processes",
        "list_homes",
        "have_a_user_namespace",
        "clone_a_user_namespace",
        "type_into_a_terminal",
        "change_its_segments",
        "watch_its_own_faults",
        "have_a_ring_of_requests",
        "give_a_command_to_a_console",
        "use_the_keys_of_the_session",
        "write_to_the_machine",
        "fill_the_disk",
    }
)
"""What any user of the machine may do there without peerload, too."""


class Tried(NamedTuple):
    """What came of it: attempt → how it failed; the cluster, its node of guests, and the pid of another guest's task."""

    told: dict[str, str]
    cluster: ServiceCluster
    home: ServiceAgent
    node: ServiceAgent
    victim: int
    record: dict[str, object]


@pytest.fixture(scope="module")
def tried() -> Iterator[Tried]:
    """One task that has tried everything, beside another one that sleeps."""
    if not PYTHON.exists():
        pytest.skip("there is no Python here that a guest could run")
    with ServiceCluster() as cluster:
        home = cluster.node("ws1", settings=SETTINGS).start()
        node = cluster.node("ws2", "--peer", home.listen, settings=SETTINGS)
        made = f"mount -t tmpfs tmpfs /mnt && cp /usr/bin/id {PRIVILEGED} && chmod 4755 {PRIVILEGED}"
        node.prepares = (made,)
        node.start()
        cluster.await_acquainted([home, node])
        there = {"placement": {"node": "ws2"}, "directory": b"-"}
        asleep = cluster.submit(home, "bob", "echo a secret of bob; echo $$; exec sleep 600", **there)
        spool = node.state / "spool"
        wait_until(lambda: any(path.read_text().count("\n") > 1 for path in spool.glob("*.out")), 60.0, "the victim")
        (output,) = spool.glob("*.out")
        victim = int(output.read_text().splitlines()[1])
        variables = _variables(cluster, node, victim, output)
        script = f'exec {PYTHON} -I -c "$ESCAPES"'
        record = cluster.run(home, "alice", script, variables=variables, named=list(variables), **there)
        assert record["exit_code"] == 0, record["err"]
        yield Tried(json.loads(record["out"]), cluster, home, node, victim, record)
        cluster.user(home, "bob").call("cancel", tasks=[asleep])


def _variables(cluster: ServiceCluster, node: ServiceAgent, victim: int, output: Path) -> dict[bytes, bytes]:
    """What the attempts are told of the node where they are made."""
    facts = {
        "AGENT": node.pid,
        "LAUNCHER": node.launcher_pid,
        "VICTIM": victim,
        "STATE": node.state,
        "SOCKETS": node.sockets,
        "SOCKET": node.socket,
        "SPOOL": output,
        "MEMBER": cluster.directory / "member",
        "PRIVILEGED": PRIVILEGED,
        "ANOTHERS_HOME": cluster.home("bob"),
        "LEFT": LEFT,
    }
    variables = {name.encode(): str(value).encode() for name, value in facts.items()}
    return {**variables, b"ESCAPES": ESCAPES.read_bytes()}


def test_the_attempt_fails(tried: Tried) -> None:
    """Every one of them was refused."""
    assert set(tried.told) == set(NAMES)
    assert {name: said for name, said in tried.told.items() if said.startswith("ESCAPED")} == {}


def test_enough_was_tried_and_nobody_was_hurt(tried: Tried) -> None:
    """At least 25 attempts, every one with an answer; agent, launcher and the other task are as before."""
    assert len(NAMES) >= 25
    assert set(NAMES) == set(tried.told)
    assert tried.told["fork_without_end"].startswith("after ")
    assert is_alive(tried.node.pid)
    assert is_alive(tried.node.launcher_pid)
    assert is_alive(tried.victim)


def test_a_local_user_gets_as_little(tried: Tried) -> None:
    """A task of a user of this machine sees the machine as it is, and gets neither at the agent nor at others all the same."""
    told = _told_by_a_local_user(tried)
    for name in NAMES:
        if name not in OPEN_TO_USERS:
            assert not told[name].startswith("ESCAPED"), f"{name}: {told[name]}"
    assert is_alive(tried.home.pid)
    assert is_alive(tried.home.launcher_pid)


def _told_by_a_local_user(tried: Tried) -> dict[str, str]:
    """The same attempts, by alice at ws1; the daemon that they leave is ended with them."""
    cluster, home = tried.cluster, tried.home
    asleep = cluster.submit(home, "bob", "echo a secret of bob; echo $$; exec sleep 600", placement={"local": True})
    spool = home.state / "spool"
    wait_until(lambda: any("secret" in path.read_text() for path in spool.glob("*.out")), 60.0, "the victim")
    output = next(path for path in spool.glob("*.out") if "secret" in path.read_text())
    wait_until(lambda: output.read_text().count("\n") > 1, 60.0, "its pid")
    victim = int(output.read_text().splitlines()[1])
    script = f'exec {PYTHON} -I -c "$ESCAPES"'
    variables = _variables(cluster, home, victim, output)
    record = cluster.run(home, "alice", script, variables=variables, placement={"local": True}, directory=b"-")
    assert record["exit_code"] == 0, record["err"]
    assert is_alive(victim)
    cluster.user(home, "bob").call("cancel", tasks=[asleep])
    for path in SHARED:
        Path(path, LEFT).unlink(missing_ok=True)
    told: dict[str, str] = json.loads(record["out"])
    return told


def test_what_it_has_left_running_is_ended_with_it(tried: Tried) -> None:
    """A daemon in a session of its own, that heeds no signal."""
    uid = tried.cluster.run(tried.home, "alice", "id -u", placement={"node": "ws2"}, directory=b"-")["out"]
    assert uid.strip().isdigit()
    wait_until(lambda: not _guests_but(tried.victim), 60.0, "its daemon to end")


def test_nothing_of_its_files_stays(tried: Tried) -> None:
    """Neither on the machine nor for the next guest."""
    script = f"ls {' '.join(SHARED)}"
    told = tried.cluster.run(tried.home, "bob", script, placement={"node": "ws2"}, directory=b"-")
    assert told["exit_code"] == 0
    assert LEFT not in told["out"]
    for path in (*SHARED, "/run", "/"):
        assert not Path(path, LEFT).exists()


def test_one_that_stops_its_own_group_can_be_ended(tried: Tried) -> None:
    """SIGSTOP to itself and all it has started keeps nobody from cancelling it."""
    task = tried.cluster.submit(
        tried.home, "alice", "sleep 600 & kill -STOP 0", placement={"node": "ws2"}, directory=b"-"
    )
    alice = tried.cluster.user(tried.home, "alice")
    wait_until(lambda: alice.call("show", tasks=[task])["tasks"][0]["state"] == "running", 60.0, "it to run")
    alice.call("cancel", tasks=[task], force=True)
    wait_until(lambda: not _guests_but(tried.victim), 60.0, "it to end")


def test_one_that_crashes_leaves_no_core(tried: Tried) -> None:
    """The limit is 0, soft and hard."""
    told = tried.cluster.run(
        tried.home, "alice", "ulimit -Hc; kill -SEGV $$", placement={"node": "ws2"}, directory=b"-"
    )
    assert told["out"].split() == ["0"]
    assert told["signal"] == 11


def test_one_that_takes_more_memory_than_it_asked_for_is_ended(tried: Tried) -> None:
    """The machine goes on."""
    script = f"exec {PYTHON} -c 'x = bytearray(1 << 30)'"
    request = {"mem_bytes": 64 << 20}
    told = tried.cluster.run(tried.home, "alice", script, placement={"node": "ws2"}, directory=b"-", request=request)
    assert told["exit_code"] != 0


@pytest.mark.long
def test_one_that_writes_without_end_fills_nobodys_disk(tried: Tried) -> None:
    """Of its output no more is kept than the limit, with the hole that the rest has left."""
    script = "head -c 64000000 /dev/zero"
    task = tried.cluster.submit(tried.home, "alice", script, placement={"node": "ws2"}, directory=b"-")
    alice = tried.cluster.user(tried.home, "alice")
    wait_until(lambda: alice.call("show", tasks=[task])["tasks"][0]["state"] == "done", 60.0, "it to end")
    used = sum(path.stat().st_blocks * 512 for path in (tried.node.state / "spool").iterdir())
    assert used <= 4 << 20


def _guests_but(pid: int) -> list[int]:
    """The processes of guests that live, but for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = (path / "status").read_text()
        except OSError:
            continue
        uid = int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1])
        if uid in GUEST_UIDS and int(path.name) != pid and "State:\tZ" not in status:
            found.append(int(path.name))
    return found
