"""What is tried of the limits that only a machine of its own can hold: its cgroups are those of the second version, and the
launcher's unit is given its own. Then those of another node's tasks: a user of this machine has an agent of his own, which joins."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

from tests.deploy.trial_tools import (
    MORE_CONFIG,
    NODE,
    a_task,
    cgroup,
    count,
    no_more,
    process,
    sh,
    task_pid,
    until,
    value,
)

MIB = 1 << 20
PROCESSES_MAX = 40
GUEST_UIDS = range(61_184, 65_520)
GPU = Path("/dev/nvidia0")
GPU_NUMBERS = (195, 0)
LEASE_S = 30
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.05)
"""
PROBE = """
import os
print(os.getuid(), *(name for name in os.listdir("/dev") if name.startswith("nvidia")))
for number, work in enumerate((
    lambda: os.open("/dev/nvidia0", os.O_RDWR),
    lambda: os.mknod("/tmp/card", 0o20666, os.makedev(195, 0)),
    lambda: open("/sys/fs/cgroup" + open("/proc/self/cgroup").read().strip()[3:] + "/memory.max", "w"),
)):
    try:
        work()
        print("could", number)
    except OSError as error:
        print(error.strerror)
"""


def memory() -> str:
    """Who takes more than was asked for is ended, all of it, and told so; who does not, is not."""
    assert sh("peerload", "run", "--mem", "64M", "python3", "-c", "print(len(bytearray(16 << 20)))", user="alice")
    sh("peerload", "run", "--mem", "64M", "python3", "-c", "bytearray(b'x') * (200 << 20)", user="alice", fails=True)
    ended = json.loads(sh("peerload", "show", "--json", "@", user="alice"))
    assert ended["state"] == "failed", ended
    assert f"out of memory on {NODE}: limit 64.0 MiB" in ended["reason"], ended
    task = a_task("3100", "--mem", "64M")
    held = {name: value(task, name) for name in ("memory.max", "memory.oom.group")}
    assert held == {"memory.max": str(64 * MIB), "memory.oom.group": "1"}, held
    no_more("3100")
    return f"{ended['reason']}; exit code {ended['exit_code']}"


def processes() -> str:
    """One that makes them without end has as many as the machine allows, and the others do not notice."""
    MORE_CONFIG.write_text(f"task_processes_max = {PROCESSES_MAX}\n")
    time.sleep(2.0)  # the launcher looks at its policy each second, when it has something to start
    bomb = sh("peerload", "submit", "python3", "-c", BOMB, "bomb-3101", user="alice").strip()
    until(lambda: process("bomb-3101$"), "the bomb to run")
    where = cgroup(process("bomb-3101$"))
    assert (where / "pids.max").read_text().strip() == str(PROCESSES_MAX)
    until(lambda: count(where / "pids.events", "max") > 0, "it to be refused one")
    there = int((where / "pids.current").read_text())
    assert there <= PROCESSES_MAX, there
    began_s = time.monotonic()
    assert sh("peerload", "run", "id", "-un", user="alice") == "alice\n"
    took_s = time.monotonic() - began_s
    sh("peerload", "cancel", "--force", bomb, user="alice")
    until(lambda: not process("bomb-3101$"), "all of it to end")
    MORE_CONFIG.unlink()
    return f"held at {there} of {PROCESSES_MAX}; meanwhile another task took {took_s:.1f} s"


def shares() -> str:
    """A task's share of the processors is as it has asked."""
    weights = {}
    for cpus in (1, 2):
        task = a_task(f"310{1 + cpus}", "-c", str(cpus))
        weights[cpus] = value(task, "cpu.weight")
        no_more(f"310{1 + cpus}")
    assert weights == {1: "100", 2: "200"}, weights
    return f"cpu.weight by processors: {weights}"


# -- tasks of another node ---------------------------------------------------------------------------------------------


