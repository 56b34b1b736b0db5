"""From a clean machine to its first task, and from a second one to a task on the first: how long, without downloads.

    .venv/bin/python tests/bench/bench_first_task.py        as root

Each machine is a fresh Debian 12 root file system (made once, see tests/deploy/machine.py) in namespaces of its own: files,
processes, host name, network. What is typed there is what deploy/README.md says; the packages lie there as files. systemd does
not run in them: the two services are started by hand, with the words of their units, and that is counted as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.deploy import machine
from tests.support import wait_until

LIMIT_S = 60.0
UP_S_MAX = 60.0
AGENT = """
import os, pwd, shutil, socket
sock = socket.socket(socket.AF_UNIX)
sock.bind("/run/peerload/agent.sock")
shutil.chown("/run/peerload/agent.sock", "root", "peerload")
os.chmod("/run/peerload/agent.sock", 0o660)
sock.listen(512)
os.dup2(sock.fileno(), 3, inheritable=True) if sock.fileno() != 3 else sock.set_inheritable(True)
user = pwd.getpwnam("peerload")
os.initgroups("peerload", user.pw_gid)
os.setgid(user.pw_gid)
os.setuid(user.pw_uid)
told = {"HOME": "/var/lib/peerload", "LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "agent"}
os.execvpe("peerload", ["peerload", "agent", "--system"], {"PATH": os.environ["PATH"], **told})
"""
"""What peerload.socket and peerload.service do."""
BEGIN = """
mount --make-rprivate / && mount --bind {root} {root} && mount -t proc proc {root}/proc && mount -t tmpfs tmpfs {root}/run &&
mount -t tmpfs tmpfs {root}/tmp && mount --rbind /dev {root}/dev && hostname {name} && ip link set lo up &&
exec chroot {root} sleep infinity
"""


class Machine:
    """One clean machine. ``number``: of its address."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.root = machine.directory() / f"clean-{name}"
        self.namespace = f"plf-{os.getpid()}-{number}"
        self.number = number
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        shutil.rmtree(self.root, ignore_errors=True)
        machine.command("cp", "-a", machine.guest(), self.root)
        trial = self.root / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir()
        shutil.copytree(machine.ROOT / "deploy", trial / "deploy")
        shutil.copytree(machine.wheels(), trial / "wheels")
        shutil.copy(machine.wheel("0.1.0"), trial)
        machine.command("useradd", "--create-home", "alice", root=self.root)
        machine.command("ip", "netns", "add", self.namespace)
        begin = BEGIN.format(root=self.root, name=self.name)
        words = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--pid", "--uts", "--ipc", "--fork"]
        self._holder = subprocess.Popen([*words, "sh", "-c", begin])
        wait_until(lambda: self._first() and Path(f"/proc/{self._first()}/root/trial").is_dir(), UP_S_MAX)
        return self

    def _first(self) -> int:
        """Its process 1."""
        assert self._holder is not None
        for pid in (self._holder.pid, *_children(self._holder.pid)):
            for child in (pid, *_children(pid)):
                if Path(f"/proc/{child}/comm").read_text().strip() == "sleep":
                    return child
        return 0

    def __exit__(self, *_: object) -> None:
        assert self._holder is not None
        first = self._first()
        if first:
            os.kill(first, 9)
        self._holder.wait()
        subprocess.run(["ip", "netns", "delete", self.namespace], check=False)
        shutil.rmtree(self.root, ignore_errors=True)

    def words(self, *words: str, user: str = "root") -> list[str]:
        """How a command is run in it."""
        enter = ["nsenter", "--target", str(self._first()), "--mount", "--pid", "--uts", "--ipc", "--net"]
        enter += [f"--root=/proc/{self._first()}/root"]
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin"
        become = [] if user == "root" else ["runuser", "-u", user, "--"]
        return [*enter, "env", "-i", path, "HOME=/root", "sh", "-c", 'cd / && exec "$@"', "sh", *become, *words]

    def run(self, *words: str, user: str = "root") -> str:
        """Run a command to its end → what it has printed."""
        done = subprocess.run(self.words(*words, user=user), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"on {self.name}, {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def install(self) -> None:
        """What `deploy/install` does where systemd runs the machine: put it there, and start the services."""
        self.run(
            "/trial/deploy/install", "--wheels", "/trial/wheels", "--from", "/trial/peerload-0.1.0-py3-none-any.whl"
        )
        for name, words in (("launcher", ["peerload", "launcher", "--system"]), ("agent", ["python3", "-c", AGENT])):
            with (self.root / f"var/log/peerload-{name}.log").open("wb") as log:
                subprocess.Popen(self.words(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.run("usermod", "-aG", "peerload", "alice")
        looks = self.words("peerload", "nodes", "--json")
        wait_until(
            lambda: subprocess.run(looks, capture_output=True, check=False).returncode == 0, UP_S_MAX, "the agent"
        )


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def connect(one: Machine, other: Machine) -> None:
    """A cable between them."""
    ends = [f"plf{os.getpid() % 100000}{number}" for number in (one.number, other.number)]
    machine.command("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for at, end in zip((one, other), ends, strict=True):
        machine.command("ip", "link", "set", end, "netns", at.namespace)
        for words in (["addr", "add", f"10.99.0.{at.number}/24", "dev", end], ["link", "set", end, "up"]):
            machine.command("ip", "-n", at.namespace, *words)
        machine.command("ip", "-n", at.namespace, "route", "add", "default", "via", f"10.99.0.{other.number}")


def main() -> int:
    """Measure, and print one JSON object → 0 if it is within the limits."""
    with Machine("ws1", 1) as first, Machine("ws2", 2) as second:
        connect(first, second)
        began_s = time.monotonic()
        first.install()
        installed_s = time.monotonic() - began_s
        assert first.run("peerload", "run", "hostname", user="alice") == "ws1\n"
        first_s = time.monotonic() - began_s

        line = json.loads(first.run("peerload", "invite", "--json"))["command"].split()
        began_s = time.monotonic()
        second.install()
        second.run(*line)
        joined_s = time.monotonic() - began_s
        assert second.run("peerload", "run", "--node", "ws1", "-d", "-", "hostname", user="alice") == "ws1\n"
        second_s = time.monotonic() - began_s
    told = {"first_task_s": first_s, "installed_s": installed_s, "second_machine_s": second_s, "joined_s": joined_s}
    sys.stdout.write(json.dumps({name: round(value, 2) for name, value in told.items()} | {"limit_s": LIMIT_S}) + "\n")
    return 0 if max(first_s, second_s) < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
