"""A launcher of all users by itself: whom it starts tasks as, what guests have, and that an account database that hangs holds up
who needs it and nobody else (rules X1, X3, X6)."""

from __future__ import annotations

import fcntl
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.cluster import program
from tests.integration.test_launcher import Agent
from tests.security.users import ADMINS, needs_root
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [needs_root, pytest.mark.rule("X1", "X6")]
UIDS = {"root": 0, "alice": 20001, "bob": 20002, "carol": 20003, "dave": 20004}
PASSWD = "".join(f"{name}:x:{uid}:{uid}::/:/bin/sh\n" for name, uid in UIDS.items())
GROUPS = f"peerload-admin:x:{ADMINS}:carol\n" + "".join(f"{name}:x:{uid}:\n" for name, uid in UIDS.items())
SETTINGS = 'users = "same-name"\n'


class Machine:
    """A launcher of all users, on a machine with these accounts, and the agent that speaks to it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pl", dir="/tmp"))
        self.directory.chmod(0o755)
        for name, text in (("passwd", PASSWD), ("group", GROUPS), ("config.toml", SETTINGS)):
            (self.directory / name).write_text(text, encoding="utf-8")
        words = ["launcher", "--system", "--sockets", f"{self.directory}/run", "--agent-user", "root"]
        words += ["--directory", f"{self.directory}/state", "--config", f"{self.directory}/config.toml"]
        words += ["--config-directory", "/nonexistent"]
        mounts = " && ".join(f"mount --bind {self.directory}/{name} /etc/{name}" for name in ("passwd", "group"))
        script = f"{mounts} && exec {shlex.join([*program(), *words])}"
        with (self.directory / "log").open("wb") as log:
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
            self.process = subprocess.Popen(command, stderr=log)
        try:
            wait_until(self._answers, 60.0, "the launcher")
            self.agent = self.connect()
        except BaseException:
            self._end()
            raise

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return not probe.connect_ex(f"{self.directory}/run/launcher.sock")

    def connect(self) -> Agent:
        """One more agent, which has whose for the list."""
        agent = Agent(self.directory / "run")
        agent.listed()
        return agent

    def spawn(self, key: str, user: str, script: bytes, *, home: str = "n1", **fields: Any) -> None:
        """Have a shell's script run for that user of that home."""
        uid = UIDS[user] if home == "n1" else -1
        whose = {"node": "n1", "home": home, "user": user, "uid": uid, "directory": b"/"}
        self.agent.spawn(key, b"/bin/sh", b"-c", script, **whose, **fields)

    def settings(self, text: str) -> None:
        """Other settings, which the launcher has read."""
        (self.directory / "config.toml").write_text(text, encoding="utf-8")
        tries = itertools.count()

        def is_read() -> bool:
            key = f"try{next(tries)}"
            self.spawn(key, "alice", b"id -u", home="n2")
            self.agent.ended(key)
            return (self.directory / "run" / f"{key}.out").read_text() != f"{UIDS['alice']}\n"

        wait_until(is_read, 60.0, "the settings to be read")

    def hang(self) -> None:
        """From here on whoever opens the file of the accounts waits."""
        self._leased = os.open(self.directory / "passwd", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(self._leased, fcntl.F_SETSIG, signal.SIGURG)  # which is ignored
        fcntl.fcntl(self._leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def recover(self) -> None:
        """It can be read again."""
        os.close(self._leased)

    def close(self) -> None:
        """End it."""
        self.agent.close()
        self._end()

    def _end(self) -> None:
        self.process.terminate()
        self.process.wait(60.0)
        shutil.rmtree(self.directory)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    made = Machine()
    try:
        yield made
    finally:
        made.close()


def test_a_database_that_hangs_stops_neither_freezes_nor_kills_nor_exits(machine: Machine) -> None:
    """One task is frozen when its lease runs out, one is killed, one ends by itself; who must be looked up waits, and what was
    said of it meanwhile holds when it starts."""
    agent = machine.agent
    go = machine.directory / "go"
    machine.spawn("frozen", "alice", b"sleep 60")
    machine.spawn("killed", "alice", b"sleep 60")
    machine.spawn("ends", "alice", f"until test -e {go}; do sleep 0.1; done".encode())
    assert all(agent.started(key) for key in ("frozen", "killed", "ends"))
    machine.hang()
    deadline_s = time.clock_gettime(time.CLOCK_BOOTTIME) + 1.0
    agent.send({"do": "lease", "key": "frozen", "deadline_s": deadline_s})
    machine.spawn("waits", "bob", b"id -u")
    machine.spawn("ended meanwhile", "bob", b"sleep 60")
    agent.send({"do": "signal", "key": "ended meanwhile", "signal": 9})
    agent.send({"do": "signal", "key": "killed", "signal": 9})
    assert agent.ended("killed")["signal"] == 9
    go.touch()
    assert agent.ended("ends")["exit_code"] == 0
    while ("frozen", "frozen") not in agent.froze:
        agent.send({"do": "ping"})
        assert agent.next()["is"] == "pong", "nothing of bob's has begun"
    machine.recover()
    ends: dict[str, dict[str, Any]] = {}
    while len(ends) < 2:
        event = agent.next()
        if event["is"] == "ended":
            ends[event["key"]] = event["exit"]
    assert ends["waits"]["exit_code"] == 0
    assert ends["ended meanwhile"]["signal"] == signal.SIGKILL
    assert (machine.directory / "run" / "waits.out").read_text() == f"{UIDS['bob']}\n"
    agent.send({"do": "signal", "key": "frozen", "signal": 9})
    agent.ended("frozen")


@pytest.mark.rule("X1")
def test_a_command_goes_inside_of_tasks_of_its_own_user_alone(machine: Machine) -> None:
    agent = machine.agent
    machine.spawn("outer", "alice", b"cd /usr && echo there; MINE=yes exec sleep 600")
    agent.started("outer")
    out = machine.directory / "run" / "outer.out"
    wait_until(lambda: out.exists() and out.read_text() == "there\n", what="it is there")
    machine.spawn("inner", "alice", b"id -u; pwd", inside="outer")
    assert agent.ended("inner")["exit_code"] == 0
    assert (machine.directory / "run" / "inner.out").read_text() == f"{UIDS['alice']}\n/usr\n"
    script = b"id -u; pwd; test -t 0 && stty size; echo $TERM $MINE"
    machine.spawn("typed", "alice", script, inside="outer", terminal=[33, 77], environment={b"TERM": b"vt100"})
    assert agent.ended("typed")["exit_code"] == 0
    told = (machine.directory / "run" / "typed.out").read_text().split()
    assert told == [str(UIDS["alice"]), "/usr", "33", "77", "vt100", "yes"]
    machine.spawn("other", "bob", b"id -u", inside="outer")
    assert Says.INSIDE_OTHER_USER() in agent.lost("other")["reason"]
    agent.send({"do": "signal", "key": "outer", "signal": signal.SIGKILL})
    assert agent.ended("outer")["signal"] == signal.SIGKILL


def test_tasks_in_a_lane_for_longer_than_an_account_is_remembered(machine: Machine) -> None:
    """Each starts when the one before it has ended. One whose account is looked up again by then is given back."""
    for number in range(6):
        machine.spawn(f"lane{number}", "alice", b"sleep 0.3", after=f"lane{number - 1}")
    gone: dict[str, bool] = {}
    while len(gone) < 6:
        event = machine.agent.next()
        if event["is"] == "ended":
            gone[event["key"]] = event["exit"]["exit_code"] == 0
        elif event["is"] == "expired":
            gone[event["key"]] = event["never_started"]
    assert all(gone.values()), gone
    assert machine.process.poll() is None


def test_no_command_starts_inside_a_frozen_task(machine: Machine) -> None:
    """The launcher would be frozen with it."""
    agent = machine.agent
    machine.spawn("cold", "alice", b"sleep 600", deadline_s=time.clock_gettime(time.CLOCK_BOOTTIME) + 600.0, ts=1.0)
    agent.started("cold")
    agent.send({"do": "lease", "key": "cold", "deadline_s": 1.0, "ts": 2.0})
    wait_until(lambda: any(is_frozen for *_, is_frozen in agent.listed()["leases"]), what="it is frozen")
    machine.spawn("inside cold", "alice", b"true", inside="cold")
    assert agent.ended("inside cold")["exit_code"] != 0
    agent.send({"do": "signal", "key": "cold", "signal": signal.SIGKILL})
    assert agent.ended("cold")["signal"] == signal.SIGKILL


def test_users_of_other_nodes_are_no_administrators_here(machine: Machine) -> None:
    """A name is enough for an account, not for one that this node's agent obeys; who has it here is not hindered."""
    machine.spawn("of n2", "carol", b"id", home="n2")
    assert "peerload-admin" in machine.agent.lost("of n2")["reason"]
    machine.spawn("dave of n2", "dave", b"id", home="n2")
    assert machine.agent.ended("dave of n2")["exit_code"] == 0
    machine.spawn("her own", "carol", b"id")
    assert machine.agent.ended("her own")["exit_code"] == 0


@pytest.mark.rule("X3")
def test_guests_have_as_much_memory_and_network_as_the_policy_gives_them(machine: Machine) -> None:
    """Without --mem, too; and of the network nothing but a loopback interface of their own."""
    machine.settings('users = "guest"\nguest_network = false\nguest_memory_bytes_max = 67108864\n')
    script = b"cut -d: -f1 /proc/net/dev | tail -n +3 | xargs; dd if=/dev/zero of=/dev/null bs=200M count=1"
    machine.spawn("guest", "alice", script, home="n2")
    assert machine.agent.ended("guest")["exit_code"] != 0
    assert (machine.directory / "run" / "guest.out").read_text() == "lo\n"
    machine.spawn(
        "modest", "alice", b"dd if=/dev/zero of=/dev/null bs=200M count=1", home="n2", memory_bytes_max=1 << 30
    )
    assert machine.agent.ended("modest")["exit_code"] == 0, "who says what is needed is held to that"