def bob(*words: str) -> str:
    """`peerload WORDS` as bob, who has an agent of his own and may not use the machine's."""
    places = {"HOME": "/home/bob", "XDG_RUNTIME_DIR": "/home/bob/run", "XDG_CONFIG_HOME": "/home/bob/config"}
    places |= {"XDG_STATE_HOME": "/home/bob/state"}
    return sh("env", "-u", "PEERLOAD_SOCKET", *(f"{k}={v}" for k, v in places.items()), "peerload", *words, user="bob")


def joined() -> str:
    """A second node joins with one line that root prints, and has a task run here."""
    for place in ("run", "config", "state"):
        sh("install", "-d", "-m", "700", f"/home/bob/{place}", user="bob")
    line = sh("peerload", "invite", "--listen", "127.0.0.1:0").split()
    assert line[:2] == ["peerload", "join"], line
    began_s = time.monotonic()
    bob("join", "--node", "bobs", "--listen", "127.0.0.1:0", line[2])
    assert bob("run", "--node", NODE, "echo", "from bobs") == "from bobs\n"
    return f"joined, and ran a task here, within {time.monotonic() - began_s:.1f} s"


def guest() -> str:
    """It is nobody known: a uid of its own, no card that it was not given, and its limits hold as those of others do."""
    os.mknod(GPU, 0o666 | stat.S_IFCHR, os.makedev(*GPU_NUMBERS))
    GPU.chmod(0o666)
    assert "nvidia0" in sh("ls", "/dev", user="alice")
    uid, *rest = bob("run", "--node", NODE, "python3", "-c", PROBE).splitlines()
    assert int(uid) in GUEST_UIDS, (uid, rest)
    assert not [line for line in rest if line.startswith("could")], rest
    assert rest[0] == "No such file or directory", rest
    task_id = bob("submit", "--node", NODE, "--mem", "64M", "sleep", "3201").strip()
    until(lambda: task_pid("3201"), "the guest's task to run")
    task = task_pid("3201")
    held = [value(task, name) for name in ("memory.max", "pids.max", "cpu.weight")]
    assert held == [str(64 * MIB), "512", "100"], held
    bob("cancel", task_id)
    until(lambda: not task_pid("3201"), "the guest's task to end")
    return f"uid {uid}; the card, a card of its own, its cgroup: {', '.join(rest)}"


def lease() -> str:
    """Its home stands still: at the end of its lease it is frozen, and goes on when home is back."""
    task_id = bob("submit", "--node", NODE, "--lease", f"{LEASE_S}s", "sleep", "3202").strip()
    until(lambda: task_pid("3202"), "the task to run")
    task = task_pid("3202")
    where = cgroup(task)
    agent = int(sh("/opt/peerload/current/bin/python", "-c", ASK, user="bob"))
    assert (where / "cgroup.freeze").read_text() == "0\n"
    began_s = time.monotonic()
    os.kill(agent, 19)
    try:
        until(lambda: (where / "cgroup.freeze").read_text() == "1\n", "the task to be frozen")
        took_s = time.monotonic() - began_s
        until(lambda: count(where / "cgroup.events", "frozen") == 1, "all of it to stand still")
        assert task_pid("3202") == task
    finally:
        os.kill(agent, 18)
    until(lambda: count(where / "cgroup.events", "frozen") == 0, "it to go on")
    assert task_pid("3202") == task
    bob("cancel", task_id)
    until(lambda: not task_pid("3202"), "it to end")
    return f"frozen {took_s:.1f} s after its home stood still, for a lease of {LEASE_S} s; the same process went on"


ASK = """
from peerload.client.connection import AgentConnection
with AgentConnection("/home/bob/run/peerload/agent.sock", timeout_s=60.0) as client:
    print(client.call("info")["pid"])
"""


def left() -> str:
    """The other node leaves, and nothing of it runs on."""
    GPU.unlink(missing_ok=True)
    bob("leave")
    bob("down", "--all")
    until(lambda: not process("/home/bob/"), "bob's agent to end")
    return "the node is gone"
